"""The loop over the parts of messages that a replay of several servers must agree with: one part
after the other, every version of every shard kept.
"""

import jax
import numpy as np
from coordinates import Side, compiled
from event_loop import EventLoop
from jax.flatten_util import ravel_pytree

from asyncsim import recorders
from asyncsim.methods import Visit
from asyncsim.replays.attacked import under_attack
from asyncsim.replays.parts import partition_of
from asyncsim.replays.replay import Replay

_LOCAL = {}


class ShardedLoop(EventLoop):
    """Replays a trace from its parts and reads alone; ``entries`` are those of each shard."""

    def __init__(self, trace, method, problem, entries, momentum=0.9):
        super().__init__(trace, method, problem)
        self.entries, self.momentum = entries, momentum
        self.sides = [
            Side(compiled(method), self.central[where], trace.workers) for where in entries
        ]
        key = id(method), id(problem), trace.window
        self.local, *_ = _LOCAL.setdefault(
            key, (jax.jit(self._local, static_argnums=6), method, problem)
        )

    def run(self):
        """Return the loss, the step's length and the two energies of each message; and the final
        central variable.
        """
        trace, method, sides = self.trace, self.method, self.sides
        shards = range(len(sides))
        reads = trace.reads[trace.reads["shard"] >= 0].itertuples()
        version_of = {(read.worker, read.job, read.shard): read.version for read in reads}
        parts = [row for row in trace.parts.itertuples() if row.outcome in ("applied", "buffered")]
        of_shard = [[row for row in parts if row.shard == shard] for shard in shards]
        places = {}  # of each part: its number at the server, in its version, and the version's
        for rows in of_shard:
            begin = 0
            for number, row in enumerate(rows):
                if row.outcome == "applied" or number == len(rows) - 1:
                    for place in range(begin, number + 1):
                        places[rows[place].part] = place, place - begin, number + 1 - begin
                    begin = number + 1
        versions = [{0: side.central} for side in sides]
        replies, updates, steps, numbers = {}, {}, {}, {}
        proxies = [[np.zeros(len(where))] * trace.workers for where in self.entries]

        def read(worker, job, shard):
            if method.reply is not None and job:
                return replies[worker, shard]
            return versions[shard][version_of[worker, job, shard]]

        for row in parts:
            job, side, worker = (row.worker, row.job), sides[row.shard], row.worker
            steps.setdefault(job, sum(other[0] == worker for other in steps))
            commit, place, messages = places[row.part]
            window = trace.cluster.windows[worker]
            visit = Visit(
                *(np.int32(value) for value in (row.staleness, worker, steps[job], commit)),
                time=np.asarray(row.commit_time),
                local_steps=np.int32(window),
                completes=np.bool_(row.outcome == "applied"),
                place=np.int32(place),
                messages=np.int32(messages),
                workers=np.int32(trace.workers),
                key=self._key(worker, steps[job]),
            )
            if job not in updates:
                starts = [sides[k].start(worker, read(*job, k)) for k in shards]
                vector = self._joined(starts)
                batch = ()
                if self.batches is not None:
                    rows = self.batches.rows([worker], [row.job], trace.window, [window])[0]
                    batch = jax.tree.map(lambda array, rows=rows: array[rows], self.data)
                update, optimizer, state, loss = self.local(
                    self.key, vector, batch, self.workers[worker], visit, np.int32(row.job), window
                )
                own = self.workers[worker]
                self.workers[worker] = own._replace(optimizer=optimizer, problem=state)
                updates[job], numbers[job] = np.asarray(update), np.array([float(loss), 0, 0, 0])
            visit = visit._replace(loss=np.asarray(numbers[job][0]))
            update = updates[job][self.entries[row.shard]]
            seen, before = read(*job, row.shard), np.asarray(side.central)
            origin = method.origin(side.workers[worker], seen) if method.origin else seen
            form = before
            if trace.separate_reads and trace.protocol == "read_then_write":
                form = versions[row.shard][row.push_version]
            side.commit(visit, update, seen, form)
            if row.outcome == "applied":
                versions[row.shard][row.version] = side.central
            replies[worker, row.shard] = side.reply(visit)
            proxy = self.momentum * proxies[row.shard][worker] + update
            proxies[row.shard][worker] = proxy
            energy = method.proxy(side.workers[worker]) if method.proxy else proxy
            central = np.asarray(side.central)
            moved = central - before, central - np.asarray(origin), energy
            numbers[job][1:] += [np.sum(np.asarray(vector) ** 2) for vector in moved]
        frame = trace.accepted.frame
        table = np.array([numbers[job] for job in zip(frame["worker"], frame["job"], strict=True)])
        table[:, 1] **= 0.5
        table[:, 2:] /= 2
        return table, self._joined([side.central for side in sides])

    def _joined(self, parts):
        """Join the vectors of all shards."""
        vector = np.zeros(self.central.size)
        for where, part in zip(self.entries, parts, strict=True):
            vector[where] = part
        return vector


def deviations(trace, method, problem, attack=None, form=None):
    """Return a replay's relative deviations from the loop: of commits and final parameters."""
    options = {"record": [recorders.energy()], "precision": "float64", "form": form}
    replayed = Replay(trace, method, problem, attack=attack, **options)
    replayed.advance(len(replayed.trace))
    run = replayed.result()
    method, problem = under_attack(method, problem, attack, trace.workers)
    partition = partition_of(problem, trace.cluster.servers)
    entries = [[] for _ in partition.names]
    for owner, begin, end in partition.runs:
        entries[owner] += range(begin, end)
    table, central = ShardedLoop(trace, method, problem, [np.array(of) for of in entries]).run()
    columns = run.commits[["loss", "update_norm", "central_energy", "proxy_energy"]].to_numpy()
    vectors = [*columns.T, ravel_pytree(run.params)[0]]
    return [
        np.abs(vector - expected).max() / np.abs(expected).max()
        for vector, expected in zip(vectors, [*table.T, central], strict=True)
    ]
