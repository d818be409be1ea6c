"""Compare a recording with its replay: same order and seed, so the same losses and parameters.

There are three replays of the recorded order. *Free*: from the seed alone. *Perturbed*: another
free one whose initial parameters differ by one unit of round-off in every element; its distance
from the first shows the effect of round-off over the length of the recording. *Forced*: takes over
the server's recorded state at every checkpoint, so that a difference in one commit cannot grow over
many. If the free replay exceeds the bar and the perturbed one does, too, then round-off alone
explains it, and the forced replay is judged instead.

With rectifiers the loss is not smooth: a unit that is zero up to round-off, on one example,
switches its gradient, and parameters that agreed to 1e-7 are some 1e-6 apart at once, and 1e-3
after hundreds of commits. So these replays compute each gradient separately on a CPU, as the
workers do, and not in batches, which sum in another order. They mostly equal the recording bit for
bit.
"""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd

from asyncsim.base.errors import InputError
from asyncsim.methods.method import Method
from asyncsim.problems.problem import Problem
from asyncsim.real.computing import RECORDER, Computing, Parameters, State, load_state
from asyncsim.real.peers import first_state
from asyncsim.real.recording import CHECKPOINT, Recorded, states_in
from asyncsim.replays.programs import as_data, cast
from asyncsim.replays.replay import Replay
from asyncsim.replays.state import ReplayState
from asyncsim.replays.waves import find_waves

#: Largest relative difference of parameters and losses over a thousand commits, by precision.
BARS = {"float32": 1e-5, "float64": 1e-10}
REPLAYS = ("free", "perturbed", "forced")


class Agreement(NamedTuple):
    """The differences between a recording and its replays."""

    #: One row per commit, with ``commit`` from 1 on. For each replay in `REPLAYS` the columns
    #: ``loss_...``, the difference of that commit's loss relative to the largest recorded loss, and
    #: ``params_...``, the norm of the difference of the central variables relative to its norm, at
    #: the checkpoints (else nan). The perturbed replay is compared with the free one, the others
    #: with the recording. Without a server the workers' own states count, too, there is one
    #: checkpoint, at the end, and the forced replay is the free one.
    table: pd.DataFrame
    bar: float

    def worst(self, replay: str) -> float:
        """Return the largest difference of a replay's losses and parameters; nan if one is not
        finite.
        """
        return float(self.table[[f"loss_{replay}", f"params_{replay}"]].max().max())

    @property
    def amplifies(self) -> bool:
        """Whether one unit of round-off in the initial parameters grows beyond the bar."""
        return not self.worst("perturbed") <= self.bar

    @property
    def held_to(self) -> str:
        """The judged replay: the free one, unless round-off alone can bring it above the bar."""
        return "forced" if self.worst("free") > self.bar and self.amplifies else "free"

    @property
    def holds(self) -> bool:
        """Whether the judged replay is within the bar."""
        return self.worst(self.held_to) <= self.bar

    def row(self) -> dict[str, Any]:
        """Return the largest differences and the verdict as a row of a table."""
        worst = {
            f"{quantity}_{replay}": float(self.table[f"{quantity}_{replay}"].max())
            for replay in REPLAYS
            for quantity in ("loss", "params")
        }
        return {**worst, "bar": self.bar, "held_to": self.held_to, "holds": self.holds}


def agreement(recorded: Recorded, method: Method, problem: Problem) -> Agreement:
    """Replay a recording three times, and compare.

    ``recorded``: with the states of all checkpoints (``keep_states``). ``method``, ``problem``: as
    recorded.
    """
    header = recorded.header
    paths = {
        stop: path
        for stop, path in states_in(recorded.folder).items()
        if stop <= len(recorded.commits)
    }
    if not paths:
        raise InputError(
            f"folder = {str(recorded.folder)!r}: no states of checkpoints; record it with "
            "keep_states"
        )
    dtype = jnp.dtype(header.precision)

    def shifted(init: Callable[..., Any]) -> Callable[..., Any]:
        """Move each of the problem's initial parameters to the next larger number."""

        def shifted_init(*arguments: Any) -> Any:
            return jax.tree.map(
                lambda leaf: jnp.nextafter(leaf, jnp.full_like(leaf, jnp.inf)),
                cast(init(*arguments), dtype),
            )

        return shifted_init

    starts: dict[str, Any] = {"init": shifted(problem.init)}
    if problem.init_replica is not None:
        starts["init_replica"] = shifted(problem.init_replica)

    with jax.enable_x64(header.precision == "float64"):
        computing = Computing(method, problem, header)
        if header.processes.topology is None:
            like = Parameters(header.processes, computing).state
        else:
            like = first_state(header.processes.workers, computing)
        free = _follow(recorded, method, problem, paths)
        perturbed = _follow(recorded, method, dataclasses.replace(problem, **starts), paths)
        forced = _follow(recorded, method, problem, paths, like)
        central = {}
        for stop, path in paths.items():
            state = load_state(path, like)[0]
            worker_states = jax.tree.map(
                lambda *leaves: np.stack(leaves), *(row.method for row in state.workers)
            )
            central[stop] = _compared(recorded, state.central, worker_states)
    truth = _Course(recorded.commits["loss"].to_numpy(), central)
    table: dict[str, Any] = {"commit": np.arange(1, len(truth.loss) + 1)}
    for name, course, reference in (
        ("free", free, truth),
        ("perturbed", perturbed, free),
        ("forced", forced, truth),
    ):
        loss = np.abs(course.loss - reference.loss) / np.nanmax(np.abs(reference.loss))
        params = np.full(len(loss), np.nan)
        for stop, expected in reference.central.items():
            value = course.central.get(stop)
            far = (
                np.inf
                if value is None
                else np.linalg.norm(value - expected) / np.linalg.norm(expected)
            )
            params[stop - 1] = far if np.isfinite(far) else np.inf
        # Non-finite values are infinitely far away.
        table |= {
            f"loss_{name}": np.where(np.isfinite(loss), loss, np.inf),
            f"params_{name}": params,
        }
    return Agreement(pd.DataFrame(table), BARS[header.precision])


