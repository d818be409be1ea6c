"""How much sooner more workers learn when a batch of a given size is divided among them.

Figure 4 of the GEM paper: the effective batch is 256 examples, so each of n workers computes gradients of 256 / n, and
that takes it an n-th of the time. Each steps by its own gradient at the full learning rate, so that n workers take n
times n as many steps in a time, of noisier gradients: a speed-up beyond n is that of more steps. All clusters are given
the same simulated seconds. The paper measured 60 s of wall clock; what a gradient took there is unknown, so --compute,
the law of the time of the whole batch on one worker, is a guess here, as is the service time, which bounds the
throughput of many workers.

Prints how long each cluster needs until a training loss is reached, and how many times as quick that is as the fewest
workers; writes that as a table, beside traces, runs, a summary and a figure. At paper scale about 600,000 commits of
MNIST's network, most of small batches: half an hour to an hour on two cores.
"""

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import pandas as pd

from asyncsim.base.console import note
from asyncsim.base.errors import InputError, require_count, require_positive
from asyncsim.clusters.laws import as_law, scaled
from asyncsim.study.cell import Cell, commits_within
from asyncsim.study.columns import text_of
from asyncsim.study.config import LawLike, MethodLike
from asyncsim.study.finished import Finished, outcomes, present, read
from asyncsim.study.sweep import Result, SweepConfig, run_cells, sweep
from asyncsim.study.target import Target

#: How much sooner more workers met the target, beside the summary of all runs.
TABLE = "speedup.csv"


@dataclass(frozen=True)
class Config(SweepConfig):
    """Options of the speedup study."""

    fewest_steps: ClassVar = 0

    workers: tuple[int, ...] = (1, 2, 4, 8, 16)
    """Workers of the clusters, one after the other; each must divide the effective batch."""
    effective_batch: int = 256
    """Examples of the workers' batches together."""
    seconds: float = 10.0
    """Simulated time that every cluster is given (s)."""
    target: float = 0.3
    """Loss on the training data until which the time is told."""
    compute: LawLike = "gamma(mean=0.1, cv=0.2)"
    """Law of the time of a gradient of the whole effective batch (s); a worker's share takes its share of that."""
    service: LawLike = "constant(0.0001)"
    """Law of the time that the server is busy with a visit (s)."""
    steps: int = 0
    """Commits per worker, whatever the seconds. 0: as many as there is time for."""
    methods: tuple[MethodLike, ...] = ("gem",)
    """Methods to compare: gem, downpour, adaptive_staleness, sgd, or your own as FILE.py:FUNCTION (see the README)."""
    seeds: int = 2
    """Number of seeds: 0, 1, ... One trace per seed, shared by the methods."""
    evaluate_every: int | None = 5
    """Worker steps between evaluations on all data, between which the time to the target is interpolated, linearly in
    the logarithm of the loss."""

    def check(self) -> None:
        """Check the options; see `StudyOptions.check`."""
        super().check()
        as_law("compute", self.compute)  # one, which is divided among the workers
        require_count("effective_batch", self.effective_batch)
        require_positive("seconds", self.seconds, "s")
        require_positive("target", self.target)
        if self.batch_size is not None:
            raise InputError(f"batch_size = {self.batch_size}: follows from the effective batch; give effective_batch")
        for count in self.workers:
            if self.effective_batch % count:
                raise InputError(
                    f"workers = {count}: cannot divide an effective batch of {self.effective_batch}; "
                    "give numbers that do, or another effective_batch"
                )


SCALES = {
    "small": Config(),
    "paper": Config(scale="paper", problem="mnist", seconds=60.0, seeds=3, evaluate_every=600),
}


