"""The loop over events that a replay must agree with: one message after the other, every version
kept; slow, obvious.

A message has a part for each server. A read joins blocks of the parameters, each at a version of
its own: there is one block, or one for each server or group of tensors.
"""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pandas as pd
from jax.flatten_util import ravel_pytree

from asyncsim import recorders
from asyncsim.byzantine.attacks import parse_attack
from asyncsim.methods import Memories, Visit
from asyncsim.methods.method import OF_MESSAGE
from asyncsim.replays.attacked import under_attack
from asyncsim.replays.parts import partition_of
from asyncsim.replays.plan import method_key, purpose_key, runs_of, visit_key
from asyncsim.replays.programs import on_vectors
from asyncsim.replays.replay import Replay

RECORDED = ("loss", "update_norm", "central_energy", "proxy_energy")
#: Relative, after the commits of one test in float64.
SAME = 1e-12
#: The functions of a method that see vectors: a program for each length, not for each operation.
SEEN = ("refresh", "resume", "message", "receive", "apply", "combine", "reply")


def stacked(rows):
    return jax.tree.map(lambda *leaves: np.stack(leaves), *rows)


class Side:
    """What a server and the workers hold of some entries of the vectors."""

    def __init__(self, method, entries, central, starts):
        seen = {name: jax.jit(getattr(method, name)) for name in SEEN if getattr(method, name)}
        self.method, self.entries = method._replace(**seen), entries
        self.central, starts = central[entries], [start[entries] for start in starts]
        self.server = method.init_server(self.central)
        self.workers = [method.init_worker(start) for start in starts]
        self.memories = [method.init_memory(start) for start in starts]
        self.waiting, self.replies = [], starts
        self.proxies = [np.zeros_like(start) for start in starts]
        # What is read of each version, and what its restoring brings back.
        self.versions = {0: (self.central, self.central, self.server, list(self.memories))}

    def start(self, worker, read):
        """Return the start of a worker's local steps after a read."""
        method = self.method
        if method.refresh:
            self.workers[worker] = method.refresh(self.workers[worker], read)
        return method.resume(self.workers[worker], read) if method.resume else read

    def commit(self, visit, update, start, form):
        """Commit a worker's update, with the central variable ``form``; return its message."""
        method, worker = self.method, int(visit.worker)
        message, self.workers[worker], _ = method.message(
            self.workers[worker], update, start, form, visit
        )
        memory, everyone = self.memories[worker], ()
        if not method.combine:
            if method.sees_memories:
                rows, count = stacked(self.memories), len(self.workers)
                everyone = (Memories(rows, rows, np.full(count, count, np.int32)),)
            applied = method.apply(self.server, self.central, message, memory, visit, *everyone)
            self.central, self.server, self.memories[worker] = applied
            return message
        entry = message
        if method.receive:
            entry, self.memories[worker] = method.receive(memory, message, visit)
        self.waiting.append((entry, [getattr(visit, name) for name in OF_MESSAGE]))
        if visit.completes:
            messages, columns = stacked(self.waiting)
            visits = visit._replace(**dict(zip(OF_MESSAGE, columns, strict=True)))
            applied = method.combine(self.server, self.central, messages, visits)
            self.central, self.server, self.waiting = applied.central, applied.server, []
        return message

    def reply(self, visit):
        """Return what a worker reads after its commit."""
        if not self.method.reply:
            return self.central
        memory = self.memories[int(visit.worker)]
        return self.method.reply(self.server, self.central, memory, visit)

    def restore(self, version, newest):
        """Go back to a version; the newest is a copy of it."""
        _, self.central, self.server, memories = self.versions[version]
        self.memories, self.waiting = list(memories), []
        while newest not in self.versions:
            self.versions[newest], newest = self.versions[version], newest - 1


