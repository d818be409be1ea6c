"""Methods side by side: the same seeds, the same traces, one folder of results."""

import dataclasses
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

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
#: Columns of a summary that its table shows, and their titles there.
_SHOWN = {
    "final_loss": "minibatch loss",
    "train_loss": "train loss",
    "test_loss": "test loss",
    "test_accuracy": "test accuracy",
    "energy_ratio": "energy ratio",
    "median_pi": "median pi",
    "simulated_seconds": "simulated s",
    "trace.throughput": "commits/s",
}


class Cell(NamedTuple):
    """A cluster, and the methods and the problem that are run on it: one point of a study's grid.

    Attributes
    ----------
    name : str
        Of its folders inside ``traces`` and ``runs``; empty for a study of one cell.
    values : mapping
        What sets it apart from the others, as columns of the summary.
    config : StudyConfig
        With its seeds, its length and what is recorded.
    cluster : Cluster
    methods : list of Method
    problem : Problem
    """

    name: str
    values: Mapping[str, Any]
    config: StudyConfig
    cluster: Cluster
    methods: list[Method]
    problem: Problem

    @property
    def wanted(self) -> list[str]:
        """The folders of its runs, in the order of computing."""
        return [self.folder_of(method, seed) for seed in range(self.config.seeds) for method in self.methods]

    def folder_of(self, method: Method, seed: int) -> str:
        """Return the folder of a run, inside that of the study."""
        return (Path("runs", self.name) / f"{method.name}-seed{seed}").as_posix()


def compare(
    cells: Sequence[Cell], folder: Path, follow: Callable[[pd.DataFrame], Sequence[Cell]] | None = None
) -> pd.DataFrame:
    """Replay every method of each cell on one trace per seed; write traces, runs and ``summary.csv`` as they finish.

    Methods that need another timing than the cluster's get a trace of their own, from the same random streams. Cells
    of one cluster share their traces. ``follow`` may choose more cells by the summary of these, which are run then.

    Returns
    -------
    pandas.DataFrame
        One row per cell, method and seed; a run that diverged is a row with that status.

    Raises
    ------
    InputError
        A file cannot be written.
    """
    rows: list[dict[str, Any]] = []
    traces = _Traces(folder)
    _run_all(cells, traces, folder, rows)
    if follow is not None:
        _run_all(follow(pd.DataFrame(rows)), traces, folder, rows)
    return _write(folder, rows)


def timings(cluster: Cluster, methods: list[Method]) -> dict[Cluster, list[str]]:
    """Return the clusters that the methods are run on, each with the names of its methods.

    First the one with the most workers; of several, the one of the most methods, then of the first method.
    """
    found: dict[Cluster, list[str]] = {}
    for method in methods:
        found.setdefault(meet(cluster, method.timing), []).append(method.name)
    return dict(sorted(found.items(), key=lambda item: (item[0].workers, len(item[1])), reverse=True))


def missing(cells: Sequence[Cell], summary: pd.DataFrame) -> list[str]:
    """Return the folders of the runs that a study's summary lacks."""
    there = set(summary["run_folder"])
    return [name for cell in cells for name in cell.wanted if name not in there]


def meet(cluster: Cluster, timing: Timing) -> Cluster:
    """Return the cluster with what a method's timing needs, all else and all random numbers being equal."""
    needs: dict[str, Any] = {name: value for name, value in timing._asdict().items() if value is not None}
    if needs.get("workers", cluster.workers) != cluster.workers:
        laws, windows = cluster.compute, cluster.window
        needs["compute"] = laws if isinstance(laws, Law) else laws[: needs["workers"]]
        needs.setdefault("window", windows if isinstance(windows, int) else windows[: needs["workers"]])
    if needs.get("protocol", cluster.protocol) != cluster.protocol:
        needs["exclusive"] = True
        needs.setdefault("read_blocks", 1)
    return dataclasses.replace(cluster, **needs)


