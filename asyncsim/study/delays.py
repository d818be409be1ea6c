"""What a delay does at the best rate: cases of staleness, variants of a method, all rates at once.

A case makes traces: a fixed delay, a queue, a pipeline. A variant is a factory of methods with the
values to combine, which one program computes (`asyncsim.replay_ensemble`). Each variant counts in
each case at the rate with the least mean logarithm of its loss; a run that ends above its start
counts with its start.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from asyncsim.base.console import number_text, over_seeds
from asyncsim.methods import Method
from asyncsim.problems import Problem
from asyncsim.replays.check import check_method
from asyncsim.replays.ensemble import replay_ensemble
from asyncsim.study import results
from asyncsim.study.columns import setting_text, titled
from asyncsim.study.config import StudyConfig
from asyncsim.study.finished import present
from asyncsim.study.jobs import Job, Result, Tables, executor_of, measurement, run_jobs
from asyncsim.study.outcome import ends
from asyncsim.study.ranking import (
    ROUND_OFF,
    Measure,
    at_the_edge,
    grid,
    paired_interval,
    ranked,
    verdict,
)
from asyncsim.traces.trace import Trace

#: Files of each variant in each case at its best rate, and at every rate.
BEST, RATES = "best.csv", "rates.csv"
#: The column of the tuned argument.
RATE = "learning_rate"
_LOSS = Measure("loss")


class Case(NamedTuple):
    """A source of staleness."""

    source: str
    delay: float  #: mean (versions)
    trace: Callable[[int], Trace]  #: of a seed
    is_shared: bool = True  #: whether all seeds have one trace

    @property
    def labels(self) -> dict[str, Any]:
        """The columns that name it."""
        return {"source": self.source, "delay": self.delay}


class Variant(NamedTuple):
    """A factory of methods, and the values of its arguments to combine."""

    labels: Mapping[str, Any]
    factory: Callable[..., Method]
    values: Mapping[str, Sequence[Any]]  #: the rates among them; of each argument, one or more
    rate: str = RATE  #: the argument that is tuned

    def first(self) -> Method:
        """Return the method with the first of all values."""
        return self.factory(**{name: values[0] for name, values in self.values.items()})


class Question(NamedTuple):
    """A comparison of variants in cases."""

    cases: Callable[[Any, Problem], Sequence[Case]]
    variants: Callable[[Any, Case], Sequence[Variant]]
    columns: Sequence[str]  #: that name a variant: labels, and arguments with several values
    reference: Mapping[str, Any]  #: values of some columns: the row that the others are relative to
    compared: Sequence[str]  #: columns that name a row of the verdict
    what: str  #: the noun for such a row
    settings: Sequence[str]  #: columns within which the verdict compares, over all other columns
    ranks: str = "log"  #: what it compares: ``"log"``, the loss, or ``"ratio"``, to the reference
    evaluations: int = 1  #: of a run, after the one at its start
    last: int = 1  #: evaluations at the end whose mean is the loss

    def run(self, config: StudyConfig) -> Result:
        """Run the study; see `asyncsim.study.jobs.run_jobs`."""
        with config.computing_device():
            problem = config.make_problem()
            cases = self.cases(config, problem)
            methods = {}
            for case in cases:
                for variant in self.variants(config, case):
                    method = variant.first()
                    check_method(method, problem.shapes)
                    methods[method.name] = method
            jobs = [job for case in cases for job in self._jobs(config, problem, case)]
            record = config.record(list(methods.values()), problem)
            record = {**record, "columns": list(self.columns)}

            def conclude(folder: Path, summary: pd.DataFrame) -> None:
                tables = tabulate(summary, ["source", "delay", *self.columns], self.reference)
                present(
                    folder,
                    {BEST: tables.best, RATES: tables.rates},
                    f"{problem.name}, training loss at the best rate, "
                    f"{over_seeds(summary['seed'].nunique(), 'geometric means over')}",
                    titled(tables.best.drop(columns=["low", "high"])),
                    "ratio: of the loss to the reference's, each at its best rate, with its 95 % "
                    "interval; untuned: at the reference's best rate",
                    *self._edges(tables),
                    verdict=list(self.verdicts(tables.pairs)),
                )

            executor = executor_of(config, [(problem, config.workers)])
            return run_jobs("delays", config, record, jobs, executor, conclude)

    def _jobs(self, config: StudyConfig, problem: Problem, case: Case) -> list[Job]:
        """Return a job for each variant; for each of its seeds if they have traces of their own."""
        all_seeds, jobs = range(config.seeds), []
        for seeds in [all_seeds] if case.is_shared else [range(k, k + 1) for k in all_seeds]:
            for variant in self.variants(config, case):
                labels = {**case.labels, **variant.labels}
                labels |= {} if case.is_shared else {"seed": seeds[0]}
                name = ", ".join(setting_text(*label) for label in labels.items())
                arguments = config, problem, case, variant, seeds, self
                jobs.append(measurement(name, _losses, *arguments, labels=labels))
        return jobs

    def _edges(self, tables: "Tabulated") -> list[str]:
        """Return notices of best rates at the ends of those that were tried for a variant."""
        notices = []
        for _, rows in tables.best.groupby(list(self.columns), sort=False):
            tried = tables.rates.merge(rows[list(self.columns)].drop_duplicates())[RATE]
            names = names_of(rows, ["source", "delay", *self.columns]).tolist()
            notices.append(at_the_edge(rows, sorted(set(tried)), names))
        return notices

    def verdicts(self, pairs: pd.DataFrame) -> Iterator[str]:
        """Yield the verdict of each setting; ``pairs``: as in `Tabulated`."""
        compared, settings = list(self.compared), list(self.settings)
        pairs = pairs[pairs["delay"] > 0] if self.ranks == "ratio" else pairs
        for _, part in pairs.groupby(settings, sort=False):
            rows = np.exp(part.groupby([*compared, "seed"], sort=False)[self.ranks].mean())
            rows = rows.rename("loss").reset_index().assign(status="finished")
            table = ranked(grid(rows, compared, (), _LOSS), rows, compared, _LOSS)
            words = verdict(table, names_of(table, compared).tolist(), _LOSS, self.what)
            yield f"{names_of(part, settings).iloc[0]}: {words}"


class Tabulated(NamedTuple):
    """The tables of a question."""

    best: pd.DataFrame  #: a row for each case and variant, at its best rate
    rates: pd.DataFrame  #: the mean logarithm of the loss at every rate
    pairs: pd.DataFrame  #: ``log`` and ``ratio`` (a logarithm) of each seed at the best rates


def tabulate(summary: pd.DataFrame, keys: Sequence[str], reference: Mapping[str, Any]) -> Tabulated:
    """Tabulate the loss of each row at its best rate, and relative to the reference's.

    ``keys``: the columns that name a row. Columns of the best rows: the keys, the rate, ``loss``
    (geometric mean over the seeds), ``ratio`` to the loss of the reference, with ``low`` and
    ``high``, its 95 % interval, paired over the seeds, and all three as text (``times``);
    ``untuned``, the ratio at the reference's best rate.
    """
    keys, shared = list(keys), [name for name in keys if name not in reference]
    runs = summary[summary["status"] != results.FAILED]
    losses = runs[["train_loss", "first_loss"]].min(axis=1)
    runs = runs.assign(log=np.log(losses.clip(lower=ROUND_OFF)))
    rates = runs.groupby([*keys, RATE], sort=False)["log"].mean().reset_index()
    best = rates.loc[rates.groupby(keys, sort=False)["log"].idxmin(), [*keys, RATE]]
    at_best = runs.merge(best)[[*keys, RATE, "seed", "log"]]
    of_reference = at_best[(at_best[list(reference)] == pd.Series(reference)).all(axis=1)]
    of_reference = of_reference[[*shared, RATE, "seed", "log"]]
    pairs = at_best.merge(of_reference, "left", [*shared, "seed"], suffixes=("", "_of"))
    pairs = pairs.assign(ratio=pairs["log"] - pairs["log_of"])
    untuned = runs.merge(of_reference, on=[*shared, RATE, "seed"], suffixes=("", "_of"))
    untuned = (untuned["log"] - untuned["log_of"]).groupby([untuned[name] for name in keys]).mean()
    groups = pairs.groupby(keys, sort=False)
    table = groups["log"].mean().to_frame("loss")
    table[["ratio", "low", "high"]] = list(groups["ratio"].apply(paired_interval))
    table = np.exp(table.assign(untuned=untuned))
    table.insert(0, RATE, groups[RATE].first())
    table.insert(5, "times", list(map(_times, table["ratio"], table["low"], table["high"])))
    return Tabulated(table.reset_index(), rates, pairs)


def _times(ratio: float, low: float, high: float) -> str:
    between = f" ({number_text(low)} to {number_text(high)})" if np.isfinite(low) else ""
    return f"{number_text(ratio)}{between}" if np.isfinite(ratio) else "-"


def names_of(table: pd.DataFrame, columns: Sequence[str]) -> pd.Series:
    """Return the values of some columns of each row in words; zeros are left out."""

    def name(row: pd.Series) -> str:
        values = list(zip(columns, row, strict=True))
        named = [pair for pair in values if pair[1] != 0] or values[-1:]
        return " ".join(
            value if isinstance(value, str) else f"{column.replace('_', ' ')} {value:g}"
            for column, value in named
        )

    return table[list(columns)].apply(name, axis=1)


def _losses(
    config: StudyConfig,
    problem: Problem,
    case: Case,
    variant: Variant,
    seeds: range,
    question: Question,
) -> Tables:
    """Train a variant at all its values on the trace of a case; return a row for each run."""
    trace = case.trace(seeds[0])
    values: dict[str, Any] = {name: list(several) for name, several in variant.values.items()}
    with config.computing_device():
        runs = replay_ensemble(
            trace,
            variant.factory,
            problem,
            seeds=seeds,
            precision=config.precision,
            evaluate_every=math.ceil(len(trace) / (question.evaluations * trace.workers)),
            progress=False,
            **values,
        )
    staleness = float(trace.frame["staleness"].mean())
    labels = {**case.labels, **variant.labels, "staleness_mean": staleness}
    rows = []
    for run in runs:
        arguments = {name: run.config["hyperparameters"][name] for name in values}
        rate = {RATE: arguments.pop(variant.rate), "seed": run.config["seed"]}
        rows.append({**labels, **arguments, **rate, **ends(run, question.last)})
    return {results.SUMMARY: rows}
