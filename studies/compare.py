"""Which method is best on a cluster: any methods side by side, by the time or the gradients they need.

Every seed has one trace for each timing that some method needs, with the same random numbers. Prints a table sorted by
the measure of your choice, says which methods are best, which are not to be told apart and how sure that is, and what
each method sends and throws away; writes traces, runs, the tables of the methods and of all learning rates, and
figures. docs/compare.md says how to read the table.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import pandas as pd

from asyncsim.base.console import counted, note
from asyncsim.base.errors import InputError, require_choice, require_positive
from asyncsim.clusters.cluster_text import describe
from asyncsim.problems import Problem
from asyncsim.problems.problem import measures
from asyncsim.study import results
from asyncsim.study.cell import Cell, timings
from asyncsim.study.config import MethodLike, StudyConfig
from asyncsim.study.finished import Finished, present, read
from asyncsim.study.outcome import ROOM, own_measures
from asyncsim.study.ranking import (
    Measure,
    as_good,
    at_the_edge,
    grid,
    ranked,
    ranked_text,
    rates_as_good,
    verdict,
)
from asyncsim.study.sweep import Result, run_cells, sweep
from asyncsim.study.target import Target, TargetOptions, say_at_start
from asyncsim.traces.trace import Trace

#: Measures that most problems have; a problem may have others of its own.
MEASURES = ("time_to_target", "gradients_to_target", "train_loss", "test_loss", "final_loss", "test_accuracy")
#: Measures of every run, whatever the problem evaluates.
_ALWAYS = ("time_to_target", "gradients_to_target", "final_loss")
#: Files beside the summary: the methods at their best learning rates, and all methods and rates.
TABLE, TUNING = results.RANKING, "tuning.csv"
#: Columns that are printed of a ranked method, before the problem's own measures and after.
_LEARNED = ("time_to_target", "gradients_to_target", "train_loss", "test_loss", "test_accuracy")
_COSTS = ("first_touch", "simulated_seconds", "staleness_mean", "discarded", "messages", "gigabytes")
#: Columns that identify a row of these tables.
_BY = ("method", "learning_rate")


@dataclass(frozen=True)
class Config(TargetOptions, StudyConfig):
    """Options of the comparison."""

    workers: int = 20
    """Workers of the cluster."""
    methods: tuple[MethodLike, ...] = ("sgd", "downpour", "adaptive_staleness", "gem")
    """Methods to compare, or your own as FILE.py:FUNCTION (see the README)."""
    # None leaves the rate to each method.
    learning_rate: float | None = None  # type: ignore[assignment]
    """Step size of a gradient, for all methods. None: each method's own default."""
    measure: str = "time_to_target"
    """What the table is sorted by, and the best learning rate chosen by: time_to_target, gradients_to_target,
    final_loss (of minibatches), or train_ or test_ and what the problem evaluates: test_accuracy, say."""
    best: Literal["least", "most"] | None = None
    """Which values of the measure are best. None: the most of accuracies, the least of losses, times and counts."""
    time_budget: float | None = None
    """Simulated time that each method has (s). None: as many gradients for all, by --steps."""

    @property
    def goal(self) -> Target:
        """The target: a value of the measure if that is a loss or an accuracy, else of the training loss."""
        measured = self.measure if self.measure.startswith(("train_", "test_")) else "train_loss"
        return self.goal_of(measured if measured.endswith(("loss", "accuracy")) else "train_loss")

    @property
    def direction(self) -> str | None:
        """Which values of the measure are best; None if --best has to say it."""
        if self.best is not None or self.measure in _ALWAYS:
            return self.best or "least"
        return {"loss": "least", "accuracy": "most"}.get(self.measure.partition("_")[2])

    @property
    def measured(self) -> Measure:
        """The measure by which methods are compared."""
        return Measure(self.measure, self.direction or "least")

    def check(self) -> None:
        """Check the options; see `StudyOptions.check`."""
        super().check()
        self.check_target()
        if self.time_budget is not None:
            require_positive("time_budget", self.time_budget, "s")


def run(config: Config) -> Result:
    """Run the comparison; see `asyncsim.study.sweep.run_cells`."""
    config.check()
    if config.tune and config.learning_rate is not None:
        note("learning_rate changes nothing beside tune")
    if config.time_budget is not None:
        config.say_ignored(("steps",), "beside --time-budget")
    rates: list[dict[str, float]] = [{"learning_rate": rate} for rate in config.tune or ()] or [{}]
    with config.computing_device():
        cells = sweep(config, rates)
        _check_measure(config, cells[0].problem)
        config.goal.check_of(cells[0].problem)
        cells = [cell._replace(goal=config.goal, seconds=config.time_budget) for cell in cells]

        def conclude(folder: Path, summary: pd.DataFrame) -> None:
            table, every = results_tables(config, cells[0], read(folder, "compare"))
            present(folder, {TABLE: table, TUNING: every}, report(config, cells[0], table, every))
            if said := say_at_start(summary, config.goal):
                note(said)

        return run_cells("compare", config, cells, conclude)


