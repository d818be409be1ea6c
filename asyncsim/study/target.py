"""What runs are to reach, and when they have: a loss from above, an accuracy from below."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from asyncsim.errors import InputError, require_choice, require_positive

#: Ends of the names of what may be a target: of others nobody knows which values are best.
_KINDS = ("loss", "accuracy")
#: Of accuracies in float32, in which nine of ten are less than 0.9.
_ROUND_OFF = 1e-6


class Target(NamedTuple):
    """A value of an evaluation that is to be reached."""

    value: float
    of: str = "train_loss"  #: ``"train_loss"``, ``"test_accuracy"`` and so on

    def __str__(self) -> str:
        part, _, kind = self.of.partition("_")
        return f"a {part} {kind.replace('_', ' ')} of {self.value:g}"

    @property
    def from_below(self) -> bool:
        """Whether the most is best."""
        return self.of.rpartition("_")[2] == "accuracy"

    def check(self) -> None:
        """Raise InputError for a value that cannot be reached."""
        require_positive("target", self.value)
        if self.from_below and self.value > 1:
            raise InputError(f"target = {self.value:g}: an accuracy is at most 1; give less")

    def check_of(self, problem: Any) -> None:
        """Raise InputError unless runs of a problem are evaluated by it, and it is a loss or an accuracy."""
        from asyncsim.problems.problem import measures

        require_choice(
            "target_of", self.of, sorted(one for one in measures(problem) if one.rpartition("_")[2] in _KINDS)
        )

    def time(self, evaluations: Mapping[str, Any]) -> float:
        """Return when (s, simulated) a run first met it; of an accuracy the error counts, see `time_to_target`."""
        time, values = evaluations["commit_time"], evaluations[self.of]
        if self.from_below:
            return time_to_target(time, 1 - values, 1 - self.value + _ROUND_OFF)
        return time_to_target(time, values, self.value)


def time_to_target(time: Any, values: Any, target: float) -> float:
    """Return when (s, simulated) a loss, or an error, first met a target; infinite if it never did.

    Between the evaluation before and that at which it was met the logarithm of the loss is taken for a straight line in
    time, or the loss itself where it is not above zero.

    ``time``, ``values``: when a run was evaluated (s, simulated), and what the loss was.
    """
    when, loss = np.asarray(time, float), np.asarray(values, float)
    met = np.flatnonzero(loss <= target)
    if not len(met):
        return np.inf
    first = met[0]
    if first == 0 or not np.isfinite(loss[first - 1]):
        return float(when[first])
    before, at = loss[first - 1], loss[first]
    if at > 0 and target > 0:
        before, at, target = np.log([before, at, target])
    part = (before - target) / (before - at)
    return float(when[first - 1] + part * (when[first] - when[first - 1]))


def until_target(times: Sequence[float]) -> dict[str, float]:
    """Return how many seeds have met a target, and their mean time until then: infinite if one of them never did."""
    return {"reached": int(np.isfinite(times).sum()), "time_to_target": float(np.mean(times))}
