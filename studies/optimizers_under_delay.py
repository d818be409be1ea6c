"""Which optimizer at the server bears delay: the loss of each at its best rate.

Every optimizer takes stale gradients (methods.server_optimizer) with fixed delays, behind queues
of the same mean staleness, and in a pipeline, whose layers have different delays. Each trains at
seven rates and counts at its best one, in every case, so that no optimizer suffers from a rate that
was tuned without delay. The gap is the loss at the best rate minus that without delay. Behind
queues each optimizer also has a variant with the delay-adaptive rate, times min(1, n / staleness);
with a fixed delay of n workers in turn that factor is 1.

Published, one seed and rates not tuned again: with a delay of 2 the loss of Muon rises by 0.14, of
AdamH by 0.74 (marin issue 6431); with a delay of one AdamW loses more than 0.2 and Muon
0.012 (Zmushko et al. 2026, arXiv 2606.30634).
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pandas as pd

from asyncsim.base.console import counted, number_text, over_seeds
from asyncsim.base.errors import InputError, require_choice, require_count
from asyncsim.methods import Method, server_optimizer
from asyncsim.problems.partition import partition
from asyncsim.problems.problem import Problem
from asyncsim.replays.check import check_method
from asyncsim.replays.ensemble import replay_ensemble
from asyncsim.simulation.simulate import simulate
from asyncsim.study import results
from asyncsim.study.columns import Column, Columns, text_of
from asyncsim.study.config import LawLike, MethodLike, ProblemLike, StudyConfig
from asyncsim.study.finished import present
from asyncsim.study.jobs import Job, Result, Tables, executor_of, measurement, run_jobs
from asyncsim.study.outcome import ends
from asyncsim.study.ranking import Interval, at_the_edge, paired_interval
from asyncsim.study.sweep import check_values, sweep
from asyncsim.study.target import check_rates
from asyncsim.traces.prescription import pipeline, prescribed
from asyncsim.traces.trace import Trace

#: File with the best rate, the loss and the gap of each optimizer in each case.
TABLE = "gaps.csv"
FIXED, QUEUE, PIPELINE = "fixed", "queue", "pipeline"
_SOURCES = {FIXED: "fixed delays", QUEUE: "queues", PIPELINE: "the pipeline"}
#: Optimizers of the verdict: its subject, and those that it is compared with.
_SUBJECT, _RIVALS = "muon", ("adamw_90", "adamw_95")
#: Options without effect: the study fixes the methods and the rates, and evaluates a run at its
#: start and its end.
_IGNORED = (
    "workers",
    "steps",
    "window",
    "dynamic_window",
    "learning_rate",
    "optimizer",
    "momentum",
    "attack",
    "evaluate_every",
    "diagnose_every",
    "diagnose_energy",
    "animate",
)


class Rule(NamedTuple):
    """An optimizer of the comparison."""

    name: str  #: for readers
    beta1: float  #: weight of the past in the direction of a step
    top: float  #: the rate that --tune multiplies
    make: Callable[[Any], optax.GradientTransformation]


#: Without weight decay. Muon's biases, which are no matrices, have Adam's steps at the same rate.
OPTIMIZERS = {
    "sgd": Rule("SGD", 0.0, 1.0, optax.sgd),
    "momentum": Rule("momentum SGD", 0.9, 0.1, functools.partial(optax.sgd, momentum=0.9)),
    "adamw_90": Rule(
        "AdamW 0.9", 0.9, 0.04, functools.partial(optax.adamw, b1=0.9, weight_decay=0.0)
    ),
    "adamw_95": Rule(
        "AdamW 0.95", 0.95, 0.04, functools.partial(optax.adamw, b1=0.95, weight_decay=0.0)
    ),
    "lion": Rule("Lion", 0.9, 0.025, functools.partial(optax.lion, b1=0.9, weight_decay=0.0)),
    "muon": Rule("Muon", 0.95, 0.08, functools.partial(optax.contrib.muon, beta=0.95)),
}


@dataclass(frozen=True)
class Config(StudyConfig):
    """Options of the study of optimizers under delay."""

    example = "--optimizers adamw_90 muon"

    optimizers: tuple[str, ...] = tuple(OPTIMIZERS)
    """Optimizers at the server: sgd, momentum, adamw_90 and adamw_95 (by beta1), lion, muon."""
    delays: tuple[int, ...] = (0, 1, 2, 4, 8)
    """Delays (versions): fixed, and above 0 the mean staleness of a queue of delay + 1 workers."""
    stages: int = 4
    """Stages of the pipeline, with delays from stages - 1 to 0; 0 for no pipeline."""
    tune: tuple[float, ...] = tuple(0.4**k for k in range(7))
    """Rates to try, times a rate of each optimizer that is large without delay."""
    gradients: int = 300
    """Gradients of each run."""
    seeds: int = 5
    """Number of seeds: 0, 1, ...; they share the trace of a queue."""
    compute: LawLike = "exponential(1)"
    """Law of the time of a local step (s)."""
    service: LawLike = "constant(0.05)"
    """Law of the server's time per visit (s)."""
    problem: ProblemLike = "digits(hidden=[16, 16, 16])"
    """Training problem with matrices; below 2,000 parameters all rates are computed together."""
    methods: tuple[MethodLike, ...] = ("server_optimizer",)
    """Fixed by the study; leave it out."""

    def check(self) -> None:
        """Check the options; see `StudyOptions.check`."""
        if self.methods != type(self).methods:
            raise InputError(
                f"methods = {self.methods!r}: this study fixes its methods; give optimizers"
            )
        super().check()
        check_values("optimizers", self.optimizers)
        for name in self.optimizers:
            require_choice("optimizers", name, OPTIMIZERS)
        check_values("delays", self.delays)
        for delay in self.delays:
            require_count("delays", delay, minimum=0)
        if 0 not in self.delays:
            raise InputError(
                f"delays = {self.delays}: the gap is relative to a delay of 0; give that, too"
            )
        require_count("stages", self.stages, minimum=0)
        require_count("gradients", self.gradients)
        check_rates(self.tune)


