"""Failures: what breaks when. Values of a cluster, in call syntax, as laws and policies are.

All are *exogenous*: when they begin and end depends on nothing that the run does, and each worker's come from streams
of their own, so that another failure changes nobody's other numbers. `docs/failures.md` says what each policy does
with workers that are away.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from asyncsim.base.calls import as_float, called, form_of, split, write
from asyncsim.base.errors import (
    InputError,
    require_choice,
    require_count,
    require_fraction,
    require_nonnegative,
    require_positive,
    require_switch,
)
from asyncsim.base.units import SECONDS, quantity
from asyncsim.clusters.laws import Law, LawLike, as_law

#: The parameters of each failure.
_PARAMETERS: dict[str, tuple[str, ...]] = {
    "crash": ("every", "lasts", "detect", "workers", "site", "together", "on"),
    "pause": ("every", "lasts", "workers", "site", "together", "on"),
    "slow": ("every", "lasts", "speed", "workers", "site", "together", "on"),
    "outage": ("every", "lasts", "checkpoint_every", "checkpoint_time"),
    "loss": ("probability", "timeout", "resend", "workers", "site"),
    "leave": ("at", "workers", "site"),
    "join": ("at", "workers", "site"),
}
#: Those that are times, which may have a unit.
_TIMES = ("detect", "checkpoint_time", "timeout", "at")
#: Failures after which a worker is away.
TAKES_AWAY = ("crash", "leave", "join")


@dataclass(frozen=True)
class Failure:
    """One kind of failure; made by the function of the same name, which says what its parameters are.

    Attributes that a kind has not are None.
    """

    name: str
    every: Law | None = None
    lasts: Law | None = None
    speed: float | None = None
    detect: float | None = None
    checkpoint_every: int | None = None
    checkpoint_time: float | None = None
    probability: float | None = None
    timeout: float | None = None
    resend: bool | None = None
    at: float | None = None
    workers: tuple[int, ...] | None = None
    site: int | None = None
    together: bool = False
    on: str | None = None

    def __post_init__(self) -> None:
        names = _PARAMETERS[require_choice("failure", self.name, _PARAMETERS)]
        what = f"failure {self.name}"
        checks: dict[str, Callable[[str, Any], Any]] = {
            "every": _lasting,
            "lasts": _lasting,
            "speed": require_nonnegative,
            "detect": require_nonnegative,
            "checkpoint_every": require_count,
            "checkpoint_time": require_nonnegative,
            "probability": require_fraction,
            "timeout": require_positive,
            "at": require_nonnegative,
        }
        for name, check in checks.items():
            value = getattr(self, name)
            if name not in names:
                if value is not None:
                    raise InputError(f"{what}: {name} = {value!r}: it has no such parameter")
            else:
                value = quantity(f"{what}: {name}", value, SECONDS) if name in _TIMES else value
                object.__setattr__(self, name, check(f"{what}: {name}", value))
        if "resend" in names:
            require_switch(f"{what}: resend", self.resend)
        require_switch(f"{what}: together", self.together)
        if self.on is not None:
            require_choice(f"{what}: on", self.on, ("slots", "learners"))
        if self.workers is not None:
            given = [self.workers] if isinstance(self.workers, int) else list(self.workers)
            workers = tuple(require_count(f"{what}: workers", one, minimum=0) for one in given)
            if not workers or len(set(workers)) < len(workers):
                raise InputError(f"{what}: workers = {given}: must be different workers, at least one")
            object.__setattr__(self, "workers", workers)
        if self.site is not None:
            require_count(f"{what}: site", self.site, minimum=0)
            if self.workers is not None:
                raise InputError(f"{what}: workers and site are given; give one of them")

    def __str__(self) -> str:
        given = {name: getattr(self, name) for name in _PARAMETERS[self.name]}
        usual = {"workers": None, "site": None, "together": False, "on": None}
        texts = (
            f"{name}={str(value) if isinstance(value, Law) else write(value)}"
            for name, value in given.items()
            if value is not usual.get(name, ...)
        )
        return f"{self.name}({', '.join(texts)})"

    def groups(self, workers: int, sites: Sequence[int] | None = None) -> list[list[int]]:
        """Return the workers that it hits, in groups that are hit at the same times.

        Raises
        ------
        InputError
            There is no such worker, or no such site.
        """
        if self.site is not None:
            if sites is None or self.site >= len(sites):
                there = "has no sites" if sites is None else f"has the sites 0 to {len(sites) - 1}"
                raise InputError(f"failure {self.name}: site = {self.site}: the cluster {there}; give workers instead")
            first = sum(sites[: self.site])
            return [list(range(first, first + sites[self.site]))]
        hit = list(range(workers)) if self.workers is None else list(self.workers)
        if max(hit) >= workers:
            raise InputError(f"failure {self.name}: workers = {max(hit)}: they are numbered from 0 to {workers - 1}")
        return [hit] if self.together else [[one] for one in hit]


def crash(
    every: LawLike,
    lasts: LawLike,
    detect: float | str = 0.0,
    workers: int | Sequence[int] | None = None,
    site: int | None = None,
    together: bool = False,
    on: str | None = None,
) -> Failure:
    """Return crashes: a worker is gone with its state, and comes back after a while with none.

    Its computation is cancelled. A message that it had sent is still served, and the reply is lost. When it comes back
    it reads the newest version, with what the server knows of it as before, and its own state as at the start. That
    read costs the way down alone; its request takes no time, and no service unless reads are visits of their own.
    Without a server the replica is lost, too, with the messages that were not taken up; the worker comes back
    with a copy of the replica of a living neighbour, the one that applied a gradient last.

    Parameters
    ----------
    every : Law
        Seconds from the begin, or from when it came back, to its next crash.
    lasts : Law
        Seconds until it is back.
    detect : float
        Seconds until the server, or the neighbours, know, and count it no longer. Until then whoever waits for it
        waits.
    workers : int or sequence of int, optional
        Whom it may hit, each at times of its own; by default all.
    site : int, optional
        All workers of this site at once, in the place of ``workers``.
    together : bool
        The workers are hit at the same times.
    on : {"slots", "learners"}, optional
        On a cluster with rollouts, whether it hits slots, which ``workers`` then numbers, or
        learners.
    """
    return Failure("crash", **locals())


def pause(
    every: LawLike,
    lasts: LawLike,
    workers: int | Sequence[int] | None = None,
    site: int | None = None,
    together: bool = False,
    on: str | None = None,
) -> Failure:
    """Return pauses: a worker's computation stands still for a while and then goes on; its messages travel on.

    Parameters as of `crash`.
    """
    return Failure("pause", **locals())


def slow(
    every: LawLike,
    lasts: LawLike,
    speed: float,
    workers: int | Sequence[int] | None = None,
    site: int | None = None,
    together: bool = False,
    on: str | None = None,
) -> Failure:
    """Return slow spells: for a while a worker computes at a ``speed`` of its own, 0.2 being a fifth of the usual.

    A computation is over when the integral of the speed is the time that it takes at speed one. Speeds of several
    spells at a time are multiplied. Other parameters as of `crash`.
    """
    return Failure("slow", **locals())


def outage(every: LawLike, lasts: LawLike, checkpoint_every: int = 100, checkpoint_time: float | str = 0.0) -> Failure:
    """Return outages of the server: for a while it serves nobody, then it goes on from its last checkpoint.

    What was made since the checkpoint is lost, with what was buffered. The central variable, the server's state and its
    memory of each worker are restored as a new version; versions keep counting. Workers, their reads and the messages
    on their way stay; a visit that was being served is served to its end afterwards.

    Parameters
    ----------
    every : Law
        Seconds from the begin, or from the end of an outage, to the next.
    lasts : Law
        Seconds, the time to restore included.
    checkpoint_every : int
        Versions, since the last checkpoint or restore, after which the server writes one.
    checkpoint_time : float
        Seconds that this takes, in which it serves nobody. A checkpoint that an outage interrupts is none.
    """
    return Failure("outage", **locals())


def loss(
    probability: float,
    timeout: float | str,
    resend: bool = True,
    workers: int | Sequence[int] | None = None,
    site: int | None = None,
) -> Failure:
    """Return losses of workers' messages on their way to the server, or without one to other workers.

    A lost message takes no place on a link. After ``timeout`` seconds its worker sends the same again, as a transport
    would, which may be lost as well; or with ``resend=False`` gives it up, reads the newest version and computes anew.
    That read costs as much as one after a `crash`.
    Requests to read and the server's replies arrive. Without a server a share of a message that is given up
    comes back to the sender after ``timeout`` seconds; of an exchange between neighbours, both shares do.
    """
    return Failure("loss", **locals())


def leave(at: float | str, workers: int | Sequence[int] | None = None, site: int | None = None) -> Failure:
    """Return a departure for good, or until a later `join`: at a time (s) workers go, and say so.

    Nobody waits for them from then on. Computations are cancelled; messages that were sent are still served.
    """
    return Failure("leave", **locals())


def join(at: float | str, workers: int | Sequence[int] | None = None, site: int | None = None) -> Failure:
    """Return an arrival: workers are there from a time (s) on, and not before, unless they left before that.

    They begin with the newest version, and are counted from then on.
    """
    return Failure("join", **locals())


#: The failures by their names on the command line.
FAILURES: Mapping[str, Callable[..., Failure]] = {
    one.__name__: one for one in (crash, pause, slow, outage, loss, leave, join)
}


def as_failures(
    value: Any, workers: int, sites: Sequence[int] | None = None, slots: int | None = None
) -> tuple[Failure, ...]:
    """Return the failures of a cluster from themselves or their texts, one or several.

    Raises
    ------
    InputError
        For what is no failure; where there is no such worker; or where sooner or later nobody would be left.
    """
    entries = [value] if isinstance(value, str | Failure) else value
    if not isinstance(entries, list | tuple):
        raise InputError(f"failures = {value!r}: must be a list, [failures.crash(3600, 120)] say")
    found = []
    for entry in split(entries):
        if not isinstance(entry, str | Failure):
            hint = f"; call it, {form_of(entry)}" if entry in FAILURES.values() else ""
            raise InputError(f"failures: {entry!r} is not a failure{hint}")
        found.append(called("failures", entry, FAILURES, units=True) if isinstance(entry, str) else entry)
    if sum(one.name == "outage" for one in found) > 1:
        raise InputError("failures: two outages of one server; give one, with a mixture of laws")
    if not found:  # of any number of workers, which nothing has held against the memory yet
        return ()
    for failure in found:
        _check_side(failure, slots)
        failure.groups(slots if failure.on == "slots" and slots else workers, sites)
    last = [presence[-1][1] for presence in presences(found, workers, sites) if presence]
    if len(last) == workers and not any(last):
        raise InputError("failures: all workers leave; keep one, or let one join later")
    return tuple(found)


def _check_side(failure: Failure, slots: int | None) -> None:
    """Raise InputError unless a failure says whom it hits on a cluster with rollouts."""
    if slots is None and failure.on is not None:
        raise InputError(f"failure {failure.name}: on = {failure.on!r}: the cluster has no rollouts; leave on out")
    if slots is not None and failure.on is None:
        if "on" not in _PARAMETERS[failure.name]:
            raise InputError(f"failures = {failure}: is not for a cluster with rollouts; use crash, pause or slow")
        raise InputError(f"failures = {failure}: hits slots or learners? give on='slots' or on='learners'")
    if failure.on == "slots" and failure.site is not None:
        raise InputError(f"failure {failure.name}: site = {failure.site}: slots have no sites; give workers")


def presences(
    failures: Sequence[Failure], workers: int, sites: Sequence[int] | None = None
) -> list[list[tuple[float, bool]]]:
    """Return for each worker when it leaves (False) and joins (True), in order; one whose first is True is away."""
    changes: list[list[tuple[float, bool]]] = [[] for _ in range(workers)]
    for one in failures:
        if one.at is not None:
            for index in itertools.chain.from_iterable(one.groups(workers, sites)):
                changes[index].append((one.at, one.name == "join"))
    for index, own in enumerate(changes):
        own.sort(key=lambda change: change[0])
        if any(before[1] == after[1] or before[0] == after[0] for before, after in itertools.pairwise(own)):
            raise InputError(f"failures: worker {index} leaves twice or joins twice in a row; let these take turns")
    return changes


def _lasting(argument: str, value: Any) -> Law:
    law = as_law(argument, value)
    if not 0 < law.mean < as_float("inf"):
        raise InputError(f"{argument} = {law}: must have a mean above zero and finite")
    return law
