"""Who gets served by a saturated real server: the first to come, or the lowest rank.

Real worker processes visit a real server process that is never idle. Served in the order of
arrival, all commit equally often; with the lowest rank first, the highest ranks starve, as the GEM
paper's authors report of their program. The simulator, calibrated with the computing and service
times under the first discipline, predicts both.

Needs Ray: pip install "asyncsim[ray]". Interrupted recordings stay in the study's folder; --resume
continues them.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from asyncsim.base.console import note, number_text
from asyncsim.base.errors import InputError, require_choice, require_count
from asyncsim.base.files import field_values, plain
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
#: Utilisation from which a server counts as saturated.
_BUSY = 0.95


@dataclass(frozen=True)
class Config(RealConfig):
    """Options of the fairness study."""

    methods: tuple[MethodLike, ...] = ("downpour",)
    """The method to train; exactly one."""
    workers: int = 6
    """Worker processes, beside the server."""
    steps: int = 60
    """Commits per worker, on average; a recording has steps * workers commits."""
    delay: LawLike = "gamma(0.1, 0.3)"
    """Law of the time that a worker sleeps per local step (s), besides computing."""
    service: LawLike = "constant(0.04)"
    """Law of the time that the server sleeps per visit (s), besides applying the message."""
    # A sequence, unlike in the base class: each recording has one value.
    discipline: tuple[Discipline, ...] = DISCIPLINES  # type: ignore[assignment]
    """Order in which waiting workers are served, one recording each; the first calibrates the
    simulator.
    """
    simulations: int = 20
    """Simulations of each discipline, for mean and range."""
    seed: int = 0
    """Seed of all random numbers."""

    def check(self) -> None:
        """Check the options; see `StudyOptions.check`."""
        check_values("discipline", self.discipline)
        for discipline in self.discipline:
            require_choice("discipline", discipline, ("fifo", "lowest_rank", "random"))
        if not self.exclusive:
            raise InputError(
                "exclusive = False: the times between the two visits are not recorded; leave it out"
            )
        require_count("simulations", self.simulations)
        require_count("seed", self.seed, minimum=0)
        for discipline in self.discipline:
            self.under(discipline).check()

    def under(self, discipline: str) -> RealConfig:
        """Return the options of one recording."""
        options: dict[str, Any] = field_values(self, RealConfig)
        return RealConfig(**{**options, "discipline": discipline})


def run(config: Config) -> Result:
    """Run the study; see `asyncsim.study.jobs.run_jobs`."""
    config.check()
    require_ray()
    methods, problem = config.make_methods(), config.make_problem()
    if len(methods) > 1:
        raise InputError(
            f"methods: {len(methods)} given; the order of service depends on no method: give one"
        )
    require_timing(methods[0], config.under(config.discipline[0]).processes())
    record = {"study": "fairness", **config.record(methods, problem)}
    jobs = [
        measurement(
            discipline,
            _measured,
            *(config, methods[0], problem, discipline),
            folder=f"{_RECORDINGS}/{discipline}",
            labels={"discipline": discipline},
            in_folder=True,
        )
        for discipline in config.discipline
    ]
    return run_jobs(
        "fairness", config, record, jobs, config.one_by_one(config.workers + 1), _conclude
    )


def _measured(
    folder: Path, config: Config, method: Method, problem: Problem, discipline: str
) -> Tables:
    """Record, or resume, a discipline; return its rows beside simulations calibrated with the first
    discipline.
    """
    traces = {}
    for name in dict.fromkeys([config.discipline[0], discipline]):
        traces[name] = (
            config.under(name)
            .recorded(method, problem, folder / _RECORDINGS / name, config.seed)
            .trace
        )
    laws = observed(traces[config.discipline[0]])
    rows = predicted(traces[discipline], discipline, laws, config.simulations, config.seed)
    return {results.SUMMARY: plain(rows.to_dict("records"))}


def observed(trace: Trace) -> tuple[Law, Law]:
    """Return empirical laws of a recording: time away from the server per step, and service time
    per visit.

    They resample the recorded times. Reads in separate visits count as services.
    """
    frame = trace.frame[trace.frame["outcome"] == "applied"]
    later = frame[frame["job"] > 0]
    away = (later["arrive_time"] - later["read_time"]).to_numpy()
    service = (frame["commit_time"] - frame["serve_time"]).to_numpy()
    if trace.source.separate_reads:
        service = np.concatenate(
            [service, (later["read_time"] - later["read_serve_time"]).to_numpy()]
        )
    return Empirical(away.tolist()), Empirical(service.tolist())


def predicted(
    trace: Trace, discipline: str, laws: tuple[Law, Law], simulations: int, seed: int
) -> pd.DataFrame:
    """Tabulate each worker's share of the commits and mean wait (s), recorded and simulated."""
    away, service = laws
    cluster = Cluster(
        trace.workers,
        compute=away,
        service=service,
        protocol=trace.protocol,
        exclusive=True,
        discipline=discipline,
    )
    drawn = [simulate(cluster, len(trace), seed + i).per_worker(0) for i in range(simulations)]
    share = np.array([table["share"] for table in drawn])
    with np.errstate(invalid="ignore"):
        waited = np.array([table["mean_wait"] for table in drawn])
    waited = np.ma.masked_invalid(waited).mean(0).filled(np.nan)
    workers = trace.per_worker(0)[["worker", "commits", "share", "mean_staleness", "mean_wait"]]
    workers.insert(0, "discipline", discipline)
    ends = {"simulated_low": share.min(0), "simulated_high": share.max(0)}
    return workers.assign(simulated_share=share.mean(0), **ends, simulated_wait=waited)


def _conclude(folder: Path, summary: pd.DataFrame) -> None:
    lines = []
    for discipline in summary["discipline"].unique():
        numbers = load(folder / _RECORDINGS / discipline).trace.summary()
        rate = f"{numbers['throughput']:.3g} commits/s"
        lines.append(f"{discipline}: {rate}, server busy {numbers['utilisation']:.3f} of the time")
        if numbers["utilisation"] < _BUSY:
            note(
                f"{discipline}: with a short queue the order matters little; give more workers or "
                "a longer --service"
            )
    columns = [
        "discipline",
        "worker",
        "commits",
        "share",
        "simulated_share",
        "simulated_low",
        "simulated_high",
    ]
    columns += ["mean_wait", "simulated_wait"]
    shares = summary.groupby("discipline", sort=False)["share"].agg(["min", "max"])
    served = [
        f"{row.Index} gives the busiest worker {number_text(row.max / row.min)} times the commits "
        "of the idlest"
        if row.min
        else f"{row.Index} leaves a worker without any commit"
        for row in shares.itertuples()
    ]
    text = text_of(summary, columns)
    present(folder, {}, *lines, f"\n{text}", verdict="; ".join(served))
