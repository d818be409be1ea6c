"""Which timing policy a cluster should have: what each costs, and what it does to learning.

Clusters that differ in nothing but the policy, who waits for whom and what the server takes up, have the same random
numbers. By default every worker is five times as slow once in twenty local steps. Prints for each policy how many
commits a second the server takes up, beside the most that theory allows, in which parts of their time the workers
compute, send, wait and are held, how unequal their shares are and how stale their commits; and how long each method
needs until a training loss. Writes this as two tables, beside traces, runs, a summary and two figures.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncsim.clusters.policy import Policy, parse_policy
from asyncsim.errors import InputError
from asyncsim.files import write_csv
from asyncsim.study.config import LawLike, MethodLike, PolicyLike, StudyConfig
from asyncsim.study.finished import Finished, Known, beside, figures, read, trace_means
from asyncsim.study.sweep import Result, SweepConfig, run_cells, sweep
from asyncsim.study.target import Target, until_target
from asyncsim.wording import LEAST_SHARE, counted, table_text

if TYPE_CHECKING:
    import pandas as pd

    from asyncsim.clusters.cluster import Cluster

#: The tables of the policies, and of the methods under each, beside the summary of all runs.
POLICIES, TIMES = "policies.csv", "times.csv"


@dataclass(frozen=True)
class Config(SweepConfig):
    """Options of the study of policies."""

    workers: tuple[int, ...] = (20,)
    """Workers of the clusters, one after the other."""
    # Several values here, of which each cell has one, or none yet.
    policy: tuple[PolicyLike, ...] | None = None  # type: ignore[assignment]
    """What the server takes up and when workers go on, one policy after the other; see above. None: asynchronous,
    bounded_staleness(3), barrier, barrier of four fifths of each cluster's workers, first_of half of them, and
    discard_stale of as many versions as there are workers."""
    compute: LawLike = "mixture([gamma(mean=1, cv=0.2), gamma(mean=5, cv=0.2)], [0.95, 0.05])"
    """Law of the time of a local step (s); "[constant(1)]*18 + [constant(3)]*2" gives one per worker."""
    methods: tuple[MethodLike, ...] = ("downpour",)
    """Methods to compare that name no policy of their own; also yours as FILE.py:FUNCTION (see the README)."""
    target: float = 0.3
    """Loss until which the time is told, or accuracy."""
    target_of: str = "train_loss"
    """What the target is of: train_loss or test_loss, reached from above, or train_accuracy or test_accuracy, from
    below, if the problem has it."""
    evaluate_every: int | None = 5
    """Worker steps between evaluations on all data, between which the time to the target is interpolated, linearly in
    the logarithm of the loss."""

    @property
    def goal(self) -> Target:
        """What is to be reached."""
        return Target(self.target, self.target_of)

    def check(self) -> None:
        """Check the options; see `StudyOptions.check`."""
        super().check()
        self.goal.check()
        if self.policy is not None:
            if isinstance(self.policy, str | Policy) or not isinstance(self.policy, Sequence):
                raise InputError(
                    f"policy = {self.policy!r}: must be a list of policies; write ({self.policy!r},) for one"
                )
            policies = [parse_policy(one) if isinstance(one, str) else one for one in self.policy]
            if not policies:
                raise InputError("policy: none given; give one or more")
            if len(set(policies)) < len(policies):
                raise InputError(f"policy = {', '.join(map(_text, self.policy))}: one comes twice; give each once")
        for workers, policy in self.points():
            self.at(workers=workers, policy=policy).check()

    def at(self, **values: Any) -> StudyConfig:
        """Return the options of one cluster; asynchronous, if the values have no policy."""
        return super().at(**{"policy": "asynchronous", **values})

    def points(self) -> list[tuple[int, str]]:
        """Return the workers and the policy of each cluster."""
        return [(n, one) for n in self.workers for one in map(_text, self.policy or _usual_policies(n))]


SCALES = {
    "small": Config(),
    "paper": Config(scale="paper", problem="mnist", steps=938, evaluate_every=94),
}


def run(config: Config) -> Result:
    """Run the study; see `asyncsim.study.sweep.run_cells`."""
    from asyncsim.study.cell import meet

    config.check()
    with config.computing_device():
        cells = sweep(config, [{"policy": policy, "workers": n} for n, policy in config.points()])
        config.goal.check_of(cells[0].problem)
        for method in cells[0].methods:
            if any(meet(cell.cluster, method.timing) != cell.cluster for cell in cells):
                raise InputError(
                    f"methods = {method.name}: has a timing of its own, and here policies are compared; give methods "
                    "that have none, or run the study compare"
                )
        clusters = {(cell.values["policy"], cell.cluster.workers): cell.cluster for cell in cells}
        conclude = functools.partial(_conclude, clusters, config.goal)
        return run_cells("policies", config, cells, conclude)


def policy_table(summary: "pd.DataFrame", clusters: "dict[tuple[str, int], Cluster]") -> "pd.DataFrame":
    """Return what each policy costs: a row for each, with means over its traces.

    Columns: ``workers``, ``policy``; ``throughput`` (commits/s that are taken up), ``theory``, what that is in the long
    run or can be at most, and why (``theory_name``, ``exact``); ``versions`` a second; ``computing``, ``sending``,
    ``waiting``, ``served``, ``held`` and ``returning``, the parts of the workers' time, and ``in_vain``, in which they
    compute for nothing; ``steps``, commits per worker of a trace; ``least`` and ``most``, the commits of a worker
    relative to the mean; ``staleness_mean``, ``staleness_q99``.
    """
    import pandas as pd

    from asyncsim.theory import throughput_theory
    from asyncsim.traces.trace_summary import Phases

    rows = []
    traces = summary.drop_duplicates(["workers", "policy", "trace_file"])
    for (workers, policy), group in traces.groupby(["workers", "policy"], sort=False):
        mean = trace_means(group, workers)
        known = throughput_theory(clusters[policy, workers])
        rows.append(
            {
                "workers": workers,
                "policy": policy,
                "throughput": mean["throughput"],
                "theory": float("nan") if known is None else known.commits,
                "theory_name": "" if known is None else known.name,
                "exact": known is not None and known.exact,
                "versions": (group["trace.versions"] / group["trace.duration"]).mean(),
                **{phase: mean[f"{phase}_share"] for phase in Phases._fields},
                "in_vain": mean["lost_time_share"],
                "least": mean["least"],
                "most": mean["most"],
                "staleness_mean": mean["staleness_mean"],
                "staleness_q99": mean["staleness_q99"],
                "steps": mean["steps"],
            }
        )
    return pd.DataFrame(rows)


def times_table(finished: Finished, target: Target) -> "pd.DataFrame":
    """Return how long each method needs under each policy: a row for each pair.

    Columns: ``workers``, ``policy``, ``method``, ``seeds``, ``diverged``, ``reached`` (seeds that met the target),
    ``time_to_target`` (s, simulated; the mean, infinite if a seed did not meet it), and ``final_loss`` (of
    minibatches), ``train_loss`` and ``test_accuracy`` (if the problem has it) at the end, after ``simulated_seconds``:
    means over the seeds that finished.
    """
    import pandas as pd

    rows = []
    summary = finished.summary
    measured = [name for name in ("final_loss", "train_loss", "test_accuracy") if name in summary]
    for (workers, policy, method), group in summary.groupby(["workers", "policy", "method"], sort=False):
        told = [finished.run(name).evaluations for name in group["run_folder"]]
        times = [target.time(one) for one in told]
        ended = group[group["status"] == "finished"]
        rows.append(
            {
                "workers": workers,
                "policy": policy,
                "method": method,
                "seeds": len(group),
                "diverged": len(group) - len(ended),
                **until_target(times),
                **ended[measured].mean(),
                "simulated_seconds": ended["simulated_seconds"].mean(),
            }
        )
    return pd.DataFrame(rows)


def _conclude(
    clusters: "dict[tuple[str, int], Cluster]", target: Target, folder: Path, summary: "pd.DataFrame"
) -> None:
    policies = policy_table(summary, clusters)
    times = times_table(read(folder, "policies"), target)
    write_csv(folder / POLICIES, policies)
    write_csv(folder / TIMES, times)
    figures("policies").draw(folder)
    print(_policies_text(policies, summary["seed"].nunique()))
    print(_times_text(times, target))


def _policies_text(policies: "pd.DataFrame", traces: int) -> str:
    from asyncsim.traces.trace_summary import Phases

    shown = policies.drop(columns=["theory", "theory_name", "exact", "steps", "least", "most"])
    shown = shown.drop(columns=[phase for phase in Phases._fields if shown[phase].max() < LEAST_SHARE])
    known = [
        Known(row.theory, row.theory_name, row.exact) if row.theory_name else None for row in policies.itertuples()
    ]
    rows = zip(known, policies["throughput"], policies["steps"], strict=True)
    shown["theory"] = [beside(one, throughput, 2, steps)[1] or "-" for one, throughput, steps in rows]
    shown["least to most"] = [f"{row.least:.2f} to {row.most:.2f}" for row in policies.itertuples()]
    titles = {"throughput": "commits/s", "versions": "versions/s", "in_vain": "in vain"}
    return (
        f"means over {counted(traces, 'trace')}; theory: commits/s in the long run; parts of the workers' time; "
        f"staleness in versions; commits of a worker relative to the mean\n{table_text(shown.rename(columns=titles))}\n"
    )


def _times_text(times: "pd.DataFrame", target: Target) -> str:
    shown = times.drop(columns="seeds")
    for name in ("diverged", "reached"):
        shown[name] = [f"{count} of {seeds}" for count, seeds in zip(times[name], times["seeds"], strict=True)]
    titles = {
        "time_to_target": "time (s)",
        "simulated_seconds": "in all (s)",
        "final_loss": "minibatch loss",
        "train_loss": "train loss",
    }
    return (
        f"simulated time until {target} is reached: mean over the seeds, inf if one never does\n"
        f"{table_text(shown.rename(columns=titles | {'test_accuracy': 'test accuracy'}))}"
    )


def _usual_policies(workers: int) -> tuple[str, ...]:
    """Return policies that clusters of so many workers can have."""
    most, half = max(1, 4 * workers // 5), max(1, workers // 2)
    some = (f"barrier({most})", f"first_of({half})", f"discard_stale({max(1, workers)})")
    return ("asynchronous", "bounded_staleness(3)", "barrier", *some)


def _text(policy: str | Policy) -> str:
    """Return a policy as the tables name it: as it was given, or as it is written."""
    return policy.strip() if isinstance(policy, str) else str(policy)
