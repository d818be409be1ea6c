"""Worker processes without a server: each computes, mixes and sends messages to its neighbours.

Messages are calls of a worker's coroutines; they wait in its inbox while it computes. Each worker
records its own gradients: their times and the messages mixed. `asyncsim.recorded` orders them.
"""

import asyncio
import math
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from asyncsim.base.tracing import whole_products
from asyncsim.methods.method import Inbox
from asyncsim.real.arrays import Computation, Computing, Task
from asyncsim.real.server import clock_zero
from asyncsim.replays.central import Mass, Sent, initial_memory
from asyncsim.replays.local import LocalResult
from asyncsim.replays.step import ServerState, StepInputs, begin, finish
from asyncsim.simulation.delays import delays
from asyncsim.simulation.handshakes import partners


class Message(NamedTuple):
    """A message that a worker sends to a neighbour after a gradient."""

    time: float  #: when that gradient was applied (s)
    sender: int
    job: int  #: the index of the gradient among the sender's
    share: float  #: the weight of the content
    content: Any  #: the method's message


class Peer:
    """A worker of a recording without a server; `run` computes, neighbours call the rest."""

    def __init__(self, index: int, task: Task):
        cluster, self._computing, self._index = task.cluster, Computing(task), index
        workers, topology = cluster.workers, cluster.topology
        assert topology is not None
        self._workers, self._policy = workers, cluster.policy
        self._method = self._computing.method
        self._meets = self._method.meet is not None
        cycle = topology.edges(workers)
        self._sends = [takers[index] for takers in topology.sends(workers)]
        self._expected = [int((edges.taker == index).sum()) for edges in cycle]
        self._kept = [float(edges.kept(workers)[index]) for edges in cycle]
        self._partner = partners(topology, workers, task.seed)
        self._start, row = self._computing.first(index)
        self._row = row._replace(memory=initial_memory(self._method, self._start))
        self._dtype, self._moved = self._start.dtype, np.zeros(self._start.shape)
        self._add, self._begin, self._finish = _compiled(self._method)
        self._sleep = delays(cluster.compute_laws, task.seed, "delay", cluster.windows[0])
        # Workers that wait for neighbours compute equally many gradients, or a neighbour would wait
        # forever. Others share a total, so that fast workers compute more.
        self._waits = self._policy.name in ("neighbours", "overlap")
        self._own_part = task.commits // workers + (index < task.commits % workers)
        self._left, self._zero = max(0, task.commits - workers), time.monotonic()
        self._rows: list[dict[str, Any]] = []
        self._inbox: dict[int, list[Message]] = defaultdict(list)  # by the senders' jobs
        self._arrived: Counter[int] = Counter()
        self._changed, self._exchange = asyncio.Condition(), asyncio.Lock()
        self._last_exchange = 0.0  # time (s)
        self._warm_up()

    def _warm_up(self) -> None:
        """Compile all functions; change no state."""
        self._computing.run(self._index, self._computing.first_job(self._index))
        visit, start, row = self._visit(0, 1.0), self._start, self._row
        mixed = row if self._meets else row._replace(memory=Mass(start, ()))
        loan = self._row.method if self._meets else (), np.int32(-1)
        *_, message, _ = self._finish(mixed, start, start, loan, visit)
        self._nothing = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), message)
        if not self._meets:
            self._add(self._nothing, self._nothing, np.asarray(0.0, self._dtype))
            self._begin(row, self._mixable([]), visit)

    async def ready(self) -> None:
        """Return once the worker can begin."""

    async def start(self) -> None:
        """Set to zero the clock that all workers read from worker 0."""
        self._zero = time.monotonic()

    async def clock(self) -> float:
        """Return the time since the start (s)."""
        return self._now()

    async def progress(self) -> int:
        """Return the number of gradients so far."""
        return len(self._rows)

    async def may_begin(self) -> bool:
        """Take one of the remaining gradients, which all workers share."""
        self._left -= 1
        return self._left >= 0

    async def deliver(self, message: Message) -> None:
        """Put a neighbour's message into the inbox."""
        async with self._changed:
            self._inbox[message.job].append(message)
            self._arrived[message.job] += 1
            self._changed.notify_all()

    async def lend(self) -> tuple[Any, float]:
        """Lock the state for an exchange; return it and the time (s) of its last exchange."""
        await self._exchange.acquire()
        return self._row.method, self._last_exchange

    async def give_back(self, state: Any, exchange_time: float) -> None:
        """Store the state after an exchange, and unlock it."""
        self._row, self._last_exchange = self._row._replace(method=state), exchange_time
        self._exchange.release()

    async def result(self) -> tuple[list[dict[str, Any]], Any, Any]:
        """Return the rows, the worker's part of the central variable's way, and its states."""
        return self._rows, self._moved, self._row

    async def run(self, peers: Sequence[Any]) -> None:
        """Compute gradients to the last one; ``peers``: all workers."""
        self._zero = await clock_zero(peers[0])
        while len(self._rows) < self._own_part if self._waits else True:
            await self._gradient(peers)
            if not self._waits and not await peers[0].may_begin():
                break

    async def _gradient(self, peers: Sequence[Any]) -> None:
        """Mix messages, compute a gradient, apply it and send."""
        step, mixes_beside = len(self._rows), self._policy.mix == "beside"
        kept = self._kept[(step - 1) % len(self._kept)] if step and not self._meets else 1.0
        visit, row, start = self._visit(step, kept), self._row, self._start
        messages: list[Message] = []
        if not self._meets:
            messages = [] if mixes_beside else await self._take_up(step)
            row, start = self._begin(row, self._mixable(messages), visit)
        start_time = max(0.0, self._now())
        job = Computation(step, step, np.asarray(start), self._row.learner)
        result = await asyncio.to_thread(self._compute, job)
        send_time = max(start_time, self._now())
        partner, loan, earliest = -1, (), 0.0
        if self._meets:
            partner = self._partner(self._index, step)
            loan, earliest = await self._lend_both(peers, partner)
            row = self._row
        elif mixes_beside:
            messages = await self._take_up(step)
            row, _ = self._begin(self._row, self._mixable(messages), visit)
        outputs = self._finish(row, start, result.update, (loan, np.int32(partner)), visit)
        state, memory, moved, norm, message, loan = jax.tree.map(np.asarray, outputs)
        commit_time, self._moved = max(send_time, self._now()), self._moved + moved
        self._row = self._row._replace(memory=memory, learner=result.learner)
        if self._meets:
            # Clocks of two machines might order an exchange before the previous one.
            earliest = math.nextafter(max(earliest, self._last_exchange), math.inf)
            commit_time, self._start = max(commit_time, earliest), message
            if partner >= 0:
                await peers[partner].give_back(loan, commit_time)
            await self.give_back(state, commit_time)
        else:
            self._row = self._row._replace(method=state)
        self._rows.append(
            {
                "worker": self._index,
                "job": step,
                "start_time": start_time,
                "send_time": send_time,
                "commit_time": commit_time,
                "sources": [[message.sender, message.job] for message in messages],
                "weights": [message.share for message in messages],
                "kept": kept,
                "partner": partner,
                "loss": float(result.loss),
                "update_norm": float(norm),
            }
        )
        for taker, share in () if self._meets else self._sends[step % len(self._sends)]:
            await peers[taker].deliver(Message(commit_time, self._index, step, share, message))

    def _compute(self, job: Computation) -> LocalResult:
        time.sleep(self._sleep(self._index))
        return self._computing.run(self._index, job)

    async def _take_up(self, step: int) -> list[Message]:
        """Return the messages to mix with a gradient; wait for those that the policy requires."""
        awaited = step - 1 - (self._policy.steps or 0)
        async with self._changed:
            if self._waits and awaited >= 0:
                expected = self._expected[awaited % len(self._expected)]
                await self._changed.wait_for(lambda: self._arrived[awaited] >= expected)
            jobs = [step - 1] if self._policy.name == "neighbours" else list(self._inbox)
            messages = [message for job in jobs for message in self._inbox.pop(job, ())]
        # The order of a trace, and so of a replay's sums: floating-point addition is not
        # associative.
        return sorted(messages, key=lambda message: (message.time, message.sender))

    def _mixable(self, messages: Sequence[Message]) -> Any:
        """Return the weighted sum of messages, or an `Inbox` for methods that see each message."""
        if not self._method.sees_messages:
            total = self._nothing
            for message in messages:
                total = self._add(total, message.content, np.asarray(message.share, self._dtype))
            return Sent(total, ())
        # Each shape is compiled: pad to a multiple of the messages that a step expects.
        room = max(1, *self._expected)
        absent = -len(messages) % room or (0 if messages else room)
        padding = Message(0.0, self._workers, 0, 0.0, self._nothing)
        padded = [*messages, *[padding] * absent]
        contents = [message.content for message in padded]
        stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *contents)
        shares = np.asarray([message.share for message in padded], self._dtype)
        senders = np.asarray([message.sender for message in padded], np.int32)
        return Inbox(Sent(stacked, ()), shares, senders)

    async def _lend_both(self, peers: Sequence[Any], partner: int) -> tuple[Any, float]:
        """Lock this worker's and its partner's state, the lower index first; return the latter."""
        if partner < 0:
            return await self.lend()
        answers = {}
        for index in sorted((self._index, partner)):
            answers[index] = await (self if index == self._index else peers[index]).lend()
        return answers[partner]

    def _visit(self, step: int, kept: float) -> Any:
        key = self._computing.visit_key(self._index, step)
        share = np.asarray(kept, self._dtype)
        return self._computing.visit(np.int32(self._index), np.int32(step), key, share)

    def _now(self) -> float:
        return time.monotonic() - self._zero


