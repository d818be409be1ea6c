"""How often a job should save: goodput by the interval between checkpoints, and Daly's optimum.

A synchronous job crashes at exponential times, loses the round and the work since its last
checkpoint, and resumes from there. Its workers wait while it saves. With --server an asynchronous
server crashes and saves instead; its workers keep their gradients. Ranks the intervals by their
goodput, the share of the time whose work is not lost, beside its law, and prints the optima of
Young and Daly. Writes the table and a figure. No gradients are computed.
"""

import math
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from asyncsim.base.console import number_text, over_seeds
from asyncsim.base.errors import InputError, require_count, require_positive
from asyncsim.base.units import SECONDS, positive
from asyncsim.clusters import failures
from asyncsim.clusters.cluster import Cluster
from asyncsim.clusters.cluster_text import describe
from asyncsim.simulation.simulate import simulate
from asyncsim.study import results
from asyncsim.study.columns import Column
from asyncsim.study.config import JobOptions, LawLike, check_values
from asyncsim.study.finished import present
from asyncsim.study.jobs import Result, Tables, executor_of, measurement, run_jobs
from asyncsim.study.ranking import Measure, grid, ranked, ranked_parts, verdict
from asyncsim.theory import checkpoint_efficiency, daly_interval, young_interval
from asyncsim.traces.trace_summary import kept_versions

TABLE = "intervals.csv"
#: Rounds of the timeline on the study's page, some crashes long by default.
_ROUNDS_SHOWN = 1000
#: The share of the time whose work is kept.
_GOODPUT = Measure("goodput", "most")


@dataclass(frozen=True)
class Config(JobOptions):
    """Options of the study of checkpoints."""

    workers: int = 16
    """Workers of the job, which compute in rounds."""
    compute: LawLike = "gamma(mean=10, cv=0.1)"
    """Time of a gradient."""
    service: LawLike = "constant(0)"
    """Time that the server is busy for each message."""
    server: bool = False
    """An asynchronous server crashes and saves, in place of a synchronous job."""
    every: str = "30 min"
    """Mean time from a start to the next crash, exponential."""
    lasts: str = "2 min"
    """Time until the job is back."""
    saving: str = "20 s"
    """Time of saving a checkpoint."""
    intervals: tuple[float, ...] = (0.25, 0.4, 0.6, 0.8, 1.0, 1.25, 1.6, 2.5, 4.0)
    """Intervals between checkpoints, as multiples of Daly's."""
    crashes: int = 100
    """Crashes to simulate in each run, about."""
    seeds: int = 3
    """Number of seeds: 0, 1, ..."""

    @property
    def seconds(self) -> tuple[float, float, float]:
        """The seconds of ``every``, ``lasts`` and ``saving``."""
        every, lasts, saving = (
            positive(name, getattr(self, name), SECONDS) for name in ("every", "lasts", "saving")
        )
        return every, lasts, saving

    def check(self) -> None:
        """Check the options."""
        super().check()
        for name in ("workers", "crashes"):
            require_count(name, getattr(self, name))
        check_values("intervals", self.intervals)
        for multiple in self.intervals:
            require_positive("intervals", multiple)
        every, _, saving = self.seconds
        if saving >= every:
            raise InputError(
                f"saving = {self.saving!r}: is as long as every = {self.every!r}, so that hardly a "
                "checkpoint is completed; give a shorter time, or a larger every"
            )
        self.cluster(min(self.intervals) * daly_interval(saving, every))

    def cluster(self, interval: float) -> Cluster:
        """Return the job with a checkpoint each ``interval`` seconds, infinite for no crashes.

        A server counts versions: as many as it makes in the interval without crashes.
        """
        every, lasts, saving = self.seconds
        policy = "asynchronous()" if self.server else "barrier()"
        crashes: list[failures.Failure] = []
        if math.isfinite(interval) and self.server:
            versions = max(1, round(interval * self.throughput(0)))
            crashes = [failures.outage(f"exponential({every})", lasts, versions, saving)]
        elif math.isfinite(interval):
            crashes = [failures.job_crash(f"exponential({every})", lasts, interval, saving)]
        # `Cluster` checks the laws; the options' types have forms that mypy does not know there.
        return Cluster(self.workers, self.compute, self.service, policy=policy, failures=crashes)

    def throughput(self, seed: int) -> float:
        """Return the commits per second without crashes."""
        trace = simulate(self.cluster(math.inf), 200 * self.workers, seed, progress=False)
        return trace.summary()["throughput"]


def run(config: Config) -> Result:
    """Run the study; see `asyncsim.study.jobs.run_jobs`. Its summary has a row per interval and
    seed.
    """
    config.check()
    every, _, saving = config.seconds
    jobs = [
        measurement(
            f"interval {multiple:g}, seed {seed}",
            _measured,
            *(config, multiple, seed),
            labels={"multiple": multiple, "seed": seed},
        )
        for multiple in config.intervals
        for seed in range(config.seeds)
    ]

    def conclude(folder: Path, summary: pd.DataFrame) -> None:
        table = ranked_intervals(config, summary)
        cluster = config.cluster(daly_interval(saving, every))
        rounds = simulate(cluster, _ROUNDS_SHOWN * config.workers, 0, progress=False)
        parts = [
            f"{describe(cluster)}, at Daly's interval\n"
            f"{over_seeds(summary['seed'].nunique(), 'means over')}; goodput: share of the time "
            "whose work is kept; law: Daly's equation 20",
            *ranked_parts(table, _ROW, _GOODPUT, _FURTHER),
            f"optimum by the law of Young {number_text(young_interval(saving, every))} s, of Daly "
            f"{number_text(daly_interval(saving, every))} s",
        ]
        names = [f"{number_text(interval)} s" for interval in table["interval"]]
        words = verdict(table, names, _GOODPUT, "interval")
        example = "at Daly's interval, seed 0", rounds
        present(folder, {TABLE: table}, *parts, verdict=words, example=example)

    record = config.options_record()
    return run_jobs("checkpoint", config, record, jobs, executor_of(config, ()), conclude)


_ROW = (Column("interval", "interval (s)"), Column("multiple", "of Daly's"))
_FURTHER = ("law", Column("lost", "versions lost"))


def ranked_intervals(config: Config, summary: pd.DataFrame) -> pd.DataFrame:
    """Rank the intervals by their goodput, beside its law and the share of lost versions."""
    every, lasts, saving = config.seconds
    keys = ["interval", "multiple"]
    table = ranked(grid(summary, keys, ["lost"], _GOODPUT), summary, keys, _GOODPUT)
    law = [checkpoint_efficiency(interval, saving, every, lasts) for interval in table["interval"]]
    return table.assign(law=law)


def _measured(config: Config, multiple: float, seed: int) -> Tables:
    """Simulate a job; return the row of its goodput."""
    every, _, saving = config.seconds
    interval = multiple * daly_interval(saving, every)
    cluster, throughput = config.cluster(interval), config.throughput(seed)
    # Enough rounds for the crashes, from the length of a round without any.
    rounds = int(config.crashes * every * throughput / config.workers)
    trace = simulate(cluster, rounds * config.workers, seed)
    end = float(trace.frame["commit_time"].iloc[-1])
    versions = int((trace.frame["outcome"] == "applied").sum())
    kept = kept_versions(trace)
    row = {
        "multiple": multiple,
        "seed": seed,
        "interval": interval,
        "goodput": kept * cluster.policy.per_version(config.workers) / throughput / end,
        "lost": 1 - kept / versions,
        "status": "finished",
    }
    return {results.SUMMARY: [row]}
