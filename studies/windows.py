"""What a longer communication window does to each method, for several numbers of workers.

The grid of Hermans' thesis (master thesis, Maastricht University, 2017) and of the paper on
accumulated gradient normalization (Hermans, Spanakis and Moeckel 2017, arXiv 1710.02368): every
method on clusters of n workers, for several windows (local steps between two communications), with
the same passes through the data, divided among the workers. The passes are rounded to whole visits
of all workers (a note reports deviations above 5 %). Local steps use Adam, as in the thesis.
Tables: the final accuracy of the central variable, the mean length of its steps and the
straightness of its path (grid.csv; with --directions-every also the mean cosines of updates), the
temporal efficiency of pairs of methods (efficiency.csv), and the distribution of staleness
(staleness.csv).

Temporal efficiency of a over b: the integral of a's training accuracy over the simulated time,
divided by b's integral, until the first of the two ends. Accuracies are measured on all examples
with the central variable and interpolated linearly; the thesis uses the accuracies of workers on
their minibatches.

At small scale Adam's rate is higher than in the thesis, because the network is smaller. At paper
scale 49 clusters with two methods, 18,750 minibatches of 128 each, on the perceptron with 4.8
million parameters: a day on two cores, an accelerator's work. The times of a local step (0.44 s)
and of a visit (0.2 s) are fitted to the printed training times of the thesis; see docs/papers.md.
"""

import functools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd

from asyncsim.base.console import counted, note
from asyncsim.base.errors import InputError, require_positive
from asyncsim.problems.problem import Problem, measures
from asyncsim.replays.run import Run
from asyncsim.replays.running import start
from asyncsim.study.cell import Cell
from asyncsim.study.columns import as_column, axis_of, titled
from asyncsim.study.config import MethodLike
from asyncsim.study.finished import Finished, present, read
from asyncsim.study.sweep import Result, SweepConfig, run_cells, steps_of_epochs, sweep
from asyncsim.traces.trace import Trace
from asyncsim.traces.trace_summary import warm_up_of

TABLES = ("grid.csv", "efficiency.csv", "staleness.csv")
#: Columns of grid.csv that are printed by workers and windows.
_PRINTED = ("train_accuracy", "test_accuracy")
#: Recorded cosines, see `asyncsim.recorders.directions`.
COSINES = ("gradient_cosine", "previous_cosine", "target_cosine")
#: Columns of efficiency.csv.
_EFFICIENCY = ["workers", "window", "method", "against", "seeds", "efficiency"]
#: Relative deviation from the requested passes through the data that is reported.
_OFF = 0.05


@dataclass(frozen=True)
class Config(SweepConfig):
    """Options of the study of windows."""

    varied: ClassVar = ("workers", "window")
    fewest_steps: ClassVar = 0

    workers: tuple[int, ...] = (10, 20, 40)
    """Workers of the clusters, one after the other."""
    # A sequence, unlike in the base class: each cell has one value.
    window: tuple[int, ...] = (1, 10, 40)  # type: ignore[assignment]
    """Local steps per communication, one after the other."""
    methods: tuple[MethodLike, ...] = ("agn", "aeasgd(alpha=0.05)", "dynsgd", "downpour")
    """Methods to compare: any whose local steps may be an optimizer's, or your own as
    FILE.py:FUNCTION (see the README)."""
    epochs: float = 200.0
    """Passes through the training data, by all workers together, rounded to whole visits of all
    workers.
    """
    steps: int = 0
    """Commits per worker, regardless of --epochs. 0: from --epochs."""
    seeds: int = 1
    """Number of seeds: 0, 1, ... One trace per seed, shared by the methods."""
    optimizer: str | None = "adam"
    """Local optimizer of the workers by its name in optax, with the study's learning rate; its
    steps may depend only on gradients and parameters. none: plain gradient steps."""
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
        problem="mnist(network=mlp, split=even)",
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
            raise InputError(
                f"problem = {cells[0].problem.name!r}: has no accuracy; choose digits or mnist, say"
            )
        if config.steps == 0:
            cells = [
                cell.with_options(steps=steps_of_epochs(cell, config.epochs)) for cell in cells
            ]
            _say_rounded(cells, config.epochs)
        return run_cells("windows", config, cells, functools.partial(_conclude, cells[0].problem))


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
    end = min(float(run["commit_time"].iloc[-1]) for run in (a, b))
    denominator = _area(b, end)
    return _area(a, end) / denominator if denominator else math.nan


