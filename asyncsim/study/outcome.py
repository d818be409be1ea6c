"""How runs ended: a row of each, and a table of the means over seeds."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pandas as pd

from asyncsim.base.console import over_seeds
from asyncsim.replays.run import Run
from asyncsim.study.columns import text_of
from asyncsim.study.results import SUMMARY
from asyncsim.traces.trace import Trace

#: Share of the commits, at the end, over which "final" minibatch losses and energy ratios are taken.
FINAL_SHARE = 0.1
#: Columns of a summary that its table shows: before the problem's own measures, and after.
_FIRST = ("final_loss", "train_loss", "test_loss", "test_accuracy")
_LAST = ("energy_ratio", "median_pi", "simulated_seconds", "trace.throughput")
#: A problem's own measures for which a table has room.
ROOM = 4


def outcome(run: Run, trace: Trace) -> dict[str, Any]:
    """Return how a run ended, as columns.

    ``final_loss`` is the mean minibatch loss of the last tenth of the commits, ``energy_ratio`` the
    `late_energy_ratio` if energies are recorded, and ``median_...`` the mean of the recorded medians of a method's own
    diagnostic in that tenth, or the last of them if there is none that late. ``train_...`` and ``test_...`` are the
    last evaluation's. NaN if the run diverged.
    """
    total = len(trace.accepted)
    last = _last(run.commits, total)
    evaluated = run.evaluations.iloc[-1].filter(regex="^(train|test)_").to_dict()
    shown = run.diagnostics[(run.diagnostics["quantile"] == 0.5) & (run.diagnostics["tensor"] == "")]
    late = shown[shown["commit"] >= min(last["commit"].iloc[0], shown["commit"].max())]
    medians = late.groupby("quantity", sort=False)["value"].mean().add_prefix("median_").to_dict()
    with np.errstate(over="ignore"):  # of losses near the largest number; most such runs diverge
        loss = last["loss"].mean()
    energies = {"energy_ratio": late_energy_ratio(run.commits, total)} if "central_energy" in run.commits else {}
    ended = {"final_loss": loss, **evaluated, **energies, **medians}
    if run.diverged_at is not None:
        ended = dict.fromkeys(ended, np.nan)
    return {
        "status": run.status,
        "diverged_at": run.diverged_at,
        **ended,
        "simulated_seconds": float(run.commits["commit_time"].iloc[-1]),
    }


def energy_ratios(commits: pd.DataFrame) -> pd.Series:
    """Return central over proxy energy of each commit by which the central variable had moved since the worker's read.

    NaN if it had not moved, as at most commits of a server that waits for several messages: those do not say how
    energetic its steps are.
    """
    central = commits["central_energy"]
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        return (central / commits["proxy_energy"]).where(central > 0)


def late_energy_ratio(commits: pd.DataFrame, total: int) -> float:
    """Return the median of `energy_ratios` over the last tenth of ``total`` commits; the last one if none is that late.

    NaN if there is none at all.
    """
    ratios = energy_ratios(commits).dropna()
    if ratios.empty:
        return float("nan")
    late = ratios[ratios.index >= _last(commits, total).index[0]]
    return float((late if len(late) else ratios.tail(1)).median())


def _last(commits: pd.DataFrame, total: int) -> pd.DataFrame:
    return commits.tail(max(1, round(FINAL_SHARE * total)))


def own_measures(columns: Iterable[str]) -> list[str]:
    """Return the columns of a problem's measures that tables show beside losses and the test accuracy.

    They are of the test data; of the training data, if there are no others.
    """
    of_test = [name for name in columns if name.startswith("test_")]
    measured = of_test or [name for name in columns if name.startswith("train_")]
    return [name for name in measured if name not in _FIRST]


def outcome_table(summary: pd.DataFrame, by: Sequence[str] = ("method",)) -> str:
    """Return a table of how the runs of a study ended, one line for each combination of some columns.

    All means are over one population, the seeds that finished; the first column says how many of them diverged. A line
    below names the measures of the problem's own for which there is no room.
    """
    own = own_measures(summary)
    shown = [name for name in (*_FIRST, *own[:ROOM], *_LAST) if name in summary]
    keys = [summary[name] for name in by]
    means = summary[shown].where(summary["status"] == "finished").groupby(keys, sort=False).mean()
    runs = summary.groupby(list(by), sort=False)["status"]
    means.insert(0, "diverged", runs.agg(lambda status: f"{(status == 'diverged').sum()} of {len(status)}"))
    text = text_of(means.reset_index())
    return f"{text}\nalso in {SUMMARY}: {', '.join(own[ROOM:])}" if own[ROOM:] else text


def averaged(summary: pd.DataFrame, by: Sequence[str] = ("method",)) -> str:
    """Return in words over which seeds the means of a table are that has a line for each combination of some columns.

    A study that was interrupted, or of which runs failed, has fewer seeds in some lines than in others.
    """
    seeds = summary.groupby(list(by), dropna=False)["seed"].nunique()
    fewest, most = int(seeds.min()), int(seeds.max())
    if most == 1:
        return "one seed"
    diverged = (summary["status"] == "diverged").any()
    if not diverged:
        return over_seeds(most, "means over", fewest)
    return f"means over the seeds that finished, of {most if fewest == most else f'{fewest} to {most}'}"
