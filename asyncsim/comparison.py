"""Methods side by side: the same seeds, the same traces, one folder of results."""

import dataclasses
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from asyncsim import results
from asyncsim.cluster import Cluster
from asyncsim.laws import Law
from asyncsim.methods import Method, Timing
from asyncsim.problems import Problem
from asyncsim.run import Run
from asyncsim.simulation import simulate
from asyncsim.study_config import StudyConfig
from asyncsim.trace import Trace
from asyncsim.wave_replay import replay

if TYPE_CHECKING:
    from collections.abc import Iterator

#: Share of the commits, at the end, over which "final" minibatch losses and energy ratios are taken.
FINAL_SHARE = 0.1


def compare(
    config: StudyConfig, cluster: Cluster, methods: list[Method], problem: Problem, folder: Path
) -> pd.DataFrame:
    """Replay every method on one trace per seed, and write traces, runs and ``summary.csv`` as they finish.

    Methods that need another timing than the cluster's get a trace of their own, from the same random streams.

    Returns
    -------
    pandas.DataFrame
        One row per method and seed; a run that diverged is a row with that status.

    Raises
    ------
    InputError
        A file cannot be written.
    """
    rows: list[dict[str, Any]] = []
    total = config.seeds * len(methods)
    for row in _runs(config, cluster, methods, problem, folder):
        rows.append(row)
        _write(folder, rows)
        print(f"[{len(rows)}/{total}] {_told(row)}", file=sys.stderr, flush=True)
    return _write(folder, rows)


def timings(cluster: Cluster, methods: list[Method]) -> dict[Cluster, list[str]]:
    """Return the clusters that the methods are run on, each with the names of its methods.

    First the one with the most workers; of several, the one of the most methods, then of the first method.
    """
    found: dict[Cluster, list[str]] = {}
    for method in methods:
        found.setdefault(meet(cluster, method.timing), []).append(method.name)
    return dict(sorted(found.items(), key=lambda item: (item[0].workers, len(item[1])), reverse=True))


def missing(config: StudyConfig, methods: list[Method], summary: pd.DataFrame) -> list[str]:
    """Return the runs of a study that its summary lacks, as their folders are called."""
    there = set(zip(summary["method"], summary["seed"], strict=True))
    wanted = [(method.name, seed) for seed in range(config.seeds) for method in methods]
    return [_run_name(*run) for run in wanted if run not in there]


def meet(cluster: Cluster, timing: Timing) -> Cluster:
    """Return the cluster with what a method's timing needs, all else and all random numbers being equal."""
    needs: dict[str, Any] = {name: value for name, value in timing._asdict().items() if value is not None}
    if needs.get("workers", cluster.workers) != cluster.workers:
        laws = cluster.compute
        needs["compute"] = laws if isinstance(laws, Law) else laws[: needs["workers"]]
    if needs.get("protocol", cluster.protocol) != cluster.protocol:
        needs["exclusive"] = True
    return dataclasses.replace(cluster, **needs)


def outcome(run: Run, trace: Trace) -> dict[str, Any]:
    """Return how a run ended, as columns.

    ``final_loss`` is the mean minibatch loss and ``energy_ratio`` the median of central over proxy energy, both over
    the last tenth of the commits; ``train_...`` and ``test_...`` are the last evaluation's. NaN if the run diverged.
    """
    last = run.commits.tail(max(1, round(FINAL_SHARE * len(trace.taken_up))))
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = (last["central_energy"] / last["proxy_energy"]).median()
    evaluated = run.evaluations.iloc[-1].filter(regex="^(train|test)_").to_dict()
    ended = {"final_loss": last["loss"].mean(), **evaluated, "energy_ratio": ratio}
    if run.diverged_at is not None:
        ended = dict.fromkeys(ended, np.nan)
    return {
        "status": run.status,
        "diverged_at": run.diverged_at,
        **ended,
        "simulated_seconds": float(run.commits["commit_time"].iloc[-1]),
    }


def _runs(
    config: StudyConfig, cluster: Cluster, methods: list[Method], problem: Problem, folder: Path
) -> "Iterator[dict[str, Any]]":
    for seed in range(config.seeds):
        traces: dict[Cluster, tuple[Trace, Path]] = {}
        for method in methods:
            needed = meet(cluster, method.timing)
            if needed not in traces:
                name = f"seed{seed}" if needed == cluster else f"seed{seed}-for-{method.name}"
                if needed != cluster and seed == 0:
                    print(f"note: {method.name} needs {_needs(method.timing)}: it gets its own traces", file=sys.stderr)
                # The same number of gradients for all.
                commits = config.commits * cluster.window // needed.window
                trace = simulate(needed, commits=commits, seed=seed)
                traces[needed] = trace, trace.save(folder / "traces" / f"{name}.parquet")
            trace, trace_path = traces[needed]
            # Worker steps of the study's cluster, in those of the trace at hand.
            share = max(1, cluster.workers // needed.workers)
            started = time.perf_counter()
            run = replay(
                trace,
                method,
                problem,
                seed=seed,
                precision=config.precision,
                evaluate_every=None if config.evaluate_every is None else config.evaluate_every * share,
                diagnose_every=config.diagnose_every * share,
                proxy_momentum=config.momentum,
            )
            run_path = run.save(folder / "runs" / _run_name(method.name, seed))
            yield {
                "method": method.name,
                "seed": seed,
                **outcome(run, trace),
                **{f"method.{name}": value for name, value in run.config["hyperparameters"].items()},
                **{f"trace.{name}": value for name, value in trace.summary().items()},
                "workers": needed.workers,
                "own_trace": needed != cluster,
                "trace_file": str(trace_path.relative_to(folder)),
                "run_folder": str(run_path.relative_to(folder)),
                "_seconds": time.perf_counter() - started,
            }


def _run_name(method: str, seed: int) -> str:
    return f"{method}-seed{seed}"


def _write(folder: Path, rows: list[dict[str, Any]]) -> pd.DataFrame:
    # Wall-clock times are told, not written: the same configuration writes the same bytes.
    summary = pd.DataFrame(rows).drop(columns="_seconds", errors="ignore")
    results.write_csv(folder / results.SUMMARY, summary)
    return summary


def _needs(timing: Timing) -> str:
    return ", ".join(f"{name} = {value}" for name, value in timing._asdict().items() if value is not None)


def _told(row: dict[str, Any]) -> str:
    how = f"diverged at commit {row['diverged_at']}" if row["status"] == "diverged" else f"loss {row['final_loss']:.3g}"
    return f"{row['method']}, seed {row['seed']}: {how}, in {row['_seconds']:.1f} s"