def same_gradients(commits: int, cluster: Cluster, other: Cluster) -> int:
    """Return in how many commits of another cluster there are as many gradients as in those of the first."""
    return int(commits * cluster.mean_window // other.mean_window)


def outcome(run: Run, trace: Trace) -> dict[str, Any]:
    """Return how a run ended, as columns.

    ``final_loss`` is the mean minibatch loss and ``energy_ratio`` the median of central over proxy energy, both over
    the last tenth of the commits, ``median_...`` the mean of the recorded medians of a method's own diagnostic there;
    ``train_...`` and ``test_...`` are the last evaluation's. NaN if the run diverged.
    """
    last = run.commits.tail(max(1, round(FINAL_SHARE * len(trace.taken_up))))
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = (last["central_energy"] / last["proxy_energy"]).median()
    evaluated = run.evaluations.iloc[-1].filter(regex="^(train|test)_").to_dict()
    shown = run.diagnostics
    late = shown[(shown["commit"] >= last["commit"].iloc[0]) & (shown["quantile"] == 0.5) & (shown["tensor"] == "")]
    medians = late.groupby("quantity", sort=False)["value"].mean().add_prefix("median_").to_dict()
    ended = {"final_loss": last["loss"].mean(), **evaluated, "energy_ratio": ratio, **medians}
    if run.diverged_at is not None:
        ended = dict.fromkeys(ended, np.nan)
    return {
        "status": run.status,
        "diverged_at": run.diverged_at,
        **ended,
        "simulated_seconds": float(run.commits["commit_time"].iloc[-1]),
    }


def outcome_table(summary: pd.DataFrame, by: Sequence[str] = ("method",)) -> str:
    """Return a table of how the runs of a study ended, one line for each combination of some columns.

    All means are over one population, the seeds that finished; the first column says how many of them diverged.
    """
    shown = [name for name in _SHOWN if name in summary]
    keys = [summary[name] for name in by]
    means = summary[shown].where(summary["status"] == "finished").groupby(keys, sort=False).mean()
    runs = summary.groupby(list(by), sort=False)["status"]
    table = means.rename(columns=_SHOWN)
    table.insert(0, "diverged", runs.agg(lambda status: f"{(status == 'diverged').sum()} of {len(status)}"))
    return table.reset_index().to_string(index=False, float_format="{:#.3g}".format, na_rep="-")


def averaged(summary: pd.DataFrame) -> str:
    """Return over which seeds the means of a study are, in words."""
    seeds, diverged = summary["seed"].nunique(), (summary["status"] == "diverged").any()
    if seeds == 1:
        return "one seed"
    return f"means over the seeds that finished, of {seeds}" if diverged else f"means over {seeds} seeds"


class _Traces:
    """The traces of a study: each is simulated and written once, the last one is at hand."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._paths: dict[tuple[Cluster, int, int], Path] = {}
        self._last: tuple[tuple[Cluster, int, int], Trace] | None = None

    def get(self, cluster: Cluster, commits: int, seed: int, name: Path) -> tuple[Trace, str]:
        """Return a trace and its file inside the study's folder, which has this name if it is new."""
        key = (cluster, commits, seed)
        if self._last is None or self._last[0] != key:
            self._last = key, simulate(cluster, commits=commits, seed=seed)
        trace = self._last[1]
        if key not in self._paths:
            self._paths[key] = trace.save(self._folder / "traces" / name.with_suffix(".parquet"))
        return trace, self._paths[key].relative_to(self._folder).as_posix()


def _run_all(cells: Sequence[Cell], traces: _Traces, folder: Path, rows: list[dict[str, Any]]) -> None:
    """Run some cells, and add their rows to those that there are."""
    total = len(rows) + sum(len(cell.wanted) for cell in cells)
    for cell in cells:
        for row in _runs(cell, traces, folder):
            rows.append(row)
            _write(folder, rows)
            print(f"[{len(rows)}/{total}] {_told(cell, row)}", file=sys.stderr, flush=True)


def _runs(cell: Cell, traces: _Traces, folder: Path) -> "Iterator[dict[str, Any]]":
    config, cluster = cell.config, cell.cluster
    for seed in range(config.seeds):
        for method in cell.methods:
            needed = meet(cluster, method.timing)
            name = f"seed{seed}" if needed == cluster else f"seed{seed}-for-{method.name}"
            if needed != cluster and seed == 0:
                print(f"note: {method.name} needs {_needs(method.timing)}: it gets its own traces", file=sys.stderr)
            # The same number of gradients for all.
            commits = same_gradients(config.commits, cluster, needed)
            trace, trace_file = traces.get(needed, commits, seed, Path(cell.name, name))
            # Worker steps of the study's cluster, in those of the trace at hand.
            share = max(1, cluster.workers // needed.workers)
            started = time.perf_counter()
            run = replay(
                trace,
                method,
                cell.problem,
                seed=seed,
                precision=config.precision,
                evaluate_every=None if config.evaluate_every is None else config.evaluate_every * share,
                diagnose_every=config.diagnose_every * share,
                diagnose_energy=config.diagnose_energy,
                proxy_momentum=config.momentum,
            )
            run.save(folder / cell.folder_of(method, seed))
            yield {
                **cell.values,
                "workers": cluster.workers,
                "method": method.name,
                "seed": seed,
                **outcome(run, trace),
                **{f"method.{name}": value for name, value in run.config["hyperparameters"].items()},
                **{f"trace.{name}": value for name, value in trace.summary().items()},
                "own_workers": needed.workers,
                "own_trace": needed != cluster,
                "trace_file": trace_file,
                "run_folder": cell.folder_of(method, seed),
                "_seconds": time.perf_counter() - started,
            }


def _write(folder: Path, rows: list[dict[str, Any]]) -> pd.DataFrame:
    # Wall-clock times are told, not written: the same configuration writes the same bytes.
    summary = pd.DataFrame(rows).drop(columns="_seconds", errors="ignore")
    results.write_csv(folder / results.SUMMARY, summary)
    return summary


def _needs(timing: Timing) -> str:
    return ", ".join(f"{name} = {value}" for name, value in timing._asdict().items() if value is not None)


def _told(cell: Cell, row: dict[str, Any]) -> str:
    how = f"diverged at commit {row['diverged_at']}" if row["status"] == "diverged" else f"loss {row['final_loss']:.3g}"
    where = "".join(f"{name} {value}, " for name, value in cell.values.items())
    return f"{where}{row['method']}, seed {row['seed']}: {how}, in {row['_seconds']:.1f} s"
