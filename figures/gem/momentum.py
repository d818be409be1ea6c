"""The implicit momentum of asynchrony, measured and compared with 1 - 1/n."""

from typing import Any

import numpy as np
from matplotlib.figure import Figure

from asyncsim.base.console import counted, number_text
from asyncsim.drawing import layout, look
from asyncsim.study.finished import Finished

from .panels import finish, problem

_COLUMNS = ["workers", "momentum_measured", "standard_error", "momentum_theory"]
#: Further columns that distinguish rows, and the marks of their groups.
_GROUPS = ("method", "compute", "window")
_MARKS = (
    (look.BLUE, "o"),
    (look.VERMILLION, "s"),
    (look.GREEN, "^"),
    (look.PURPLE, "D"),
    (look.ORANGE, "v"),
)
#: Error bars, in standard errors.
_SIGMAS = 2


def implicit(results: Finished) -> Figure:
    """Draw measured and theoretical momentum against the number of workers, and their
    difference.
    """
    table = results.table("momentum.csv", _COLUMNS).sort_values("workers")
    groups = table.groupby(
        [name for name in _GROUPS if name in table] or (lambda row: "measured"), sort=False
    )
    # Each group adds a line to the legend.
    size = (look.SINGLE, 2.8 + 0.16 * len(groups))
    figure, (above, below) = look.new_figure(
        *size, 1, 2, sharex=True, gridspec_kw={"height_ratios": [2.2, 1]}
    )
    theory = table.drop_duplicates("workers")
    above.plot(
        theory["workers"],
        theory["momentum_theory"],
        color=look.BLACK,
        linewidth=1,
        label="theory: 1 \u2212 1/n",
    )
    for turn, (group, rows) in enumerate(groups):
        color, marker = _MARKS[turn % len(_MARKS)]
        bars: dict[str, Any] = {
            "fmt": marker,
            "color": color,
            "markersize": 3,
            "capsize": 2,
            "linewidth": 0.9,
        }
        # Side by side, as all have the same numbers of workers.
        x = rows["workers"] * 1.06 ** (turn - (len(groups) - 1) / 2)
        error = _SIGMAS * rows["standard_error"]
        above.errorbar(x, rows["momentum_measured"], error, label=_group_label(group), **bars)
        below.errorbar(x, rows["momentum_measured"] - rows["momentum_theory"], error, **bars)
    below.axhline(0, color=look.BLACK, linewidth=0.8)
    above.set_ylabel("momentum")
    below.set_ylabel("difference")
    below.set_xscale("log")
    layout.ticks_at(below.xaxis, np.sort(table["workers"].unique()))
    below.set_xlabel("workers n")
    text = (
        f"implicit momentum of asynchrony; {problem(results)}; bars: \u00b1{_SIGMAS} standard "
        "errors"
    )
    off = (table["momentum_measured"] - table["momentum_theory"]).abs()
    if off.notna().any():
        row = table.loc[off.idxmax()]
        figure.set_label(
            f"Measured momentum is within {number_text(off.max(), 2)} of the theory; the largest "
            f"difference is with {counted(int(row['workers']), 'worker')}, "
            f"{number_text(off.max() / row['standard_error'], 2)} standard errors."
        )
    finish(figure, above, text, columns=1)
    return figure


def _group_label(group: Any) -> str:
    """Label a group of measurements: method, law of the compute times, window."""
    parts = [group] if isinstance(group, str) else list(group)
    labels = [
        look.METHOD_LOOKS[part].label if part in look.METHOD_LOOKS else str(part) for part in parts
    ]
    if len(labels) == len(_GROUPS):
        labels[-1] = f"window {labels[-1]}" if labels[-1] != "1" else ""
    return ", ".join(part for part in labels if part)
