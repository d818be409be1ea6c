"""Do real processes behave as the simulator predicts? Trains with them, and tests the recordings.

    asyncsim study real train --methods gem --workers 5 --problem mnist
    asyncsim study real fairness --methods downpour --workers 6 --discipline fifo lowest_rank

A server process and worker processes train, and their visits are recorded as a trace, with the
times of the server's clock. With --topology there is no server. Each recording answers up to three
questions; without any, the first two:

train: loss and accuracy of the final central variable, throughput and staleness.

validate: a replay of the recorded order from the same seed must give the same losses and
parameters, up to the commit from which one unit of round-off can exceed the bar. Laws fitted to the
earlier half of a recording predict its later half, or with --extrapolate a recording with twice as
many workers; `asyncsim.prediction` explains failures.

fairness: which workers does a saturated server serve? First come, first served, all commit equally
often; with the lowest rank first, the highest ranks starve, as the GEM paper's authors report of
their program. The simulator predicts both, with the times of the recording of the first discipline.

Needs Ray: pip install "asyncsim[ray]". --resume skips complete recordings.
"""

import contextlib
import dataclasses
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import pandas as pd

from asyncsim.base.console import counted, note, number_text
from asyncsim.base.errors import InputError, require_count, require_positive
from asyncsim.base.files import folder_name, plain, read_table, write_csv
from asyncsim.calibration.prediction import extrapolate, predict
from asyncsim.clusters.cluster import Cluster
from asyncsim.clusters.laws import Empirical, Law, parse
from asyncsim.methods import Method
from asyncsim.problems import Problem
from asyncsim.real.agreement import agreement
from asyncsim.real.arrays import Task
from asyncsim.real.recording import DESCRIBED, Recorded, check, ray_cluster, record
from asyncsim.simulation.simulate import simulate
from asyncsim.study import results
from asyncsim.study.columns import Column, titled
from asyncsim.study.config import (
    Discipline,
    LawLike,
    MethodLike,
    PolicyLike,
    StudyConfig,
    TaskOptions,
    TopologyLike,
    check_values,
)
from asyncsim.study.executor import Local
from asyncsim.study.finished import present
from asyncsim.study.jobs import Result, Tables, measurement, run_jobs
from asyncsim.traces.archive import write_trace
from asyncsim.traces.trace import Trace

#: The files of a recording, and the table of each worker's share.
TRACE, AGREEMENT, SHARES = "trace.parquet", "agreement.csv", "shares.csv"
#: Utilisation from which a server counts as saturated.
_BUSY = 0.95
#: Simulations of each discipline, for mean and range.
_SIMULATIONS = 20
#: The columns of the table of trainings.
_TRAINED = (
    "method",
    "discipline",
    "workers",
    "commits",
    Column("trace.duration", "seconds"),
    "trace.throughput",
    Column("trace.staleness_mean", "staleness"),
    "train_loss",
    "train_accuracy",
    Column("test_loss", "validation loss"),
    Column("test_accuracy", "validation accuracy"),
)
_SHARED = (
    "method",
    "discipline",
    "worker",
    "commits",
    "share",
    "simulated_share",
    "simulated_low",
    "simulated_high",
    "mean_wait",
    "simulated_wait",
)
_OF_EXECUTORS = ("device", "executor", "cpus_per_run", "accelerators_per_run")


