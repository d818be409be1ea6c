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
from typing import Any

import numpy as np

from asyncsim.clusters.laws import HalfNormal, Law
from asyncsim.study.comparison import Comparison
from asyncsim.study.config import StudyConfig
from asyncsim.study.ranking import Measure
from asyncsim.study.sweep import ComparisonConfig, preset

#: The laws of the paper's computation times.
PAPER = "paper"


@dataclass(frozen=True)
class Options(ComparisonConfig):
    """Options of the Ringleader study."""

    def at(self, **values: Any) -> StudyConfig:
        """Return the options of a cell, by default with the paper's laws, one for each worker."""
        workers = values.get("workers", self.workers)
        laws = {"compute": client_times(workers)} if self.compute == PAPER else {}
        return super().at(**laws, **values)


Config, SCALES = preset(
    Options,
    small={
        "workers": 100,
        "compute": PAPER,
        "service": "constant(0)",
        "problem": "digits(hidden=[128], batch_size=4, split=0.1)",
        "methods": ("ringleader", "ringleader(restart=newest)", "malenia", "ia2sgd"),
        "tune": (0.003, 0.01, 0.03, 0.1, 0.3, 1.0),
        "time_budget": 5_000.0,
        "seeds": 2,
        "evaluate_every": None,
        "hold": 0,
    },
    paper={
        "problem": "mnist(network=mlp, hidden=[128], batch_size=4, split=0.1)",
        "tune": (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 0.7, 1.0, 2.0),
        "time_budget": 300_000.0,
        "seeds": 30,
    },
)


def client_times(workers: int) -> list[Law]:
    """Return the laws of the paper's computation times; the permutation is the same for all
    seeds.
    """
    least = np.random.default_rng(0).permutation(np.arange(1, workers + 1))
    return [HalfNormal(float(low), float(np.sqrt(i + 1))) for i, low in enumerate(least)]


run = Comparison("ringleader", measure=lambda config, problem: Measure("train_loss")).run
