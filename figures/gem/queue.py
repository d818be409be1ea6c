"""FIFO against lowest rank first: shares of commits, and staleness."""

from matplotlib.figure import Figure

from asyncsim.base.console import counted, number_text
from asyncsim.drawing import layout, look
from asyncsim.drawing.curves import draw_lines
from asyncsim.drawing.paper import setting
from asyncsim.study.columns import axis_of
from asyncsim.study.finished import Finished

from .panels import (
    at_rate,
    finish,
    one_cluster,
)

#: The look of each discipline; the first is the authors' program's.
_LOOKS = {
    "fifo": look.Look(look.BLACK, "-", "first come, first served"),
    "lowest_rank": look.Look(look.PURPLE, "--", "lowest rank first"),
    "random": look.Look(look.ORANGE, ":", "random order"),
}


def ranks(results: Finished) -> Figure | None:
    """Draw shares and staleness by rank, for the most workers, of a study of disciplines."""
    if not (results.folder / "ranks.csv").exists():
        return None
    results = one_cluster(at_rate(results))
    n = int(results.summary["workers"].iloc[0])
    columns = ["discipline", "workers", "seed", "worker", "share", "staleness_mean"]
    table = results.table("ranks.csv", columns)
    table = table[table["workers"] == n]
    figure, (share, staleness) = look.new_figure(look.DOUBLE, 2.9, 2, sharex=True)
    table = table.assign(share=n * table["share"], status="finished")
    looks = {name: of for name, of in _LOOKS.items() if name in set(table["discipline"])}
    words = {"share": "commits of a worker / mean", "staleness_mean": axis_of("staleness_mean")}
    for axes, (column, label) in zip((share, staleness), words.items(), strict=True):
        draw_lines(axes, table, "worker", column, looks, by="discipline")
        axes.set_ylim(0, 1.05 * axes.dataLim.y1 or 1)  # room for the whole of the highest marker
        axes.set_xlabel("rank (worker index)")
        layout.whole_ticks(axes.xaxis)
        axes.set_ylabel(label)
    share.axhline(1, color=look.GREY, linewidth=0.5, zorder=0)
    shares = table.groupby(["discipline", "worker"])["share"].mean().unstack()
    texts = [
        f"{number_text(of_rank.max())} and {number_text(of_rank.min())} times the mean number of "
        f"commits with {looks[name].label}"
        for name, of_rank in shares.iterrows()
    ]
    figure.set_label(f"The busiest and the idlest worker make {'; '.join(texts)}.")
    finish(figure, setting(results, f"order of the queue, {counted(n, 'worker')}"))
    return figure
