"""Which method is best on a cluster: any methods side by side, by time or gradients.

Every option may have several values: ``--workers 4 16 --window 1 8`` ranks the methods on each
cluster. Every seed has one trace for each timing that some method needs, with the same random
numbers. Writes traces, runs, the tables of the methods and of all learning rates, and figures.
docs/compare.md explains the table.
"""

from dataclasses import dataclass
from typing import Literal

from asyncsim.base.errors import InputError, require_choice
from asyncsim.problems import Problem
from asyncsim.problems.problem import measures
from asyncsim.study.comparison import Comparison
from asyncsim.study.config import MethodLike
from asyncsim.study.ranking import Measure
from asyncsim.study.sweep import ComparisonConfig
from asyncsim.study.target import Target

#: Measures of every run, whatever the problem evaluates.
_ALWAYS = ("time_to_target", "gradients_to_target", "final_loss")


@dataclass(frozen=True)
class Config(ComparisonConfig):
    """Options of the comparison."""

    workers: int = 20
    """Workers of the cluster."""
    methods: tuple[MethodLike, ...] = ("sgd", "downpour", "adaptive_staleness", "gem")
    """Methods to compare, or your own as FILE.py:FUNCTION (see the README)."""
    learning_rate: float | None = None  # type: ignore[assignment]  # None: each method its own
    """Step size of a gradient, for all methods. none: each method's own default."""
    measure: str = "time_to_target"
    """Measure that sorts the table and chooses the best learning rate. time_to_target,
    gradients_to_target, final_loss (of minibatches), or a measure of the problem's evaluation, such
    as test_accuracy."""
    best: Literal["least", "most"] | None = None
    """Which values of the measure are best. none: the most of accuracies, the least of losses,
    times and counts.
    """

    def measured(self, problem: Problem) -> Measure:
        """Return the measure by which methods are compared; raise InputError for one that the
        problem lacks, or whose best values are unknown.
        """
        name = require_choice("measure", self.measure, [*_ALWAYS, *sorted(measures(problem))])
        kind = "loss" if name in _ALWAYS else name.partition("_")[2]
        best = self.best or {"loss": "least", "accuracy": "most"}.get(kind)
        if best is None:
            raise InputError(
                f"measure = {name!r}: best values unknown; give best = 'least' or 'most'"
            )
        if best == "most" and name in _ALWAYS:
            raise InputError(f"best = 'most': smaller values of {name} are better; leave it out")
        return Measure(name, best)

    def goal_on(self, problem: Problem) -> Target:
        """Return the target: of the measure if that is a loss or an accuracy, else of the training
        loss.
        """
        is_evaluated = self.measure.startswith(("train_", "test_"))
        is_target = is_evaluated and self.measure.endswith(("loss", "accuracy"))
        return self.goal_of(self.measure if is_target else "train_loss")


run = Comparison("compare", measure=Config.measured).run
