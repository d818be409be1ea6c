"""Methods side by side: the same seeds, the same traces, one folder of results."""

import json
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pandas as pd

from asyncsim.clusters.cluster import Cluster
from asyncsim.errors import InputError
from asyncsim.files import plain, write_csv
from asyncsim.methods import Method, Timing
from asyncsim.problems import Problem
from asyncsim.replays.method_check import require_replies
from asyncsim.replays.replay import replay
from asyncsim.replays.run import Run
from asyncsim.replays.waves import find_waves
from asyncsim.simulation.simulate import simulate
from asyncsim.study import results
from asyncsim.study.cell import Cell
from asyncsim.study.device import computing_device
from asyncsim.study.executor import Executor, Failure, Failures
from asyncsim.study.outcome import outcome
from asyncsim.threads import cached
from asyncsim.traces.trace import Trace
from asyncsim.wording import each_note_once, note, tell

if TYPE_CHECKING:
    from collections.abc import Iterator


def compare(
    cells: Sequence[Cell],
    folder: Path,
    follow: Callable[[pd.DataFrame], Sequence[Cell]],
    executor: Executor,
) -> pd.DataFrame:
    """Replay every method of each cell on one trace per seed; write traces, runs and ``summary.csv`` as they finish.

    Methods that need another timing than the cluster's get a trace of their own, from the same random streams. Cells
    of one cluster share their traces. ``follow`` may choose more cells, which are run then, by the rows of those that
    have not failed, if there are any. Runs that the folder has already are read from there; ``executor`` computes the
    others.

    Returns
    -------
    pandas.DataFrame
        One row per cell, method and seed, in that order. A run that diverged is a row with that status; one that ended
        with an error is a row with the status ``failed``, the ``error``, and no ``run_folder``.

    Raises
    ------
    InputError
        A file cannot be written; input that only a run could tell to be bad.
    """
    runs = _Runs(folder, executor)
    runs.add(cells)
    ended = results.ended(runs.summary())
    if len(ended):
        runs.add(follow(ended))
    _trace.cache_clear()
    return runs.summary()


