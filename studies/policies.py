"""Which timing policy a cluster should have: what each costs, and what it does to learning.

Clusters that differ in nothing but the policy, who waits for whom and what the server takes up, have the same random
numbers. By default every worker is five times as slow once in twenty local steps. Prints for each policy how many
commits a second the server takes up, beside the most that theory allows, which part of their time the workers compute,
which part of it in vain, how unequal their shares are and how stale their commits; and how long each method needs until
a training loss. Writes this as two tables, beside traces, runs, a summary and two figures.
"""

import functools
import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from asyncsim.clusters.policy import Policy
from asyncsim.errors import InputError, require_positive
from asyncsim.files import write_csv
from asyncsim.study import load_file, shipped
from asyncsim.study.config import LawLike, MethodLike, PolicyLike
from asyncsim.study.finished import Finished, read
from asyncsim.study.sweep import Result, SweepConfig, run_cells, sweep
from asyncsim.table_text import table_text

if TYPE_CHECKING:
    import pandas as pd

    from asyncsim.clusters.cluster import Cluster

#: The tables of the policies, and of the methods under each, beside the summary of all runs.
POLICIES, TIMES = "policies.csv", "times.csv"


def _usual_policies(workers: int) -> tuple[str, ...]:
    """Return policies that clusters of so many workers can have."""
    most, half = max(1, 4 * workers // 5), max(1, workers // 2)
    some = (f"barrier({most})", f"first_of({half})", f"discard_stale({max(1, workers)})")
    return ("asynchronous", "bounded_staleness(3)", "barrier", *some)


@dataclass(frozen=True)
class Config(SweepConfig):
    """Options of the study of policies."""

    varied: ClassVar = ("workers", "policy")

    workers: tuple[int, ...] = (20,)
    """Workers of the clusters, one after the other."""
    # Several values here, of which each cell has one.
    policy: tuple[PolicyLike, ...] | None = None  # type: ignore[assignment]
    """What the server takes up and when workers go on, one policy after the other; see above. None: asynchronous,
    bounded_staleness(3), barrier, barrier of four fifths of the workers, first_of half of them, and discard_stale of as
    many versions as there are workers."""
    compute: LawLike = "mixture([gamma(mean=1, cv=0.2), gamma(mean=5, cv=0.2)], [0.95, 0.05])"
    """Law of the time of a local step (s); "[constant(1)]*18 + [constant(3)]*2" gives one per worker."""
    methods: tuple[MethodLike, ...] = ("downpour",)
    """Methods to compare that name no policy of their own; also yours as FILE.py:FUNCTION (see the README)."""
    target: float = 0.3
    """Loss on the training data until which the time is told."""
    evaluate_every: int | None = 5
    """Worker steps between evaluations on all data, between which the time to the target is interpolated."""

    def __post_init__(self) -> None:
        if self.policy is None:
            object.__setattr__(self, "policy", _usual_policies(min(self.workers, default=1)))

    def check(self) -> None:
        """Check what can be checked before anything heavy is imported.

        Raises
        ------
        InputError
            An option that cannot be used.
        """
        super().check()
        require_positive("target", self.target)


SCALES = {
    "small": Config(),
    "paper": Config(scale="paper", problem="mnist", steps=938, evaluate_every=94),
}


def run(config: Config) -> Result:
    """Run the study.

    Raises
    ------
    InputError
        An option that cannot be used, or a folder or disk that cannot be written.
    KeyboardInterrupt
        Passed on; tables and figures of the runs that were finished are there then.
    """
    config.check()
    with config.computing_device():
        chosen = [_text(one) for one in config.policy or ()]
        cells = sweep(config, [{"policy": one, "workers": n} for n, one in itertools.product(config.workers, chosen)])
        for method in cells[0].methods:
            if method.timing.policy is not None or method.timing.workers is not None:
                raise InputError(
                    f"methods = {method.name}: has a timing of its own, and here policies are compared; give methods "
                    "that have none, or run the study compare"
                )
        clusters = {(cell.values["policy"], cell.cluster.workers): cell.cluster for cell in cells}
        conclude = functools.partial(_conclude, clusters, config.target)
        return run_cells("policies", config, cells, conclude)


def policy_table(summary: "pd.DataFrame", clusters: "dict[tuple[str, int], Cluster]") -> "pd.DataFrame":
    """Return what each policy costs: a row for each, with means over its traces.

    Columns: ``workers``, ``policy``; ``throughput`` (commits/s that are taken up), ``theory``, what that is in the long
    run or can be at most, and why (``law``, ``exact``); ``computing`` and ``in_vain``, parts of the workers' time;
    ``least`` and ``most``, the commits of a worker relative to the mean; ``staleness_mean``, ``staleness_q99``.
    """
    import pandas as pd

    from asyncsim.theory import throughput_theory

    rows = []
    traces = summary.drop_duplicates("trace_file")
    for (workers, policy), group in traces.groupby(["workers", "policy"], sort=False):
        mean = group.filter(regex="^trace\\.").mean().rename(lambda column: column.removeprefix("trace."))
        known = throughput_theory(clusters[policy, workers])
        rows.append(
            {
                "workers": workers,
                "policy": policy,
                "throughput": mean["throughput"],
                "theory": float("nan") if known is None else known.commits,
                "law": "" if known is None else known.name,
                "exact": known is not None and known.exact,
                "computing": mean["computing_share"],
                "in_vain": mean["lost_time_share"],
                "least": workers * mean["share_min"],
                "most": workers * mean["share_max"],
                "staleness_mean": mean["staleness_mean"],
                "staleness_q99": mean["staleness_q99"],
            }
        )
    return pd.DataFrame(rows)


def times_table(finished: Finished, target: float) -> "pd.DataFrame":
    """Return how long each method needs under each policy: a row for each pair.

    Columns: ``workers``, ``policy``, ``method``, ``seeds``, ``diverged``, ``reached`` (seeds that met the target),
    ``time_to_target`` (s, simulated; infinite if a seed did not meet it), ``final_loss`` and ``test_accuracy`` (if the
    problem has it), means over the seeds that finished.
    """
    import numpy as np
    import pandas as pd

    from asyncsim.study.outcome import time_to_target

    rows = []
    summary = finished.summary
    measured = [name for name in ("final_loss", "test_accuracy") if name in summary]
    for (workers, policy, method), group in summary.groupby(["workers", "policy", "method"], sort=False):
        times = [time_to_target(finished.run(name).evaluations, target) for name in group["run_folder"]]
        ended = group[group["status"] == "finished"]
        rows.append(
            {
                "workers": workers,
                "policy": policy,
                "method": method,
                "seeds": len(group),
                "diverged": len(group) - len(ended),
                "reached": int(np.isfinite(times).sum()),
                "time_to_target": float(np.mean(times)),
                **ended[measured].mean(),
            }
        )
    return pd.DataFrame(rows)


def _conclude(clusters: "dict[tuple[str, int], Cluster]", target: float, folder: Path, summary: "pd.DataFrame") -> None:
    policies = policy_table(summary, clusters)
    times = times_table(read(folder, "policies"), target)
    write_csv(folder / POLICIES, policies)
    write_csv(folder / TIMES, times)
    figures = load_file("asyncsim.figures.policies", shipped("figures") / "policies.py").draw(folder)
    shown = policies.drop(columns=["theory", "law", "exact"])
    known = zip(policies["theory"], policies["law"], policies["exact"], strict=True)
    shown["theory"] = [
        f"{'' if exact else 'at most '}{value:.2f} ({law})" if law else "-" for value, law, exact in known
    ]
    shown["least to most"] = [f"{row.least:.2f} to {row.most:.2f}" for row in policies.itertuples()]
    print(
        "commits/s, measured and in the long run; parts of the workers' time; staleness in versions; commits of a "
        "worker, relative to the mean"
    )
    print(table_text(shown.drop(columns=["least", "most"])))
    for name in ("diverged", "reached"):
        times[name] = [f"{count} of {seeds}" for count, seeds in zip(times[name], times["seeds"], strict=True)]
    print(f"\nsimulated time until a train loss of {target:g} is reached")
    print(table_text(times.drop(columns="seeds").rename(columns={"time_to_target": "time (s)"})))
    written = ["summary.csv", POLICIES, TIMES, *(path.name for path in figures)]
    print(f"\nwrote {folder}: config.json, traces, runs, {', '.join(written)}")


def _text(policy: str | Policy) -> str:
    """Return a policy as the tables name it: as it was given, or as it is written."""
    return policy.strip() if isinstance(policy, str) else str(policy)
