"""Worker processes without a server: each computes, mixes and sends messages to its neighbours.

A worker runs the functions of a replay, and its gradients are a replay's jobs. Messages are calls
between workers; they wait in the receiver's inbox while it computes. Each worker records its own
gradients: their times, and the messages mixed. `asyncsim.recorded` orders the gradients of all.
"""

import functools
import math
import pickle
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from asyncsim.base.errors import InputError
from asyncsim.base.tracing import whole_products
from asyncsim.methods.method import Inbox, Method
from asyncsim.problems.problem import Problem
from asyncsim.real.computing import Computation, Computing, OwnVisit, State, save_state
from asyncsim.real.processes import require_ray
from asyncsim.real.recording import STATES, TRACE, Event, Header, Log, load
from asyncsim.real.server import KeyedActor, clock_zero
from asyncsim.replays.central import Mass, Sent, initial_memory
from asyncsim.replays.local import LocalResult
from asyncsim.replays.programs import IdentityKey
from asyncsim.replays.state import WorkerRow
from asyncsim.replays.step import ServerState, StepInputs, begin, finish
from asyncsim.simulation.delays import delays
from asyncsim.simulation.handshakes import partners
from asyncsim.traces.archive import write_trace

#: Calls a function of another worker by the worker's index, the function's name and arguments; the
#: result is a function that waits for the answer.
Call = Callable[..., Callable[[], Any]]


class Message(NamedTuple):
    """A message that a worker sends to a neighbour after a gradient."""

    time: float  #: when that gradient was applied (s)
    sender: int
    job: int  #: the index of the gradient among the sender's
    share: float  #: the weight of the content
    content: Any  #: the method's message


class PeerResult(NamedTuple):
    """The recording and the arrays of one worker at the end."""

    rows: list[Event]  #: one for each of its gradients, see `asyncsim.real.recording`
    replica: list[np.ndarray]  #: the leaves of the method's state
    learner: list[np.ndarray]
    moved: np.ndarray  #: the sum of its steps over the number of workers, float64


def first_state(workers: int, computing: Computing) -> State:
    """Initialize the arrays of all workers, in the form of a server's state."""
    with jax.enable_x64(computing.x64):
        rows = tuple(
            WorkerRow(
                computing.method.init_worker(computing.first_replica(worker)),
                (),
                (),
                computing.first_learner(worker),
            )
            for worker in range(workers)
        )
        return State(computing.flat.ravel(computing.params), (), rows, (), ())


