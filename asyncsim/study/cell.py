"""One point of a study's grid: methods on a cluster, each with the timing that it needs, and the
runs that they make.

Methods that need another timing than the cluster's get a separate trace, from the same random
streams. Cells of one cluster share their traces.
"""

import dataclasses
import functools
import json
import math
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from asyncsim.base.console import each_note_once, note
from asyncsim.base.errors import InputError
from asyncsim.base.files import folder_name, plain, set_aside
from asyncsim.base.threads import cached
from asyncsim.byzantine.attacks import WeakAttackWarning, parse_attack
from asyncsim.clusters.cluster import Cluster
from asyncsim.clusters.laws import Constant, Law
from asyncsim.clusters.network import PerWorker, SlowLinkWarning, is_matrix
from asyncsim.methods import Method, Timing
from asyncsim.methods.method import OF_SIZES
from asyncsim.methods.robust_gossip import note_few_replicas
from asyncsim.problems import Problem
from asyncsim.replays import recorders
from asyncsim.replays.attacked import require_attackable, weakness_text
from asyncsim.replays.parts import waves_of_servers
from asyncsim.replays.replay import replay
from asyncsim.replays.run import Run
from asyncsim.replays.suitable import require_enough, require_replies, require_shards
from asyncsim.simulation.simulate import simulate
from asyncsim.study.columns import setting_text
from asyncsim.study.config import MOST_SEEDS, StudyConfig
from asyncsim.study.jobs import Job, Tables
from asyncsim.study.outcome import outcome
from asyncsim.study.results import SUMMARY, TRIALS
from asyncsim.study.target import Target
from asyncsim.traces.trace import Trace

_ROUND_OFF = 1e-12
#: The network of a lone worker, which has the parameters itself: none.
_ALONE = {
    "latency": Constant(0.0),
    "bandwidth": None,
    "shared_bandwidth": False,
    "message_bytes": None,
    "sites": None,
    "far_latency": None,
    "far_bandwidth": None,
    "far_every": 1,
}


