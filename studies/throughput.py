"""How fast simulation and replay are, against the model and the loop one would write by hand.

Both sides of each comparison run in this one process, in turns, several times; the ratio of each turn is what counts.
"""

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from asyncsim import results
from asyncsim.cluster import Cluster
from asyncsim.errors import InputError, require_choice, require_count
from asyncsim.study import load_file
from asyncsim.study_config import split_names

if TYPE_CHECKING:
    import pandas as pd

TASKS = ("trace", "growth", "digits", "quadratic", "mnist")


@dataclass(frozen=True)
class Config:
    """Options of the throughput study."""

    tasks: tuple[str, ...] = ("trace", "growth", "digits", "quadratic")
    """What to measure: trace, growth, digits, quadratic, mnist; separated by spaces or commas."""
    workers: int = 100
    """Workers of the cluster."""
    method: str = "gem"
    """Method of digits and mnist; the quadratic runs DOWNPOUR."""
    repeats: int = 5
    """Turns of each comparison."""
    quick: bool = False
    """Fewer commits: an answer within a minute."""
    data_dir: Path | None = None
    """Folder that holds mnist/; else ASYNCSIM_DATA, else downloaded to the cache."""
    out: Path | None = None
    """Folder for the results, new or empty; None: results/throughput, then results/throughput-2, ..."""


class Contender(NamedTuple):
    """One side of a comparison.

    Attributes
    ----------
    name : str
    amount : int
        How many visits or commits one call of ``run`` makes.
    run : function
    """

    name: str
    amount: int
    run: Callable[[], Any]


class Result(NamedTuple):
    """What the study returns: its folder, and one row per task and contender."""

    folder: Path
    summary: "pd.DataFrame"


def run(config: Config) -> Result:
    """Run the study.

    Raises
    ------
    InputError
        An option that cannot be used, or a folder that cannot be written.
    """
    tasks = [require_choice("tasks", task, TASKS) for task in split_names(config.tasks)]
    if not tasks:
        raise InputError(f"tasks: none given; choose from {', '.join(TASKS)}")
    require_count("repeats", config.repeats)
    require_count("workers", config.workers)
    import pandas as pd

    turns: list[pd.DataFrame] = []
    summaries: list[pd.DataFrame] = []
    with results.new_folder(config.out, "throughput") as folder:
        for task in tasks:
            turns.append(measure(_TASKS[task](config), config.repeats, task))
            summaries.append(summarise(turns[-1]))
            print(summaries[-1].to_string(index=False), flush=True)
            # Written after each task, so that Ctrl-C keeps those that are finished.
            summary = pd.concat(summaries, ignore_index=True)
            results.write_csv(folder / "turns.csv", pd.concat(turns, ignore_index=True))
            results.write_csv(folder / "summary.csv", summary)
    print(f"\nwrote {folder}: summary.csv, turns.csv")
    return Result(folder, summary)


def measure(contenders: Sequence[Contender], repeats: int, task: str) -> "pd.DataFrame":
    """Let the contenders run in turns, after one run each that is not counted (compilation).

    Returns
    -------
    pandas.DataFrame
        One row per turn and contender: ``task``, ``turn``, ``contender``, ``per_second``, and ``ratio`` to the last
        contender in the same turn.
    """
    import pandas as pd

    for contender in contenders:
        contender.run()
    rows = []
    for turn in range(repeats):
        rates = {}
        for contender in contenders:
            started = time.perf_counter()
            contender.run()
            rates[contender.name] = contender.amount / (time.perf_counter() - started)
        base = rates[contenders[-1].name]
        rows += [(task, turn, name, rate, rate / base) for name, rate in rates.items()]
        print(f"{task}: turn {turn + 1} of {repeats}", file=sys.stderr, flush=True)
    return pd.DataFrame(rows, columns=["task", "turn", "contender", "per_second", "ratio"])


def summarise(turns: "pd.DataFrame") -> "pd.DataFrame":
    """Return each contender's median rate and ratio over the turns, with the ratio's smallest and largest."""
    table = turns.groupby(["task", "contender"], sort=False).agg(
        per_second=("per_second", "median"),
        ratio=("ratio", "median"),
        ratio_min=("ratio", "min"),
        ratio_max=("ratio", "max"),
    )
    return table.round({"per_second": 0, "ratio": 2, "ratio_min": 2, "ratio_max": 2}).reset_index()


def _cluster(workers: int, service: float = 0.005) -> Cluster:
    from asyncsim.laws import Constant, Gamma

    return Cluster(workers=workers, compute=Gamma(mean=1.0, cv=0.2), service=Constant(service))


def _trace(config: Config) -> list[Contender]:
    """Visits per second against the usual SimPy model, the drawing of the times included."""
    from asyncsim.simulation import simulate

    cluster, visits = _cluster(config.workers), 20_000 if config.quick else 100_000
    baselines = _baselines()
    return [
        Contender("simulate", visits, lambda: simulate(cluster, visits)),
        Contender("usual SimPy model", visits, lambda: baselines.usual_model(cluster, visits)),
    ]


def _growth(config: Config) -> list[Contender]:
    """Visits per second as the cluster grows, ten visits a worker at the largest size."""
    from asyncsim.simulation import simulate

    sizes = (100, 1_000, 10_000) if config.quick else (100, 1_000, 10_000, 100_000)
    visits = 10 * sizes[-1]

    def contender(workers: int) -> Contender:
        cluster = _cluster(workers, service=0.5 / workers)
        return Contender(f"{workers} workers", visits, lambda: simulate(cluster, visits))

    return [contender(workers) for workers in reversed(sizes)]


def _digits(config: Config) -> list[Contender]:
    from asyncsim.problems import digits

    return _replay_against_loop(config, config.method, digits(), 2_000 if config.quick else 10_000)


def _quadratic(config: Config) -> list[Contender]:
    import numpy as np

    from asyncsim.problems import quadratic

    problem = quadratic(curvature=np.geomspace(0.01, 1, 16), noise=0.1)
    return _replay_against_loop(config, "downpour", problem, 20_000 if config.quick else 100_000)


def _mnist(config: Config) -> list[Contender]:
    """Replay the paper's network on MNIST, against its gradients alone and the usual loop."""
    from asyncsim.problems import mnist

    return _replay_against_loop(config, config.method, mnist(data_dir=config.data_dir), 100 if config.quick else 500)


def _replay_against_loop(config: Config, name: str, problem: Any, commits: int) -> list[Contender]:
    from asyncsim.methods import METHODS
    from asyncsim.simulation import simulate

    method = METHODS[require_choice("method", name, METHODS)](learning_rate=0.005)
    cluster = _cluster(config.workers, service=0.0)
    trace = simulate(cluster, commits)
    baselines = _baselines()
    loop = baselines.UsualLoop(cluster, method, problem)
    gradients = baselines.GradientsAlone(trace, method, problem)
    return [
        Contender("replay", commits, lambda: _replay(trace, method, problem)),
        Contender("gradients alone", gradients.amount, gradients.run),
        Contender("usual loop", commits, lambda: loop.run(commits)),
    ]


def _replay(trace: Any, method: Any, problem: Any) -> None:
    """Replay with the default diagnostics; evaluations on all data are no part of the loop that it is compared with."""
    from asyncsim.wave_replay import Replay

    replay = Replay(trace, method, problem)
    replay.advance(len(trace))


def _baselines() -> Any:
    return load_file("asyncsim.studies._baselines", Path(__file__).parent / "_baselines.py")


_TASKS = {"trace": _trace, "growth": _growth, "digits": _digits, "quadratic": _quadratic, "mnist": _mnist}
