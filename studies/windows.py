"""What a longer communication window does to each method, with more and more workers.

The grid of Hermans' thesis (master thesis, Maastricht University, 2017) and of its paper on accumulated gradient
normalization (Hermans, Spanakis and Moeckel 2017, arXiv 1710.02368): every method on clusters of n workers that take
so many local steps between two communications, all with the same passes through the data, divided among the workers, as
nearly as whole visits of all workers allow (a note says where that is more than 5 % off). The workers' local steps are
Adam's, as there. Tables: the accuracy of the central variable at the end (grid.csv), how much more accuracy a method
has had over its time than another (efficiency.csv), and how often each staleness occurred (staleness.csv).

Temporal efficiency of a over b: the integral of a's training accuracy over the simulated time, divided by that of b,
until the first of the two ends. Accuracies here are the central variable's, on all examples, between evaluations along
a straight line; the thesis has its workers' accuracies on their own minibatches.

At small scale Adam's rate is higher than the thesis', as the network is smaller. At paper scale 49 clusters with two
methods, 18,750 minibatches of 128 each, on the perceptron with 4.8 million parameters: a day on two cores, an
accelerator's work. Times of a local step (0.44 s) and of a visit (0.2 s) are those that fit the training times that the
thesis prints; see studies/agn.md.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pandas as pd

from asyncsim.base.console import counted, note
from asyncsim.base.errors import InputError, require_positive
from asyncsim.problems.problem import measures
from asyncsim.study.cell import Cell
from asyncsim.study.config import MethodLike
from asyncsim.study.finished import Finished, present, read
from asyncsim.study.sweep import Result, SweepConfig, run_cells, steps_of_epochs, sweep
from asyncsim.traces.trace import Trace
from asyncsim.traces.trace_summary import warm_up_of

TABLES = ("grid.csv", "efficiency.csv", "staleness.csv")
#: What the tables by workers and windows print, and its column in grid.csv.
_PRINTED = {"training accuracy": "train_accuracy", "test accuracy": "test_accuracy"}
#: Columns of efficiency.csv.
_EFFICIENCY = ["workers", "window", "method", "against", "seeds", "efficiency"]
#: Passes through the data that are further from those asked for, as a share of them, are told.
_OFF = 0.05


@dataclass(frozen=True)
class Config(SweepConfig):
    """Options of the study of windows."""

    varied: ClassVar = ("workers", "window")
    fewest_steps: ClassVar = 0

    workers: tuple[int, ...] = (10, 20, 40)
    """Workers of the clusters, one after the other."""
    # Several values here, of which each cell has one.
    window: tuple[int, ...] = (1, 10, 40)  # type: ignore[assignment]
    """Local steps per communication, one after the other."""
    methods: tuple[MethodLike, ...] = ("agn", "aeasgd(alpha=0.05)", "downpour")
    """Methods to compare: any whose local steps may be an optimizer's, or your own as FILE.py:FUNCTION (see the
    README)."""
    epochs: float = 200.0
    """Passes through the training data, by all workers together, rounded to whole visits of all workers."""
    steps: int = 0
    """Commits per worker, whatever the epochs. 0: as many as the epochs take."""
    seeds: int = 1
    """Number of seeds: 0, 1, ... One trace per seed, shared by the methods."""
    optimizer: str | None = "adam"
    """Local optimizer of the workers by its name in optax, with the learning rate for its own: those whose steps need
    gradients and parameters alone. None: plain gradient steps."""
    learning_rate: float = 0.01
    """Step size of a gradient, for all methods."""
    diagnose_every: int = 0
    """Worker steps between recordings of the methods' costly diagnostics; 0 for none."""

    def check(self) -> None:
        """Check the options; see `StudyOptions.check`."""
        super().check()
        require_positive("epochs", self.epochs)


SCALES = {
    "small": Config(),
    "paper": Config(
        scale="paper",
        workers=(10, 15, 20, 25, 30, 35, 40),
        window=(10, 15, 20, 25, 30, 35, 40),
        methods=("agn", "aeasgd(alpha=0.05)"),
        epochs=40.0,
        learning_rate=1e-3,
        problem="mnist(network=mlp, sharded=True)",
        batch_size=128,
        compute="gamma(mean=0.44, cv=0.2)",
        service="constant(0.2)",
        protocol="write_then_read",
    ),
}


