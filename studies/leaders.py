"""Pulled to the best replica, or to a mean: LSGD, EASGD and DOWNPOUR by communication period.

The comparison of the LSGD paper on one cluster: every method at each communication period
(--window, local steps between two visits), with the same number of gradients, each at its best
rate. With more workers than --group-size LSGD runs twice, with one leader and
with one leader per group.

On a problem without data the table has the length of the gradient where the central variable ends.
On wells it shows the paper's two claims: a resting leader is a stationary point of the loss, where
EASGD's center is not (wells(tilt=0.3)); on a symmetric landscape (wells) workers in different wells
hold EASGD's center between them, and follow a leader into one::

    asyncsim study leaders --problem "wells(tilt=0.3)" --workers 4
        --window 1 --tune 0.01 --gradients 4000 --x64
        --methods "lgd(pull=0.005)" "easgd(alpha=0.005)"

Paper scale is ResNet-20 on CIFAR-10 with the settings of the authors' program and about nine
million gradients, for an accelerator. It omits the augmentation of images and the decay of the
learning rates.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from asyncsim.base.errors import (
    InputError,
    require_count,
    require_fraction,
    require_nonnegative,
)
from asyncsim.methods import Method, lsgd, named_optimizer
from asyncsim.problems import Problem
from asyncsim.replays.run import Run, leaders
from asyncsim.study.cell import Cell, CellRun
from asyncsim.study.comparison import Comparison, final_accuracy, with_nesterov
from asyncsim.study.sweep import ComparisonConfig, preset
from asyncsim.study.target import Target
from asyncsim.traces.trace import Trace

#: LSGD with a leader for each group.
GROUPS = "lsgd_groups"


@dataclass(frozen=True)
class Options(ComparisonConfig):
    """Options of the study of leaders."""

    target: float = 0.1
    """Test error (or training loss) whose time is reported."""
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

    def goal_on(self, problem: Problem) -> Target:
        """Return the target: a test error, or a training loss if there is no accuracy."""
        of = final_accuracy(self, problem).name
        return Target(self.target if of == "train_loss" else 1 - self.target, of, self.hold)

    def check(self) -> None:
        """Check the options; see `StudyConfig.check`."""
        super().check()
        require_count("group_size", self.group_size)
        require_fraction("local_momentum", self.local_momentum)
        require_nonnegative("weight_decay", self.weight_decay)
        if self.optimizer is not None and (self.local_momentum or self.weight_decay):
            raise InputError(
                f"optimizer = {self.optimizer!r}: local_momentum = {self.local_momentum:g} and "
                f"weight_decay = {self.weight_decay:g} are of plain steps; set both to 0, or leave "
                "the optimizer out"
            )
        for window in self.varied.get("window", (self.window,)):
            if self.gradients is not None and self.gradients % window:
                raise InputError(f"window = {window}: must divide gradients = {self.gradients}")


Config, SCALES = preset(
    Options,
    small={
        "workers": (4, 16),
        "window": (4, 16, 64),
        "tune": (0.3, 0.03, 0.003),
        "gradients": 512,
        "methods": ("lsgd", "aeasgd", "downpour"),
        "hold": 0,
        "evaluate_every": None,
        "seeds": 2,
    },
    paper={
        "problem": "cifar10(network=resnet20)",
        "batch_size": 128,
        "tune": (0.1, 0.01, 0.001),
        "local_momentum": 0.9,
        "weight_decay": 1e-4,
        "gradients": 6400,
    },
)


def grouped(config: Options, cells: list[Cell]) -> list[Cell]:
    """Add LSGD with a leader per group, and set the local optimizer; equal methods stay one
    object.
    """
    completed: list[Cell] = []
    optimized: dict[Any, Method] = {}
    for cell in cells:
        groups, rate = cell.cluster.workers // config.group_size, cell.config.learning_rate
        methods: dict[Any, Method] = {id(method): method for method in cell.methods}
        if groups > 1 and any(method.name == "lsgd" for method in cell.methods):
            optimizer = config.optimizer and named_optimizer(config.optimizer, rate)
            methods[rate, groups] = lsgd(rate, groups=groups, optimizer=optimizer)._replace(
                name=GROUPS
            )
        if config.local_momentum or config.weight_decay:
            options = rate, config.local_momentum, config.weight_decay
            methods = {key: with_nesterov(method, *options) for key, method in methods.items()}
        cell_methods = [optimized.setdefault(key, method) for key, method in methods.items()]
        completed.append(cell._replace(methods=cell_methods))
    return completed


def elections(job: CellRun, run: Run, trace: Trace) -> dict[str, float]:
    """Return how often LSGD's most frequent leader and the present one win, and the length of the
    gradient at the end of a problem without data.
    """
    columns = {}
    if job.method.name == "lsgd":
        winners = leaders(run.commits, trace.workers)
        columns["largest_share"] = float(np.bincount(winners).max() / len(winners))
        # Undefined for a single election.
        columns["kept"] = (
            float(np.mean(winners[1:] == winners[:-1])) if len(winners) > 1 else float("nan")
        )
    if (problem := job.cell.problem).train is None:
        state = problem.init_state() if problem.init_state else None
        # Of float32 runs, too: there the gradient's own round-off would hide the value.
        with jax.enable_x64(True):
            params = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float64), run.params)
            gradient = jax.grad(lambda tree: problem.evaluate(tree, state, None)["loss"])(params)
            columns["gradient"] = float(optax.tree.norm(gradient))
    return columns


run = Comparison(
    "leaders",
    measure=final_accuracy,
    columns=("gradient", "largest_share", "kept"),
    of_run=elections,
    prepare=grouped,
).run
