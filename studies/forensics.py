"""Which cluster produced published curves: its service time, spread and protocol, from losses.

The GEM paper states neither the service time of its server nor the spread of its workers' times,
and its curves depend on both. So the methods of its figure 1 run on a grid of clusters and learning
rates. The study ranks the clusters for each method and number of workers, and over all of them,
each method at one rate, by their deviation: the root mean square of log10(ours / published), losses
averaged over 20 worker steps. Bins outside the published axes are left out; a curve with fewer than
half of the published bins, because it diverged, has no deviation.

Times are in units of the mean time of a gradient, one second, because curves over worker steps have
no other unit. If the compute times hardly vary (cv 0.05), all delays are nearly constant with or
without a queue, and curves of one seed cannot distinguish service times of 0 and 0.2 s. To check a
cluster, run it with other --workers.

At paper scale the grid is 36 clusters and rates of 120,000 commits of MNIST's network for each
method: about eight hours on two cores for each seed.
"""

from typing import Any

import numpy as np
import pandas as pd

from asyncsim.base.errors import InputError, require_choice
from asyncsim.drawing.curves import curve_of
from asyncsim.replays.run import Run
from asyncsim.study import load_file, shipped
from asyncsim.study.cell import Cell, CellRun
from asyncsim.study.columns import titled
from asyncsim.study.comparison import Comparison, Further, Results
from asyncsim.study.ranking import Measure
from asyncsim.study.sweep import ComparisonConfig, preset
from asyncsim.traces.trace import Trace

#: The panels of the paper's figure by their methods.
_PANELS = {"gem": "1a", "downpour": "1b", "adaptive_staleness": "1c"}

Config, SCALES = preset(
    small={
        "workers": (5, 20),
        "problem": "mnist",
        "service": ("constant(0)", "constant(0.2)"),
        "protocol": ("exchange", "read_then_write"),
        "tune": (0.05, 0.02),
        "methods": ("gem", "downpour"),
        "steps": 100,
        "seeds": 1,
        "evaluate_every": None,
    },
    paper={
        "workers": (5, 10, 20, 30),
        "service": ("constant(0)", "constant(0.05)", "constant(0.2)"),
        "compute": tuple(f"gamma(mean=1, cv={cv})" for cv in (0.05, 0.2, 0.5)),
        "tune": (0.05, 0.01),
        "methods": ("gem", "downpour", "adaptive_staleness"),
        "steps": 938,
        "evaluate_every": 938,
        "diagnose_every": 0,
    },
)


def _published() -> Any:
    """Load the module of the published curves and their deviations."""
    return load_file("asyncsim.figures.gem.published", shipped("figures") / "gem" / "published.py")


def _target(method: str, workers: int) -> pd.Series:
    """Return the published losses of a method by bin."""
    curve = _published().binned(_PANELS[method], f"{method} n={workers}")
    if curve.empty:
        raise InputError(
            f"workers = {workers}: no curve of {method} is published for it; give 5, 10, 20 or 30"
        )
    return curve


def with_curves(config: ComparisonConfig, cells: list[Cell]) -> list[Cell]:
    """Raise InputError for a problem, a method or a number of workers without published curves."""
    for cell in cells:
        if not _published().TASK.is_posed_by(cell.problem.name, cell.problem.config):
            raise InputError(
                f"problem = {cell.problem.name!r}: has no published curves; give mnist, with its "
                "default network"
            )
        for method in cell.methods:
            _target(require_choice("methods", method.name, _PANELS), cell.cluster.workers)
    return cells


def deviation(job: CellRun, run: Run, trace: Trace) -> dict[str, float]:
    """Return the deviation of a run's losses from the published ones, NaN with less than half of
    their bins, and the number of common bins.
    """
    published, workers = _published(), job.cell.cluster.workers
    target = _target(job.method.name, workers)
    ours = curve_of([run], lambda commits: commits["loss"], "mean", workers, published.BIN_STEPS)
    bins = int((pd.Series(ours.mean).reindex(target.index).notna() & target.notna()).sum())
    is_enough = 2 * bins >= target.notna().sum()
    value = published.log_deviation(ours, target) if is_enough else np.nan
    return {"deviation": value, "bins": bins}


def clusters(table: Results) -> Further:
    """Tabulate the deviation of each cluster over all methods, each at its best rate, and numbers
    of workers.
    """
    names = table.compared
    square = table.rates.assign(square=table.rates["deviation"] ** 2)
    # All numbers of workers must count: a mean over the survivors would favour the worst clusters.
    of_rates = square.groupby([*names, "method", "learning_rate"], sort=False)["square"]
    of_rates = of_rates.agg(lambda values: values.mean(skipna=False))
    of_methods = of_rates.groupby(level=[*names, "method"], sort=False).min()
    pooled = of_methods.groupby(level=names, sort=False).agg(lambda v: v.mean(skipna=False))
    rows = np.sqrt(pooled).rename("deviation").sort_values(kind="stable").reset_index()
    text = "deviation over all methods and numbers of workers, the nearest cluster first"
    return {"fit.csv": rows}, [text, titled(rows)]


run = Comparison(
    "forensics",
    compared=("service", "compute", "protocol"),
    measure=lambda config, problem: Measure("deviation"),
    columns=("bins",),
    of_run=deviation,
    prepare=with_curves,
    further=clusters,
).run
