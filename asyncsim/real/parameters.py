"""The server's arrays: the central variable, and all states of the workers that it keeps for them.

The workers' method states are with the server, as it forms their messages: there the central variable is what it is at
the visit. The functions are those of the replay, one commit at a time.
"""

import functools
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from asyncsim.commits import adds_update
from asyncsim.local import Learner
from asyncsim.methods.method import Applied, Method, Visit
from asyncsim.programs import Same
from asyncsim.real.book import RECORDED, Account
from asyncsim.real.computing import Computing, Job
from asyncsim.real.log import Event
from asyncsim.real.processes import Processes
from asyncsim.replay_state import PROXY_MOMENTUM, WorkerRow
from asyncsim.results import write_whole


class State(NamedTuple):
    """The server's arrays at one instant.

    Attributes
    ----------
    central : Float[Array, "parameters"]
    server : tree
        The method's own state on the server.
    workers : tuple of WorkerRow
        All that belongs to each worker.
    read : tuple of Float[Array, "parameters"]
        What each worker has read for the computation that it is at.
    pulled : tuple of Float[Array, "parameters"]
        What each has read for its next message, where that is a visit of its own; else what it has read.
    """

    central: Any
    server: Any
    workers: tuple[WorkerRow, ...]
    read: tuple[Any, ...]
    pulled: tuple[Any, ...]


class Parameters:
    """Applies commits and answers reads, one after the other.

    Attributes
    ----------
    state : State
    """

    def __init__(self, method: Method, processes: Processes, computing: Computing):
        self._processes, self._x64 = processes, computing.x64
        with jax.enable_x64(self._x64):
            central = computing.flat.ravel(computing.params)
            self._dtype = central.dtype
            row = WorkerRow(
                method=method.init_worker(central),
                memory=method.init_memory(central),
                proxy=() if method.proxy else jnp.zeros_like(central),
                learner=computing.first_learner(),
            )
            each = (central,) * processes.workers
            self.state = State(central, method.init_server(central), (row,) * processes.workers, each, each)
        self._commit = _compiled(Same(method), processes.protocol == "read_then_write")
        self._start = jax.jit(method.resume) if method.resume else lambda worker, read: read

    def job(self, worker: int, account: Account) -> Job:
        """Return what a worker is to compute now."""
        row = self.state.workers[worker]
        with jax.enable_x64(self._x64):
            start = np.asarray(self._start(row.method, self.state.read[worker]))
        return Job(account.job, account.steps, start, jax.tree.map(np.asarray, row.learner))

    def commit(self, row: Event, update: Any, start: Any, learner: Learner) -> dict[str, float]:
        """Apply a worker's update; return what is recorded of it besides the loss."""
        worker, state = row["worker"], self.state
        with jax.enable_x64(self._x64):
            visit = self._visit(row)
            form = state.pulled[worker] if self._processes.pulls else state.central
            central, server, kept, replied, squares = self._commit(
                state.central, state.server, state.workers[worker], state.read[worker], start, update, form, visit
            )
            recorded = [float(value) for value in squares]
        self.state = state._replace(
            central=central,
            server=server,
            workers=_put(state.workers, worker, kept._replace(learner=learner)),
            read=_put(state.read, worker, form if self._processes.pulls else replied),
        )
        return dict(zip(RECORDED[1:], recorded, strict=True))

    def read(self, worker: int) -> None:
        """Let a worker read for its next computation."""
        self.state = self.state._replace(read=_put(self.state.read, worker, self.state.central))

    def pull(self, worker: int) -> Any:
        """Let a worker read what its next message is formed with; return it."""
        self.state = self.state._replace(pulled=_put(self.state.pulled, worker, self.state.central))
        return np.asarray(self.state.central)

    def _visit(self, row: Event) -> Visit:
        numbers = {name: row[name] for name in ("staleness", "worker", "worker_step", "local_steps")}
        numbers |= {"commit": row["version"] - 1, "workers": self._processes.workers}
        counts: dict[str, Any] = {name: np.int32(number) for name, number in numbers.items()}
        time: Any = np.asarray(row["commit_time"], self._dtype)
        completes: Any = np.bool_(True)
        return Visit(time=time, completes=completes, **counts)


@functools.lru_cache(maxsize=32)
def _compiled(same_method: Same, before: bool):
    """Return the jitted function of one commit, as `asyncsim.commits` has it; the worker reads after it or before."""
    method: Method = same_method.value

    def commit(central, server, row, read, start, update, form, visit):
        origin = method.origin(row.method, read) if method.origin else read
        message, method_state, _ = method.message(row.method, update, start, form, visit)
        applied = method.apply(server, central, message, row.memory, visit)
        proxy = method.proxy(method_state) if method.proxy else PROXY_MOMENTUM * row.proxy + update
        kept = WorkerRow(method_state, applied.memory, () if method.proxy else proxy, ())
        seen = Applied(central, server, row.memory) if before else applied
        replied = method.reply(seen.server, seen.central, seen.memory, visit) if method.reply else seen.central
        step = update if adds_update(method) else applied.central - central
        moved = applied.central - origin
        squares = (jnp.linalg.norm(step), jnp.sum(moved**2) / 2, jnp.sum(proxy**2) / 2)
        return applied.central, applied.server, kept, replied, squares

    return jax.jit(commit)


def save_state(path: Path, state: State, events: int) -> Path:
    """Write a state and how many events of the log are in it; the whole file or nothing."""
    leaves: dict[str, Any] = {f"leaf_{i}": np.asarray(leaf) for i, leaf in enumerate(jax.tree.leaves(state))}
    return write_whole(path, lambda partial: np.savez(partial, events=np.array(events), **leaves))


def load_state(path: Path, like: State) -> tuple[State, int]:
    """Read what `save_state` wrote of a state with the structure of another one."""
    with np.load(path) as file:
        leaves, structure = jax.tree.flatten(like)
        return jax.tree.unflatten(structure, [file[f"leaf_{i}"] for i in range(len(leaves))]), int(file["events"])


def _put(values: tuple[Any, ...], index: int, value: Any) -> tuple[Any, ...]:
    return (*values[:index], value, *values[index + 1 :])
