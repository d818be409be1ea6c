"""How much sooner more workers learn when a fixed batch is divided among them.

Figure 4 of the GEM paper: the effective batch is 256 examples, so each of n workers computes
gradients of 256 / n examples in an n-th of the time. Each gradient is applied at the full learning
rate, so that n workers take n times n as many, noisier steps per time: a speed-up beyond n comes
from more steps. All clusters get the same simulated seconds. The paper measured 60 s of wall clock
and names no time per gradient. At paper scale --compute, the law of the time of the whole batch on
one worker, is fitted to its curve of one worker. The service time bounds the throughput of many
workers: 1.8 ms fit its first 12 s with 16 workers.

Prints each cluster's time to a training loss, and the speedup over the smallest cluster; writes
this as a table, beside traces, runs, a summary and a figure. At paper scale about 320,000 commits
of MNIST's network, most of small batches: a quarter of an hour on two cores. Evaluations are few
there: for times to the target lower --evaluate-every.
"""

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import pandas as pd

from asyncsim.base.console import note, number_text
from asyncsim.base.errors import InputError, require_count, require_positive
from asyncsim.clusters.laws import as_law, scaled
from asyncsim.study.cell import Cell, commits_within
from asyncsim.study.columns import text_of
from asyncsim.study.config import LawLike, MethodLike
from asyncsim.study.finished import Finished, outcomes, present, read
from asyncsim.study.sweep import Result, SweepConfig, run_cells, sweep
from asyncsim.study.target import Target

#: File with the times to the target and the speedups.
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
    """Simulated time of every cluster (s)."""
    target: float = 0.3
    """Training loss whose time is reported."""
    compute: LawLike = "gamma(mean=0.1, cv=0.2)"
    """Law of the time of a gradient of the whole effective batch (s); a worker's share takes its
    share of that.
    """
    service: LawLike = "constant(0.0001)"
    """Law of the time that the server is busy with a visit (s)."""
    steps: int = 0
    """Commits per worker, regardless of --seconds. 0: from --seconds."""
    methods: tuple[MethodLike, ...] = ("gem",)
    """Methods to compare: gem, downpour, adaptive_staleness, sgd, or your own as FILE.py:FUNCTION
    (see the README).
    """
    seeds: int = 2
    """Number of seeds: 0, 1, ... One trace per seed, shared by the methods."""
    evaluate_every: int | None = 5
    """Worker steps between evaluations on all data, between which the time to the target is
    interpolated, linearly in the logarithm of the loss."""

    def check(self) -> None:
        """Check the options; see `StudyOptions.check`."""
        super().check()
        as_law("compute", self.compute)  # one, which is divided among the workers
        require_count("effective_batch", self.effective_batch)
        require_positive("seconds", self.seconds, "s")
        require_positive("target", self.target)
        if self.batch_size is not None:
            raise InputError(
                f"batch_size = {self.batch_size}: follows from the effective batch; give "
                "effective_batch"
            )
        for count in self.workers:
            if self.effective_batch % count:
                raise InputError(
                    f"workers = {count}: cannot divide an effective batch of "
                    f"{self.effective_batch}; "
                    "give numbers that do, or another effective_batch"
                )


SCALES = {
    "small": Config(),
    "paper": Config(
        scale="paper",
        problem="mnist",
        seconds=60.0,
        compute="gamma(mean=0.19, cv=0.2)",
        seeds=3,
        evaluate_every=600,
    ),
}


def run(config: Config) -> Result:
    """Run the study; see `asyncsim.study.sweep.run_cells`."""
    config.check()
    if config.steps and config.seconds != SCALES[config.scale].seconds:
        note("--seconds changes nothing beside --steps")
    law = as_law("compute", config.compute)
    with config.computing_device():
        grid = [
            {
                "workers": n,
                "batch_size": config.effective_batch // n,
                "compute": str(scaled(law, 1 / n)),
            }
            for n in config.workers
        ]
        cells = _divisible_cells(sweep(config, grid))
        for cell in cells:
            if cell.problem.batch_size not in (None, cell.values["batch_size"]):
                raise InputError(
                    f"problem = {cell.problem.name!r}: has minibatches of "
                    f"{cell.problem.batch_size}, but this "
                    "study derives their size from the workers; let it take a batch_size"
                )
        if cells[0].problem.batch_size is None:
            note(
                f"{cells[0].problem.name} has no minibatches: the noise of gradients does not "
                "depend on the workers, "
                "and --effective-batch only restricts their number"
            )
        cells = [cell._replace(goal=Target(config.target)) for cell in cells]
        if config.steps == 0:
            cells = [_with_duration(cell, config.seconds) for cell in cells]
        conclude = functools.partial(
            _conclude, config.target, cells[0].problem.batch_size is not None
        )
        return run_cells("speedup", config, cells, conclude)


def _divisible_cells(cells: list[Cell]) -> list[Cell]:
    """Remove single-worker methods from cells of several workers, which would leave part of the
    batch uncomputed.
    """
    lone_methods = [method.name for method in cells[0].methods if method.timing.workers == 1]
    several = [cell for cell in cells if cell.cluster.workers > 1]
    if not lone_methods or not several:
        return cells
    if len(lone_methods) == len(cells[0].methods) and len(several) == len(cells):
        raise InputError(
            f"methods = {', '.join(lone_methods)}: has one worker, so no batch can be divided; "
            "give others"
        )
    note(
        f"{', '.join(lone_methods)}: runs with one worker only, as more would leave the rest of "
        "the batch uncomputed"
    )
    divided = (
        cell
        if cell not in several
        else cell._replace(methods=[m for m in cell.methods if m.name not in lone_methods])
        for cell in cells
    )
    return [cell for cell in divided if cell.methods]


def speedups(finished: Finished, target: float) -> pd.DataFrame:
    """Tabulate the time to the target and the speedup by method and number of workers.

    Columns: ``method``, ``workers``, ``batch_size``, ``seeds``, ``target``, ``reached`` (seeds that
    met it), ``time_to_target`` (s, simulated; the mean, infinite if a seed did not meet it) with
    the seeds' range ``least_time`` to ``most_time``, and ``speedup``, relative to the fewest
    workers whose seeds all met the target; NaN for rows that did not.
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


def _verdict(table: pd.DataFrame) -> str:
    """Say the largest speedup of each method."""
    measured = table.dropna(subset="speedup")
    if measured.empty:
        return "no method reached the target with every seed"
    best = measured.loc[measured.groupby("method", sort=False)["speedup"].idxmax()]
    clauses = [
        f"{row.method} is {number_text(row.speedup)} times as fast with {row.workers} workers"
        for row in best.itertuples()
    ]
    return "; ".join(clauses)


def _conclude(target: float, divided: bool, folder: Path, summary: pd.DataFrame) -> None:
    table = speedups(read(folder, "speedup"), target)
    steps = "a share of the batch takes a full step: n workers take up to n\u00b2 as many steps"
    present(
        folder,
        {TABLE: table},
        f"simulated time until a training loss of {target:g} is reached; speedup over the fewest "
        "workers that reach it",
        text_of(table, ("method", "workers", "batch_size", "reached", "time_to_target", "speedup")),
        steps if divided and table["batch_size"].nunique() > 1 else "",
        f"\n{outcomes(folder, summary, ('workers', 'batch_size', 'method'))}",
        verdict=_verdict(table),
    )


def _with_duration(cell: Cell, seconds: float) -> Cell:
    """Set a cell's steps to the number that its cluster makes in ``seconds`` of simulated time."""
    return cell.with_options(
        steps=max(1, commits_within(cell.cluster, seconds) // cell.cluster.workers)
    )
