"""The published curves of the GEM paper as numbers, and the deviations of ours.

``published.csv`` holds the curves of figures 1 to 8 of "Gradient Energy Matching for Distributed
Asynchronous Gradient Descent" (Hermans and Louppe 2018, arXiv 1805.08469), read off the vector
graphics of its PDF. The error is below 1 % of an axis tick. The paper draws a point every 5 worker
steps; where its curve is straight, or outside the axes, points are missing in the graphics. Two
curves of figures 6a (GEM with 5 workers) and 8a (kappa = 2) could not be read.
"""

import functools
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd

from asyncsim.drawing.curves import Curve
from asyncsim.drawing.paper import PaperTask
from asyncsim.study.outcome import FINAL_SHARE

#: The paper's name for figures and tables.
SOURCE = "Hermans and Louppe 2018, arXiv 1805.08469"
#: The task of all its curves.
TASK = PaperTask("mnist", network="cnn")
#: Worker steps of the bins of compared curves, and between published points.
BIN_STEPS = 20
_POINT_STEPS = 5
#: Worker steps of a run in the paper, and their duration in figure 2 (s).
STEPS = 938
SECONDS = 2000.0


class Deviation(NamedTuple):
    """The deviation of our curve or value from the published one."""

    figure: str
    series: str
    setting: str  #: distinguishes the curves of a series: the learning rate
    measure: str  #: of the deviation: ``"log10 RMS"`` over 20-step bins, or a difference at the end
    ours: float  #: final value, as ``published``; nan for curves
    published: float
    deviation: float
    relative: float  #: of the published value; nan for curves
    bar: float  #: largest accepted deviation; nan if there is none
    diverged: str  #: number of our seeds: ``"0 of 3"``


def series(figure: str, name: str) -> pd.DataFrame:
    """Return the published points of a series, ``x`` and ``y``; empty if the paper has no such
    series.
    """
    table = _table()
    return table.loc[
        (table["figure"] == figure) & (table["series"] == name), ["x", "y"]
    ].reset_index(drop=True)


def binned(figure: str, name: str) -> pd.Series:
    """Return the means of a published series over bins of 20 worker steps, by bin.

    A bin holds the points after its 5th, 10th, 15th and 20th step. The graphics omit points on a
    straight line between their neighbours: these are interpolated. Seconds (figure 2) are converted
    to worker steps.
    """
    points = series(figure, name)
    if figure == "2":
        steps = points["x"].clip(0, SECONDS) / SECONDS * STEPS
        return points["y"].groupby((steps // BIN_STEPS).astype(int)).mean()
    step = (points["x"] / _POINT_STEPS).round() * _POINT_STEPS
    means = points["y"].groupby(step).mean()
    if means.empty:
        return means
    drawn = np.arange(means.index[0], means.index[-1] + 1, _POINT_STEPS)
    filled = pd.Series(np.interp(drawn, means.index, means), drawn)
    return filled.groupby(((filled.index - 1) // BIN_STEPS).astype(int)).mean()


def end_value(figure: str, name: str) -> float:
    """Return the mean of the published points in the last tenth of the run."""
    points = series(figure, name)
    return float(points.loc[points["x"] > (1 - FINAL_SHARE) * STEPS, "y"].mean())


def log_deviation(curve: Curve, published: pd.Series) -> float:
    """Compute the root mean square of log10(ours / published) over common bins; nan if there are
    none.

    ``curve`` has bins of 20 worker steps; bins after a divergence are missing.
    """
    ours = pd.Series(curve.mean)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.log10(ours / published.reindex(ours.index)).to_numpy(np.float64)
    ratio = ratio[np.isfinite(ratio)]
    return float(np.sqrt(np.mean(ratio**2))) if len(ratio) else float("nan")


def table(deviations: Iterable[Deviation]) -> pd.DataFrame:
    """Tabulate deviations, with ``within``: whether each is within its bar (empty without a
    bar).
    """
    frame = pd.DataFrame(list(deviations), columns=Deviation._fields)
    within = (frame["deviation"] <= frame["bar"]).map({True: "yes", False: "no"})
    frame["within"] = within.where(frame["bar"].notna(), "")
    return frame


@functools.cache
def _table() -> pd.DataFrame:
    return pd.read_csv(Path(__file__).with_name("published.csv"), dtype={"figure": str})