class Cell(NamedTuple):
    """A cluster with its methods and its problem: one point of a study's grid."""

    name: str  #: of its folders inside ``traces`` and ``runs``; empty for a study of one cell
    values: Mapping[str, Any]  #: the options that differ between cells, as columns of the summary
    config: StudyConfig  #: with its seeds, its length and its recordings
    cluster: Cluster
    methods: list[Method]  #: none: traces alone
    problem: Problem
    goal: Target | None = None  #: the target of its runs: columns of the summary
    seconds: float | None = (
        None  #: simulated time of each method, instead of equal numbers of gradients
    )
    #: Further columns of a run, from its `CellRun`, the run and its trace.
    of_run: Callable[["CellRun", Run, Trace], Mapping[str, Any]] | None = None
    table: str = SUMMARY  #: with the rows of its runs

    @property
    def seeds(self) -> range:
        """The seeds of its runs; the seeds of trials differ from every other seed."""
        first = MOST_SEEDS if self.table == TRIALS else 0
        return range(first, first + self.config.seeds)

    def trial(self, seeds: int) -> "Cell":
        """Return the cell with runs over half of its length, on which rates are chosen."""
        half = self.with_options(steps=max(1, self.config.steps // 2), seeds=seeds)
        seconds = None if self.seconds is None else self.seconds / 2
        return half._replace(name=f"trial_{self.name}", seconds=seconds, table=TRIALS)

    @property
    def folder(self) -> str:
        """The name of the cell as the name of a folder."""
        return folder_name(self.name)

    def cluster_of(self, method: Method, seed: int = 0) -> tuple[Cluster, int]:
        """Return the cluster that a method runs on, and its commits: all methods compute the same
        number of gradients.

        If the cell has ``seconds``, the number of commits within that time with this seed.
        """
        cluster = meet(self.cluster, method.timing, self.config.bits)
        return cluster, self.length(cluster, seed)

    def length(self, cluster: Cluster, seed: int) -> int:
        """Return the commits of a trace of the cell's cluster, or of one that meets a method's
        timing.
        """
        if self.seconds is None:
            return same_gradients(self.config.commits, self.cluster, cluster)
        commits = commits_within(cluster, self.seconds, seed)
        if not commits:
            raise InputError(
                f"time_budget = {self.seconds:g}: ends before the first commit of seed {seed}; "
                "give more"
            )
        return commits

    def with_options(self, **options: Any) -> "Cell":
        """Return the cell with other values of some options, on the same cluster."""
        return self._replace(config=self.config.at(**options))


def _values(cell: Cell) -> str:
    """Return the prefix that distinguishes a cell in the names of its jobs."""
    return "".join(f"{setting_text(name, value)}, " for name, value in cell.values.items())


def timings(cluster: Cluster, methods: list[Method], bits: int = 32) -> dict[Cluster, list[str]]:
    """Return the clusters of the methods, each with the names of its methods.

    The order: most workers first, then most methods, then the first method.
    """
    groups: dict[Cluster, list[str]] = {}
    for method in methods:
        groups.setdefault(meet(cluster, method.timing, bits), []).append(method.name)
    return dict(
        sorted(groups.items(), key=lambda item: (item[0].workers, len(item[1])), reverse=True)
    )


def meet(cluster: Cluster, timing: Timing, bits: int = 32) -> Cluster:
    """Return the cluster with the timing of a method; all else and all random numbers stay equal.

    A lone worker has no network, an all-reduce no service. ``bits``: the size of a parameter in a
    message.
    """
    needs: dict[str, Any] = {
        name: value for name, value in vars(timing).items() if value is not None
    }
    if timing.policy is not None and timing.policy.is_met_by(cluster.policy):
        del needs["policy"]
    elif timing.policy is not None and timing.policy.collective is not None:
        needs["service"] = Constant(0.0)
    if needs.get("workers", cluster.workers) != cluster.workers:
        laws, windows = cluster.compute, cluster.window
        needs["compute"] = laws if isinstance(laws, Law) else laws[: needs["workers"]]
        needs.setdefault(
            "window", windows if isinstance(windows, int) else windows[: needs["workers"]]
        )
        for name in ("latency", "bandwidth"):
            if isinstance(value := getattr(cluster, name), PerWorker):
                needs[name] = value.first(needs["workers"])
        if cluster.sites is not None:  # the sites of the first workers
            remaining = np.diff(np.minimum(np.cumsum((0, *cluster.sites)), needs["workers"]))
            count = np.flatnonzero(remaining)[-1] + 1
            needs["sites"] = tuple(remaining[:count].tolist())
            for name in ("far_latency", "far_bandwidth"):
                if is_matrix(value := getattr(cluster, name)):
                    needs[name] = tuple(row[:count] for row in value[:count])
    if needs.get("protocol", cluster.protocol) != cluster.protocol:
        needs["exclusive"] = True
    needs.pop("fewest_workers", None)  # jobs_of checks this
    sizes = [needs.pop(name, None) for name in OF_SIZES]
    vector = cluster.message_bytes
    if vector is not None and any(size is not None for size in sizes):
        up, down = vector if isinstance(vector, tuple) else (vector, vector)
        needs["message_bytes"] = timing.bytes_of_visit(up, down, bits)
    far_every, groups = needs.pop("far_every", 1), needs.pop("groups", None)
    is_uniform = not any(map(is_matrix, (cluster.far_latency, cluster.far_bandwidth)))
    if (
        cluster.sites is not None
        and groups is not None
        and not cluster.shared_bandwidth
        and is_uniform
    ):
        group = np.arange(cluster.workers) * groups // cluster.workers
        begins = np.cumsum(cluster.sites)[:-1]
        if (group[begins] != group[begins - 1]).all():  # no group is at two sites
            needs["far_every"] = far_every
    if timing.workers == 1:
        needs |= _ALONE
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SlowLinkWarning)  # said when the cluster was made
        return dataclasses.replace(cluster, **needs)


def same_gradients(commits: int, cluster: Cluster, target: Cluster) -> int:
    """Return the number of commits of ``target`` that contain as many gradients as ``commits`` of
    ``cluster``.
    """
    # The margin guards the floor against round-off: mean windows of unlike workers are quotients.
    return math.floor(commits * cluster.mean_window / target.mean_window * (1 + _ROUND_OFF))


@cached(maxsize=256)
def commits_within(cluster: Cluster, seconds: float, seed: int = 0) -> int:
    """Return how many commits a cluster makes in some simulated seconds; there may be none."""
    commits = cluster.workers
    while (
        times := simulate(cluster, commits, seed, progress=False).accepted.frame["commit_time"]
    ).iloc[-1] <= seconds:
        commits *= 2
    return int((times <= seconds).sum())


@each_note_once()
def jobs_of(cells: Iterable[Cell], traces: dict[tuple[Cluster, int, int], str]) -> list[Job]:
    """Return the runs of some cells, each method on one trace per seed; only the traces of a cell
    without methods.

    ``traces``: the files of the traces by cluster, commits and seed; new traces are added.
    """
    jobs = []
    for cell in cells:
        for seed in cell.seeds:
            if not cell.methods:
                commits = cell.length(cell.cluster, seed)
                file = _trace_file(cell, f"seed{seed}")
                jobs.append(CellRun(cell, None, seed, cell.cluster, commits, file).job())
            for method in cell.methods:
                cluster, commits = cell.cluster_of(method, seed)
                require_enough(method.name, method.timing, cluster.workers)
                attack = parse_attack(cell.config.attack)
                require_shards(cluster.server_count, cell.problem.parameter_count, method, attack)
                name = f"seed{seed}"
                if cluster != cell.cluster:
                    name += f"-for-{method.name}"
                    needs = [
                        f"{need} = {value}"
                        for need, value in vars(method.timing).items()
                        if value is not None
                        and need != "message_share"
                        and (need not in OF_SIZES or cluster.message_bytes is not None)
                        and (need not in ("far_every", "groups") or cluster.far_every > 1)
                    ]
                    is_same_length = cell.seconds is not None or commits == cell.config.commits
                    length = (
                        "" if is_same_length else f", of {commits:,} commits for as many gradients"
                    )
                    note(f"{method.name} needs {', '.join(needs)}: it gets its own traces{length}")
                file = traces.setdefault((cluster, commits, seed), _trace_file(cell, name))
                if method.rounds is not None:
                    method.rounds.require(cluster.workers, cluster.policy)
                if seed == cell.seeds[0] and method.sees_messages and cluster.topology is not None:
                    note_few_replicas(method, cluster.topology, cluster.workers)
                if seed == cell.seeds[0] and attack is not None:
                    require_attackable(method, cell.problem, attack, cluster.workers)
                    if weakness := weakness_text(attack, cluster.workers):
                        note(weakness)
                if method.reply and seed == cell.seeds[0]:
                    for waves in waves_of_servers(_trace(cluster, commits, seed).accepted):
                        require_replies(method, waves.reads)
                jobs.append(CellRun(cell, method, seed, cluster, commits, file).job())
    return jobs


def _trace_file(cell: Cell, name: str) -> str:
    return (Path("traces", cell.folder) / f"{folder_name(name)}.parquet").as_posix()


def weak_attacks(cells: Iterable[Cell]) -> list[str]:
    """Return a notice for each attack of some cells that has no effect."""
    texts = (
        weakness_text(attack, meet(cell.cluster, method.timing, cell.config.bits).workers)
        for cell in cells
        if (attack := parse_attack(cell.config.attack)) is not None
        for method in cell.methods
    )
    return list(dict.fromkeys(filter(None, texts)))


class CellRun(NamedTuple):
    """A run of a cell: a method on a trace of a cluster that meets its timing; or a trace alone."""

    cell: Cell
    method: Any  #: a `Method`; None for a trace alone
    seed: int
    cluster: Cluster
    commits: int
    trace_file: str  #: in the study's folder

    @property
    def place(self) -> str:
        """Its folder inside the study's folder; the file of a trace alone."""
        if self.method is None:
            return self.trace_file
        name = folder_name(f"{self.method.name}-seed{self.seed}")
        return (Path("runs", self.cell.folder) / name).as_posix()

    @property
    def labels(self) -> dict[str, Any]:
        """The columns that name the run."""
        method = {} if self.method is None else {"method": self.method.name}
        workers = {"workers": self.cell.cluster.workers}
        return {**self.cell.values, **workers, **method, "seed": self.seed}

    @property
    def of_trace(self) -> dict[str, Any]:
        """The columns that say whether the trace is the cell's."""
        return {"own_workers": self.cluster.workers, "own_trace": self.cluster != self.cell.cluster}

    def job(self) -> Job:
        """Return the job that computes it."""
        cell, method, words = self.cell, self.method, _values(self.cell)
        on_trace = self.cluster, self.commits, self.seed
        steps = self.keep, self.read
        if method is None:
            name = f"{words}seed {self.seed}"
            return Job(name, self.place, simulate, on_trace, *steps, self.labels)
        # Worker steps of the study's cluster, in steps of this trace: of equal gradients, or of
        # equal time.
        share = (
            1 if cell.seconds is not None else max(1, cell.cluster.workers // self.cluster.workers)
        )
        return Job(
            f"{words}{method.name}, seed {self.seed}",
            self.place,
            _replayed,
            (*on_trace, method, cell.problem, cell.config, share, cell.goal),
            *steps,
            {**self.labels, **self.of_trace},
            errors=cell.table,
            say=_ending,
        )

    def keep(self, folder: Path, result: Any) -> Tables:
        """Write the run, and the trace unless another run has, into a study's folder; return the
        row.
        """
        run, trace = (None, result) if self.method is None else result
        if not (folder / self.trace_file).exists():
            trace.save(folder / self.trace_file)
        if run is not None:
            run.save(folder / self.place)
        return self._row(run, trace)

    def read(self, folder: Path) -> Tables | None:
        """Return the row of a finished run in a study's folder; None if it must be computed."""
        path, file = folder / self.place, folder / self.trace_file
        if not path.exists() and not file.exists():
            return None
        try:
            trace = Trace.load(file)
            commits = len(trace.accepted)
            recorded = {"cluster": trace.cluster, "commits": commits, "seed": trace.seed}
            expected = {"cluster": self.cluster, "commits": self.commits, "seed": self.seed}
            _require_match("trace", recorded, expected)
        except InputError as error:
            # Other runs read it, too; the first of them simulates the same trace again.
            moved = f"moved to {set_aside(folder, self.trace_file)}, and " if file.exists() else ""
            note(f"{error}: {moved}made again")
            trace = _trace(self.cluster, self.commits, self.seed)
            trace.save(file)
        if self.method is None:
            return self._row(None, trace)
        if not path.exists():
            return None
        try:
            run = Run.load(path)
            attack = parse_attack(self.cell.config.attack)
            expected = {
                "attack": attack and attack.text,
                "method": self.method.name,
                "hyperparameters": json.loads(json.dumps(plain(self.method.hyperparameters))),
                "commits": self.commits,
                "seed": self.seed,
            }
            _require_match(f"run {self.place}", run.config, expected)
            return self._row(run, trace)
        except InputError as error:
            note(f"{error}: moved to {set_aside(folder, self.place)}, and computed again")
            return None

    def _row(self, run: Run | None, trace: Trace) -> Tables:
        of_trace = {f"trace.{name}": value for name, value in trace.summary().items()}
        file = {"trace_file": self.trace_file}
        if run is None:
            return {self.cell.table: [{**self.labels, "status": "finished", **of_trace, **file}]}
        row = {
            **self.labels,
            **outcome(run, trace),
            **({} if self.cell.goal is None else self.cell.goal.reached(run, trace)),
            **{f"method.{name}": value for name, value in run.config["hyperparameters"].items()},
            **of_trace,
            **self.of_trace,
            **({} if self.cell.of_run is None else self.cell.of_run(self, run, trace)),
            **file,
            "run_folder": self.place,
        }
        return {self.cell.table: [row]}


def _ending(tables: Tables) -> str:
    """Return in words how a run ended."""
    ((row,),) = tables.values()
    diverged = row["status"] == "diverged"
    return (
        f"diverged at commit {row['diverged_at']}" if diverged else f"loss {row['final_loss']:.3g}"
    )


def _require_match(source: str, recorded: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Raise InputError for a run or a trace that was copied from another run."""
    for name, value in expected.items():
        if recorded.get(name) != value:
            raise InputError(
                f"{source}: is another's, of {name} {recorded.get(name)!r}, not {value!r}"
            )


def _replayed(
    cluster: Cluster,
    commits: int,
    seed: int,
    method: Method,
    problem: Problem,
    config: StudyConfig,
    share: int,
    goal: Target | None,
) -> tuple[Run, Trace]:
    """Return a run and its trace; ``share``: steps of the trace for each worker step of the
    config.
    """
    every, is_split = config.diagnose_every * share, cluster.server_count > 1
    record = [recorders.energy(config.momentum, every if config.diagnose_energy else 0)]
    if every and not is_split:  # else no recorder sees all parameters at one instant
        record.append(recorders.diagnostics(every))
    if config.animate:
        record.append(recorders.positions())
    if method.rounds is not None and not is_split:
        record.append(recorders.chosen())
    evaluate_every = config.evaluate_every and config.evaluate_every * share
    run = functools.partial(
        replay,
        problem=problem,
        seed=seed,
        precision=config.precision,
        evaluate_every=evaluate_every,
        evaluate_until=goal.is_met_at if goal is not None and evaluate_every else None,
        attack=config.attack,
    )
    with config.computing_device(), warnings.catch_warnings():
        warnings.simplefilter("ignore", WeakAttackWarning)  # said before the first run
        trace = _trace(cluster, commits, seed)
        if config.directions_every:
            # A first replay finds the point to which the second measures the direction.
            end = run(trace, method, record=record).params
            directions = config.directions_every * share
            record.append(recorders.directions(problem, end, directions))
        return run(trace, method, record=record), trace


@cached(maxsize=1)
def _trace(cluster: Cluster, commits: int, seed: int) -> Trace:
    """Simulate a trace; the last trace is cached for the next method and for concurrent ones."""
    return simulate(cluster, commits=commits, seed=seed)
