"""Whether outer momentum harms asynchronous DiLoCo by staleness, or by a larger effective rate.

Outer momentum multiplies the server's rate by up to 1 / (1 - momentum), its effective rate. The
study trains with each outer momentum, as Nesterov and as heavy ball, behind a queue, with fixed
staleness and with none, at several effective rates. It then compares momentum with plain outer
steps in three ways: at the equal rate that is best for plain steps, at the equal effective rate,
and each at its best rate. The ratio of the final training losses is the harm; a diverged run counts
with the loss at its start, if that is less.

Beside it are the linear limits: the largest stable effective rate on a quadratic, in theory for
fixed staleness (asyncsim.theory.momentum_stable_rate) and measured by replays of the same clusters.

Rules: Douillard et al. 2023, arXiv 2311.08105; Liu et al. 2024, arXiv 2401.09135.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import optax
import pandas as pd

from asyncsim.base.console import counted, number_text, over_seeds
from asyncsim.base.errors import InputError, require_count
from asyncsim.methods import Method, async_local_sgd
from asyncsim.problems import quadratic
from asyncsim.problems.problem import Problem
from asyncsim.replays.ensemble import replay_ensemble
from asyncsim.replays.run import Run
from asyncsim.simulation.simulate import simulate
from asyncsim.study import results
from asyncsim.study.cell import Cell
from asyncsim.study.columns import Column, Columns, text_of
from asyncsim.study.config import LawLike, MethodLike, ProblemLike, StudyConfig
from asyncsim.study.finished import present, read
from asyncsim.study.jobs import Job, Result, Tables, executor_of, measurement, run_jobs
from asyncsim.study.outcome import ends
from asyncsim.study.ranking import at_the_edge, paired_interval
from asyncsim.study.sweep import check_values, sweep
from asyncsim.study.target import check_rates
from asyncsim.theory import momentum_stable_rate
from asyncsim.theory.momentum import MOMENTA
from asyncsim.traces.prescription import prescribed
from asyncsim.traces.trace import Trace

#: Files with the comparisons and with the limits.
TABLE, LIMITS = "comparison.csv", "limits.csv"
#: The case of a trace of the cluster, and the rule of steps without momentum.
QUEUE, PLAIN = "queue", "plain"
#: Rates at which momentum and plain steps are compared: the last is, in every case, the equal rate
#: of the queue.
EQUAL_RATE, EQUAL_EFFECTIVE, TUNED, QUEUE_RATE = (
    "equal rate",
    "equal effective rate",
    "each tuned",
    "equal rate of the queue",
)
#: Commits of a trace that measures a limit, parts of its last half, and rates of the first search.
_LIMIT_COMMITS, _LIMIT_PARTS, _LIMIT_RATES = 2000, 10, np.geomspace(0.02, 64, 40)
#: Growth per commit of a loss that has underflowed.
_ROUND_OFF = 1e-12
#: The rules at the begin of a sentence.
_NAMES = {"nesterov": "Nesterov", "heavy_ball": "Heavy ball"}
#: Share of the harm at the equal rate that is attributed to one cause alone.
_HALF = 0.5
#: Options without effect: the study fixes the methods, and evaluates a run at its start and its
#: end.
_IGNORED = (
    "optimizer",
    "momentum",
    "attack",
    "evaluate_every",
    "diagnose_every",
    "diagnose_energy",
    "animate",
)


@dataclass(frozen=True)
class Config(StudyConfig):
    """Options of the study of outer momentum."""

    example = "--workers 4 --server-momentum 0.9"

    workers: int = 8
    """Workers of the cluster with the queue."""
    window: int = 8
    """Local steps per communication."""
    steps: int = 40
    """Commits per worker, on average."""
    seeds: int = 5
    """Number of seeds: 0, 1, ..."""
    compute: LawLike = "exponential(1)"
    """Law of the time of a local step (s)."""
    service: LawLike = "constant(0.5)"
    """Law of the server's time per visit (s)."""
    problem: ProblemLike = "digits(hidden=[16, 16])"
    """Training problem; below 2,000 parameters all rates are computed together."""
    learning_rate: float = 0.1
    """Rate of the local steps."""
    methods: tuple[MethodLike, ...] = ("async_local_sgd",)
    """Fixed by the study; leave it out."""
    server_momentum: tuple[float, ...] = (0.5, 0.9)
    """Outer momenta to compare with plain outer steps, above 0 and below 1."""
    delays: tuple[int, ...] | None = None
    """Fixed staleness (versions) beside the queue. none: 0, 2 and the queue's mean, workers - 1."""
    tune: tuple[float, ...] = tuple(2.0**k for k in range(-5, 5))
    """Effective outer rates to try, the same with each momentum and without."""

    def check(self) -> None:
        """Check the options; see `StudyOptions.check`."""
        if self.methods != type(self).methods:
            raise InputError(
                f"methods = {self.methods!r}: this study fixes its methods; leave it out"
            )
        super().check()
        check_values("server_momentum", self.server_momentum)
        for value in self.server_momentum:
            if not 0 < value < 1:
                raise InputError(f"server_momentum = {value!r}: must be above 0 and below 1")
        check_rates(self.tune)
        check_values("delays", self.fixed_delays)
        for delay in self.fixed_delays:
            require_count("delays", delay, minimum=0)

    @property
    def fixed_delays(self) -> tuple[int, ...]:
        """The fixed staleness of each case without a queue."""
        if self.delays is not None:
            return self.delays
        return tuple(sorted({0, min(2, self.workers - 1), self.workers - 1}))


