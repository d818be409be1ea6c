"""What an ensemble is worth: models trained alone, whose predictions are averaged.

dist-keras' EnsembleTrainer, the one of its trainers without a central variable: each model starts from its own initial
parameters, sees its own minibatches and never communicates. The predictions of the first k of them, as probabilities,
are averaged and judged on the test data, beside the models themselves. All draw from the whole training set; those of
dist-keras have a share each. A problem of your own needs test data and a predict: see asyncsim.problems.custom.
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

from asyncsim.base.calls import split
from asyncsim.base.console import over_seeds
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
from asyncsim.study.columns import text_of
from asyncsim.study.config import MethodLike, StudyConfig
from asyncsim.study.finished import present
from asyncsim.study.jobs import Result, measurement, opened, run_jobs
from asyncsim.study.loading import own_file
from asyncsim.study.sweep import sweep

#: Options of all studies for which this one has no use.
_IGNORED = ("evaluate_every", "diagnose_every", "diagnose_energy", "animate")
#: Options that say when a lone worker is served, and of nothing else; methods of one's own may look at the time.
_OF_TIMES = (
    *("service", "latency", "bandwidth", "shared_bandwidth", "message_bytes", "discipline", "read_blocks"),
    *("sites", "far_latency", "far_bandwidth"),
)
#: Options in the place of which some methods have what they need.
_OF_NEEDS = ("window", "protocol", "policy")


@dataclass(frozen=True)
class Config(StudyConfig):
    """Options of the study of ensembles."""

    workers: int = 8
    """Models, each trained by a worker of its own."""
    steps: int = 450
    """Commits of each model."""
    methods: tuple[MethodLike, ...] = ("sgd",)
    """Methods that models are trained with, by one worker each; or your own as FILE.py:FUNCTION (see the README)."""


def run(config: Config) -> Result:
    """Run the study; see `asyncsim.study.jobs.run_jobs`."""
    config.check()
    config.say_ignored(_IGNORED, "here")
    with config.computing_device():
        (cell,) = sweep(config, [{}])
        config.say_ignored(_unused(config, cell.methods), "here")
        _require_predictions(cell.problem)
        record = {"study": "ensembles", **config.record(cell.methods, cell.problem)}
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
            text = f"{cell.problem.name}, {seeds}; of the first so many models, without those that diverged"
            present(folder, {}, text, report(summary))

        return run_jobs("ensembles", config, record, jobs, opened(config, [(cell.problem, config.workers)]), conclude)


def _unused(config: Config, methods: Sequence[Method]) -> list[str]:
    """Return the options of the cluster that change nothing for models trained alone, with these methods."""
    shipped = all(isinstance(entry, str) and not own_file(entry)[0] for entry in split(config.methods))
    needs = [name for name in _OF_NEEDS if all(getattr(method.timing, name) is not None for method in methods)]
    return [*(_OF_TIMES if shipped else ()), *needs]


def _require_predictions(problem: Problem) -> None:
    if problem.predict is None:
        raise InputError(
            f"problem = {problem.name!r}: says of no examples what it predicts; choose digits, say, or give "
            "asyncsim.problems.custom, if it is your own, a function predict(params, data)"
        )
    if problem.test is None:
        raise InputError(f"problem = {problem.name!r}: has no test data to predict; give some, or choose digits, say")


def report(summary: pd.DataFrame) -> str:
    """Return the table that the study prints: means over the seeds."""
    means = summary.drop(columns="seed").groupby(["method", "models"], sort=False).mean().reset_index()
    return text_of(means, digits=4)


def averaged_predictions(problem: Problem, models: Sequence[Any], data: Any) -> dict[str, float]:
    """Return loss (nats) and accuracy, over all examples, of the mean of the models' predicted probabilities.

    ``problem``: one that predicts. ``models``: the parameters of each model. ``data``: examples with a ``"label"``
    each.
    """
    predict: Any = problem.predict

    def means(part: Any) -> dict[str, jax.Array]:
        # In logarithms, in which a model that is sure and wrong has a finite loss.
        logs = jnp.stack([jax.nn.log_softmax(predict(params, part)) for params in models])
        mean = jax.nn.logsumexp(logs, axis=0) - math.log(len(models))
        right = jnp.take_along_axis(mean, part["label"][:, None], axis=1)
        return {"loss": -jnp.mean(right), "accuracy": accuracy(mean, part["label"])}

    with whole_products():
        found = jax.jit(lambda data: mean_in_pieces(means, data))(jax.tree.map(jnp.asarray, data))
    return {name: float(value) for name, value in found.items()}


def _ensemble(
    config: Config, cluster: Cluster, method: Method, problem: Problem, seed: int
) -> dict[str, list[dict[str, Any]]]:
    """Return the rows of a method and a seed, one for each number of models; what diverged is left out of the means."""
    alone = meet(meet(cluster, Timing(workers=1)), method.timing)
    models, single, rows = [], [], []
    with config.computing_device():
        for number in range(config.workers):
            own = seed * config.workers + number
            run = replay(
                simulate(alone, config.steps, own),
                method,
                problem,
                own,
                precision=config.precision,
                evaluate_every=config.steps,
                progress=False,
            )
            if run.diverged_at is None:
                models.append(run.params)
                single.append(averaged_predictions(problem, models[-1:], problem.test))
            diverged = number + 1 - len(models)
            row = {"method": method.name, "seed": seed, "models": number + 1, "diverged": diverged}
            together = averaged_predictions(problem, models, problem.test) if models else {}
            for name in ("loss", "accuracy"):
                mean = float(np.mean([one[name] for one in single])) if single else math.nan
                row |= {f"test_{name}": together.get(name, math.nan), f"single_{name}": mean}
            rows.append(row)
    return {results.SUMMARY: rows}
