"""Studies that compare: declared by their options, their rows and their columns.

Each combination of the values of a `asyncsim.study.sweep.ComparisonConfig` is a cell, run with the
same random numbers. A row counts at its best learning rate, by the order of
`asyncsim.study.ranking.grid`; rows are ranked within a setting. A study is its defaults and its
additional columns::

    Config, SCALES = preset(small={"discipline": ("fifo", "lowest_rank")})
    run = Comparison("queue", measure=final_loss).run
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import optax
import pandas as pd

from asyncsim.base.console import counted, note, number_text
from asyncsim.base.errors import InputError
from asyncsim.clusters.cluster_text import describe
from asyncsim.methods import METHODS, Method
from asyncsim.problems.problem import measures
from asyncsim.replays.run import Run
from asyncsim.study.cell import Cell, CellRun, timings
from asyncsim.study.columns import Column, is_until_target, setting_text, titled
from asyncsim.study.finished import Finished, TheoryValue, present, read, trace_means, with_theory
from asyncsim.study.jobs import Job, read_summary
from asyncsim.study.outcome import own_measures
from asyncsim.study.ranking import (
    Measure,
    at_the_edge,
    grid,
    ranked,
    ranked_parts,
    spread,
    verdict,
)
from asyncsim.study.results import RANKING, TRIALS
from asyncsim.study.sweep import Result, cell_name, run_cells, sweep
from asyncsim.study.target import Target, say_at_start
from asyncsim.theory import throughput_theory
from asyncsim.traces.phases import IN_WORDS
from asyncsim.traces.trace import Trace

#: The rows at their best rates, the rows at every rate, and the costs of each cluster.
TABLE, TUNING, CLUSTERS = RANKING, "tuning.csv", "clusters.csv"
_RATE = "learning_rate"
#: Columns of every comparison, if the runs have them; a problem's own measures stand between.
_LEARNED = ("time_to_target", "gradients_to_target", "final_loss", "train_loss", "test_loss")
_COSTS = ("first_touch", "simulated_seconds", "staleness_mean", "discarded", "messages")
#: Parts of the time that failures leave.
_LOST = ("waiting", "sending", "discarded", "failed", "restoring")
#: Further tables of a study by the names of their files, and parts of the report.
Further = tuple[Mapping[str, pd.DataFrame], Sequence[str | pd.DataFrame]]


class Comparison(NamedTuple):
    """A study: its name, what its rows are, their measure and their columns."""

    name: str
    compared: tuple[str, ...] = ("method",)  #: columns that name a ranked row
    measure: Callable[[Any, Any], Measure] = lambda config, problem: Measure("time_to_target")
    columns: tuple[str | Column, ...] = ()  #: of the table, before those of every comparison
    #: Further columns of a run.
    of_run: Callable[[CellRun, Run, Trace], Mapping[str, Any]] = lambda job, run, trace: {}
    #: The cells with the study's methods.
    prepare: Callable[[Any, list[Cell]], list[Cell]] = lambda config, cells: cells
    cases: tuple[str, ...] = ()  #: columns of cases, of which the worst counts
    #: The runs that count, from the summary.
    counting: Callable[[pd.DataFrame], pd.DataFrame] = lambda summary: summary
    further: Callable[["Results"], Further] = lambda table: ({}, ())
    #: Further measurements, from the cells.
    measurements: Callable[[Any, list[Cell]], Sequence[Job]] = lambda config, cells: ()
    traces_alone: bool = False  #: whether it has an answer without methods

    def run(self, config: Any) -> Result:
        """Run the study; see `asyncsim.study.sweep.run_cells`."""
        config.check()
        config.say_ignored((_RATE,) if config.rates else (), "beside --tune")
        for length in config.lengths:
            config.say_ignored(("steps",), f"beside --{length.replace('_', '-')}")
        with config.computing_device():
            cells = self.prepare(config, sweep(config, config.points(), self.traces_alone))
            cells = [cell for cell in cells if cell.methods or not config.methods]
            if not cells:
                names = ", ".join(map(str, config.methods))
                raise InputError(f"methods = {names}: none can be run here; give others")
            problem = cells[0].problem
            goal, measure = config.goal_on(problem), self.measure(config, problem)
            goal.check()
            goal.check_of(problem)
            cells = [
                config.with_length(cell)._replace(goal=goal, of_run=self._columns) for cell in cells
            ]

            jobs = self.measurements(config, cells)
            has_trials = config.has_trials and any(cell.methods for cell in cells)
            trials = [cell.trial(config.tune_seeds) for cell in cells if has_trials]

            def at_best_rates(folder: Path) -> list[Cell]:
                tried = read_summary(folder, TRIALS)
                if tried.empty:  # all failed
                    return []
                cells[:] = chosen(tried, cells, trials, self.cases, measure)
                return cells

            def conclude(folder: Path, summary: pd.DataFrame) -> None:
                finished = read(folder, self.name)
                tried = read_summary(folder, TRIALS) if trials else None
                table = Results(self, config, cells, goal, finished, measure, tried).ranked()
                tables, parts = self.further(table)
                verdicts: list[str] = []
                if table.best is not None:
                    tables = {TABLE: table.best, TUNING: table.rates, **tables}
                    parts = [table.about(), *parts, *table.parts(verdicts)]
                present(folder, tables, *parts, verdict=verdicts)
                if "at_start" in summary and (warning := say_at_start(summary, goal)):
                    note(warning)

            also: dict[str, Any] = {"compared": list(self.compared), "measure": measure.name}
            also["tune"] = None if config.rates is None else list(config.rates)
            follow = at_best_rates if trials else None
            if trials:  # the cells that follow differ in other options only
                points = [_without(cell, _RATE) for cell in cells]
                also["cells"] = [point for i, point in enumerate(points) if point not in points[:i]]
            return run_cells(self.name, config, trials or cells, conclude, jobs, follow, also)

    def _columns(self, job: CellRun, run: Run, trace: Trace) -> dict[str, Any]:
        return {**costs(job.cell, job.method, trace), **self.of_run(job, run, trace)}


class Results(NamedTuple):
    """The results of a comparison."""

    study: Comparison
    config: Any
    cells: list[Cell]
    goal: Target
    finished: Finished
    measure: Measure
    trials: Any = None  #: the runs on which rates were chosen; None: the shown runs
    best: Any = None  #: each row of each setting at its best rate, the best first; None: no runs
    rates: Any = None  #: the same at every rate

    @property
    def keys(self) -> list[str]:
        """The columns of a row: the options that differ, and the method."""
        names = dict.fromkeys([*self.cells[0].values, "method"])
        return [name for name in names if name not in (_RATE, *self.study.cases)]

    @property
    def compared(self) -> list[str]:
        """The columns that name a ranked row."""
        return [name for name in self.study.compared if name in self.keys] or ["method"]

    @property
    def settings(self) -> list[str]:
        """The columns of a setting, within which rows are ranked."""
        return [name for name in self.keys if name not in self.compared]

    def groups(self, rows: pd.DataFrame) -> list[pd.DataFrame]:
        """Return the rows of each setting, in the order of the summary."""
        if not self.settings:
            return [rows]
        rows = self.finished.summary[self.settings].drop_duplicates().merge(rows)
        return [part for _, part in rows.groupby(self.settings, sort=False)]

    def ranked(self) -> "Results":
        """Return the results with their tables; without methods there are none."""
        if "method" not in self.finished.summary:
            return self
        study, keys = self.study, [*self.keys, _RATE]
        summary = study.counting(self.finished.summary)
        summary = _at_rates(summary).drop_duplicates([*keys, *study.cases, "seed"])
        own = [column.name if isinstance(column, Column) else column for column in study.columns]
        columns = dict.fromkeys(
            [*own, *_LEARNED, "test_accuracy", *own_measures(summary), *_COSTS, "gigabytes"]
        )
        rates = best = grid(summary, [*keys, *study.cases], columns, self.measure)
        if self.trials is not None:
            trials = _at_rates(self.trials).drop_duplicates([*keys, *study.cases, "seed"])
            rates = grid(trials, [*keys, *study.cases], columns, self.measure)
        worst = best.drop_duplicates(keys, keep="last") if study.cases else best
        best = worst.drop_duplicates(self.keys)
        runs = summary.merge(best[[*keys, *study.cases]])
        rows = [ranked(group, runs, keys, self.measure) for group in self.groups(best)]
        return self._replace(best=pd.concat(rows, ignore_index=True), rates=rates)

    def about(self) -> str:
        """Describe the clusters and the lengths of the runs."""
        config = self.config
        described: dict[str, list[str]] = {}
        for cell in self.cells:
            for cluster, names in timings(cell.cluster, cell.methods, config.bits).items():
                described.setdefault(describe(cluster, cell.config.attack), []).extend(names)
        lines = [
            f"{', '.join(dict.fromkeys(names))}: {text}" if len(described) > 1 else text
            for text, names in described.items()
        ]
        budget = config.time_budget
        length = f"{budget:g} s" if budget else "the same number of accepted gradients"
        rates = self.rates[_RATE].nunique()
        tuned = f", each at the best of {rates} learning rates" if config.rates else ""
        if self.trials is not None:
            seeds = counted(config.tune_seeds, "further seed")
            tuned += f", chosen on {seeds} over half of that"
        return "\n".join(
            [
                *lines,
                f"{self.cells[0].problem.name}; {length} for every method{tuned}; "
                f"{counted(int(self.best['seeds'].max()), 'seed')}; time and gradients until "
                f"{self.goal.criterion()}; \u00b1: standard deviation over the seeds",
            ]
        )

    def parts(self, verdicts: list[str]) -> Iterator[str | pd.DataFrame]:
        """Yield the ranked table of each setting, and the best rates at an edge; append the
        setting's verdict.
        """
        own = [name for name in own_measures(self.best) if not name.endswith("_sd")]
        columns = [*self.study.columns, *_LEARNED, "test_accuracy", *own, *_COSTS, "gigabytes"]
        is_reached = "reached" in self.best and self.best["reached"].any()
        if not (is_reached or is_until_target(self.measure.name)):
            columns = [name for name in columns if not is_until_target(str(name))]
        by = [*self.compared, *self.study.cases, _RATE]
        longer = "--steps" if self.config.time_budget is None else "--time-budget"
        what = " and ".join(self.compared)
        for group in self.groups(self.best):
            rows = group.reset_index(drop=True)
            setting = ", ".join(setting_text(name, rows[name].iloc[0]) for name in self.settings)
            names = [" on ".join(map(str, row)) for row in rows[self.compared].to_numpy()]
            yield setting
            yield from ranked_parts(rows, by, self.measure, columns)
            words = verdict(rows, names, self.measure, what, self.goal, longer)
            verdicts.append(f"{f'{setting}: ' if setting else ''}{words}")
            yield at_the_edge(rows, self.config.rates, names)
            yield self._crossing(rows, names)
            yield self._rising(rows)
            if self.trials is not None:
                yield self._at_one_rate(rows)

    def _crossing(self, rows: pd.DataFrame, names: Sequence[str]) -> str:
        """Say that the first row at the target is not the one with the lowest loss at the end."""
        loss = Measure("train_loss")
        if not is_until_target(self.measure.name) or loss.name not in rows:
            return ""
        order = np.argsort(rows[loss.name].to_numpy(), kind="stable")  # NaN comes last
        lowest, first = names[order[0]], names[0]
        by = [*self.keys, *self.study.cases, _RATE]
        runs = _at_rates(self.study.counting(self.finished.summary))
        losses = ranked(rows.iloc[order], runs.drop_duplicates([*by, "seed"]), by, loss)
        place = list(order).index(0)
        if place == 0 or losses["is_apart"].iloc[place] is False:
            return ""
        ends = [number_text(losses[loss.name].iloc[at]) for at in (0, place)]
        return (
            f"curves cross: {first} is first at the target, {lowest} has the lowest "
            f"{loss.heading} at the end, {ends[0]} against {ends[1]}"
        )

    def _rising(self, rows: pd.DataFrame) -> str:
        """Name the rows of a setting whose loss rises from the start on, with every seed."""
        runs = _at_rates(self.finished.summary).merge(rows[[*self.keys, *self.study.cases, _RATE]])
        if "rises" not in runs:
            return ""
        rising = runs.groupby(self.compared, sort=False)["rises"].all()
        names = [" on ".join(map(str, np.atleast_1d(name))) for name in rising[rising].index]
        remedy = "look at the sign of the update, or give a lower learning rate"
        return f"loss rises from the start on: {', '.join(names)}; {remedy}" if names else ""

    def _at_one_rate(self, rows: pd.DataFrame) -> str:
        """Say what the best row's rate gives with each method of a setting, in the trials."""
        rate, name = rows[_RATE].iloc[0], self.measure.name
        trials = self.rates[self.rates[_RATE] == rate].merge(rows[self.keys])
        if len(trials) < 2:
            return ""
        values = [
            f"{' on '.join(map(str, row[self.compared]))} "
            + ("diverged" if row["diverged"] else spread(row.to_frame().T, name)[0])
            for _, row in trials.iterrows()
        ]
        heading = self.measure.heading
        return (
            f"at one rate for all, {rate:g}, when rates were chosen: {heading} {', '.join(values)}"
        )


