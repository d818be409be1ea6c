"""Pulled to the best replica, or to a mean: LSGD, EASGD and DOWNPOUR by communication period.

The comparison of the LSGD paper on one cluster: every method at each communication period
(--window, local steps between two visits) and learning rate, with the same number of gradients,
each at its best rate: with the fewest diverged seeds, then the lowest final test error, then the
lowest final training loss. With more workers than --group-size LSGD runs twice, with one leader and
with one leader per group.

On a problem without data the table has the length of the gradient where the central variable ends.
On wells it shows the paper's two claims: a resting leader is a stationary point of the loss, where
EASGD's center is not (wells(tilt=0.3)); on a symmetric landscape (wells) workers in different wells
hold EASGD's center between them, and follow a leader into one::

    asyncsim study leaders --problem "wells(tilt=0.3)" --workers 4
        --window 1 --learning-rate 0.01 --gradients 4000 --x64
        --methods "lgd(pull=0.005)" "easgd(alpha=0.005)"

Paper scale is ResNet-20 on CIFAR-10 with the settings of the authors' program and about nine
million gradients, for an accelerator. It omits the augmentation of images and the decay of the
learning rates.
"""

import inspect
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pandas as pd

from asyncsim.base.console import each_note_once, note
from asyncsim.base.errors import (
    InputError,
    require_count,
    require_fraction,
    require_nonnegative,
    require_positive,
)
from asyncsim.methods import METHODS, Method, lsgd, named_optimizer
from asyncsim.methods.leader import leaders
from asyncsim.problems.problem import Problem
from asyncsim.study.cell import Cell
from asyncsim.study.columns import text_of
from asyncsim.study.config import MethodLike, StudyConfig
from asyncsim.study.finished import Finished, present, read
from asyncsim.study.outcome import leading
from asyncsim.study.ranking import Measure, at_the_edge, tuned
from asyncsim.study.sweep import Result, SweepConfig, run_cells, sweep
from asyncsim.study.target import time_to_target

#: File with each method at its best rate.
TABLE = "leaders.csv"
#: LSGD with a leader for each group.
GROUPS = "lsgd_groups"


@dataclass(frozen=True)
class Config(SweepConfig):
    """Options of the study of leaders."""

    varied: ClassVar = ("workers", "window", "learning_rate")
    fewest_steps: ClassVar = 0

    workers: tuple[int, ...] = (4, 16)
    """Workers of the clusters, one after the other."""
    # A sequence, unlike in the base class: each cell has one value.
    window: tuple[int, ...] = (4, 16, 64)  # type: ignore[assignment]
    """Communication periods (local steps), one after the other."""
    # A sequence, unlike in the base class: each cell has one value.
    learning_rate: tuple[float, ...] = (0.3, 0.03, 0.003)  # type: ignore[assignment]  # as window
    """Learning rates to try for each method."""
    gradients: int = 512
    """Gradients of each worker, on average; each period must divide it."""
    steps: int = 0
    """Commits per worker. 0: from --gradients."""
    methods: tuple[MethodLike, ...] = ("lsgd", "aeasgd", "downpour")
    """Methods to compare, easgd say, or your own as FILE.py:FUNCTION (see the README)."""
    group_size: int = 4
    """Workers of a group with a separate leader; 4 in the paper's runs, the accelerators of a
    machine.
    """
    local_momentum: float = 0.0
    """Nesterov momentum of the local steps, from 0 to below 1."""
    weight_decay: float = 0.0
    """Weight decay of the local steps: multiple of the parameters that is added to each
    gradient.
    """
    target: float = 0.1
    """Test error (or training loss) whose time is reported."""
    seeds: int = 2
    """Number of seeds: 0, 1, ... One trace per seed, shared by the methods."""

    def check(self) -> None:
        """Check the options; see `StudyOptions.check`."""
        super().check()
        require_count("gradients", self.gradients)
        require_count("group_size", self.group_size)
        require_fraction("local_momentum", self.local_momentum)
        require_nonnegative("weight_decay", self.weight_decay)
        require_positive("target", self.target)
        if self.optimizer is not None and (self.local_momentum or self.weight_decay):
            raise InputError(
                f"optimizer = {self.optimizer!r}: local_momentum = {self.local_momentum:g} and "
                "weight_decay = "
                f"{self.weight_decay:g} are of plain steps; set both to 0, or leave the optimizer "
                "out"
            )
        for window in self.window:
            if self.gradients % window:
                raise InputError(f"window = {window}: must divide gradients = {self.gradients}")


