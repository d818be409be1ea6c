"""The target of runs, a loss or an accuracy, and when they reach it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from asyncsim.base.console import counted
from asyncsim.base.errors import InputError, require_choice, require_count, require_positive
from asyncsim.study.config import check_values

if TYPE_CHECKING:
    import pandas as pd

    from asyncsim.replays.run import Run
    from asyncsim.traces.trace import Trace

#: Tolerance of an error: in float32 the accuracy of nine correct examples in ten is less than 0.9.
_ROUND_OFF = 1e-6
#: The default target of each kind of measure; other kinds have no known best value.
_USUAL = {"loss": 0.3, "accuracy": 0.95}


@dataclass(frozen=True)
class TargetOptions:
    """Options of a study whose runs have a target and try several learning rates."""

    target: float | None = None
    """Loss or accuracy to reach. By default a loss of 0.3, an accuracy of 0.95."""
    target_of: str | None = None
    """Measure of the target: train_loss, test_loss, train_accuracy or test_accuracy. By default the
    measure of the study, else train_loss."""
    hold: int = 2
    """Further evaluations that must meet the target, too. 0: the first touch counts."""
    tune: tuple[float, ...] | None = None
    """Learning rates to try for every method; the table has each method at its best rate."""
    tune_seeds: int = 0
    """Further seeds on which --tune chooses the rates, with runs half as long; the shown seeds run
    at the chosen rates only. 0: choose on the shown seeds."""
    evaluate_every: int | None = 5
    """Worker steps between evaluations on all data. The time to the target is interpolated between
    them.
    """

    @property
    def goal(self) -> "Target":
        """The target of all runs."""
        return self.goal_of("train_loss")

    def goal_on(self, problem: Any) -> "Target":
        """Return the target of all runs on a problem."""
        return self.goal

    def goal_of(self, usual: str) -> "Target":
        """Return the target; a value of the measure ``usual`` unless the options name another."""
        of = self.target_of or usual
        return Target(
            _USUAL.get(_kind(of), 0.3) if self.target is None else self.target, of, self.hold
        )

    def check_target(self) -> None:
        """Raise InputError for an unreachable target, or invalid rates."""
        self.goal.check()
        require_count("hold", self.hold, minimum=0)
        require_count("tune_seeds", self.tune_seeds, minimum=0)
        if self.tune is not None:
            check_rates(self.tune)


def check_rates(tune: Sequence[float]) -> None:
    """Raise InputError unless ``tune`` is a list of learning rates to try, each above zero and
    given once.
    """
    check_values("tune", tune, "give one or more learning rates, or leave it out")
    for rate in tune:
        require_positive("tune", rate)


class Target(NamedTuple):
    """A value for a measure of the evaluations to reach and hold."""

    value: float
    of: str = "train_loss"  #: ``"train_loss"``, ``"test_accuracy"`` and so on
    hold: int = 0  #: further evaluations that must meet it, too

    def __str__(self) -> str:
        measure = self.of.replace("train_", "training_").replace("_", " ")
        return f"a {measure} of {self.value:g}"

    def criterion(self) -> str:
        """Describe the criterion: the target, and for how long it is held."""
        duration = f" and held at the next {counted(self.hold, 'evaluation')}" if self.hold else ""
        return f"{self} is reached{duration}"

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
        """Raise InputError unless the problem evaluates this measure, and it is a loss or an
        accuracy.
        """
        from asyncsim.problems.problem import measures

        require_choice(
            "target_of",
            self.of,
            sorted(name for name in measures(problem) if _kind(name) in _USUAL),
        )

    def is_met_at(self, evaluation: Mapping[str, float]) -> bool:
        """Return whether an evaluation meets it."""
        value = evaluation[self.of]
        return bool(value >= self.value - _ROUND_OFF if self.from_below else value <= self.value)

    def time(self, evaluations: Mapping[str, Any]) -> float:
        """Return the simulated time (s) until a run met and held it; an accuracy is compared by its
        error.
        """
        return time_to_target(evaluations["commit_time"], *self._falling(evaluations), self.hold)

    def _falling(self, evaluations: Mapping[str, Any]) -> tuple[Any, float]:
        """Return the losses or errors of evaluations, and the value to reach."""
        values = evaluations[self.of]
        return (
            (1 - values, 1 - self.value + _ROUND_OFF) if self.from_below else (values, self.value)
        )

    def bounded(self, evaluations: "pd.DataFrame", trace: "Trace") -> tuple[float, float, float]:
        """Return the time of `time`, and the first and the last time (s) at which the run can have
        met the target: of the first version after the evaluation before, and of the evaluation that
        met it.
        """
        first = first_held(*self._falling(evaluations), self.hold)
        if first is None:
            return np.inf, np.inf, np.inf
        low = high = float(evaluations["commit_time"].iloc[first])
        if first > 0:
            frame = trace.accepted.frame
            versions = frame.loc[frame["outcome"] == "applied", "commit_time"].to_numpy()
            positions = np.flatnonzero(frame["outcome"] == "applied")
            place = np.searchsorted(positions, evaluations["commit"].iloc[first - 1])
            low = min(float(versions[place]), high)
        return float(np.clip(self.time(evaluations), low, high)), low, high

    def reached(self, run: "Run", trace: "Trace") -> dict[str, float]:
        """Return when a run reached the target, as columns of a summary.

        ``time_to_target``: simulated time (s) until the target was met and held; infinite if it
        never was, or the run diverged. ``gradients_to_target``: gradients of all workers until
        then, discarded ones too. ``..._low`` and ``..._high``: their bounds by the evaluations
        before and at the target. ``first_touch``: the time (s) without holding. ``at_start``:
        whether the initial parameters meet it; ``start``: their value. ``rises``: whether the loss
        or error rises from the first evaluations on, and ends above its start. ``gradients``:
        gradients of the whole run.
        """
        touched, *_ = self._replace(hold=0).bounded(run.evaluations, trace)
        time = low = high = np.inf
        if run.diverged_at is None:
            time, low, high = self.bounded(run.evaluations, trace)
        first, *values = np.asarray(self._falling(run.evaluations)[0], float)
        is_rising = len(values) > 1 and first < values[0] and not values[0] >= values[1]
        frame = trace.frame
        times = {"": time, "_low": low, "_high": high}
        columns = {f"time_to_target{bound}": value for bound, value in times.items()}
        for bound, value in times.items():
            computed = float(frame.loc[frame["commit_time"] <= value, "local_steps"].sum())
            columns[f"gradients_to_target{bound}"] = computed if np.isfinite(value) else np.inf
        end = frame["commit_time"] <= run.commits["commit_time"].iloc[-1]
        return {
            **columns,
            "first_touch": touched,
            "at_start": touched == run.evaluations["commit_time"].iloc[0],
            "start": float(run.evaluations[self.of].iloc[0]),
            "rises": is_rising and not values[-1] <= first,
            "gradients": float(frame.loc[end, "local_steps"].sum()),
        }


def say_at_start(summary: "pd.DataFrame", target: Target) -> str:
    """Return a warning if the initial parameters of some seeds meet the target, else an empty
    text.
    """
    met = summary[summary["at_start"].astype(bool)]
    seeds = met["seed"].nunique()
    if not seeds:
        return ""
    harder = "higher" if target.from_below else "lower"
    return (
        f"the start, at {met['start'].mean():.3g}, meets {target} already in {seeds} of "
        f"{summary['seed'].nunique()} seeds; give a {harder} --target"
    )


def time_to_target(time: Any, values: Any, target: float, hold: int = 0) -> float:
    """Return the simulated time (s) until a loss, or an error, met a target and held it; infinite
    if it never did.

    Between two evaluations the logarithm of the loss is interpolated linearly in time; the loss
    itself unless it is above zero.

    ``time``, ``values``: simulated times (s) of a run's evaluations, and the losses. ``hold``: the
    number of further evaluations that must meet it, too; a run that ends before them has not held
    it.
    """
    times, loss = np.asarray(time, float), np.asarray(values, float)
    first = first_held(loss, target, hold)
    if first is None:
        return np.inf
    if first == 0 or not np.isfinite(loss[first - 1]):
        return float(times[first])
    before, at = loss[first - 1], loss[first]
    if at > 0 and target > 0:
        before, at, target = np.log([before, at, target])
    part = (before - target) / (before - at)
    return float(times[first - 1] + part * (times[first] - times[first - 1]))


def first_held(values: Any, target: float, hold: int = 0) -> int | None:
    """Return the place of the first value that meets a target with the ``hold`` next ones; None
    without one.
    """
    is_met = np.asarray(values, float) <= target
    held = (place for place in range(len(is_met) - hold) if is_met[place : place + hold + 1].all())
    return next(held, None)


def _kind(of: str) -> str:
    """Return the kind of a measure: "loss" of "train_loss"."""
    return of.rpartition("_")[2]
