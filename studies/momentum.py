"""How much momentum asynchrony adds: measured on the central variable, against 1 - 1/n.

Asynchronous SGD on a quadratic, many seeds. With exponential compute times and an instantaneous
server the mean of the central variable follows exactly the recursion of momentum SGD with momentum
1 - 1/n (Mitliagkas, Zhang, Hadjis, Ré 2016, arXiv 1605.09774, theorem 5; on a quadratic from the
first commit)::

    E[w'' - w'] = momentum E[w' - w] - step E[w'],
    momentum = 1 - 1/n,  step = learning_rate curvature / n

Momentum and step are estimated jointly from the paths. Compute times that vary less violate the
assumption: the workers then commit nearly in turn, and the best fit to their mean path has another
momentum and step.
"""

import functools
import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd

from asyncsim.base.console import counted, number_text
from asyncsim.base.errors import InputError, require_count, require_positive
from asyncsim.base.files import read_table
from asyncsim.clusters.cluster import Cluster
from asyncsim.clusters.cluster_text import describe
from asyncsim.clusters.laws import Exponential, as_law
from asyncsim.methods import METHODS, Method
from asyncsim.problems.problem import Problem
from asyncsim.replays.replay import replay
from asyncsim.simulation.simulate import simulate
from asyncsim.study import results
from asyncsim.study.columns import titled
from asyncsim.study.config import JobOptions, LawLike
from asyncsim.study.finished import present
from asyncsim.study.jobs import Job, Result, Tables, executor_of, measurement, run_jobs
from asyncsim.study.sweep import check_values
from asyncsim.theory import implicit_momentum, window_step
from asyncsim.theory.queueing import journeys

TABLE = "momentum.csv"
_PRINTED = (
    "compute",
    "window",
    "method",
    "workers",
    "seeds",
    "momentum_measured",
    "momentum_theory",
    "step_measured",
    "step_theory",
    "assumptions_hold",
)
#: Worker steps after the path, until all gradients of its versions are committed: a worker with
#: exponential times takes longer once in 400 million commits.
_AFTER = 20
#: Fewest seeds that give an estimate a standard error.
_FEWEST = 3
#: Whether a method sends the mean of a window's steps instead of their sum.
_AVERAGED = {"downpour": False, "agn": True}


@dataclass(frozen=True)
class Config(JobOptions):
    """Options of the momentum study."""

    scale: Literal["small", "paper"] = "small"
    """Defaults of all other options. small: seconds; paper: more workers and seeds."""
    methods: tuple[Literal["downpour", "agn"], ...] = ("downpour",)
    """Methods, which send the sum or the mean of their local steps."""
    workers: tuple[int, ...] = (2, 4, 8, 16, 32)
    """Workers of the clusters."""
    compute: tuple[LawLike, ...] = (
        "exponential(1)",
        "gamma(mean=1, cv=0.5)",
        "gamma(mean=1, cv=0.2)",
    )
    """Laws of a local step's time (s)."""
    window: tuple[int, ...] = (1,)
    """Local steps per communication."""
    service: LawLike = "constant(0)"
    """Law of a visit's service time (s)."""
    latency: LawLike = "constant(0)"
    """Law of a message's time one way (s)."""
    step: float = 1.0
    """Step of a commit times workers, which sets the learning rate for each number of workers;
    above 1/4 the mean oscillates."""
    steps: int = 6
    """Commits per worker, on average."""
    seeds: int = 100
    """Number of seeds: 0, 1, ..."""

    def check(self) -> None:
        """Check the options."""
        super().check()
        for name in ("methods", "workers", "compute", "window"):
            check_values(name, getattr(self, name))
        require_count("steps", self.steps)
        require_positive("step", self.step)
        fewest = min(self.workers)
        if self.seeds < _FEWEST:
            raise InputError(
                f"seeds = {self.seeds}: must be at least {_FEWEST}, or the estimates have no error"
            )
        if fewest < 2:
            raise InputError(
                f"workers = {fewest}: any momentum fits a lone worker's path; give two or more"
            )
        if self.step >= fewest:
            raise InputError(
                f"step = {self.step}: must be below the fewest workers, {fewest}, or one commit "
                "overshoots"
            )
        self.clusters()

    def clusters(self) -> list[Cluster]:
        """Return a cluster for each law, number of workers and window."""
        return [
            Cluster(
                workers,
                as_law("compute", compute),
                service=as_law("service", self.service),
                latency=self.latency,
                window=window,
            )
            for compute, workers, window in itertools.product(
                self.compute, self.workers, self.window
            )
        ]

    def learning_rate(self, cluster: Cluster) -> float:
        """Return the learning rate that gives a window of local steps the requested step."""
        return 1 - (1 - self.step / cluster.workers) ** (1 / int(cluster.mean_window))


