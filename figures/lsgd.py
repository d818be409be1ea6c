"""Figures of "Leader Stochastic Gradient Descent" (Teng et al. 2019, arXiv 1905.10395) from our own
runs.

Drawn from the results of the study ``leaders``, which draws them itself. To draw them again::

    python -m figures lsgd                                   # in a clone
    asyncsim figures lsgd --results results                  # installed

The paper's curves are not available as numbers, so the figures show only ours.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from asyncsim.base.console import number_text, over_seeds, summary_of
from asyncsim.base.errors import InputError
from asyncsim.drawing import findings, layout, look
from asyncsim.drawing.curves import (
    DIVERGED,
    Curve,
    draw_curves,
    evaluation_curve,
    loss_axis,
    mark_beyond,
    scale_losses,
)
from asyncsim.drawing.look import Look
from asyncsim.drawing.paper import Drawing, Paper, Study
from asyncsim.methods.leader import leaders
from asyncsim.replays.run import Run
from asyncsim.study import load
from asyncsim.study.columns import axis_of
from asyncsim.study.finished import Finished

#: Labels of the study's methods that differ from `look.METHOD_LOOKS`.
_LABELS = {
    "lsgd": "LSGD, one leader",
    "lsgd_groups": "LSGD, a leader in each group",
    "aeasgd": "EASGD, asynchronous",
}


_SUBJECT = "leaders against averages, each at its best learning rate"


def over_time(finished: Finished) -> Figure:
    """Draw the error against simulated time, a panel for each number of workers and period."""
    table = finished.table("leaders.csv")
    workers, windows = (sorted(table[name].unique()) for name in ("workers", "window"))
    size = (look.DOUBLE, 0.9 + 1.7 * len(workers))
    figure, panels = look.new_figure(*size, len(windows), len(workers), sharey=True)
    looks = _looks(table)
    curves: dict[tuple[int, int], dict[str, Curve]] = {}
    for row in table.itertuples():
        curves.setdefault((row.workers, row.window), {})[row.method] = _curve(_runs(finished, row))
    limits = loss_axis([curve for drawn in curves.values() for curve in drawn.values()])
    labels = {name: appearance.label for name, appearance in looks.items()}
    for axes, (n, window) in zip(panels, itertools.product(workers, windows), strict=True):
        drawn = curves.get((n, window), {})
        present = {name: looks[name] for name in looks if name in drawn}
        scale_losses(axes, *limits)
        draw_curves(axes, drawn, labels, "time", looks=present)
        mark_beyond(axes, drawn, labels, "time", present)
        axes.set_xlabel("")
        layout.panel_title(axes, f"n = {n}, period {window}")
    for axes in panels[-len(windows) :]:
        axes.set_xlabel("simulated time (s)")
    for axes in panels[:: len(windows)]:
        axes.set_ylabel(axis_of(_quantity(table)))
    where = f"with {workers[-1]} workers and period {windows[-1]}"
    figure.set_label(findings.end(drawn, labels, axis_of(_quantity(table)), where))
    _finish(figure, looks, f"{_SUBJECT}; {_setting(finished, table)}")
    return figure


def periods(finished: Finished) -> Figure:
    """Draw the error at the end against the communication period: mean and range of the seeds that
    finished.
    """
    table = finished.table("leaders.csv")
    if (table["diverged"] == table["seeds"]).all():
        raise InputError(
            f"folder = {str(finished.folder)!r}: all runs diverged; give lower learning rates"
        )
    workers = sorted(table["workers"].unique())
    figure, panels = look.new_figure(look.DOUBLE, 2.8, len(workers), sharey=True)
    looks = _looks(table)
    value = _quantity(table)
    for axes, n in zip(panels, workers, strict=True):
        for turn, (method, appearance) in enumerate(looks.items()):
            rows = table[(table["workers"] == n) & (table["method"] == method)].sort_values(
                "window"
            )
            rows = rows[rows["diverged"] < rows["seeds"]]
            ends = [_ends(_runs(finished, row)) for row in rows.itertuples()]
            x = rows["window"] * 1.06 ** (turn - (len(looks) - 1) / 2)
            style: dict[str, Any] = {
                "color": appearance.color,
                "linestyle": appearance.line,
                "label": appearance.label,
            }
            axes.plot(
                x, rows[value], marker=look.MARKERS[turn % len(look.MARKERS)], markersize=4, **style
            )
            axes.vlines(
                x,
                [min(end) for end in ends],
                [max(end) for end in ends],
                color=appearance.color,
                linewidth=0.8,
            )
        axes.set_xscale("log")
        axes.set_yscale("log")
        layout.ticks_at(axes.xaxis, sorted(table["window"].unique()))
        if table["window"].nunique() == 1:
            axes.set_xlim(0.5 * table["window"].min(), 2 * table["window"].max())
        axes.set_xlabel("communication period (local steps)")
        axes.set_title(f"n = {n}", fontsize=8)
    panels[0].set_ylabel(f"{axis_of(value)} at the end")
    rows = table[table["workers"] == workers[-1]].set_index("method")
    first, last = (rows[rows["window"] == f(rows["window"])][value] for f in (min, max))
    changes = [
        f"from {number_text(first[name])} to {number_text(last[name])} for {looks[name].label}"
        for name in first.index.intersection(last.index)
        if np.isfinite(first[name]) and np.isfinite(last[name])
    ]
    if changes and table["window"].nunique() > 1 and _seeds(table) > 1:
        figure.set_label(
            f"With {workers[-1]} workers and periods of {rows['window'].min()} to "
            f"{rows['window'].max()}, the {axis_of(value)} goes {', '.join(changes)}."
        )
    _finish(figure, looks, f"{_SUBJECT}; {_setting(finished, table)}")
    return figure


def leaderships(finished: Finished) -> Figure:
    """Draw each worker's share of LSGD's elections, at each period; means over the seeds."""
    rows = _elections(finished)
    workers = sorted(rows["workers"].unique())
    figure, panels = look.new_figure(look.DOUBLE, 2.6, len(workers))
    shades = look.shades(sorted(rows["window"].unique()))
    for axes, n in zip(panels, workers, strict=True):
        for row in rows[rows["workers"] == n].sort_values("window").itertuples():
            won = [
                np.bincount(leaders(run.commits, n), minlength=n) / len(run.commits)
                for run in _runs(finished, row)
            ]
            # Sorted within each seed, because its workers are interchangeable.
            shares = np.mean([np.sort(wins)[::-1] for wins in won], axis=0)
            shade = shades[row.window]
            retention = "one election" if np.isnan(row.kept) else f"kept in {row.kept:.0%}"
            label = f"period {row.window}: {retention}"
            axes.plot(
                range(1, n + 1),
                shares,
                color=shade.color,
                marker=shade.marker,
                markersize=3.2,
                label=label,
            )
        layout.whole_ticks(axes.xaxis)
        axes.axhline(1 / n, color=look.BLACK, linewidth=0.8, linestyle=":")
        axes.set_ylim(0, None)
        axes.set_xlabel("workers, by how often they led")
        axes.set_title(f"n = {n}", fontsize=8)
        axes.legend()
    panels[0].set_ylabel("share of elections")
    figure.set_label(
        f"With {n} workers and period {row.window} the most frequent leader wins {shares[0]:.0%} "
        f"of the elections; equal workers would win {1 / n:.0%} each."
    )
    remark = (
        f"{finished.config['problem']}; {over_seeds(_seeds(rows), 'means over')}; dotted: 1/n; "
        "kept: the leader stays"
    )
    layout.title(figure, f"LSGD's one leader; {remark}")
    return figure


def identities(finished: Finished) -> Figure:
    """Draw LSGD's single leader over time, of the first seed, by workers and period."""
    rows = _elections(finished)
    counts, windows = (sorted(rows[name].unique()) for name in ("workers", "window"))
    size = (look.DOUBLE, 0.7 + 1.5 * len(counts))
    figure, panels = look.new_figure(*size, len(windows), len(counts))
    for axes, row in zip(panels, rows.sort_values(["workers", "window"]).itertuples(), strict=True):
        run = _runs(finished, row)[0]
        axes.step(
            run.commits["commit_time"],
            leaders(run.commits, row.workers),
            where="post",
            color=look.METHOD_LOOKS["lsgd"].color,
            linewidth=0.6,
        )
        axes.set_ylim(-0.5, row.workers - 0.5)
        layout.whole_ticks(axes.yaxis)
        axes.set_title(f"n = {row.workers}, period {row.window}", fontsize=8)
    for axes in panels[-len(windows) :]:
        axes.set_xlabel("simulated time (s)")
    for axes in panels[:: len(windows)]:
        axes.set_ylabel("leader")
    changed = np.mean(np.diff(leaders(run.commits, row.workers)) != 0)
    figure.set_label(
        f"With {row.workers} workers and period {row.window} the leader changes at "
        f"{changed:.0%} of the elections."
    )
    layout.title(figure, f"LSGD's one leader over time; {finished.config['problem']}, first seed")
    return figure


