"""Plots of one trace: staleness, the workers' timeline, the queue; with theory drawn over them.

The functions draw on existing axes, in a notebook or in ``figures/``; none of them simulates.
`compare` draws several runs, `overview` the figure of `Trace.plot`; `appearance` sets the width
of all figures inside. `asyncsim.drawing.look` has the style of the
paper figures.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from asyncsim.base.console import counted, number_text, over_seeds
from asyncsim.base.errors import (
    InputError,
    require_choice,
    require_count,
    require_list,
    require_positive,
)
from asyncsim.drawing import layout, look
from asyncsim.drawing.curves import (
    draw_curves,
    evaluation_curve,
    loss_axis,
    runs_by_line,
    scale_losses,
)
from asyncsim.drawing.layout import legend_inside, say_inside
from asyncsim.drawing.look import BLACK, BLUE, PHASES, SKY, appearance
from asyncsim.replays.run import Run
from asyncsim.study.columns import axis_of
from asyncsim.theory import StalenessTheory, queue_theory, staleness_theory
from asyncsim.theory.queueing import alike
from asyncsim.traces.columns import ACCEPTED, GOSSIP
from asyncsim.traces.phases import phases
from asyncsim.traces.trace import Trace
from asyncsim.traces.trace_summary import counted_messages, warm_up_of

#: Bars of a histogram and bins of a curve, readable at paper size.
_BARS = 50
_BINS = 120
#: Labels of the phases in a timeline; services last, because their edges overlap their neighbours.
_DOING = {
    "computing": "computes",
    "sending": "sends",
    "waiting": "waits",
    "held": "held by the policy",
    "returning": "reply travels",
    "served": "served",
    "away": "is away",
}
#: A histogram shows all but this share of the commits at its far end.
_TAIL = 0.003


def compare(
    runs: Run | Sequence[Run],
    measure: str = "train_loss",
    against: str = "time",
    labels: Sequence[str] | None = None,
    title: str | None = None,
    width: float | None = None,
) -> Figure:
    """Draw a measure of runs at their evaluations on the same axes: mean and range over the seeds.

    Runs with one label that differ only in their seeds form a line. Any further difference makes
    separate lines, whose labels name the differing arguments.

    Parameters
    ----------
    runs : Run or list of Run
    measure : str
        A column of every run's `Run.evaluations`.
    against : {"time", "step"}
        Simulated time, or commits over workers.
    labels : list of str, optional
        One for each run; by default the names of their methods.
    title : str, optional
        By default the problem. The number of seeds follows.
    width : float, optional
        Inches of the figure; see `appearance`.

    Raises
    ------
    InputError
        There is no run, a run lacks the measure, or there are more or fewer labels than runs.
    """
    all_runs = require_list("runs", [runs] if isinstance(runs, Run) else runs)
    for run in all_runs:
        if not isinstance(run, Run):
            raise InputError(
                f"runs: {run!r} is no Run; give what asyncsim.replay returns, or Run.load"
            )
        drawn = [name for name in run.evaluations if name.startswith(("train_", "test_", "reward"))]
        require_choice("measure", measure, drawn)
    require_choice("against", against, ("time", "step"))
    names = (
        [str(run.config.get("method", "run")) for run in all_runs]
        if labels is None
        else list(labels)
    )
    if len(names) != len(all_runs):
        raise InputError(
            f"labels: {len(names)} for {counted(len(all_runs), 'run')}; give one for each"
        )
    groups = runs_by_line(list(map(str, names)), all_runs)
    with look.style(), appearance(width):
        figure, (axes,) = look.new_figure(look.SINGLE, 2.8)
        curves = {
            name: evaluation_curve(
                group, [run.evaluations["worker_step"] for run in group], measure
            )
            for name, group in groups.items()
        }
        if measure.endswith("loss"):
            scale_losses(axes, *loss_axis(curves.values()))
        looks = look.looks(groups) if labels is None else look.category_looks(groups)
        draw_curves(axes, curves, looks, against)
        axes.set_ylabel(axis_of(measure))
        layout.legend_below(figure, *axes.get_legend_handles_labels(), 2)
        problems = dict.fromkeys(
            str(run.config["problem"]) for run in all_runs if "problem" in run.config
        )
        sizes = [len(group) for group in groups.values()]
        first = ", ".join(problems) if title is None else title
        layout.title(figure, f"{first}; {over_seeds(max(sizes), fewest=min(sizes))}")
    return figure


def overview(trace: Trace) -> Figure:
    """Draw the staleness histogram and the first visits of a trace side by side: `Trace.plot`."""
    with look.style():
        figure, (histogram_axes, timeline_axes) = look.new_figure(look.DOUBLE, 2.8, 2)
        staleness_histogram(histogram_axes, trace)
        timeline(timeline_axes, trace, 12)
    return figure


def staleness_histogram(
    axes: Axes, traces: Trace | Sequence[Trace], warm_up: int | None = None
) -> None:
    """Draw the distribution of staleness, with the closed form over it where its assumptions hold.

    Elsewhere the conserved mean, with the queue-free standard deviation if that is known, or the
    bounds of the mean. Without a cluster only the trace's mean is shown. If the largest staleness
    is out of view, the legend names it and the axis counts the commits beyond its end.

    ``traces``: several traces of one cluster, with different seeds, are pooled. ``warm_up``:
    commits dropped at the start of each; by default as in `Trace.summary`.
    """
    traces = [traces] if not isinstance(traces, Sequence) else traces
    per_trace = [
        counted_messages(trace, warm_up_of(trace, warm_up))["staleness"].to_numpy()
        for trace in traces
    ]
    staleness = np.concatenate(per_trace)
    cluster = traces[0].cluster
    computations = min(len(trace.accepted) / trace.workers for trace in traces)
    theory = None if cluster is None else staleness_theory(cluster, computations)

    last = _last_shown(staleness, theory)
    width = max(1, round(last / _BARS))
    edges = np.arange(-0.5, last + width + 0.5, width)
    shares = np.histogram(staleness, edges)[0] / (len(staleness) * width)
    # Of each trace, as a study's table has them.
    mean, std = (float(np.mean([f(values) for values in per_trace])) for f in (np.mean, np.std))
    measured = f"{_origin(traces[0])}: mean {number_text(mean)}, std {number_text(std)}"
    if staleness.max() > edges[-1]:
        measured += f", most {staleness.max()}"
    axes.stairs(shares, edges, fill=True, color=SKY, alpha=0.6, label=measured)
    if theory is not None and theory.mean_bounds[1] < np.inf:
        starved = any(trace.frame["worker"].nunique() < trace.workers for trace in traces)
        _draw_staleness_theory(axes, theory, traces[0].workers, starved, last, 1.05 * shares.max())
    axes.set_xlim(-0.5 - 0.02 * last, edges[-1] + 0.02 * last)
    axes.set_xlabel("staleness (versions)")
    axes.set_ylabel("share of commits per version" if width > 1 else "share of commits")
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True, steps=[1, 2, 5, 10]))
    axes.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10]))
    legend_inside(axes)


def timeline(
    axes: Axes, trace: Trace, workers: int | Iterable[int] = 20, visits: float = 3
) -> None:
    """Draw the phases of workers during their first ``visits`` visits: computing, sending, waiting,
    served.

    ``workers``: their numbers, or how many: the first, or spread from first to last if workers
    differ. A short stroke marks each commit, a cross each discarded or cancelled message. Jobs
    without a commit are drawn as well: a worker that is never served waits to the end. In a
    prescribed trace the jobs of one worker may overlap.
    """
    drawn = _timeline_workers(trace, workers)
    require_positive("visits", visits)
    place = {worker: row for row, worker in enumerate(drawn)}
    last = min(len(trace), max(1, round(visits * trace.workers))) - 1
    end = float(trace.frame["commit_time"].iloc[last])
    doing = phases(trace, drawn)
    send_times_known = not trace.frame["send_time"].isna().all()
    labels = {**_DOING, "computing": "computes" if send_times_known else "computes, sends"}
    for phase, label in labels.items():
        # With an edge: most services are too short for their own width to be seen.
        edge = 0.7 if phase == "served" else 0
        _bars(axes, place, doing[doing["phase"] == phase], end, PHASES[phase], label, edge)
    ended = trace.frame[trace.frame["worker"].isin(drawn) & (trace.frame["commit_time"] <= end)]
    accepted = ended[ended["outcome"].isin(ACCEPTED)]
    row = accepted["worker"].map(place)
    axes.vlines(
        accepted["commit_time"], row - 0.18, row + 0.18, color=BLACK, linewidth=0.9, zorder=3
    )
    axes.plot([], [], color=BLACK, marker="|", linestyle="none", label="commits")
    lost = ended.drop(accepted.index)
    if len(lost):
        style: dict[str, Any] = {
            "color": BLACK,
            "marker": "x",
            "markersize": 3,
            "linestyle": "none",
            "zorder": 3,
        }
        axes.plot(lost["commit_time"], lost["worker"].map(place), **style, label="lost")
    axes.set_xlim(0, end)
    count = len(drawn)
    axes.set_ylim(count - 0.4, -0.6)
    ticks = range(0, count, 1 if count < 6 else 2 if count < 12 else 5)
    axes.set_yticks(ticks, [str(drawn[row]) for row in ticks])
    axes.set_xlabel(_time_label(trace))
    selection = f"first {count}" if drawn == list(range(count)) else str(count)
    axes.set_ylabel(
        "worker" if count == trace.workers else f"worker ({selection} of {trace.workers})"
    )
    handles, _ = axes.get_legend_handles_labels()
    axes.legend(
        loc="lower left",
        bbox_to_anchor=(0, 1),
        ncols=len(handles) if len(handles) < 5 else 3,
        borderaxespad=0,
        columnspacing=0.9,
        handlelength=1.1,
        handletextpad=0.4,
    )


def queue_length(axes: Axes, trace: Trace) -> None:
    """Draw the number of visits at the server, waiting or in service, over time, with the theory's
    mean.

    A long trace is drawn as means over short intervals. A prescribed trace has no server. With
    gossip, the messages in flight.
    """
    axes.set_xlabel(_time_label(trace))
    axes.set_ylabel("messages in flight" if trace.protocol == GOSSIP else "visits at the server")
    steps = trace.queue()
    time, in_system = steps["time"].to_numpy(), steps["in_system"].to_numpy()
    if trace.protocol == "prescribed" or in_system.max() == 0:
        why = (
            "prescribed: no server"
            if trace.protocol == "prescribed"
            else "the server takes no time: no queue"
        )
        why = "exchanges in pairs: no messages" if trace.protocol == GOSSIP else why
        say_inside(axes, why)
        axes.set(xlim=(0, trace.frame["commit_time"].iloc[-1]), ylim=(0, 1), yticks=[])
        return
    mean = float(in_system[:-1] @ np.diff(time)) / time[-1]
    top = _draw_steps(axes, time, in_system, _origin(trace), f"mean {number_text(mean)}")
    expected = None if trace.cluster is None else queue_theory(trace.cluster)
    if expected is not None:
        bound = "" if expected.exact else "at least "
        label = f"long-run {expected.name}: mean {bound}{number_text(expected.in_system)}"
        axes.axhline(expected.in_system, color=BLACK, linestyle="--", linewidth=1, label=label)
    axes.set_xlim(0, time[-1])
    highest = max(top, 0 if expected is None else expected.in_system) * 1.05
    axes.set_ylim(0, highest)
    # Visits are whole, but their means may all lie between two numbers.
    axes.yaxis.set_major_locator(MaxNLocator(5, integer=highest >= 3, steps=[1, 2, 5, 10]))
    legend_inside(axes)


def _last_shown(staleness: np.ndarray, theory: StalenessTheory | None) -> int:
    """Choose the largest staleness in view: all but a thin tail, and the theory's mean with some
    room.
    """
    last = float(np.quantile(staleness, 1 - _TAIL))
    if theory is not None and theory.mean_bounds[1] < np.inf:
        last = max(last, theory.mean_bounds[1] + 1.2 * (theory.std or 0.0))
    return max(3, round(1.05 * last))


def _draw_staleness_theory(
    axes: Axes, theory: StalenessTheory, workers: int, starved: bool, last: int, top: float
) -> None:
    if theory.probability is not None:
        k = np.arange(last + 1)
        probability = theory.probability(k)
        possible = probability > 0
        marker = "o" if possible.sum() == 1 else ""
        label = f"long-run {theory.law}: mean {theory.mean:g}, std {number_text(theory.std or 0.0)}"
        axes.plot(
            k[possible],
            probability[possible],
            color=BLACK,
            linewidth=1,
            marker=marker,
            markersize=3,
            label=label,
        )
        return
    if theory.mean is None:
        low, high = theory.mean_bounds
        label = f"long-run bounds of the mean: {low:g} to {high:g}"
        axes.vlines([low, high], 0, top, color=BLACK, linewidth=1, linestyle="--", label=label)
        return
    name = (
        "n = " if theory.mean == workers else "n \u2212 1 = " if theory.mean == workers - 1 else ""
    )
    label = f"long-run conserved mean: {name}{round(theory.mean, 1):g}"
    if starved:
        label += "\nwith workers that never commit"
    axes.vlines(theory.mean, 0, top, color=BLACK, linewidth=1, label=label)
    if theory.std is not None:
        law = f"{theory.law}{'' if theory.queue_free else ', no queue'}"
        # A bar across the mean, and not an area: its height would look like a density.
        bar = axes.errorbar(
            theory.mean, 0.5 * top, xerr=theory.std, color=BLACK, linewidth=1, capsize=3
        )
        bar.set_label(f"\u00b11 std, long-run {law}: std {number_text(theory.std)}")


def _origin(trace: Trace) -> str:
    """Name the origin of a trace: prescribed, recorded or simulated."""
    if trace.protocol == "prescribed":
        return "prescribed"
    return "recorded" if trace.cluster is None else "simulated"


def _time_label(trace: Trace) -> str:
    """Return the label of the time axis; the clock of a prescribed trace is called simulated, as in
    all figures.
    """
    return "recorded time (s)" if _origin(trace) == "recorded" else "simulated time (s)"


def _draw_steps(
    axes: Axes, time: np.ndarray, in_system: np.ndarray, origin: str, label: str
) -> float:
    """Draw a step function, a long one as means over intervals; return the largest value drawn."""
    label += f", most {in_system.max()}"
    if len(time) <= 2 * _BINS:
        axes.step(
            time, in_system, where="post", color=BLUE, linewidth=0.8, label=f"{origin}: {label}"
        )
        return float(in_system.max())
    edges = np.linspace(0.0, time[-1], _BINS + 1)
    area = np.concatenate([[0.0], np.cumsum(in_system[:-1] * np.diff(time))])
    means = np.diff(np.interp(edges, time, area)) / np.diff(edges)
    label = f"{origin}, means over {edges[1]:.2g} s: {label}"
    axes.plot((edges[1:] + edges[:-1]) / 2, means, color=BLUE, linewidth=0.8, label=label)
    return float(means.max())


def _timeline_workers(trace: Trace, workers: int | Iterable[int]) -> list[int]:
    """Choose the workers of a timeline, in its order."""
    if isinstance(workers, Iterable) and not isinstance(workers, str):
        chosen = [
            require_count(f"workers[{i}]", worker, minimum=0) for i, worker in enumerate(workers)
        ]
        if not chosen or len(set(chosen)) < len(chosen) or max(chosen) >= trace.workers:
            raise InputError(
                f"workers = {chosen}: must be some of 0 to {trace.workers - 1}, each once"
            )
        return chosen
    count = min(require_count("workers", workers), trace.workers)
    cluster = trace.cluster
    if cluster is None or alike(cluster):
        return list(range(count))
    return [round(worker) for worker in np.linspace(0, trace.workers - 1, count)]


def _bars(
    axes: Axes,
    place: Mapping[int, int],
    intervals: Any,
    until: float,
    color: str,
    label: str,
    edge: float = 0,
) -> None:
    """Draw the intervals that begin before ``until``, each in the row of its worker."""
    intervals = intervals[intervals["begin"] < until]
    if intervals.empty:
        return
    row = intervals["worker"].map(place).to_numpy()
    begin, end = intervals["begin"].to_numpy(), intervals["end"].to_numpy()
    low, high = row - 0.4, row + 0.4
    corners = np.stack([begin, low, begin, high, end, high, end, low], axis=-1).reshape(-1, 4, 2)
    style: dict[str, Any] = {
        "facecolor": color,
        "edgecolor": color,
        "linewidth": edge,
        "label": label,
    }
    axes.add_collection(PolyCollection(list(corners), **style))
