"""Figures 8a and 8b: proxies of higher energy, their loss and GEM's median factor."""

from collections.abc import Iterable

from matplotlib.figure import Figure

from asyncsim.base.console import counted
from asyncsim.drawing import look
from asyncsim.study.finished import Finished

from .panels import (
    LOSS,
    MOST_LOSS,
    PANEL,
    at_rate,
    chosen,
    draw_family,
    family,
    finish,
    log_axis,
    median_pi,
    one_cluster,
    setting,
    values_of,
)


def losses(results: Finished) -> Figure:
    """Draw the loss for each kappa, of the most workers: figure 8a."""
    results = one_cluster(at_rate(_of_gem(results)))
    curves = family(results, "method.kappa")
    figure, (axes,) = look.new_figure(*PANEL)
    log_axis(axes, curves.values(), LOSS, limit=MOST_LOSS)
    draw_family(axes, curves, _labels(curves))
    finish(figure, axes, _setting(results), columns=4)
    return figure


def factors(results: Finished) -> Figure:
    """Draw the median factor for each kappa, of the most workers: figure 8b."""
    results = one_cluster(at_rate(_of_gem(results)))
    curves = family(results, "method.kappa", median_pi)
    figure, (axes,) = look.new_figure(*PANEL)
    axes.set_ylim(0, 5.05)
    draw_family(axes, curves, _labels(curves))
    axes.autoscale(axis="y")
    axes.set_ylim(0, None)
    axes.set_ylabel("median \u03c0 over the weights")
    finish(figure, axes, _setting(results), columns=4)
    return figure


def _of_gem(results: Finished) -> Finished:
    """Return the rows of GEM, whatever its kappa."""
    of_gem = results.summary["method"].str.partition("(")[0] == "gem"
    return chosen(results._replace(summary=results.summary[of_gem]))


def _labels(curves: Iterable[float]) -> dict[float, str]:
    return {kappa: f"\u03ba = {kappa:g}" for kappa in curves}


def _setting(results: Finished) -> str:
    (n,) = values_of(results, "workers")
    return setting(results, f"GEM, {counted(n, 'worker')}: energy of the proxy \u00d7 \u03ba")
