"""What deaths of workers cost: goodput by policy and loss by method, at several rates of death.

Clusters that differ in the deaths and in the policy have the same random numbers. Prints for each
the division of the workers' time into accepted gradients and several losses, and the remaining
commits per second; and for each method the time to a target. Writes two tables, beside traces,
runs, a summary and a figure.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pandas as pd

from asyncsim.base.console import counted, number_text, percent_text
from asyncsim.base.errors import require_nonnegative
from asyncsim.clusters.failures import crash
from asyncsim.clusters.laws import as_law
from asyncsim.study.columns import Column, text_of, without_constants
from asyncsim.study.config import LawLike, MethodLike, PolicyLike, StudyConfig
from asyncsim.study.finished import Finished, present, read, trace_means
from asyncsim.study.ranking import means
from asyncsim.study.sweep import Result, SweepConfig, run_cells, sweep
from asyncsim.study.target import Target
from asyncsim.traces.trace import Trace
from asyncsim.traces.trace_summary import kept_versions

#: The tables of the clusters, and of the methods on each, beside the summary of all runs.
GOODPUT, TIMES = "goodput.csv", "times.csv"
#: Parts of the workers' time, as in `asyncsim.Trace.summary`.
PARTS = (
    Column("counted_share", "counted", "gradients that counted"),
    *(Column(f"lost_to_{cause}", cause) for cause in ("waiting", "sending", "discarded", "failed")),
    Column("lost_to_restoring", "restoring", "undone by a restore"),
)
#: Columns that identify a row of the tables.
_CLUSTER = ("workers", "policy", "deaths")
#: The default policies, beside one that depends on the workers.
_POLICIES = ("asynchronous", "bounded_staleness(3)", "barrier")
_HOUR = 3600.0


@dataclass(frozen=True)
class Config(SweepConfig):
    """Options of the study of failures."""

    varied: ClassVar[tuple[str, ...]] = ("workers", "deaths", "policy")

    workers: tuple[int, ...] = (20,)
    """Workers of the clusters, one after the other."""
    deaths: tuple[float, ...] = (0.0, 20.0, 100.0)
    """Deaths of each worker per hour of presence, at exponential times; 0 for none."""
    lasts: LawLike = "exponential(30)"
    """Law of the time (s) until a dead worker is back, without its state."""
    detect: float = 5.0
    """Seconds until the server detects a death; until then others wait for the worker."""
    # A sequence, unlike in the base class: each cell has one value.
    policy: tuple[PolicyLike, ...] | None = None  # type: ignore[assignment]
    """Policies of the server, one after the other; the end of --help lists them. By default
    asynchronous, bounded_staleness(3), barrier, and first_of half of each cluster's workers."""
    methods: tuple[MethodLike, ...] = ("downpour", "gem")
    """Methods to compare, without a required policy; also yours as FILE.py:FUNCTION (see the
    README).
    """
    target: float = 0.5
    """Target loss or accuracy whose time is reported."""
    target_of: str = "train_loss"
    """Measure of the target: train_loss or test_loss, reached from above, or train_accuracy or
    test_accuracy, from below, if the problem has it."""
    evaluate_every: int | None = 5
    """Worker steps between evaluations on all data, between which the time to the target is
    interpolated.
    """

    def check(self) -> None:
        """Check the options; see `StudyOptions.check`."""
        as_law("lasts", self.lasts)
        require_nonnegative("detect", self.detect, "s")
        for deaths in self.deaths if isinstance(self.deaths, Sequence) else ():
            require_nonnegative("deaths", deaths, "an hour")
        super().check()
        Target(self.target, self.target_of).check()

    def at(self, **values: Any) -> StudyConfig:
        """Return the options of one cluster; its deaths are added to its failures."""
        deaths = values.pop("deaths", self.deaths[0])
        deaths_failure: tuple[str, ...] = ()
        if deaths:
            lasts: Any = self.lasts  # for lists, which options allow, crash raises the error
            deaths_failure = (str(crash(f"exponential({_HOUR / deaths!r})", lasts, self.detect)),)
        given_failures = (
            (self.failures,) if isinstance(self.failures, str) else tuple(self.failures)
        )
        return super().at(**{"failures": given_failures + deaths_failure, **values})


SCALES = {
    "small": Config(),
    "paper": Config(scale="paper", problem="mnist", steps=938, evaluate_every=94),
}


def run(config: Config) -> Result:
    """Run the study; see `asyncsim.study.sweep.run_cells`."""
    config.check()
    target = Target(config.target, config.target_of)
    grid = [
        {"deaths": deaths, "policy": str(policy), "workers": n}
        for n in config.workers
        for policy in config.policy or (*_POLICIES, f"first_of({max(1, n // 2)})")
        for deaths in config.deaths
    ]
    with config.computing_device():
        cells = sweep(config, grid)
        target.check_of(cells[0].problem)
        return run_cells("failures", config, cells, functools.partial(_conclude, target))