def results_tables(config: Config, cell: Cell, finished: Finished) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return a row per method at its best learning rate, the best method first, and a row per method and rate.

    Columns: those of `asyncsim.study.ranking.grid`, with all measures, the problem's own last, ``simulated_seconds`` of
    the runs, and of their traces ``staleness_mean``, ``discarded`` (share of the computations whose work was thrown
    away), ``messages`` and ``gigabytes`` (both ways; a vector of parameters each, up as much of it as the method's
    ``message_size``), and ``cut_off`` (seeds that met the target when their runs ended, but had not held it by then).
    The first table has those of `asyncsim.study.ranking.ranked`, too, the second ``best``: whether the rate is in the
    first, and ``as_good``: `asyncsim.study.ranking.as_good`.
    """
    summary = finished.summary
    # A user's own method may have no learning rate.
    rate = summary.get("method.learning_rate", float("nan"))
    summary = summary.assign(learning_rate=rate).drop_duplicates([*_BY, "seed"])
    vector = config.vector_bytes(cell.problem)
    sizes = {method.name: method.timing.size_of_message(config.bits) or 1.0 for method in cell.methods}
    of_trace = {file: _costs(finished.trace(file)) for file in summary["trace_file"].unique()}
    costs = pd.DataFrame([of_trace[file] for file in summary["trace_file"]], summary.index)
    # A worker sends a message and reads a vector of parameters.
    costs["gigabytes"] = costs["messages"] / 2 * (1 + summary["method"].map(sizes)) * vector / 1e9
    summary = summary.assign(**{name: costs[name] for name in costs})
    names = [*MEASURES, *sorted(measures(cell.problem).difference(MEASURES)), "simulated_seconds"]
    every = grid(summary, _BY, names, config.measured)
    summary["cut_off"] = config.goal.met(summary[config.goal.of]) & np.isinf(summary["time_to_target"])
    groups = summary.groupby(list(_BY), sort=False, dropna=False)
    every = every.merge(groups[list(costs)].mean().join(groups["cut_off"].sum()).reset_index(), on=list(_BY))
    every = every.assign(best=~every.duplicated("method"), as_good=as_good(every, summary, _BY, config.measured))
    table = every[every["best"]].drop(columns=["best", "as_good"])
    return ranked(table, summary, _BY, config.measured), every


def _check_measure(config: Config, problem: Problem) -> None:
    """Raise InputError if runs of the problem have no such measure, or its best values are not known."""
    found = {*_ALWAYS, *measures(problem)}
    known = [name for name in MEASURES if name in found]
    require_choice("measure", config.measure, [*known, *sorted(found.difference(known))])
    if config.best == "most" and config.measure in MEASURES[:2]:
        raise InputError(f"best = 'most': nobody wants the most of {config.measure}; leave it out")
    if config.direction is None:
        raise InputError(
            f"measure = {config.measure!r}: is the least of it best, or the most? say so with best = 'least' or 'most'"
        )


def report(config: Config, cell: Cell, table: pd.DataFrame, every: pd.DataFrame) -> str:
    """Return what the study prints: the table, the most important columns first, and what both tables say."""
    measure, many = config.measured, len(table) > 1
    own = own_measures(name for name in table if not name.endswith("_sd"))[:ROOM]
    clusters = timings(cell.cluster, cell.methods, config.bits)
    whose = {cluster: f"{', '.join(names)}: " if len(clusters) > 1 else "" for cluster, names in clusters.items()}
    described = "\n".join(f"{whose[cluster]}{describe(cluster)}" for cluster in clusters)
    length = "as many gradients taken up" if config.time_budget is None else f"{config.time_budget:g} s"
    tuned = f", each at the best of {len(config.tune)} learning rates" if config.tune else ""
    direction = f"the {measure.best} first"
    lines = [
        described,
        f"{cell.problem.name}; {length} for every method{tuned}; {counted(int(table['seeds'].max()), 'seed')}",
        f"time and gradients until {config.goal.held()}; sorted by {measure.shown}, {direction}; \u00b1: "
        "standard deviation over the seeds",
    ]
    lines.append(ranked_text(table, _BY, measure, (*_LEARNED, *own, *_COSTS), TABLE))
    if many:
        lines.append(verdict(table, list(table["method"]), measure))
        if config.tune and int(table["seeds"].max()) > 1:
            lines[-1] += "; the rates were chosen with the same seeds, which flatters all methods, noisy ones most"
    longer = "--steps" if config.time_budget is None else "--time-budget"
    lines += [
        f"{row.method}: touched by {row.touched} of {row.seeds} seeds, but {counted(row.cut_off, 'run')} ended before "
        f"it was held: take more {longer}"
        for row in table.itertuples()
        if row.cut_off
    ]
    edge = at_the_edge(table, config.tune, table["method"])
    lines += filter(None, [rates_as_good(every, measure), edge])
    return "\n".join(lines)


def _costs(trace: Trace) -> dict[str, float]:
    """Return the mean staleness of a trace, the share of its work that was discarded, and its messages both ways."""
    outcome = trace.frame["outcome"]
    thrown_away = int(outcome.isin(["discarded", "cancelled"]).sum())
    sent = int((outcome != "cancelled").sum())
    return {
        "staleness_mean": trace.summary()["staleness_mean"],
        "discarded": thrown_away / len(trace),
        "messages": 2 * sent,
    }
