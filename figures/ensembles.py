"""Figure of the ensembles study, from the folder of results that it wrote.

The data come from ``python -m asyncsim.study ensembles``, which draws this figure itself. To draw
it again::

    python -m figures results/ensembles              # in a clone
    asyncsim figures results/ensembles     # installed

``ensembles``: test loss and test accuracy of the averaged predictions of several models, and of the
single models.
"""

from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from asyncsim.base.console import number_text, over_seeds
from asyncsim.base.errors import InputError
from asyncsim.drawing import findings, layout, look
from asyncsim.drawing.curves import draw_ranges
from asyncsim.drawing.paper import drawer
from asyncsim.study.finished import Finished
from asyncsim.study.results import SUMMARY

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
#: Line and label of averaged and single predictions, by the prefix of their columns.
_LINES: dict[str, tuple[Any, str]] = {
    "test": ("-", "averaged, with range"),
    "single": (":", "single, on average"),
}


def ensembles(finished: Finished) -> Figure:
    """Draw test losses and test accuracies against the number of models."""
    try:
        # Failed runs have no models.
        return _ensembles(
            finished.summary.astype(dict.fromkeys(_COLUMNS[1:], float)).dropna(subset="models")
        )
    except ValueError as error:
        raise InputError(
            f"folder = {str(finished.folder)!r}: its {SUMMARY} has text in a column of numbers "
            f"({error}); "
            "run the study again"
        ) from error


def _ensembles(summary: pd.DataFrame) -> Figure:
    figure, axes = look.new_figure(look.DOUBLE, 2.6, len(_MEASURES))
    looks = look.looks(dict.fromkeys(summary["method"]))
    for panel, (measure, label) in zip(axes, _MEASURES.items(), strict=True):
        for marker, (method, how) in zip(look.MARKERS * len(looks), looks.items(), strict=False):
            _panel(panel, summary[summary["method"] == method], measure, how.color, marker)
        if summary[f"test_{measure}"].isna().all():
            layout.say_inside(panel, "no model was left: all diverged")
            panel.set_yticks([])
        panel.set_xlim(0.8, summary["models"].max() + 0.2)
        panel.set_xlabel("models that are averaged")
        panel.set_ylabel(label)
        layout.whole_ticks(panel.xaxis)
    named = [
        Line2D([], [], color=how.color, marker=marker, markersize=3.5, label=how.label)
        for marker, how in zip(look.MARKERS * len(looks), looks.values(), strict=False)
    ]
    lines = [
        Line2D([], [], color=look.GREY, linestyle=line, label=label)
        for line, label in _LINES.values()
    ]
    handles = [*(named if len(named) > 1 else []), *lines]
    method = "" if len(looks) > 1 else f", trained with {next(iter(looks.values())).label}"
    seeds = over_seeds(summary["seed"].nunique(), "mean of")
    largest = summary[summary["models"] == summary["models"].max()]
    means = largest.groupby("method", sort=False)[["test_loss", "single_loss"]].mean()
    losses = [
        f"{number_text(row.test_loss)} for {looks[row.Index].label}, against "
        f"{number_text(row.single_loss)} for single models"
        for row in means.dropna().itertuples()
    ]
    models = f"averaging {summary['models'].max():.0f} models gives a test loss of"
    figure.set_label(findings.sentence(f"{models} {'; '.join(losses)}" if losses else ""))
    left_out = ", without those that diverged" if summary["diverged"].any() else ""
    about = f"Predictions of independent models, averaged and single{method}{left_out}: {seeds}"
    layout.finish(figure, about, handles=handles)
    return figure


def _panel(axes: Axes, table: pd.DataFrame, measure: str, color: str, marker: str) -> None:
    """Draw a method's means over the seeds, and the range of its averaged predictions."""
    for column, (line, _) in _LINES.items():
        style = {"color": color, "linestyle": line, "marker": marker, "markersize": 3.5}
        if column == "test":
            draw_ranges(axes, table, "models", f"test_{measure}", **style)
        else:
            means = table.groupby("models")[f"{column}_{measure}"].mean().dropna()
            axes.plot(means.index, means, **style)


draw = drawer("ensembles", _COLUMNS, ensembles=ensembles)
