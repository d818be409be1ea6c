"""Who gets served by a real server that is never idle: the first to come, or the lowest rank.

Real worker processes visit a real server process that takes longer over its visits than they leave it. Served in the
order of arrival, all commit equally often; lowest rank first, the highest ranks starve, as the GEM paper's authors
found of their program. The simulator, told only what computing and service took under the first discipline, predicts
both.

Needs Ray: pip install "asyncsim[ray]". Recordings that were broken off are in the study's folder with all that was
recorded; --resume goes on with them.
"""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from asyncsim.base.console import note
from asyncsim.base.errors import InputError, require_choice, require_count
from asyncsim.base.files import plain
from asyncsim.clusters.cluster import Cluster
from asyncsim.clusters.laws import Empirical, Law
from asyncsim.methods import Method
from asyncsim.problems import Problem
from asyncsim.real import load
from asyncsim.real.options import RealConfig
from asyncsim.real.supervisor import require_ray, require_timing
from asyncsim.simulation.simulate import simulate
from asyncsim.study import results
from asyncsim.study.columns import text_of
from asyncsim.study.config import Discipline, LawLike, MethodLike
from asyncsim.study.finished import present
from asyncsim.study.jobs import Result, Tables, measurement, run_jobs
from asyncsim.study.sweep import check_values
from asyncsim.traces.trace import Trace

_RECORDINGS = "recordings"
DISCIPLINES = ("fifo", "lowest_rank")
#: Part of the time from which on a server is taken for one that is never idle.
_BUSY = 0.95


@dataclass(frozen=True)
class Config(RealConfig):
    """Options of the fairness study."""

    methods: tuple[MethodLike, ...] = ("downpour",)
    """The method that is trained; one."""
    workers: int = 6
    """Worker processes; the server is one more."""
    steps: int = 60
    """Commits per worker, on average; a recording has steps * workers commits."""
    delay: LawLike = "gamma(0.1, 0.3)"
    """Law of the time that a worker sleeps per local step (s), besides computing."""
    service: LawLike = "constant(0.04)"
    """Law of the time that the server sleeps per visit (s), besides applying the message."""
    # Several values here, of which each recording has one.
    discipline: tuple[Discipline, ...] = DISCIPLINES  # type: ignore[assignment]
    """Who is served next of those that wait; the simulator learns its laws from the first."""
    simulations: int = 20
    """Simulations of each discipline, whose mean and range are shown."""
    seed: int = 0
    """Of everything random."""

    def check(self) -> None:
        """Check the options; see `StudyOptions.check`."""
        check_values("discipline", self.discipline)
        for one in self.discipline:
            require_choice("discipline", one, ("fifo", "lowest_rank", "random"))
        if not self.exclusive:
            raise InputError("exclusive = False: nothing tells the times between the two visits; leave it out")
        require_count("simulations", self.simulations)
        require_count("seed", self.seed, minimum=0)
        for one in self.discipline:
            self.under(one).check()

    def under(self, discipline: str) -> RealConfig:
        """Return the options of one recording."""
        own: dict[str, Any] = {field.name: getattr(self, field.name) for field in dataclasses.fields(RealConfig)}
        return RealConfig(**{**own, "discipline": discipline})


def run(config: Config) -> Result:
    """Run the study; see `asyncsim.study.jobs.run_jobs`."""
    config.check()
    require_ray()
    methods, problem = config.make_methods(), config.make_problem()
    if len(methods) > 1:
        raise InputError(f"methods: {len(methods)} given; who is served depends on none of them: give one")
    require_timing(methods[0], config.under(config.discipline[0]).processes())
    record = {"study": "fairness", **config.record(methods, problem)}
    jobs = [
        measurement(
            one,
            _measured,
            *(config, methods[0], problem, one),
            place=f"{_RECORDINGS}/{one}/rows",
            labels={"discipline": one},
            in_folder=True,
        )
        for one in config.discipline
    ]
    return run_jobs("fairness", config, record, jobs, config.one_by_one(config.workers + 1), _conclude)


def _measured(folder: Path, config: Config, method: Method, problem: Problem, discipline: str) -> Tables:
    """Return the rows of a recording, which is made, or gone on with; of the first one the simulator has its laws."""
    traces = {}
    for one in dict.fromkeys([config.discipline[0], discipline]):
        traces[one] = config.under(one).recorded(method, problem, folder / _RECORDINGS / one, config.seed).trace
    laws = observed(traces[config.discipline[0]])
    rows = predicted(traces[discipline], discipline, laws, config.simulations, config.seed)
    return {results.SUMMARY: plain(rows.to_dict("records"))}


def observed(trace: Trace) -> tuple[Law, Law]:
    """Return the laws of a recording's times: away from the server, both ways and computing; and service, per visit.

    The very times of the recording, drawn again in any order. Reads that are visits of their own count as services.
    """
    frame = trace.frame[trace.frame["outcome"] == "applied"]
    later = frame[frame["job"] > 0]
    away = (later["arrive_time"] - later["read_time"]).to_numpy()
    service = (frame["commit_time"] - frame["serve_time"]).to_numpy()
    if trace.source.separate_reads:
        service = np.concatenate([service, (later["read_time"] - later["read_serve_time"]).to_numpy()])
    return Empirical(away.tolist()), Empirical(service.tolist())


def predicted(trace: Trace, discipline: str, laws: tuple[Law, Law], simulations: int, seed: int) -> pd.DataFrame:
    """Return one row per worker: its share of the commits and mean wait (s), recorded and simulated."""
    away, service = laws
    cluster = Cluster(
        trace.workers, compute=away, service=service, protocol=trace.protocol, exclusive=True, discipline=discipline
    )
    drawn = [simulate(cluster, len(trace), seed + i).per_worker(0) for i in range(simulations)]
    share = np.array([one["share"] for one in drawn])
    with np.errstate(invalid="ignore"):
        waited = np.array([one["mean_wait"] for one in drawn])
    waited = np.ma.masked_invalid(waited).mean(0).filled(np.nan)
    own = trace.per_worker(0)[["worker", "commits", "share", "mean_staleness", "mean_wait"]]
    own.insert(0, "discipline", discipline)
    ends = {"simulated_low": share.min(0), "simulated_high": share.max(0)}
    return own.assign(simulated_share=share.mean(0), **ends, simulated_wait=waited)


def _conclude(folder: Path, summary: pd.DataFrame) -> None:
    lines = []
    for one in summary["discipline"].unique():
        numbers = load(folder / _RECORDINGS / one).trace.summary()
        rate = f"{numbers['throughput']:.3g} commits/s"
        lines.append(f"{one}: {rate}, server busy {numbers['utilisation']:.3f} of the time")
        if numbers["utilisation"] < _BUSY:
            note(f"{one}: where few wait, who is served matters little; more workers or a longer --service wait more")
    shown = ["discipline", "worker", "commits", "share", "simulated_share", "simulated_low", "simulated_high"]
    shown += ["mean_wait", "simulated_wait"]
    present(folder, {}, *lines, f"\n{text_of(summary, shown)}")
