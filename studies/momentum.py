"""How much momentum asynchrony adds: measured on the path of the central variable, against 1 - 1/n.

Asynchronous SGD on a quadratic, many seeds. With exponential compute times and a server that takes no time, the mean of
the central variable follows exactly the recursion of momentum SGD with momentum 1 - 1/n (Mitliagkas, Zhang, Hadjis, Ré
2016, arXiv 1605.09774, theorem 5; on a quadratic from the first commit on)::

    E[w'' - w'] = momentum E[w' - w] - step E[w'],    momentum = 1 - 1/n,  step = learning_rate curvature / n

Both numbers are estimated from the paths, without knowing either. Compute times that vary less break the assumption:
the workers then come nearly in turn, and what fits their mean path best has another momentum and another step.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd

from asyncsim.base.console import counted
from asyncsim.base.errors import InputError, require_positive
from asyncsim.base.files import read_table
from asyncsim.clusters.cluster_text import describe
from asyncsim.methods import Method
from asyncsim.problems.problem import Problem
from asyncsim.replays.replay import replay
from asyncsim.simulation.simulate import simulate
from asyncsim.study import results
from asyncsim.study.cell import Cell
from asyncsim.study.config import LawLike, MethodLike, ProblemLike
from asyncsim.study.finished import present
from asyncsim.study.jobs import Job, Result, Tables, measurement, opened, run_jobs
from asyncsim.study.sweep import SweepConfig, sweep
from asyncsim.theory import implicit_momentum, implicit_momentum_path, window_step
from asyncsim.theory.queueing import memoryless

TABLES = ("momentum.csv", "paths.csv")
#: Worker steps after the path, in which all that was read on it is committed: a worker of exponential times stays away
#: longer once in 400 million commits.
_AFTER = 20
#: Options without effect: all that is looked at are the losses.
_IGNORED = ("evaluate_every", "diagnose_every", "diagnose_energy", "animate")
#: Seeds of which the error of an estimate can be told.
_FEWEST = 3
#: Methods whose window theory knows with plain local steps, and whether they send the mean of these instead of the sum.
_AVERAGED = {"downpour": False, "agn": True}


@dataclass(frozen=True)
class Config(SweepConfig):
    """Options of the momentum study."""

    varied: ClassVar = ("workers", "compute")

    workers: tuple[int, ...] = (2, 4, 8, 16, 32)
    """Workers of the clusters, one after the other; two or more."""
    compute: tuple[str, ...] = ("exponential(1)", "gamma(mean=1, cv=0.5)", "gamma(mean=1, cv=0.2)")
    """Laws of the time of a local step (s), one after the other."""
    service: LawLike = "constant(0)"
    """Law of the time that the server is busy with a visit (s)."""
    methods: tuple[MethodLike, ...] = ("downpour",)
    """Methods whose local steps are plain gradient descent."""
    steps: int = 6
    """Commits per worker on the path that is looked at."""
    seeds: int = 100
    """Number of seeds: 0, 1, ..., of which there must be three."""
    step: float = 1.0
    """Step of a commit times workers, which sets the learning rate for each number of workers; above 1/4 the mean
    oscillates."""
    problem: ProblemLike = "quadratic"
    """The quadratic of this study, and no other."""
    x64: bool = True
    """Compute in float64 instead of float32."""

    def check(self) -> None:
        """Check the options; see `StudyOptions.check`."""
        super().check()
        require_positive("step", self.step)
        if self.seeds < _FEWEST:
            raise InputError(f"seeds = {self.seeds}: must be at least {_FEWEST}, or the estimates have no error")
        if min(self.workers) < 2:
            raise InputError("workers = 1: a lone worker's path is that of any momentum; give two or more")
        if self.step >= min(self.workers):
            raise InputError(
                f"step = {self.step}: must be below the fewest workers, {min(self.workers)}, or one commit goes too far"
            )
        if self.protocol != "exchange":
            raise InputError(f"protocol = {self.protocol!r}: must be 'exchange', in which every version is read")
        if self.policy != "asynchronous":
            raise InputError(
                f"policy = {self.policy}: must be asynchronous, in which every version is read; leave it out"
            )
        if self.changed("learning_rate"):
            raise InputError(f"learning_rate = {self.learning_rate}: follows from step here; give that")
        if self.problem != "quadratic":
            raise InputError(f"problem = {self.problem!r}: this study is of a quadratic; leave it out")


SCALES = {"small": Config(), "paper": Config(scale="paper", workers=(2, 4, 8, 16, 32, 64, 128), seeds=1000)}


class Paths(NamedTuple):
    """The paths of the central variable, one for each seed that stayed finite: ``[seeds, commits + 1]``, from 1."""

    values: np.ndarray
    rows: list[dict[str, Any]]


class Estimate(NamedTuple):
    """Momentum and step that paths have on average, with their standard errors."""

    momentum: float
    momentum_error: float
    step: float
    step_error: float


def run(config: Config) -> Result:
    """Run the study; see `asyncsim.study.jobs.run_jobs`."""
    config.check()
    config.say_ignored(_IGNORED, "here")
    with config.computing_device():
        problem = revealing_quadratic()
        cells = sweep(replace(config, problem=problem), _grid(config))
        if not any("momentum" in method.hyperparameters for method in cells[0].methods):
            config.say_ignored(["momentum"], "here: it would be that of a proxy, of which this study tells nothing")
        for method in cells[0].methods:
            timed = method.timing.policy is not None or method.timing.protocol not in (None, "exchange")
            if timed or method.resume or method.reply or method.look_ahead:
                raise InputError(
                    f"methods: workers of {method.name!r} do not compute at every version of the central variable, "
                    "whose path this study takes from their losses; leave it out"
                )
            if config.window > 1 and not _steps_plainly(method):
                raise InputError(
                    f"optimizer = {method.hyperparameters['optimizer']!r}: with a window above one the path is known "
                    "of plain gradient steps alone; leave optimizer out, or give window 1"
                )
        record = {"study": "momentum", **config.record(cells[0].methods, problem)}
        executor = opened(config, [(problem, cell.cluster.workers) for cell in cells])
        jobs = [_job(cell, method) for cell in cells for method in cell.methods]

        def conclude(folder: Path, summary: pd.DataFrame) -> None:
            present(folder, {}, report(read_table(folder / TABLES[0])))

        return run_jobs("momentum", config, record, jobs, executor, conclude)


def revealing_quadratic() -> Problem:
    """Return ``x**2 / 2`` of one number, whose recorded loss is not that but the ``x`` that the worker had.

    With exchanges every version of the central variable is read by the worker that made it; so the losses of a run are
    the path of the central variable.
    """

    def loss(x: Any, batch: None, key: Any) -> Any:
        value = jnp.sum(x * x) / 2
        return value + jax.lax.stop_gradient(jnp.sum(x) - value)

    def evaluate(x: Any, state: Any, data: None) -> dict[str, Any]:
        return {"loss": jnp.sum(x * x) / 2}

    return Problem("quadratic", lambda key: jnp.ones(1), loss, evaluate, config={"curvature": [1.0], "start": 1.0})


def central_paths(cell: Cell, method: Method, steps: int) -> Paths:
    """Return the paths of the central variable of all seeds, over so many worker steps."""
    workers, config = cell.cluster.workers, cell.config
    commits = steps * workers
    # The loss is the mean over the local steps of a window, of which each shrinks x by the same.
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
        version, staleness = (trace.frame[name].to_numpy() for name in ("read_version", "staleness"))
        path = np.full(len(trace) + 1, np.nan)
        path[version[: len(replayed.commits)]] = replayed.commits["loss"] / local.mean()
        finite = bool(np.isfinite(path[: commits + 1]).all())
        if finite:
            values.append(path[: commits + 1])
        rows.append(
            {
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
    The recursion holds for means, and not for single paths: there, what a path did before says more of its next step.
    So each seed's regressors are multiplied with the mean of the *other* seeds' ones, which are independent of it: the
    equations then hold exactly in expectation, however few the seeds (least squares on the mean path has its noise in
    the regressors, and a bias). Standard errors by leaving out one seed at a time: somewhat too large where the noise
    of the mean path is not small against its moves.
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


def report(momentum: pd.DataFrame) -> str:
    """Return the table that the study prints."""
    shown = ["compute", "window", "method", "workers", "seeds"]
    table = momentum[shown].copy()
    table["momentum"] = _with_error(momentum["momentum_measured"], momentum["standard_error"])
    table["theory"] = momentum["momentum_theory"]
    workers = momentum["workers"]
    table["step x n"] = _with_error(workers * momentum["step_measured"], workers * momentum["step_error"])
    table["in theory"] = workers * momentum["step_theory"]
    table["path off"] = _with_error(momentum["path_off"], momentum["path_error"])
    table["assumed"] = momentum["assumptions_hold"].map({True: "yes", False: "no"})
    text = table.to_string(index=False, float_format="{:.4f}".format, na_rep="-")
    return f"{text}\n(path off: the mean path from theory's, root mean square; assumed: theory's assumptions hold)"


def _with_error(values: pd.Series, errors: pd.Series) -> list[str]:
    pairs = zip(values, errors, strict=True)
    return ["-" if np.isnan(value) else f"{value:.4f} +- {error:.4f}" for value, error in pairs]


def _grid(config: Config) -> list[dict[str, Any]]:
    """Return the cells' values; the learning rate gives a window of plain local steps the step that is asked for."""
    return [
        {"compute": law, "workers": n, "learning_rate": 1 - (1 - config.step / n) ** (1 / config.window)}
        for law in config.compute
        for n in config.workers
    ]


