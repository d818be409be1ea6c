"""The loop over events that a replay must agree with: one commit after the other, every version
kept; slow, obvious.
"""

import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.flatten_util import ravel_pytree

from asyncsim.base.streams import stream_key
from asyncsim.methods import Applied, Method, Visit
from asyncsim.methods.method import OF_MESSAGE
from asyncsim.problems import Problem
from asyncsim.replays.plan import runs_of
from asyncsim.replays.programs import on_vectors
from asyncsim.replays.waves import find_waves

RECORDED = ("loss", "update_norm", "central_energy", "proxy_energy")
_COMPILED: dict[Any, Any] = {}


class Worker(NamedTuple):
    method: Any
    optimizer: Any
    problem: Any
    memory: Any
    proxy: Any


class Memories(NamedTuple):
    """The memories of all workers, one array for each of their leaves."""

    rows: Any

    def of(self, worker):
        return jax.tree.map(lambda leaf: leaf[worker], self.rows)

    def of_all(self, name):
        return getattr(self.rows, name)


class EventLoop:
    """Replays a trace from its columns alone: who read which version, and in which order commits
    came.
    """

    def __init__(self, trace, method: Method, problem: Problem, seed: int = 0, dtype=jnp.float64):
        method = on_vectors(method, problem, dtype)
        # Discarded and cancelled computations leave nothing behind.
        frame = trace.frame[
            (trace.frame["outcome"] == "applied") | (trace.frame["outcome"] == "buffered")
        ]
        self.frame = frame.assign(commit=range(len(frame)))
        # Of each commit the version before it, the checkpoint restored before it, and whether its
        # worker starts anew.
        self.version_before = np.r_[0, self.frame["version"].to_numpy()[:-1]]
        self.restored, self.fresh = np.full(len(frame), -1), np.zeros(len(frame), bool)
        if trace.has_failures:
            self._failures(trace.frame)
        self.trace, self.method, self.problem = trace, method, problem
        counts = [0] * trace.workers
        self.worker_step = []
        for worker in self.frame["worker"]:
            self.worker_step.append(counts[worker])
            counts[worker] += 1
        key = jax.random.wrap_key_data(stream_key(seed, "problem").view(np.uint32)[:2])
        init_key, self.key = jax.random.split(key)
        self.method_key = jax.random.wrap_key_data(stream_key(seed, "method").view(np.uint32)[:2])
        params = cast(problem.init(init_key), dtype)
        self.central, self.unravel = ravel_pytree(params)
        starts = [self.central] * trace.workers
        if problem.init_replica is not None:
            trees = [problem.init_replica(init_key, k) for k in range(trace.workers)]
            starts = [ravel_pytree(cast(tree, dtype))[0] for tree in trees]
            self.central = starts[0] + sum(start - starts[0] for start in starts) / len(starts)
            if method.resume is None:  # no replicas: all adopt the central variable
                starts = [self.central] * trace.workers
        self.data = jax.tree.map(np.asarray, cast(problem.train, dtype))
        self.batches = problem.batch_indices(seed, trace.workers)
        self.server = method.init_server(self.central)
        self.workers = {
            number: Worker(
                method.init_worker(start),
                method.optimizer.init(self.unravel(start)),
                problem.init_state() if problem.init_state else (),
                method.init_memory(start),
                jnp.zeros_like(start),
            )
            for number, start in enumerate(starts)
        }
        self.waiting = []  # messages of the next version, and their visits
        self.versions = {0: self.central}
        self.held = {0: (self.central, self.server, self._memories())}
        # Reads that are not part of the worker's commit before are of the central variable.
        worker, own = self.frame["worker"].to_numpy(), {}
        self.comes_back = np.zeros(len(self.frame), bool)
        if trace.has_failures:
            for place, (who, version, made) in enumerate(
                zip(worker, self.frame["read_version"], self.frame["version"], strict=True)
            ):
                self.comes_back[place] = version != own.get(who, 0)
                own[who] = made
        self.separate_forms = bool((self.frame["push_version"] < self.version_before).any())
        # Values taken over from a replay in place of the versions', by commit.
        self.reads: dict[int, Any] = {}
        self.forms: dict[int, Any] = {}
        # The versions of each read's groups of tensors.
        self.group_versions = trace.accepted.group_versions()
        # What each worker was told at its last visit, for methods that reply.
        self.replies = dict(enumerate(starts))
        # Compiled once per method and problem, which the entry keeps alive so that no other gets
        # their ids.
        name = id(method), id(problem), trace.window, jnp.dtype(dtype)
        # Apart, since the number of waiting messages changes the commit's program alone.
        programs = jax.jit(self._computed, static_argnums=0), jax.jit(self._commit)
        (self.computed, self.commit), *_ = _COMPILED.setdefault(name, (programs, method, problem))

    def _failures(self, rows):
        """Follow the rows one by one: what is restored, who comes back, and which message a version
        is credited to.
        """
        restored, versions, last, lives, taken, restores = -1, [], None, {}, 0, 0
        for row in rows.itertuples():
            before = row.version - (row.outcome == "applied")
            if row.restores:
                restored, restores = row.restored, restores + row.restores
            if row.outcome not in ("applied", "buffered"):
                continue
            if last is not None and before - restores > last:
                versions[-1] = (
                    before - restores
                )  # made by the death of a worker that was waited for
            self.version_before[taken], self.restored[taken] = before, restored
            self.fresh[taken] = row.incarnation != lives.get(row.worker, 0)
            versions.append(row.version)
            last, restored, restores, lives[row.worker] = row.version, -1, 0, row.incarnation
            taken += 1
        self.frame = self.frame.assign(version=versions)

    def _restore(self, version, before):
        """Go back to a version, with all that the server held then; the newest is a copy of it."""
        self.central, self.server, memories = self.held[version]
        for number, worker in self.workers.items():
            self.workers[number] = worker._replace(memory=memories[number])
        self.waiting = []
        for copy in range(before, -1, -1):
            if copy in self.versions:
                break
            self.versions[copy] = self.central

    def run(self, begin: int, end: int) -> dict[str, np.ndarray]:
        """Replay commits ``begin`` to ``end - 1``; return what a replay records of them."""
        recorded = []
        for row in self.frame.iloc[begin:end].itertuples():
            if self.restored[row.commit] >= 0:
                self._restore(self.restored[row.commit], self.version_before[row.commit])
            completes = row.version > self.version_before[row.commit]
            own = self.worker_step[row.commit]
            visit = Visit(
                *(np.int32(value) for value in (row.staleness, row.worker, own, row.commit)),
                time=np.asarray(row.commit_time, self.central.dtype),
                local_steps=np.int32(row.local_steps),
                completes=np.bool_(completes),
                workers=np.int32(self.trace.workers),
                key=self._key(row.worker, own),
            )
            visit = visit._replace(delays=self._delays(row))
            if self.trace.has_failures:
                visit = visit._replace(
                    counted=jnp.array([not self._away(row.Index, one) for one in self.workers])
                )
            read = self._read(row)
            if self.method.reply and not self.method.same_reply and not self.comes_back[row.commit]:
                read = self.replies[row.worker]
                before = self.server, self.central, self.workers[row.worker].memory, visit
            form = self.central
            if self.separate_forms:
                form = (
                    self.forms[row.commit]
                    if row.commit in self.forms
                    else self.versions[row.push_version]
                )
            if self.fresh[row.commit]:
                own = self.workers[row.worker]
                optimizer = self.method.optimizer.init(self.unravel(read))
                state = self.problem.init_state() if self.problem.init_state else ()
                self.workers[row.worker] = own._replace(
                    method=self.method.init_worker(read),
                    optimizer=optimizer,
                    problem=cast(state, read.dtype),
                )
            batch = ()
            if self.batches is not None:
                rows = self.batches.rows(
                    [row.worker], [row.job], self.trace.window, [row.local_steps]
                )[0]
                batch = jax.tree.map(lambda array, rows=rows: array[rows], self.data)
            worker, start, update, loss = self.computed(
                *(row.local_steps, self.key, batch, read),
                *(self.workers[row.worker], visit, np.int32(row.job)),
            )
            visit = visit._replace(loss=loss)
            self.central, self.server, self.workers[row.worker], record, self.waiting = self.commit(
                *(self.server, self.central, form, read, start, update, worker, visit),
                [worker.memory for worker in self.workers.values()]
                if self.method.sees_memories
                else [],
                self.waiting,
            )
            if completes:  # what is only buffered is read by nobody
                self.waiting = []
                self.versions[row.version] = self.central
                if self.method.same_reply:
                    self.versions[row.version] = self.method.reply(
                        self.server, self.central, self.workers[row.worker].memory, visit
                    )
                self.held[row.version] = self.central, self.server, self._memories()
            if self.method.reply and not self.method.same_reply:
                after = self.server, self.central, self.workers[row.worker].memory, visit
                self.replies[row.worker] = self.method.reply(
                    *(after if self.trace.protocol == "exchange" else before)
                )
            recorded.append(record)
        return {
            name: np.array([record[i] for record in recorded]) for i, name in enumerate(RECORDED)
        }

    def _away(self, row, worker):
        own = self.trace.spells[self.trace.spells["worker"] == worker]
        return bool(((own["from_row"] <= row) & ~(own["to_row"] <= row)).any())

    def _memories(self):
        return {number: worker.memory for number, worker in self.workers.items()}

    def take_over(self, replay) -> None:
        """Go on from where a replay is: teacher forcing, so that a difference of one commit does
        not grow over many.
        """
        stop, waves = replay.position, find_waves(replay.trace, self.method.same_reply)
        # A copy, since the replay's next advance reuses the memory.
        state = jax.tree.map(np.array, replay.state)
        self.central, self.server, rows = state.central, state.server, state.workers
        for number, worker in self.workers.items():
            method, optimizer, problem, memory = (
                jax.tree.map(lambda leaf, number=number: leaf[number], tree)
                for tree in (rows.method, rows.learner.optimizer, rows.learner.problem, rows.memory)
            )
            proxy = worker.proxy if self.method.proxy else rows.recorders[0][number]
            self.workers[number] = Worker(method, optimizer, problem, memory, proxy)
        if self.waiting:
            rows = [
                jax.tree.map(lambda leaf, i=i: leaf[i], state.waiting)
                for i in range(len(self.waiting))
            ]
            self.waiting = [
                (own.messages, [getattr(own.visits, name) for name in OF_MESSAGE]) for own in rows
            ]
        # Where a server's buffer is not full, the version before has gone, and only what was read
        # of it is there.
        version, before = np.r_[0, 0, self.frame["version"].to_numpy()][[stop + 1, stop]]
        # Replies are in the slots, also those of this version.
        replies = stop > 0 and self.method.same_reply
        is_version = not replies and (version > before or not stop)
        self.versions = {int(version): self.central} if is_version else {}
        waiting = range(stop, len(self.frame))
        first = waves.read if waves.groups is None else waves.groups.min(1)
        self.reads = {k: state.read[waves.slot[k]] for k in waiting if first[k] < stop + replies}
        if self.method.reply and not self.method.same_reply:
            self.replies = {number: state.read[number] for number in self.workers}
        if waves.separate_pushes:
            self.forms = {
                k: state.push_read[waves.push_slot[k]] for k in waiting if waves.push[k] < stop
            }

    def _key(self, worker, own):
        return (
            jax.random.fold_in(jax.random.fold_in(self.method_key, worker), own)
            if self.method.needs_key
            else ()
        )

    def _read(self, row):
        versions, taken_over = self.group_versions[row.commit], self.reads.get(row.commit)
        if len(versions) == 1:
            return self.versions[int(versions[0])] if taken_over is None else taken_over
        return self._joined(
            [
                self.versions[version] if version in self.versions else taken_over[block]
                for block, version in enumerate(versions.tolist())
            ]
        )

    def _joined(self, blocks):
        """Join the parts of whole vectors that belong to each block."""
        bounds, owners = runs_of(self.trace, self.problem)
        runs = zip(itertools.pairwise(bounds), owners, strict=True)
        return jnp.concatenate([blocks[owner][begin:end] for (begin, end), owner in runs])

    def _delays(self, row):
        delays = self.version_before[row.commit] - self.group_versions[row.commit]
        if len(delays) == 1:
            return np.int32(delays[0])
        return self._joined([jnp.full(self.central.size, delay, np.int32) for delay in delays])

    def _computed(self, window, key, batch, read, worker: Worker, visit: Visit, job):
        """Compute a worker's local steps: the worker after them, their start, sum and mean loss."""
        method = self.method
        if method.refresh:
            worker = worker._replace(method=method.refresh(worker.method, read))
        start = method.resume(worker.method, read) if method.resume else read
        update, optimizer, state, loss = self._local(key, start, batch, worker, visit, job, window)
        return worker._replace(optimizer=optimizer, problem=state), start, update, loss

    def _commit(
        self,
        server,
        central,
        form,
        read,
        start,
        update,
        worker: Worker,
        visit: Visit,
        memories,
        waiting,
    ):
        method, loss = self.method, visit.loss
        origin = method.origin(worker.method, read) if method.origin else read
        told = (
            [Memories(jax.tree.map(lambda *leaves: jnp.stack(leaves), *memories))]
            if memories
            else []
        )
        message, method_state, _ = method.message(worker.method, update, start, form, visit)
        if method.combine:
            applied, waiting = self._combine(
                server, central, message, worker.memory, visit, waiting
            )
        else:
            applied = method.apply(server, central, message, worker.memory, visit, *told)
        proxy = (
            0.9 * worker.proxy + update
        )  # the replay's default momentum, for methods that keep none
        energy = method.proxy(method_state) if method.proxy else proxy
        record = (
            loss,
            jnp.linalg.norm(applied.central - central),
            jnp.sum((applied.central - origin) ** 2) / 2,
            jnp.sum(energy**2) / 2,
        )
        worker = worker._replace(method=method_state, memory=applied.memory, proxy=proxy)
        return applied.central, applied.server, worker, record, waiting

    def _combine(self, server, central, message, memory, visit, waiting):
        """Let a message wait, and combine all that wait if it completes the version."""
        method = self.method
        if method.receive:
            message, memory = method.receive(memory, message, visit)
        waiting = [*waiting, (message, [getattr(visit, name) for name in OF_MESSAGE])]
        messages, columns = jax.tree.map(lambda *rows: jnp.stack(rows), *waiting)
        visits = visit._replace(
            messages=np.int32(len(waiting)), **dict(zip(OF_MESSAGE, columns, strict=True))
        )
        combined = method.combine(server, central, messages, visits)
        after, left = jax.tree.map(
            lambda new, old: jnp.where(visit.completes, new, old),
            (combined.central, combined.server),
            (central, server),
        )
        return Applied(after, left, memory), waiting

    def _local(self, key, start, batches, worker: Worker, visit: Visit, job, window):
        params, update, losses = self.unravel(start), jnp.zeros_like(start), []
        optimizer_state, problem_state = worker.optimizer, worker.problem
        optimizer = optax.with_extra_args_support(self.method.optimizer)
        key = jax.random.fold_in(jax.random.fold_in(key, visit.worker), job)
        for step in range(window):
            step_key = jax.random.fold_in(jax.random.fold_in(key, 2**32 - 1), step) if step else key
            batch = (
                jax.tree.map(lambda array, step=step: array[step], batches)
                if self.problem.train is not None
                else None
            )

            def loss(params, state=problem_state, batch=batch, key=step_key):
                if self.problem.init_state is None:
                    return self.problem.loss(params, batch, key), state
                return self.problem.loss(params, state, batch, key)

            at = params
            if self.method.look_ahead:
                at = jax.tree.map(jnp.add, params, self.method.look_ahead(optimizer_state))
            (value, problem_state), gradients = jax.value_and_grad(loss, has_aux=True)(at)
            seen = visit
            if self.method.needs_key:
                apart = jax.random.fold_in(visit.key, 2**32 - 1)
                seen = visit._replace(key=jax.random.fold_in(apart, step))
            steps, optimizer_state = optimizer.update(
                gradients, optimizer_state, params, visit=seen, start=self.unravel(start)
            )
            params = optax.apply_updates(params, steps)
            update = update + ravel_pytree(steps)[0]
            losses.append(value)
        return update, optimizer_state, problem_state, jnp.mean(jnp.stack(losses))


