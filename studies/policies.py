"""Which timing policy a cluster should have: what each costs, and what it does to learning.

Clusters that differ only in the policy have the same random numbers. By default every worker is
five times as slow once in twenty local steps. Prints for each policy the accepted commits per
second beside the theoretical maximum, the parts of the workers' time (computing accepted gradients,
computing in vain, sending, waiting, held), the spread of their shares and the staleness; and for
each method the time to a training loss, the best policies, and how sure that is. Writes these as
tables, beside traces, runs, a summary and figures. Without any method (--methods, and nothing after
it) it computes no gradients: traces, their table and its figure.
"""

import dataclasses
import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pandas as pd

from asyncsim.base.console import LEAST_SHARE, VERDICT, counted, note, table_text
from asyncsim.base.errors import InputError
from asyncsim.clusters.cluster import Cluster
from asyncsim.clusters.policy import Policy, as_policy
from asyncsim.study.cell import meet
from asyncsim.study.columns import Column, Columns, with_titles, without_constants
from asyncsim.study.config import LawLike, MethodLike, PolicyLike
from asyncsim.study.finished import Finished, TheoryValue, present, read, trace_means, with_theory
from asyncsim.study.ranking import (
    Measure,
    at_the_edge,
    course,
    grid,
    ranked,
    ranked_text,
    verdict,
)
from asyncsim.study.sweep import Result, SweepConfig, run_cells, sweep
from asyncsim.study.target import TargetOptions, say_at_start
from asyncsim.theory import throughput_theory
from asyncsim.traces.phases import Phases

#: Files with the policies, the methods under each at their best rates, and all learning rates.
POLICIES, TIMES, TUNING = "policies.csv", "times.csv", "tuning.csv"
#: Columns that identify a cluster, and a run.
_CLUSTER, _RUNS = (
    ("workers", "window", "policy"),
    ("workers", "window", "policy", "method", "learning_rate"),
)


@dataclass(frozen=True)
class Config(TargetOptions, SweepConfig):
    """Options of the study of policies."""

    varied: ClassVar[tuple[str, ...]] = ("workers", "window", "policy")

    workers: tuple[int, ...] = (20,)
    """Workers of the clusters, one after the other."""
    # A sequence, unlike in the base class: each cell has one value, or none yet.
    window: tuple[int, ...] = (1,)  # type: ignore[assignment]
    """Local steps per communication, one after the other."""
    policy: tuple[PolicyLike, ...] | None = None  # type: ignore[assignment]  # as window
    """Policies of the server, one after the other; the end of --help lists them.
    By default asynchronous, bounded_staleness(3), barrier, barrier of four fifths of each cluster's
    workers, first_of half of them, and discard_stale(workers)."""
    compute: LawLike = "mixture([gamma(mean=1, cv=0.2), gamma(mean=5, cv=0.2)], [0.95, 0.05])"
    """Law of the time of a local step (s); "[constant(1)]*18 + [constant(3)]*2" gives one per
    worker.
    """
    methods: tuple[MethodLike, ...] = ("downpour",)
    """Methods to compare, without a required policy; also yours as FILE.py:FUNCTION (see the
    README). Nothing after --methods: the timing alone."""

    def check(self) -> None:
        """Check the options; see `StudyOptions.check`."""
        super().check()
        self.check_target()
        policies = [as_policy(policy) for policy in self.policy or ()]
        if len(set(policies)) < len(policies):
            raise InputError(
                f"policy = {', '.join(map(_text, self.policy or ()))}: one comes twice; give each "
                "once"
            )
        for values in self.points():
            self.at(**values).check()

    def points(self) -> list[dict[str, Any]]:
        """Return policy, workers and window of each cluster."""
        return [
            {"policy": policy, "workers": n, "window": window}
            for n in self.workers
            for window in self.window
            for policy in map(_text, self.policy or _usual_policies(n))
        ]


SCALES = {
    "small": Config(),
    "paper": Config(scale="paper", problem="mnist", steps=938, evaluate_every=94),
}


