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

from dataclasses import dataclass
from typing import Any

import numpy as np

from asyncsim.base.console import note
from asyncsim.base.errors import InputError, require_count
from asyncsim.clusters.laws import as_law, scaled
from asyncsim.replays.run import Run
from asyncsim.study.cell import Cell, CellRun
from asyncsim.study.columns import titled
from asyncsim.study.comparison import Comparison, Further, Results
from asyncsim.study.config import StudyConfig
from asyncsim.study.sweep import ComparisonConfig, preset
from asyncsim.traces.trace import Trace

#: Examples of the workers' batches together.
_BATCH = 256


@dataclass(frozen=True)
class Options(ComparisonConfig):
    """Options of the speedup study."""

    def check(self) -> None:
        """Check the options; see `StudyConfig.check`."""
        if self.batch_size is not None:
            raise InputError(
                f"batch_size = {self.batch_size}: follows from the number of workers; leave it out"
            )
        super().check()

    def at(self, **values: Any) -> StudyConfig:
        """Return the options of a cell, whose workers divide the batch; ``compute`` is the law of
        the time for all of it.
        """
        options = super().at(**values)
        if _BATCH % require_count("workers", options.workers):
            raise InputError(
                f"workers = {options.workers}: cannot divide a batch of {_BATCH}; give numbers "
                "that do"
            )
        share = scaled(as_law("compute", options.compute), 1 / options.workers)
        return options.at(batch_size=_BATCH // options.workers, compute=str(share))


Config, SCALES = preset(
    Options,
    small={
        "workers": (1, 2, 4, 8, 16),
        "time_budget": 10.0,
        "target": 0.3,
        "compute": "gamma(mean=0.1, cv=0.2)",
        "service": "constant(0.0001)",
        "methods": ("gem",),
        "seeds": 2,
        "hold": 0,
        "evaluate_every": 5,
    },
    paper={
        "problem": "mnist",
        "time_budget": 60.0,
        "compute": "gamma(mean=0.19, cv=0.2)",
        "seeds": 3,
        "evaluate_every": 600,
    },
)


def divisible(config: Options, cells: list[Cell]) -> list[Cell]:
    """Leave methods of one worker out on clusters of several, where part of the batch would be
    uncomputed; raise InputError for a problem with minibatches of its own.
    """
    for cell in cells:
        problem = cell.problem
        if problem.batch_size not in (None, cell.config.batch_size):
            raise InputError(
                f"problem = {problem.name!r}: has minibatches of {problem.batch_size}, but this "
                "study derives their size from the workers; let it take a batch_size"
            )
    lone = [method.name for method in cells[0].methods if method.timing.workers == 1]
    if lone:
        note(f"{', '.join(lone)}: runs with one worker only; more leave the batch uncomputed")
    return [
        cell
        if cell.cluster.workers == 1
        else cell._replace(methods=[m for m in cell.methods if m.timing.workers != 1])
        for cell in cells
    ]


def batch(job: CellRun, run: Run, trace: Trace) -> dict[str, Any]:
    """Return the size of the minibatches."""
    return {"batch_size": job.cell.config.batch_size}


def speedups(table: Results) -> Further:
    """Tabulate the speed-up over the fewest workers that reach the target with every seed."""
    rows = table.best.sort_values("workers")[["method", "workers", "reached", "time_to_target"]]
    times = rows["time_to_target"].where(np.isfinite(rows["time_to_target"]))
    rows = rows.assign(speedup=times.groupby(rows["method"]).transform("first") / times)
    text = "speedup over the fewest workers that reach the target with every seed"
    return {"speedup.csv": rows}, [text, titled(rows)]


run = Comparison(
    "speedup", compared=("workers",), prepare=divisible, of_run=batch, further=speedups
).run