class Peer:
    """A worker of a recording without a server; `run` holds a thread, neighbours call the rest."""

    def __init__(self, index: int, method: Method, problem: Problem, header: Header):
        processes, workers = header.processes, header.processes.workers
        self._computing = Computing(method, problem, header)
        method = self._computing.method
        topology, self._policy = processes.topology, processes.policy
        assert topology is not None
        self._index, self._workers = index, workers
        self._meets, self._sees_messages = method.meet is not None, method.sees_messages
        cycle = topology.edges(workers)
        self._sends = [takers[index] for takers in topology.sends(workers)]
        self._expected = [int((edges.taker == index).sum()) for edges in cycle]
        self._kept = [float(edges.kept(workers)[index]) for edges in cycle]
        self._partner = partners(topology, workers, header.seed)
        row = first_state(workers, self._computing).workers[index]
        with jax.enable_x64(self._computing.x64):
            replica = self._computing.first_replica(index)
        self._replica, self._learner, self._snapshot = row.method, row.learner, replica
        self._memory = initial_memory(method, replica)
        self._moved = np.zeros(replica.shape)
        self._dtype = np.dtype(header.precision)
        self._functions = _compiled(IdentityKey(method), workers, processes.window)
        with jax.enable_x64(self._computing.x64):
            visit = self._visit_arguments(0, 1.0)
            row = self._row()
            ready = row if self._meets else row._replace(memory=Mass(replica, ()))  # after mixing
            arguments = ready, replica, replica, self._no_partner(), visit
            _, _, message, *_ = jax.eval_shape(self._functions.finish, *arguments)
            self._nothing = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), message)
            if not self._meets:
                jax.eval_shape(self._functions.begin, row, self._mixable([]), visit)
        self._delay = delays(processes.delay_laws, header.seed, "delay", processes.window)
        # Workers that wait for neighbours must all compute equally many gradients, or a neighbour
        # would wait forever. All others share a total, so that fast workers compute more.
        self._waits = self._policy.name in ("neighbours", "overlap")
        self._own_part = header.commits // workers + (index < header.commits % workers)
        self._left = max(0, header.commits - workers)
        self.rows: list[Event] = []
        self._inbox: dict[int, list[Message]] = defaultdict(list)  # by the senders' jobs
        self._arrived: Counter[int] = Counter()
        self._changed = threading.Condition()
        self._replica_lock = threading.Lock()  # one exchange at a time
        self._last_exchange = 0.0  # time (s)
        self._zero = 0.0

    def warm_up(self) -> None:
        """Compile all functions; change no state."""
        job, visit, functions = (
            self._computing.first_job(),
            self._visit_arguments(0, 1.0),
            self._functions,
        )
        result = self._computing.run(self._index, job)
        with jax.enable_x64(self._computing.x64):
            row, start = self._row(), self._snapshot
            if not self._meets:
                functions.add(self._nothing, self._nothing, self._number(0.0))
                row, start = functions.begin(row, self._mixable([]), visit)
            functions.finish(row, start, result.update, self._no_partner(), visit)

    def begin(self) -> None:
        """Start the clock, which all workers read from worker 0."""
        self._zero = time.monotonic()

    def zero(self) -> float:
        """Return the start of the workers' clock on this machine's monotonic clock (s)."""
        return self._zero

    def clock(self) -> float:
        """Return the time (s) since the start."""
        return time.monotonic() - self._zero

    def progress(self) -> int:
        """Return the number of gradients computed so far."""
        return len(self.rows)

    def may_begin(self) -> bool:
        """Take one of the shared remaining gradients; return False if none remains."""
        with self._changed:
            self._left -= 1
            return self._left >= 0

    def deliver(self, message: Message) -> None:
        """Put a neighbour's message into the inbox, and wake the worker if it waits."""
        with self._changed:
            self._inbox[message.job].append(message)
            self._arrived[message.job] += 1
            self._changed.notify()

    def lend(self) -> tuple[Any, float]:
        """Lock the replica for an exchange; return it and the time (s) of its last exchange."""
        self._replica_lock.acquire()
        return self._replica, self._last_exchange

    def give_back(self, replica: Any, exchange_time: float) -> None:
        """Store the replica after an exchange, with its time (s), and unlock it."""
        self._replica, self._last_exchange = replica, exchange_time
        self._replica_lock.release()

    def result(self) -> PeerResult:
        """Return the recording and the arrays of the worker."""
        replica, learner = (
            [np.asarray(leaf) for leaf in jax.tree.leaves(of)]
            for of in (self._replica, self._learner)
        )
        return PeerResult(self.rows, replica, learner, self._moved)

    def run(self, call: Call, same_clock: bool) -> None:
        """Compute gradients to the last one; ``same_clock``: worker 0 is on this machine."""
        self._zero = clock_zero(
            SimpleNamespace(zero=call(0, "zero"), clock=lambda: call(0, "clock")()), same_clock
        )
        with jax.enable_x64(self._computing.x64):
            continues = self._own_part > 0
            while continues:
                # The answer travels while this worker computes.
                next_allowed = None if self._waits else call(0, "may_begin")
                self._compute(len(self.rows), call)
                continues = (
                    len(self.rows) < self._own_part if next_allowed is None else next_allowed()
                )

    def _compute(self, step: int, call: Call) -> None:
        """Compute one gradient: mix messages, compute, apply and send."""
        mixes_beside, functions = self._policy.mix == "beside", self._functions
        kept_share = self._kept[(step - 1) % len(self._kept)] if step and not self._meets else 1.0
        visit = self._visit_arguments(step, kept_share)
        messages = [] if mixes_beside or self._meets else self._take_up(step)
        start_time, start, row = max(0.0, self.clock()), self._snapshot, self._row()
        if not self._meets:
            mixed, start = functions.begin(row, self._mixable(messages), visit)
        time.sleep(self._delay(self._index))
        job = Computation(step, step, np.asarray(start), self._learner)
        result = self._computing.run(self._index, job)
        send_time = max(start_time, self.clock())
        partner, partner_replica, last_exchange = -1, (), 0.0
        if self._meets:
            partner = self._partner(self._index, step)
            partner_replica, last_exchange = self._lend_both(call, partner)
            row = self._row()
        elif mixes_beside:
            messages = self._take_up(step)
            row, _ = functions.begin(row, self._mixable(messages), visit)
        else:
            row = mixed
        arguments = row, start, result.update, (partner_replica, np.int32(partner)), visit
        replica, self._memory, message, moved, norm, partner_replica = functions.finish(*arguments)
        message, self._learner = jax.tree.map(np.asarray, message), result.learner
        self._moved += np.asarray(moved)
        commit_time = max(send_time, self.clock())
        if self._meets:
            # Clocks of two machines might order an exchange before the replica's previous exchange.
            earliest = math.nextafter(max(last_exchange, self._last_exchange), math.inf)
            commit_time = max(commit_time, earliest)
            self._snapshot = message
            if partner >= 0:
                call(partner, "give_back", jax.tree.map(np.asarray, partner_replica), commit_time)()
            self.give_back(jax.tree.map(np.asarray, replica), commit_time)
        else:
            self._replica = replica
        self.rows.append(
            {
                "event": "commit",
                "worker": self._index,
                "job": step,
                "start_time": start_time,
                "send_time": send_time,
                "commit_time": commit_time,
                "sources": [[message.sender, message.job] for message in messages],
                "weights": [message.share for message in messages],
                "kept": kept_share,
                "partner": partner,
                "loss": float(result.loss),
                "update_norm": float(norm),
            }
        )
        for taker, share in () if self._meets else self._sends[step % len(self._sends)]:
            call(taker, "deliver", Message(commit_time, self._index, step, share, message))

    def _take_up(self, step: int) -> list[Message]:
        """Return the messages to mix with a gradient; wait for those that the policy requires."""
        awaited = step - 1 - (self._policy.steps or 0)
        with self._changed:
            if self._waits and awaited >= 0:
                expected = self._expected[awaited % len(self._expected)]
                self._changed.wait_for(lambda: self._arrived[awaited] >= expected)
            jobs = [step - 1] if self._policy.name == "neighbours" else list(self._inbox)
            messages = [message for job in jobs for message in self._inbox.pop(job, ())]
        # The order of a trace, and so of a replay's sums: floating-point addition is not
        # associative.
        return sorted(messages, key=lambda message: (message.time, message.sender))

    def _mixable(self, messages: Sequence[Message]) -> Any:
        """Return the weighted sum of messages, or an `Inbox` for methods that see each message."""
        if self._sees_messages:
            # Each shape is compiled: pad to a multiple of the messages that a step expects.
            room = max(1, *self._expected)
            absent = -len(messages) % room or (0 if messages else room)
            contents = [*(message.content for message in messages), *[self._nothing] * absent]
            shares = [*(message.share for message in messages), *[0.0] * absent]
            senders = [*(message.sender for message in messages), *[self._workers] * absent]
            stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *contents)
            return Inbox(stacked, np.asarray(shares, self._dtype), np.asarray(senders, np.int32))
        total = self._nothing
        for message in messages:
            total = self._functions.add(total, message.content, self._number(message.share))
        return total

    def _row(self) -> WorkerRow:
        return WorkerRow(self._replica, self._memory, (), ())

    def _no_partner(self) -> Any:
        return (self._replica if self._meets else (), np.int32(-1))

    def _lend_both(self, call: Call, partner: int) -> tuple[Any, float]:
        """Lock this worker's and its partner's replica; return the partner's, as `lend` does.

        The lower index is locked first on both sides, which excludes a deadlock.
        """
        if partner < 0:
            return self.lend()[0], 0.0
        if self._index < partner:
            self.lend()
            return call(partner, "lend")()
        answer = call(partner, "lend")()
        self.lend()
        return answer

    def _visit_arguments(self, step: int, kept: float) -> tuple[Any, ...]:
        """Return the arguments of an `OwnVisit`: worker, step, key and kept weight."""
        return (
            np.int32(self._index),
            np.int32(step),
            self._computing.visit_key(self._index, step),
            self._number(kept),
        )

    def _number(self, value: float) -> np.ndarray:
        return np.asarray(value, self._dtype)