def _job(cell: Cell, method: Method) -> Job:
    return measurement(
        f"{describe(cell.cluster)}, {method.name}",
        _measured,
        *(cell, method),
        place=f"parts/{cell.folder}/{method.name}-{counted(cell.config.seeds, 'seed')}",
        labels={**_of_cell(cell), "method": method.name},
        say=_momentum_told,
    )


def _momentum_told(tables: Tables) -> str:
    (row,) = tables[TABLES[0]]
    return f"momentum {row['momentum_measured']:.4f} +- {row['standard_error']:.4f}"


def _measured(cell: Cell, method: Method) -> dict[str, list[dict[str, Any]]]:
    """Return, by their tables, the estimate of a cell and method, the mean path by commits, and what each seed did."""
    with cell.config.computing_device():
        found = central_paths(cell, method, cell.config.steps)
    path = _path(cell, method, found.values)
    labels = {**_of_cell(cell), "method": method.name}
    row = {**labels, **_estimated(cell, method, found, path)}
    rows = [row], [{**labels, **point} for point in path], [{**_of_cell(cell), **seed} for seed in found.rows]
    return dict(zip((*TABLES, results.SUMMARY), rows, strict=True))


def _of_cell(cell: Cell) -> dict[str, Any]:
    return {
        "compute": str(cell.values["compute"]),
        "workers": cell.cluster.workers,
        "window": cell.cluster.window,
    }


