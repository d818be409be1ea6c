"""Figure of the ensembles study, from the folder of results that it wrote.

The data come from ``python -m asyncsim.study ensembles``, which draws this figure itself. To draw
it again::

    python -m figures results/ensembles              # in a clone
    asyncsim figures results/ensembles     # installed

``ensembles``: test loss and test accuracy of the averaged predictions of several models, and of the
single models.
"""

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from asyncsim.base.console import number_text, over_seeds
from asyncsim.drawing import findings, layout, look
from asyncsim.drawing.curves import draw_ranges
from asyncsim.drawing.paper import drawer
from asyncsim.study.finished import Finished

_MEASURES = {"loss": "test loss (nats)", "accuracy": "test accuracy"}
_COLUMNS = (
    *("method", "seed", "models", "diverged"),
    *(f"{models}_{measure}" for measure in _MEASURES for models in ("test", "single")),
)


def ensembles(finished: Finished) -> Figure:
    """Draw test losses and test accuracies against the number of models."""
    summary = finished.summary.dropna(subset="models")  # failed runs have none
    figure, axes = look.new_figure(look.DOUBLE, 2.6, len(_MEASURES))
    looks = look.looks(dict.fromkeys(summary["method"]))
    for panel, (measure, label) in zip(axes, _MEASURES.items(), strict=True):
        for marker, (method, how) in zip(look.MARKERS * len(looks), looks.items(), strict=False):
            _draw(panel, summary[summary["method"] == method], measure, how, marker)
        if summary[f"test_{measure}"].isna().all():
            layout.say_inside(panel, "no model was left: all diverged")
        panel.set_xlabel("models that are averaged")
        panel.set_ylabel(label)
        layout.whole_ticks(panel.xaxis)
    largest = summary[summary["models"] == summary["models"].max()]
    means = largest.groupby("method", sort=False)[["test_loss", "single_loss"]].mean()
    losses = [
        f"{number_text(row.test_loss)} for {looks[row.Index].label}, against "
        f"{number_text(row.single_loss)} for single models"
        for row in means.dropna().itertuples()
    ]
    models = f"averaging {summary['models'].max():.0f} models gives a test loss of"
    figure.set_label(findings.sentence(f"{models} {'; '.join(losses)}" if losses else ""))
    seeds = over_seeds(summary["seed"].nunique(), "mean of")
    layout.finish(figure, f"predictions of independent models, averaged and single: {seeds}")
    return figure


def _draw(axes: Axes, table: pd.DataFrame, measure: str, how: look.Look, marker: str) -> None:
    """Draw a method's means over the seeds, and the range of its averaged predictions."""
    style = {"color": how.color, "marker": marker, "markersize": 3.5}
    label = f"{how.label}, averaged, with range"
    draw_ranges(axes, table, "models", f"test_{measure}", label=label, **style)
    means = table.groupby("models")[f"single_{measure}"].mean().dropna()
    axes.plot(means.index, means, ":", label=f"{how.label}, single, on average", **style)


draw = drawer("ensembles", _COLUMNS, ensembles=ensembles)
