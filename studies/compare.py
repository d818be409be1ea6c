"""Which method is best on a cluster: any methods side by side, by time or gradients.

Every seed has one trace for each timing that some method needs, with the same random numbers.
Prints a table sorted by the measure of your choice; reports which methods are best, which cannot be
distinguished and how sure that is, and how much each method sends and discards. Writes traces,
runs, the tables of the methods and of all learning rates, and figures. docs/compare.md explains the
table.
"""

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import pandas as pd

from asyncsim.base.console import VERDICT, counted, note
from asyncsim.base.errors import InputError, require_choice, require_positive
from asyncsim.clusters.cluster_text import describe
from asyncsim.methods import Method
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
    course,
    grid,
    ranked,
    ranked_text,
    rates_as_good,
    verdict,
)
from asyncsim.study.sweep import Result, run_cells, sweep
from asyncsim.study.target import Target, TargetOptions, say_at_start
from asyncsim.traces.trace import Trace

#: Measures that most problems have; a problem may have further ones.
MEASURES = (
    "time_to_target",
    "gradients_to_target",
    "train_loss",
    "test_loss",
    "final_loss",
    "test_accuracy",
)
#: Measures of every run, whatever the problem evaluates.
_ALWAYS = ("time_to_target", "gradients_to_target", "final_loss")
#: Files beside the summary: the methods at their best learning rates, and all methods and rates.
TABLE, TUNING = results.RANKING, "tuning.csv"
#: Printed columns of a ranked method, before and after the problem's further measures.
_LEARNED = ("time_to_target", "gradients_to_target", "train_loss", "test_loss", "test_accuracy")
_COSTS = (
    "first_touch",
    "simulated_seconds",
    "staleness_mean",
    "discarded",
    "messages",
    "gigabytes",
)
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
    """Step size of a gradient, for all methods. none: each method's own default."""
    measure: str = "time_to_target"
    """Measure that sorts the table and chooses the best learning rate: time_to_target,
    gradients_to_target, final_loss (of minibatches), or a measure of the problem's evaluation, such
    as test_accuracy."""
    best: Literal["least", "most"] | None = None
    """Which values of the measure are best. none: the most of accuracies, the least of losses,
    times and counts.
    """
    time_budget: float | None = None
    """Simulated time that each method has (s). none: as many gradients for all, by --steps."""

    @property
    def goal(self) -> Target:
        """The target: a value of the measure if that is a loss or an accuracy, else of the training
        loss.
        """
        measured = self.measure if self.measure.startswith(("train_", "test_")) else "train_loss"
        return self.goal_of(measured if measured.endswith(("loss", "accuracy")) else "train_loss")

    @property
    def direction(self) -> str | None:
        """Which values of the measure are best; None if --best must decide."""
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
            finished = read(folder, "compare")
            table, grid_table = results_tables(config, cells[0], finished)
            names, losses = list(table["method"]), ""
            if not table["reached"].any():
                losses = course(finished, table, names, _BY, config.goal)
            present(
                folder,
                {TABLE: table, TUNING: grid_table},
                report(config, cells[0], table, grid_table, losses),
            )
            if warning := say_at_start(summary, config.goal):
                note(warning)

        return run_cells("compare", config, cells, conclude)