def _estimated(cell: Cell, method: Method, found: Paths, path: list[dict[str, Any]]) -> dict[str, Any]:
    enough = len(found.values) >= _FEWEST
    estimate = estimate_momentum(found.values) if enough else Estimate(*[np.nan] * len(Estimate._fields))
    mean, error, theory = (np.array([point[name] for point in path]) for name in ("mean", "standard_error", "theory"))
    return {
        "seeds": len(found.values),
        "momentum_measured": estimate.momentum,
        "standard_error": estimate.momentum_error,
        "momentum_theory": implicit_momentum(cell.cluster.workers),
        "step_measured": estimate.step,
        "step_error": estimate.step_error,
        "step_theory": _commit_step(cell, method) / cell.cluster.workers,
        "path_off": float(np.sqrt(np.mean((mean - theory) ** 2))),
        "path_error": float(np.sqrt(np.mean(error**2))),
        "staleness_mean": float(np.mean([row["staleness_mean"] for row in found.rows])),
        "staleness_std": float(np.mean([row["staleness_std"] for row in found.rows])),
        "assumptions_hold": _is_known(cell, method) and _assumptions_hold(cell),
    }


def _path(cell: Cell, method: Method, values: np.ndarray) -> list[dict[str, Any]]:
    """Return mean, standard error and theory of the central variable after each commit."""
    step = _commit_step(cell, method)
    commits = values.shape[1] - 1
    theory = np.full(commits + 1, np.nan)
    if np.isfinite(step):
        theory = implicit_momentum_path(cell.cluster.workers, step, commits)
    enough = len(values) >= _FEWEST
    mean = values.mean(0) if enough else np.full(commits + 1, np.nan)
    error = values.std(0, ddof=1) / np.sqrt(len(values)) if enough else mean
    columns = zip(mean.tolist(), error.tolist(), theory.tolist(), strict=True)
    return [
        {"commit": k, "mean": mean, "standard_error": error, "theory": theory}
        for k, (mean, error, theory) in enumerate(columns)
    ]


def _commit_step(cell: Cell, method: Method) -> float:
    """Return how far one commit goes of what was read, NaN for a method that theory does not know."""
    if not _is_known(cell, method):
        return np.nan
    return window_step(cell.config.learning_rate, cell.config.window, _AVERAGED[method.name])


def _is_known(cell: Cell, method: Method) -> bool:
    """Return whether theory knows how far a commit of the method goes: that of plain steps of the cell's own rate."""
    rate = method.hyperparameters.get("learning_rate")
    return method.name in _AVERAGED and _steps_plainly(method) and rate == cell.config.learning_rate


def _steps_plainly(method: Method) -> bool:
    """Return whether the local steps are gradient descent; optax's own ``sgd``, by its name, is just that."""
    return method.hyperparameters.get("optimizer", "sgd") == "sgd"


def _assumptions_hold(cell: Cell) -> bool:
    return memoryless(cell.cluster) and cell.cluster.service.mean == 0