def best_windows(grid: pd.DataFrame, problem: Problem, method: str = "agn") -> pd.DataFrame:
    """Compare the best window of each number of workers with the thesis' heuristic.

    Columns: ``workers``, ``best_window`` (of the highest training accuracy, the shortest of equal
    ones), ``heuristic``: half the sum of the workers and the network's layers.
    """
    leaves = jax.tree.leaves(problem.shapes)
    layers = sum(leaf.ndim > 1 for leaf in leaves)  # biases are vectors
    rows = grid[grid["method"] == method].sort_values("window")
    best = rows.loc[rows.groupby("workers")["train_accuracy"].idxmax()]
    table = best[["workers", "window"]].rename(columns={"window": "best_window"})
    return table.assign(heuristic=(table["workers"] + layers) / 2).reset_index(drop=True)


def straightness(problem: Problem, run: Run) -> float:
    """Return the distance from the start to the end of a run over the length of its path.

    The path is that of the central variable, commit by commit: 1 is a straight line.
    """
    begin, _ = start(problem, run.config["seed"], jnp.dtype(run.config["precision"]), 1)
    moves = jax.tree.map(lambda a, b: np.sum((a - np.asarray(b)) ** 2), run.params, begin.params)
    distance = math.sqrt(sum(map(float, jax.tree.leaves(moves))))
    return distance / run.commits["update_norm"].sum()


def _area(run: pd.DataFrame, end: float) -> float:
    time, value = (run[name].to_numpy(np.float64) for name in ("commit_time", "train_accuracy"))
    before_end = time < end
    time_until = np.append(time[before_end], end)
    return float(np.trapezoid(np.interp(time_until, time, value), time_until))


def _say_rounded(cells: Sequence[Cell], epochs: float) -> None:
    """Note the number of clusters whose rounded epochs deviate, and the largest deviation."""
    epochs_of_cells = [_epochs_of(cell) for cell in cells]
    off = sum(abs(trained / epochs - 1) > _OFF for trained in epochs_of_cells)
    if off:
        furthest = int(np.argmax(np.abs(np.log(epochs_of_cells) - math.log(epochs))))
        workers = counted(cells[furthest].cluster.workers, "worker")
        note(
            f"--epochs {epochs:g} is rounded to whole visits of all workers, by more than "
            f"{100 * _OFF:g} % in {off} of "
            f"{counted(len(cells), 'cluster')}; most with {workers} and a window of "
            f"{cells[furthest].config.window}, "
            f"which train for {epochs_of_cells[furthest]:.3g} epochs"
        )


def _epochs_of(cell: Cell) -> float:
    """Return a cell's number of passes through the training data."""
    examples = cell.config.steps * sum(cell.cluster.windows) * (cell.problem.batch_size or 1)
    return examples / cell.problem.examples


def _conclude(problem: Problem, folder: Path, summary: pd.DataFrame) -> None:
    finished = read(folder, "windows")
    runs = {name: finished.run(name) for name in summary["run_folder"]}
    evaluations = {name: run.evaluations for name, run in runs.items()}
    counts = {name: _counts(finished.trace(name)) for name in summary["trace_file"].unique()}
    grid = pd.DataFrame(_grid(problem, summary, runs, counts))
    # The columns are explicit, because a single method has no pairs.
    efficiency = pd.DataFrame(_efficiencies(summary, evaluations), columns=_EFFICIENCY)
    tables = grid, efficiency, pd.DataFrame(_staleness(summary, counts))
    parts = report(finished, grid, efficiency)
    if "agn" in set(grid["method"]) and grid["window"].nunique() > 1:
        parts += [
            "AGN's window of the highest training accuracy, and the thesis' heuristic",
            titled(best_windows(grid, problem)),
        ]
    present(folder, dict(zip(TABLES, tables, strict=True)), *parts, verdict=_verdict(grid))


def _verdict(grid: pd.DataFrame) -> str:
    """Say at which window each method ends with the highest accuracy, for the most workers."""
    column = next(name for name in _PRINTED if name in grid)
    largest = grid[grid["workers"] == grid["workers"].max()]
    rows = largest.loc[largest.groupby("method", sort=False)[column].idxmax().dropna()]
    best = [
        f"{row.method} at a window of {row.window} ({100 * getattr(row, column):.1f} %)"
        for row in rows.itertuples()
    ]
    workers = counted(int(grid["workers"].max()), "worker")
    return f"with {workers} the {axis_of(column)} is highest for {', '.join(best)}"