class _Job(NamedTuple):
    """A run of a study: a method on a trace of a cluster that meets its timing."""

    cell: Cell
    method: Method
    seed: int
    cluster: Cluster
    commits: int
    trace_file: str

    @property
    def run_folder(self) -> str:
        return self.cell.folder_of(self.method, self.seed)

    @property
    def arguments(self) -> tuple[Any, ...]:
        """What `_replayed` is called with."""
        config = self.cell.config
        # Worker steps of the study's cluster, in those of the trace at hand.
        share = max(1, self.cell.cluster.workers // self.cluster.workers)
        options = {
            "precision": config.precision,
            "evaluate_every": None if config.evaluate_every is None else config.evaluate_every * share,
            "diagnose_every": config.diagnose_every * share,
            "diagnose_energy": config.diagnose_energy,
            "proxy_momentum": config.momentum,
        }
        return self.cluster, self.commits, self.seed, self.method, self.cell.problem, options, config.device

    @property
    def of_cell(self) -> dict[str, Any]:
        """The columns that tell which run it is."""
        workers = self.cell.cluster.workers
        return {**self.cell.values, "workers": workers, "method": self.method.name, "seed": self.seed}

    @property
    def of_trace(self) -> dict[str, Any]:
        """The columns of its own timing."""
        return {"own_workers": self.cluster.workers, "own_trace": self.cluster != self.cell.cluster}


class _Replayed(NamedTuple):
    run: Run
    trace: Trace
    seconds: float


class _Runs:
    """The runs of a study in its own order, whatever the order in which they finish, and their rows so far."""

    def __init__(self, folder: Path, executor: Executor):
        self._folder, self._executor = folder, executor
        self._traces: dict[tuple[Cluster, int, int], str] = {}
        self._jobs: list[_Job] = []
        self._rows: dict[int, dict[str, Any]] = {}
        self._failures = Failures()

    def add(self, cells: Sequence[Cell]) -> None:
        """Compute the runs of some cells, but for those that are there already."""
        first = len(self._jobs)
        with each_note_once():
            for cell in cells:
                self._jobs += self._jobs_of(cell)
        places = range(first, len(self._jobs))
        _require_replies(self._jobs[first:])
        for place in places:
            self._read(place)
        missing = [place for place in places if place not in self._rows]
        if len(missing) < len(places):
            self._write()
        for done in self._executor.map(_replayed, [self._jobs[place].arguments for place in missing]):
            self._take(missing[done.place], done.value)

    def summary(self) -> pd.DataFrame:
        """Return the rows, failed ones without those columns that only a run has."""
        rows = sorted(self._rows.items())
        # The columns come in the order of a row that has all.
        rows.sort(key=lambda item: item[1]["status"] == results.FAILED)
        places = [place for place, _ in rows]
        return pd.DataFrame([row for _, row in rows], index=places).sort_index().reset_index(drop=True)

    def _jobs_of(self, cell: Cell) -> "Iterator[_Job]":
        config, cluster = cell.config, cell.cluster
        for seed in range(config.seeds):
            for method in cell.methods:
                needed, commits = cell.own(method)
                name = f"seed{seed}" if needed == cluster else f"seed{seed}-for-{method.name}"
                if needed != cluster:
                    length = "" if commits == config.commits else f", of {commits:,} commits for as many gradients"
                    note(f"{method.name} needs {_needs(method.timing)}: it gets its own traces{length}")
                file = (Path("traces", cell.name) / f"{name}.parquet").as_posix()
                file = self._traces.setdefault((needed, commits, seed), file)
                yield _Job(cell, method, seed, needed, commits, file)

    def _read(self, place: int) -> None:
        """Add the row of a run that an earlier attempt has left in the folder."""
        job = self._jobs[place]
        run_folder, trace_file = self._folder / job.run_folder, self._folder / job.trace_file
        for path, odd, what in (
            (
                run_folder,
                run_folder.is_symlink() or (run_folder.exists() and not run_folder.is_dir()),
                "folder of a run",
            ),
            (trace_file, trace_file.is_dir(), "file of a trace"),
        ):
            if odd:
                raise InputError(f"{str(path)!r}: is in the place of the {what}; move it away, and go on with --resume")
        if not run_folder.exists():
            return
        try:
            trace = Trace.load(trace_file)
            of_trace = {"cluster": trace.cluster, "commits": len(trace.taken_up), "seed": trace.seed}
            _require_own("trace", of_trace, {"cluster": job.cluster, "commits": job.commits, "seed": job.seed})
        except InputError as error:
            note(f"{error}: made again")
            # Others read it, too; whichever comes first makes it again, the same.
            trace_file.unlink(missing_ok=True)
            trace = _trace(job.cluster, job.commits, job.seed)
            trace.save(trace_file)
        try:
            run = Run.load(run_folder)
            hyperparameters = json.loads(json.dumps(plain(job.method.hyperparameters)))
            own = {"method": job.method.name, "hyperparameters": hyperparameters, "commits": job.commits}
            _require_own(f"run {job.run_folder}", run.config, {**own, "seed": job.seed})
            self._add(place, run, trace)
            self._tell(place, "read")
        except InputError as error:
            note(f"{error}: computed again")
            shutil.rmtree(run_folder)

    def _take(self, place: int, value: "_Replayed | Failure") -> None:
        """Write what a run has brought."""
        job = self._jobs[place]
        if isinstance(value, Failure):
            failed = {"status": results.FAILED, "error": value.error}
            self._rows[place] = {**job.of_cell, **failed, **job.of_trace}
            self._failures.tell(f"[{len(self._rows)}/{len(self._jobs)}] {_where(job)}", value)
        else:
            if not (self._folder / job.trace_file).exists():
                value.trace.save(self._folder / job.trace_file)
            value.run.save(self._folder / job.run_folder)
            self._add(place, value.run, value.trace)
        self._write()
        if not isinstance(value, Failure):
            self._tell(place, f"in {value.seconds:.1f} s")

    def _write(self) -> None:
        write_csv(self._folder / results.SUMMARY, self.summary())

    def _add(self, place: int, run: Run, trace: Trace) -> None:
        job = self._jobs[place]
        # Wall-clock times are told, not written: the same configuration writes the same bytes.
        self._rows[place] = {
            **job.of_cell,
            **outcome(run, trace),
            **{f"method.{name}": value for name, value in run.config["hyperparameters"].items()},
            **{f"trace.{name}": value for name, value in trace.summary().items()},
            **job.of_trace,
            "trace_file": job.trace_file,
            "run_folder": job.run_folder,
        }

    def _tell(self, place: int, how: str) -> None:
        """Say that a run is there: what is told is written."""
        told = f"{_where(self._jobs[place])}: {_told(self._rows[place])}, {how}"
        tell(f"[{len(self._rows)}/{len(self._jobs)}] {told}")


def _require_replies(jobs: Sequence[_Job]) -> None:
    """Raise InputError, before any run, for a method whose replies the trace of one seed does not have."""
    for job in {(job.cluster, job.method.name): job for job in jobs if job.method.reply}.values():
        require_replies(job.method, find_waves(_trace(job.cluster, job.commits, job.seed).taken_up).reads)


def _require_own(what: str, found: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Raise InputError for what somebody has copied from another run, or its trace."""
    for name, value in own.items():
        if found.get(name) != value:
            raise InputError(f"{what}: is another's, of {name} {found.get(name)!r}, not {value!r}")


def _replayed(
    cluster: Cluster, commits: int, seed: int, method: Method, problem: Problem, options: dict[str, Any], device: str
) -> _Replayed:
    """Return a run and its trace: a job of an executor."""
    with computing_device(device):
        trace = _trace(cluster, commits, seed)
        started = time.perf_counter()
        run = replay(trace, method, problem, seed=seed, **options)
        return _Replayed(run, trace, time.perf_counter() - started)


@cached(maxsize=1)
def _trace(cluster: Cluster, commits: int, seed: int) -> Trace:
    """Simulate a trace; the last one is at hand for the next method, and for those at the same time."""
    return simulate(cluster, commits=commits, seed=seed)


def _needs(timing: Timing) -> str:
    return ", ".join(f"{name} = {value}" for name, value in timing._asdict().items() if value is not None)


def _where(job: _Job) -> str:
    values = "".join(f"{name} {value}, " for name, value in job.cell.values.items())
    return f"{values}{job.method.name}, seed {job.seed}"


def _told(row: dict[str, Any]) -> str:
    return (
        f"diverged at commit {row['diverged_at']}" if row["status"] == "diverged" else f"loss {row['final_loss']:.3g}"
    )
