"""Replicas that seldom communicate: Parle, elastic averaging, leaders and local SGD.

Every method has the same workers, latency and communication period (--window, local steps between
two rounds), except data-parallel SGD, which communicates after each gradient, and Entropy-SGD,
whose single worker never does. All compute the same total number of gradients, with Nesterov
momentum in their local steps, each at its best learning rate: with the fewest diverged seeds, then
the lowest final test error, then the lowest final training loss. Prints gradients, communications
and simulated time to a target; writes traces, runs, tables and figures.
"""

from dataclasses import dataclass

import numpy as np

from asyncsim.clusters.policy import barrier
from asyncsim.methods import Timing, averaging
from asyncsim.problems import Problem
from asyncsim.replays.run import Run
from asyncsim.study.cell import Cell, CellRun
from asyncsim.study.comparison import Comparison, final_accuracy, with_nesterov
from asyncsim.study.sweep import ComparisonConfig, preset
from asyncsim.study.target import Target
from asyncsim.traces.trace import Trace

#: Synchronous SGD whose workers communicate after each gradient.
PARALLEL = "data_parallel"


@dataclass(frozen=True)
class Options(ComparisonConfig):
    """Options of the study of replicas."""

    target: float | None = None
    """Test accuracy to reach, or training loss if the problem has no accuracy. none: an accuracy of
    0.975, or a loss of 0.3."""

    def goal_on(self, problem: Problem) -> Target:
        """Return the target: a test accuracy, or a training loss if there is no accuracy."""
        of = final_accuracy(self, problem).name
        usual = 0.975 if of == "test_accuracy" else 0.3
        return Target(usual if self.target is None else self.target, of, self.hold)


Config, SCALES = preset(
    Options,
    small={
        "workers": 4,
        "window": 25,
        "steps": 20,
        "latency": "constant(1)",
        "methods": ("parle", "entropy_sgd", "easgd", "lsgd", "averaging"),
        "tune": (0.003, 0.01, 0.03, 0.1, 0.3),
        "hold": 0,
        "evaluate_every": None,
        "seeds": 2,
    },
)


def with_parallel(config: ComparisonConfig, cells: list[Cell]) -> list[Cell]:
    """Add data-parallel SGD, and give Nesterov momentum to the methods without an optimizer."""
    completed = []
    for cell in cells:
        rate = cell.config.learning_rate
        parallel = averaging(rate)._replace(
            name=PARALLEL, timing=Timing(window=1, policy=barrier())
        )
        methods = [*cell.methods, parallel]
        if config.optimizer is None:
            methods = [
                method
                if "optimizer" in method.hyperparameters
                else with_nesterov(method, rate, config.momentum)
                for method in methods
            ]
        completed.append(cell._replace(methods=methods))
    return completed


def rounds(job: CellRun, run: Run, trace: Trace) -> dict[str, float]:
    """Return the communications of each worker, until the target and in all; a lone worker has
    none.
    """
    assert job.cell.goal is not None
    reached = job.cell.goal.reached(run, trace)["time_to_target"]
    is_lone = trace.workers == 1
    visits = float((trace.frame["commit_time"] <= reached).sum()) / trace.workers
    return {
        "rounds_to_target": np.inf if np.isinf(reached) else visits * (not is_lone),
        "rounds": len(trace) / trace.workers * (not is_lone),
    }


run = Comparison(
    "replicas",
    measure=final_accuracy,
    columns=("rounds_to_target", "rounds"),
    of_run=rounds,
    prepare=with_parallel,
).run
