"""What a longer communication window does to each method, for several numbers of workers.

The grid of Hermans' thesis (master thesis, Maastricht University, 2017) and of the paper on
accumulated gradient normalization (Hermans, Spanakis and Moeckel 2017, arXiv 1710.02368): every
method on clusters of n workers, for several windows (local steps between two communications), with
the same passes through the data, divided among the workers. The passes are rounded to whole visits
of all workers (a note reports deviations above 5 %). Local steps use Adam, as in the thesis.
Tables: the final accuracy of the central variable, the mean length of its steps and the
straightness of its path (with --directions-every also the mean cosines of updates), the temporal
efficiency of pairs of methods (efficiency.csv), and the distribution of staleness (staleness.csv).

Temporal efficiency of a over b: the integral of a's training accuracy over the simulated time,
divided by b's integral, until the first of the two ends. Accuracies are measured on all examples
with the central variable and interpolated linearly; the thesis uses the accuracies of workers on
their minibatches.

At small scale Adam's rate is higher than in the thesis, because the network is smaller. At paper
scale 49 clusters with two methods, 18,750 minibatches of 128 each, on the perceptron with 4.8
million parameters: a day on two cores, an accelerator's work. The times of a local step (0.44 s)
and of a visit (0.2 s) are fitted to the printed training times of the thesis; see docs/papers.md.
"""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd

from asyncsim.base.errors import InputError
from asyncsim.problems.problem import Problem, measures
from asyncsim.replays.run import Run
from asyncsim.replays.running import start
from asyncsim.study.cell import Cell, CellRun
from asyncsim.study.columns import titled
from asyncsim.study.comparison import Comparison, Further, Results
from asyncsim.study.finished import Finished
from asyncsim.study.ranking import Measure
from asyncsim.study.sweep import ComparisonConfig, preset
from asyncsim.traces.trace import Trace
from asyncsim.traces.trace_summary import warm_up_of

#: Recorded cosines, see `asyncsim.recorders.directions`.
COSINES = ("gradient_cosine", "previous_cosine", "target_cosine")
#: The columns of a step in a run's commits.
_STEPS = ("update_norm", *COSINES)
#: Columns of efficiency.csv.
_EFFICIENCY = ["workers", "window", "method", "against", "seed", "efficiency"]


@dataclass(frozen=True)
class Options(ComparisonConfig):
    """Options of the study of windows."""

    @property
    def varied(self) -> dict[str, tuple[Any, ...]]:
        """The options with several values; workers and windows always vary."""
        return {"workers": (self.workers,), "window": (self.window,), **super().varied}

    def with_length(self, cell: Cell) -> Cell:
        """Return a cell with the length of its runs, and as many evaluations at any window."""
        return super().with_length(cell).with_options(evaluate_every=self.evaluate_every)


Config, SCALES = preset(
    Options,
    small={
        "workers": (10, 20, 40),
        "window": (1, 10, 40),
        "methods": ("agn", "aeasgd(alpha=0.05)", "dynsgd", "downpour"),
        "epochs": 200.0,
        "seeds": 1,
        "optimizer": "adam",
        "learning_rate": 0.01,
        "diagnose_every": 0,
        "evaluate_every": None,
    },
    paper={
        "workers": (10, 15, 20, 25, 30, 35, 40),
        "window": (10, 15, 20, 25, 30, 35, 40),
        "methods": ("agn", "aeasgd(alpha=0.05)"),
        "epochs": 40.0,
        "learning_rate": 1e-3,
        "problem": "mnist(network=mlp, split=even)",
        "batch_size": 128,
        "compute": "gamma(mean=0.44, cv=0.2)",
        "service": "constant(0.2)",
        "protocol": "write_then_read",
    },
)


def accuracy(config: ComparisonConfig, problem: Problem) -> Measure:
    """Compare by the training accuracy at the end."""
    if "train_accuracy" not in measures(problem):
        raise InputError(
            f"problem = {problem.name!r}: has no accuracy; choose digits or mnist, say"
        )
    return Measure("train_accuracy", "most")


