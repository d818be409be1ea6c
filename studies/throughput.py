"""How fast simulation and replay are, against a loop written by hand and the gradients alone.

All contenders run in this process, in turns, after an uncounted first call. Rates are medians over
the turns with their ranges, as are ratios of rates in the same turn. ``docs/performance.md``
explains the contenders and the table. Prints a table and a verdict; writes ``summary.csv`` and a
figure.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
from jax.flatten_util import ravel_pytree

from asyncsim.base.console import number_text, tell
from asyncsim.base.errors import InputError, require_choice, require_count, require_positive
from asyncsim.base.files import write_csv
from asyncsim.base.streams import Streams
from asyncsim.base.tracing import whole_products
from asyncsim.clusters.cluster import Cluster
from asyncsim.clusters.laws import Constant, Gamma
from asyncsim.methods import METHODS, Method, Visit
from asyncsim.problems import Problem, digits, quadratic
from asyncsim.problems.mnist import mnist_from_arrays
from asyncsim.replays.replay import Replay
from asyncsim.simulation.simulate import simulate
from asyncsim.study import results
from asyncsim.study.cell import meet
from asyncsim.study.columns import titled
from asyncsim.study.config import check_values
from asyncsim.study.finished import present
from asyncsim.study.jobs import folder_of

TASKS = ("trace", "quadratic", "digits", "cnn")
#: Methods that the usual loop implements.
USUAL = ("downpour", "gem")
#: Visits of a trace: minimum in all, and per worker.
VISITS, VISITS_EACH = 100_000, 5
#: Random images that replace MNIST: timing does not depend on their content.
IMAGES = 60_000
#: Numbers of gradients in a batch to try for the gradients alone; gradients in a call.
_BATCHES, _GRADIENTS = (1, 8, 64), 64
#: Commits per second that no replay reaches: it limits a turn's length where gradients cost
#: nothing.
_MOST_COMMITS = 300_000


@dataclass(frozen=True)
class Config:
    """Options of the throughput study."""

    tasks: tuple[str, ...] = TASKS
    """What to measure: trace (simulation alone), or replays of quadratic (16 parameters), digits
    (17,226) or cnn (the GEM paper's network, 163,790)."""
    workers: tuple[int, ...] = (10, 100)
    """Workers of the clusters, one case each."""
    methods: tuple[str, ...] = ("downpour", "gem")
    """Methods to replay; each gets a trace with its required timing. Only downpour and gem are
    compared with a loop written by hand."""
    repeats: int = 5
    """Turns of each comparison."""
    seconds: float = 1.0
    """Approximate duration of a turn (s); .1 gives a rough answer."""
    out: Path | None = None
    """Folder for the results, new or empty. By default results/throughput, then
    results/throughput-2, ...
    """

    def check(self) -> None:
        """Check the options."""
        for name, remedy in (
            ("tasks", f"choose from {', '.join(TASKS)}"),
            ("methods", "give at least one"),
            ("workers", "give at least one number"),
        ):
            check_values(name, getattr(self, name), remedy)
        for task in self.tasks:
            require_choice("tasks", task, TASKS)
        for count in self.workers:
            require_count("workers", count)
        require_count("repeats", self.repeats)
        require_positive("seconds", self.seconds, "s")

    @property
    def replayed(self) -> list[str]:
        """The methods to replay."""
        several = [
            name
            for name, method in ((name, make()) for name, make in METHODS.items())
            if method.timing.workers is None and not method.gossips
        ]
        return [require_choice("methods", name, several) for name in self.methods]


class Case(NamedTuple):
    """A task, a number of workers and a method; empty for a simulation."""

    task: str
    workers: int
    method: str = ""

    def __str__(self) -> str:
        return ", ".join(filter(None, [self.task, f"{self.workers} workers", self.method]))


class Contender(NamedTuple):
    """One side of a comparison: ``run(amount)`` makes ``amount`` visits, commits or gradients."""

    name: str
    amount: int
    run: Callable[[int], Any]


def run(config: Config) -> pd.DataFrame:
    """Run the study; return its summary, a row per case and contender (see `measure`)."""
    config.check()
    cases = _cases(config, config.replayed)
    with folder_of("throughput", config) as folder:
        parts: list[pd.DataFrame] = []
        # Written after each case, so that Ctrl-C keeps the finished ones.
        for case, contenders in cases:
            parts.append(measure(case, contenders, config.repeats))
            summary = pd.concat(parts, ignore_index=True)
            write_csv(folder / results.SUMMARY, summary)
        columns = [name for name in summary if name != "amount"]
        text = (
            "ratio: rate of the first contender over this one's, in the same turn; medians, "
            "minimum and maximum"
        )
        present(folder, {}, text, titled(summary, columns), verdict=verdicts(summary))
    return summary


def _cases(config: Config, methods: list[str]) -> Iterator[tuple[Case, list[Contender]]]:
    """Yield each case with its contenders."""
    workers, seconds = config.workers, config.seconds
    for task in config.tasks:
        if task == "trace":
            for count in workers:
                cluster = Cluster(count, Gamma(1.0, 0.2), Constant(0.5 / count))
                visits = max(VISITS, VISITS_EACH * count)
                yield Case(task, count), [Contender("simulate", visits, partial(simulate, cluster))]
            continue
        problem = _problem(task)
        for count in workers:
            tell(f"{task}, {count} workers: gradients alone")
            gradients, per_second = fastest_gradients(problem, count, seconds / 4)
            amount = calibrate(gradients, seconds, max(_GRADIENTS, count))
            commits = max(1, round(seconds / (1 / per_second + 1 / _MOST_COMMITS)))
            for name in methods:
                # At this rate the quadratic does not diverge with this number of workers.
                method = METHODS[name](learning_rate=0.5 / max(100, count))
                cluster = Cluster(count, Gamma(mean=1.0, cv=0.2), service=Constant(0.0))
                case = Case(task, count, name)
                trace = simulate(meet(cluster, method.timing), commits)
                contenders = [
                    Contender("replay", commits, partial(replayed, case, trace, method, problem)),
                    Contender("gradients alone", amount, gradients),
                ]
                if name in USUAL:
                    loop = usual_loop(method, problem, cluster)
                    contenders.append(Contender("usual loop", calibrate(loop, seconds), loop))
                yield case, contenders


def _problem(task: str) -> Problem:
    """Return a task's problem: the quadratic, digits, or the CNN on images of MNIST's shape."""
    if task == "quadratic":
        return quadratic(curvature=np.geomspace(0.01, 1, 16), noise=0.1)
    if task == "digits":
        return digits()
    generator = Streams(0, "random images").generator(0)
    image = generator.standard_normal((IMAGES, 28, 28), np.float32)
    images = {"image": image, "label": generator.integers(0, 10, IMAGES, np.int32)}
    return mnist_from_arrays(images, images, network=task)


# The contenders


def replayed(case: Case, trace: Any, method: Method, problem: Problem, commits: int) -> None:
    """Replay a trace on one device, without evaluations, from the plan to the last commit."""
    replay = Replay(trace, method, problem)
    replay.advance(commits)
    if replay.diverged_at is not None:
        raise InputError(
            f"methods: {case}: the replay diverged at commit {replay.diverged_at}; leave it out"
        )
    jax.block_until_ready(replay.state)


def gradients_alone(problem: Problem, workers: int, batch: int) -> Callable[[int], Any]:
    """Return a function that computes a number of gradients, rounded up to whole calls.

    The gradients of a call are at the parameters of all workers in turn, ``batch`` at a time in one
    operation, without updates. Loss, minibatches and rows of parameters are a replay's. The
    function returns the losses and the squared lengths of the gradients of its last call.
    """
    task = task_of(problem, workers)
    job, worker = np.divmod(np.arange(max(_GRADIENTS, workers)), workers)
    # One row of parameters per worker, so that caches behave as in a replay.
    table = jnp.tile(task.start, (workers, 1))

    @jax.jit
    @whole_products()
    def gradients(table, data, jobs):
        def gradient(job):
            worker, number, rows = job
            loss, tree = task.gradient(table[worker], data, rows, worker, number)
            return loss, sum(jnp.vdot(leaf, leaf) for leaf in jax.tree.leaves(tree))

        return jax.lax.map(gradient, jobs, batch_size=batch if batch > 1 else None)

    def compute(count: int) -> Any:
        for _ in range(-(-count // len(worker))):
            losses = gradients(table, task.data, (worker, job, task.rows(worker, job)))
        return jax.block_until_ready(losses)

    return compute


def fastest_gradients(
    problem: Problem, workers: int, seconds: float
) -> tuple[Callable[[int], Any], float]:
    """Return the fastest batching of the gradients alone, and its gradients per second."""
    sides = [gradients_alone(problem, workers, batch) for batch in _BATCHES]
    amounts = [calibrate(side, seconds, max(_GRADIENTS, workers)) for side in sides]
    rates = [amount / timed(side, amount) for side, amount in zip(sides, amounts, strict=True)]
    best = int(np.argmax(rates))
    return sides[best], rates[best]


def usual_loop(
    method: Method, problem: Problem, cluster: Cluster
) -> Callable[[int], tuple[Any, list[Any]]]:
    """Return the loop that one writes by hand: a function from commits to the results.

    The jobs in the order of their ends; for each one jitted gradient and one jitted update, with
    separate arrays per worker. The results are the central variable and the losses, the only
    record.
    """
    task, n = task_of(problem, cluster.workers), cluster.workers

    # One array for all fields of a visit: every further argument costs a transfer per event.
    def visit_of(facts):
        staleness, worker, worker_step, commit = facts
        return Visit(staleness, worker, worker_step, commit, jnp.float32(0), jnp.int32(1))

    @jax.jit
    @whole_products()
    def gradient(x, data, rows, facts):
        visit = visit_of(facts)
        loss, gradients = task.gradient(x, data, rows, visit.worker, visit.worker_step)
        state = method.optimizer.init(gradients)
        step, _ = method.optimizer.update(gradients, state, None, visit=visit)
        return loss, ravel_pytree(step)[0]

    @jax.jit
    @whole_products()
    def update(central, server, worker, memory, step, start, facts):
        visit = visit_of(facts)
        message, worker, _ = method.message(worker, step, start, central, visit)
        return method.apply(server, central, message, memory, visit), worker

    def loop(commits: int) -> tuple[Any, list[Any]]:
        central, server, losses = task.start, method.init_server(task.start), []
        starts, reads = [central] * n, [0] * n
        # Nothing is changed in place, so all may begin with the same arrays.
        workers, memories = [method.init_worker(central)] * n, [method.init_memory(central)] * n
        for commit, (i, job) in enumerate(jobs_in_order(cluster, commits)):
            facts = np.array([commit - reads[i], i, job, commit], np.int32)
            loss, step = gradient(starts[i], task.data, task.rows([i], [job])[0], facts)
            (central, server, memories[i]), workers[i] = update(
                central, server, workers[i], memories[i], step, starts[i], facts
            )
            losses.append(loss)
            starts[i], reads[i] = central, commit + 1
        return jax.block_until_ready((central, losses))

    return loop


def jobs_in_order(cluster: Cluster, commits: int) -> list[list[int]]:
    """Return pairs of worker and job in the order in which jobs end.

    Delays are drawn from the compute laws; the server is instantaneous.
    """
    streams, count = Streams(0, "usual"), 2 * commits // cluster.workers + 64
    times = [law.sample(streams.generator(i), count) for i, law in enumerate(cluster.compute_laws)]
    order = np.argsort(np.cumsum(times, axis=1), axis=None, kind="stable")[:commits]
    return np.transpose(np.divmod(order, count)).tolist()


class Task(NamedTuple):
    """A problem as a loop needs it, without the package's replay."""

    start: Any  #: the initial parameters, a vector
    data: Any
    rows: Callable[[Any, Any], np.ndarray]  #: of workers' and jobs' minibatches; empty without data
    gradient: Callable[..., Any]  #: loss and gradient at a vector


def task_of(problem: Problem, workers: int) -> Task:
    """Return a problem's task; its minibatches and random numbers are a replay's of seed 0."""
    key = jax.random.key(0)
    params = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), problem.init(key))
    start, unravel = ravel_pytree(params)
    batches = problem.batch_indices(0, workers)

    def rows(worker: Any, job: Any) -> np.ndarray:
        if batches is None:
            return np.zeros((len(worker), 0), np.int32)
        return batches.rows(worker, job)[:, 0]

    def gradient(vector: Any, data: Any, rows: Any, worker: Any, job: Any) -> Any:
        minibatch = jax.tree.map(lambda leaf: leaf[rows], data)
        draws = jax.random.fold_in(jax.random.fold_in(key, worker), job)
        return jax.value_and_grad(problem.loss)(unravel(vector), minibatch, draws)

    return Task(start, jax.tree.map(jnp.asarray, problem.train), rows, gradient)


# The turns


def measure(case: Case, contenders: Sequence[Contender], repeats: int) -> pd.DataFrame:
    """Time the contenders in turns, after one uncounted call each that compiles.

    Returns a row per contender with the median, minimum and maximum over the turns: of its rate,
    and of the ratio of the first contender's rate to its rate in the same turn.
    """
    for contender in contenders:
        tell(f"{case}: first call of {contender.name}")
        contender.run(contender.amount)
    rates = np.empty((repeats, len(contenders)))
    for turn in range(repeats):
        tell(f"{case}: turn {turn + 1} of {repeats}")
        # Forwards and backwards: no contender always runs first, or after the same predecessor.
        for index in range(len(contenders))[:: -1 if turn % 2 else 1]:
            _, amount, run = contenders[index]
            rates[turn, index] = amount / timed(run, amount)
    ratios = np.where(np.arange(len(contenders)), rates[:, :1] / rates, np.nan)
    rows = [
        {**case._asdict(), "contender": name, "amount": amount} for name, amount, _ in contenders
    ]
    return pd.DataFrame(rows).join([_ranges("per_second", rates), _ranges("ratio", ratios)])


def _ranges(name: str, turns: np.ndarray) -> pd.DataFrame:
    """Return the median, minimum and maximum of each column over the turns."""
    ranges = pd.DataFrame(turns).agg(["median", "min", "max"]).T
    return ranges.set_axis([name, f"{name}_min", f"{name}_max"], axis=1)


def calibrate(run: Callable[[int], Any], seconds: float, amount: int = 4) -> int:
    """Return a multiple of ``amount`` that takes about ``seconds``, by runs that grow."""
    run(amount)  # compiles
    while (took := timed(run, amount)) < seconds / 8:
        amount *= 4
    return amount * max(1, round(seconds / took))


def timed(run: Callable[..., Any], *arguments: Any) -> float:
    """Return the seconds of a call."""
    started = time.perf_counter()
    run(*arguments)
    return time.perf_counter() - started


def verdicts(summary: pd.DataFrame) -> list[str]:
    """Summarize the rates of simulation and the ratios of replay, from minimum to maximum over the
    cases.
    """
    lines = []
    for name, column, words in (
        ("usual loop", "ratio", "replay {} times as fast as the usual loop"),
        ("gradients alone", "ratio", "replay at {} of the rate of its gradients alone"),
        ("simulate", "per_second", "simulation of {} visits/s"),
    ):
        values = summary.loc[summary["contender"] == name, column]
        if len(values):
            low, high = number_text(values.min()), number_text(values.max())
            lines.append(words.format(low if low == high else f"{low} to {high}"))
    return lines
