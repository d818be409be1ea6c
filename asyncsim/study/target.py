"""What runs are to reach, and when they have: a loss from above, an accuracy from below."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from asyncsim.errors import InputError, require_choice, require_count, require_positive
from asyncsim.wording import counted

if TYPE_CHECKING:
    import pandas as pd

    from asyncsim.runs.run import Run
    from asyncsim.traces.trace import Trace

#: Ends of the names of what may be a target: of others nobody knows which values are best.
_KINDS = ("loss", "accuracy")
#: Of accuracies in float32, in which nine of ten are less than 0.9.
_ROUND_OFF = 1e-6
#: What is to be reached if nobody says it, by the kind.
_USUAL = {"loss": 0.3, "accuracy": 0.95}


@dataclass(frozen=True)
class TargetOptions:
    """Options of a study whose runs have a target, and learning rates to try."""

    target: float | None = None
    """Loss that is to be reached, or accuracy. None: a loss of 0.3, an accuracy of 0.95."""
    target_of: str | None = None
    """What the target is of: train_loss or test_loss, reached from above, or train_accuracy or test_accuracy, from
    below, if the problem has it. None: what the study measures if that is one of these, else train_loss; the test
    accuracy in the study gossip, if there is one."""
    hold: int = 2
    """Evaluations after the first one that meets the target at which it must still be met; else it is not reached. 0:
    the first touch counts."""
    tune: tuple[float, ...] | None = None
    """Learning rates to try for every method; the table shows each method at its best one. None: one rate."""
    evaluate_every: int | None = 5
    """Worker steps between evaluations on all data, between which the time to the target is interpolated, linearly in
    the logarithm of the loss."""

    @property
    def goal(self) -> "Target":
        """What is to be reached."""
        return self.goal_of("train_loss")

    def goal_of(self, usual: str) -> "Target":
        """Return what is to be reached: of ``usual``, if the options do not say of what."""
        of = self.target_of or usual
        return Target(_USUAL.get(_kind(of), 0.3) if self.target is None else self.target, of, self.hold)

    def check_target(self) -> None:
        """Raise InputError for a target that cannot be reached, or rates that cannot be tried."""
        self.goal.check()
        require_count("hold", self.hold, minimum=0)
        if self.tune is None:
            return
        if isinstance(self.tune, str | float | int):
            raise InputError(f"tune = {self.tune!r}: must be a list; write ({self.tune!r},) for one")
        if not self.tune:
            raise InputError("tune: none given; give one or more learning rates, or leave it out")
        for rate in self.tune:
            require_positive("tune", rate)
        if len(set(self.tune)) < len(self.tune):
            raise InputError(f"tune = {self.tune}: holds a rate twice; give each once")


class Target(NamedTuple):
    """A value of an evaluation that is to be reached, and held."""

    value: float
    of: str = "train_loss"  #: ``"train_loss"``, ``"test_accuracy"`` and so on
    hold: int = 0  #: evaluations after the first that meets it at which it must be met, too

    def __str__(self) -> str:
        part, _, kind = self.of.partition("_")
        return f"a {part} {kind.replace('_', ' ')} of {self.value:g}"

    def held(self) -> str:
        """Return in words when it counts as reached."""
        held = f" and held at the next {counted(self.hold, 'evaluation')}" if self.hold else ""
        return f"{self} is reached{held}"

    @property
    def from_below(self) -> bool:
        """Whether the most is best."""
        return _kind(self.of) == "accuracy"

    def check(self) -> None:
        """Raise InputError for a value that cannot be reached."""
        require_positive("target", self.value)
        if self.from_below and self.value > 1:
            raise InputError(f"target = {self.value:g}: an accuracy is at most 1; give less")

    def check_of(self, problem: Any) -> None:
        """Raise InputError unless runs of a problem are evaluated by it, and it is a loss or an accuracy."""
        from asyncsim.problems.problem import measures

        require_choice("target_of", self.of, sorted(one for one in measures(problem) if _kind(one) in _KINDS))

    def time(self, evaluations: Mapping[str, Any]) -> float:
        """Return when (s, simulated) a run met it and held it; of an accuracy the error counts: `time_to_target`."""
        time, values = evaluations["commit_time"], evaluations[self.of]
        if self.from_below:
            return time_to_target(time, 1 - values, 1 - self.value + _ROUND_OFF, self.hold)
        return time_to_target(time, values, self.value, self.hold)

    def reached(self, run: "Run", trace: "Trace") -> dict[str, float]:
        """Return when a run reached it, as columns of a summary.

        ``time_to_target`` (s, simulated): when it was met and held; infinite if it never was, or the run diverged.
        ``gradients_to_target``: computed until then by all workers, also those thrown away. ``first_touch`` (s): when
        it was first met, held or not. ``at_start``: whether the initial parameters meet it. ``gradients``: computed in
        the whole run.
        """
        touched = self._replace(hold=0).time(run.evaluations)
        time = self.time(run.evaluations) if run.diverged_at is None else np.inf
        frame = trace.frame
        computed = float(frame.loc[frame["commit_time"] <= time, "local_steps"].sum())
        end = frame["commit_time"] <= run.commits["commit_time"].iloc[-1]
        return {
            "time_to_target": time,
            "gradients_to_target": computed if np.isfinite(time) else np.inf,
            "first_touch": touched,
            "at_start": touched == run.evaluations["commit_time"].iloc[0],
            "gradients": float(frame.loc[end, "local_steps"].sum()),
        }


def say_at_start(summary: "pd.DataFrame", target: Target) -> str:
    """Return a sentence if the initial parameters of some seeds meet a target, so that times until it say nothing."""
    met = summary.loc[summary["at_start"].astype(bool), "seed"].nunique()
    if not met:
        return ""
    harder = "higher" if target.from_below else "lower"
    return f"the start meets {target} already in {met} of {summary['seed'].nunique()} seeds; give a {harder} --target"


def time_to_target(time: Any, values: Any, target: float, hold: int = 0) -> float:
    """Return when (s, simulated) a loss, or an error, met a target and held it; infinite if it never did.

    Between the evaluation before and that at which it was met the logarithm of the loss is taken for a straight line in
    time, or the loss itself where it is not above zero.

    ``time``, ``values``: when a run was evaluated (s, simulated), and what the loss was. ``hold``: how many of the
    evaluations that follow must meet it, too; a run that ends before them has not held it.
    """
    when, loss = np.asarray(time, float), np.asarray(values, float)
    met = loss <= target
    held = np.flatnonzero([met[place : place + hold + 1].all() for place in range(len(met) - hold)])
    if not len(held):
        return np.inf
    first = held[0]
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


def _kind(of: str) -> str:
    return of.rpartition("_")[2]