def _elections(finished: Finished) -> pd.DataFrame:
    """Return the rows of LSGD with a single leader; raise InputError if there are none."""
    table = finished.table("leaders.csv")
    rows = table[table["method"] == "lsgd"]
    if rows.empty:
        raise InputError(f"folder = {str(finished.folder)!r}: has no runs of lsgd")
    return rows


def _looks(table: pd.DataFrame) -> dict[str, Look]:
    looks = look.looks(dict.fromkeys(table["method"]))
    if "lsgd_groups" in looks:
        looks["lsgd_groups"] = look.METHOD_LOOKS["lsgd"]._replace(line="-.")
    return {
        name: appearance._replace(label=_LABELS.get(name, appearance.label))
        for name, appearance in looks.items()
    }


def _runs(finished: Finished, row: Any) -> list[Run]:
    selection = {
        name: getattr(row, name) for name in ("workers", "window", "method", "learning_rate")
    }
    return finished.runs(**selection)


def _curve(runs: Sequence[Run]) -> Curve:
    """Return the errors of runs at their evaluations."""
    measured = [
        replace(run, evaluations=run.evaluations.assign(error=_errors(run))) for run in runs
    ]
    return evaluation_curve(measured, measure="error")


def _ends(runs: Sequence[Run]) -> list[float]:
    """Return the last error of each run that finished."""
    return [float(_errors(run).iloc[-1]) for run in runs if run.diverged_at is None]