@dataclass(frozen=True)
class Config(TaskOptions):
    """Options of the study of real processes."""

    first: ClassVar[str] = "questions"
    example: ClassVar[str] = "--workers 2 --steps 100"
    help_notes: ClassVar[str] = StudyConfig.help_notes.partition("Failures:")[0]

    questions: tuple[Literal["train", "validate", "fairness"], ...] = ("train", "validate")
    """What to ask each recording; their names may stand without the option."""
    methods: tuple[MethodLike, ...] = ("downpour", "agn", "aeasgd", "gem")
    """Methods to record, by their names or as FILE.py:FUNCTION (see the README)."""
    workers: int = 4
    """Worker processes; the server is one more."""
    steps: int = 250
    """Commits per worker, on average; a recording has steps * workers commits."""
    seeds: int = 1
    """Recordings of each method, with the seeds 0, 1, ..."""
    compute: LawLike = "1 us"
    """Law of the time that a worker sleeps per local step (s), besides the gradient; "[law, law,
    ...]" gives one each.
    """
    service: LawLike = "constant(0)"
    """Law of the time that the server sleeps per visit (s), besides applying the message."""
    window: int = 1
    """Local steps per communication."""
    protocol: Literal["exchange", "read_then_write", "write_then_read"] = "exchange"
    """Order of a visit; see asyncsim study compare -h."""
    discipline: tuple[Discipline, ...] = ("fifo",)
    """Order of service of the waiting workers; a recording each."""
    policy: PolicyLike = "asynchronous"
    """When versions are made and who waits, for methods that do not say."""
    topology: TopologyLike | None = None
    """Gossip without a server on ring(), complete(), one_peer_exponential(), ...; with the methods
    dpsgd, sgp, osgp and adpsgd. none: a server."""
    extrapolate: bool = False
    """Also record twice as many workers, and predict them from the first recording."""
    restart: bool = False
    """Restart a worker whose process died."""
    timeout: float = 180.0
    """Seconds without a commit after which a recording stops with an error."""

    def check(self) -> None:
        """Check the options; see `JobOptions.check`."""
        super().check()
        for name in ("workers", "steps"):
            require_count(name, getattr(self, name))
        for name in ("questions", "discipline"):
            check_values(name, getattr(self, name))
        require_positive("timeout", self.timeout, "s")
        if self.topology is not None and self.extrapolate:
            raise InputError("extrapolate = True: needs a server; leave it or topology out")
        self.cluster(self.discipline[0])

    def check_executor(self) -> None:
        """Refuse options of executors: Ray runs the processes of one recording after the other."""
        for name in _OF_EXECUTORS:
            if getattr(self, name) != getattr(TaskOptions(), name):
                raise InputError(
                    f"{name} = {getattr(self, name)!r}: real processes compute on CPUs of Ray; "
                    "leave it out"
                )

    def cluster(self, discipline: str, method: Method | None = None) -> Cluster:
        """Return the cluster of a recording, with the policy that a method needs."""
        described = [
            name for name in DESCRIBED if hasattr(self, name)
        ]  # the rest is in Python alone
        values = {name: getattr(self, name) for name in described} | {"discipline": discipline}
        if isinstance(self.compute, str):
            values["compute"] = parse(self.compute)
        if method is not None and method.timing.policy is not None:
            values["policy"] = method.timing.policy
        return Cluster(**values)

    def task(self, method: Method, problem: Problem, discipline: str, seed: int) -> Task:
        """Return the task of a recording."""
        cluster, commits = self.cluster(discipline, method), self.steps * self.workers
        return Task(method, problem, cluster, commits, seed, self.precision)

    def recorded(self, task: Task) -> Recorded:
        """Record a task."""
        return record(*task, restart=self.restart, address=self.address, timeout=self.timeout)


def run(config: Config) -> Result:
    """Run the study; see `asyncsim.study.jobs.run_jobs`.

    Raises
    ------
    InputError
        An option that cannot be used, Ray is missing, or processes cannot start or die.
    """
    config.check()
    methods, problem = config.make_methods(), config.make_problem()
    jobs = []
    for method, discipline in itertools.product(methods, config.discipline):
        check(config.task(method, problem, discipline, 0), config.restart)
        for seed in range(config.seeds):
            task = config.task(method, problem, discipline, seed)
            job = measurement(
                Path(_place(task)).name,
                *(_measured, config, task),
                folder=_place(task),
                labels=_labels(task),
                in_folder=True,
            )
            jobs.append(job)
    processes = (1 + config.extrapolate) * config.workers + 1
    options = config.record(methods, problem)
    return run_jobs(
        "real", config, options, jobs, _one_by_one(config.address, processes), _conclude
    )


@contextlib.contextmanager
def _one_by_one(address: str | None, processes: int) -> Iterator[Local]:
    """Yield an executor that records one after the other, in one Ray cluster."""
    with ray_cluster(address, processes):
        yield Local()


def _labels(task: Task) -> dict[str, Any]:
    """Return the columns that name a recording."""
    return {"method": task.method.name, "discipline": task.cluster.discipline, "seed": task.seed}


def _place(task: Task) -> str:
    name = "{method}-{discipline}-seed{seed}".format(**_labels(task))
    return f"recordings/{folder_name(name)}"


def _measured(folder: Path, config: Config, task: Task) -> Tables:
    """Record, and answer the questions; write the trace and tables; return the rows."""
    first = dataclasses.replace(task.cluster, discipline=config.discipline[0])
    place, first_place = _place(task), _place(task._replace(cluster=first))
    recorded = config.recorded(task)
    trace, labels = recorded.trace, _labels(task)
    write_trace(trace, folder / place / TRACE)
    write_csv(folder / place / "commits.csv", recorded.commits)
    write_csv(folder / place / "faults.csv", recorded.faults)
    row: dict[str, Any] = {
        **labels,
        "status": "finished",
        "workers": config.workers,
        "precision": config.precision,
        "commits": len(recorded.commits),
        "faults": len(recorded.faults),
        **recorded.evaluation,
        **{f"trace.{name}": value for name, value in trace.summary().items()},
        "folder": place,
    }
    tables: dict[str, Any] = {results.SUMMARY: [row]}
    if "validate" in config.questions:
        comparison = agreement(recorded)
        write_csv(folder / place / AGREEMENT, comparison.table)
        row |= {**comparison.row(), **_predictions(config, recorded, folder / place)}
    if "fairness" in config.questions:
        is_first = place == first_place
        calibrating = trace if is_first else Trace.load(folder / first_place / TRACE)
        rows = predicted(trace, task.cluster.discipline, observed(calibrating), task.seed)
        tables[SHARES] = rows.assign(**labels).to_dict("records")
    return plain(tables)