def run(config: Config) -> Result:
    """Run the study; see `asyncsim.study.sweep.run_cells`."""
    config.check()
    if config.steps and config.epochs != SCALES[config.scale].epochs:
        note("--epochs changes nothing beside --steps")
    grid = [{"workers": n, "window": window} for n in config.workers for window in config.window]
    with config.computing_device():
        cells = sweep(config, grid)
        if "train_accuracy" not in measures(cells[0].problem):
            raise InputError(f"problem = {cells[0].problem.name!r}: has no accuracy; choose digits or mnist, say")
        if config.steps == 0:
            cells = [cell.with_options(steps=steps_of_epochs(cell, config.epochs)) for cell in cells]
            _say_rounded(cells, config.epochs)
        return run_cells("windows", config, cells, _conclude)


def temporal_efficiency(a: pd.DataFrame, b: pd.DataFrame) -> float:
    """Return how much more accuracy over time one run has had than another, until the first of the two ends.

    ::

        E(a, b) = integral of acc_a / integral of acc_b,    both from 0 to m = min(end of a, end of b)

    NaN if the integral of acc_b is zero, as where one of them diverged before its first evaluation.

    ``a``, ``b``: `Run.evaluations` of the two; straight lines between the evaluations of ``train_accuracy``.

    References
    ----------
    Hermans 2017, "On scalable deep learning and parallelizing gradient descent", chapter 4.
    """
    end = min(float(run["commit_time"].iloc[-1]) for run in (a, b))
    other = _area(b, end)
    return _area(a, end) / other if other else math.nan


def _area(run: pd.DataFrame, end: float) -> float:
    time, value = (run[name].to_numpy(np.float64) for name in ("commit_time", "train_accuracy"))
    known = time < end
    time_until = np.append(time[known], end)
    return float(np.trapezoid(np.interp(time_until, time, value), time_until))


def _say_rounded(cells: Sequence[Cell], epochs: float) -> None:
    """Say aloud how many clusters train for others than these epochs, and for how many the one that is furthest off."""
    found = [_epochs_of(cell) for cell in cells]
    off = sum(abs(one / epochs - 1) > _OFF for one in found)
    if off:
        furthest = int(np.argmax(np.abs(np.log(found) - math.log(epochs))))
        workers = counted(cells[furthest].cluster.workers, "worker")
        note(
            f"--epochs {epochs:g} is rounded to whole visits of all workers, by more than {100 * _OFF:g} % in {off} of "
            f"{counted(len(cells), 'cluster')}; most with {workers} and a window of {cells[furthest].config.window}, "
            f"which train for {found[furthest]:.3g} epochs"
        )


def _epochs_of(cell: Cell) -> float:
    """Return the passes through the training data that a cell makes."""
    examples = cell.config.steps * sum(cell.cluster.windows) * (cell.problem.batch_size or 1)
    return examples / cell.problem.examples


def _conclude(folder: Path, summary: pd.DataFrame) -> None:
    """Write the tables, print two of them, and draw the figures of the runs that there are."""
    finished = read(folder, "windows")
    evaluations = {name: finished.run(name).evaluations for name in summary["run_folder"]}
    counts = {name: _counts(finished.trace(name)) for name in summary["trace_file"].unique()}
    grid = pd.DataFrame(_grid(summary, evaluations, counts))
    # Of one method there are no pairs, but still the columns.
    efficiency = pd.DataFrame(_efficiencies(summary, evaluations), columns=_EFFICIENCY)
    tables = grid, efficiency, pd.DataFrame(_staleness(summary, counts))
    present(folder, dict(zip(TABLES, tables, strict=True)), report(finished, grid, efficiency))