SCALES = {
    "small": Config(),
    "paper": Config(
        scale="paper",
        problem="cifar10(network=resnet20)",
        batch_size=128,
        learning_rate=(0.1, 0.01, 0.001),
        local_momentum=0.9,
        weight_decay=1e-4,
        gradients=6400,
    ),
}


def run(config: Config) -> Result:
    """Run the study; see `asyncsim.study.sweep.run_cells`."""
    config.check()
    if config.steps and config.gradients != SCALES[config.scale].gradients:
        note("--gradients changes nothing beside --steps")
    with config.computing_device():
        grid = [
            {"workers": n, "window": window, "learning_rate": rate}
            for n in config.workers
            for window in config.window
            for rate in config.learning_rate
        ]
        cells = sweep(config, grid)
        optimized: dict[Any, Method] = {}
        with each_note_once():
            cells = [_complete(cell, config, optimized) for cell in cells]

        def conclude(folder: Path, summary: pd.DataFrame) -> None:
            table = results_table(read(folder, "leaders"), config.target, cells[0].problem)
            present(
                folder,
                {TABLE: table},
                report(cells[0].problem.name, table),
                verdict=_verdict(table),
            )
            names = [
                f"{row.method} with {row.workers} workers and window {row.window}"
                for row in table.itertuples()
            ]
            if edge := at_the_edge(table, config.learning_rate, names, "--learning-rate"):
                note(edge)

        return run_cells("leaders", config, cells, conclude)


def results_table(
    finished: Finished, target: float, problem: Problem | None = None
) -> pd.DataFrame:
    """Tabulate each number of workers, period and method at the method's best learning rate.

    Columns: ``workers``, ``window``, ``method``, ``learning_rate``, ``seeds``, ``diverged``,
    ``train_loss``; ``gradient`` of a problem without data (length of the gradient of the evaluated
    loss at the end); ``test_error`` if there is an accuracy; ``reached`` (seeds that met the
    target); ``time_to_target`` (s, simulated, mean; infinite if a seed did not meet it); for LSGD
    ``largest_share`` (elections won by the most frequent leader) and ``kept`` (elections that
    confirm the leader). Means over the seeds.
    """
    keys, summary, rows = ["workers", "window", "method"], finished.summary, []
    goal = Measure("test_accuracy", "most") if "test_accuracy" in summary else Measure("train_loss")
    for (n, window, method, rate), group in tuned(summary, keys, goal).groupby(
        [*keys, "learning_rate"], sort=False
    ):
        ended = group[group["status"] == "finished"]
        runs = [finished.run(name) for name in group["run_folder"]]
        row = {
            "workers": n,
            "window": window,
            "method": method,
            "learning_rate": rate,
            "seeds": len(group),
            "diverged": len(group) - len(ended),
            "train_loss": ended["train_loss"].mean(),
        }
        if problem is not None and problem.train is None:
            row["gradient"] = np.mean([_gradient(problem, run.params) for run in runs])
        if "test_accuracy" in group:
            row["test_error"] = 1 - ended["test_accuracy"].mean()
        times = [
            time_to_target(run.evaluations["commit_time"], errors(run.evaluations), target)
            for run in runs
        ]
        row |= {"reached": int(np.isfinite(times).sum()), "time_to_target": np.mean(times)}
        if method == "lsgd":
            elected = [leaders(run.commits, n) for run in runs]
            row["largest_share"] = np.mean(
                [np.bincount(winners).max() / len(winners) for winners in elected]
            )
            # Undefined for a single election.
            row["kept"] = np.mean(
                [
                    np.mean(winners[1:] == winners[:-1]) if len(winners) > 1 else np.nan
                    for winners in elected
                ]
            )
        rows.append(row)
    return pd.DataFrame(rows).sort_values(keys, key=_sort_key(finished), ignore_index=True)


