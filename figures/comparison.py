"""The figures of every study that compares, from the folder of results that it wrote.

``curves``: the measure against simulated time, a panel for each setting, a line for each row at its
best rate. ``rates``: the measure at every learning rate. ``rows``: the measure against an option
with several numbers, a line for each row. ``time``: the parts of the workers' time on each cluster.
To draw them again::

    python -m figures results/compare       # in a clone
    asyncsim figures results/compare        # installed
"""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from asyncsim.base.console import over_seeds, percent_text
from asyncsim.drawing import findings, layout, look
from asyncsim.drawing.curves import (
    Curve,
    draw_band,
    draw_curves,
    draw_target,
    evaluation_curve,
    loss_axis,
    mark_beyond,
    scale_losses,
)
from asyncsim.drawing.paper import drawer
from asyncsim.study.columns import axis_of, setting_text
from asyncsim.study.finished import Finished, read
from asyncsim.study.results import RANKING, cell_options
from asyncsim.traces.phases import IN_WORDS

_RATE, _CLUSTERS = "learning_rate", "clusters.csv"
#: Lines of a panel that can be told from each other.
_MOST_LINES = 8
#: Parts of the workers' time that failures leave, with their colours.
_LOST = {
    "counted_share": ("gradients that counted", look.SKY),
    "lost_to_waiting": ("waiting", look.ORANGE),
    "lost_to_sending": ("sending", look.BLUE),
    "lost_to_discarded": ("discarded", look.PURPLE),
    "lost_to_failed": ("failed", look.VERMILLION),
    "lost_to_restoring": ("undone by a restore", look.GREY),
}


class Comparison:
    """The results of a comparison, as its figures need them.

    ``compared``: columns that name a line; by default those of a ranked row.
    """

    def __init__(self, finished: Finished, compared: Sequence[str] = ()):
        self.finished, self.config = finished, finished.config
        self.best, self.rates = finished.table(RANKING), finished.table("tuning.csv")
        self.measure = self.config["measure"]
        self.rising = self.measure.endswith("accuracy")
        self.varied = [name for name in cell_options(self.config) if name in self.best]
        named = [*(name for name in self.varied if name != _RATE), "method"]
        named = list(dict.fromkeys(named))
        compared = compared or self.config["compared"]
        self.compared = [name for name in compared if name in named] or ["method"]
        if "method" in self.compared and len(self.best) > _MOST_LINES:
            self.compared = ["method"]  # the rest in panels of its own
        self.settings = [name for name in named if name not in self.compared]
        self.best, self.rates = (
            table.assign(row=table[self.compared].astype(str).agg(" on ".join, axis=1))
            for table in (self.best, self.rates)
        )
        names = dict.fromkeys(self.rates["row"])
        is_method = self.compared == ["method"]
        self.looks = look.looks(names) if is_method else look.category_looks(names)
        self.labels = {name: appearance.label for name, appearance in self.looks.items()}

    def panels(self, table: pd.DataFrame, without: str = "") -> Iterator[tuple[str, pd.DataFrame]]:
        """Yield the title and the rows of each setting; ``without``: an option along the axis."""
        settings = [name for name in self.settings if name != without]
        if not settings:
            yield "", table
            return
        for values, rows in table.groupby(settings, sort=False):
            pairs = zip(settings, values, strict=True)
            yield ", ".join(setting_text(name, value) for name, value in pairs), rows

    def curve(self, row: pd.Series, quantity: str) -> Curve:
        """Return the course of a quantity over the runs of a row."""
        rate = self.finished.summary.get(f"method.{_RATE}", np.nan)
        summary = self.finished.summary.assign(**{_RATE: rate})
        keys = dict.fromkeys([*self.varied, "method", _RATE])
        runs = summary.merge(row.to_frame().T[[*keys]].astype(summary[[*keys]].dtypes))
        folders = runs.drop_duplicates("seed")["run_folder"]
        return evaluation_curve([self.finished.run(name) for name in folders], measure=quantity)

    def finish(self, figure: Figure, about: str, spread: str = "mean and range of") -> None:
        """Add the legend and the title; ``spread``: what lines and bands are."""
        counts = self.best["seeds"].astype(int)
        seeds = over_seeds(counts.max(), spread, counts.min())
        attack = [f"attack {self.config['attack']}"] if self.config.get("attack") else []
        parts = [about, str(self.config["problem"]), *attack, seeds]
        layout.finish(figure, "; ".join(filter(None, parts)))


