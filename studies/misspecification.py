"""What too high a learning rate does: momentum SGD on one worker, GEM and DOWNPOUR on several.

Figure 6 of the GEM paper, at a learning rate of 0.1 instead of 0.05, and a sweep of rates, because
methods should be compared at their best rates. A method that needs a single worker, as sgd does,
runs on such a cluster only, for the same number of worker steps.

At paper scale about 800,000 commits of MNIST's network: one to two hours on two cores.
"""

import functools
from dataclasses import dataclass
from typing import ClassVar

from asyncsim.study.cell import Cell
from asyncsim.study.config import MethodLike
from asyncsim.study.finished import report
from asyncsim.study.sweep import Result, SweepConfig, run_cells, sweep


@dataclass(frozen=True)
class Config(SweepConfig):
    """Options of the misspecification study."""

    varied: ClassVar = ("workers", "learning_rate")

    workers: tuple[int, ...] = (5, 10, 20)
    """Workers of the clusters, one after the other; sgd always has one worker."""
    # A sequence, unlike in the base class: each cell has one value.
    learning_rate: tuple[float, ...] = (0.05, 0.1, 0.2)  # type: ignore[assignment]
    """Step sizes of a gradient, one after the other, for all methods."""
    methods: tuple[MethodLike, ...] = ("sgd", "gem", "downpour")
    """Methods to compare: gem, downpour, adaptive_staleness, sgd, or your own as FILE.py:FUNCTION
    (see the README).
    """
    seeds: int = 2
    """Number of seeds: 0, 1, ... One trace per seed, shared by the methods."""
    steps: int = 100
    """Commits per worker, on average; a trace has steps * workers commits."""


SCALES = {
    "small": Config(),
    "paper": Config(
        scale="paper",
        problem="mnist",
        learning_rate=(0.1, 0.025, 0.05, 0.2),
        steps=938,
        seeds=3,
        evaluate_every=469,
    ),
}


def run(config: Config) -> Result:
    """Run the study; see `asyncsim.study.sweep.run_cells`."""
    config.check()
    with config.computing_device():
        counts = dict.fromkeys((1, *config.workers))
        grid = [
            {"learning_rate": rate, "workers": n} for rate in config.learning_rate for n in counts
        ]
        cells = [_methods_for_workers(cell, config.workers) for cell in sweep(config, grid)]
        conclude = functools.partial(report, by=("learning_rate", "method", "workers"))
        return run_cells(
            "misspecification", config, [cell for cell in cells if cell.methods], conclude
        )


def _methods_for_workers(cell: Cell, workers: tuple[int, ...]) -> Cell:
    """Restrict a cell to the methods that belong to its number of workers."""
    count = cell.cluster.workers
    sequential = [method for method in cell.methods if method.timing.workers == 1]
    parallel = [method for method in cell.methods if method.timing.workers != 1]
    return cell._replace(
        methods=(sequential if count == 1 else []) + (parallel if count in workers else [])
    )