class _Functions(NamedTuple):
    """A worker's compiled functions, besides its local steps."""

    add: Any  #: a message to a sum
    begin: Any
    finish: Any


@functools.lru_cache(maxsize=32)
def _compiled(same_method: IdentityKey, workers: int, window: int) -> _Functions:
    method: Any = same_method.value

    def visit_of(worker: Any, step: Any, key: Any, kept: Any) -> Any:
        return OwnVisit(worker, step, window, workers, key, kept)

    def add(total, message, weight):
        return jax.tree.map(
            lambda summed, leaf: summed + weight.astype(leaf.dtype) * leaf, total, message
        )

    def mix(row, inbox, visit):
        sees = method.sees_messages
        sent = inbox._replace(messages=Sent(inbox.messages, ())) if sees else Sent(inbox, ())
        mixing, start = begin(method, None, StepInputs(visit_of(*visit), row, received=sent))
        return mixing.row, start

    def commit(row, start, update, partner_state, visit):
        replica, partner = partner_state
        # Without a server there is no central variable to read: the place holds zeros.
        meeting = StepInputs(
            visit_of(*visit), row, start, pulled=None, received=replica, partner=partner
        )
        local = LocalResult(update, jnp.zeros((), update.dtype), ())
        end = finish(method, "none", ServerState(jnp.zeros_like(update)), meeting, start, local)
        result = end.commit
        norm = jnp.sqrt(jnp.vdot(result.step, result.step))
        return result.worker, result.memory, result.message, result.step, norm, end.partner_state

    return _Functions(*(jax.jit(whole_products()(function)) for function in (add, mix, commit)))


