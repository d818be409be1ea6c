"""Figures 1a to c, 2, 3, 6, 7 and 8: one quantity, a curve for each value of a column, beside the
published curves.

A figure is a row of `FAMILIES`; `draw` and `measure` do the rest. Figure 7 has another data set in
place of ImageNet. Figure 2 is against worker steps here: the paper's seconds are of its machines.
The paper names no number of workers for figure 8; its curve of kappa = 1 is nearest to figure 1a's
of 5 workers.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure

from asyncsim.drawing import look
from asyncsim.drawing.curves import Curve
from asyncsim.drawing.paper import setting
from asyncsim.study.finished import Finished

from . import published
from .panels import (
    LOSS,
    MOST_LOSS,
    PANEL,
    at_rate,
    chosen,
    curve_row,
    diverged_of,
    draw_family,
    family,
    finding,
    finish,
    log_axis,
    loss,
    median_pi,
    one_cluster,
    point_text,
    published_curves,
    rate_text,
    rates,
    values_of,
    workers_label,
)
from .published import Deviation

#: The paper's misspecified learning rate.
_MISSPECIFIED = 0.1


class Family(NamedTuple):
    """A figure of the paper."""

    study: str
    subject: str  #: of its title
    method: str = "gem"
    series: str = "gem n={:g}"  #: a published series, the value in place of {:g}
    column: str = "workers"
    is_factor: bool = False  #: GEM's median factor instead of the loss
    label: Callable[[Any], str] = workers_label
    is_misspecified: bool = False  #: at the rate of figure 6
    #: Largest accepted deviation of a curve, and of a final factor (absolute, relative).
    bars: tuple[float, ...] = (np.nan, np.nan)
    beside: str = ""  #: a further row of the table, drawn in black

    def rows(self, results: Finished) -> Finished:
        """Select the runs of the method at all rates."""
        if self.column == "workers":
            return chosen(results, method=self.method)
        names = results.summary["method"].str.partition("(")[0]
        return one_cluster(chosen(results._replace(summary=results.summary[names == self.method])))

    def at_its_rate(self, results: Finished) -> Finished:
        """Select the paper's rate; if it was not run, the largest."""
        if not self.is_misspecified:
            return at_rate(results)
        run = rates(results)
        return at_rate(results, _MISSPECIFIED if _MISSPECIFIED in run else run[-1])

    def curves(self, results: Finished) -> dict[Any, Curve]:
        """Return the curve of each value."""
        return family(results, self.column, median_pi if self.is_factor else loss)


_KAPPA: dict[str, Any] = {
    "study": "kappa",
    "series": "gem kappa={:g}",
    "column": "method.kappa",
    "label": "\u03ba = {:g}".format,
}
FAMILIES = {
    "1a": Family("stability", "GEM with n workers", bars=(0.08,)),
    "1b": Family("stability", "DOWNPOUR with n workers", "downpour", "downpour n={:g}"),
    "1c": Family(
        *("stability", "adaptive staleness with n workers", "adaptive_staleness"),
        series="adaptive_staleness n={:g}",
    ),
    "2": Family("hundred", "GEM with n workers"),
    "3": Family(
        "stability", "GEM's factor \u03c0 with n workers", is_factor=True, bars=(0.03, 0.25)
    ),
    "6a": Family(
        *("misspecification", "GEM and SGD at too high a rate"),
        label="GEM, n = {}".format,
        is_misspecified=True,
        beside="6a, SGD",
    ),
    "6a, SGD": Family(
        *("misspecification", "SGD at too high a rate", "sgd", "momentum_sgd", "own_workers"),
        label=lambda _: look.METHOD_LOOKS["sgd"].label,
        is_misspecified=True,
    ),
    "6b": Family(
        *("misspecification", "DOWNPOUR at too high a rate", "downpour", "downpour n={:g}"),
        is_misspecified=True,
    ),
    "7": Family("tensors", "GEM with n workers, in place of AlexNet on ImageNet"),
    "8a": Family(subject="GEM by its proxy's energy \u00d7 \u03ba", **_KAPPA),
    "8b": Family(
        subject="GEM's factor by its proxy's energy \u00d7 \u03ba", is_factor=True, **_KAPPA
    ),
}