def _predictions(config: Config, recorded: Recorded, place: Path) -> dict[str, bool]:
    """Predict times from the recording; write tables and figures; return which predictions hold."""
    task, asks = recorded.task, {}
    if task.cluster.topology is None:
        asks["prediction"] = lambda: predict(recorded.trace, task.seed)
    if config.extrapolate:
        laws, workers = task.cluster.compute_laws, 2 * task.cluster.workers
        cluster = dataclasses.replace(task.cluster, workers=workers, compute=(*laws, *laws))
        doubled = config.recorded(task._replace(cluster=cluster, commits=2 * task.commits))
        asks["extrapolation"] = lambda: extrapolate(recorded.trace, doubled.trace, task.seed)
    holds = {}
    for name, ask in asks.items():
        try:
            prediction = ask()
        except InputError as error:
            note(f"no {name}: {error}")
            continue
        write_csv(place / f"{name}.csv", prediction.table)
        prediction.draw(place / name)
        print(prediction.text)
        holds[name] = prediction.holds
    return holds


def observed(trace: Trace) -> tuple[Law, Law]:
    """Return empirical laws of a recording: time away from the server per step, and service time
    per visit.

    They resample the recorded times. Reads in separate visits count as services.
    """
    frame = trace.frame[trace.frame["outcome"] == "applied"]
    later = frame[frame["job"] > 0]
    away = (later["arrive_time"] - later["read_time"]).to_numpy()
    service = (frame["commit_time"] - frame["serve_time"]).to_numpy()
    if trace.separate_reads:
        service = np.concatenate(
            [service, (later["read_time"] - later["read_serve_time"]).to_numpy()]
        )
    return Empirical(away.tolist()), Empirical(service.tolist())


def predicted(
    trace: Trace, discipline: str, laws: tuple[Law, Law], seed: int, simulations: int = _SIMULATIONS
) -> pd.DataFrame:
    """Tabulate each worker's share of the commits and mean wait (s), recorded and simulated."""
    away, service = laws
    cluster = Cluster(
        trace.workers,
        compute=away,
        service=service,
        protocol=trace.protocol,
        discipline=discipline,
    )
    runs = [simulate(cluster, len(trace), seed + i).per_worker(0) for i in range(simulations)]
    drawn = pd.concat(runs).groupby("worker", as_index=False)
    workers = trace.per_worker(0)[["worker", "commits", "share", "mean_staleness", "mean_wait"]]
    return workers.merge(
        drawn.agg(
            simulated_share=("share", "mean"),
            simulated_low=("share", "min"),
            simulated_high=("share", "max"),
            simulated_wait=("mean_wait", "mean"),
        )
    )


def agreements(summary: pd.DataFrame) -> pd.DataFrame:
    """Tabulate the largest differences of each method's replays, and the recordings within the
    bar.
    """
    return summary.groupby("method", sort=False, as_index=False).agg(
        worst=("worst", "max"),
        bar=("bar", "first"),
        compared=("compared", "sum"),
        commits=("commits", "sum"),
        within_bar=("holds", "sum"),
        recordings=("holds", "size"),
    )


def _conclude(folder: Path, summary: pd.DataFrame) -> None:
    parts: list[str | pd.DataFrame] = [titled(summary, _TRAINED)]
    verdicts = []
    if "holds" in summary:
        parts += [
            "replays of the recorded order: largest difference before round-off can exceed the bar",
            titled(agreements(summary), digits=2),
        ]
        holds = f"{int(summary['holds'].sum())} of {counted(len(summary), 'recording')}"
        verdicts.append(f"replays agree within the bar with {holds}")
    if (folder / SHARES).exists():
        shares = read_table(folder / SHARES)
        parts += ["shares of the commits", titled(shares, _SHARED)]
        for name, rows in summary.groupby("discipline", sort=False):
            if rows["trace.utilisation"].min() < _BUSY:
                note(
                    f"{name}: with a short queue the order matters little; give more workers or a "
                    "longer --service"
                )
        verdicts += _fairness(shares)
    if not verdicts:
        rates = summary["trace.throughput"]
        ends = dict.fromkeys([number_text(rates.min()), number_text(rates.max())])
        verdicts = [f"{' to '.join(ends)} commits/s"]
    present(folder, {}, *parts, verdict=verdicts)


def _fairness(shares: pd.DataFrame) -> list[str]:
    ends = shares.groupby("discipline", sort=False)["share"].agg(["min", "max"])
    return [
        f"{row.Index} gives the busiest worker {number_text(row.max / row.min)} times the commits "
        "of the idlest"
        if row.min
        else f"{row.Index} leaves a worker without any commit"
        for row in ends.itertuples()
    ]
