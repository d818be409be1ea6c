"""Figures 8a and 8b: proxies of higher energy, their loss and GEM's median factor.

The paper names no number of workers; its curve of kappa = 1 is nearest to figure 1a's of 5 workers.
"""

from collections.abc import Mapping

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from asyncsim.base.console import counted
from asyncsim.drawing import look
from asyncsim.drawing.curves import Curve
from asyncsim.study.finished import Finished

from .losses import curve_deviations, factor_deviations
from .panels import (
    LOSS,
    MOST_LOSS,
    PANEL,
    at_rate,
    chosen,
    draw_family,
    family,
    finding,
    finish,
    log_axis,
    median_pi,
    one_cluster,
    published_curves,
    published_handles,
    setting,
    values_of,
)
from .published import Deviation

#: Formats a kappa for legends and captions.
_LABEL = "\u03ba = {:g}".format
#: The published series by kappa.
_SERIES = "gem kappa={:g}"


def losses(results: Finished) -> Figure:
    """Draw the loss for each kappa, of the most workers: figure 8a."""
    results = _of_gem(results)
    curves = family(results, "method.kappa")
    theirs = published_curves(results, "8a", _SERIES, curves)
    figure, (axes,) = look.new_figure(*PANEL)
    log_axis(axes, [*curves.values(), *theirs.values()], LOSS, limit=MOST_LOSS)
    _draw(figure, axes, results, curves, theirs)
    figure.set_label(finding(curves, _LABEL))
    return figure


def factors(results: Finished) -> Figure:
    """Draw the median factor for each kappa, of the most workers: figure 8b."""
    results = _of_gem(results)
    curves = family(results, "method.kappa", median_pi)
    figure, (axes,) = look.new_figure(*PANEL)
    axes.set_ylim(0, 5.05)
    axes.set_ylabel("median \u03c0 over the weights")
    _draw(figure, axes, results, curves, published_curves(results, "8b", _SERIES, curves))
    figure.set_label(finding(curves, _LABEL, "median \u03c0"))
    axes.autoscale(axis="y")
    axes.set_ylim(0, None)
    return figure


def measure_losses(results: Finished) -> list[Deviation]:
    """Compute the deviations of the losses from figure 8a."""
    return curve_deviations(_of_gem(results), "8a", _SERIES, "method.kappa")


def measure_factors(results: Finished) -> list[Deviation]:
    """Compute the deviations of the median factors over the last tenth of the run from figure
    8b.
    """
    return factor_deviations(_of_gem(results), "8b", _SERIES, "method.kappa")


def _draw(
    figure: Figure,
    axes: Axes,
    results: Finished,
    curves: Mapping[float, Curve],
    theirs: Mapping[float, pd.Series],
) -> None:
    """Draw our curves and the published ones, and finish the figure."""
    draw_family(axes, curves, _LABEL, theirs=theirs)
    (n,) = values_of(results, "workers")
    text = setting(results, f"GEM, {counted(n, 'worker')}: energy of the proxy \u00d7 \u03ba")
    finish(figure, axes, text, published_handles(figure, axes), columns=4)


def _of_gem(results: Finished) -> Finished:
    """Return the rows of GEM with the most workers, whatever its kappa."""
    of_gem = results.summary["method"].str.partition("(")[0] == "gem"
    return one_cluster(at_rate(chosen(results._replace(summary=results.summary[of_gem]))))