class Case(NamedTuple):
    """Where the staleness comes from."""

    name: str
    delay: int | None  #: None: a queue
    trace: Callable[[int, int], Trace]  #: of a number of commits and a seed

    def jobs(self, config: Config, problem: Problem) -> list[Job]:
        """Return a job for all seeds of a fixed delay, which share a trace, or one for each."""
        name, seeds = self.name, range(config.seeds)
        if self.delay is not None:
            return [_job(f"{name}, {counted(len(seeds), 'seed')}", config, self, seeds, problem)]
        return [
            _job(f"{name}, seed {seed}", config, self, seeds[seed : seed + 1], problem, seed=seed)
            for seed in seeds
        ]


def run(config: Config) -> Result:
    """Run the study; see `asyncsim.study.jobs.run_jobs`."""
    config.check()
    config.say_ignored(_IGNORED, "here")
    with config.computing_device():
        (cell,) = sweep(config, [{}])
        method = outer(config.tune[0], config.server_momentum[0], MOMENTA[0], config.learning_rate)
        record = {"study": "outer_momentum", **config.record([method], cell.problem)}
        jobs = [job for case in cases(config, cell) for job in case.jobs(config, cell.problem)]
        executor = executor_of(config, [(cell.problem, config.workers)])

        def conclude(folder: Path, summary: pd.DataFrame) -> None:
            limits = read(folder, "outer_momentum").table(LIMITS)
            table = comparisons(summary)
            present(
                folder,
                {TABLE: table},
                *_texts(config, cell, summary, table, limits),
                verdict=verdict(table),
            )

        return run_jobs("outer_momentum", config, record, jobs, executor, conclude)


def cases(config: Config, cell: Cell) -> list[Case]:
    """Return the fixed delays, then the queue."""

    def fixed(delay: int) -> Callable[[int, int], Trace]:
        return lambda commits, seed: prescribed(delay, commits, config.workers, config.window)

    def queue(commits: int, seed: int) -> Trace:
        return simulate(cell.cluster, commits, seed, progress=False)

    named = [Case(f"fixed {delay}", delay, fixed(delay)) for delay in config.fixed_delays]
    return [*named, Case(QUEUE, None, queue)]


def outer(effective_rate: float, server_momentum: float, rule: str, learning_rate: float) -> Method:
    """Return asynchronous DiLoCo with an effective outer rate and an outer momentum."""
    rate = effective_rate * (1 - server_momentum)
    if rule == "heavy_ball":
        method = async_local_sgd(
            learning_rate, server_optimizer=optax.sgd(rate, momentum=server_momentum)
        )
    else:
        method = async_local_sgd(learning_rate, rate, server_momentum)
    values = {"effective_rate": effective_rate, "server_momentum": server_momentum, "rule": rule}
    return method._replace(name=rule, hyperparameters={**values, "learning_rate": learning_rate})