def results_tables(
    config: Config, cell: Cell, finished: Finished
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Tabulate each method at its best learning rate, the best method first, and all methods and
    rates.

    Columns: as in `asyncsim.study.ranking.grid`, with all measures (the problem's last), and
    ``simulated_seconds`` of the runs; from their traces ``staleness_mean``, ``discarded`` (share of
    discarded computations), ``messages`` and ``gigabytes`` (see `_costs`); ``cut_off`` (seeds that
    met the target at the end of their runs, but had not held it yet). The first table also has the
    columns of `asyncsim.study.ranking.ranked`, the second ``best``, whether the rate is in the
    first, and ``as_good`` (`asyncsim.study.ranking.as_good`).
    """
    summary = finished.summary
    # A user's own method may have no learning rate.
    rate = summary.get("method.learning_rate", float("nan"))
    summary = summary.assign(learning_rate=rate).drop_duplicates([*_BY, "seed"])
    trace_of = functools.cache(finished.trace)  # methods and rates share a trace
    methods = {method.name: method for method in cell.methods}
    costs = pd.DataFrame(
        [
            _costs(cell, methods[row.method], trace_of(row.trace_file))
            for row in summary.itertuples()
        ],
        summary.index,
    )
    summary = summary.assign(**{name: costs[name] for name in costs})
    names = [*MEASURES, *sorted(measures(cell.problem).difference(MEASURES)), "simulated_seconds"]
    grid_table = grid(summary, _BY, names, config.measured)
    summary["cut_off"] = config.goal.is_met_by(summary[config.goal.of]) & np.isinf(
        summary["time_to_target"]
    )
    groups = summary.groupby(list(_BY), sort=False, dropna=False)
    grid_table = grid_table.merge(
        groups[list(costs)].mean().join(groups["cut_off"].sum()).reset_index(), on=list(_BY)
    )
    grid_table = grid_table.assign(
        best=~grid_table.duplicated("method"),
        as_good=as_good(grid_table, summary, _BY, config.measured),
    )
    table = grid_table[grid_table["best"]].drop(columns=["best", "as_good"])
    return ranked(table, summary, _BY, config.measured), grid_table


def _check_measure(config: Config, problem: Problem) -> None:
    """Raise InputError if the problem lacks the measure, or if its best values are unknown."""
    available = {*_ALWAYS, *measures(problem)}
    standard = [name for name in MEASURES if name in available]
    require_choice("measure", config.measure, [*standard, *sorted(available.difference(standard))])
    if config.best == "most" and config.measure in MEASURES[:2]:
        raise InputError(
            f"best = 'most': smaller values of {config.measure} are better; leave it out"
        )
    if config.direction is None:
        raise InputError(
            f"measure = {config.measure!r}: best values unknown; give best = 'least' or 'most'"
        )


def report(
    config: Config, cell: Cell, table: pd.DataFrame, grid_table: pd.DataFrame, losses: str
) -> str:
    """Format the study's output: the clusters, the ranking and the verdicts of both tables.

    ``losses``: as in `asyncsim.study.ranking.verdict`.
    """
    measure, several = config.measured, len(table) > 1
    problem_measures = own_measures(name for name in table if not name.endswith("_sd"))[:ROOM]
    clusters = timings(cell.cluster, cell.methods, config.bits)
    prefixes = {
        cluster: f"{', '.join(names)}: " if len(clusters) > 1 else ""
        for cluster, names in clusters.items()
    }
    described = "\n".join(
        f"{prefixes[cluster]}{describe(cluster, config.attack)}" for cluster in clusters
    )
    length = (
        "the same number of accepted gradients"
        if config.time_budget is None
        else f"{config.time_budget:g} s"
    )
    # An unfinished study may have fewer rates than --tune, and not the same number of each method.
    rates = grid_table.groupby("method")["learning_rate"].nunique()
    counts = f"{rates.max()}" if rates.min() == rates.max() else f"{rates.min()} to {rates.max()}"
    tuned = f", each at the best of {counts} learning rates" if config.tune else ""
    direction = f"the {measure.best} first"
    lines = [
        described,
        f"{cell.problem.name}; {length} for every method{tuned}; "
        f"{counted(int(table['seeds'].max()), 'seed')}",
        f"time and gradients until {config.goal.criterion()}; sorted by {measure.heading}, "
        f"{direction}; \u00b1: "
        "standard deviation over the seeds",
    ]
    lines.append(ranked_text(table, _BY, measure, (*_LEARNED, *problem_measures, *_COSTS)))
    longer = "--steps" if config.time_budget is None else "--time-budget"
    if several:
        names = list(table["method"])
        words = verdict(table, names, measure, goal=config.goal, losses=losses, longer=longer)
        lines.append(f"{VERDICT}{words}")
        if config.tune and int(table["seeds"].max()) > 1:
            lines[-1] += "; the rates were chosen with the same seeds, which favours noisy methods"
    lines += [
        f"{row.method}: touched by {row.touched} of {row.seeds} seeds, but "
        f"{counted(row.cut_off, 'run')} ended before "
        f"it was held: increase {longer}"
        for row in table.itertuples()
        if row.cut_off
    ]
    edge = at_the_edge(table, config.tune, table["method"])
    lines += filter(None, [rates_as_good(grid_table, measure), edge])
    return "\n".join(lines)


def _costs(cell: Cell, method: Method, trace: Trace) -> dict[str, float]:
    """Return the mean staleness of a run, the share of discarded computations, and its traffic.

    A worker sends a message and reads: a parameter vector each, unless the method's timing has
    other sizes. The bytes of an all-reduce are those that all workers send.
    """
    outcome, vector = trace.frame["outcome"], cell.config.vector_bytes(cell.problem)
    size = method.timing.bytes_of_visit(vector, vector, cell.config.bits)
    visits = int((outcome != "cancelled").sum()) if any(size) else 0
    sent = visits * sum(size)
    if trace.cluster is not None and trace.policy.collective is not None:
        sent = trace.cluster.all_reduced_bytes(vector) * (outcome == "applied").sum()
    return {
        "staleness_mean": trace.summary()["staleness_mean"],
        "discarded": float(outcome.isin(["discarded", "cancelled"]).mean()),
        "messages": 2 * visits,
        "gigabytes": sent / 1e9,
    }
