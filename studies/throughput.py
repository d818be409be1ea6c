"""How fast simulation and replay are, against a loop written by hand and the gradients alone.

All contenders run in this process, in turns, after an uncounted first call. Rates are medians over
the turns with their ranges, as are ratios of rates in the same turn. ``docs/performance.md``
explains the contenders and the table. Prints a table and a verdict; writes ``summary.csv`` and a
figure.
"""

import heapq
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
from asyncsim.study.finished import present
from asyncsim.study.jobs import folder_of
from asyncsim.study.sweep import check_values

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
    """Methods to replay, or all; each gets a trace with its required timing. Only downpour and gem
    are compared with a loop written by hand."""
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
            ("methods", "choose from downpour, gem, all"),
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
        if self.methods == ("all",):
            return several
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


def gradients_alone(
    problem: Problem, workers: int, batch: int, seed: int = 0
) -> Callable[[int], Any]:
    """Return a function that computes a number of gradients, rounded up to whole calls.

    The gradients of a call are at the parameters of all workers in turn, ``batch`` at a time in one
    operation, without updates. Loss, minibatches and rows of parameters are a replay's. The
    function returns the losses and the squared lengths of the gradients of its last call.
    """
    params = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), problem.init(_key(seed)))
    start, unravel = ravel_pytree(params)
    rows_of = minibatches(problem, workers, seed)
    job, worker = np.divmod(np.arange(max(_GRADIENTS, workers)), workers)
    # One row of parameters per worker, so that caches behave as in a replay.
    table, data = jnp.tile(start, (workers, 1)), jax.tree.map(jnp.asarray, problem.train)

    @jax.jit
    @whole_products()
    def gradients(table, data, key, jobs):
        def gradient(job):
            worker, number, rows = job
            minibatch = jax.tree.map(lambda leaf: leaf[rows], data)
            draws = jax.random.fold_in(jax.random.fold_in(key, worker), number)
            loss, tree = jax.value_and_grad(problem.loss)(unravel(table[worker]), minibatch, draws)
            return loss, sum(jnp.vdot(leaf, leaf) for leaf in jax.tree.leaves(tree))

        return jax.lax.map(gradient, jobs, batch_size=batch if batch > 1 else None)

    def compute(count: int) -> Any:
        for _ in range(-(-count // len(worker))):
            losses = gradients(table, data, _key(seed), (worker, job, rows_of(worker, job)))
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
    method: Method, problem: Problem, cluster: Cluster, seed: int = 0
) -> Callable[[int], tuple[Any, list[Any]]]:
    """Return the loop that one writes by hand: a function from commits to the results.

    A heap of events; per event one jitted gradient and one jitted update, with separate arrays per
    worker. The results are the central variable and the losses, the only record.
    """
    rows_of, key, n = minibatches(problem, cluster.workers, seed), _key(seed), cluster.workers
    params = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), problem.init(key))
    start, unravel = ravel_pytree(params)
    data = jax.tree.map(jnp.asarray, problem.train)

    # One array for all fields of a visit: every further argument costs a transfer per event.
    def visit_of(facts):
        staleness, worker, worker_step, commit = facts
        return Visit(staleness, worker, worker_step, commit, jnp.float32(0), jnp.int32(1))

    @jax.jit
    @whole_products()
    def gradient(x, data, rows, key, facts):
        visit = visit_of(facts)
        minibatch = jax.tree.map(lambda array: array[rows], data)
        key = jax.random.fold_in(jax.random.fold_in(key, visit.worker), visit.worker_step)
        loss, gradients = jax.value_and_grad(problem.loss)(unravel(x), minibatch, key)
        state = method.optimizer.init(params)
        step, _ = method.optimizer.update(gradients, state, None, visit=visit)
        return loss, ravel_pytree(step)[0]

    @jax.jit
    @whole_products()
    def update(central, server, worker, memory, step, start, facts):
        visit = visit_of(facts)
        message, worker, _ = method.message(worker, step, start, central, visit)
        return method.apply(server, central, message, memory, visit), worker

    def loop(commits: int) -> tuple[Any, list[Any]]:
        central, server, losses = start, method.init_server(start), []
        starts, reads = [central] * n, [0] * n
        # Nothing is changed in place, so all may begin with the same arrays.
        workers, memories = [method.init_worker(central)] * n, [method.init_memory(central)] * n
        for commit, (i, job) in enumerate(events(cluster, commits, seed)):
            facts = np.array([commit - reads[i], i, job, commit], np.int32)
            loss, step = gradient(starts[i], data, rows_of([i], [job])[0], key, facts)
            (central, server, memories[i]), workers[i] = update(
                central, server, workers[i], memories[i], step, starts[i], facts
            )
            losses.append(loss)
            starts[i], reads[i] = central, commit + 1
        return jax.block_until_ready((central, losses))

    return loop


def events(cluster: Cluster, commits: int, seed: int = 0) -> Iterator[tuple[int, int]]:
    """Yield pairs of worker and job in the order in which jobs end, from a heap of end times.

    Delays are drawn from the compute laws beforehand; the server is instantaneous.
    """
    streams, count = Streams(seed, "usual"), 2 * commits // cluster.workers + 64
    times = [law.sample(streams.generator(i), count) for i, law in enumerate(cluster.compute_laws)]
    heap = [(of_worker[0], i, 0) for i, of_worker in enumerate(times)]
    heapq.heapify(heap)
    for _ in range(commits):
        end, i, job = heap[0]
        yield i, job
        heapq.heapreplace(heap, (end + times[i][job + 1], i, job + 1))


def minibatches(problem: Problem, workers: int, seed: int = 0) -> Callable[[Any, Any], np.ndarray]:
    """Return a function from workers and jobs to the rows of their minibatches; empty without
    data.
    """
    batches = problem.batch_indices(seed, workers)
    if batches is None:
        return lambda worker, job: np.zeros((len(worker), 0), np.int32)
    return lambda worker, job: batches.rows(worker, job)[:, 0]


def _key(seed: int) -> Any:
    return jax.random.key(seed)


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
    ratios = rates[:, :1] / rates
    ratios[:, 0] = np.nan
    rows = []
    for index, (name, amount, _) in enumerate(contenders):
        row = {**case._asdict(), "contender": name, "amount": amount}
        for column, values in (("per_second", rates[:, index]), ("ratio", ratios[:, index])):
            row |= {
                column: np.median(values),
                f"{column}_min": values.min(),
                f"{column}_max": values.max(),
            }
        rows.append(row)
    return pd.DataFrame(rows)


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