def _job(
    name: str, config: Config, case: Case, seeds: range, problem: Problem, **labels: int
) -> Job:
    arguments = config, case, seeds, problem
    return measurement(name, _measured, *arguments, labels={"case": case.name, **labels})


def _measured(config: Config, case: Case, seeds: range, problem: Problem) -> Tables:
    """Train at all rates on the trace of a case and its seeds, and measure the linear limits."""
    with config.computing_device():
        trace = case.trace(config.commits, seeds[0])
        labels = {"case": case.name, "staleness_mean": trace.frame["staleness"].mean()}
        scales = (1, *(1 / (1 - momentum) for momentum in config.server_momentum))
        rates = sorted({rate * scale for rate in config.tune for scale in scales})
        rows = []
        for rule in MOMENTA:
            runs = replay_ensemble(
                trace,
                outer,
                problem,
                seeds=seeds,
                precision=config.precision,
                evaluate_every=len(trace),
                progress=False,
                effective_rate=rates,
                server_momentum=_with_plain(rule, config.server_momentum),
                rule=rule,
                learning_rate=config.learning_rate,
            )
            rows += [{**labels, **_rates(run), **ends(run)} for run in runs]
        rows = [row for row in rows if row["rule"] != PLAIN or row["effective_rate"] in config.tune]
        measured = limits(config, case, seeds[0]) if 0 in seeds else []
        return {results.SUMMARY: rows, LIMITS: [{**labels, "seed": 0, **row} for row in measured]}


def _with_plain(rule: str, momenta: Sequence[float]) -> list[float]:
    """Return the momenta of a rule; the first rule's program computes plain steps, 0, as well."""
    return [*([0.0] if rule == MOMENTA[0] else []), *momenta]


def _rates(run: Run) -> dict[str, Any]:
    """Return seed, rule, momentum and outer rates of a run as columns."""
    values = run.config["hyperparameters"]
    return {
        "seed": run.config["seed"],
        "rule": values["rule"] if values["server_momentum"] else PLAIN,
        **{name: values[name] for name in ("server_momentum", "effective_rate")},
        "server_rate": values["effective_rate"] * (1 - values["server_momentum"]),
    }


def limits(config: Config, case: Case, seed: int) -> list[dict[str, Any]]:
    """Measure the largest stable effective rate of each rule and momentum on a quadratic."""
    trace = case.trace(_LIMIT_COMMITS, seed)
    rows = []
    for rule in MOMENTA:
        momenta = _with_plain(rule, config.server_momentum)
        for momentum, limit in measured_limits(trace, rule, momenta).items():
            theory = np.nan
            if case.delay is not None:
                theory = momentum_stable_rate(momentum, case.delay, rule)
            rows.append(
                {
                    "rule": rule if momentum else PLAIN,
                    "server_momentum": momentum,
                    "measured": limit,
                    "theory": theory,
                }
            )
    return rows


def measured_limits(trace: Trace, rule: str, momenta: Sequence[float]) -> dict[float, float]:
    """Measure, by momentum, the effective rate at which replays of ``x**2 / 2`` neither grow nor
    shrink.

    A local rate of 1 sends ``-x`` for any window. The second search is between the last rate of the
    first that does not grow and the next one. NaN where none of the rates grows, or all do.
    """
    low, ratios = np.ones(len(momenta)), _LIMIT_RATES
    for _ in range(2):
        # An ensemble computes all pairs of a ratio and a momentum; the rates depend on both.
        def method(ratio: Any, server_momentum: Any, low: np.ndarray = low) -> Method:
            rate = ratio * jnp.interp(server_momentum, jnp.array(momenta), jnp.array(low))
            return outer(rate, server_momentum, rule, 1.0)

        runs = replay_ensemble(
            trace,
            method,
            quadratic([1.0]),
            precision="float64",
            evaluate_every=len(trace),
            progress=False,
            ratio=ratios.tolist(),
            server_momentum=list(momenta),
        )
        growths = np.reshape([_growth(run) for run in runs], (len(ratios), len(momenta)))
        first_growing = np.argmax(growths > _ROUND_OFF, axis=0)
        low = np.where(first_growing, low * ratios[first_growing - 1], np.nan)
        ratios = np.geomspace(1, ratios[1] / ratios[0], len(ratios))
    return dict(zip(momenta, (low * np.sqrt(ratios[1])).tolist(), strict=True))


