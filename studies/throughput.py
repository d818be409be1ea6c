"""How fast simulation and replay are, against loops written by hand and the gradients alone.

All contenders run in this process, in turns, after an uncounted first call. Rates are medians over
the turns with their ranges, as are ratios of rates in the same turn. ``docs/performance.md``
explains the contenders and the table. Prints a table and a verdict; writes ``summary.csv`` and a
figure.
"""

import importlib
import importlib.util
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import pandas as pd

from asyncsim.base.calls import split
from asyncsim.base.console import note, number_text, tell
from asyncsim.base.errors import InputError, require_choice, require_count, require_positive
from asyncsim.base.files import write_csv, write_json
from asyncsim.benchmark import contenders, turns
from asyncsim.benchmark.usual_model import UsualModel
from asyncsim.clusters.cluster import Cluster
from asyncsim.clusters.laws import Constant, Gamma
from asyncsim.methods import METHODS
from asyncsim.pages.page import on_a_page
from asyncsim.simulation.simulate import simulate
from asyncsim.study import results
from asyncsim.study.columns import text_of
from asyncsim.study.finished import present
from asyncsim.study.sweep import check_values

TASKS = ("trace", "quadratic", "digits", "cnn", "mlp")
#: A vector of the thesis' network takes 19 MB: with more workers its state outgrows most machines.
MOST_MLP_WORKERS = 100
#: Visits of a trace: minimum in all, and per worker.
VISITS, VISITS_EACH = 100_000, 5


@dataclass(frozen=True)
class Config:
    """Options of the throughput study."""

    tasks: tuple[str, ...] = ("trace", "quadratic", "digits", "cnn")
    """What to measure: trace (simulation alone), or replays of quadratic (16 parameters), digits
    (17,226), cnn (the GEM paper's network, 163,790) or mlp (the thesis' network, 4,798,010);
    separated by spaces or commas."""
    workers: tuple[int, ...] = (10, 100)
    """Workers of the clusters, one case each. mlp has at most 100."""
    methods: tuple[str, ...] = ("downpour", "gem")
    """Methods to replay, or all; each gets a trace with its required timing. Only downpour and gem
    are compared with loops written by hand."""
    repeats: int = 5
    """Turns of each comparison."""
    seconds: float = 1.0
    """Approximate duration of a turn (s); .1 gives a rough answer."""
    out: Path | None = None
    """Folder for the results, new or empty. By default results/throughput, then
    results/throughput-2, ...
    """


def run(config: Config) -> pd.DataFrame:
    """Run the study; return its summary, a row per case and contender (see
    `asyncsim.benchmark.turns.COLUMNS`).
    """
    tasks, workers, methods = _check(config)
    with results.new_folder(config.out, "throughput") as folder:
        options = {**asdict(config), "tasks": tasks, "workers": workers, "methods": methods}
        options.pop("out")
        command = {results.COMMAND: getattr(config, results.COMMAND, None)}  # on the command line
        write_json(folder / results.CONFIG, {"study": "throughput", **command, **options})
        parts: list[pd.DataFrame] = []
        # Written after each case, so that Ctrl-C keeps the finished ones.
        for part in _measure(tasks, workers, methods, config):
            parts.append(part)
            summary = pd.concat(parts, ignore_index=True)
            write_csv(folder / results.SUMMARY, summary)

        results.write_origin(folder)
        results.remember(folder)
        with on_a_page(folder):
            columns = [name for name in summary if name != "amount"]
            text = (
                "ratio: rate of the first contender over this one's, in the same turn; medians, "
                "minimum and maximum"
            )
            present(folder, {}, text, text_of(summary, columns), verdict=verdict(summary))
    results.say_written(folder)
    return summary


def _check(config: Config) -> tuple[list[str], list[int], list[str]]:
    """Check the options; return tasks, numbers of workers and methods, and note omitted
    contenders.
    """
    tasks = [require_choice("tasks", task, TASKS) for task in split(config.tasks)]
    methods_by_name = {name: make() for name, make in METHODS.items()}
    several = [
        name
        for name, method in methods_by_name.items()
        if method.timing.workers is None and not (method.mix or method.meet)
    ]
    methods = split(config.methods)
    methods = (
        several
        if methods == ["all"]
        else [require_choice("methods", name, several) for name in methods]
    )
    workers = [config.workers] if isinstance(config.workers, int) else list(config.workers)
    workers = [require_count("workers", count) for count in workers]
    check_values("tasks", tasks, f"choose from {', '.join(TASKS)}")
    check_values("methods", methods, "choose from downpour, gem, all")
    check_values("workers", workers, "give at least one number")
    require_count("repeats", config.repeats)
    require_positive("seconds", config.seconds, "s")
    if "mlp" in tasks and min(workers) > MOST_MLP_WORKERS:
        raise InputError(
            f"workers = {min(workers)}: mlp is measured with at most {MOST_MLP_WORKERS}; give fewer"
        )
    if "mlp" in tasks and max(workers) > MOST_MLP_WORKERS:
        note(
            f"mlp is measured with at most {MOST_MLP_WORKERS} workers: with more its state is too "
            "large"
        )
    if tasks != ["trace"] and importlib.util.find_spec("torch") is None:
        note("PyTorch is not installed: its loop is left out")
    return tasks, workers, methods


def _measure(
    tasks: list[str], workers: list[int], methods: list[str], config: Config
) -> Iterator[pd.DataFrame]:
    """Measure case by case; yield the summary of each."""
    torch_loop = None
    if tasks != ["trace"] and importlib.util.find_spec("torch") is not None:
        torch_loop = importlib.import_module("asyncsim.benchmark.pytorch").TorchLoop
    for task in tasks:
        if task == "trace":
            for count in workers:
                visits, cluster = (
                    max(VISITS, VISITS_EACH * count),
                    Cluster(count, Gamma(1.0, 0.2), Constant(0.5 / count)),
                )
                sides = [
                    turns.Contender(name, visits, partial(turns.timed, run, cluster))
                    for name, run in (("simulate", simulate), ("usual SimPy model", UsualModel))
                ]
                yield turns.measure(turns.Case(task, count), sides, config.repeats)
            continue
        problem = contenders.make_problem(task)
        for count in [count for count in workers if task != "mlp" or count <= MOST_MLP_WORKERS]:
            tell(f"{task}, {count} workers: batchings of the gradients alone")
            gradients = contenders.GradientsAlone(problem, count)
            gradients.tune(config.seconds / 4)
            for method in methods:
                case = turns.Case(task, count, method)
                sides = contenders.contenders(case, problem, gradients, config.seconds, torch_loop)
                yield turns.measure(case, sides, config.repeats)


def verdict(summary: pd.DataFrame) -> str:
    """Summarize in one line the ratios of replay and simulation, from minimum to maximum over the
    cases.
    """
    clauses = []
    for name, words in (
        ("usual loop, JAX", "replay {} times as fast as the usual loop in JAX"),
        ("usual loop, PyTorch", "{} times as fast as the one in PyTorch"),
        ("gradients alone", "replay at {} of the rate of its gradients alone"),
        ("usual SimPy model", "simulation {} times as fast as the usual SimPy model"),
    ):
        ratios = summary.loc[summary["contender"] == name, "ratio"]
        if len(ratios):
            low, high = number_text(ratios.min()), number_text(ratios.max())
            clauses.append(words.format(low if low == high else f"{low} to {high}"))
    return "; ".join(clauses)
