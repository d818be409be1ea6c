"""Replicas that seldom communicate: Parle, elastic averaging, leaders and local SGD.

Every method has the same workers, latency and communication period (--window, local steps between
two rounds), except data-parallel SGD, which communicates after each gradient, and Entropy-SGD,
whose single worker never does. All compute the same total number of gradients, with Nesterov
momentum in their local steps, each at its best learning rate: with the fewest diverged seeds, then
the lowest final test error, then the lowest final training loss. Prints gradients, communications
and simulated time to a target; writes traces, runs, two tables and a figure.
"""

import functools
import inspect
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import optax
import pandas as pd

from asyncsim.base.console import counted, note, number_text
from asyncsim.clusters.policy import barrier
from asyncsim.methods import METHODS, Timing, averaging
from asyncsim.problems import Problem
from asyncsim.problems.problem import measures
from asyncsim.study.cell import Cell
from asyncsim.study.columns import Column, text_of
from asyncsim.study.config import LawLike, MethodLike, StudyConfig
from asyncsim.study.finished import present, read
from asyncsim.study.ranking import Measure, at_the_edge, means, tuned
from asyncsim.study.sweep import Result, run_cells, sweep
from asyncsim.study.target import Target, check_rates

#: File with each method at its best learning rate.
TABLE = "replicas.csv"
#: Synchronous SGD whose workers communicate after each gradient.
PARALLEL = "data_parallel"


@dataclass(frozen=True)
class Config(StudyConfig):
    """Options of the study of replicas."""

    workers: int = 4
    """Workers of the cluster, each with a replica."""
    window: int = 25
    """Local steps between two communications."""
    steps: int = 20
    """Communications per worker, on average; each worker computes steps * window gradients."""
    latency: LawLike = "constant(1)"
    """Law of the time of a message one way (s); "[up, down]" for two."""
    methods: tuple[MethodLike, ...] = ("parle", "entropy_sgd", "easgd", "lsgd", "averaging")
    """Methods to compare, beside data-parallel SGD; averaging is local SGD."""
    tune: tuple[float, ...] = (0.003, 0.01, 0.03, 0.1, 0.3)
    """Learning rates to try for every method; the table shows each method at its best one."""
    target: float | None = None
    """Test accuracy to reach, or training loss if the problem has no accuracy. none: an accuracy of
    0.975, or a loss of 0.3."""
    seeds: int = 2
    """Number of seeds: 0, 1, ... One trace per seed for each timing."""

    def goal(self, problem: Problem) -> Target:
        """Return the target: a test accuracy, or a training loss if the problem has no accuracy."""
        of = "test_accuracy" if "test_accuracy" in measures(problem) else "train_loss"
        usual = 0.975 if of == "test_accuracy" else 0.3
        return Target(usual if self.target is None else self.target, of)

    def check(self) -> None:
        """Check the options; see `StudyOptions.check`."""
        super().check()
        check_rates(self.tune)


def run(config: Config) -> Result:
    """Run the study; see `asyncsim.study.sweep.run_cells`."""
    config.check()
    config.say_ignored(("learning_rate",), "beside --tune")
    with config.computing_device():
        cells = [
            _complete(cell)
            for cell in sweep(config, [{"learning_rate": rate} for rate in config.tune])
        ]
        goal = config.goal(cells[0].problem)
        goal.check()
        cells = [cell._replace(goal=goal) for cell in cells]
        return run_cells("replicas", config, cells, functools.partial(_conclude, config, goal))


def results_table(folder: Path) -> pd.DataFrame:
    """Tabulate each method at its best learning rate, in the order of the study.

    Columns: ``method``, ``learning_rate``, ``seeds``, ``diverged``, ``reached`` (seeds that met the
    target), ``gradients_to_target``, ``rounds_to_target`` (communications of each worker),
    ``time_to_target`` (s, simulated; all infinite if a seed did not meet it), the final
    ``test_error``, ``test_loss`` and ``train_loss`` if measured, and ``rounds`` and
    ``simulated_seconds`` of the whole run.
    """
    finished = read(folder, "replicas")
    summary = finished.summary
    goal = Measure("test_accuracy", "most") if "test_accuracy" in summary else Measure("train_loss")
    trace_of = functools.cache(finished.trace)  # several methods and all rates share a trace
    runs, visits, rounds = tuned(summary, ["method"], goal), [], []
    for run in runs.itertuples():
        frame = trace_of(run.trace_file).frame
        before, reached = (
            frame["commit_time"] <= run.time_to_target,
            np.isfinite(run.time_to_target),
        )
        lone = run.own_workers == 1  # a single worker never communicates
        rounds.append(0.0 if lone else len(frame) / run.own_workers)
        visits.append(
            np.inf if not reached else 0.0 if lone else float(before.sum()) / run.own_workers
        )
    columns = [
        "time_to_target",
        "gradients_to_target",
        "rounds_to_target",
        "test_accuracy",
        "test_loss",
        "train_loss",
    ]
    columns += ["rounds", "simulated_seconds"]
    runs = runs.assign(rounds_to_target=visits, rounds=rounds)
    table = means(runs, ["method", "learning_rate"], columns).rename(
        columns={"test_accuracy": "test_error"}
    )
    return table.assign(test_error=1 - table["test_error"]) if "test_error" in table else table


def _complete(cell: Cell) -> Cell:
    """Add data-parallel SGD to a cell, and Nesterov momentum to the methods that take an
    optimizer.
    """
    rate, momentum = cell.config.learning_rate, cell.config.momentum
    methods = [
        *cell.methods,
        averaging(rate)._replace(name=PARALLEL, timing=Timing(window=1, policy=barrier())),
    ]
    if cell.config.optimizer is None:
        local, named = (
            optax.sgd(rate, momentum, nesterov=True),
            {"learning_rate": rate, "local_momentum": momentum},
        )
        takes = {
            name
            for name, make in METHODS.items()
            if "optimizer" in inspect.signature(make).parameters
        }
        for place, method in enumerate(methods):
            if (
                method.name.partition("(")[0] in {*takes, PARALLEL}
                and "optimizer" not in method.hyperparameters
            ):
                methods[place] = method._replace(
                    optimizer=local, hyperparameters={**method.hyperparameters, **named}
                )
    return cell._replace(methods=methods)


def _verdict(table: pd.DataFrame) -> str:
    """Say which method reaches the target first."""
    reached = table[table["reached"] == table["seeds"]]
    if reached.empty:
        return "no method reached the target with every seed"
    first = reached.loc[reached["time_to_target"].idxmin()]
    seconds = number_text(first["time_to_target"])
    return f"{first['method']} is the first at the target, after {seconds} s"


def _conclude(config: Config, goal: Target, folder: Path, summary: pd.DataFrame) -> None:
    table = results_table(folder)
    workers = (
        f"{counted(config.workers, 'worker')}, {config.window} local steps between two "
        "communications"
    )
    rounds = Column("rounds", "rounds in all")
    columns = [
        rounds if name == "rounds" else name for name in table if name not in ("seeds", "diverged")
    ]
    text = (
        f"{workers}; gradients, rounds of communication and time until "
        f"{goal}\n{text_of(table, columns)}"
    )
    present(folder, {TABLE: table}, text, verdict=_verdict(table))
    if edge := at_the_edge(table, config.tune, table["method"]):
        note(edge)
