"""How runs ended: a row of each, and a table of the means over seeds."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from asyncsim.run import Run
from asyncsim.table_text import table_text
from asyncsim.trace import Trace

#: Share of the commits, at the end, over which "final" minibatch losses and energy ratios are taken.
FINAL_SHARE = 0.1
#: Columns of a summary that its table shows, and their titles there.
_SHOWN = {
    "final_loss": "minibatch loss",
    "train_loss": "train loss",
    "test_loss": "test loss",
    "test_accuracy": "test accuracy",
    "energy_ratio": "energy ratio",
    "median_pi": "median pi",
    "simulated_seconds": "simulated s",
    "trace.throughput": "commits/s",
}


def outcome(run: Run, trace: Trace) -> dict[str, Any]:
    """Return how a run ended, as columns.

    ``final_loss`` is the mean minibatch loss and ``energy_ratio`` the median of central over proxy energy, both over
    the last tenth of the commits, ``median_...`` the mean of the recorded medians of a method's own diagnostic there,
    or the last if none was recorded there; ``train_...`` and ``test_...`` are the last evaluation's. NaN if the run
    diverged.
    """
    last = run.commits.tail(max(1, round(FINAL_SHARE * len(trace.taken_up))))
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = (last["central_energy"] / last["proxy_energy"]).median()
    evaluated = run.evaluations.iloc[-1].filter(regex="^(train|test)_").to_dict()
    shown = run.diagnostics[(run.diagnostics["quantile"] == 0.5) & (run.diagnostics["tensor"] == "")]
    late = shown[shown["commit"] >= min(last["commit"].iloc[0], shown["commit"].max())]
    medians = late.groupby("quantity", sort=False)["value"].mean().add_prefix("median_").to_dict()
    ended = {"final_loss": last["loss"].mean(), **evaluated, "energy_ratio": ratio, **medians}
    if run.diverged_at is not None:
        ended = dict.fromkeys(ended, np.nan)
    return {
        "status": run.status,
        "diverged_at": run.diverged_at,
        **ended,
        "simulated_seconds": float(run.commits["commit_time"].iloc[-1]),
    }


def outcome_table(summary: pd.DataFrame, by: Sequence[str] = ("method",)) -> str:
    """Return a table of how the runs of a study ended, one line for each combination of some columns.

    All means are over one population, the seeds that finished; the first column says how many of them diverged.
    """
    shown = [name for name in _SHOWN if name in summary]
    keys = [summary[name] for name in by]
    means = summary[shown].where(summary["status"] == "finished").groupby(keys, sort=False).mean()
    runs = summary.groupby(list(by), sort=False)["status"]
    table = means.rename(columns=_SHOWN)
    table.insert(0, "diverged", runs.agg(lambda status: f"{(status == 'diverged').sum()} of {len(status)}"))
    return table_text(table.reset_index())


def averaged(summary: pd.DataFrame) -> str:
    """Return over which seeds the means of a study are, in words."""
    seeds, diverged = summary["seed"].nunique(), (summary["status"] == "diverged").any()
    if seeds == 1:
        return "one seed"
    return f"means over the seeds that finished, of {seeds}" if diverged else f"means over {seeds} seeds"
