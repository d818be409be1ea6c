"""The target of runs, a loss or an accuracy, and when they reach it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from asyncsim.base.console import counted
from asyncsim.base.errors import InputError, require_choice, require_count, require_positive

if TYPE_CHECKING:
    import pandas as pd

    from asyncsim.replays.run import Run
    from asyncsim.traces.trace import Trace

#: Tolerance of an error: in float32 the accuracy of nine correct examples in ten is less than 0.9.
_ROUND_OFF = 1e-6
#: The default target of each kind of measure; of other kinds it is not known which values are best.
_USUAL = {"loss": 0.3, "accuracy": 0.95}


@dataclass(frozen=True)
class TargetOptions:
    """Options of a study whose runs have a target and try several learning rates."""

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
        """The target of all runs."""
        return self.goal_of("train_loss")

    def goal_of(self, usual: str) -> "Target":
        """Return the target; a value of the measure ``usual`` unless the options name another."""
        of = self.target_of or usual
        return Target(_USUAL.get(_kind(of), 0.3) if self.target is None else self.target, of, self.hold)

    def check_target(self) -> None:
        """Raise InputError for a target that cannot be reached, or rates that cannot be tried."""
        self.goal.check()
        require_count("hold", self.hold, minimum=0)
        if self.tune is not None:
            check_rates(self.tune)


def check_rates(tune: Sequence[float]) -> None:
    """Raise InputError unless ``tune`` is a list of learning rates to try, each above zero and given once."""
    if not isinstance(tune, list | tuple):
        raise InputError(f"tune = {tune!r}: must be a list; write ({tune!r},) for one")
    if not tune:
        raise InputError("tune: none given; give one or more learning rates, or leave it out")
    for rate in tune:
        require_positive("tune", rate)
    if len(set(tune)) < len(tune):
        raise InputError(f"tune = {tune}: holds a rate twice; give each once")


class Target(NamedTuple):
    """A value that a measure of the evaluations is to reach and hold."""

    value: float
    of: str = "train_loss"  #: ``"train_loss"``, ``"test_accuracy"`` and so on
    hold: int = 0  #: evaluations after the first that meets it at which it must be met, too

    def __str__(self) -> str:
        part, _, kind = self.of.partition("_")
        return f"a {part} {kind.replace('_', ' ')} of {self.value:g}"

    def held(self) -> str:
        """Return in words what counts as reaching it."""
        held = f" and held at the next {counted(self.hold, 'evaluation')}" if self.hold else ""
        return f"{self} is reached{held}"

    @property
    def from_below(self) -> bool:
        """Whether larger values are better."""
        return _kind(self.of) == "accuracy"

    def check(self) -> None:
        """Raise InputError for a value that cannot be reached."""
        require_positive("target", self.value)
        if self.from_below and self.value > 1:
            raise InputError(f"target = {self.value:g}: an accuracy is at most 1; give less")

    def check_of(self, problem: Any) -> None:
        """Raise InputError unless the problem evaluates this measure, and it is a loss or an accuracy."""
        from asyncsim.problems.problem import measures

        require_choice("target_of", self.of, sorted(one for one in measures(problem) if _kind(one) in _USUAL))

    def met(self, values: Any) -> Any:
        """Return whether values meet it: an array of booleans."""
        return values >= self.value - _ROUND_OFF if self.from_below else values <= self.value

    def time(self, evaluations: Mapping[str, Any]) -> float:
        """Return the simulated time (s) until a run met and held it; an accuracy is compared by its error."""
        time, values = evaluations["commit_time"], evaluations[self.of]
        if self.from_below:
            return time_to_target(time, 1 - values, 1 - self.value + _ROUND_OFF, self.hold)
        return time_to_target(time, values, self.value, self.hold)

    def reached(self, run: "Run", trace: "Trace") -> dict[str, float]:
        """Return the columns of a summary that say when a run reached it.

        ``time_to_target``: simulated time (s) until it was met and held; infinite if it never was, or the run diverged.
        ``gradients_to_target``: gradients that all workers computed until then, discarded ones too. ``first_touch``:
        the same time (s) without holding. ``at_start``: whether the initial parameters meet it. ``gradients``:
        gradients computed in the whole run.
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
    """Return a warning if the initial parameters of some seeds meet the target, else an empty text."""
    met = summary.loc[summary["at_start"].astype(bool), "seed"].nunique()
    if not met:
        return ""
    harder = "higher" if target.from_below else "lower"
    return f"the start meets {target} already in {met} of {summary['seed'].nunique()} seeds; give a {harder} --target"


def time_to_target(time: Any, values: Any, target: float, hold: int = 0) -> float:
    """Return the simulated time (s) until a loss, or an error, met a target and held it; infinite if it never did.

    Between two evaluations the logarithm of the loss is interpolated linearly in time; the loss itself where it is not
    above zero.

    ``time``, ``values``: simulated times (s) of a run's evaluations, and the losses. ``hold``: how many of the
    following evaluations must meet it, too; a run that ends before them has not held it.
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


def _kind(of: str) -> str:
    """Return the kind of a measure: "loss" of "train_loss"."""
    return of.rpartition("_")[2]
