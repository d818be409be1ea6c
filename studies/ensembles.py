"""What an ensemble gains: models are trained alone, and their predictions are averaged.

dist-keras' EnsembleTrainer, its only trainer without a central variable: each model has separate
initial parameters and minibatches and never communicates. The predicted probabilities of the first
k models are averaged and judged on the test data, beside the single models. All models draw from
the whole training set; in dist-keras each has a shard. A custom problem needs test data and a
predict: see asyncsim.problems.custom.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd

from asyncsim.base.console import counted, over_seeds
from asyncsim.base.errors import InputError
from asyncsim.base.tracing import whole_products
from asyncsim.clusters.cluster import Cluster
from asyncsim.methods import Method, Timing
from asyncsim.problems import Problem
from asyncsim.problems.layers import accuracy
from asyncsim.problems.problem import mean_in_pieces
from asyncsim.replays.replay import replay
from asyncsim.simulation.simulate import simulate
from asyncsim.study import results
from asyncsim.study.cell import meet
from asyncsim.study.config import MethodLike, StudyConfig
from asyncsim.study.finished import present
from asyncsim.study.jobs import Result, executor_of, measurement, run_jobs
from asyncsim.study.ranking import Measure, grid, ranked, ranked_parts, verdict
from asyncsim.study.sweep import sweep

_LOSS = Measure("test_loss")
#: Further columns of the table.
_FURTHER = ("single_loss", "test_accuracy", "single_accuracy")


@dataclass(frozen=True)
class Config(StudyConfig):
    """Options of the study of ensembles."""

    workers: int = 8
    """Models, each trained by a separate worker."""
    steps: int = 450
    """Commits of each model."""
    methods: tuple[MethodLike, ...] = ("sgd",)
    """Methods that models are trained with, by one worker each; or your own as FILE.py:FUNCTION
    (see the README).
    """


def run(config: Config) -> Result:
    """Run the study; see `asyncsim.study.jobs.run_jobs`."""
    config.check()
    with config.computing_device():
        (cell,) = sweep(config, [{}])
        _require_predictions(cell.problem)
        record = config.record(cell.methods, cell.problem)
        jobs = [
            measurement(
                f"{method.name}, seed {seed}",
                _ensemble,
                *(config, cell.cluster, method, cell.problem, seed),
                labels={"method": method.name, "seed": seed},
            )
            for seed in range(config.seeds)
            for method in cell.methods
        ]

        def conclude(folder: Path, summary: pd.DataFrame) -> None:
            seeds = over_seeds(summary["seed"].nunique(), "means over")
            text = (
                f"{cell.problem.name}, {seeds}; averages over the first models, without diverged "
                "ones"
            )
            table = ranked_ensembles(summary)
            sizes = [counted(int(models), "model") for models in table["models"]]
            names = [f"{row} with {size}" for row, size in zip(table["method"], sizes, strict=True)]
            words = verdict(table, names, _LOSS, "ensemble")
            parts = ranked_parts(table, ("method", "models"), _LOSS, _FURTHER)
            present(folder, {}, text, *parts, verdict=words)

        executor = executor_of(config, [(cell.problem, config.workers)])
        return run_jobs("ensembles", config, record, jobs, executor, conclude)


def _require_predictions(problem: Problem) -> None:
    if problem.predict is None:
        raise InputError(
            f"problem = {problem.name!r}: has no predictions; choose digits, say, or give "
            "asyncsim.problems.custom a function predict(params, data)"
        )
    if problem.test is None:
        raise InputError(
            f"problem = {problem.name!r}: has no test data to predict; give some, or choose "
            "digits, say"
        )


def ranked_ensembles(summary: pd.DataFrame) -> pd.DataFrame:
    """Rank the ensembles of each method and number of models by their test loss."""
    is_left = summary["test_loss"].notna()  # else all models have diverged
    runs = summary.assign(status=np.where(is_left, "finished", "diverged"))
    keys = ["method", "models"]
    return ranked(grid(runs, keys, _FURTHER, _LOSS), runs, keys, _LOSS)


def averaged_predictions(problem: Problem, models: Sequence[Any], data: Any) -> dict[str, float]:
    """Compute loss (nats) and accuracy of the models' mean predicted probabilities over all
    examples.

    ``problem``: must have ``predict``. ``models``: parameters of each model. ``data``: labelled
    examples.
    """
    predict: Any = problem.predict

    def means(part: Any) -> dict[str, jax.Array]:
        # In logarithms, so that a confident wrong prediction has a finite loss.
        logs = jnp.stack([jax.nn.log_softmax(predict(params, part)) for params in models])
        mean = jax.nn.logsumexp(logs, axis=0) - math.log(len(models))
        right = jnp.take_along_axis(mean, part["label"][:, None], axis=1)
        return {"loss": -jnp.mean(right), "accuracy": accuracy(mean, part["label"])}

    with whole_products():
        means_by_name = jax.jit(lambda data: mean_in_pieces(means, data))(
            jax.tree.map(jnp.asarray, data)
        )
    return {name: float(value) for name, value in means_by_name.items()}


def _ensemble(
    config: Config, cluster: Cluster, method: Method, problem: Problem, seed: int
) -> dict[str, list[dict[str, Any]]]:
    """Train the models of a method and a seed; return a row per number of models, without diverged
    models.
    """
    lone_cluster = meet(meet(cluster, Timing(workers=1)), method.timing)
    models, single, rows = [], [], []
    with config.computing_device():
        for number in range(config.workers):
            model_seed = seed * config.workers + number
            run = replay(
                simulate(lone_cluster, config.steps, model_seed),
                method,
                problem,
                model_seed,
                precision=config.precision,
                evaluate_every=config.steps,
                progress=False,
            )
            if run.diverged_at is None:
                models.append(run.params)
                single.append(averaged_predictions(problem, models[-1:], problem.test))
            diverged = number + 1 - len(models)
            row = {"method": method.name, "seed": seed, "models": number + 1, "diverged": diverged}
            ensemble = averaged_predictions(problem, models, problem.test) if models else {}
            for name in ("loss", "accuracy"):
                mean = float(np.mean([scores[name] for scores in single])) if single else math.nan
                row |= {f"test_{name}": ensemble.get(name, math.nan), f"single_{name}": mean}
            rows.append(row)
    return {results.SUMMARY: rows}
