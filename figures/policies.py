"""The figures of a study of policies, from the folder of results that it wrote.

The data come from ``python -m asyncsim.study policies``, which draws them itself. To draw them
again::

    python -m figures results/policies              # in a clone
    asyncsim figures results/policies     # installed

``policies``: the division of the workers' time under each policy. ``loss``: the target's measure,
by default the training loss, against simulated time, a panel for each method and window, each
policy at its best learning rate; not drawn if no gradients were computed.
"""

import itertools

import pandas as pd
from matplotlib.figure import Figure

from asyncsim.base.console import counted, over_seeds, percent_text
from asyncsim.drawing import findings, layout, look
from asyncsim.drawing.curves import (
    DIVERGED,
    Curve,
    draw_curves,
    draw_target,
    evaluation_curve,
    loss_axis,
    mark_beyond,
    scale_losses,
)
from asyncsim.drawing.paper import drawer
from asyncsim.study.columns import axis_of
from asyncsim.study.finished import Finished
from asyncsim.traces.phases import IN_WORDS, Phases

#: The axis is extended to a target that is at most this many times lower than the losses.
_TARGET_BELOW = 10
_COLUMNS = ("workers", "window", "policy", *Phases._fields, "in_vain", "throughput")


def time_spent(finished: Finished) -> Figure:
    """Draw the division of the workers' time and its useless part, a bar for each policy."""
    table = finished.table("policies.csv", _COLUMNS)
    clusters = [group for _, group in table.groupby(["workers", "window"], sort=False)]
    figure, panels = look.new_figure(
        look.DOUBLE, 0.9 + 0.27 * len(table) + 0.3 * len(clusters), 1, len(clusters)
    )
    for axes, rows in zip(panels, clusters, strict=True):
        layout.stacked_bars(axes, _parts(rows), list(rows["policy"]), rows["throughput"])
        axes.set_title(_cluster(table, rows["workers"].iloc[0], rows["window"].iloc[0]))
    panels[-1].set_xlabel("part of the workers' time")
    handles = layout.labelled(figure)
    layout.legend_below(figure, list(handles.values()), list(handles), 3)
    useful = (rows["computing"] - rows["in_vain"]).set_axis(rows["policy"]).sort_values()
    if len(useful) > 1:
        figure.set_label(
            f"With {_cluster(table, rows['workers'].iloc[0], rows['window'].iloc[0])}, workers "
            f"compute accepted gradients for {percent_text(useful.iloc[-1])} of their time under "
            f"{useful.index[-1]}, the most, and for {percent_text(useful.iloc[0])} under "
            f"{useful.index[0]}, the least."
        )
    layout.title(
        figure, f"workers' time under each policy; {_seeds(finished, 'means over')}", look.DOUBLE
    )
    return figure


def _parts(rows: pd.DataFrame) -> list[tuple[str, str, pd.Series]]:
    """Return label, colour and share of the time, by policy, of each part of the workers' time."""
    idle_parts = [
        (doing, look.PHASES[phase], rows[phase])
        for phase, doing in IN_WORDS.items()
        if phase != "computing"
    ]
    useful = rows["computing"] - rows["in_vain"]
    return [
        ("computing accepted gradients", look.PHASES["computing"], useful),
        ("computing in vain", look.VERMILLION, rows["in_vain"]),
        *idle_parts,
    ]


def loss(finished: Finished) -> Figure | None:
    """Draw the target's measure under each policy against simulated time, a panel for each method
    and cluster.

    Returns None if no gradients were computed.
    """
    if "method" not in finished.summary:
        return None
    finished.require(("method", "run_folder"))
    times = finished.table("times.csv", ("workers", "window", "policy", "method", "learning_rate"))
    quantity = finished.config["target_of"]
    panels_of = (
        finished.summary[["workers", "window", "method"]].drop_duplicates().itertuples(index=False)
    )
    groups = [(int(workers), int(window), str(method)) for workers, window, method in panels_of]
    looks = look.category_looks(finished.summary["policy"].unique())
    figure, panels = look.new_grid(len(groups), 2.7, sharey=True)
    curves_of = {group: _curves(finished, times, group, quantity) for group in groups}
    all_curves = list(
        itertools.chain.from_iterable(curves.values() for curves in curves_of.values())
    )
    scale, low, high = (
        ("linear", 0.0, 1.0) if quantity.endswith("accuracy") else loss_axis(all_curves)
    )
    target = finished.config["target"]
    if scale == "log" and low / _TARGET_BELOW <= target < low:
        low = target / 1.1
    for axes, ((workers, window, method), curves) in zip(panels, curves_of.items(), strict=True):
        scale_losses(axes, scale, low, high)
        own_looks, named = {name: looks[name] for name in curves}, {name: name for name in curves}
        draw_curves(axes, curves, named, "time", looks=own_looks)
        mark_beyond(axes, curves, named, "time", own_looks)
        draw_target(axes, finished.config, quantity)
        title_parts = [f"{look.looks([method])[method].label}, {_cluster(times, workers, window)}"]
        layout.panel_title(axes, title_parts[0])
    for axes in panels[::2]:
        axes.set_ylabel(axis_of(quantity))
    where = f"with {title_parts[0]}," if len(groups) > 1 else ""
    rising = quantity.endswith("accuracy")
    finding = findings.end(curves, named, axis_of(quantity), where, rising)
    panels_text = ", a panel for each method and cluster" if len(groups) > 1 else ""
    described = f"The {axis_of(quantity)} under each policy against simulated time{panels_text}."
    figure.set_label(finding or described)
    handles = layout.labelled(figure)
    if any(curve.ends for curve in all_curves):
        (handles["diverged"],) = panels[0].plot([], [], color=look.BLACK, **DIVERGED)
    layout.legend_below(figure, list(handles.values()), list(handles), 2 * min(2, len(groups)))
    layout.title(figure, f"{finished.config['problem']}; {_seeds(finished)}", figure.get_figwidth())
    return figure


def _curves(
    finished: Finished, times: pd.DataFrame, group: tuple[int, int, str], quantity: str
) -> dict[str, Curve]:
    """Return the curves under each policy at its best rate; ``group``: workers, window and
    method.
    """
    workers, window, method = group
    curves = {}
    for row in times[(times["workers"] == workers) & (times["window"] == window)].itertuples():
        rate = {} if pd.isna(row.learning_rate) else {"method.learning_rate": row.learning_rate}
        rows = finished.rows(
            workers=workers, window=window, policy=row.policy, method=method, **rate
        )
        if row.method == method and len(rows):
            names = rows.drop_duplicates("seed")["run_folder"]
            curves[str(row.policy)] = evaluation_curve(
                [finished.run(name) for name in names], measure=quantity
            )
    return curves


def _cluster(table: pd.DataFrame, workers: int, window: int) -> str:
    several = table["window"].nunique() > 1
    return counted(int(workers), "worker") + (f", window {window}" if several else "")


def _seeds(finished: Finished, statistic: str = "mean and range of") -> str:
    counts = finished.summary.groupby(["workers", "window", "policy"])["seed"].nunique()
    return over_seeds(int(counts.max()), statistic, int(counts.min()))


draw = drawer("policies", ("workers", "policy", "status"), policies=time_spent, loss=loss)
