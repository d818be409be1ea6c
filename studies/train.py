"""Train for real: worker processes around a server, and the loss and accuracy of the result.

    asyncsim train gem --workers 5 --problem mnist

is the same as ``asyncsim study train``. The workers compute at the same time, each with one thread;
the server applies their messages in the order of arrival. Prints loss and accuracy of the final
central variable on the training and on the validation data (the problem's test data), and the
measured throughput and staleness. The recordings can be replayed, see the study validate.

Needs Ray: pip install "asyncsim[ray]". An interrupted training stays in the study's folder;
--resume continues it.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

import pandas as pd
import tyro

from asyncsim.base.errors import require_count
from asyncsim.base.files import folder_name, plain
from asyncsim.methods import Method
from asyncsim.problems import Problem
from asyncsim.real.agreement import evaluate
from asyncsim.real.options import RealConfig
from asyncsim.real.supervisor import require_ray, require_timing
from asyncsim.study import results
from asyncsim.study.columns import Column, text_of
from asyncsim.study.config import MethodLike
from asyncsim.study.finished import present
from asyncsim.study.jobs import Result, Tables, measurement, run_jobs
from asyncsim.study.outcome import leading

#: The columns of the printed table; absent ones are skipped.
_PRINTED = (
    "method",
    "workers",
    "commits",
    Column("trace.duration", "seconds"),
    "trace.throughput",
    Column("trace.staleness_mean", "staleness"),
    "train_loss",
    "train_accuracy",
    Column("test_loss", "validation loss"),
    Column("test_accuracy", "validation accuracy"),
)


@dataclass(frozen=True)
class Config(RealConfig):
    """Options of real training."""

    first: ClassVar[str] = "methods"
    example: ClassVar[str] = "gem --workers 5 --problem mnist"

    methods: Annotated[tuple[MethodLike, ...], tyro.conf.arg(aliases=("--method",))] = ("gem",)
    """Methods to train with, one after the other; their names may stand without the option."""
    runs: int = 1
    """Trainings with each method, with the seeds 0, 1, ..."""

    def check(self) -> None:
        """Check the options; see `StudyOptions.check`."""
        require_count("runs", self.runs)
        super().check()


def run(config: Config) -> Result:
    """Train; see `asyncsim.study.jobs.run_jobs`.

    Raises
    ------
    InputError
        An option that cannot be used, Ray is missing, or processes cannot start or die.
    """
    config.check()
    require_ray()
    methods, problem = config.make_methods(), config.make_problem()
    for method in methods:
        require_timing(method, config.processes(method))
    jobs = []
    for method in methods:
        for seed in range(config.runs):
            place = f"recordings/{folder_name(f'{method.name}-seed{seed}')}"
            jobs.append(
                measurement(
                    f"{method.name}, seed {seed}",
                    _trained,
                    *(place, config, method, problem, seed),
                    place=f"{place}/row",
                    labels={"method": method.name, "seed": seed},
                    say=_ending,
                    in_folder=True,
                )
            )
    record = {"study": "train", **config.record(methods, problem)}
    executor = config.one_by_one(config.workers + 1)
    return run_jobs("train", config, record, jobs, executor, _conclude)


def _trained(
    folder: Path, place: str, config: Config, method: Method, problem: Problem, seed: int
) -> Tables:
    """Train, or continue an interrupted training, and evaluate the result; return its row."""
    recorded = config.recorded(method, problem, folder / place, seed)
    row: dict[str, Any] = {
        "method": method.name,
        "seed": seed,
        "status": "finished",
        "workers": config.workers,
        "commits": len(recorded.commits),
        **evaluate(recorded, method, problem),
        **{f"trace.{name}": value for name, value in recorded.trace.summary().items()},
        "folder": place,
    }
    return {results.SUMMARY: [plain(row)]}


def _ending(tables: Tables) -> str:
    (row,) = tables[results.SUMMARY]
    names = {"test_loss": "validation loss", "test_accuracy": "accuracy"}
    if "test_loss" not in row:  # a problem without validation data
        names = {"train_loss": "loss", "train_accuracy": "accuracy"}
    return ", ".join(f"{label} {row[name]:.3g}" for name, label in names.items() if name in row)


def _conclude(folder: Path, summary: pd.DataFrame) -> None:
    named = summary.rename(columns={"test_loss": "validation_loss"})
    column = "validation_loss" if "validation_loss" in named else "train_loss"
    present(folder, {}, text_of(summary, _PRINTED), verdict=leading(named, column=column))