def _compiled(method: Any) -> tuple[Any, Any, Any]:
    """Return the compiled functions: add a message to a sum; begin; and finish a step."""

    def add(total, message, weight):
        return jax.tree.map(lambda a, b: a + weight.astype(b.dtype) * b, total, message)

    def mix(row, received, visit):
        mixed, start = begin(method, None, StepInputs(visit, row, received=received))
        return mixed.row, start

    def commit(row, start, update, loan, visit):
        inputs = StepInputs(visit, row, start, None, *loan)
        local = LocalResult(update, jnp.zeros((), update.dtype), ())
        # Without a server there is no central variable to read: its place holds zeros.
        end = finish(method, "none", ServerState(jnp.zeros_like(update)), inputs, start, local)
        step = end.commit.step
        results = end.commit.worker, end.commit.memory, step, jnp.sqrt(jnp.vdot(step, step))
        return *results, end.commit.message, end.partner_state

    add, mix, commit = (jax.jit(whole_products()(function)) for function in (add, mix, commit))
    return add, mix, commit


def in_flight(task: Task, rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages that no gradient has taken up; see `asyncsim.recorded`."""
    topology: Any = task.cluster.topology
    cycle = topology.sends(task.cluster.workers)
    taken_up = {(row["worker"], *source) for row in rows for source in row["sources"]}
    return [
        {"source": [row["worker"], row["job"]], "taker": taker, "weight": share}
        for row in rows
        for taker, share in cycle[row["job"] % len(cycle)][row["worker"]]
        if row["partner"] < 0 and (taker, row["worker"], row["job"]) not in taken_up
    ]