def check(method: Method, problem: Problem, header: Header) -> None:
    """Raise InputError if a method's messages depend on the central variable, which no worker
    knows.
    """
    try:
        Peer(0, method, problem, header)
    except InputError:
        raise
    except Exception as error:
        raise InputError(
            f"method = {method.name!r}: its message needs the central variable, which no worker "
            f"has ({error}); choose "
            "another"
        ) from error


def write(folder: Path, header: Header, central: np.ndarray, results: Sequence[PeerResult]) -> None:
    """Write the recording of all workers: final arrays, log, header and trace.

    ``central``: the initial central variable, shape ``[parameters]``.
    """
    topology = header.processes.topology
    assert topology is not None
    sends = topology.sends(header.processes.workers)
    rows = sorted(
        (row for result in results for row in result.rows), key=lambda row: row["commit_time"]
    )
    taken_up = {(row["worker"], *source) for row in rows for source in row["sources"]}
    flying = [
        {"source": [row["worker"], row["job"]], "taker": taker, "weight": share}
        for row in rows
        for taker, share in sends[row["job"] % len(sends)][row["worker"]]
        if row["partner"] < 0 and (taker, row["worker"], row["job"]) not in taken_up
    ]
    workers = tuple(WorkerRow(result.replica, (), (), result.learner) for result in results)
    mean = (central + sum(result.moved for result in results)).astype(central.dtype)
    save_state(folder / STATES / f"{len(rows):08}.npz", State(mean, (), workers, (), ()), len(rows))
    log = Log(folder)
    with log.file:
        for event in [*rows, {"event": "ended", "in_flight": flying}]:
            log.append(event)
    header.save(folder)
    write_trace(load(folder).trace, folder / TRACE)


class PeerActor(KeyedActor):
    """A `Peer` in a Ray actor."""

    def __init__(self, content: bytes, key: str, *arguments: Any):
        method, problem = pickle.loads(content)
        index, header = arguments
        self._ray = require_ray()
        super().__init__(key, Peer(index, method, problem, header))

    def begin(self) -> str:
        """Start the clock that all workers read; return this actor's node of the Ray cluster."""
        self._served.begin()
        return self._ray.get_runtime_context().get_node_id()

    def train(self, workers: Sequence[Any], node: str) -> None:
        """Compute gradients; ``workers``: all actors, the first on ``node`` of the Ray cluster."""

        def call(index: int, name: str, *arguments: Any) -> Callable[[], Any]:
            return functools.partial(
                self._ray.get, workers[index].call.remote(self._key, name, *arguments)
            )

        self._served.run(call, self._ray.get_runtime_context().get_node_id() == node)
