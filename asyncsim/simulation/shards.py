"""Servers that each hold a shard of the parameters, and messages that visit all of them at once."""

from collections.abc import Callable, Iterable
from typing import Any

from asyncsim.clusters.cluster import Cluster
from asyncsim.simulation.clock import Clock, Record
from asyncsim.simulation.delays import delays
from asyncsim.simulation.gates import Gate, gate_of
from asyncsim.simulation.station import OpenStation, Station, Step, Worker, waiting_room
from asyncsim.traces.bookkeeping import READ_RECORD, STEP_RECORD
from asyncsim.traces.columns import DISCARDED


class Versions:
    """A count of versions, and who committed and read them.

    Attributes
    ----------
    gate : Gate
        Counts the versions.
    last_read, read_version : list of int
        The version that each worker read last; the version that its computation began from.
    steps, reads : Record
        The messages or their parts, and the reads, in the order in which their services ended.
    """

    def __init__(self, cluster: Cluster, members: Iterable[int]):
        n = cluster.workers
        self.gate: Gate = gate_of(cluster.policy, n, members)
        self.last_read, self.read_version = [0] * n, [0] * n
        self.steps, self.reads = Record(STEP_RECORD), Record(READ_RECORD)


class Shard(Versions):
    """The versions of a shard, or of all parameters, at their own server.

    Attributes
    ----------
    station : Station or OpenStation
        The queue of the server.
    stream : str
        Ends the names of the server's random streams; empty for the first server.
    """

    def __init__(
        self, cluster: Cluster, members: Iterable[int], clock: Clock, seed: int, number: int
    ):
        super().__init__(cluster, members)
        n = cluster.workers
        self.stream = f" shard {number}" if number else ""
        service = delays([cluster.service] * n, seed, f"service{self.stream}")
        self.station: Station | OpenStation = (
            OpenStation(clock, n, service)
            if cluster.discipline == "lock_free"
            else Station(clock, n, service, waiting_room(cluster.discipline, seed, self.stream))
        )


class SplitMessages(Versions):
    """Messages in parts, one per server.

    Its versions count messages: a message is committed, or read, with the last of its parts. A
    message is discarded if all servers discard their parts.

    Parameters
    ----------
    cluster, members, clock
        As of a `Shard`.
    lives, accepted : list
        As of `World`.
    """

    def __init__(
        self,
        cluster: Cluster,
        members: Iterable[int],
        clock: Clock,
        lives: list[Worker | None],
        accepted: list[int],
    ):
        super().__init__(cluster, members)
        n, servers = cluster.workers, cluster.server_count
        self._lives, self._accepted, self._servers = lives, accepted, servers
        self._parts = [[Worker(clock, index) for index in range(n)] for _ in range(servers)]
        self._uncommitted, self._unread, self._under_way, self._accepted_parts = (
            [0] * n for _ in range(4)
        )

    def fork(self, shards: list[Shard], departures: list[Step]) -> Step:
        """Return the step that sends the parts of a message, each to its server."""
        servers = list(zip(shards, self._parts, departures, strict=True))

        def fork(worker: Worker) -> None:
            index = worker.index
            # Parts come back in any order; the last one completes the message.
            for missing in (self._uncommitted, self._unread, self._under_way):
                missing[index] = self._servers
            self._accepted_parts[index] = 0
            # Before any departure: a part may be served at once, and change its shard's version.
            for shard, _, _ in servers:
                shard.read_version[index] = shard.last_read[index]
            for _, parts, depart in servers:
                depart(parts[index])

        return fork

    def count_commits(self, shard: Shard) -> Callable[[tuple[Any, ...]], None]:
        """Return the function that records a part, and its message if the part is the last."""
        parts, messages = shard.steps.entries.extend, self.steps.entries.extend
        uncommitted, accepted_parts = self._uncommitted, self._accepted_parts
        gate, accepted = self.gate, self._accepted.append

        def record(row: tuple[Any, ...]) -> None:
            parts(row)
            index, *times, outcome, _ = row
            accepted_parts[index] += outcome != DISCARDED
            uncommitted[index] -= 1
            if not uncommitted[index]:
                # The shards have checked the staleness; here a message reads the newest version.
                is_accepted = accepted_parts[index] > 0
                message_outcome = gate.take(index, gate.version) if is_accepted else DISCARDED
                messages((index, *times, message_outcome, gate.version))
                if is_accepted:
                    accepted(index)

        return record

    def count_reads(self, shard: Shard) -> Callable[[tuple[Any, ...]], None]:
        """Return the function that records the read of a shard, and the whole read if the shard is
        the last.
        """
        parts, messages = shard.reads.entries.extend, self.reads.entries.extend
        unread, last_read, gate = self._unread, self.last_read, self.gate

        def record(row: tuple[Any, ...]) -> None:
            parts(row)
            index, _, *times = row
            unread[index] -= 1
            if not unread[index]:
                last_read[index] = gate.version
                messages((index, gate.version, *times))

        return record

    def join(self, next_step: Step) -> Step:
        """Return the step that waits for the answers of all servers before a worker continues."""

        def join(part: Worker) -> None:
            index = part.index
            self._under_way[index] -= 1
            worker = self._lives[index]
            # The steps go by parts; from here on the worker itself continues.
            if not self._under_way[index] and worker is not None:
                next_step(worker)

        return join
