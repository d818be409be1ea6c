"""Figure of the ensembles study, from the folder of results that it wrote.

The data come from ``python -m asyncsim.study ensembles``, which draws this figure itself. To draw
it again::

    python -m figures results/ensembles              # in a clone
    asyncsim figures results/ensembles     # installed

``ensembles``: test loss and test accuracy of the averaged predictions of several models, and of the
single models.
"""

import pandas as pd
from matplotlib.figure import Figure

from asyncsim.base.console import counted, over_seeds
from asyncsim.drawing import findings, layout, look
from asyncsim.drawing.curves import draw_ranges
from asyncsim.drawing.paper import drawer
from asyncsim.study.finished import Finished

_COLUMNS = (
    "method",
    "seed",
    "models",
    "diverged",
    "test_loss",
    "single_loss",
    "test_accuracy",
    "single_accuracy",
)
_MEASURES = {"loss": "test loss (nats)", "accuracy": "test accuracy"}


def ensembles(finished: Finished) -> Figure:
    """Draw test losses and test accuracies against the number of models."""
    summary = finished.summary.dropna(subset="models")  # failed runs have no models
    methods = dict(list(summary.groupby("method", sort=False)))
    looks, models = look.looks(methods), int(summary["models"].max())
    figure, axes = look.new_figure(look.DOUBLE, 2.6, len(_MEASURES))
    ends = {}
    for panel, (measure, label) in zip(axes, _MEASURES.items(), strict=True):
        for method, rows in methods.items():
            for kind, words in (("test", "averaged"), ("single", "single")):
                name = f"{looks[method].label}, {words}"
                style = {**looks[method].style, "marker": ".", "label": name}
                style |= {"linestyle": ":"} if kind == "single" else {}
                draw_ranges(panel, rows, "models", f"{kind}_{measure}", **style)
                last = rows.loc[rows["models"] == models, f"{kind}_loss"]
                ends[name] = last.agg(["mean", "min", "max"])
        panel.set(xlabel="models that are averaged", ylabel=label)
        layout.whole_ticks(panel.xaxis)
    where = f"with {counted(models, 'model')}"
    figure.set_label(findings.best(pd.DataFrame(ends).T, _MEASURES["loss"], where))
    seeds = over_seeds(summary["seed"].nunique())
    left_out = ", without those that diverged" if summary["diverged"].any() else ""
    about = f"predictions of independent models, averaged and single{left_out}; {seeds}"
    layout.finish(figure, about)
    return figure


draw = drawer("ensembles", _COLUMNS, ensembles=ensembles)