def _gradient(problem: Problem, params: Any) -> float:
    """Return the length of the gradient of the loss that a problem without data evaluates."""
    state = problem.init_state() if problem.init_state else None
    # Of float32 runs, too: there the gradient's own round-off would hide the value.
    with jax.enable_x64(True):
        params = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float64), params)
        gradient = jax.grad(lambda tree: problem.evaluate(tree, state, None)["loss"])(params)
        return float(optax.tree.norm(gradient))


def errors(evaluations: pd.DataFrame) -> pd.Series:
    """Return a run's test errors, or its training losses if there is no accuracy."""
    return (
        1 - evaluations["test_accuracy"]
        if "test_accuracy" in evaluations
        else evaluations["train_loss"]
    )


def report(problem: str, table: pd.DataFrame) -> str:
    """Format the printed table."""
    rates = "each method at the best of its learning rates"
    return f"{problem}; {rates}; time until the target is reached\n{text_of(table)}"


def _verdict(table: pd.DataFrame) -> str:
    """Say which method has the lowest error in each setting."""
    column = "test_error" if "test_error" in table else "train_loss"
    is_finished = table["diverged"] < table["seeds"]
    status = is_finished.map({True: "finished", False: "diverged"})
    return leading(table.assign(status=status), ("workers", "window", "method"), column)


def _complete(cell: Cell, config: Config, optimized: dict[Any, Method]) -> Cell:
    """Set a cell's steps, grouped LSGD and the local optimizer; equal methods stay one object."""
    groups = cell.cluster.workers // config.group_size
    rate = cell.config.learning_rate
    methods = []
    for method in cell.methods:
        methods.append(optimized.setdefault(id(method), _optimized(method, rate, config)))
        if method.name == "lsgd" and groups > 1:
            grouped = _grouped(cell.config, groups)
            methods.append(optimized.setdefault((rate, groups), _optimized(grouped, rate, config)))
    steps = config.steps or int(config.gradients // cell.cluster.mean_window)
    return cell._replace(methods=methods).with_options(steps=steps)


def _grouped(config: StudyConfig, groups: int) -> Method:
    if config.optimizer is None:
        return lsgd(config.learning_rate, groups=groups)._replace(name=GROUPS)
    optimizer = named_optimizer(config.optimizer, config.learning_rate)
    return lsgd(groups=groups, optimizer=optimizer)._replace(name=GROUPS)


def _optimized(method: Method, rate: float, config: Config) -> Method:
    """Give a method the study's local optimizer, if it takes one."""
    if not config.local_momentum and not config.weight_decay:
        return method
    if (
        method.name in METHODS
        and "optimizer" not in inspect.signature(METHODS[method.name]).parameters
    ):
        note(
            f"local_momentum and weight_decay change nothing for {method.name}, which takes no "
            "optimizer"
        )
        return method
    optimizer = optax.chain(
        optax.add_decayed_weights(config.weight_decay),
        optax.sgd(rate, config.local_momentum, nesterov=True),
    )
    options = {"local_momentum": config.local_momentum, "weight_decay": config.weight_decay}
    return method._replace(
        optimizer=optimizer, hyperparameters={**method.hyperparameters, **options}
    )


def _sort_key(finished: Finished) -> Any:
    """Return a sort key: methods in the study's order, numbers by size."""
    names = list(dict.fromkeys(finished.summary["method"]))
    return lambda column: column.map(names.index) if column.name == "method" else column
