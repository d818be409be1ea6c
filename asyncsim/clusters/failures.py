"""Failures: values of a cluster in call syntax, like laws and policies.

All are *exogenous*: their times do not depend on the run, and each worker's come from separate
streams, so that another failure changes no other numbers. `docs/clusters.md` explains how each
policy treats absent workers.
"""

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

from asyncsim.base.calls import split
from asyncsim.base.declared import Count, Fraction, Natural, NonNegative, Value, from_text
from asyncsim.base.errors import (
    InputError,
    require_count,
    require_positive,
)
from asyncsim.base.units import SECONDS, Delay, Duration, quantity
from asyncsim.clusters.laws import LawLike, lasting

#: A number of versions between checkpoints, as a text.
_VERSIONS = re.compile(r"\s*(\d+)\s+versions?\s*")


def _workers(argument: str, value: Any) -> tuple[int, ...]:
    listed = list(value) if isinstance(value, Sequence) else [value]
    workers = tuple(require_count(argument, worker, minimum=0) for worker in listed)
    if not workers or len(set(workers)) < len(workers):
        raise InputError(f"{argument} = {listed}: must be different workers, at least one")
    return workers


def _checkpoint(argument: str, value: Any) -> float | str:
    """Check the time between checkpoints (s), or the number of versions, as a text."""
    if isinstance(value, str) and (match := _VERSIONS.fullmatch(value)):
        return f"{require_count(argument, int(match[1]))} versions"
    try:
        seconds = quantity(argument, value, SECONDS)
    except InputError:
        raise InputError(
            f"{argument} = {value!r}: must be a time, such as '10 min', or '200 versions'"
        ) from None
    return require_positive(argument, seconds)


Lasting = Annotated[LawLike, lasting]


class Failure(Value):
    """One kind of failure. Parameters that a kind lacks are None."""

    kind: ClassVar[str] = "failure"
    lacking: ClassVar[frozenset[str]] = frozenset(
        ("every", "lasts", "speed", "detect", "probability", "timeout", "resend", "at")
    ) | frozenset(("workers", "site", "together", "on"))
    #: Whether a checkpoint is restored afterwards: of the server, or of the job.
    restores: ClassVar[bool] = False
    #: Whether it ends a round of all workers, and restores a checkpoint of the job.
    is_of_job: ClassVar[bool] = False

    def groups(self, workers: int, sites: Sequence[int] | None = None) -> list[list[int]]:
        """Return the workers that it hits, in groups that fail at the same times.

        Raises
        ------
        InputError
            For a worker or a site that does not exist.
        """
        if self.site is not None:
            if sites is None or self.site >= len(sites):
                choice = "has no sites" if sites is None else f"has the sites 0 to {len(sites) - 1}"
                raise InputError(
                    f"failure {self.name}: site = {self.site}: the cluster {choice}; give workers "
                    "instead"
                )
            first = sum(sites[: self.site])
            return [list(range(first, first + sites[self.site]))]
        hit = list(range(workers)) if self.workers is None else list(self.workers)
        if max(hit) >= workers:
            raise InputError(
                f"failure {self.name}: workers = {max(hit)}: they are numbered from 0 to "
                f"{workers - 1}"
            )
        return [hit] if self.together else [[worker] for worker in hit]


@dataclass(frozen=True, kw_only=True)
class _OfWorkers(Failure):
    """A failure of some workers, of a site, or of all."""

    workers: Annotated[int | Sequence[int], _workers] | None = None
    site: Natural | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.workers is not None and self.site is not None:
            raise InputError(f"failure {self.name}: workers and site are given; give one of them")


@dataclass(frozen=True)
class Recurring(_OfWorkers):
    """A failure of workers, or of slots, that comes and goes."""

    every: Lasting
    lasts: Lasting
    together: bool = field(default=False, kw_only=True)
    on: Literal["slots", "learners"] | None = field(default=None, kw_only=True)


