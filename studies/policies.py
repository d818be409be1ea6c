"""Which timing policy a cluster should have: what each costs, and what it does to learning.

Clusters that differ only in the policy have the same random numbers. By default every worker is
five times as slow once in twenty local steps. Prints for each policy the accepted commits per
second beside the theoretical maximum, the parts of the workers' time and the staleness; and for
each method the time to a training loss, and how sure the order of the policies is. Without any
method (--methods, and nothing after it) it computes no gradients. With --discipline fifo
lowest_rank it compares orders of service.
"""

from dataclasses import dataclass
from typing import Any

from asyncsim.base.errors import InputError
from asyncsim.clusters.policy import as_policy
from asyncsim.study.cell import Cell, meet
from asyncsim.study.comparison import Comparison, clusters_table
from asyncsim.study.sweep import ComparisonConfig, preset

#: By default, policies that suit the number of workers.
USUAL = "usual"


@dataclass(frozen=True)
class Options(ComparisonConfig):
    """Options of the study of policies."""

    def check(self) -> None:
        """Check the options; see `StudyOptions.check`."""
        super().check()
        policies = self.varied.get("policy", ())
        parsed = [as_policy(policy) for policy in policies]
        if len(set(parsed)) < len(parsed):
            raise InputError(
                f"policy = {', '.join(map(str, policies))}: one comes twice; give each once"
            )

    def points(self) -> list[dict[str, Any]]:
        """Return the values of each cell."""
        if self.policy != USUAL:
            return super().points()
        return [
            {"policy": policy, **point}
            for point in super().points()
            for policy in _usual(point.get("workers", self.workers))
        ]


def _usual(workers: int) -> tuple[str, ...]:
    most, half = max(1, 4 * workers // 5), max(1, workers // 2)
    sized = (f"barrier({most})", f"first_of({half})", f"discard_stale({workers})")
    return ("asynchronous", "bounded_staleness(3)", "barrier", *sized)


Config, SCALES = preset(
    Options,
    small={
        "workers": 20,
        "policy": USUAL,
        "compute": "mixture([gamma(mean=1, cv=0.2), gamma(mean=5, cv=0.2)], [0.95, 0.05])",
        "methods": ("downpour",),
    },
    paper={"problem": "mnist", "steps": 938, "evaluate_every": 94},
)


def without_timing(config: Options, cells: list[Cell]) -> list[Cell]:
    """Raise InputError for a method that requires a timing."""
    for method in cells[0].methods:
        if any(meet(cell.cluster, method.timing) != cell.cluster for cell in cells):
            raise InputError(
                f"methods = {method.name}: requires a certain timing, but this study compares "
                "policies; give methods without one, or run the study compare"
            )
    return cells


run = Comparison(
    "policies",
    compared=("policy", "window", "discipline"),
    prepare=without_timing,
    further=clusters_table,
    traces_alone=True,
).run