def curves(finished: Finished) -> Figure:
    """Draw the measure of each row at its best rate against simulated time, by setting."""
    results = Comparison(finished)
    measure = results.measure
    quantity = finished.config["target_of"] if measure.endswith("_to_target") else measure
    quantity = {"accuracy": "test_accuracy"}.get(quantity, quantity)
    drawn = {
        title: {row["row"]: results.curve(row, quantity) for _, row in rows.iterrows()}
        for title, rows in results.panels(results.best)
    }
    every = [curve for panel in drawn.values() for curve in panel.values()]
    scale = ("linear", 0.0, 1.0) if quantity.endswith("accuracy") else loss_axis(every)
    figure, panels = look.new_grid(len(drawn), 2.7, sharey=True)
    for axes, (title, panel) in zip(panels, drawn.items(), strict=True):
        scale_losses(axes, *scale)
        draw_curves(axes, panel, results.looks, "time")
        mark_beyond(axes, panel, results.looks, "time")
        draw_target(axes, finished.config, quantity)
        axes.set_ylabel(axis_of(quantity))
        layout.panel_title(axes, title)
    rising = quantity.endswith("accuracy")
    figure.set_label(findings.end(panel, results.labels, axis_of(quantity), title, rising))
    results.finish(figure, "at their best learning rates" if finished.config["tune"] else "")
    return figure


def rates(finished: Finished) -> Figure | None:
    """Draw the measure at every learning rate: means and standard deviations."""
    results = Comparison(finished)
    return along(results, results.rates, _RATE)


def rows(finished: Finished) -> Figure | None:
    """Draw the measure at the best rate against an option with several numbers."""
    results = Comparison(finished)
    numbers = results.best[results.settings].select_dtypes("number").columns
    return along(results, results.best, numbers[-1]) if len(numbers) else None


def along(results: Comparison, table: pd.DataFrame, x: str) -> Figure | None:
    """Draw the measure against a column of numbers, a panel for each setting of the other
    columns.
    """
    measure = results.measure
    spread = table[f"{measure}_sd"].fillna(0)
    table = table.assign(
        mean=table[measure], min=table[measure] - spread, max=table[measure] + spread
    )
    table = table[np.isfinite(table[measure])]
    if table[x].nunique() < 2:
        return None
    ends = ["mean", "min", "max"]
    groups = list(results.panels(table, without=x))
    figure, panels = look.new_grid(len(groups), 2.7, sharey=True)
    for axes, (title, rows_of_panel) in zip(panels, groups, strict=True):
        for name, line in rows_of_panel.groupby("row", sort=False):
            band = line.sort_values(x).groupby(x)[ends].first()
            draw_band(axes, band, **results.looks[name].style, marker=".")
        if (table[x] > 0).all():
            axes.set_xscale("log")
        if not results.rising and (table[measure] > 0).all():
            axes.set_yscale("log")
        layout.ticks_at(axes.xaxis, sorted(table[x].unique()))
        axes.set_xlabel(axis_of(x))
        axes.set_ylabel(axis_of(measure))
        layout.panel_title(axes, title)
    names = rows_of_panel["row"] + f" at {axis_of(x)} " + rows_of_panel[x].map("{:g}".format)
    rows = rows_of_panel.set_index(names)[ends]
    figure.set_label(findings.best(rows, axis_of(measure), title, results.rising))
    about = f"{axis_of(measure)} by {axis_of(x)}"
    results.finish(figure, about, "mean and standard deviation of")
    return figure


def time(finished: Finished) -> Figure | None:
    """Draw the parts of the workers' time on each cluster, a bar for each."""
    if not (finished.folder / _CLUSTERS).exists():
        return None
    table = finished.table(_CLUSTERS)
    varied = [name for name in cell_options(finished.config) if name in table]
    names = list(table[varied].astype(str).agg(", ".join, axis=1))
    if "counted_share" in table:
        parts = _LOST
    else:
        table["in_vain"] = table["lost_time_share"]
        table["computing_share"] -= table["in_vain"]
        phases = {
            f"{phase}_share": (words, look.PHASES[phase]) for phase, words in IN_WORDS.items()
        }
        parts = {**phases, "in_vain": ("computing in vain", look.VERMILLION)}
    figure, (axes,) = look.new_figure(look.DOUBLE, 0.9 + 0.27 * len(table))
    bars = [(words, color, table[name]) for name, (words, color) in parts.items()]
    layout.stacked_bars(axes, bars, names, table["throughput"])
    axes.set_xlabel("part of the workers' time")
    useful = bars[0][2].set_axis(names).sort_values()
    figure.set_label(
        f"Gradients that count take {percent_text(useful.iloc[-1])} of the workers' time with "
        f"{useful.index[-1]}, the most, and {percent_text(useful.iloc[0])} with "
        f"{useful.index[0]}, the least."
    )
    layout.finish(figure, f"workers' time; {finished.config['problem']}", 3)
    return figure


def draw(folder: str | os.PathLike, study: str) -> list[Path]:
    """Draw the figures of a comparison into its folder."""
    of_methods = {"curves": curves, "rates": rates, "rows": rows}
    of_methods = of_methods if "method" in read(folder, study).summary else {}
    return drawer(study, ("seed",), **of_methods, time=time)(folder)
