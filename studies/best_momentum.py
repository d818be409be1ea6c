"""Which explicit momentum is best for each number of workers, beside the one of asynchrony.

Asynchronous SGD with momentum on the server, by default on a quadratic::

    m       <- server_momentum * m - learning_rate * gradient
    central <- central + m

Every number of workers computes the same number of gradients, at each momentum and each learning
rate; a momentum is judged by the final loss at its best learning rate. With one worker and exact
gradients the best momentum is known, ``((sqrt(k) - 1) / (sqrt(k) + 1))**2`` for the condition
number k: 0.67 by default, where k is 100. Mitliagkas, Zhang, Hadjis and Ré (2016, arXiv 1605.09774)
report that the best momentum falls from 0.6 or 0.7 towards 0 with more workers, and below 0 if
asynchrony alone adds too much.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import optax
import pandas as pd

from asyncsim.base.console import counted, over_seeds
from asyncsim.base.errors import InputError, require_count, require_positive
from asyncsim.methods import Method, async_local_sgd
from asyncsim.replays.ensemble import replay_ensemble
from asyncsim.simulation.simulate import simulate
from asyncsim.study import results
from asyncsim.study.cell import Cell
from asyncsim.study.columns import text_of
from asyncsim.study.config import LawLike, MethodLike, ProblemLike
from asyncsim.study.finished import present
from asyncsim.study.jobs import Result, executor_of, measurement, run_jobs
from asyncsim.study.outcome import ends
from asyncsim.study.sweep import SweepConfig, check_values, sweep
from asyncsim.theory import implicit_momentum

#: File with the best momentum of each number of workers.
TABLE = "best.csv"

#: Options without effect: the study fixes the method, and evaluates a run at its start and its end.
_IGNORED = (
    "steps",
    "optimizer",
    "momentum",
    "evaluate_every",
    "diagnose_every",
    "diagnose_energy",
    "directions_every",
    "animate",
)


@dataclass(frozen=True)
class Config(SweepConfig):
    """Options of the study of explicit momentum."""

    varied: ClassVar = ("workers", "learning_rate")

    workers: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    """Workers of the clusters, one after the other."""
    server_momentum: tuple[float, ...] = (-0.6, -0.4, -0.2, 0.0, 0.2, 0.4, 0.6, 0.7, 0.8)
    """Explicit momenta, above -1 and below 1."""
    # A sequence, unlike in the base class: each cell has one value.
    learning_rate: tuple[float, ...] = tuple(2.0 ** (k / 2) for k in range(-10, 5))  # type: ignore[assignment]
    """Learning rates to choose the best of, for each momentum."""
    gradients: int = 600
    """Gradients of each run, by all workers together."""
    compute: LawLike = "exponential(1)"
    """Law of the time of a local step (s); "[constant(1)]*90 + [constant(3)]*10" gives one per
    worker.
    """
    service: LawLike = "constant(0)"
    """Law of the time that the server is busy with a visit (s)."""
    problem: ProblemLike = "quadratic(curvature=[1, 0.3, 0.1, 0.03, 0.01], noise=0)"
    """A quadratic, digits, or any other problem; large ones take long."""
    x64: bool = True
    """Compute in float64 instead of float32."""
    methods: tuple[MethodLike, ...] = ("async_local_sgd",)
    """Fixed by the study (momentum on the server); leave it out."""

    def check(self) -> None:
        """Check the options; see `StudyOptions.check`."""
        if self.methods != type(self).methods:
            raise InputError(
                f"methods = {self.methods!r}: this study fixes its method; leave it out"
            )
        super().check()
        require_count("gradients", self.gradients)
        for rate in self.learning_rate:
            require_positive("learning_rate", rate)
        check_values("server_momentum", self.server_momentum)
        for value in self.server_momentum:
            if not -1 < value < 1:
                raise InputError(f"server_momentum = {value!r}: must be above -1 and below 1")


SCALES = {
    "small": Config(),
    "paper": Config(
        scale="paper",
        workers=(1, 2, 4, 8, 16, 32, 64),
        seeds=10,
        server_momentum=tuple(round(0.1 * k, 1) for k in range(-9, 10)),
        learning_rate=tuple(2.0 ** (k / 2) for k in range(-18, 5)),
    ),
}


def run(config: Config) -> Result:
    """Run the study; see `asyncsim.study.jobs.run_jobs`."""
    config.check()
    config.say_ignored(_IGNORED, "here")
    with config.computing_device():
        cells = sweep(config, [{"workers": n} for n in config.workers])
        swept = {name: list(getattr(config, name)) for name in ("learning_rate", "server_momentum")}
        record = {
            "study": "best_momentum",
            **config.record([heavy_ball()], cells[0].problem),
            **swept,
        }
        jobs = [
            measurement(
                f"{cell.cluster.workers} workers, seed {seed}",
                _losses,
                *(config, cell, seed),
                labels={"workers": cell.cluster.workers, "seed": seed},
            )
            for cell in cells
            for seed in range(config.seeds)
        ]
        executor = executor_of(config, [(cell.problem, cell.cluster.workers) for cell in cells])

        def conclude(folder: Path, summary: pd.DataFrame) -> None:
            best = best_momentum(summary)
            seeds = over_seeds(summary["seed"].nunique(), "geometric means over")
            gradients = counted(config.gradients, "gradient")
            text = (
                f"{record['problem']}, lowest training loss after {gradients}; "
                f"{seeds}\n{text_of(best)}"
            )
            momenta = [
                f"{row.server_momentum:g} with {counted(row.workers, 'worker')}"
                for row in best.itertuples()
            ]
            verdict = f"the best explicit momentum is {', '.join(momenta)}"
            present(folder, {TABLE: best}, text, verdict=verdict)

        return run_jobs("best_momentum", config, record, jobs, executor, conclude)


def heavy_ball(learning_rate: float = 0.05, server_momentum: float = 0.0) -> Method:
    """Return asynchronous SGD with momentum on the server, which may be negative."""
    method = async_local_sgd(learning_rate, server_optimizer=optax.sgd(1.0, server_momentum))
    values = {"learning_rate": learning_rate, "server_momentum": server_momentum}
    return method._replace(name="heavy_ball", hyperparameters=values)


def best_momentum(summary: pd.DataFrame) -> pd.DataFrame:
    """Choose the best momentum of each number of workers.

    ``summary``: a row for each run: ``workers``, ``seed``, ``server_momentum``, ``learning_rate``,
    ``train_loss`` (infinite if it diverged).

    Returns ``workers``; ``server_momentum`` and ``learning_rate`` with the lowest geometric mean
    over the seeds, ``train_loss``; ``lowest`` and ``highest``, the range over seeds of the best
    momentum; ``implicit``, ``1 - 1/n``.
    """
    rows = []
    for workers, runs in summary.groupby("workers"):
        choices = ["server_momentum", "learning_rate"]
        mean = log_loss(runs).groupby([runs[name] for name in choices]).mean()
        momentum, rate = mean.idxmin()
        best_by_seed = runs.loc[runs.groupby("seed")["train_loss"].idxmin(), "server_momentum"]
        rows.append(
            {
                "workers": workers,
                "server_momentum": momentum,
                "learning_rate": rate,
                "train_loss": 10 ** mean.min(),
                "lowest": best_by_seed.min(),
                "highest": best_by_seed.max(),
                "implicit": implicit_momentum(int(workers)),
            }
        )
    return pd.DataFrame(rows)


def log_loss(runs: pd.DataFrame) -> pd.Series:
    """Return the decimal logarithm of the losses, for geometric means."""
    with np.errstate(divide="ignore"):
        return np.log10(runs["train_loss"])


def _losses(config: Config, cell: Cell, seed: int) -> dict[str, list[dict[str, Any]]]:
    """Replay all momenta and learning rates on the trace of a number of workers and a seed; return
    the rows.
    """
    commits = max(1, int(config.gradients // cell.cluster.mean_window))
    with config.computing_device():
        runs = replay_ensemble(
            simulate(cell.cluster, commits, seed),
            heavy_ball,
            cell.problem,
            seeds=[seed],
            precision=config.precision,
            evaluate_every=commits,
            server_momentum=config.server_momentum,
            learning_rate=config.learning_rate,
        )
    rows = [
        {
            "workers": cell.cluster.workers,
            "seed": seed,
            **run.config["hyperparameters"],
            **ends(run),
        }
        for run in runs
    ]
    return {results.SUMMARY: rows}
