"""Curves of runs: quantities binned and averaged over the seeds, and their lines, ranges and limits
on axes.
"""

import itertools
import types
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from numpy.typing import ArrayLike

from asyncsim.base.files import flat
from asyncsim.drawing import layout, look
from asyncsim.replays.run import Run

#: Points of a curve, each a mean over at least one worker step in all but the shortest runs.
_BINS = 100


class Curve(NamedTuple):
    """A quantity of one method, binned over its runs: shape ``[bins]``; nan where no run has a
    value.

    ``low`` and ``high``: minimum and maximum over the seeds. ``mean``: over the seeds that have not
    diverged by then. ``ends``: time, step and last value of the diverged runs.
    """

    time: np.ndarray
    step: np.ndarray
    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray
    ends: list[tuple[float, float, float]]


def bins(commits: int, workers: int) -> int:
    """Return the number of points of a trace's curve."""
    return min(_BINS, max(10, commits // workers), commits)


def trace_length(runs: Sequence[Run]) -> int:
    """Return the number of commits in the runs' traces; a diverged run has fewer."""
    return max(int(run.config.get("commits", len(run.commits))) for run in runs)


#: Entries of `Run.config` in which the seeds of a line differ; after discards and failures, in the
#: number of commits, too.
_OF_SEEDS = ("seed", "trace_seed", "commits")
#: Tables of `Run.config` that have other entries where another entry differs.
_ENTRIES_OF = {"hyperparameters": "method", "problem_config": "problem"}
#: The longest value of an argument in a label (characters).
_LONGEST_VALUE = 40


def runs_by_line(names: Sequence[str], runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Group runs that differ only in their seeds; return the groups by label.

    Runs with one name and different arguments get the arguments in brackets: ``gem(kappa=2)``.
    """
    lines: dict[str, list[Run]] = {}
    for name in dict.fromkeys(names):
        members = [run for label, run in zip(names, runs, strict=True) if label == name]
        arguments = _arguments(members, _OF_SEEDS)
        seeds = [str([run.config.get(name) for name in _OF_SEEDS[:2]]) for run in members]
        if len(set(zip(arguments, seeds, strict=True))) < len(members):  # the same seed, for longer
            arguments = _arguments(members, _OF_SEEDS[:2])
        repeats: Counter[tuple[str, str]] = Counter()
        for run, argument, seed in zip(members, arguments, seeds, strict=True):
            repeats[argument, seed] += 1
            repeat = f"run={repeats[argument, seed]}" if repeats[argument, seed] > 1 else ""
            inside = ", ".join(filter(None, [argument, repeat]))
            lines.setdefault(f"{name}({inside})" if inside else name, []).append(run)
    return lines


def _arguments(runs: Sequence[Run], ignored: Sequence[str]) -> list[str]:
    """Format, for each run, the entries of its configuration in which the runs differ."""
    texts = [{name: str(value) for name, value in flat(run.config)} for run in runs]
    table = pd.DataFrame(texts, range(len(runs))).fillna("None")
    differing = [name for name in table if table[name].nunique() > 1 and name not in ignored]
    named = [name for name in differing if _ENTRIES_OF.get(name.partition(".")[0]) not in differing]
    return [
        ", ".join(f"{name.rpartition('.')[2]}={_cut(table[name][row])}" for name in named)
        for row in table.index
    ]


def _cut(text: str) -> str:
    """Shorten a text to the length of a label; a checksum replaces the end."""
    if len(text) <= _LONGEST_VALUE:
        return text
    return f"{text[:_LONGEST_VALUE]}... {zlib.crc32(text.encode()):08x}"


def curve_of(
    runs: Sequence[Run],
    quantity: Callable[[pd.DataFrame], np.ndarray],
    average: str,
    workers: int,
    bin_steps: float | None = None,
) -> Curve:
    """Bin a quantity by commits, and average the bins over the runs of one method.

    ``runs``: one per seed. ``quantity``: maps `Run.commits` to one value per commit; non-finite
    values are dropped. ``average``: {"mean", "median"}, over the commits of a bin. ``workers``:
    commits per worker step. ``bin_steps``: worker steps per bin (the last bin may be shorter); by
    default the curve has `bins` points.
    """
    tables = [
        run.commits[["commit", "commit_time"]].assign(value=quantity(run.commits)) for run in runs
    ]
    return _curve(runs, tables, average, workers, bin_steps)


def diagnostic_curve(
    runs: Sequence[Run],
    quantity: str,
    workers: int,
    bin_steps: float | None = None,
) -> Curve:
    """Bin a diagnostic's medians over all parameters by commits, and average the bins over the
    runs of one method.

    ``runs``, ``workers``, ``bin_steps``: as in `curve_of`. ``quantity``: as in `Run.diagnostics`.
    """
    tables = []
    for run in runs:
        table = run.diagnostics
        chosen = (table["quantity"] == quantity) & (table["tensor"] == "")
        chosen &= table["quantile"] == 0.5
        tables.append(table.loc[chosen, ["commit", "commit_time", "value"]])
    return _curve(runs, tables, "mean", workers, bin_steps)


def evaluation_curve(
    runs: Sequence[Run], steps: Sequence[ArrayLike] | None = None, measure: str = "train_loss"
) -> Curve:
    """Average a quantity over one method's runs at their evaluations; non-finite values are
    missing.

    ``runs``: one per seed. ``steps``: the step of each evaluation, run by run; by default its
    commit. ``measure``: a column of `Run.evaluations`, or ``"final_loss"``, the mean minibatch loss
    since the previous evaluation.
    """
    named = [run.evaluations["commit"] for run in runs] if steps is None else steps
    tables = []
    for run, step in zip(runs, named, strict=True):
        if measure == "final_loss":
            ends = run.evaluations["commit"].to_numpy()
            with np.errstate(over="ignore"):
                means = (
                    run.commits["loss"]
                    .groupby(np.searchsorted(ends, run.commits["commit"], "right"))
                    .mean()
                )
            values = means.reindex(range(len(ends)))
        else:
            values = run.evaluations[measure]
        tables.append(
            run.evaluations[["commit_time"]].assign(
                step=step, loss=values.where(np.isfinite(values))
            )
        )
    ends = [
        (
            float(table["commit_time"].iloc[-1]),
            float(table["step"].iloc[-1]),
            float(table["loss"].dropna().iloc[-1]),
        )
        for run, table in zip(runs, tables, strict=True)
        if run.diverged_at is not None
    ]
    time, step, losses = (
        pd.concat([table[name] for table in tables], axis=1)
        for name in ("commit_time", "step", "loss")
    )
    # After a seed diverges, the mean time of the remaining seeds may drop; a line must not go back.
    time, step = (np.maximum.accumulate(values.mean(axis=1)) for values in (time, step))
    return curve_over_seeds(time, step, losses, ends)


def curve_over_seeds(
    time: ArrayLike, step: ArrayLike, values: pd.DataFrame, ends: list[tuple[float, float, float]]
) -> Curve:
    """Build a curve from ``values`` with one column per seed, NaN where the seed has no value."""
    with np.errstate(over="ignore"):  # a mean of losses near the largest number is infinite
        mean = values.mean(axis=1).to_numpy()
    low, high = values.min(axis=1).to_numpy(), values.max(axis=1).to_numpy()
    return Curve(np.asarray(time), np.asarray(step), mean, low, high, ends)


def _curve(
    runs: Sequence[Run],
    tables: Sequence[pd.DataFrame],
    average: str,
    workers: int,
    bin_steps: float | None,
) -> Curve:
    commits = trace_length(runs)
    if bin_steps is None:
        edges = np.linspace(0, commits, bins(commits, workers) + 1)
    else:
        edges = np.append(np.arange(0, commits, bin_steps * workers), commits)
    binned = [_binned(table, average, edges) for table in tables]
    times, values = (
        pd.concat([table[name] for table in binned], axis=1) for name in ("time", "value")
    )
    ends = [
        _end(run, table, workers)
        for run, table in zip(runs, binned, strict=True)
        if run.diverged_at is not None
    ]
    return curve_over_seeds(
        times.mean(axis=1), (edges[1:] + edges[:-1]) / 2 / workers, values, ends
    )


def _binned(table: pd.DataFrame, average: str, edges: np.ndarray) -> pd.DataFrame:
    """Return ``time`` and ``value`` of each bin; nan in bins after the end of a diverged run."""
    values = table["value"].to_numpy(np.float64)
    finite = pd.DataFrame(
        {
            "time": table["commit_time"].to_numpy(),
            "value": np.where(np.isfinite(values), values, np.nan),
        }
    )
    place = np.searchsorted(edges, table["commit"].to_numpy(), side="right") - 1
    with np.errstate(over="ignore"):  # a mean of losses near the largest number is infinite
        return (
            finite.groupby(place)
            .agg({"time": "mean", "value": average})
            .reindex(range(len(edges) - 1))
        )


def _end(run: Run, binned: pd.DataFrame, workers: int) -> tuple[float, float, float]:
    """Return time, step and last finite value of a diverged run; infinity if none was finite."""
    finite = binned["value"].dropna()
    time = float(run.commits["commit_time"].iloc[-1])
    return time, len(run.commits) / workers, float(finite.iloc[-1]) if len(finite) else np.inf


#: The axis ends at this multiple of the first loss: a diverging run would flatten all others.
_CUT = 100.0
#: The same multiple on a linear axis, of the first loss or of the depth below zero.
_LINEAR_CUT = 3.0
#: A logarithmic axis shows bands down to this part of the lowest mean: one collapsed seed would
#: flatten the rest.
_DEPTH = 1e-3
#: The smallest and the largest value on a logarithmic axis: its ticks lie outside and must be
#: finite, too.
_SMALLEST, _LARGEST = 1e-280, 1e280
#: Labels of the horizontal axis.
ALONG = {"time": "simulated time (s)", "step": "worker steps (commits per worker)"}


def draw_curves(
    axes: Axes, curves: Mapping[str, Curve], looks: Mapping[str, look.Look], against: str
) -> None:
    """Draw mean and range of each curve, and a cross where a run diverged.

    ``axes``: with the final limits of its vertical axis: a cross beyond them is drawn at their
    edge. ``looks``: by curve. ``against``: {"time", "step"}, the horizontal axis.
    """
    for name, curve in curves.items():
        draw_curve(axes, curve, looks[name], against)
    axes.set_xlim(0, None)
    axis_along(axes, against)


def scale_losses(axes: Axes, scale: str, low: float, high: float) -> None:
    """Set scale and limits of the vertical axis, as `loss_axis` returns them."""
    axes.set_yscale(scale)
    axes.set_ylim(low, high)
    if scale == "log":
        look.plain_logs(axes.yaxis)


def axis_along(axes: Any, against: str) -> None:
    """Label the horizontal axis (a second one as well), and put ticks at whole worker steps
    only.
    """
    axes.set_xlabel(ALONG[against])
    if against == "step":
        layout.whole_ticks(axes.xaxis, "auto")


def draw_curve(
    axes: Axes,
    curve: Curve,
    appearance: look.Look,
    against: str,
    marks: Mapping[str, Any] | None = None,
) -> None:
    """Draw mean and range of a curve, and a cross where a run diverged.

    ``axes``, ``against``: as in `draw_curves`. ``marks``: matplotlib's marker arguments.
    """
    # Empty bins would break the line.
    finite = np.isfinite(curve.mean)
    x = _along(curve, against)[finite]
    axes.fill_between(
        x, curve.low[finite], curve.high[finite], color=appearance.color, alpha=0.2, linewidth=0
    )
    if marks is None:
        marks = {"marker": "." if len(x) == 1 else ""}  # a line of one point is none
    axes.plot(
        x,
        curve.mean[finite],
        **appearance.style,
        **marks,
    )
    for time, step, value in curve.ends:
        end, height = time if against == "time" else step, np.clip(value, *axes.get_ylim())
        style = {"color": appearance.color, "clip_on": False, "zorder": 4, **layout.DIVERGED}
        axes.plot(end, height, **style)


def draw_band(axes: Axes, table: pd.DataFrame, color: str, **line: Any) -> None:
    """Draw a table's first column as a line and the range from its ``min`` to its ``max`` as a
    band.
    """
    axes.fill_between(table.index, table["min"], table["max"], color=color, alpha=0.2, linewidth=0)
    axes.plot(table.index, table.iloc[:, 0], color=color, **line)


def draw_ranges(
    axes: Axes, table: pd.DataFrame, x: str, y: str, average: str = "mean", **line: Any
) -> None:
    """Draw the average of a column over the rows of equal ``x`` as a line, their range as a
    band.
    """
    draw_band(axes, table.groupby(x)[y].agg([average, "min", "max"]).dropna(), **line)


def draw_lines(
    axes: Axes,
    runs: pd.DataFrame,
    x: str,
    y: str,
    looks: Mapping[Any, look.Look],
    by: str = "method",
    average: str = "mean",
    published: Mapping[Any, pd.Series] = types.MappingProxyType({}),
) -> None:
    """Draw a column of runs against another: for each value of the column ``by`` its look's line
    with its range over the seeds, and a cross at the top where a run diverged.

    ``average``: {"mean", "median"}. ``published``: values by ``x``, as hollow grey points.
    """
    markers = itertools.cycle(look.MARKERS)
    for (name, appearance), marker in zip(looks.items(), markers, strict=False):
        rows = runs[runs[by] == name]
        draw_ranges(axes, rows, x, y, average, marker=marker, markersize=3, **appearance.style)
        if name in published:
            style = {**layout.PUBLISHED, "linestyle": "none", "marker": marker, "markersize": 5}
            axes.plot(published[name].index, published[name], **style)
        for place in rows.loc[rows["status"] == "diverged", x].unique():
            cross = {"color": appearance.color, "clip_on": False, **layout.DIVERGED}
            axes.plot(place, 1, transform=axes.get_xaxis_transform(), **cross)


def draw_points(
    axes: Axes, x: Any, y: Any, low: Any, high: Any, horizontal: bool = False, **style: Any
) -> None:
    """Draw values as points with lines from ``low`` to ``high``, along y unless ``horizontal``."""
    values = np.asarray(x if horizontal else y, float)
    ways = np.nan_to_num(np.clip([values - low, high - values], 0, None))
    style = {"marker": "o", "linestyle": "", "markersize": 3.5, "elinewidth": 0.8, **style}
    axes.errorbar(x, y, **{"xerr" if horizontal else "yerr": ways}, **style)


def draw_target(axes: Axes, options: Mapping[str, Any], quantity: str = "train_loss") -> None:
    """Draw a study's target, if it is a value of ``quantity`` and within the axes."""
    target, (low, high) = options["target"], axes.get_ylim()
    if options.get("target_of") in (None, quantity) and low <= target <= high:
        axes.axhline(target, color=look.BLACK, linewidth=0.6, zorder=0, label="target")


def loss_axis(curves: Iterable[Curve]) -> tuple[str, float, float]:
    """Choose scale and limits for losses: logarithmic if all means are positive, cut far above the
    first.

    Bands are in view unless they lie far below the means.
    """
    curves = list(curves)
    means = np.concatenate([curve.mean[np.isfinite(curve.mean)] for curve in curves])
    if not len(means):
        return "linear", 0.0, 1.0
    first = [
        abs(curve.mean[0]) for curve in curves if np.isfinite(curve.mean[0]) and curve.mean[0] != 0
    ]
    lowest = means.min()
    if lowest > 0:
        highest = min(means.max(), _CUT * min(first, default=np.inf))
        room = max(1.3, 10.0 ** (0.03 * (np.log10(highest) - np.log10(lowest))))
        low, high = log_limits(curves, room=room)
        return "log", low, min(high, max(highest, lowest, low) * room)
    highest = min(means.max(), _LINEAR_CUT * (max([*first, -lowest]) or np.inf))
    height = (highest - lowest) or 1.0
    lowest = max(
        min(curve.low[np.isfinite(curve.low)].min(initial=lowest) for curve in curves),
        lowest - height,
    )
    return "linear", lowest - 0.05 * height, highest + 0.05 * height


def log_limits(
    curves: Iterable[Curve], among: Sequence[float] = (), room: float = 1.0
) -> tuple[float, float]:
    """Choose limits of a logarithmic axis that shows the curves' positive means and their bands.

    Bands far below the means are cut. ``among``: further values to
    show, at least one if no mean is positive. ``room``: factor by which the axis extends beyond.
    """
    curves = list(curves)
    means = _above_zero([np.asarray(among), *(curve.mean for curve in curves)])
    low = max(_above_zero([means, *(curve.low for curve in curves)]).min(), _DEPTH * means.min())
    bottom = max(low / room, _SMALLEST)
    return bottom, max(min(means.max() * room, _LARGEST), 1.1 * bottom)


def mark_beyond(
    axes: Axes, curves: Mapping[str, Curve], looks: Mapping[str, look.Look], against: str
) -> None:
    """Note the maximum of each curve that leaves the axes at the top, between their left and right
    limits.

    ``looks``, ``against``: as in `draw_curves`.
    """
    (begin, end), top, rows = axes.get_xlim(), axes.get_ylim()[1], 0
    for name, curve in curves.items():
        x, mean, appearance = _along(curve, against), curve.mean, looks[name]
        beyond = (mean > top) & (begin <= x) & (x <= end)
        if not beyond.any():
            continue
        text, last = f"\u2191 {appearance.label} up to {mean[beyond].max():.0e}", x[beyond][-1]
        # Towards the middle, so that the text stays inside.
        side, offset = ("left", 3) if last <= (begin + end) / 2 else ("right", -3)
        style: dict[str, Any] = {
            "ha": side,
            "va": "top",
            "fontsize": 7,
            "color": look.ink(appearance.color),
        }
        axes.annotate(
            text, (last, top), (offset, -4 - 9 * rows), textcoords="offset points", **style
        )
        rows += 1


def _along(curve: Curve, against: str) -> np.ndarray:
    return curve.time if against == "time" else curve.step


def _above_zero(values: Sequence[np.ndarray]) -> np.ndarray:
    numbers = np.concatenate(values)
    return numbers[np.isfinite(numbers) & (numbers > 0)]
