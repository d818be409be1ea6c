"""Different data on very unequal workers: Ringleader, Malenia and IA2SGD in equal time.

The set-up of the Ringleader paper: 100 clients whose classes follow a Dirichlet law of
concentration 0.1, and whose computations last a permutation of 1 to 100 s plus the absolute value
of a normal variable of standard deviation sqrt(i + 1), drawn for each computation of client i.
All methods share one trace per seed. Each is shown at its best learning rate: with the fewest
diverged seeds, then the lowest final training loss. Prints how long each takes to a target; writes
traces, runs, two tables and a figure.

At paper scale MNIST and a perceptron of 101,770 parameters, 300,000 s and 30 seeds: 780,000
gradients of four examples a run, for an accelerator.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd

from asyncsim.base.console import counted
from asyncsim.base.errors import require_positive
from asyncsim.clusters.laws import HalfNormal, Law
from asyncsim.study.config import LawLike, MethodLike, StudyConfig
from asyncsim.study.finished import present, read
from asyncsim.study.ranking import Measure, at_the_edge, grid, ranked, ranked_text, verdict
from asyncsim.study.sweep import Result, run_cells, sweep
from asyncsim.study.target import Target, check_rates

#: Files with each method at its best learning rate, and with all rates.
TABLE, TUNING = "ringleader.csv", "tuning.csv"
_BY = ("method", "learning_rate")
_MEASURE = Measure("train_loss", "least")
_COLUMNS = ("time_to_target", "gradients_to_target", "train_loss", "test_loss", "test_accuracy")


@dataclass(frozen=True)
class Config(StudyConfig):
    """Options of the Ringleader study."""

    scale: Literal["small", "paper"] = "small"
    """Defaults of all other options: minutes on the bundled digits, or the paper's scale."""
    workers: int = 100
    """Workers of the cluster, each with its own data."""
    # None, unlike in the base class: the laws depend on the number of workers.
    compute: LawLike | None = None  # type: ignore[assignment]
    """Law of a computation's time (s). none: the laws of the paper, one for each worker."""
    service: LawLike = "constant(0)"
    """Law of the server's time per visit (s)."""
    problem: str = "digits(hidden=[128], batch_size=4, split=0.1)"
    """Problem to train."""
    methods: tuple[MethodLike, ...] = (
        "ringleader",
        "ringleader(restart=newest)",
        "malenia",
        "ia2sgd",
    )
    """Methods to compare: Ringleader as in the paper and as in its authors' program, Malenia and
    IA2SGD."""
    tune: tuple[float, ...] = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
    """Learning rates to try for every method."""
    horizon: float = 5_000.0
    """Simulated time of each run (s)."""
    target: float = 0.3
    """Training loss to reach."""
    seeds: int = 2
    """Number of seeds: 0, 1, ... One trace per seed."""

    def check(self) -> None:
        """Check the options; see `StudyOptions.check`."""
        super().check()
        check_rates(self.tune)
        require_positive("horizon", self.horizon, "s")
        self.goal.check()

    @property
    def goal(self) -> Target:
        """The target: a training loss."""
        return Target(self.target, "train_loss")

    def _law(self, option: str) -> Any:
        if option == "compute" and self.compute is None:
            return client_times(self.workers)
        return super()._law(option)


SCALES = {
    "small": Config(),
    "paper": Config(
        scale="paper",
        problem="mnist(network=mlp, hidden=[128], batch_size=4, split=0.1)",
        tune=(0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 0.7, 1.0, 2.0),
        horizon=300_000.0,
        seeds=30,
    ),
}


def client_times(workers: int) -> list[Law]:
    """Return the laws of the paper's computation times; the permutation is the same for all
    seeds.
    """
    least = np.random.default_rng(0).permutation(np.arange(1, workers + 1))
    return [HalfNormal(float(low), float(np.sqrt(i + 1))) for i, low in enumerate(least)]


def run(config: Config) -> Result:
    """Run the study; see `asyncsim.study.sweep.run_cells`."""
    config.check()
    config.say_ignored(("steps",), "beside --horizon")
    config.say_ignored(("learning_rate",), "beside --tune")
    with config.computing_device():
        cells = [
            cell._replace(goal=config.goal, seconds=config.horizon)
            for cell in sweep(config, [{"learning_rate": rate} for rate in config.tune])
        ]

        def conclude(folder: Path, summary: pd.DataFrame) -> None:
            table, tuning = results_tables(folder)
            text = (
                f"{cells[0].problem.name}, {counted(config.workers, 'worker')}, "
                f"{config.horizon:g} s for every method; time and gradients until "
                f"{config.goal.criterion()}\n"
                f"{ranked_text(table, _BY, _MEASURE, _COLUMNS)}"
            )
            edge = at_the_edge(table, config.tune, table["method"])
            names = list(table["method"])
            words = (
                verdict(table, names, _MEASURE, goal=config.goal, longer="--horizon")
                if len(names) > 1
                else ""
            )
            present(folder, {TABLE: table, TUNING: tuning}, text, edge, verdict=words)

        return run_cells("ringleader", config, cells, conclude)


def results_tables(folder: Path) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Tabulate each method at its best learning rate, the best method first, and all rates.

    Columns as in `asyncsim.study.ranking.grid`, and in the first table as in
    `asyncsim.study.ranking.ranked`.
    """
    summary = read(folder, "ringleader").summary
    summary = summary.assign(learning_rate=summary["method.learning_rate"])
    summary = summary.drop_duplicates([*_BY, "seed"])
    names = [name for name in (*_COLUMNS, "simulated_seconds") if name in summary]
    tuning = grid(summary, _BY, names, _MEASURE)
    best = tuning[~tuning.duplicated("method")]
    return ranked(best, summary, _BY, _MEASURE), tuning
