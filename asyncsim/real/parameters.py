"""The server's arrays: the central variable, and all states of the workers that it keeps for them.

The workers' method states are with the server, as it forms their messages: there the central variable is what it is at
the visit. The functions are those of the replay, one commit at a time.
"""

import functools
import zipfile
import zlib
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from asyncsim.errors import InputError
from asyncsim.files import write_whole
from asyncsim.methods.method import Method, Visit
from asyncsim.real.book import RECORDED, Account
from asyncsim.real.computing import Computing, Job
from asyncsim.real.log import Event
from asyncsim.real.processes import Processes
from asyncsim.replays.commits import build_visit
from asyncsim.replays.division import Division
from asyncsim.replays.local import Learner
from asyncsim.replays.programs import Same
from asyncsim.replays.replay_state import PROXY_MOMENTUM, Layout, WorkerRow
from asyncsim.tracing import whole_products
from asyncsim.wording import note


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
        self._processes, self._x64, self._visit_key = processes, computing.x64, computing.visit_key
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
        layout = Layout(
            division=Division(1, 1, central.size, by_parameters=False),
            in_turn=True,
            reads_size=0,
            form_reads_size=0,
            reads="before" if processes.protocol == "read_then_write" else "after",
            separate_forms=processes.pulls,
            window=processes.window,
            proxy_momentum=PROXY_MOMENTUM,
        )
        self._visited = _compiled(Same(method), layout)
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
            made, pulled = (start, update, jnp.zeros((), self._dtype), learner), state.pulled[worker]
            central, server, kept, learner, replied, numbers = self._visited(
                state.central, state.server, state.workers[worker], state.read[worker], made, pulled, visit
            )
            _, *recorded = np.asarray(numbers).tolist()
        self.state = state._replace(
            central=central,
            server=server,
            workers=_put(state.workers, worker, kept._replace(learner=learner)),
            read=_put(state.read, worker, pulled if self._processes.pulls else replied),
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
        key = self._visit_key(row["worker"], row["worker_step"])
        return Visit(time=time, completes=completes, key=key, **counts)


@functools.lru_cache(maxsize=32)
def _compiled(same_method: Same, layout: Layout) -> Any:
    return jax.jit(whole_products()(build_visit(same_method.value, layout)))


def save_state(path: Path, state: State, events: int) -> Path:
    """Write a state and how many events of the log are in it; the whole file or nothing."""
    leaves: dict[str, Any] = {f"leaf_{i}": np.asarray(leaf) for i, leaf in enumerate(jax.tree.leaves(state))}
    return write_whole(path, lambda partial: np.savez(partial, events=np.array(events), **leaves))


def load_state(path: Path, like: State) -> tuple[State, int]:
    """Read what `save_state` wrote of a state with the structure of another one."""
    with np.load(path) as file:
        leaves, structure = jax.tree.flatten(like)
        found = [file[name] for name in file.files if name != "events"]
        if [leaf.shape for leaf in found] != [leaf.shape for leaf in leaves]:
            raise InputError(
                f"{str(path)!r}: states of other shapes than the method and the problem have now; remove it, to go on "
                "from what the log has"
            )
        return jax.tree.unflatten(structure, found), int(file["events"])


def usable_checkpoint(path: Path, events: int) -> Path | None:
    """Return the checkpoint that a recording with so many events in its log goes on from; None if there is none.

    One that cannot be read is renamed, and the user is told.

    Raises
    ------
    InputError
        The checkpoint holds more events than the log, which was cut then, or is of another recording.
    """
    if not path.exists():
        return None
    try:
        with path.open("rb") as opened, np.load(opened) as file:
            held = int(file["events"])
            for name in file.files:
                file[name]  # whole, by its checksum
    except (OSError, EOFError, LookupError, TypeError, ValueError, zipfile.BadZipFile, zlib.error) as error:
        aside = path.replace(path.with_name(f"{path.name}.broken"))
        note(f"{path}: a broken checkpoint ({error}), now {aside.name}; all commits of the log are computed again")
        return None
    if held > events:
        raise InputError(
            f"{str(path)!r}: a checkpoint after {held} events, and the log beside it has {events}: it was cut, or is "
            "of another recording; put the whole log back, or remove the checkpoint, to go on from what the log has"
        )
    return path


def _put(values: tuple[Any, ...], index: int, value: Any) -> tuple[Any, ...]:
    return (*values[:index], value, *values[index + 1 :])
