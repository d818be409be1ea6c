"""The measured implicit momentum of asynchrony beside the theory, from the study ``momentum``."""

from matplotlib.figure import Figure

from asyncsim.base.console import counted, number_text
from asyncsim.drawing import layout, look
from asyncsim.drawing.curves import draw_points
from asyncsim.drawing.paper import drawer
from asyncsim.study.finished import Finished

#: Columns of the study's table, and those that distinguish its rows.
_MEASURED = ["workers", "momentum_measured", "standard_error", "momentum_theory"]
_GROUPS = ("method", "compute", "window")
#: Error bars, in standard errors.
_SIGMAS = 2


def implicit(finished: Finished) -> Figure:
    """Draw the measured momentum less the theoretical one against the number of workers, by law of
    the compute times, window and method.
    """
    table = finished.table("momentum.csv", _MEASURED).sort_values("workers")
    table["off"] = table["momentum_measured"] - table["momentum_theory"]
    figure, (axes,) = look.new_figure(look.SINGLE, 2.8)
    names = [name for name in _GROUPS if name in table]
    groups = dict(list(table.groupby(names, sort=False))) if names else {(): table}
    labels = {group: ", ".join(map(str, group)) or "measured" for group in groups}
    looks = look.category_looks(labels.values())
    for turn, ((group, rows), marker) in enumerate(zip(groups.items(), look.MARKERS, strict=False)):
        # Side by side, as all have the same numbers of workers.
        x = rows["workers"] * 1.06 ** (turn - (len(groups) - 1) / 2)
        color, _, label, _ = looks[labels[group]]
        error = _SIGMAS * rows["standard_error"]
        ends = rows["off"] - error, rows["off"] + error
        draw_points(axes, x, rows["off"], *ends, marker=marker, color=color, label=label)
    axes.axhline(0, color=look.BLACK, linewidth=0.8)
    axes.set_ylabel("measured minus theoretical momentum")
    axes.set_xscale("log")
    layout.ticks_at(axes.xaxis, sorted(table["workers"].unique()))
    axes.set_xlabel("workers n")
    if table["off"].notna().any():
        row = table.loc[table["off"].abs().idxmax()]
        off = abs(row["off"])
        figure.set_label(
            f"Measured momentum is within {number_text(off, 2)} of the theory; the largest "
            f"difference is with {counted(int(row['workers']), 'worker')}, "
            f"{number_text(off / row['standard_error'], 2)} standard errors."
        )
    problem = finished.config.get("problem", "")
    text = f"implicit momentum of asynchrony; {problem}; bars: \u00b1{_SIGMAS} standard errors"
    layout.finish(figure, text, 1)
    return figure


draw = drawer("momentum", (), implicit=implicit)