def goodput_table(summary: pd.DataFrame) -> pd.DataFrame:
    """Tabulate the cost of deaths under each policy, as means over traces.

    Columns: ``workers``, ``policy``, ``deaths`` (per hour and worker); ``throughput`` (accepted
    commits/s); ``kept``, the share of versions that no restored checkpoint has undone;
    ``remaining``, the ratio of the throughput that is kept to that with the fewest deaths; the
    parts of the workers' time (`PARTS`); ``staleness_mean``. ``summary``: with ``kept`` if a
    server or a job restores checkpoints.
    """
    columns = ["throughput", *(part.name for part in PARTS), "staleness_mean"]
    traces = summary.drop_duplicates([*_CLUSTER, "trace_file"]).groupby(list(_CLUSTER), sort=False)
    table = pd.DataFrame(
        {cluster: trace_means(group, cluster[0])[columns] for cluster, group in traces}
    ).T
    table = table.rename_axis(_CLUSTER).reset_index()
    kept = [group["kept"].mean() if "kept" in group else 1.0 for _, group in traces]
    table = table.assign(kept=kept, goodput=table["throughput"] * kept)
    fewest = (
        table.sort_values("deaths").groupby(["workers", "policy"])["goodput"].transform("first")
    )
    table.insert(4, "remaining", table.pop("goodput") / fewest)
    return table


def kept_share(trace: Trace) -> float:
    """Return the share of a trace's versions that no restored checkpoint has undone."""
    outages = trace.absences[trace.absences["worker"] < 0]
    restores = int((outages["to_row"] < len(trace)).sum())
    made = int(trace.frame["version"].iloc[-1]) - restores
    return kept_versions(trace) / made if restores and made else 1.0


def times_table(finished: Finished, target: Target) -> pd.DataFrame:
    """Tabulate each method's time to the target under each policy at each rate of deaths.

    Columns: ``workers``, ``policy``, ``deaths``, ``method``, ``seeds``, ``diverged``, ``reached``
    (seeds that met the target), ``time_to_target`` (s, simulated; infinite if a seed did not meet
    it), ``final_loss`` (minibatch loss, mean over the finished seeds).
    """
    times = [target.time(finished.run(name).evaluations) for name in finished.summary["run_folder"]]
    runs = finished.summary.assign(time_to_target=times)
    return means(runs, [*_CLUSTER, "method"], ["time_to_target", "final_loss"])


def _verdict(goodput: pd.DataFrame, summary: pd.DataFrame) -> str:
    """Say which policies keep the most and the least of their throughput with the most deaths.

    ``summary``: with ``died``, the workers that died during each run.
    """
    if goodput["deaths"].nunique() < 2:
        return "one rate of deaths: there is nothing to compare it with; give several --deaths"
    summary = summary[summary["deaths"] == summary["deaths"].max()]
    expected = summary["workers"] * summary["deaths"] / _HOUR * summary["simulated_seconds"]
    if not summary["died"].any():
        most = summary.loc[expected.idxmax()]
        return (
            f"no worker died in these runs ({most['workers']} workers, "
            f"{number_text(most['simulated_seconds'])} s; {number_text(expected.max(), 2)} deaths "
            "expected): deaths cannot be compared; give more --steps"
        )
    worst = goodput[goodput["deaths"] == goodput["deaths"].max()].dropna(subset="remaining")
    kept = worst.groupby("policy", sort=False)["remaining"].mean().sort_values(ascending=False)
    if kept.empty:
        return "no policy makes commits"
    deaths = f"at {number_text(worst['deaths'].iloc[0])} deaths per worker and hour"
    shares = [percent_text(kept.iloc[place]) for place in (0, -1)]
    if len(kept) > 1 and shares[0] == shares[1]:
        if shares[0] == "100%":
            return f"{deaths} no policy loses throughput"
        return f"{deaths} every policy keeps {shares[0]} of its throughput"
    text = f"{deaths} {kept.index[0]} keeps {shares[0]} of its throughput"
    return text if len(kept) == 1 else f"{text}, {kept.index[-1]} only {shares[1]}"


def _conclude(target: Target, folder: Path, summary: pd.DataFrame) -> None:
    finished = read(folder, "failures")
    traces = {file: finished.trace(file) for file in summary["trace_file"].unique()}
    shares = {file: kept_share(trace) for file, trace in traces.items()}
    died = {file: int((trace.absences["kind"] == "crash").sum()) for file, trace in traces.items()}
    files = summary["trace_file"]
    goodput = goodput_table(summary.assign(kept=files.map(shares)))
    times = times_table(finished, target)
    columns: list[Any] = [*_CLUSTER, "throughput", "kept", "remaining", *PARTS, "staleness_mean"]
    counts = (
        f"means over {counted(summary['seed'].nunique(), 'trace')}; deaths: per worker and hour"
    )
    shared, goodput_rest = without_constants(goodput, _CLUSTER)
    _, times_rest = without_constants(times, _CLUSTER)
    present(
        folder,
        {GOODPUT: goodput, TIMES: times},
        f"{shared}{counts}; parts of the workers' time; remaining: part of the throughput with the "
        "fewest deaths",
        f"{text_of(goodput_rest, columns)}\n",
        f"{shared}simulated time until {target} is reached\n{text_of(times_rest)}",
        verdict=_verdict(goodput, summary.assign(died=files.map(died)))
        + (" (one seed)" if summary["seed"].nunique() == 1 else ""),
    )