def run(config: Config) -> Result:
    """Run the study; see `asyncsim.study.sweep.run_cells`."""
    config.check()
    if not config.methods:
        config.say_ignored(
            [field.name for field in dataclasses.fields(TargetOptions)], "without methods"
        )
    elif config.tune:
        config.say_ignored(("learning_rate",), "beside --tune")
    rates: list[dict[str, Any]] = [
        {"learning_rate": rate} for rate in (config.tune or ()) if config.methods
    ] or [{}]
    with config.computing_device():
        cells = sweep(
            config,
            [{**point, **rate} for point in config.points() for rate in rates],
            traces_alone=True,
        )
        config.goal.check_of(cells[0].problem)
        cells = [cell._replace(goal=config.goal) for cell in cells]
        for method in cells[0].methods:
            if any(meet(cell.cluster, method.timing) != cell.cluster for cell in cells):
                raise InputError(
                    f"methods = {method.name}: requires a certain timing, but this study compares "
                    "policies; give "
                    "methods without one, or run the study compare"
                )
        clusters = {tuple(cell.values[name] for name in _CLUSTER): cell.cluster for cell in cells}
        conclude = functools.partial(_conclude, clusters, config)
        return run_cells("policies", config, cells, conclude)


def policy_table(summary: pd.DataFrame, clusters: dict[tuple[Any, ...], Cluster]) -> pd.DataFrame:
    """Tabulate the cost of each policy: a row for each, with means over its traces.

    Columns: ``workers``, ``window``, ``policy``; ``throughput`` (accepted commits/s); ``theory``,
    its long-run value (if ``exact``) or upper bound, by the law ``theory_name``; ``versions`` per
    second; ``computing``, ``sending``, ``waiting``, ``served``, ``held`` and ``returning``, the
    parts of the workers' time; ``in_vain``, the part of computing that is discarded; ``steps``,
    commits per worker of a trace; ``least`` and ``most``, a worker's commits relative to the mean;
    ``staleness_mean``, ``staleness_q99``.
    """
    rows = []
    traces = summary.drop_duplicates([*_CLUSTER, "seed"])
    for names, group in traces.groupby(list(_CLUSTER), sort=False):
        mean = trace_means(group, names[0])
        theory = throughput_theory(clusters[names])
        rows.append(
            {
                **dict(zip(_CLUSTER, names, strict=True)),
                "throughput": mean["throughput"],
                "theory": float("nan") if theory is None else theory.commits,
                "theory_name": "" if theory is None else theory.name,
                "exact": theory is not None and theory.exact,
                "versions": (group["trace.versions"] / group["trace.duration"]).mean(),
                **{phase: mean[f"{phase}_share"] for phase in Phases._fields},
                "in_vain": mean["lost_time_share"],
                "least": mean["least"],
                "most": mean["most"],
                "staleness_mean": mean["staleness_mean"],
                "staleness_q99": mean["staleness_q99"],
                "steps": mean["steps"],
            }
        )
    return pd.DataFrame(rows)


