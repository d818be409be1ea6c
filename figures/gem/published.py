"""The published curves of the GEM paper as numbers, and how far ours are from them.

``published.csv`` holds the curves of figures 1 to 3 of "Gradient Energy Matching for Distributed Asynchronous Gradient
Descent" (Hermans and Louppe 2018, arXiv 1805.08469), read off the vector graphics of its PDF. The error is below 1 % of
an axis tick. The paper draws a point every 5 worker steps; where its curve is straight, or outside the axes, points are
missing in the graphics.
"""

import functools
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd

from asyncsim.drawing.curves import Curve
from asyncsim.drawing.paper import Task
from asyncsim.study.outcome import FINAL_SHARE

#: The paper's name for figures and tables.
SOURCE = "Hermans and Louppe 2018, arXiv 1805.08469"
#: What all of its curves are of.
TASK = Task("mnist", network="cnn")
#: Worker steps of the bins in which curves are compared, and those between the published points.
BIN_STEPS = 20
_EVERY = 5
#: Worker steps of a run in the paper, and what figure 2 took for them (s).
STEPS = 938
SECONDS = 2000.0


class Deviation(NamedTuple):
    """How far a curve or a value of ours is from the published one."""

    figure: str
    series: str
    setting: str  #: what sets this curve apart from others of its series: the learning rate
    measure: str  #: what the deviation is: ``"log10 RMS"`` over 20-step bins, or a difference at the end
    ours: float  #: the values at the end, ours and the published one; nan for curves
    published: float
    deviation: float
    relative: float  #: of the published value; nan for curves
    bar: float  #: the most that the deviation may be; nan if there is no such bar
    diverged: str  #: how many of our seeds did: ``"0 of 3"``


def series(figure: str, name: str) -> pd.DataFrame:
    """Return the published points of a series, ``x`` and ``y``; none if the paper has no such series."""
    table = _table()
    return table.loc[(table["figure"] == figure) & (table["series"] == name), ["x", "y"]].reset_index(drop=True)


def binned(figure: str, name: str) -> pd.Series:
    """Return the means of a published series over bins of 20 worker steps, by bin.

    The points of a bin are those drawn after its 5th, 10th, 15th and 20th step. The graphics leave out points on a
    straight line between their neighbours: these are put back. Seconds (figure 2) are turned into worker steps.
    """
    points = series(figure, name)
    if figure == "2":
        steps = points["x"].clip(0, SECONDS) / SECONDS * STEPS
        return points["y"].groupby((steps // BIN_STEPS).astype(int)).mean()
    step = (points["x"] / _EVERY).round() * _EVERY
    known = points["y"].groupby(step).mean()
    if known.empty:
        return known
    drawn = np.arange(known.index[0], known.index[-1] + 1, _EVERY)
    filled = pd.Series(np.interp(drawn, known.index, known), drawn)
    return filled.groupby(((filled.index - 1) // BIN_STEPS).astype(int)).mean()


def end_value(figure: str, name: str) -> float:
    """Return the mean of the published points in the last tenth of the run."""
    points = series(figure, name)
    return float(points.loc[points["x"] > (1 - FINAL_SHARE) * STEPS, "y"].mean())


def log_deviation(curve: Curve, published: pd.Series) -> float:
    """Return the root mean square of log10(ours / published) over the bins that both have; nan if there are none.

    ``curve`` has bins of 20 worker steps; those after a divergence are none.
    """
    ours = pd.Series(curve.mean)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.log10(ours / published.reindex(ours.index)).to_numpy(np.float64)
    ratio = ratio[np.isfinite(ratio)]
    return float(np.sqrt(np.mean(ratio**2))) if len(ratio) else float("nan")


def table(deviations: Iterable[Deviation]) -> pd.DataFrame:
    """Return deviations as a table, with ``within``: whether each keeps its bar (empty without one)."""
    frame = pd.DataFrame(list(deviations), columns=Deviation._fields)
    within = (frame["deviation"] <= frame["bar"]).map({True: "yes", False: "no"})
    frame["within"] = within.where(frame["bar"].notna(), "")
    return frame


@functools.cache
def _table() -> pd.DataFrame:
    return pd.read_csv(Path(__file__).with_name("published.csv"), dtype={"figure": str})
