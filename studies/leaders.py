"""Pulled to the best replica, or to a mean: LSGD, EASGD and DOWNPOUR by communication period.

The comparison of the LSGD paper on one cluster: every method at each communication period (--window, local steps
between two visits) and learning rate, with the same gradients for all, and each at the rate that is best for it there:
the one of the fewest seeds that diverged, then of the least error on the test data at the end, then of the least
loss on the training data.
With more workers than --group-size LSGD runs twice, with one leader and with one for each group.

Paper scale is ResNet-20 on CIFAR-10 with the settings of the authors' program, and about nine million gradients: for an
accelerator. Its augmentation of images is left out, and its learning rates never fall.
"""

import inspect
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import optax
import pandas as pd

from asyncsim.base.console import each_note_once, note
from asyncsim.base.errors import InputError, require_count, require_fraction, require_nonnegative, require_positive
from asyncsim.methods import METHODS, Method, lsgd, named_optimizer
from asyncsim.replays.run import Run
from asyncsim.study.cell import Cell
from asyncsim.study.columns import text_of
from asyncsim.study.config import MethodLike, StudyConfig
from asyncsim.study.finished import Finished, present, read
from asyncsim.study.ranking import Measure, at_the_edge, tuned
from asyncsim.study.sweep import Result, SweepConfig, run_cells, sweep
from asyncsim.study.target import time_to_target

#: The table of each method at its best rate, beside the summary of all runs.
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
    # Several values here, of which each cell has one.
    window: tuple[int, ...] = (4, 16, 64)  # type: ignore[assignment]
    """Communication periods (local steps), one after the other."""
    # Several values here, of which each cell has one.
    learning_rate: tuple[float, ...] = (0.3, 0.03, 0.003)  # type: ignore[assignment]
    """Step sizes of a gradient that are tried for each method."""
    gradients: int = 512
    """Gradients of each worker, on average; each period must divide it."""
    steps: int = 0
    """Commits per worker. 0: as many as its gradients make."""
    methods: tuple[MethodLike, ...] = ("lsgd", "aeasgd", "downpour")
    """Methods to compare, easgd say, or your own as FILE.py:FUNCTION (see the README)."""
    group_size: int = 4
    """Workers of a group with a leader of its own; 4 in the paper's runs, the accelerators of a machine."""
    local_momentum: float = 0.0
    """Nesterov momentum of the local steps, from 0 to below 1."""
    weight_decay: float = 0.0
    """Of the local steps: so many times the parameters are added to each gradient."""
    target: float = 0.1
    """Error on the test data (or loss on the training data) of which the time is told."""
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
                f"optimizer = {self.optimizer!r}: local_momentum = {self.local_momentum:g} and weight_decay = "
                f"{self.weight_decay:g} are of plain steps; set both to 0, or leave the optimizer out"
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
        made: dict[Any, Method] = {}
        with each_note_once():
            cells = [_complete(cell, config, made) for cell in cells]

        def conclude(folder: Path, summary: pd.DataFrame) -> None:
            table = results_table(read(folder, "leaders"), config.target)
            present(folder, {TABLE: table}, report(cells[0].problem.name, table))
            names = [f"{row.method} with {row.workers} workers and window {row.window}" for row in table.itertuples()]
            if edge := at_the_edge(table, config.learning_rate, names, "--learning-rate"):
                note(edge)

        return run_cells("leaders", config, cells, conclude)