def _at_rates(summary: pd.DataFrame) -> pd.DataFrame:
    """Return runs with the learning rates of their methods; a user's method may have none."""
    return summary.assign(**{_RATE: summary.get(f"method.{_RATE}", float("nan"))})


def chosen(
    runs: pd.DataFrame,
    cells: Sequence[Cell],
    trials: Sequence[Cell],
    cases: Sequence[str],
    measure: Measure,
) -> list[Cell]:
    """Return the cells of a study with each method at the rate that is best in its trials.

    The cells of a setting, which differ in their rates only, become one. ``runs``: of the trials,
    one of each cell.
    """
    cases = [name for name in cases if name in cells[0].values]
    rates = [cell.values[_RATE] for cell in cells]
    settings = [str(_without(cell, _RATE, *cases)) for cell in cells]
    places = {cell.folder: place for place, cell in enumerate(trials)}
    place_of = [places[Path(folder).parent.name] for folder in runs["run_folder"]]
    runs = runs.assign(
        rate=[rates[place] for place in place_of], setting=[settings[place] for place in place_of]
    )
    order = grid(runs, ["setting", "method", "rate", *cases], (), measure)
    worst = order.drop_duplicates(["setting", "method", "rate"], keep="last")
    best = worst.drop_duplicates(["setting", "method"])
    best_rates = best.set_index(["setting", "method"])["rate"].to_dict()
    methods: dict[str, list[Method]] = {}
    shown: dict[str, Cell] = {}
    for cell, rate, setting in zip(cells, rates, settings, strict=True):
        values = _without(cell, _RATE)
        name = cell_name(values)
        shown.setdefault(name, cell._replace(name=name, values=values))
        methods.setdefault(name, []).extend(
            method
            for method in cell.methods
            if best_rates.get((setting, method.name), rates[0]) == rate
        )
    names = [method.name for method in cells[0].methods]
    return [
        cell._replace(methods=sorted(methods[name], key=lambda method: names.index(method.name)))
        for name, cell in shown.items()
    ]


