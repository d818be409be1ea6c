"""What staleness does to asynchronous SGD: methods side by side on one trace per seed.

One cluster is simulated for each seed and every method replays its trace with real gradients.
Prints the measured and the theoretical staleness, and the final results of each method; writes
traces, runs, a summary and figures.
"""

import functools
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pandas as pd

from asyncsim.base.console import LEAST_SHARE, counted
from asyncsim.clusters.cluster import Cluster
from asyncsim.clusters.cluster_text import describe
from asyncsim.methods import Method
from asyncsim.study.cell import Cell, timings
from asyncsim.study.config import StudyConfig
from asyncsim.study.finished import TheoryValue, present, trace_means, with_theory
from asyncsim.study.outcome import averaged, leading, outcome_table
from asyncsim.study.sweep import Result, run_cells, sweep
from asyncsim.theory import (
    StalenessTheory,
    queue_theory,
    saturating_workers,
    staleness_theory,
    throughput_theory,
)
from asyncsim.traces.phases import IN_WORDS


@dataclass(frozen=True)
class Config(StudyConfig):
    """Options of the staleness study."""

    example: ClassVar[str] = '--workers 20 --methods downpour "gem(kappa=2)"'


def run(config: Config) -> Result:
    """Run the study; see `asyncsim.study.sweep.run_cells`."""
    config.check()
    with config.computing_device():
        (cell,) = sweep(config, [{}])
        conclude = functools.partial(_conclude, cell, config.attack)
        return run_cells("staleness", config, [cell], conclude)


def report(
    cluster: Cluster, methods: list[Method], problem: str, summary: pd.DataFrame, attack: Any = None
) -> list[str | pd.DataFrame]:
    """Return the printed tables: each timing against theory, and the methods side by side."""
    groups = timings(cluster, methods)
    parts: list[str | pd.DataFrame] = []
    for timing, names in groups.items():
        traces = summary[summary["method"].isin(names)].drop_duplicates("trace_file")
        if len(traces):
            method_names = f" of {', '.join(names)}" if len(groups) > 1 else ""
            parts += [
                f"{describe(timing, attack)}; {counted(len(traces), 'trace')}{method_names}",
                pd.DataFrame(
                    _table(timing, traces), columns=["", "measured", "theory, in the long run"]
                ),
            ]
    return [*parts, f"{problem}, {averaged(summary)}", *outcome_table(summary)]


def _conclude(cell: Cell, attack: Any, folder: Path, summary: pd.DataFrame) -> None:
    present(
        folder,
        {},
        *report(cell.cluster, cell.methods, cell.problem.name, summary, attack),
        verdict=leading(summary),
    )


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
    starved = expected.mean_law == "conserved" and not traces["trace.share_min"].all()
    return (
        f"{round(low, 2):g} "
        f"({expected.mean_law}{', counting workers that never commit' if starved else ''})"
    )


def _spread(expected: StalenessTheory) -> str:
    if expected.std is None:
        return ""
    return (
        f"{expected.std:.2f} ({expected.law}{'' if expected.queue_free else ', without the queue'})"
    )