def report(finished: Finished, grid: pd.DataFrame, efficiency: pd.DataFrame) -> str:
    """Return what the study prints of the accuracies at the end and of the temporal efficiencies."""
    problem, seeds = finished.config["problem"], counted(int(grid["seeds"].max()), "seed")
    diverged = int(grid["diverged"].sum())
    told = f"; {counted(diverged, 'run')} diverged, counted as far as they went" if diverged else ""
    parts = [f"{problem}, {seeds}{told}"]
    for title, column in _PRINTED.items():
        if column not in grid:
            continue
        table = 100 * grid.pivot_table(column, ["method", "workers"], "window", sort=False)
        parts.append(f"{title} of the central variable at the end (%), by workers and window\n{_text(table)}")
    if len(efficiency):
        pairs = efficiency["method"] + " over " + efficiency["against"]
        table = efficiency.assign(pair=pairs).pivot_table("efficiency", ["pair", "workers"], "window", sort=False)
        parts.append(f"temporal efficiency, by workers and window\n{_text(table, '{:.3f}')}")
    return "\n\n".join(parts)


def _text(table: pd.DataFrame, form: str = "{:.2f}") -> str:
    return table.to_string(float_format=form.format, na_rep="-")


def _grid(
    summary: pd.DataFrame, evaluations: Mapping[str, pd.DataFrame], counts: Mapping[str, np.ndarray]
) -> Iterator[dict[str, Any]]:
    """Yield how a method ended on each cluster, means over its seeds."""
    for (n, window, method), rows in summary.groupby(["workers", "window", "method"], sort=False):
        ends = [evaluations[name].iloc[-1] for name in rows["run_folder"]]
        accuracy = {name: float(np.mean([end[name] for end in ends])) for name in _PRINTED.values() if name in ends[0]}
        yield {
            "workers": n,
            "window": window,
            "method": method,
            "seeds": len(rows),
            "diverged": int((rows["status"] == "diverged").sum()),
            **accuracy,
            "seconds": rows["simulated_seconds"].mean(),
            "staleness_mean": rows["trace.staleness_mean"].mean(),
            "staleness_mode": int(np.argmax(_together(counts, rows["trace_file"]))),
        }


def _efficiencies(summary: pd.DataFrame, evaluations: Mapping[str, pd.DataFrame]) -> Iterator[dict[str, Any]]:
    """Yield the temporal efficiency of each method over those that come after it, means over the seeds."""
    methods = list(dict.fromkeys(summary["method"]))
    for (n, window), rows in summary.groupby(["workers", "window"], sort=False):
        found = {
            (row.method, row.seed): evaluations[row.run_folder]
            for row in rows[["method", "seed", "run_folder"]].itertuples()
        }
        for place, a in enumerate(methods):
            for b in methods[place + 1 :]:
                seeds = [seed for method, seed in found if method == a and (b, seed) in found]
                every = [temporal_efficiency(found[a, seed], found[b, seed]) for seed in seeds]
                values = [value for value in every if not math.isnan(value)]
                if values:
                    yield dict(zip(_EFFICIENCY, (n, window, a, b, len(values), np.mean(values)), strict=True))


def _staleness(summary: pd.DataFrame, counts: Mapping[str, np.ndarray]) -> Iterator[dict[str, Any]]:
    """Yield which share of a cluster's commits had each staleness, over its seeds."""
    shared = summary[~summary["own_trace"]]
    for (n, window), rows in shared.groupby(["workers", "window"], sort=False):
        found = _together(counts, rows["trace_file"].unique())
        for staleness, share in enumerate(found / found.sum()):
            yield {"workers": n, "window": window, "staleness": staleness, "share": share}


def _counts(trace: Trace) -> np.ndarray:
    """Return how many commits had each staleness, after the warm-up of the trace."""
    return np.bincount(trace.accepted.frame["staleness"].to_numpy()[warm_up_of(trace, None) :])


def _together(counts: Mapping[str, np.ndarray], traces: Iterable[str]) -> np.ndarray:
    """Return how many commits of some traces together had each staleness."""
    found = [counts[name] for name in traces]
    most = max(map(len, found))
    return np.sum([np.pad(one, (0, most - len(one))) for one in found], axis=0)