def evaluate(recorded: Recorded, method: Method, problem: Problem) -> dict[str, float]:
    """Evaluate the central variable of a complete recording on all data.

    Returns the values with the names of the evaluations of an `asyncsim.Run`, such as
    ``test_loss``. A problem's own state is the mean over the workers.

    Raises
    ------
    InputError
        The recording has no server.
    """
    if recorded.header.processes.topology is not None:
        raise InputError(
            "topology: workers without a server have no central variable; leave it out"
        )
    header, data = recorded.header, {"train": problem.train, "test": problem.test}
    with jax.enable_x64(header.precision == "float64"):
        computing = Computing(method, problem, header)
        like = Parameters(header.processes, computing).state
        state, _ = load_state(recorded.folder / CHECKPOINT, like)
        own_state = jax.tree.map(
            lambda *leaves: np.mean(leaves, axis=0).astype(leaves[0].dtype),
            *(row.learner.problem for row in state.workers),
        )
        params = computing.flat.unravel(jnp.asarray(state.central))
        dtype = jnp.dtype(header.precision)
        values: dict[str, float] = {}
        for part, examples in data.items():
            if part == "train" or examples is not None:  # without data there is a loss, too
                of_part = problem.evaluate(params, own_state, as_data(examples, dtype))
                values |= {f"{part}_{name}": float(value) for name, value in of_part.items()}
    return values


def _compared(recorded: Recorded, central: Any, worker_states: Any) -> np.ndarray:
    """Concatenate the central variable and, without a server, the workers' states."""
    parts = () if recorded.header.processes.topology is None else jax.tree.leaves(worker_states)
    return np.concatenate([np.ravel(part) for part in (central, *parts)])


class _Course(NamedTuple):
    """The loss of each commit, and the central variable at the checkpoints."""

    loss: np.ndarray
    central: dict[int, np.ndarray]


def _follow(
    recorded: Recorded,
    method: Method,
    problem: Problem,
    paths: dict[int, Path],
    forced_like: State | None = None,
) -> _Course:
    """Replay from checkpoint to checkpoint; with ``forced_like``, load the recorded states."""
    commits = len(recorded.commits)
    replay = Replay(
        recorded.trace,
        method,
        problem,
        recorded.header.seed,
        precision=recorded.header.precision,
        stops=np.unique([*paths, commits]),
        record=[RECORDER],
        form="single",
    )
    central: dict[int, np.ndarray] = {}
    for stop, path in paths.items():
        replay.advance(stop)
        if replay.diverged_at is not None:
            break
        central[stop] = _compared(recorded, replay.state.central, replay.state.workers.method)
        if forced_like is not None and stop < commits:
            replay.go_on_from(_replay_state(load_state(path, forced_like)[0], replay))
    if replay.diverged_at is None:
        replay.advance(commits)
    losses = replay.result().commits["loss"].to_numpy()
    return _Course(np.concatenate([losses, np.full(commits - len(losses), np.nan)]), central)


def _replay_state(state: State, replay: Replay) -> ReplayState:
    """Convert a server's state to the layout of a replay at the same commit.

    The replay's slots hold the workers' reads; a separate read at this very position is the central
    variable.
    """
    stop, waves, current = replay.position, find_waves(replay.trace), replay.state
    read: Any = np.array(current.read)
    push_read: Any = np.array(current.push_read)
    waiting: dict[int, int] = {}
    worker = replay.trace.frame["worker"].to_numpy()
    for commit in range(stop, len(worker)):
        ahead = waiting.setdefault(worker[commit], 0)
        waiting[worker[commit]] += 1
        if ahead == 0 or (ahead == 1 and waves.reads == "separate"):
            values = state.read if ahead == 0 else state.pulled
            if waves.read[commit] <= stop:
                atomic = waves.reads != "separate"  # may be a reply, not the central variable
                was_read = atomic or waves.read[commit] < stop
                read[waves.slot[commit]] = values[worker[commit]] if was_read else state.central
        if ahead == 0 and waves.separate_pushes and waves.push[commit] <= stop:
            pulled = state.pulled[worker[commit]] if waves.push[commit] < stop else state.central
            push_read[waves.push_slot[commit]] = pulled
    rows = jax.tree.map(
        lambda *leaves: np.stack([np.asarray(leaf) for leaf in leaves]), *state.workers
    )
    arrays = {
        "central": state.central,
        "server": state.server,
        "read": read,
        "push_read": push_read,
    }
    return current._replace(**arrays, workers=rows)
