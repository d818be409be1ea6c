"""What staleness does to asynchronous SGD: methods side by side on one trace per seed.

One cluster is simulated for each seed and every method replays its trace with real gradients.
Prints the measured and the theoretical staleness, and ranks the methods by their training loss at
the end; writes traces, runs, tables and figures.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import pandas as pd

from asyncsim.base.console import LEAST_SHARE, counted
from asyncsim.clusters.cluster import Cluster
from asyncsim.study.cell import timings
from asyncsim.study.comparison import Comparison, Further, Results
from asyncsim.study.finished import TheoryValue, trace_means, with_theory
from asyncsim.study.ranking import Measure
from asyncsim.study.sweep import ComparisonConfig, preset
from asyncsim.theory import (
    StalenessTheory,
    queue_theory,
    saturating_workers,
    staleness_theory,
    throughput_theory,
)
from asyncsim.traces.phases import IN_WORDS


@dataclass(frozen=True)
class Options(ComparisonConfig):
    """Options of the staleness study."""

    example: ClassVar[str] = '--workers 20 --methods downpour "gem(kappa=2)"'


Config, SCALES = preset(
    Options, small={"evaluate_every": None, "tune": (0.01, 0.05, 0.5), "tune_seeds": 1}
)


def beside_theory(table: Results) -> Further:
    """Print each cluster's traces beside theory; the methods of a timing share them."""
    parts: list[str | pd.DataFrame] = []
    for cell in {cell.cluster: cell for cell in table.cells}.values():
        groups = timings(cell.cluster, cell.methods, table.config.bits)
        for timing, names in groups.items():
            rows = table.finished.rows(**cell.values)
            traces = rows[rows["method"].isin(names)].drop_duplicates("trace_file")
            if len(traces):
                title = [*map(str, cell.values.values()), counted(len(traces), "trace")]
                title += [f"of {', '.join(names)}"] if len(groups) > 1 else []
                columns = ["", "measured", "theory, in the long run"]
                rows = pd.DataFrame(_table(timing, traces), columns=columns)
                parts += [", ".join(title), rows]
    return {}, parts


def _table(cluster: Cluster, traces: pd.DataFrame) -> list[tuple[str, str, str]]:
    """Return name, measured value and theoretical value of each quantity of the traces."""
    mean = trace_means(traces, cluster.workers)
    steps = mean["steps"]
    expected = staleness_theory(cluster, computations=steps)
    rate, queue = throughput_theory(cluster), queue_theory(cluster)
    saturating = saturating_workers(cluster)
    commits = None if rate is None else TheoryValue(rate.commits, rate.name, rate.exact)
    share = (
        None
        if rate is None or rate.computing is None
        else TheoryValue(rate.computing, rate.name, rate.exact)
    )
    busy = None if queue is None else TheoryValue(queue.utilisation, queue.name, queue.exact)
    served = (
        "visits in service, mean" if cluster.discipline == "lock_free" else "server utilisation"
    )
    rows = [
        ("staleness, mean", f"{mean['staleness_mean']:.2f}", _mean(expected, traces)),
        ("staleness, std", f"{mean['staleness_std']:.2f}", _spread(expected)),
        ("throughput (commits/s)", *with_theory(commits, mean["throughput"], 2, steps)),
        ("workers: computing", *with_theory(share, mean["computing_share"], 3, steps)),
        *_other_shares(mean),
        (served, *with_theory(busy, mean["utilisation"], 3, steps)),
        (
            "mean wait (s)" if mean["least"] else "mean wait, served (s)",
            f"{mean['wait_mean']:.4f}",
            "",
        ),
        ("commits of a worker", f"{mean['least']:.2f} to {mean['most']:.2f} of the mean", ""),
    ]
    if saturating is not None:
        rows.append(("server saturated", "", f"from {math.ceil(saturating):,} workers on (knee)"))
    if (
        cluster.shared_bandwidth
        and cluster.policy.staleness_limit is None
        and all(way.alike for way in cluster.ways)
    ):
        # For the busier direction: each commit sends one message with parameters up and one down.
        busier = max(cluster.transfer_up, cluster.transfer_down)
        rows.append(("shared link, utilisation", f"{mean['throughput'] * busier:.3f}", "at most 1"))
    if cluster.policy.staleness_limit is not None:
        rows.append(("  computing in vain", f"{mean['lost_time_share']:.3f}", ""))
        rows.append(
            ("computations lost", f"{mean['discarded_share'] + mean['cancelled_share']:.3f}", "")
        )
    return rows


def _other_shares(mean: pd.Series) -> list[tuple[str, str, str]]:
    """Return the non-negligible parts of the workers' time besides computing."""
    shares = (
        (doing, mean[f"{phase}_share"]) for phase, doing in IN_WORDS.items() if phase != "computing"
    )
    return [(f"  {doing}", f"{share:.3f}", "") for doing, share in shares if share >= LEAST_SHARE]


def _mean(expected: StalenessTheory, traces: pd.DataFrame) -> str:
    low, high = expected.mean_bounds
    if high == float("inf"):
        return ""
    if low < high:
        return f"{low:g} to {high:g} (bounds of the mean)"
    starved = "" if traces["trace.share_min"].all() else ", counting workers that never commit"
    return f"{round(low, 2):g} (conserved{starved})"


def _spread(expected: StalenessTheory) -> str:
    if expected.std is None:
        return ""
    return (
        f"{expected.std:.2f} ({expected.law}{'' if expected.queue_free else ', without the queue'})"
    )


run = Comparison(
    "staleness",
    measure=lambda config, problem: Measure("train_loss"),
    columns=("energy_ratio", "median_pi", "trace.throughput"),
    further=beside_theory,
).run