def results_table(finished: Finished, target: float) -> pd.DataFrame:
    """Return a row per number of workers, period and method, at the method's best learning rate there.

    Columns: ``workers``, ``window``, ``method``, ``learning_rate``, ``seeds``, ``diverged``, ``train_loss``, with an
    accuracy ``test_error``, ``reached`` (seeds that met the target), ``time_to_target`` (s, simulated: the mean until
    that error, or that loss; infinite if a seed did not meet it), and of LSGD ``largest_share`` (elections won by the
    worker that won most) and ``kept`` (elections that leave the leader as it was), means over the seeds.
    """
    keys, summary, rows = ["workers", "window", "method"], finished.summary, []
    goal = Measure("test_accuracy", "most") if "test_accuracy" in summary else Measure("train_loss")
    for (n, window, method, rate), group in tuned(summary, keys, goal).groupby([*keys, "learning_rate"], sort=False):
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
        if "test_accuracy" in group:
            row["test_error"] = 1 - ended["test_accuracy"].mean()
        times = [time_to_target(run.evaluations["commit_time"], errors(run.evaluations), target) for run in runs]
        row |= {"reached": int(np.isfinite(times).sum()), "time_to_target": np.mean(times)}
        if method == "lsgd":
            elected = [leaders(run, n) for run in runs]
            row["largest_share"] = np.mean([np.bincount(one).max() / len(one) for one in elected])
            # Of a single election nobody knows.
            row["kept"] = np.mean([np.mean(one[1:] == one[:-1]) if len(one) > 1 else np.nan for one in elected])
        rows.append(row)
    return pd.DataFrame(rows).sort_values(keys, key=_place(finished), ignore_index=True)


def leaders(run: Run, workers: int) -> np.ndarray:
    """Return which worker has the least of all losses told last, after each commit: LSGD's one leader."""
    told, found = np.full(workers, np.inf), []
    for worker, loss in zip(run.commits["worker"], run.commits["loss"], strict=True):
        told[worker] = loss
        found.append(int(np.argmin(told)))
    return np.array(found)


def errors(evaluations: pd.DataFrame) -> pd.Series:
    """Return a run's errors on the test data, or the losses on the training data where there is no accuracy."""
    return 1 - evaluations["test_accuracy"] if "test_accuracy" in evaluations else evaluations["train_loss"]


def report(problem: str, table: pd.DataFrame) -> str:
    """Return what the study prints."""
    rates = "each method at the best of its learning rates"
    return f"{problem}; {rates}; time until the target is reached\n{text_of(table)}"


def _complete(cell: Cell, config: Config, made: dict[Any, Method]) -> Cell:
    """Return a cell with its steps, LSGD with groups, and the local optimizer; the same methods are one object."""
    groups = cell.cluster.workers // config.group_size
    rate = cell.config.learning_rate
    methods = []
    for method in cell.methods:
        methods.append(made.setdefault(id(method), _optimized(method, rate, config)))
        if method.name == "lsgd" and groups > 1:
            grouped = _grouped(cell.config, groups)
            methods.append(made.setdefault((rate, groups), _optimized(grouped, rate, config)))
    steps = config.steps or int(config.gradients // cell.cluster.mean_window)
    return cell._replace(methods=methods).with_options(steps=steps)


def _grouped(config: StudyConfig, groups: int) -> Method:
    if config.optimizer is None:
        return lsgd(config.learning_rate, groups=groups)._replace(name=GROUPS)
    optimizer = named_optimizer(config.optimizer, config.learning_rate)
    return lsgd(groups=groups, optimizer=optimizer)._replace(name=GROUPS)


def _optimized(method: Method, rate: float, config: Config) -> Method:
    """Return the method with the study's local optimizer, as far as its rule leaves room for one."""
    if not config.local_momentum and not config.weight_decay:
        return method
    if method.name in METHODS and "optimizer" not in inspect.signature(METHODS[method.name]).parameters:
        note(f"local_momentum and weight_decay change nothing for {method.name}, which takes no optimizer")
        return method
    optimizer = optax.chain(
        optax.add_decayed_weights(config.weight_decay),
        optax.sgd(rate, config.local_momentum, nesterov=True),
    )
    more = {"local_momentum": config.local_momentum, "weight_decay": config.weight_decay}
    return method._replace(optimizer=optimizer, hyperparameters={**method.hyperparameters, **more})


def _place(finished: Finished) -> Any:
    """Return what orders methods as they were given, and numbers by their size."""
    names = list(dict.fromkeys(finished.summary["method"]))
    return lambda column: column.map(names.index) if column.name == "method" else column
