"""Which layer bears staleness: the same mean put into one layer, into all, or along a pipeline.

Every group of layers, a stage, has its own staleness; all stages are committed at one instant.
The staleness lies in one stage, in all of them equally, or falls from the first stage to none in
the last, as in PipeDream with stashed weights, or rises the same way. Its mean over the stages is
equal, and each case counts at its best learning rate.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from asyncsim.base.calls import called
from asyncsim.base.console import counted, number_text, over_seeds
from asyncsim.base.errors import InputError, require_count
from asyncsim.methods import METHODS, Method
from asyncsim.problems import PROBLEMS, Problem
from asyncsim.problems.partition import partition
from asyncsim.replays.ensemble import replay_ensemble
from asyncsim.study import results
from asyncsim.study.config import JobOptions
from asyncsim.study.finished import present
from asyncsim.study.jobs import Result, Tables, executor_of, measurement, run_jobs
from asyncsim.study.ranking import Measure, at_the_edge, grid, ranked, ranked_text, verdict
from asyncsim.study.sweep import check_values
from asyncsim.study.target import check_rates
from asyncsim.traces.prescription import prescribed

#: Files beside the summary of runs: each case at its best rate, and at every rate.
PROFILES, RATES = "profiles.csv", "rates.csv"
MEASURE = Measure("train_loss")
#: Evaluations of a run; of the last ones the mean counts.
_EVALUATIONS, _LAST = 20, 5
_KEYS = ["method", "profile", "learning_rate"]


@dataclass(frozen=True)
class Config(JobOptions):
    """Options of the pipeline study."""

    stages: int = 4
    """Stages, each with a run of the problem's layers; 2 or more."""
    groups: tuple[str, ...] = ()
    """Parts of the problem's tree that form the stages, in place of --stages, for a problem whose
    layers have no order: embedding+positions block1 head.
    """
    staleness: int = 6
    """Mean staleness over the stages (versions)."""
    workers: int = 1
    """Workers that take turns, each with minibatches of its own."""
    problem: str = "digits(hidden=[64, 64, 64])"
    """A problem, with arguments."""
    methods: tuple[str, ...] = ("downpour",)
    """Methods, each with all profiles, with arguments: weight_prediction async_nesterov
    "server_optimizer(momentum=0.9)"."""
    tune: tuple[float, ...] = tuple(0.025 * 2 ** (k / 2) for k in range(11))
    """Learning rates to try in each case, which counts at its best."""
    commits: int = 800
    """Commits of a run."""
    seeds: int = 5
    """Number of seeds: 0, 1, ... All cases have the same minibatches."""

    def check(self) -> None:
        """Check the options."""
        super().check()
        for name in ("stages", "staleness", "workers", "commits", "seeds"):
            require_count(name, getattr(self, name))
        check_rates(self.tune)
        check_values("methods", self.methods)
        stages = len(self.groups) or self.stages
        if stages < 2:
            raise InputError(f"stages = {stages}: one stage has nothing to compare; give 2 or more")


