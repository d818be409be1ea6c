"""Which timing policy a cluster should have: what each costs, and what it does to learning.

Clusters that differ only in the policy have the same random numbers. By default every worker is
five times as slow once in twenty local steps. Prints for each policy the accepted commits per
second beside the theoretical maximum, the parts of the workers' time and the staleness; and for
each method the time to a training loss, and how sure the order of the policies is. Without any
method (--methods, and nothing after it) it computes no gradients. With --discipline fifo
lowest_rank it compares orders of service, and prints who is served.
"""

from dataclasses import dataclass
from typing import Any

import pandas as pd

from asyncsim.base.errors import InputError
from asyncsim.clusters.policy import as_policy
from asyncsim.study.cell import Cell, meet
from asyncsim.study.columns import titled
from asyncsim.study.comparison import Comparison, Further, Results, clusters_table
from asyncsim.study.sweep import ComparisonConfig, preset
from asyncsim.traces.trace_summary import per_worker

#: By default, policies that suit the number of workers.
USUAL = "usual"
#: The renamed columns of a row per trace and worker.
_COLUMNS = {"mean_staleness": "staleness_mean", "mean_wait": "wait_mean"}


@dataclass(frozen=True)
class Options(ComparisonConfig):
    """Options of the study of policies."""

    def check(self) -> None:
        """Check the options; see `StudyConfig.check`."""
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


def ranks(table: Results) -> Further:
    """Tabulate each trace and worker: share of the commits, mean staleness and mean wait (s),
    without a warm-up; print them by half of the ranks.
    """
    tables = []
    for row in table.finished.summary.drop_duplicates("trace_file").to_dict("records"):
        discipline = row.get("discipline", table.config.discipline)
        keys = {"discipline": discipline, "workers": row["workers"], "seed": row["seed"]}
        workers = per_worker(table.finished.trace(row["trace_file"]), warm_up=0)
        tables.append(
            workers.rename(columns=_COLUMNS).assign(**keys)[
                [*keys, "worker", "share", *_COLUMNS.values()]
            ]
        )
    rows = pd.concat(tables, ignore_index=True)
    half = (rows["worker"] < rows["workers"] / 2).map({True: "lower half", False: "upper half"})
    # A worker that never commits has no mean.
    of_commits = rows.assign(
        **{name: rows[name].fillna(0) * rows["share"] for name in _COLUMNS.values()},
        never_commit=rows["share"] == 0,
    )
    sums = of_commits.groupby(["workers", "discipline", half.rename("ranks")], sort=False)[
        [*_COLUMNS.values(), "share", "never_commit"]
    ].sum()
    means = sums[list(_COLUMNS.values())].div(sums["share"], axis=0)
    means = means.join(sums[["share", "never_commit"]] / rows["seed"].nunique())
    text = "means over commits; never commit: workers without any"
    return {"ranks.csv": rows}, [text, titled(means.reset_index())]


def clusters(table: Results) -> Further:
    """Tabulate the costs of each cluster, and of several disciplines who is served."""
    tables, parts = clusters_table(table)
    if "discipline" in table.keys:
        of_ranks, parts_of_ranks = ranks(table)
        tables, parts = {**tables, **of_ranks}, [*parts, *parts_of_ranks]
    return tables, parts


run = Comparison(
    "policies",
    compared=("policy", "window", "discipline"),
    prepare=without_timing,
    further=clusters,
    traces_alone=True,
).run