def times_tables(summary: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Tabulate each method's time to the target under each policy at its best rate, and at every
    rate.

    Grouped by number of workers and method, the best policy and window first. Columns: as in
    `asyncsim.study.ranking.grid` with ``time_to_target`` (s, simulated), and the final
    ``final_loss`` (of minibatches), ``train_loss`` and ``test_accuracy`` (if the problem has it),
    at ``simulated_seconds``. The first table also has the columns of
    `asyncsim.study.ranking.ranked` within each group.
    """
    measure = Measure("time_to_target")
    summary = summary.assign(learning_rate=summary.get("method.learning_rate", float("nan")))
    summary = summary.drop_duplicates([*_RUNS, "seed"])
    grid_table = grid(
        summary, _RUNS, ("final_loss", "train_loss", "test_accuracy", "simulated_seconds"), measure
    )
    best = grid_table.drop_duplicates([*_CLUSTER, "method"])
    groups = [
        ranked(
            best[(best["method"] == method) & (best["workers"] == workers)], summary, _RUNS, measure
        )
        for workers in summary["workers"].unique()
        for method in summary["method"].unique()
    ]
    return pd.concat([group for group in groups if len(group)], ignore_index=True), grid_table


def _conclude(
    clusters: dict[tuple[Any, ...], Cluster], config: Config, folder: Path, summary: pd.DataFrame
) -> None:
    policies = policy_table(summary, clusters)
    tables, texts = {POLICIES: policies}, [_policies_text(policies, summary["seed"].nunique())]
    if "method" in summary:
        tables[TIMES], tables[TUNING] = times_tables(summary)
        texts.append(_times_text(tables[TIMES], config, read(folder, "policies")))
    present(folder, tables, *texts)
    if "method" in summary and (warning := say_at_start(summary, config.goal)):
        note(warning)


def _policies_text(policies: pd.DataFrame, traces: int) -> str:
    policies = policies.assign(accepted=policies["computing"] - policies["in_vain"])
    idle = [
        part
        for part in Phases._fields
        if part != "computing" and policies[part].max() >= LEAST_SHARE
    ]
    shared, rest = without_constants(policies, ("workers", "window"))
    columns: Columns = [
        *("workers", "window", "policy", "throughput", Column("versions", "versions/s")),
        *("staleness_mean", "staleness_q99", "accepted", "in_vain", *idle),
    ]
    printed = with_titles(rest, columns)
    theories = [
        TheoryValue(row.theory, row.theory_name, row.exact) if row.theory_name else None
        for row in policies.itertuples()
    ]
    rows = zip(theories, policies["throughput"], policies["steps"], strict=True)
    printed["theory"] = [
        with_theory(theory, throughput, 2, steps)[1] or "-" for theory, throughput, steps in rows
    ]
    printed["commits of a worker"] = [
        f"{row.least:.2f} to {row.most:.2f}" for row in policies.itertuples()
    ]
    return (
        f"{shared}means over {counted(traces, 'trace')}; theory: commits/s in the long run, which "
        "short traces may exceed; parts of the workers' time; accepted, in vain: computing "
        "gradients that the server accepts, or not; staleness in versions; commits of a worker: "
        "the least and the most, relative to the mean\n"
        f"{table_text(printed)}\n"
    )


def _times_text(times: pd.DataFrame, config: Config, finished: Finished) -> str:
    measure, texts = Measure("time_to_target"), []
    for (workers, method), group in times.groupby(["workers", "method"], sort=False):
        table = group.reset_index(drop=True)
        one_window = table["window"].nunique() == 1
        names = [
            row.policy if one_window else f"{row.policy} with window {row.window}"
            for row in table.itertuples()
        ]
        by = ["policy", *([] if one_window else ["window"]), "learning_rate"]
        columns = ("first_touch", "final_loss", "train_loss", "test_accuracy", "simulated_seconds")
        edge = at_the_edge(table, config.tune, names)
        goal = config.goal
        losses = "" if table["reached"].any() else course(finished, table, names, _RUNS, goal)
        texts.append(
            f"{method}, {counted(int(workers), 'worker')}: simulated time until "
            f"{config.goal.criterion()}\n"
            f"{ranked_text(table, by, measure, columns)}\n"
            f"{VERDICT}{verdict(table, names, measure, 'policy', goal, losses)}"
            + (f"\n{edge}" if edge else "")
        )
    return "\n\n".join(texts)


def _usual_policies(workers: int) -> tuple[str, ...]:
    """Return the default policies for a number of workers."""
    most_workers, half = max(1, 4 * workers // 5), max(1, workers // 2)
    sized = (f"barrier({most_workers})", f"first_of({half})", f"discard_stale({max(1, workers)})")
    return ("asynchronous", "bounded_staleness(3)", "barrier", *sized)


def _text(policy: str | Policy) -> str:
    """Format a policy for the tables: the user's text, or its call."""
    return policy.strip() if isinstance(policy, str) else str(policy)