def profiles(stages: int, staleness: int) -> dict[str, list[int]]:
    """Return the staleness of each stage in all cases, by name; the mean is ``staleness``.

    Raises InputError for a mean with which the pipeline's would not be whole numbers.
    """
    if 2 * staleness % (stages - 1):
        raise InputError(
            f"staleness = {staleness}: with {stages} stages the pipeline's has no whole numbers of "
            f"versions; give a multiple of {(stages - 1) // (1 + stages % 2)}"
        )
    falling = [2 * staleness * (stages - 1 - stage) // (stages - 1) for stage in range(stages)]
    in_one = {
        f"stage {stage}": [stages * staleness * (stage == other) for other in range(stages)]
        for stage in range(stages)
    }
    return {
        "none": [0] * stages,
        **in_one,
        "all": [staleness] * stages,
        "pipeline": falling,
        "reversed": falling[::-1],
    }


def run(config: Config) -> Result:
    """Run the study; see `asyncsim.study.jobs.run_jobs`.

    Its summary has a row per method, profile, rate and seed.
    """
    config.check()
    with config.computing_device():
        problem = called("problem", config.problem, PROBLEMS)
        groups = stages_of(config, problem)
        for text in config.methods:
            for rate in config.tune:
                _factory(text)(learning_rate=rate)
        record = {**config.options_record("pipeline"), "stages_of": list(groups)}
        seeds = counted(config.seeds, "seed")
        jobs = [
            measurement(
                f"{text}, {name}, {seeds}",
                *(_losses, config, problem, text, name, dict(zip(groups, delays, strict=True))),
                labels={"method": text, "profile": name},
            )
            for text in config.methods
            for name, delays in profiles(len(groups), config.staleness).items()
        ]
        executor = executor_of(config, [(problem, config.workers)])
        conclude = functools.partial(_conclude, config, groups)
        return run_jobs("pipeline", config, record, jobs, executor, conclude)


def stages_of(config: Config, problem: Problem) -> tuple[str, ...]:
    """Return the groups of tensors of each stage."""
    argument = "groups" if config.groups else "stages"
    return partition(problem.shapes, config.groups or config.stages, argument, by_layer=True).names


def _factory(text: str) -> Callable[..., Method]:
    """Return the function from a learning rate to the method that a text names."""
    if "learning_rate" in text:
        raise InputError(f"methods = {text!r}: its rate is tuned; leave it out, and give --tune")

    def make(learning_rate: float) -> Method:
        factories = {
            name: functools.partial(factory, learning_rate=learning_rate)
            for name, factory in METHODS.items()
        }
        method: Method = called("methods", text, factories)
        return method

    return make


def _losses(
    config: Config, problem: Problem, text: str, profile: str, staleness: dict[str, int]
) -> Tables:
    """Replay a profile with one method at all rates and seeds; return the rows."""
    with config.computing_device():
        runs = replay_ensemble(
            prescribed(staleness, config.commits, config.workers),
            _factory(text),
            problem,
            seeds=range(config.seeds),
            evaluate_every=max(1, config.commits // (_EVALUATIONS * config.workers)),
            progress=False,
            learning_rate=config.tune,
        )
    rows = [
        {
            "method": text,
            "profile": profile,
            "learning_rate": run.config["hyperparameters"]["learning_rate"],
            "seed": run.config["seed"],
            "status": run.status,
            "train_loss": float(run.evaluations["train_loss"].iloc[-_LAST:].mean()),
        }
        for run in runs
    ]
    return {results.SUMMARY: rows}


def profile_table(summary: pd.DataFrame) -> pd.DataFrame:
    """Return a row per method and profile at its best rate, the best profile of a method first.

    ``relative``: the geometric mean over the seeds of the loss relative to no staleness.
    """
    tables = []
    for method, runs in summary.groupby("method", sort=False):
        best = grid(runs, _KEYS, (), MEASURE).drop_duplicates("profile")
        losses = best[_KEYS].merge(runs).assign(log=lambda rows: np.log(rows["train_loss"]))
        logs = losses.groupby("profile")["log"].mean()
        table = ranked(best, runs, _KEYS, MEASURE)
        relative = np.exp(table["profile"].map(logs) - logs["none"])
        tables.append(table.assign(method=method, relative=relative))
    return pd.concat(tables, ignore_index=True)


def _conclude(config: Config, groups: tuple[str, ...], folder: Path, summary: pd.DataFrame) -> None:
    summary = summary[summary["status"] != results.FAILED]
    table = profile_table(summary)
    tables = {PROFILES: table, RATES: grid(summary, _KEYS, (), MEASURE)}
    stages = "; ".join(f"{number}: {group}" for number, group in enumerate(groups))
    texts = [
        f"{config.problem}, training loss in the last quarter of {config.commits:,} commits, "
        f"mean staleness {config.staleness}; {over_seeds(config.seeds, 'means over')}\n"
        f"stages {stages}"
    ]
    answers = []
    for method, rows in table.groupby("method", sort=False):
        rows = rows.reset_index(drop=True)
        shown = ranked_text(rows, ["profile", "learning_rate"], MEASURE, ["relative"])
        texts += ["", f"{method}:", shown, verdict(rows, rows["profile"], MEASURE, "profile")]
        texts += [at_the_edge(rows, config.tune, list(rows["profile"]))]
        answers.append(
            answer(rows) if table["method"].nunique() == 1 else f"{method}: {answer(rows)}"
        )
    present(folder, tables, *texts, verdict="; ".join(answers))


def answer(table: pd.DataFrame) -> str:
    """Return one sentence: the stage that bears staleness worst, and the cost of the profiles.

    ``table``: the rows of one method in `profile_table`.
    """
    cost = dict(zip(table["profile"], table["relative"], strict=True))
    equal = table.loc[table["apart_from_best"].eq(False), "profile"]
    of_stages = [name for name in cost if name.startswith("stage ")]
    if table["seeds"].max() == 1:
        return "One seed cannot show which stage bears staleness"
    if set(of_stages) <= {table["profile"].iloc[0], *equal}:
        return "No stage can be distinguished from the others by these seeds; give more"
    worst = max((name for name in cost if name.startswith("stage ")), key=lambda name: cost[name])
    times = {name: f"{number_text(cost[name], 2)} times" for name in cost}
    others = ", ".join(f"{name} {times[name]}" for name in ("all", "pipeline", "reversed"))
    best = table["profile"].iloc[0]
    return (
        f"{worst.capitalize()} bears staleness worst: {times[worst]} the loss without staleness, "
        f"each at its best rate; {others}; best: {best}, not distinguishable from it: "
        f"{', '.join(equal) or 'no other'}."
    )
