"""What an ensemble is worth: models trained alone, whose predictions are averaged.

dist-keras' EnsembleTrainer, the one of its trainers without a central variable: each model starts from its own initial
parameters, sees its own minibatches and never communicates. The predictions of the first k of them, as probabilities,
are averaged and judged on the test data, beside the models themselves. All draw from the whole training set; those of
dist-keras have a share each.
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from asyncsim import results
from asyncsim.errors import InputError
from asyncsim.study_config import MethodLike, StudyConfig
from asyncsim.sweep import Result

if TYPE_CHECKING:
    import pandas as pd

    from asyncsim.cluster import Cluster
    from asyncsim.methods import Method
    from asyncsim.problems import Problem


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
    """Run the study.

    Raises
    ------
    InputError
        An option that cannot be used, or a folder or disk that cannot be written.
    KeyboardInterrupt
        Passed on; the ensembles that were finished are in the summary.
    """
    config.check()
    import pandas as pd

    with config.computing_device():
        methods, problem = config.make_methods(), config.make_problem()
        if problem.predict is None or problem.test is None:
            raise InputError(f"problem = {problem.name!r}: says of no examples what it predicts; choose digits, say")
        cluster = config.make_cluster(message_bytes=problem.parameter_count * config.bytes_per_parameter)
        record = {"study": "ensembles", **config.record(methods, problem)}
        rows: list[dict[str, Any]] = []
        with results.new_folder(config.out, "ensembles") as folder:
            results.write_json(folder / "config.json", record)
            for part in _ensembles(config, cluster, methods, problem):
                rows += part
                summary = pd.DataFrame(rows)
                results.write_csv(folder / results.SUMMARY, summary)
            print(report(summary))
            print(f"\nwrote {folder}: config.json, {results.SUMMARY}")
    return Result(folder, summary)


def report(summary: "pd.DataFrame") -> str:
    """Return the table that the study prints: means over the seeds."""
    means = summary.drop(columns="seed").groupby(["method", "models"], sort=False).mean().reset_index()
    return means.to_string(index=False, float_format="{:#.4g}".format)


def averaged_predictions(problem: "Problem", models: Sequence[Any], data: Any) -> dict[str, float]:
    """Return loss (nats) and accuracy, over all examples, of the mean of the models' predicted probabilities.

    Parameters
    ----------
    problem : Problem
        One that predicts.
    models : sequence of trees
        The parameters of each model.
    data : tree of arrays
        Examples with a ``"label"`` each.
    """
    import jax
    import jax.numpy as jnp

    from asyncsim.problems.layers import accuracy
    from asyncsim.problems.problem import mean_in_pieces

    predict: Any = problem.predict

    def means(part: Any) -> dict[str, jax.Array]:
        mean = jnp.mean(jnp.stack([jax.nn.softmax(predict(params, part)) for params in models]), axis=0)
        right = jnp.take_along_axis(mean, part["label"][:, None], axis=1)
        return {"loss": -jnp.mean(jnp.log(right)), "accuracy": accuracy(mean, part["label"])}

    found = jax.jit(lambda data: mean_in_pieces(means, data))(jax.tree.map(jnp.asarray, data))
    return {name: float(value) for name, value in found.items()}


def _ensembles(
    config: Config, cluster: "Cluster", methods: "list[Method]", problem: "Problem"
) -> Iterator[list[dict[str, Any]]]:
    """Yield the rows of each method and seed: one for each number of models."""
    from asyncsim.comparison import meet
    from asyncsim.methods import Timing
    from asyncsim.simulation import simulate
    from asyncsim.wave_replay import replay

    for seed in range(config.seeds):
        for method in methods:
            alone = meet(meet(cluster, Timing(workers=1)), method.timing)
            models, single = [], []
            for number in range(config.workers):
                own = seed * config.workers + number
                run = replay(
                    simulate(alone, config.steps, own),
                    method,
                    problem,
                    own,
                    precision=config.precision,
                    evaluate_every=config.steps,
                    diagnose_every=0,
                    progress=False,
                )
                models.append(run.params)
                single.append(averaged_predictions(problem, models[-1:], problem.test))
            print(f"{method.name}, seed {seed}: {len(models)} models", file=sys.stderr, flush=True)
            rows = []
            for count in range(1, config.workers + 1):
                together = averaged_predictions(problem, models[:count], problem.test)
                row = {"method": method.name, "seed": seed, "models": count}
                for name, value in together.items():
                    row |= {f"test_{name}": value, f"single_{name}": np.mean([one[name] for one in single[:count]])}
                rows.append(row)
            yield rows
