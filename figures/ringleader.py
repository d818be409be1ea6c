"""The figure of the Ringleader study, from the folder of results that it wrote.

The data come from ``python -m asyncsim.study ringleader``, which draws it itself. To draw it
again::

    python -m figures results/ringleader              # in a clone
    asyncsim figures results/ringleader     # installed

``ringleader``: the training loss of each method at its best learning rate against simulated time.
"""

from matplotlib.figure import Figure

from asyncsim.base.console import counted, over_seeds
from asyncsim.drawing import findings, layout, look
from asyncsim.drawing.curves import (
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

_COLUMNS = ("method", "simulated_seconds", "run_folder")
_QUANTITY = "train_loss"


def ringleader(finished: Finished) -> Figure:
    """Draw the training loss of each method at its best rate against simulated time: mean and range
    of the seeds.
    """
    table = finished.table("ringleader.csv", ("method", "learning_rate", "seeds"))
    curves = {}
    for row in table.itertuples():
        rows = finished.rows(method=row.method, **{"method.learning_rate": row.learning_rate})
        runs = [finished.run(name) for name in rows.drop_duplicates("seed")["run_folder"]]
        curves[str(row.method)] = evaluation_curve(runs, measure=_QUANTITY)
    labels = {name: appearance.label for name, appearance in look.looks(curves).items()}
    rates = {str(row.method): f"{row.learning_rate:g}" for row in table.itertuples()}
    labels = {name: f"{label}, rate {rates[name]}" for name, label in labels.items()}
    figure, (axes,) = look.new_figure(0.75 * look.DOUBLE, 3.2)
    scale_losses(axes, *loss_axis(curves.values()))
    draw_curves(axes, curves, labels, "time", finished.config["horizon"])
    mark_beyond(axes, curves, labels, "time")
    draw_target(axes, finished.config, _QUANTITY)
    axes.set_ylabel(axis_of(_QUANTITY))
    figure.set_label(findings.end(curves, labels, axis_of(_QUANTITY)))
    layout.legend_below(figure, *axes.get_legend_handles_labels(), 2)
    seeds = over_seeds(int(table["seeds"].max()), fewest=int(table["seeds"].min()))
    clients = counted(finished.config["workers"], "client")
    title = f"{finished.config['problem'].partition('(')[0]}, {clients} with different data"
    subject = "methods at their best learning rates"
    layout.title(figure, "; ".join([subject, title, seeds]))
    return figure


draw = drawer("ringleader", _COLUMNS, ringleader=ringleader)
