"""Whether a method treats each entry of its vectors by itself: on a vector, and on its parts."""

import jax
import jax.numpy as jnp
import numpy as np

from asyncsim.methods import Memories, Visit

SIZE, WORKERS, COMMITS = 12, 3, 6
#: Of equal size, so that both have one program.
PARTS = [slice(0, SIZE // 2), slice(SIZE // 2, SIZE)]


class Side:
    """A method on some entries of the vectors: its server and its workers."""

    def __init__(self, method, central, workers=WORKERS):
        self.method, self.central, self.server = method, central, method.init_server(central)
        self.workers = [method.init_worker(central)] * workers
        self.memories, self.waiting = [method.init_memory(central)] * workers, []

    def start(self, worker, read):
        """Return the start of a worker's local steps after a read."""
        resume = self.method.resume
        return read if resume is None else resume(self.workers[worker], read)

    def commit(self, visit, update, read, form):
        """Commit a worker's update, with the central variable ``form``; return its message."""
        method, worker = self.method, int(visit.worker)
        start, memory = self.start(worker, read), self.memories[worker]
        message, self.workers[worker], _ = method.message(
            self.workers[worker], update, start, form, visit
        )
        if method.combine is None:
            seen = ()
            if method.sees_memories:
                rows = jax.tree.map(lambda *leaves: jnp.stack(leaves), *self.memories)
                newer = jax.tree.map(lambda leaf: leaf[:1], rows)
                seen = (Memories(rows, newer, jnp.full(1, len(self.workers))),)
            applied = method.apply(self.server, self.central, message, memory, visit, *seen)
            self.central, self.server, self.memories[worker] = applied
            return message
        waits = message
        if method.receive is not None:
            waits, self.memories[worker] = method.receive(memory, message, visit)
        self.waiting.append((waits, visit))
        if visit.completes:
            messages, visits = (
                jax.tree.map(lambda *leaves: jnp.stack([*map(jnp.asarray, leaves)]), *column)
                for column in zip(*self.waiting, strict=True)
            )
            shared = {name: getattr(visit, name) for name in _SHARED}
            visits = visits._replace(**shared)
            applied = method.combine(self.server, self.central, messages, visits)
            self.central, self.server, self.waiting = applied.central, applied.server, []
        return message

    def reply(self, visit):
        """Return what a worker reads after its commit."""
        if self.method.reply is None:
            return self.central
        memory = self.memories[int(visit.worker)]
        return self.method.reply(self.server, self.central, memory, visit)


_SHARED = ("completes", "place", "messages", "workers", "key", "counted", "kept")


#: The functions of a method that see vectors: a program for each length, not for each operation.
SEEN = ("message", "apply", "combine", "receive", "reply", "resume")


def compiled(method):
    functions = {name: jax.jit(getattr(method, name)) for name in SEEN if getattr(method, name)}
    return method._replace(**functions)


@jax.enable_x64(True)
def deviation_of_parts(method, messages=1):
    """Return the largest relative deviation between a method on a vector and on its parts.

    A version has ``messages`` messages.
    """
    method = compiled(method)
    rng, largest = np.random.default_rng(0), 0.0
    central = jnp.asarray(rng.normal(size=SIZE))
    places = [slice(0, SIZE), *PARTS]
    sides = [Side(method, central[place]) for place in places]
    reads = [[side.central] * WORKERS for side in sides]
    for commit in range(COMMITS):
        worker = int(rng.integers(WORKERS)) if messages == 1 else commit % WORKERS
        key = jax.random.fold_in(jax.random.key(1), commit) if method.needs_key else ()
        numbers = jnp.array([rng.integers(4), worker, commit // WORKERS, commit], jnp.int32)
        place = commit % messages
        visit = Visit(
            *numbers,
            time=jnp.asarray(float(commit)),
            local_steps=jnp.int32(2),
            completes=jnp.asarray(place == messages - 1),
            place=jnp.int32(place),
            messages=jnp.int32(messages),
            workers=jnp.int32(WORKERS),
            loss=jnp.asarray(np.random.default_rng(commit).uniform()),
            key=key,
        )
        update = jnp.asarray(0.1 * rng.normal(size=SIZE))
        results = []
        for side, place, read in zip(sides, places, reads, strict=True):
            message = side.commit(visit, update[place], read[worker], side.central)
            read[worker] = side.reply(visit)
            vectors = [leaf for leaf in jax.tree.leaves(message) if jnp.ndim(leaf) == 1]
            results.append([*vectors, side.central, read[worker], side.start(worker, read[worker])])
        for vector, *pieces in zip(*results, strict=True):
            joined = jnp.concatenate(pieces)
            difference = jnp.where(vector == joined, 0, jnp.abs(vector - joined)).max()
            largest = max(largest, float(difference / (1e-30 + jnp.abs(vector).max())))
    return largest
