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

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd

from asyncsim.base.console import counted, number_text
from asyncsim.base.errors import InputError, require_choice, require_count, require_positive
from asyncsim.base.files import read_table
from asyncsim.clusters.cluster_text import describe
from asyncsim.clusters.laws import Exponential
from asyncsim.methods import Method
from asyncsim.problems.problem import Problem
from asyncsim.replays.replay import replay
from asyncsim.simulation.simulate import simulate
from asyncsim.study import results
from asyncsim.study.cell import Cell
from asyncsim.study.columns import titled
from asyncsim.study.finished import present
from asyncsim.study.jobs import Result, Tables, executor_of, measurement, run_jobs
from asyncsim.study.ranking import spread
from asyncsim.study.sweep import ComparisonConfig, preset, sweep
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
#: The problem, and a protocol and a policy with which every version is read.
_NEEDED = {"protocol": "exchange", "policy": "asynchronous", "problem": "quadratic"}
#: Methods whose windows of plain local steps theory covers, and whether they send the mean instead
#: of the sum.
_AVERAGED = {"downpour": False, "agn": True}


@dataclass(frozen=True)
class Options(ComparisonConfig):
    """Options of the momentum study."""

    step: float = 1.0
    """Step of a commit times workers, which sets the learning rate for each number of workers;
    above 1/4 the mean oscillates."""

    @property
    def varied(self) -> dict[str, tuple[Any, ...]]:
        """The options with several values; laws and workers always vary."""
        return {"compute": (self.compute,), "workers": (self.workers,), **super().varied}

    def points(self) -> list[dict[str, Any]]:
        """Return the values of each cell; the learning rate gives a window of plain local steps
        the requested step.
        """
        return [
            {
                **point,
                "learning_rate": 1
                - (1 - self.step / point["workers"]) ** (1 / point.get("window", self.window)),
            }
            for point in super().points()
        ]

    def check(self) -> None:
        """Check the options; see `StudyConfig.check`."""
        require_positive("step", self.step)
        fewest = min(self.varied["workers"])
        require_count("seeds", self.seeds, _FEWEST)  # or the estimates have no error
        if fewest < 2:
            raise InputError(
                "workers = 1: any momentum fits a lone worker's path; give two or more"
            )
        if self.step >= fewest:
            raise InputError(
                f"step = {self.step}: must be below the fewest workers, {fewest}, or one commit "
                "overshoots"
            )
        if self.changed("learning_rate"):
            raise InputError(
                f"learning_rate = {self.learning_rate}: follows from step here; give that"
            )
        for name, value in _NEEDED.items():
            require_choice(name, getattr(self, name), (value,))
        super().check()


Config, SCALES = preset(
    Options,
    small={
        "workers": (2, 4, 8, 16, 32),
        "compute": ("exponential(1)", "gamma(mean=1, cv=0.5)", "gamma(mean=1, cv=0.2)"),
        "service": "constant(0)",
        "methods": ("downpour",),
        "steps": 6,
        "seeds": 100,
        "problem": "quadratic",
        "x64": True,
    },
    paper={"workers": (2, 4, 8, 16, 32, 64, 128), "seeds": 1000},
)


class Estimate(NamedTuple):
    """Estimated momentum and step of the mean path, with their standard errors."""

    momentum_measured: float = np.nan
    standard_error: float = np.nan
    step_measured: float = np.nan
    step_error: float = np.nan


def run(config: Options) -> Result:
    """Run the study; see `asyncsim.study.jobs.run_jobs`."""
    config.check()
    with config.computing_device():
        problem = revealing_quadratic()
        cells = sweep(replace(config, problem=problem), config.points())
        for method in cells[0].methods:
            _require_known_path(config, method)
        record = config.record(cells[0].methods, problem)
        executor = executor_of(config, [(problem, cell.cluster.workers) for cell in cells])
        jobs = []
        for cell in cells:
            cluster, compute = cell.cluster, str(cell.values["compute"])
            labels = {"compute": compute, "workers": cluster.workers, "window": cluster.window}
            for method in cell.methods:
                named = {**labels, "method": method.name}
                seeds = counted(config.seeds, "seed")
                name = f"{describe(cluster)}, {method.name}, {seeds}"
                place = f"parts/{cell.folder}"
                jobs.append(
                    measurement(name, _measured, cell, method, named, folder=place, labels=named)
                )
        return run_jobs("momentum", config, record, jobs, executor, _conclude)


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


def _require_known_path(config: Options, method: Method) -> None:
    """Raise InputError for a method whose recorded losses do not give the central path."""
    timing = method.timing
    reads_all = timing.policy is None and timing.protocol in (None, "exchange")
    if not reads_all or method.resume or method.reply or method.look_ahead:
        raise InputError(
            f"methods: workers of {method.name!r} do not read every version of the central "
            "variable, so their losses do not give its path; leave it out"
        )
    if not _steps_plainly(method) and max(np.atleast_1d(config.window)) > 1:
        raise InputError(
            f"optimizer = {method.hyperparameters['optimizer']!r}: with a window above one the "
            "path is known for plain gradient steps only; leave optimizer out, or give window 1"
        )