class Case(NamedTuple):
    """A source of staleness."""

    source: str  #: of `_SOURCES`
    delay: float  #: mean (versions)
    trace: Trace

    @property
    def name(self) -> str:
        """Its name in jobs."""
        return f"{self.source} {self.delay:g}"


def run(config: Config) -> Result:
    """Run the study; see `asyncsim.study.jobs.run_jobs`."""
    config.check()
    config.say_ignored(_IGNORED, "here")
    with config.computing_device():
        queues = [delay for delay in config.delays if delay]
        cells = sweep(config, [{"workers": delay + 1} for delay in queues] or [{"workers": 1}])
        problem = cells[0].problem
        params = problem.shapes
        methods = [tried(OPTIMIZERS[name].top, 0.0, name) for name in config.optimizers]
        for method in methods:
            check_method(method, params)
        cases = [
            Case(FIXED, delay, prescribed(delay, config.gradients, delay + 1))
            for delay in config.delays
        ]
        cases += [
            Case(QUEUE, delay, simulate(cell.cluster, config.gradients, 0, progress=False))
            for delay, cell in zip(queues, cells, strict=False)
        ]
        if config.stages:
            partition(params, config.stages, "stages", by_layer=True)  # raises InputError
            trace = pipeline(config.stages, config.gradients)
            cases.append(Case(PIPELINE, (config.stages - 1) / 2, trace))
        record = {"study": "optimizers_under_delay", **config.record(methods, problem)}
        jobs = [_job(config, case, name, problem) for case in cases for name in config.optimizers]
        executor = executor_of(config, [(problem, 1)])

        def conclude(folder: Path, summary: pd.DataFrame) -> None:
            table = gap_table(summary)
            present(
                folder,
                {TABLE: table},
                *_texts(config, problem, summary, table),
                verdict=verdict(table),
            )

        return run_jobs("optimizers_under_delay", config, record, jobs, executor, conclude)