def _errors(run: Run) -> pd.Series:
    return load("leaders").errors(run.evaluations)


def _quantity(table: pd.DataFrame) -> str:
    return "test_error" if "test_error" in table else "train_loss"


def _setting(finished: Finished, table: pd.DataFrame) -> str:
    return f"{finished.config['problem']}; {over_seeds(_seeds(table))}"


def _seeds(table: pd.DataFrame) -> int:
    return int(table["seeds"].max())


def _finish(figure: Figure, looks: Mapping[str, Look], text: str) -> None:
    """Add the title, and one legend for all panels."""
    handles = layout.labelled(figure)
    if any(line.get_marker() == DIVERGED["marker"] for axes in figure.axes for line in axes.lines):
        text += "; crosses: a seed diverged"
    ordered = [
        handles[appearance.label] for appearance in looks.values() if appearance.label in handles
    ]
    figure.legend(handles=ordered, loc="outside lower center", ncols=min(4, len(ordered)))
    layout.title(figure, text)


#: The figures by their names.
FIGURES = {
    "time": Drawing("leaders", "error against simulated time, by workers and period", over_time),
    "periods": Drawing("leaders", "error at the end by communication period", periods),
    "leaders": Drawing("leaders", "how often each worker led", leaderships),
    "identity": Drawing("leaders", "which worker led, over time", identities),
    "completion": Drawing("completion", "loss of completing a matrix over time", over_time),
}

PAPER = Paper(
    "lsgd",
    summary_of(__doc__),
    {
        "leaders": Study(
            "leaders", "on two cores about 5 min with small; paper is an accelerator's work"
        ),
        "completion": Study(
            "leaders",
            "less than 1 min",
            '--problem "matrix_completion" --workers 8 --window 1 --learning-rate 0.3 '
            '--methods "lgd(pull=0.1)" "easgd(beta=0.9)" --gradients 200 --target 0.01 --seeds 3 '
            "--evaluate-every 2 --x64",
        ),
    },
    FIGURES,
)
draw, draw_study, main = PAPER.draw, PAPER.draw_study, PAPER.main
