"""Figures of "Gradient Energy Matching" (Hermans and Louppe 2018, arXiv 1805.08469) from our own
runs.

Drawn from folders of results, one for each study; for the paper's task, MNIST with its network,
known published curves are drawn in grey::

    python -m figures gem                                    # in a clone: all available results
    python -m figures gem --only 1a,3 --results results
    asyncsim figures gem                                     # installed

``deviations.csv`` has the numerical deviations from the published curves.
"""

import functools
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from asyncsim.base.console import summary_of
from asyncsim.base.files import open_file, write_csv
from asyncsim.drawing.paper import Drawing, Paper, Study

from . import energy, families, losses, pace, published, queue, tensors

#: The table of deviations, beside the figures.
DEVIATIONS = "deviations.csv"


def _minutes(small: int, paper: int) -> str:
    return f"on two cores about {small} min with small, {paper} min with paper"


#: The studies by the folders of their results.
STUDIES = {
    "stability": Study("stability", _minutes(2, 75)),
    "hundred": Study(
        "staleness",
        "on two cores about 25 min; without --problem mnist --steps 938 less than 1 min",
        "--problem mnist --workers 100 --steps 938 --methods gem",
    ),
    "speedup": Study("speedup", _minutes(1, 15)),
    "generalization": Study("generalization", _minutes(1, 30)),
    "misspecification": Study("misspecification", _minutes(1, 90)),
    "kappa": Study("kappa", _minutes(1, 15)),
    "tensors": Study("tensors", _minutes(1, 60)),
    "energy": Study("energy", _minutes(1, 60)),
    "policies": Study(
        "policies",
        "on two cores about 1 min",
        '--policy asynchronous --discipline fifo lowest_rank --compute "gamma(1, 0.2)" '
        "--service 0.1 --methods gem downpour",
    ),
}

_of = functools.partial


def _family(name: str) -> Drawing:
    """Return a figure of `families.FAMILIES`."""
    shown = families.FAMILIES[name]
    draw, measure = _of(families.draw, name=name), _of(families.measure, name=name)
    return Drawing(shown.study, shown.subject, draw, measure)


#: The figures by name: the paper's by their numbers, then further ones.
FIGURES = {
    **{name: _family(name) for name in ("1a", "1b", "1c")},
    "1d": Drawing("stability", "final loss against n", losses.final, losses.measure_final),
    "2": _family("2")._replace(measure=losses.measure_hundred),
    "3": _family("3"),
    "4": Drawing(
        "speedup",
        "loss over time, a batch divided among n workers",
        pace.speedup,
        pace.measure_speedup,
    ),
    "5": Drawing(
        "generalization",
        "minibatch and test loss over data epochs",
        pace.generalization,
        pace.measure_generalization,
    ),
    **{name: _family(name) for name in ("6a", "6b", "7", "8a", "8b")},
    "9": Drawing(
        "tensors", "median factor of each tensor, fewer workers", _of(tensors.heat_map, place=0)
    ),
    "10": Drawing(
        "tensors", "median factor of each tensor, more workers", _of(tensors.heat_map, place=1)
    ),
    "energy": Drawing(
        "energy", "central over proxy energy against n; where the clip binds", energy.by_workers
    ),
    "queue": Drawing("policies", "first come or lowest rank first: shares, staleness", queue.ranks),
}


def _keep(deviations: Sequence[published.Deviation], out: Path) -> Path:
    """Print the deviations, and replace the rows of the same figures in the table by them."""
    table, path = published.table(deviations), out / DEVIATIONS
    printed = table.to_string(index=False, na_rep="-", float_format="{:.4g}".format)
    print(printed)
    if path.exists():
        with open_file(path) as file:
            before = pd.read_csv(file, dtype={"figure": str})
        remaining = before[~before["figure"].isin(table["figure"])]
        if len(remaining):
            table = pd.concat([remaining, table]).sort_values("figure", kind="stable")
    return write_csv(path, table)


PAPER = Paper("gem", summary_of(__doc__), STUDIES, FIGURES, _keep, published.TASK)
draw, draw_study = PAPER.draw, PAPER.draw_study