def report(
    finished: Finished, grid: pd.DataFrame, efficiency: pd.DataFrame
) -> list[str | pd.DataFrame]:
    """Tabulate the final accuracies and the temporal efficiencies by workers and window."""
    problem, seeds = finished.config["problem"], counted(int(grid["seeds"].max()), "seed")
    diverged = int(grid["diverged"].sum())
    diverged_text = f"; {counted(diverged, 'run')} diverged, counted until then" if diverged else ""
    parts: list[str | pd.DataFrame] = [f"{problem}, {seeds}{diverged_text}"]
    for column in _PRINTED:
        if column in grid:
            parts += [
                f"final {as_column(column).title} of the central variable (%), by workers and "
                "window",
                _by_window(grid.assign(**{column: 100 * grid[column]}), "method", column),
            ]
    if len(efficiency):
        pairs = efficiency.assign(pair=efficiency["method"] + " over " + efficiency["against"])
        parts += [
            "temporal efficiency, by workers and window",
            _by_window(pairs, "pair", "efficiency"),
        ]
    return parts


def _by_window(table: pd.DataFrame, label: str, column: str) -> pd.DataFrame:
    wide = table.pivot_table(column, [label, "workers"], "window", sort=False)
    return titled(wide.rename(columns=str).reset_index(), digits=4)


def _grid(
    problem: Problem,
    summary: pd.DataFrame,
    runs: Mapping[str, Run],
    counts: Mapping[str, np.ndarray],
) -> Iterator[dict[str, Any]]:
    """Yield the final results of each method on each cluster, means over its seeds."""
    for (n, window, method), rows in summary.groupby(["workers", "window", "method"], sort=False):
        names = rows["run_folder"]
        ends = [runs[name].evaluations.iloc[-1] for name in names]
        commits = pd.concat([runs[name].commits for name in names])
        steps = commits[["update_norm", *(name for name in COSINES if name in commits)]]
        accuracy = {
            name: float(np.mean([end[name] for end in ends]))
            for name in _PRINTED
            if name in ends[0]
        }
        yield {
            "workers": n,
            "window": window,
            "method": method,
            "seeds": len(rows),
            "diverged": int((rows["status"] == "diverged").sum()),
            **accuracy,
            **steps.replace(np.inf, np.nan).mean(),
            "straightness": np.mean([straightness(problem, runs[name]) for name in names]),
            "seconds": rows["simulated_seconds"].mean(),
            "staleness_mean": rows["trace.staleness_mean"].mean(),
            "staleness_mode": int(np.argmax(_pooled(counts, rows["trace_file"]))),
        }


def _efficiencies(
    summary: pd.DataFrame, evaluations: Mapping[str, pd.DataFrame]
) -> Iterator[dict[str, Any]]:
    """Yield the temporal efficiency of each method over every later one, means over the seeds."""
    methods = list(dict.fromkeys(summary["method"]))
    for (n, window), rows in summary.groupby(["workers", "window"], sort=False):
        runs = {
            (row.method, row.seed): evaluations[row.run_folder]
            for row in rows[["method", "seed", "run_folder"]].itertuples()
        }
        for place, a in enumerate(methods):
            for b in methods[place + 1 :]:
                seeds = [seed for method, seed in runs if method == a and (b, seed) in runs]
                efficiencies = [temporal_efficiency(runs[a, seed], runs[b, seed]) for seed in seeds]
                values = [value for value in efficiencies if not math.isnan(value)]
                if values:
                    yield dict(
                        zip(
                            _EFFICIENCY,
                            (n, window, a, b, len(values), np.mean(values)),
                            strict=True,
                        )
                    )


def _staleness(summary: pd.DataFrame, counts: Mapping[str, np.ndarray]) -> Iterator[dict[str, Any]]:
    """Yield the distribution of the staleness on each cluster, over its seeds."""
    shared = summary[~summary["own_trace"]]
    for (n, window), rows in shared.groupby(["workers", "window"], sort=False):
        pooled = _pooled(counts, rows["trace_file"].unique())
        for staleness, share in enumerate(pooled / pooled.sum()):
            yield {"workers": n, "window": window, "staleness": staleness, "share": share}


def _counts(trace: Trace) -> np.ndarray:
    """Count the commits by staleness, after the warm-up of the trace."""
    return np.bincount(trace.accepted.frame["staleness"].to_numpy()[warm_up_of(trace, None) :])


def _pooled(counts: Mapping[str, np.ndarray], traces: Iterable[str]) -> np.ndarray:
    """Sum the counts by staleness over several traces."""
    histograms = [counts[name] for name in traces]
    longest = max(map(len, histograms))
    return np.sum(
        [np.pad(histogram, (0, longest - len(histogram))) for histogram in histograms], axis=0
    )