def _growth(run: Run) -> float:
    """Return the slope of the logarithm of the loss over the last half of a trace.

    The largest losses of parts of the trace are fitted, because the loss oscillates. A run that
    overflows is fitted up to there.
    """
    losses = run.commits["loss"].to_numpy()
    losses = losses[np.isfinite(losses)]
    parts = np.array_split(losses[len(losses) // 2 :], _LIMIT_PARTS)
    logs = np.log([max(part.max(), np.finfo(float).tiny) for part in parts])
    return float(np.polyfit(np.arange(_LIMIT_PARTS), logs, 1)[0]) / len(parts[0])


def log_loss(summary: pd.DataFrame) -> pd.Series:
    """Return the logarithm of the final loss, or of the loss at the start if that is less."""
    return np.log(np.minimum(summary["train_loss"], summary["first_loss"]))


def comparisons(summary: pd.DataFrame) -> pd.DataFrame:
    """Compare momentum with plain outer steps in each case, at the rates of each comparison.

    ``summary``: a row for each run: ``case``, ``seed``, ``rule``, ``server_momentum``,
    ``effective_rate``, ``server_rate``, ``first_loss``, ``train_loss``.

    Returns a row for each case, rule, momentum and comparison: the rates; ``plain`` and ``loss``,
    geometric means over the seeds; ``harm``, their ratio, with ``low`` and ``high``, its 95 %
    interval, paired over the seeds; ``logs``, the difference of the logarithms for each seed.
    """
    losses = summary.assign(log=log_loss(summary)).pivot_table(
        "log", "seed", ["case", "rule", "server_momentum", "effective_rate"]
    )
    names = list(dict.fromkeys(summary["case"]))
    best = {name: losses[name, PLAIN, 0.0].mean().idxmin() for name in names}
    rows = []
    for case in names:
        plain = losses[case, PLAIN, 0.0]
        pairs = summary.loc[summary["rule"] != PLAIN, ["rule", "server_momentum"]]
        for rule, momentum in pairs.drop_duplicates().itertuples(index=False):
            curves, scale = losses[case, rule, momentum], 1 / (1 - momentum)
            compared = [
                (EQUAL_RATE, best[case], best[case] * scale),
                (EQUAL_EFFECTIVE, best[case], best[case]),
                (TUNED, best[case], curves[plain.columns].mean().idxmin()),
            ]
            if QUEUE in best:
                compared.append((QUEUE_RATE, best[QUEUE], best[QUEUE] * scale))
            for name, plain_rate, rate in compared:
                momentum_logs, plain_logs = curves[_nearest(curves, rate)], plain[plain_rate]
                harm = paired_interval(momentum_logs - plain_logs)
                rows.append(
                    {
                        "case": case,
                        "rule": rule,
                        "server_momentum": momentum,
                        "comparison": name,
                        "plain_rate": plain_rate,
                        "effective_rate": rate,
                        "plain": np.exp(plain_logs.mean()),
                        "loss": np.exp(momentum_logs.mean()),
                        **{key: np.exp(value) for key, value in harm._asdict().items()},
                    }
                )
    return pd.DataFrame(rows).rename(columns={"mean": "harm"})


def _nearest(curves: pd.DataFrame, rate: float) -> float:
    """Return the tried rate next to a rate, which may differ in the last digit."""
    rates = curves.columns.to_numpy()
    return float(rates[np.argmin(np.abs(np.log(rates / rate)))])


def verdict(table: pd.DataFrame) -> str:
    """Answer the study's question in one sentence for each rule, at the largest momentum.

    ``table``: as `comparisons` returns. The cause is the larger effective rate if, behind the
    queue, an equal effective rate leaves less than half of the harm at the equal rate, in
    logarithms and with its whole interval; staleness if it leaves more.
    """
    momentum = table["server_momentum"].max()
    rows = table[table["server_momentum"] == momentum].set_index(["case", "rule", "comparison"])
    if QUEUE not in rows.index.get_level_values("case"):
        return "no verdict: no run behind the queue has finished"
    if rows["low"].isna().any():
        return "no verdict: one seed cannot show the noise; give --seeds 3 or more"
    return " ".join(_answer(rows, rule, momentum) for rule in MOMENTA)


def _answer(rows: pd.DataFrame, rule: str, momentum: float) -> str:
    """State the harms of a rule behind the queue, and their cause; see `verdict`."""
    rate, effective, tuned = (
        rows.loc[(QUEUE, rule, name)] for name in (EQUAL_RATE, EQUAL_EFFECTIVE, TUNED)
    )
    half, fresh = rate["harm"] ** _HALF, ("fixed 0", rule, QUEUE_RATE)
    if rate["low"] <= 1:
        cause = "no harm that these seeds show"
    elif effective["high"] < half:
        cause = "a larger effective rate, not staleness"
        if fresh in rows.index and rows.loc[fresh]["high"] < half:
            cause = "a larger effective rate, which only staleness makes harmful"
    elif effective["low"] > half:
        cause = "staleness, not a larger effective rate"
    else:
        cause = "undecided between a larger effective rate and staleness"
    text = (
        f"{_NAMES[rule]} with momentum {momentum:g} behind the queue multiplies the loss by "
        f"{_harm(rate)} at the equal rate, by {_harm(effective)} at the equal effective rate and "
        f"by {_harm(tuned)} with each tuned"
    )
    if fresh in rows.index:
        text += f"; without staleness the equal rate multiplies it by {_harm(rows.loc[fresh])}"
    return f"{text}: {cause}."


def _harm(row: pd.Series) -> str:
    """Format a harm with its interval."""
    ends = [number_text(row[name]) for name in ("harm", "low", "high")]
    return ends[0] if np.isnan(row["low"]) else f"{ends[0]} ({ends[1]} to {ends[2]})"


def _texts(
    config: Config,
    cell: Cell,
    summary: pd.DataFrame,
    table: pd.DataFrame,
    limits: pd.DataFrame,
) -> list[str]:
    staleness = summary.loc[summary["case"] == QUEUE, "staleness_mean"].mean()
    seeds = over_seeds(summary["seed"].nunique(), "geometric means over")
    about = (
        f"{cell.problem.name}, training loss after {counted(config.commits, 'commit')}, {seeds}; "
        f"mean staleness of the queue {'-' if np.isnan(staleness) else number_text(staleness)}"
    )
    columns: Columns = [
        "case",
        "rule",
        Column("server_momentum", "momentum"),
        Column("plain", "loss without"),
        Column("loss", "loss"),
        Column("effective_rate", "best effective rate"),
        *(Column(name, f"harm, {name}") for name in (EQUAL_RATE, EQUAL_EFFECTIVE, TUNED)),
    ]
    keys = ["case", "rule", "server_momentum"]
    harms = table.assign(text=[_harm(row) for _, row in table.iterrows()])
    wide = harms.pivot_table("text", keys, "comparison", aggfunc="first", sort=False)
    best = table[table["comparison"] == TUNED].merge(wide.reset_index(), on=keys)
    names = [f"{row.case} with {row.rule} {row.server_momentum:g}" for row in best.itertuples()]
    edges = at_the_edge(best.assign(learning_rate=best["effective_rate"]), config.tune, names)
    plain = table.drop_duplicates("case")
    plain_names = [f"{case} without momentum" for case in plain["case"]]
    plain_edges = at_the_edge(
        plain.assign(learning_rate=plain["plain_rate"]), config.tune, plain_names
    )
    return [
        about,
        text_of(best, columns),
        "harm: the loss with momentum over the loss without it, with its 95 % interval over the "
        "seeds\nequal rate: the rate that is best without momentum; equal effective rate: that "
        "rate times 1 - momentum",
        "",
        "largest stable effective rate on a quadratic of curvature 1; measured with seed 0",
        text_of(limits, ["case", "rule", columns[2], "theory", "measured"]),
        edges,
        plain_edges,
    ]