def run(config: Config) -> Result:
    """Run the study; see `asyncsim.study.sweep.run_cells`."""
    config.check()
    if config.steps and config.seconds != SCALES[config.scale].seconds:
        note("--seconds changes nothing beside --steps")
    whole = as_law("compute", config.compute)
    with config.computing_device():
        grid = [
            {
                "workers": n,
                "batch_size": config.effective_batch // n,
                "compute": str(scaled(whole, 1 / n)),
            }
            for n in config.workers
        ]
        cells = _that_divide(sweep(config, grid))
        for cell in cells:
            if cell.problem.batch_size not in (None, cell.values["batch_size"]):
                raise InputError(
                    f"problem = {cell.problem.name!r}: has minibatches of {cell.problem.batch_size}, but those of this "
                    "study follow from the workers; let it take a batch_size"
                )
        if cells[0].problem.batch_size is None:
            note(
                f"{cells[0].problem.name} has no minibatches: gradients are as noisy whatever the number of workers, "
                "and --effective-batch only says which numbers there may be"
            )
        cells = [cell._replace(goal=Target(config.target)) for cell in cells]
        if config.steps == 0:
            cells = [_long_enough(cell, config.seconds) for cell in cells]
        conclude = functools.partial(_conclude, config.target, cells[0].problem.batch_size is not None)
        return run_cells("speedup", config, cells, conclude)


def _that_divide(cells: list[Cell]) -> list[Cell]:
    """Return the cells; of several workers without the methods of one, which would leave most of a batch uncomputed."""
    alone = [method.name for method in cells[0].methods if method.timing.workers == 1]
    several = [cell for cell in cells if cell.cluster.workers > 1]
    if not alone or not several:
        return cells
    if len(alone) == len(cells[0].methods) and len(several) == len(cells):
        raise InputError(f"methods = {', '.join(alone)}: has one worker, among whom no batch is divided; give others")
    note(f"{', '.join(alone)}: runs with one worker only, as more would leave the rest of the batch uncomputed")
    kept = (
        cell if cell not in several else cell._replace(methods=[m for m in cell.methods if m.name not in alone])
        for cell in cells
    )
    return [cell for cell in kept if cell.methods]


def speedups(finished: Finished, target: float) -> pd.DataFrame:
    """Return how much sooner more workers met a target: a row for each method and number of workers.

    Columns: ``method``, ``workers``, ``batch_size``, ``seeds``, ``target``, ``reached`` (seeds that met it),
    ``time_to_target`` (s, simulated; the mean, infinite if a seed did not meet it) with ``least_time`` and
    ``most_time`` of the seeds, and ``speedup``, that time of the fewest workers whose seeds all met it over this one;
    NaN of those that did not.
    """
    table = finished.summary.groupby(["method", "workers"], as_index=False).agg(
        batch_size=("batch_size", "first"),
        seeds=("seed", "size"),
        reached=("time_to_target", lambda seconds: np.isfinite(seconds).sum()),
        time_to_target=("time_to_target", "mean"),
        least_time=("time_to_target", "min"),
        most_time=("time_to_target", "max"),
    )
    table.insert(4, "target", target)
    finite = table["time_to_target"].where(np.isfinite(table["time_to_target"]))
    return table.assign(speedup=finite.groupby(table["method"]).transform("first") / finite)


def _conclude(target: float, divided: bool, folder: Path, summary: pd.DataFrame) -> None:
    table = speedups(read(folder, "speedup"), target)
    steps = "a share of the batch steps as far as all of it does: n workers take up to n\u00b2 as many steps"
    present(
        folder,
        {TABLE: table},
        f"simulated time until a train loss of {target:g} is reached; speedup over the fewest workers that reach it",
        text_of(table, ("method", "workers", "batch_size", "reached", "time_to_target", "speedup")),
        steps if divided and table["batch_size"].nunique() > 1 else "",
        f"\n{outcomes(folder, summary, ('workers', 'batch_size', 'method'))}",
    )


def _long_enough(cell: Cell, seconds: float) -> Cell:
    """Return a cell with as many steps as its cluster makes in some simulated seconds."""
    return cell.with_options(steps=max(1, commits_within(cell.cluster, seconds) // cell.cluster.workers))
