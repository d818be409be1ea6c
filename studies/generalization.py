"""Whether many epochs overfit: training and test loss of GEM, and of SGD on one worker.

Figure 5 of the GEM paper: 30 passes through the training data, by all workers together with GEM and
by one worker with momentum SGD, so that both compute the same number of gradients. The paper calls
the test data validation data, and its training loss is of minibatches, with dropout. It names no
number of workers; 5 to 10 come nearest.

At paper scale about 250,000 commits of MNIST's network, evaluated about 30 times a run: an hour on
two cores.
"""

import functools
from dataclasses import dataclass
from typing import ClassVar

from asyncsim.base.errors import InputError, require_count
from asyncsim.study.cell import Cell
from asyncsim.study.config import MethodLike
from asyncsim.study.finished import report
from asyncsim.study.sweep import Result, SweepConfig, run_cells, steps_of_epochs, sweep


@dataclass(frozen=True)
class Config(SweepConfig):
    """Options of the generalization study."""

    fewest_steps: ClassVar = 0

    workers: tuple[int, ...] = (10,)
    """Workers of the clusters, one after the other; sgd always has one worker."""
    epochs: int = 30
    """Passes through the training data, by all workers together."""
    steps: int = 0
    """Commits per worker, whatever the epochs. 0: as many as the epochs take."""
    evaluate_every: int | None = None
    """Worker steps between evaluations on all data. none: about one for each epoch."""
    methods: tuple[MethodLike, ...] = ("gem", "sgd")
    """Methods to compare: gem, downpour, adaptive_staleness, sgd, or your own as FILE.py:FUNCTION
    (see the README).
    """

    def check(self) -> None:
        """Check the options; see `StudyOptions.check`."""
        super().check()
        require_count("epochs", self.epochs)


SCALES = {
    "small": Config(),
    "paper": Config(scale="paper", problem="mnist", workers=(5, 10)),
}


def run(config: Config) -> Result:
    """Run the study; see `asyncsim.study.sweep.run_cells`."""
    config.check()
    if config.steps:
        config.say_ignored(["epochs"], "beside --steps")
    with config.computing_device():
        cells = sweep(config, [{"workers": n} for n in config.workers])
        if cells[0].problem.test is None:
            name = cells[0].problem.name
            raise InputError(
                f"problem = {name!r}: has no test data to generalize to; choose another, digits say"
            )
        if config.steps == 0:
            cells = [_of_epochs(cell, config.epochs) for cell in cells]
        conclude = functools.partial(report, by=("workers", "method"))
        return run_cells("generalization", config, cells, conclude)


def _of_epochs(cell: Cell, epochs: int) -> Cell:
    """Set a cell's steps so that all workers together make ``epochs`` passes through the training
    data.
    """
    steps = steps_of_epochs(cell, epochs)
    interval = cell.config.evaluate_every or max(1, steps // epochs)
    return cell.with_options(steps=steps, evaluate_every=interval)