def cast(tree, dtype):
    """Give the floating-point leaves of a tree the run's precision."""
    return jax.tree.map(
        lambda leaf: jnp.asarray(
            leaf, dtype if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf.dtype
        ),
        tree,
    )


class LoopDiverged(AssertionError):
    """The plain loop's values are not finite: there is nothing to compare with."""


def deviation(found, expected) -> float:
    """Return the largest difference between two arrays, relative to the largest value expected."""
    found, expected = np.asarray(found), np.asarray(expected)
    if not np.isfinite(expected).all():
        raise LoopDiverged
    assert found.shape == expected.shape and np.isfinite(found).all()
    if np.array_equal(found, expected):  # both may be zero
        return 0.0
    return float(np.max(np.abs(found - expected)) / np.max(np.abs(expected)))


def forced_deviation(replay, every: int) -> dict[str, float]:
    """Run a fresh replay of seed 0 that can stop ``every`` so many commits, and the loop that takes
    over at each stop.

    Returns
    -------
    dict
        The largest relative deviation of the central variable at the stops and of what is recorded
        in between.
    """
    loop = EventLoop(replay.trace, replay.method, replay.problem)
    parts, worst = [], 0.0
    ends = [*range(every, len(replay.trace), every), len(replay.trace)]
    for end in ends:
        loop.take_over(replay)
        begin = replay.position
        replay.advance(end)
        parts.append((begin, end, loop.run(begin, end)))
        worst = max(worst, deviation(replay.state.central, loop.central))
    recorded = replay.result().commits
    assert len(recorded) == ends[-1]
    found = {
        name: max(
            deviation(recorded[name].to_numpy()[begin:end], expected[name])
            for begin, end, expected in parts
        )
        for name in RECORDED
    }
    return {"central": worst, **found}
