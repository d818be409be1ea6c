"""Outcomes of runs: a row for each run, and a table of the means over seeds."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pandas as pd

from asyncsim.base.console import counted, number_text, over_seeds
from asyncsim.replays.run import Run
from asyncsim.study.columns import axis_of, text_of
from asyncsim.study.ranking import are_equal
from asyncsim.study.results import SUMMARY
from asyncsim.traces.trace import Trace

#: Share of the commits, at the end, over which "final" minibatch losses and energy ratios are
#: taken.
FINAL_SHARE = 0.1
#: Columns of a summary that its table shows: before the problem's own measures, and after.
_FIRST = ("final_loss", "train_loss", "test_loss", "test_accuracy")
_LAST = ("energy_ratio", "median_pi", "simulated_seconds", "trace.throughput")
#: A problem's own measures for which a table has room.
ROOM = 4


def outcome(run: Run, trace: Trace) -> dict[str, Any]:
    """Return the outcome of a run as columns.

    ``final_loss`` is the mean minibatch loss of the last tenth of the commits, ``energy_ratio`` the
    `late_energy_ratio` if energies are recorded, and ``median_...`` the mean of the recorded
    medians of a method's diagnostic in that tenth, or the last median if none is that late.
    ``train_...`` and ``test_...`` are of the last evaluation. NaN if the run diverged.
    """
    total = len(trace.accepted)
    last = _last(run.commits, total)
    evaluated = run.evaluations.iloc[-1].filter(regex="^(train|test)_").to_dict()
    median_rows = run.diagnostics[
        (run.diagnostics["quantile"] == 0.5) & (run.diagnostics["tensor"] == "")
    ]
    late = median_rows[
        median_rows["commit"] >= min(last["commit"].iloc[0], median_rows["commit"].max())
    ]
    medians = late.groupby("quantity", sort=False)["value"].mean().add_prefix("median_").to_dict()
    with np.errstate(over="ignore"):  # of losses near the largest number; most such runs diverge
        loss = last["loss"].mean()
    energies = (
        {"energy_ratio": late_energy_ratio(run.commits, total)}
        if "central_energy" in run.commits
        else {}
    )
    ended = {"final_loss": loss, **evaluated, **energies, **medians}
    if run.diverged_at is not None:
        ended = dict.fromkeys(ended, np.nan)
    return {
        "status": run.status,
        "diverged_at": run.diverged_at,
        **ended,
        "simulated_seconds": float(run.commits["commit_time"].iloc[-1]),
    }


def ends(run: Run, last: int = 1) -> dict[str, Any]:
    """Return status, first and final training loss of a run as columns; infinite if it diverged.

    ``last``: evaluations at the end whose mean is the final loss.
    """
    losses = run.evaluations["train_loss"]
    return {
        "status": run.status,
        "first_loss": float(losses.iloc[0]),
        "train_loss": float(losses.iloc[-last:].mean()) if run.diverged_at is None else np.inf,
    }


def energy_ratios(commits: pd.DataFrame) -> pd.Series:
    """Return the ratio of central to proxy energy of each commit.

    NaN if the central variable had not moved since the worker's read, as at most commits of a
    server that waits for several messages: such commits say nothing about the energy of its steps.
    """
    central = commits["central_energy"]
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        return (central / commits["proxy_energy"]).where(central > 0)


def late_energy_ratio(commits: pd.DataFrame, total: int) -> float:
    """Return the median of `energy_ratios` over the last tenth of ``total`` commits.

    The last ratio if none is that late; NaN without any ratio.
    """
    ratios = energy_ratios(commits).dropna()
    if ratios.empty:
        return float("nan")
    late = ratios[ratios.index >= _last(commits, total).index[0]]
    return float((late if len(late) else ratios.tail(1)).median())


def _last(commits: pd.DataFrame, total: int) -> pd.DataFrame:
    return commits.tail(max(1, round(FINAL_SHARE * total)))


def own_measures(columns: Iterable[str]) -> list[str]:
    """Return the columns of a problem's measures that tables show beside losses and the test
    accuracy.

    Measures of the test data, or else of the training data.
    """
    of_test = [name for name in columns if name.startswith("test_")]
    measured = of_test or [name for name in columns if name.startswith("train_")]
    return [name for name in measured if name not in _FIRST]


def outcome_table(summary: pd.DataFrame, by: Sequence[str] = ("method",)) -> str:
    """Return a table of the outcomes of a study's runs, one line for each combination of some
    columns.

    All means are over the finished seeds; the first column counts the diverged seeds. A line below
    names the problem's measures for which there is no room.
    """
    specific = own_measures(summary)
    columns = [name for name in (*_FIRST, *specific[:ROOM], *_LAST) if name in summary]
    keys = [summary[name] for name in by]
    means = summary[columns].where(summary["status"] == "finished").groupby(keys, sort=False).mean()
    runs = summary.groupby(list(by), sort=False)["status"]
    means.insert(
        0, "diverged", runs.agg(lambda status: f"{(status == 'diverged').sum()} of {len(status)}")
    )
    text = text_of(means.reset_index())
    return f"{text}\nalso in {SUMMARY}: {', '.join(specific[ROOM:])}" if specific[ROOM:] else text


def leading(summary: pd.DataFrame, by: Sequence[str] = ("method",), column: str = "") -> str:
    """Say in one sentence which method has the lowest mean of a column in each setting.

    ``by``: columns that distinguish the means, ``"method"`` among them. ``column``: by default the
    training loss. Of means that are equal up to round-off none is the lowest. Diverged runs are
    left out; methods of which all runs diverged are named.
    """
    column = column or next(name for name in ("train_loss", *_FIRST) if name in summary)
    settings = [name for name in by if name != "method" and summary[name].nunique() > 1]
    is_finished = (summary["status"] == "finished") & summary[column].notna()
    means = summary[is_finished].groupby([*settings, "method"], sort=False)[column].mean()
    words, several = axis_of(column), summary["method"].nunique() > 1
    if means.empty:
        return "all runs diverged"
    winners: dict[str, list[str]] = {}
    for values, group in means.groupby(level=settings) if settings else [((), means)]:
        lowest = group.index.get_level_values("method")[are_equal(group, group.min())]
        place = " and ".join(map(setting_text, settings, values))
        method = "no method" if len(lowest) > 1 else lowest[0]
        winners.setdefault(method, []).append(f"{number_text(group.min())} {place}".strip())
    clauses = [
        f"{method} has the lowest {words}: {_several(places)}"
        if several
        else f"the {words} of {method} is {_several(places)}"
        for method, places in winners.items()
    ]
    if several and not settings and "no method" not in winners and len(means) > 1:
        second = means.drop(means.idxmin())
        clauses[0] += f", ahead of {second.idxmin()} with {number_text(second.min())}"
    runs = summary.groupby([*settings, "method"], sort=False)["status"]
    lost = runs.agg(lambda status: (status == "diverged").all())
    names = [" ".join(map(str, key)) if isinstance(key, tuple) else key for key in lost[lost].index]
    text = "; ".join([*clauses, *([f"diverged: {_several(names)}"] if names else [])])
    return f"{text} (one seed)" if "seed" in summary and summary["seed"].nunique() == 1 else text


def setting_text(name: str, value: Any) -> str:
    """Return the value of a column in words: ``with 5 workers``, ``at learning rate 0.1``."""
    if name == "workers":
        return f"with {counted(int(value), 'worker')}"
    text = number_text(value) if isinstance(value, float) else str(value)
    return f"at {name.replace('_', ' ')} {text}"


def _several(texts: Sequence[str]) -> str:
    """Join texts; more than four are counted."""
    return ", ".join(texts if len(texts) <= 4 else [*texts[:3], f"and {len(texts) - 3} more"])


def averaged(summary: pd.DataFrame, by: Sequence[str] = ("method",)) -> str:
    """Describe the seeds of the means of a table with a line for each combination of some columns.

    An interrupted study, or one with failed runs, has fewer seeds in some lines than in others.
    """
    seeds = summary.groupby(list(by), dropna=False)["seed"].nunique()
    smallest, largest = int(seeds.min()), int(seeds.max())
    if largest == 1:
        return "one seed"
    diverged = (summary["status"] == "diverged").any()
    if not diverged:
        return over_seeds(largest, "means over", smallest)
    return (
        "means over the seeds that finished, of "
        f"{largest if smallest == largest else f'{smallest} to {largest}'}"
    )