class Loop:
    """Replays a trace from its columns alone: who read which version, and in which order messages
    came.
    """

    def __init__(self, trace, method, problem, seed=0, dtype=jnp.float64):
        self.method = method = on_vectors(method, problem, dtype)
        self.trace, self.problem, self.dtype = trace.accepted, problem, dtype
        init_key, self.key = jax.random.split(purpose_key(seed, "problem"))
        self.method_key = method_key(seed)
        central, self.unravel = ravel_pytree(cast(problem.init(init_key), dtype))
        self.central, starts = np.asarray(central), [np.asarray(central)] * trace.workers
        if problem.init_replica is not None:
            trees = [problem.init_replica(init_key, k) for k in range(trace.workers)]
            starts = [np.asarray(ravel_pytree(cast(tree, dtype))[0]) for tree in trees]
            self.central = starts[0] + sum(start - starts[0] for start in starts) / len(starts)
            if method.resume is None:  # no replicas: all adopt the central variable
                starts = [self.central] * trace.workers
        self.data = jax.tree.map(np.asarray, cast(problem.train, dtype))
        self.batches = problem.batch_indices(seed, trace.workers)
        self.optimizers = [method.optimizer.init(self.unravel(start)) for start in starts]
        self.states, self.sent = [self._state()] * trace.workers, {}
        self.blocks = self._blocks()
        entries = self.blocks if trace.servers > 1 else [np.arange(self.central.size)]
        self.sides = [Side(method, of, self.central, starts) for of in entries]
        self.rows, reads = self._rows(), self.trace.reads
        by_block = reads[reads["shard"] >= 0].sort_values("shard").groupby(["worker", "job"])
        self.versions_read = by_block["version"].agg(list).to_dict()
        self.has_own_replies = method.reply and not method.same_reply
        self.is_formed_apart = (self.rows["push_version"] < self.rows["before"]).any()
        self.local = jax.jit(self._local, static_argnums=0)

    def _state(self):
        problem = self.problem
        return cast(problem.init_state(), self.dtype) if problem.init_state else ()

    def _blocks(self):
        """Find the entries of each server or group of tensors."""
        trace, block = self.trace, np.zeros(self.central.size, int)
        if trace.servers > 1:
            runs = partition_of(self.problem, trace.cluster.servers).runs
        else:
            bounds, owners = runs_of(trace, self.problem)
            runs = zip(owners, bounds[:-1], bounds[1:], strict=True)
        for owner, begin, end in runs:
            block[begin:end] = owner
        return [np.flatnonzero(block == number) for number in range(block.max() + 1)]

    def _rows(self):
        """Find the parts of messages in the order of their commits."""
        trace, rows = self.trace, self.trace.frame.assign(shard=0)
        if trace.servers > 1:
            windows = np.array(trace.cluster.windows)
            rows = trace.parts.assign(local_steps=windows[trace.parts["worker"]])
        rows = rows[rows["outcome"].isin(["applied", "buffered"])]
        completes = rows["outcome"] == "applied"
        rows = rows.assign(completes=completes, before=rows["version"] - completes)
        of_version, of_worker = rows.groupby(["shard", "before"]), rows.groupby("worker")
        failures = {"fresh": False, "returns": False}
        if trace.has_failures:
            failures = {
                "fresh": rows["incarnation"] != of_worker["incarnation"].shift(fill_value=0),
                # A read that is not part of the worker's commit before.
                "returns": rows["read_version"] != of_worker["version"].shift(fill_value=0),
            }
        return rows.assign(
            number=rows.groupby("shard").cumcount(),
            step=of_worker["job"].transform(lambda jobs: pd.factorize(jobs)[0]),
            place=of_version.cumcount(),
            messages=of_version["before"].transform("size"),
            **failures,
        )

    def run(self):
        """Return what a replay records of each message."""
        for row in self.rows.itertuples():
            side = self.sides[row.shard]
            if getattr(row, "restored", -1) >= 0:
                side.restore(row.restored, row.before)
            visit, job = self._visit(row), (row.worker, row.job)
            if job not in self.sent:
                self.sent[job] = self._computed(row, visit)
            self._commit(row, side, visit, self.sent[job])
        self.central = self._joined([side.central for side in self.sides])
        frame = self.trace.frame
        sent = [self.sent[job] for job in zip(frame["worker"], frame["job"], strict=True)]
        squares = np.array([message.squares for message in sent]).T
        columns = [message.loss for message in sent], squares[0] ** 0.5, *(squares[1:] / 2)
        return dict(zip(RECORDED, map(np.array, columns), strict=True))

    def _commit(self, row, side, visit, sent):
        """Commit a part of a message, and add up the squares of its steps."""
        method, worker, is_exchange = self.method, row.worker, self.trace.protocol == "exchange"
        visit, before, read = visit._replace(loss=sent.loss), side.central, sent.read[side.entries]
        origin = method.origin(side.workers[worker], read) if method.origin else read
        if self.has_own_replies and not is_exchange:
            side.replies[worker] = side.reply(visit)
        form = side.versions[row.push_version][0] if self.is_formed_apart else before
        update = sent.update[side.entries]
        side.commit(visit, update, sent.start[side.entries], form)
        if row.completes:  # what is only buffered is read by nobody
            shown = side.reply(visit) if method.same_reply else side.central
            side.versions[row.version] = shown, side.central, side.server, list(side.memories)
        if self.has_own_replies and is_exchange:
            side.replies[worker] = side.reply(visit)
        # The replay's default momentum, for methods that keep none.
        proxy = side.proxies[worker] = 0.9 * side.proxies[worker] + update
        energy = method.proxy(side.workers[worker]) if method.proxy else proxy
        steps = side.central - before, side.central - origin, energy
        sent.squares += [np.sum(np.square(step)) for step in steps]

    def _versions(self, row):
        return self.versions_read.get((row.worker, row.job), [row.read_version])

    def _visit(self, row):
        delays = np.int32(row.before) - np.array(self._versions(row), np.int32)
        if len(delays) > 1:
            of_entries = np.zeros(self.central.size, np.int32)
            for block, delay in zip(self.blocks, delays, strict=True):
                of_entries[block] = delay
        counted = ()
        if self.trace.has_failures:
            spells = self.trace.spells
            away = (spells["from_row"] <= row.commit) & ~(spells["to_row"] <= row.commit)
            counted = ~np.isin(np.arange(self.trace.workers), spells["worker"][away])
        return Visit(
            *(np.int32(value) for value in (row.staleness, row.worker, row.step, row.number)),
            time=np.asarray(row.commit_time, self.dtype),
            completes=np.bool_(row.completes),
            workers=np.int32(self.trace.workers),
            **{n: np.int32(getattr(row, n)) for n in ("local_steps", "place", "messages")},
            counted=counted,
            delays=delays[0] if len(delays) == 1 else of_entries,
            key=visit_key(self.method_key, row.worker, row.step) if self.method.needs_key else (),
        )

    def _joined(self, parts):
        """Join the entries of all sides."""
        vector = np.zeros_like(self.central)
        for side, part in zip(self.sides, parts, strict=True):
            vector[side.entries] = part
        return vector

    def _read(self, row):
        """Join the blocks of a read."""
        if self.has_own_replies and not row.returns:
            return self._joined([side.replies[row.worker] for side in self.sides])
        vector = np.zeros_like(self.central)
        for number, version in enumerate(self._versions(row)):
            side, block = self.sides[number % len(self.sides)], self.blocks[number]
            shown = np.asarray(side.versions[version][0])
            vector[block] = shown[np.searchsorted(side.entries, block)]
        return vector

    def _computed(self, row, visit):
        """Compute a job: its read, start, update and mean loss."""
        worker, window, read = row.worker, row.local_steps, self._read(row)
        if row.fresh:
            self.sides[0].workers[worker] = self.method.init_worker(read)
            self.optimizers[worker] = self.method.optimizer.init(self.unravel(read))
            self.states[worker] = self._state()
        start = self._joined([side.start(worker, read[side.entries]) for side in self.sides])
        batch = None
        if self.batches is not None:
            rows = self.batches.rows([worker], [row.job], self.trace.window, [window])[0]
            batch = jax.tree.map(lambda array: array[rows], self.data)
        states = self.optimizers[worker], self.states[worker]
        update, self.optimizers[worker], self.states[worker], loss = self.local(
            *(window, start, batch, *states, visit, np.int32(row.job))
        )
        update, loss, squares = np.asarray(update), np.asarray(loss), np.zeros(3)
        return SimpleNamespace(read=read, start=start, update=update, loss=loss, squares=squares)

    def _local(self, window, start, batches, optimizer_state, state, visit, job):
        params, update, losses = self.unravel(start), jnp.zeros_like(start), []
        optimizer = optax.with_extra_args_support(self.method.optimizer)
        key = jax.random.fold_in(jax.random.fold_in(self.key, visit.worker), job)
        for step in range(window):
            step_key = jax.random.fold_in(jax.random.fold_in(key, 2**32 - 1), step) if step else key
            batch = jax.tree.map(lambda array, step=step: array[step], batches)

            def loss(params, state=state, batch=batch, key=step_key):
                if self.problem.init_state is None:
                    return self.problem.loss(params, batch, key), state
                return self.problem.loss(params, state, batch, key)

            at = params
            if self.method.look_ahead:
                at = jax.tree.map(jnp.add, params, self.method.look_ahead(optimizer_state))
            (value, state), gradients = jax.value_and_grad(loss, has_aux=True)(at)
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
        return update, optimizer_state, state, jnp.mean(jnp.stack(losses))


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


def deviations(trace, method, problem, attack=None, expected=None, **options) -> dict[str, float]:
    """Return the relative deviations of a replay from the loop of the same method, or of the
    ``expected`` one: of what is recorded of the messages, and of the last central variable.
    """
    attack = parse_attack(attack)
    options = {"precision": "float64", "record": [recorders.energy()]} | options
    replay = Replay(trace, method, problem, attack=attack, **options)
    for stop in np.unique(np.append(options.get("stops", []), len(replay.trace))).astype(int):
        replay.advance(stop)
    run = replay.result()
    dtype = jnp.dtype(options["precision"])
    vectors = on_vectors(expected or method, problem, dtype)
    loop = Loop(trace, *under_attack(vectors, problem, attack, trace.workers), dtype=dtype)
    recorded = loop.run()
    found = {name: deviation(run.commits[name], recorded[name]) for name in RECORDED}
    return {"central": deviation(ravel_pytree(run.params)[0], loop.central), **found}