def temporal_efficiency(a: pd.DataFrame, b: pd.DataFrame) -> float:
    """Compute the temporal efficiency of run ``a`` over run ``b``.

    ::

        E(a, b) = integral of acc_a / integral of acc_b, both from 0 to m = min(end of a, end of b)

    NaN if the integral of acc_b is zero, for instance if a run diverged before its first
    evaluation.

    ``a``, ``b``: `Run.evaluations`, with ``train_accuracy`` interpolated linearly.

    References
    ----------
    Hermans 2017, "On scalable deep learning and parallelizing gradient descent", chapter 4.
    """
    end = min(run["commit_time"].iloc[-1] for run in (a, b))
    numerator, denominator = _area(a, end), _area(b, end)
    return numerator / denominator if denominator else math.nan


def path(job: CellRun, run: Run, trace: Trace) -> dict[str, float]:
    """Return the means over the commits of the length of a step and of its cosines, and the
    straightness of the path: the distance from its start to its end over its length.
    """
    steps = run.commits[[name for name in _STEPS if name in run.commits]]
    begin, _ = start(job.cell.problem, job.seed, jnp.dtype(run.config["precision"]), 1)
    moves = jax.tree.map(lambda a, b: np.sum((a - np.asarray(b)) ** 2), run.params, begin.params)
    distance = math.sqrt(sum(map(float, jax.tree.leaves(moves))))
    straightness = distance / run.commits["update_norm"].sum()
    return {**steps.replace(np.inf, np.nan).mean(), "straightness": straightness}


def _area(run: pd.DataFrame, end: float) -> float:
    time = run["commit_time"]
    until = np.append(time[time < end], end)
    return float(np.trapezoid(np.interp(until, time, run["train_accuracy"]), until))


def by_window(table: Results) -> Further:
    """Tabulate the temporal efficiencies and the staleness; print the efficiencies by workers and
    window.
    """
    efficiency = pd.DataFrame(_efficiencies(table.finished), columns=_EFFICIENCY)
    pairs = efficiency.assign(pair=efficiency["method"] + " over " + efficiency["against"])
    parts: list[str | pd.DataFrame] = []
    if len(pairs):
        wide = pairs.pivot_table("efficiency", ["pair", "workers"], "window", sort=False)
        wide = titled(wide.rename(columns=str).reset_index(), digits=4)
        parts = ["temporal efficiency, by workers and window", wide]
    staleness = pd.DataFrame(_staleness(table.finished))
    return {"efficiency.csv": efficiency, "staleness.csv": staleness}, parts


def _efficiencies(finished: Finished) -> Iterator[tuple[Any, ...]]:
    """Yield the temporal efficiency of each method over every later one, seed by seed."""
    summary = finished.summary
    evaluations = {name: finished.run(name).evaluations for name in summary["run_folder"]}
    for (n, window), rows in summary.groupby(["workers", "window"], sort=False):
        runs = rows.pivot(index="seed", columns="method", values="run_folder")
        for a, b in itertools.combinations(rows["method"].unique(), 2):
            for seed, first, second in runs[[a, b]].dropna().itertuples():
                efficiency = temporal_efficiency(evaluations[first], evaluations[second])
                yield n, window, a, b, seed, efficiency


def _staleness(finished: Finished) -> Iterator[dict[str, Any]]:
    """Yield the distribution of the staleness on each cluster, over its seeds, after the warm-up
    of each trace.
    """
    shared = finished.summary[~finished.summary["own_trace"]]
    for (n, window), rows in shared.groupby(["workers", "window"], sort=False):
        traces = [finished.trace(name) for name in rows["trace_file"].unique()]
        late = [trace.accepted.frame["staleness"][warm_up_of(trace, None) :] for trace in traces]
        counts = np.bincount(np.concatenate(late))
        for staleness, share in enumerate(counts / counts.sum()):
            yield {"workers": n, "window": window, "staleness": staleness, "share": share}


run = Comparison(
    "windows",
    compared=("method", "window"),
    measure=accuracy,
    columns=("straightness", *_STEPS),
    of_run=path,
    further=by_window,
).run