def tried(learning_rate: Any, adaptive: Any, optimizer: str) -> Method:
    """Return a server optimizer at a rate; ``adaptive`` is 1.0 for the delay-adaptive rate, 0.0
    without.

    Unlike the switch of `asyncsim.methods.server_optimizer`, ``adaptive`` is a number, with which
    both variants share one program.
    """

    def shrink(steps: Any, state: Any, params: Any = None, *, visit: Any, **_: Any) -> Any:
        kind = jax.tree.leaves(steps)[0].dtype
        tau, n = (jnp.asarray(count, kind) for count in (visit.staleness, visit.workers))
        factor = (n / jnp.maximum(n, tau)) ** adaptive
        return jax.tree.map(lambda step: factor * step, steps), state

    shrinking = optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), shrink)
    steps = optax.chain(OPTIMIZERS[optimizer].make(learning_rate), shrinking)
    method = server_optimizer(optimizer=steps, adaptive=False)
    values = {"learning_rate": learning_rate, "adaptive": adaptive, "optimizer": optimizer}
    return method._replace(name=optimizer, hyperparameters=values)


def _job(config: Config, case: Case, optimizer: str, problem: Problem) -> Job:
    labels = {"source": case.source, "delay": case.delay, "optimizer": optimizer}
    name = f"{case.name}, {optimizer}, {counted(config.seeds, 'seed')}"
    return measurement(name, _losses, config, case, optimizer, problem, labels, labels=labels)


def _losses(
    config: Config, case: Case, optimizer: str, problem: Problem, labels: dict[str, Any]
) -> Tables:
    """Train at all rates and seeds on the trace of a case."""
    with config.computing_device():
        runs = replay_ensemble(
            case.trace,
            tried,
            problem,
            seeds=range(config.seeds),
            precision=config.precision,
            evaluate_every=len(case.trace),
            progress=False,
            optimizer=optimizer,
            adaptive=[0.0, 1.0] if case.source == QUEUE else [0.0],
            learning_rate=[OPTIMIZERS[optimizer].top * ratio for ratio in config.tune],
        )
    rows = []
    for run in runs:
        values, seed = run.config["hyperparameters"], run.config["seed"]
        tried_values = {
            "adaptive": bool(values["adaptive"]),
            "learning_rate": values["learning_rate"],
        }
        rows.append({**labels, **tried_values, "seed": seed, **ends(run)})
    return {results.SUMMARY: rows}


def gap_table(summary: pd.DataFrame) -> pd.DataFrame:
    """Return the loss of each optimizer at its best rate in each case, and its gap.

    ``summary``: a row for each run: ``source``, ``delay``, ``optimizer``, ``adaptive``,
    ``learning_rate``, ``seed``, ``first_loss``, ``train_loss``. A run counts with the loss at its
    start if it ends above that.

    Returns a row for each optimizer, variant and case: the best rate, by the mean loss over the
    seeds; ``shift``, relative to the best rate without delay; ``loss`` and ``loss_sd``; ``gap``
    with ``low`` and ``high``, its 95 % interval, paired over the seeds; ``gap_seed0``, ... for each
    seed.
    """
    keys = ["optimizer", "adaptive", "source", "delay"]
    losses = summary.assign(loss=summary[["train_loss", "first_loss"]].min(axis=1))
    rows, fresh = [], {}
    for (optimizer, adaptive, source, delay), runs in losses.groupby(keys, sort=False):
        curves = runs.pivot(index="seed", columns="learning_rate", values="loss")
        rate = curves.mean().idxmin()
        if source == FIXED and delay == 0:
            fresh[optimizer] = rate, curves[rate]
        rows.append((optimizer, adaptive, source, delay, rate, curves[rate]))
    table = []
    for optimizer, adaptive, source, delay, rate, loss in rows:
        first_rate, first_loss = fresh.get(optimizer, (np.nan, loss * np.nan))
        gaps = loss - first_loss
        gap = paired_interval(gaps)
        table.append(
            {
                **dict(zip(keys, (optimizer, adaptive, source, delay), strict=True)),
                "beta1": OPTIMIZERS[optimizer].beta1,
                "learning_rate": rate,
                "shift": rate / first_rate,
                "loss": loss.mean(),
                "loss_sd": loss.std(),
                "gap": gap.mean,
                "low": gap.low,
                "high": gap.high,
                **{f"gap_seed{seed}": value for seed, value in gaps.items()},
            }
        )
    return pd.DataFrame(table)