SCALES = {
    "small": Config(),
    "paper": Config(scale="paper", workers=(2, 4, 8, 16, 32, 64, 128), seeds=1000),
}


class Paths(NamedTuple):
    """Paths of the central variable for the seeds that stayed finite, ``[seeds, commits + 1]``, and
    summary rows.
    """

    values: np.ndarray
    rows: list[dict[str, Any]]


class Estimate(NamedTuple):
    """Estimated momentum and step of the mean path, with their standard errors."""

    momentum_measured: float = np.nan
    standard_error: float = np.nan
    step_measured: float = np.nan
    step_error: float = np.nan


def run(config: Config) -> Result:
    """Run the study; see `asyncsim.study.jobs.run_jobs`."""
    config.check()
    problem = revealing_quadratic()
    make_method = functools.cache(lambda name, rate: METHODS[name](rate))  # each is compiled once
    jobs = [
        _job(config, problem, cluster, make_method(name, config.learning_rate(cluster)))
        for cluster in config.clusters()
        for name in config.methods
    ]

    def conclude(folder: Path, summary: pd.DataFrame) -> None:
        table = read_table(folder / TABLE)
        legend = "assumed: theory's assumptions hold"
        present(folder, {}, report(table), legend, verdict=_verdict(table))

    record = {**config.options_record(), "problem": problem.name}
    executor = executor_of(config, [(problem, count) for count in config.workers])
    with config.computing_device():
        return run_jobs("momentum", config, record, jobs, executor, conclude)


def revealing_quadratic() -> Problem:
    """Build the quadratic ``x**2 / 2`` of one number whose recorded loss is the worker's ``x``.

    With exchanges the worker that commits a version reads it, so the recorded losses of a run are
    the path of the central variable.
    """

    def loss(x: Any, batch: None, key: Any) -> Any:
        value = jnp.sum(x * x) / 2
        return value + jax.lax.stop_gradient(jnp.sum(x) - value)

    def evaluate(x: Any, state: Any, data: None) -> dict[str, Any]:
        return {"loss": jnp.sum(x * x) / 2}

    return Problem(
        "quadratic",
        lambda key: jnp.ones(1),
        loss,
        evaluate,
        config={"curvature": [1.0], "start": 1.0},
    )


def _verdict(table: pd.DataFrame) -> str:
    """Say how far the measured momentum is from the theory's."""
    gap = (table["momentum_measured"] - table["momentum_theory"]).abs()
    if gap.isna().all():
        return "every path diverged: give a smaller --step"
    row = table.loc[gap.idxmax()]
    workers = counted(int(row["workers"]), "worker")
    return f"largest gap to theory's momentum: {number_text(gap.max())}, {workers}, {row['method']}"


def central_paths(config: Config, problem: Problem, cluster: Cluster, method: Method) -> Paths:
    """Replay all seeds and return the paths of the central variable."""
    workers, rate = cluster.workers, config.learning_rate(cluster)
    commits = config.steps * workers
    # The loss is the mean over the local steps of a window, and each step shrinks x by the same
    # factor.
    local = (1 - rate) ** np.arange(int(cluster.mean_window))
    values, rows = [], []
    for seed in range(config.seeds):
        trace = simulate(cluster, commits + _AFTER * workers, seed)
        replayed = replay(
            trace,
            method,
            problem,
            precision="float64",
            evaluate_every=len(trace),
            progress=False,
        )
        version, staleness = (
            trace.frame[name].to_numpy() for name in ("read_version", "staleness")
        )
        path = np.full(len(trace) + 1, np.nan)
        path[version[: len(replayed.commits)]] = replayed.commits["loss"] / local.mean()
        finite = bool(np.isfinite(path[: commits + 1]).all())
        if finite:
            values.append(path[: commits + 1])
        rows.append(
            {
                **_labels(cluster),
                "method": method.name,
                "seed": seed,
                "status": "finished" if finite else "diverged",
                "central": path[commits],
                "staleness_mean": staleness[workers:].mean(),
                "staleness_std": staleness[workers:].std(),
            }
        )
    return Paths(np.array(values).reshape(-1, commits + 1), rows)


