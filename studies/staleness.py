"""What staleness does to asynchronous SGD: methods side by side on one trace per seed.

One cluster is simulated for each seed and every method replays its trace with real gradients. Prints the staleness
measured and in theory, and how each method ended; writes traces, runs, a summary and figures.
"""

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from asyncsim.clusters.cluster_text import describe
from asyncsim.study import load_file, shipped
from asyncsim.study.config import StudyConfig
from asyncsim.study.sweep import Result, run_cells, sweep
from asyncsim.wording import counted

#: Commits of each worker from which on a trace is no short one.
_LONG_TRACE = 100
#: What is said of a mean staleness that is conserved: what workers that wait for ever have read ages, too.
_CONSERVED, _STARVED = "conserved", "conserved, counting workers that never commit"

if TYPE_CHECKING:
    import pandas as pd

    from asyncsim.clusters.cluster import Cluster
    from asyncsim.methods import Method
    from asyncsim.theory.expectations import QueueTheory, StalenessTheory


@dataclass(frozen=True)
class Config(StudyConfig):
    """Options of the staleness study."""


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
        (cell,) = sweep(config, [{}])
        conclude = functools.partial(_conclude, cell.cluster, cell.methods, cell.problem.name)
        return run_cells("staleness", config, [cell], conclude)


def report(cluster: "Cluster", methods: "list[Method]", problem: str, summary: "pd.DataFrame") -> str:
    """Return the tables that the study prints: each timing against theory, and the methods side by side."""
    from asyncsim.study.cell import timings
    from asyncsim.study.outcome import averaged, outcome_table

    groups = timings(cluster, methods)
    lines = []
    for timing, names in groups.items():
        traces = summary[summary["method"].isin(names)].drop_duplicates("trace_file")
        if len(traces):
            whose = f" of {', '.join(names)}" if len(groups) > 1 else ""
            lines += [f"{describe(timing)}; {counted(len(traces), 'trace')}{whose}"]
            rows = _table(timing, traces)
            lines += [f"  {name:<24} {measured:<24} {known}".rstrip() for name, measured, known in rows]
            lines.append("")
    return "\n".join([*lines, f"{problem}, {averaged(summary)}", outcome_table(summary)])


def _conclude(cluster: "Cluster", methods: "list[Method]", problem: str, folder: Path, summary: "pd.DataFrame") -> None:
    """Draw the figures and print the tables of the runs that there are."""
    figures = load_file("asyncsim.figures.staleness", shipped("figures") / "staleness.py").draw(folder)
    print(report(cluster, methods, problem, summary))
    print(f"\nwrote {folder}: config.json, traces, runs, summary.csv, {', '.join(path.name for path in figures)}")


def _table(cluster: "Cluster", traces: "pd.DataFrame") -> list[tuple[str, str, str]]:
    """Return name, measured value and theory of each quantity of the traces."""
    from asyncsim.theory import saturation_bound
    from asyncsim.theory.expectations import queue_theory, staleness_theory, think_time

    mean = traces.filter(regex="^trace\\.").mean()
    commits = mean["trace.commits"] + mean["trace.warm_up"]
    steps = commits / cluster.workers
    expected = staleness_theory(cluster, computations=steps)
    queue, think = queue_theory(cluster), think_time(cluster)
    low, high = expected.mean_bounds
    rows = [
        (
            "staleness, mean",
            f"{mean['trace.staleness_mean']:.2f}",
            f"{low:g} ({_CONSERVED if traces['trace.share_min'].all() else _STARVED})"
            if low == high
            else f"{low:g} to {high:g} (bounds of the mean)",
        ),
        (
            "staleness, std",
            f"{mean['trace.staleness_std']:.2f}",
            _spread(expected),
        ),
    ]
    throughput, fastest = mean["trace.throughput"], ""
    if think is not None and cluster.service.mean > 0 and cluster.discipline != "lock_free":
        demand = cluster.service.mean * (2 if cluster.separate_reads else 1)
        bound = saturation_bound(cluster.workers, think, demand)
        if queue is not None and "bound" not in queue.law:
            fastest = f"{queue.utilisation / demand:.2f} ({queue.law})"
        else:
            fastest = f"at most {bound:.2f} (saturation bound{_exceeded(throughput, bound, 2, steps)})"
    rows.append(("throughput (commits/s)", f"{throughput:.2f}", fastest))
    rows.append(
        (
            "server utilisation" if cluster.discipline != "lock_free" else "visits in service, mean",
            f"{mean['trace.utilisation']:.3f}",
            _utilisation(queue, mean["trace.utilisation"], steps),
        )
    )
    rows.append(("mean wait (s)", f"{mean['trace.wait_mean']:.4f}", ""))
    if cluster.shared_bandwidth:
        # Of either way, as each commit has one message with parameters up and one down.
        rows.append(("shared link, utilisation", f"{throughput * cluster.transfer_time:.3f}", "at most 1"))
    if cluster.policy.staleness_limit is not None:
        lost = mean["trace.discarded_share"] + mean["trace.cancelled_share"]
        rows.append(("computations lost", f"{lost:.3f}", ""))
    return [("", "measured", "theory, in the long run"), *rows]


def _spread(expected: "StalenessTheory") -> str:
    if expected.std is None:
        return ""
    return f"{expected.std:.2f} ({expected.law}{'' if expected.queue_free else ', without the queue'})"


def _utilisation(queue: "QueueTheory | None", measured: float, steps: float) -> str:
    if queue is None:
        return ""
    if "bound" not in queue.law:
        return f"{queue.utilisation:.3f} ({queue.law})"
    return f"at most {queue.utilisation:.3f} ({queue.law}{_exceeded(measured, queue.utilisation, 3, steps)})"


def _exceeded(measured: float, bound: float, digits: int, steps: float) -> str:
    """Say why a short trace lies beyond what holds in the long run, if that shows; of a long one nothing excuses it."""
    shows = round(measured, digits) > round(bound, digits)
    return ", which short traces exceed" if shows and steps < _LONG_TRACE else ""
