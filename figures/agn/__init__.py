"""Figures of Hermans' thesis and of "Accumulated Gradient Normalization" (arXiv 1710.02368) from
our own runs.

Drawn from folders of results; for the thesis' task, MNIST with its perceptron, its printed numbers
(``published.csv``) are drawn beside ours::

    python -m figures agn                                    # in a clone: all available results
    python -m figures agn --only collapse --results results
    asyncsim figures agn                                     # installed
"""

import functools

from asyncsim.base.console import summary_of
from asyncsim.drawing.paper import Drawing, Paper, Study

from . import clusters, grid, lines

_GRID = "on two cores about 3 min with small; paper is an accelerator's work, a day on two cores"

#: The studies by the folders of their results.
STUDIES = {
    "windows": Study("windows", _GRID),
    # A window of 500 ends at the minimum: the thesis' unbounded window.
    "path": Study(
        "leaders",
        "less than 1 min",
        '--methods agn --problem "quadratic(curvature=[1, 0.1], noise=0)" --workers 4 '
        "--window 15 500 --learning-rate 0.1 --gradients 600000 --seeds 1 --x64 --animate",
    ),
}

#: The figures by their names.
FIGURES = {
    "agn": Drawing(
        "windows",
        "AGN's accuracy by workers and window",
        functools.partial(grid.accuracy, method="agn"),
    ),
    "aeasgd": Drawing(
        "windows",
        "AEASGD's accuracy by workers and window",
        functools.partial(grid.accuracy, method="aeasgd"),
    ),
    "efficiency": Drawing("windows", "temporal efficiency of AGN over AEASGD", grid.efficiency),
    "times": Drawing("windows", "training times by workers and window", lines.times),
    "staleness": Drawing("windows", "staleness with n workers", clusters.staleness),
    "collapse": Drawing("windows", "DOWNPOUR's collapse with more workers", lines.collapse),
    "path": Drawing("path", "path of AGN's central variable by window", clusters.path),
}

PAPER = Paper("agn", summary_of(__doc__), STUDIES, FIGURES)
draw, draw_study = PAPER.draw, PAPER.draw_study