def estimate_momentum(paths: np.ndarray) -> Estimate:
    """Estimate momentum and step of ``E[w'' - w'] = momentum E[w' - w] - step E[w']``.

    ``paths``: float[ndarray, "seeds commits+1"], three seeds or more.

    Notes
    -----
    The recursion holds for means, not for single paths, whose history carries more information
    about the next step. So each seed's regressors are multiplied with the mean over the *other*,
    independent seeds: the equations then hold exactly in expectation for any number of seeds.
    (Least squares on the mean path has noise in the regressors, hence a bias.) Standard errors by
    the jackknife: somewhat too large if the noise of the mean path is comparable to its moves.
    """
    move = np.diff(paths)
    x, y = np.stack([move[:, :-1], -paths[:, 1:-1]], axis=-1), move[:, 1:]
    own_xx, own_xy = np.einsum("sti,stj->sij", x, x), np.einsum("sti,st->si", x, y)
    sum_x, sum_y = x.sum(0), y.sum(0)

    def solve(x: np.ndarray, y: np.ndarray, xx: np.ndarray, xy: np.ndarray) -> np.ndarray:
        return np.linalg.solve(x.T @ x - xx, x.T @ y - xy)

    momentum, step = solve(sum_x, sum_y, own_xx.sum(0), own_xy.sum(0))
    without = np.array(
        [
            solve(sum_x - x[i], sum_y - y[i], own_xx.sum(0) - own_xx[i], own_xy.sum(0) - own_xy[i])
            for i in range(len(paths))
        ]
    )
    errors = without.std(0) * np.sqrt(len(paths) - 1)
    return Estimate(float(momentum), float(errors[0]), float(step), float(errors[1]))


def report(momentum: pd.DataFrame) -> pd.DataFrame:
    """Return the printed table, with standard errors."""
    workers = momentum["workers"]
    printed = momentum.assign(
        momentum_measured=_with_error(momentum["momentum_measured"], momentum["standard_error"]),
        step_measured=_with_error(
            workers * momentum["step_measured"], workers * momentum["step_error"]
        ),
        step_theory=workers * momentum["step_theory"],
        assumptions_hold=momentum["assumptions_hold"].map({True: "yes", False: "no"}),
    )
    return titled(printed, _PRINTED, digits=4)


def _with_error(values: pd.Series, errors: pd.Series) -> list[str]:
    pairs = zip(values, errors, strict=True)
    return ["-" if np.isnan(value) else f"{value:.4f} \u00b1 {error:.4f}" for value, error in pairs]


def _job(config: Config, problem: Problem, cluster: Cluster, method: Method) -> Job:
    return measurement(
        f"{describe(cluster)}, {method.name}, {counted(config.seeds, 'seed')}",
        _measured,
        *(config, problem, cluster, method),
        labels={**_labels(cluster), "method": method.name},
        say=_momentum_told,
    )


def _labels(cluster: Cluster) -> dict[str, Any]:
    """Return the columns that name a cluster."""
    window = int(cluster.mean_window)
    return {"compute": str(cluster.compute), "workers": cluster.workers, "window": window}


def _momentum_told(tables: Tables) -> str:
    (row,) = tables[TABLE]
    return f"momentum {row['momentum_measured']:.4f} \u00b1 {row['standard_error']:.4f}"


def _measured(config: Config, problem: Problem, cluster: Cluster, method: Method) -> Tables:
    """Measure a method on a cluster; return, by table, the estimate and a row per seed."""
    with config.computing_device():
        paths = central_paths(config, problem, cluster, method)
    seeds, labels = len(paths.values), _labels(cluster)
    estimate = estimate_momentum(paths.values) if seeds >= _FEWEST else Estimate()
    step = window_step(config.learning_rate(cluster), labels["window"], _AVERAGED[method.name])
    row = {
        **labels,
        "method": method.name,
        "seeds": seeds,
        **estimate._asdict(),
        "momentum_theory": implicit_momentum(cluster.workers),
        "step_theory": step / cluster.workers,
        **pd.DataFrame(paths.rows)[["staleness_mean", "staleness_std"]].mean(),
        "assumptions_hold": _assumptions_hold(cluster),
    }
    return {TABLE: [row], results.SUMMARY: paths.rows}


def _assumptions_hold(cluster: Cluster) -> bool:
    memoryless = isinstance(cluster.compute, Exponential) and cluster.window == 1
    return memoryless and cluster.service.mean == 0 and max(journeys(cluster)) == 0