@dataclass(frozen=True)
class crash(Recurring):
    """Crashes: a worker disappears with its state, and returns after a while without it.

    Its computation is cancelled. A message that it had sent is still served, and the reply is lost.
    On its return it reads the newest version; the server's memory of it is unchanged, its own state
    is the initial one. That read costs the way down alone; its request takes no time, and no
    service unless reads are separate visits. Without a server the replica is lost, too, with the
    messages that were not taken up; the worker returns with a copy of the replica of a living
    neighbour, the one that applied a gradient last.

    Parameters
    ----------
    every : Law
        Seconds from the start, or from its return, to its next crash.
    lasts : Law
        Seconds until its return.
    detect : float
        Seconds until the server, or the neighbours, know and no longer count it. Until then workers
        that wait for it continue to wait.
    workers : int or sequence of int, optional
        Workers that may crash, each at separate times; by default all.
    site : int, optional
        All workers of this site at once, instead of ``workers``.
    together : bool
        The workers crash at the same times.
    on : {"slots", "learners"}, optional
        On a cluster with rollouts, whether it hits slots, which ``workers`` then numbers, or
        learners.
    """

    detect: Delay = 0.0


@dataclass(frozen=True)
class job_crash(Failure):
    """Crashes of a whole job: all workers lose the round, and the messages on their way.

    After ``lasts`` all resume from the job's last checkpoint. For a `barrier`, with a server or an
    all-reduce.

    Parameters
    ----------
    every, lasts : Law
        As for `crash`.
    checkpoint : float or str, optional
        The seconds, ``"10 min"``, or ``"200 versions"``, from the end of a checkpoint, or the
        restart, to the first version that is saved next. By default nothing is saved: the job
        begins from version 0.
    saving : float or str
        Seconds of saving a checkpoint, in which the workers wait. A crash meanwhile loses it.
    """

    every: Lasting
    lasts: Lasting
    checkpoint: Annotated[float | str, _checkpoint] | None = None
    saving: Delay = 0.0
    restores = is_of_job = True

    def is_due(self, versions: int, seconds: float) -> bool:
        """Return whether a checkpoint is due, by the versions and seconds since the last one."""
        if isinstance(self.checkpoint, str):
            return versions >= int(self.checkpoint.split()[0])
        return self.checkpoint is not None and seconds >= self.checkpoint


@dataclass(frozen=True)
class pause(Recurring):
    """Pauses: a worker's computation stops and later continues; its messages travel on.

    Parameters as for `crash`.
    """

    speed: ClassVar[float] = 0.0


@dataclass(frozen=True)
class slow(Recurring):
    """Slow spells: a worker computes at a ``speed`` relative to the usual 1, such as 0.2.

    A computation ends when the integral of the speed is the time that it takes at speed one. The
    speeds of simultaneous spells are multiplied. Other parameters as for `crash`.
    """

    speed: NonNegative


@dataclass(frozen=True)
class outage(Failure):
    """Outages of the server: it stops serving, then resumes from its last checkpoint.

    Commits since the checkpoint and buffered messages are lost. The central variable, the server's
    state and its memory of each worker are restored as a new version; versions keep counting.
    Workers, their reads and the messages on their way stay; an interrupted service is completed
    afterwards.

    Parameters
    ----------
    every : Law
        Seconds from the start, or from the end of an outage, to the next.
    lasts : Law
        Seconds, including the time to restore.
    checkpoint_every : int
        Versions, since the last checkpoint or restore, after which the server writes one.
    checkpoint_time : float
        Seconds of writing, in which the server does not serve. An interrupted checkpoint does not
        count.
    """

    every: Lasting
    lasts: Lasting
    checkpoint_every: Count = 100
    checkpoint_time: Delay = 0.0
    restores = True

    @property
    def saving(self) -> float:
        """Seconds of writing a checkpoint."""
        return self.checkpoint_time

    def is_due(self, versions: int, seconds: float) -> bool:
        """Return whether a checkpoint is due, by the versions since the last one."""
        return versions >= self.checkpoint_every