def verdict(table: pd.DataFrame) -> str:
    """Say whether Muon bears delay better than AdamW, from the rows of `gap_table`.

    The gaps of each source are averaged over its delays; of the two AdamWs, the one with the
    smaller mean gap counts.
    """
    plain = table[~table["adaptive"] & (table["delay"] > 0)]
    seeds = [name for name in plain if name.startswith("gap_seed")]
    texts, headline = [], ""
    for source, words in _SOURCES.items():
        rows = plain[plain["source"] == source].groupby("optimizer")[seeds].mean()
        rivals = rows.loc[rows.index.intersection(_RIVALS)]
        if _SUBJECT not in rows.index or rivals.empty:
            continue
        rival = rivals.mean(axis=1).idxmin()
        advantage = paired_interval((rows.loc[rival] - rows.loc[_SUBJECT]).dropna())
        headline = headline or _judgement(advantage, OPTIMIZERS[rival].name)
        texts.append(
            f"with {words} its loss rises by {number_text(rows.loc[_SUBJECT].mean())} and that of "
            f"{OPTIMIZERS[rival].name} by {number_text(rows.loc[rival].mean())}, a difference of "
            f"{_interval(advantage)}"
        )
    if not texts:
        return "no verdict: give muon and an adamw with --optimizers, and a delay above 0"
    return f"{headline}: {'; '.join(texts)}."


def _judgement(advantage: Interval, rival: str) -> str:
    if np.isnan(advantage.low):
        return f"One seed cannot show whether Muon bears delay better than {rival}"
    if advantage.low > 0:
        return f"Muon bears delay better than {rival} at equal tuning"
    if advantage.high < 0:
        return f"Muon bears delay worse than {rival} at equal tuning"
    return f"Muon bears delay neither better nor worse than {rival}, as far as these seeds show"


def _interval(interval: Interval) -> str:
    if np.isnan(interval.low):
        return number_text(interval.mean)
    return f"{number_text(interval.low)} to {number_text(interval.high)}"


def _texts(
    config: Config, problem: Problem, summary: pd.DataFrame, table: pd.DataFrame
) -> Sequence[str]:
    names = [_label(row.optimizer, row.adaptive) for row in table.itertuples()]
    printed = table.assign(
        name=names,
        case=[f"{row.source} {row.delay:g}" for row in table.itertuples()],
        interval=[_interval(Interval(row.gap, row.low, row.high)) for row in table.itertuples()],
    )
    seeds = over_seeds(summary["seed"].nunique(), "means over")
    of_beta = table[(table["source"] == FIXED) & (table["delay"] > 0)]
    by_beta = of_beta.groupby(["optimizer", "beta1"], sort=False)["gap"].mean().reset_index()
    by_beta = by_beta.sort_values("gap").assign(
        name=lambda rows: [OPTIMIZERS[name].name for name in rows["optimizer"]]
    )
    tops = {name: rule.top for name, rule in OPTIMIZERS.items()}
    tried_ratios, best_ratios = (
        (rows["learning_rate"] / rows["optimizer"].map(tops)).round(9) for rows in (summary, table)
    )
    edges = at_the_edge(
        printed.assign(learning_rate=best_ratios),
        sorted(set(tried_ratios)),
        [f"{row['name']} at {row['case']}" for _, row in printed.iterrows()],
    )
    columns: Columns = [
        "case",
        Column("name", "optimizer"),
        Column("learning_rate", "best rate"),
        Column("shift", "of that without delay"),
        "loss",
        "gap",
        Column("interval", "its 95 % interval"),
    ]
    return [
        f"{problem.name}, training loss (nats) after {counted(config.gradients, 'gradient')}, each "
        f"at its best rate; {seeds}",
        text_of(printed, columns),
        "gap: loss minus that of the same optimizer without delay",
        "",
        "mean gap over the fixed delays, by beta1",
        text_of(by_beta, [columns[1], "beta1", "gap"]),
        edges,
    ]


def _label(optimizer: str, adaptive: bool) -> str:
    return f"{OPTIMIZERS[optimizer].name}{', adaptive' if adaptive else ''}"