def _without(cell: Cell, *options: str) -> dict[str, Any]:
    return {name: value for name, value in cell.values.items() if name not in options}


def costs(cell: Cell, method: Method, trace: Trace) -> dict[str, float]:
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


def final_loss(config: Any, problem: Any) -> Measure:
    """Compare by the minibatch loss at the end."""
    return Measure("final_loss")


def final_accuracy(config: Any, problem: Any) -> Measure:
    """Compare by the test accuracy at the end, or the training loss if there is none."""
    has_accuracy = "test_accuracy" in measures(problem)
    return Measure("test_accuracy", "most") if has_accuracy else Measure("train_loss")


def with_nesterov(method: Method, rate: float, momentum: float, decay: float = 0.0) -> Method:
    """Give a method local steps of SGD with Nesterov momentum, if it takes an optimizer."""
    factory = METHODS.get(method.name.partition("(")[0].removesuffix("_groups"))
    if factory and "optimizer" not in inspect.signature(factory).parameters:
        return method
    steps = optax.chain(
        optax.add_decayed_weights(decay), optax.sgd(rate, momentum, nesterov=momentum > 0)
    )
    options = {_RATE: rate, "local_momentum": momentum, "weight_decay": decay}
    return method._replace(optimizer=steps, hyperparameters={**method.hyperparameters, **options})