@dataclass(frozen=True)
class loss(_OfWorkers):
    """Losses of workers' messages on their way to the server, or without one to other
    workers.

    A lost message takes no place on a link. After ``timeout`` seconds its worker sends it again, as
    a transport would, and it may be lost again; or with ``resend=False`` the worker gives it up,
    reads the newest version and starts a new computation. That read costs as much as one after a
    `crash`. Requests to read and the server's replies always arrive. Without a server a share of a
    message that is given up comes back to the sender after ``timeout`` seconds; of an exchange
    between neighbours, both shares do.
    """

    probability: Fraction
    timeout: Duration
    resend: bool = True


@dataclass(frozen=True)
class leave(_OfWorkers):
    """A departure, announced, for good or until a later `join`: workers leave at a time (s).

    From then on no worker waits for them. Computations are cancelled; messages that were sent are
    still served.
    """

    at: Delay


@dataclass(frozen=True)
class join(_OfWorkers):
    """An arrival: workers are present from a time (s) on.

    They are absent before, unless they left earlier. They start with the newest version, and are
    counted from then on.
    """

    at: Delay


#: The failures by their names on the command line.
FAILURES: Mapping[str, type[Failure]] = {
    failure.__name__: failure
    for failure in (crash, job_crash, pause, slow, outage, loss, leave, join)
}


def as_failures(
    value: Any, workers: int, sites: Sequence[int] | None = None, slots: int | None = None
) -> tuple[Failure, ...]:
    """Convert failures or their texts, one or several, to the failures of a cluster.

    Raises
    ------
    InputError
        For another value, a worker that does not exist, or failures that would leave no worker.
    """
    entries = [value] if isinstance(value, str | Failure) else value
    if not isinstance(entries, list | tuple):
        raise InputError(
            f"failures = {value!r}: must be a list, such as [failures.crash(3600, 120)]"
        )
    example = "asyncsim.failures.crash(3600, 120)"
    failures: list[Failure] = [
        from_text("failures", entry, Failure, FAILURES, example) for entry in split(entries)
    ]
    if sum(failure.restores for failure in failures) > 1:
        if any(failure.is_of_job for failure in failures):
            raise InputError(
                "failures: a job's crash restores its checkpoint; give one, and no outage"
            )
        raise InputError("failures: two outages of one server; give one, with a mixture of laws")
    if not failures:  # with any number of workers, which was not checked against the memory yet
        return ()
    for failure in failures:
        _check_side(failure, slots)
        failure.groups(slots if failure.on == "slots" and slots else workers, sites)
    last = [presence[-1][1] for presence in presences(failures, workers, sites) if presence]
    if len(last) == workers and not any(last):
        raise InputError("failures: all workers leave; keep one, or let one join later")
    return tuple(failures)


def _check_side(failure: Failure, slots: int | None) -> None:
    """Raise InputError unless a failure says whom it hits on a cluster with rollouts."""
    if slots is None and failure.on is not None:
        raise InputError(
            f"failure {failure.name}: on = {failure.on!r}: the cluster has no rollouts; leave on "
            "out"
        )
    if slots is not None and failure.on is None:
        if not isinstance(failure, Recurring):
            raise InputError(
                f"failures = {failure}: is not for a cluster with rollouts; use crash, pause or "
                "slow"
            )
        raise InputError(
            f"failures = {failure}: hits slots or learners? give on='slots' or on='learners'"
        )
    if failure.on == "slots" and failure.site is not None:
        raise InputError(
            f"failure {failure.name}: site = {failure.site}: slots have no sites; give workers"
        )


def presences(
    failures: Sequence[Failure], workers: int, sites: Sequence[int] | None = None
) -> list[list[tuple[float, bool]]]:
    """Return each worker's departures (False) and arrivals (True); absent before a first
    arrival.
    """
    changes: list[list[tuple[float, bool]]] = [[] for _ in range(workers)]
    for failure in failures:
        if failure.at is not None:
            for index in itertools.chain.from_iterable(failure.groups(workers, sites)):
                changes[index].append((failure.at, failure.name == "join"))
    for index, worker_changes in enumerate(changes):
        worker_changes.sort(key=lambda change: change[0])
        if any(a[1] == b[1] or a[0] == b[0] for a, b in itertools.pairwise(worker_changes)):
            raise InputError(
                f"failures: worker {index} leaves twice or joins twice in a row; alternate them"
            )
    return changes