def _conclude(folder: Path, summary: pd.DataFrame) -> None:
    table = read_table(folder / TABLE)
    gap = (table["momentum_measured"] - table["momentum_theory"]).abs()
    words = "no momentum was measured for which there is a theory"
    if gap.notna().any():
        row = table.loc[gap.idxmax()]
        workers = counted(int(row["workers"]), "worker")
        words = f"largest gap to theory's momentum: {number_text(gap.max())}, {workers}"
        words += f", {row['method']}"
    present(folder, {}, report(table), "assumed: theory's assumptions hold", verdict=words)


def central_paths(
    cell: Cell, method: Method, steps: int
) -> tuple[np.ndarray, list[dict[str, Any]]]:
    """Replay all seeds over ``steps`` worker steps; return the paths of the central variable for
    the seeds that stayed finite, ``[seeds, commits + 1]``, and a summary row for each seed.
    """
    workers, config = cell.cluster.workers, cell.config
    commits = steps * workers
    # The loss is the mean over the local steps of a window, and each step shrinks x by the same
    # factor.
    local = (1 - config.learning_rate) ** np.arange(config.window)
    values, rows = [], []
    for seed in range(config.seeds):
        trace = simulate(cell.cluster, commits + _AFTER * workers, seed)
        replayed = replay(
            trace,
            method,
            cell.problem,
            precision=config.precision,
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
                "seed": seed,
                "status": "finished" if finite else "diverged",
                "central": path[commits],
                "staleness_mean": staleness[workers:].mean(),
                "staleness_std": staleness[workers:].std(),
            }
        )
    return np.reshape(values, (-1, commits + 1)), rows


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

    def solve(seeds: np.ndarray) -> np.ndarray:
        x_own, y_own = x[seeds], y[seeds]
        sum_x, sum_y = x_own.sum(0), y_own.sum(0)
        xx = sum_x.T @ sum_x - np.einsum("sti,stj->ij", x_own, x_own)
        return np.linalg.solve(xx, sum_x.T @ sum_y - np.einsum("sti,st->i", x_own, y_own))

    every = np.arange(len(paths))
    without = np.array([solve(np.delete(every, seed)) for seed in every])
    errors = without.std(0) * np.sqrt(len(paths) - 1)
    (momentum, step), (momentum_error, step_error) = solve(every).tolist(), errors.tolist()
    return Estimate(momentum, momentum_error, step, step_error)


def report(table: pd.DataFrame) -> pd.DataFrame:
    """Return the printed table, with standard errors."""
    errors = {"standard_error": "momentum_measured_sd", "step_error": "step_measured_sd"}
    table, steps = (
        table.rename(columns=errors),
        ["step_measured", "step_measured_sd", "step_theory"],
    )
    table[steps] = table[steps].mul(table["workers"], axis=0)
    measured = {name: spread(table, name) for name in ("momentum_measured", "step_measured")}
    holds = table["assumptions_hold"].map({True: "yes", False: "no"})
    return titled(table.assign(**measured, assumptions_hold=holds), _PRINTED, digits=4)


def _measured(cell: Cell, method: Method, labels: dict[str, Any]) -> Tables:
    """Measure a cell and method; return, by table, the estimate and a row per seed."""
    with cell.config.computing_device():
        paths, rows = central_paths(cell, method, cell.config.steps)
    workers = cell.cluster.workers
    step, assumptions_hold = _theory(cell, method)
    row = {
        **labels,
        "seeds": len(paths),
        **(estimate_momentum(paths) if len(paths) >= _FEWEST else Estimate())._asdict(),
        "momentum_theory": implicit_momentum(workers),
        "step_theory": step / workers,
        **pd.DataFrame(rows)[["staleness_mean", "staleness_std"]].mean(),
        "assumptions_hold": assumptions_hold,
    }
    return {TABLE: [row], results.SUMMARY: [{**labels, **seed} for seed in rows]}


def _theory(cell: Cell, method: Method) -> tuple[float, bool]:
    """Return the step of a commit relative to the version read, and whether the theory of the
    momentum holds; NaN and False for other methods than plain steps at the cell's learning rate.
    """
    config, cluster = cell.config, cell.cluster
    rate = method.hyperparameters.get("learning_rate")
    is_known = method.name in _AVERAGED and _steps_plainly(method)
    if not is_known or rate != config.learning_rate:
        return np.nan, False
    is_memoryless = isinstance(cluster.compute, Exponential) and cluster.window == 1
    is_instantaneous = cluster.service.mean == 0 and max(journeys(cluster)) == 0
    step = window_step(config.learning_rate, config.window, _AVERAGED[method.name])
    return step, is_memoryless and is_instantaneous


def _steps_plainly(method: Method) -> bool:
    """Return whether the local steps are gradient descent, as with optax's ``sgd``."""
    return method.hyperparameters.get("optimizer", "sgd") == "sgd"