def clusters_table(table: Results, cluster_costs: Any = None) -> Further:
    """Return and print `costs_of_clusters`."""
    rows = costs_of_clusters(table) if cluster_costs is None else cluster_costs
    text = "means over the traces; parts of the workers' time; theory: commits/s in the long run"
    return {CLUSTERS: rows}, [text, titled(rows)]


def costs_of_clusters(
    table: Results, lost: bool = False, first: Sequence[str] = ()
) -> pd.DataFrame:
    """Tabulate the costs of each cluster: throughput beside its theory, the parts of the workers'
    time, and staleness; means over the traces.

    ``first``: further columns of the runs; ``lost``: the parts of lost time instead of the phases.
    """
    keys = [name for name in table.cells[0].values if name != _RATE]
    clusters = {tuple(cell.values[name] for name in keys): cell.cluster for cell in table.cells}
    parts = [*(f"{phase}_share" for phase in IN_WORDS), "lost_time_share"]
    parts = ["counted_share", *(f"lost_to_{cause}" for cause in _LOST)] if lost else parts
    traces, rows = table.finished.summary.drop_duplicates([*keys, "seed"]), []
    for names, group in traces.groupby(keys, sort=False) if keys else [((), traces)]:
        cluster, mean = clusters[names], trace_means(group, int(group["workers"].iloc[0]))
        law = throughput_theory(cluster)
        theory = None if law is None else TheoryValue(law.commits, law.name, law.exact)
        rows.append(
            {
                **dict(zip(keys, names, strict=True)),
                "throughput": mean["throughput"],
                "theory": with_theory(theory, mean["throughput"], 2, mean["steps"])[1],
                **group[list(first)].mean(),
                **mean[[*parts, "staleness_mean", "staleness_q99", "least", "most"]],
            }
        )
    return pd.DataFrame(rows)