def draw(results: Finished, name: str) -> Figure:
    """Draw a figure of `FAMILIES`."""
    shown = FAMILIES[name]
    rows = shown.at_its_rate(shown.rows(results))
    parts = [(shown, rows)]
    if shown.beside and FAMILIES[shown.beside].method in set(results.summary["method"]):
        beside = FAMILIES[shown.beside]
        parts.append((beside, beside.at_its_rate(beside.rows(results))))
    ours = [part.curves(of_part) for part, of_part in parts]
    theirs = [
        published_curves(of_part, name, part.series, curves)
        for (part, of_part), curves in zip(parts, ours, strict=True)
    ]
    figure, (axes,) = look.new_figure(*PANEL)
    drawn = [curve for curves in (*ours, *theirs) for curve in curves.values()]
    words = "median \u03c0 over the weights" if shown.is_factor else LOSS
    if shown.is_factor:
        highest = max(np.nanmax(curve.high, initial=1.0) for curve in ours[0].values())
        axes.set_ylim(0, 1.1 * highest)
        axes.set_ylabel(words)
    else:
        log_axis(axes, drawn, limit=MOST_LOSS)
    named: dict[str, Curve] = {}
    for (part, _), curves, points in zip(parts, ours, theirs, strict=True):
        looks = None if part is shown else dict.fromkeys(curves, look.Shade(look.BLACK, ""))
        line = look.METHOD_LOOKS[part.method].line
        draw_family(axes, curves, part.label, line, looks=looks, theirs=points)
        named |= {part.label(value): curve for value, curve in curves.items()}
    axes.set_xlim(0, 1.03 * max(curve.step[-1] for curve in ours[0].values()))
    figure.set_label(finding(named, str, words))
    text = setting(rows, shown.subject, point_text(rows))
    finish(figure, text)
    return figure


def measure(results: Finished, name: str) -> list[Deviation]:
    """Compute the deviations of a figure of `FAMILIES`; of figures 1a to c at every rate."""
    shown = FAMILIES[name]
    rows = shown.rows(results)
    (stated,) = rates(shown.at_its_rate(rows))[:1]
    deviations: list[Deviation] = []
    for rate in rates(rows) if name[0] == "1" else [stated]:
        of_rate = at_rate(rows, rate)
        if shown.is_factor:
            deviations += _factor_deviations(of_rate, name, shown)
        else:
            bar = shown.bars[0] if rate == stated else np.nan
            deviations += _curve_deviations(of_rate, name.partition(",")[0], shown, bar)
    if shown.beside and FAMILIES[shown.beside].method in set(results.summary["method"]):
        deviations += measure(results, shown.beside)
    return deviations


def _curve_deviations(
    results: Finished, figure: str, shown: Family, bar: float
) -> Iterator[Deviation]:
    """Yield the deviation of each value's losses from the published curve."""
    curves = family(results, shown.column, lambda runs, n: loss(runs, n, published.BIN_STEPS))
    for value, curve in curves.items():
        series = shown.series.format(value)
        theirs = published.binned(figure, series)
        if len(theirs):
            rows = chosen(results, **{shown.column: value}).summary
            deviation = published.log_deviation(curve, theirs)
            yield curve_row(figure, series, rate_text(results), deviation, bar, rows)


def _factor_deviations(results: Finished, figure: str, shown: Family) -> Iterator[Deviation]:
    """Yield the deviation of each value's median factor in the last tenth of the run.

    The larger bar of both, absolute and relative, is the accepted deviation.
    """
    bar, relative_bar = shown.bars
    for value in values_of(results, shown.column):
        rows, series = chosen(results, **{shown.column: value}), shown.series.format(value)
        theirs = published.end_value(figure, series)
        if np.isnan(theirs):
            continue
        ours = float(rows.summary["median_pi"].mean())
        off = abs(ours - theirs)
        values = ("median pi, last tenth", ours, theirs, off, off / theirs)
        accepted = np.maximum(bar, relative_bar * theirs)
        diverged = diverged_of(rows.summary)
        yield Deviation(figure, series, rate_text(results), *values, accepted, diverged)
