"""Failures: values of a cluster in call syntax, like laws and policies.

All are *exogenous*: their times do not depend on the run, and each worker's come from separate
streams, so that another failure changes no other numbers. `docs/clusters.md` explains how each
policy treats absent workers.
"""

import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
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
    "crash": (
        "every",
        "lasts",
        "detect",
        "workers",
        "site",
        "together",
        "on",
        "scope",
        "checkpoint",
        "saving",
    ),
    "pause": ("every", "lasts", "workers", "site", "together", "on"),
    "slow": ("every", "lasts", "speed", "workers", "site", "together", "on"),
    "outage": ("every", "lasts", "checkpoint_every", "checkpoint_time"),
    "loss": ("probability", "timeout", "resend", "workers", "site"),
    "leave": ("at", "workers", "site"),
    "join": ("at", "workers", "site"),
}
#: Parameters that are times, which may have a unit.
_TIMES = ("detect", "checkpoint_time", "timeout", "at")
#: A number of versions between checkpoints, as a text.
_VERSIONS = re.compile(r"\s*(\d+)\s+versions?\s*")


@dataclass(frozen=True)
class Failure:
    """One kind of failure; the function of the same name creates it and explains its parameters.

    Attributes that a kind lacks are None.
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
    scope: str = "worker"
    checkpoint: float | str | None = None
    saving: float = 0.0

    def __post_init__(self) -> None:
        names = _PARAMETERS[require_choice("failure", self.name, _PARAMETERS)]
        subject = f"failure {self.name}"
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
                    raise InputError(f"{subject}: {name} = {value!r}: it has no such parameter")
            else:
                value = quantity(f"{subject}: {name}", value, SECONDS) if name in _TIMES else value
                object.__setattr__(self, name, check(f"{subject}: {name}", value))
        if "resend" in names:
            require_switch(f"{subject}: resend", self.resend)
        require_switch(f"{subject}: together", self.together)
        self._check_job(subject)
        if self.on is not None:
            require_choice(f"{subject}: on", self.on, ("slots", "learners"))
        if self.workers is not None:
            listed = list(self.workers) if hasattr(self.workers, "__len__") else [self.workers]
            workers = tuple(
                require_count(f"{subject}: workers", worker, minimum=0) for worker in listed
            )
            if not workers or len(set(workers)) < len(workers):
                raise InputError(
                    f"{subject}: workers = {listed}: must be different workers, at least one"
                )
            object.__setattr__(self, "workers", workers)
        if self.site is not None:
            require_count(f"{subject}: site", self.site, minimum=0)
            if self.workers is not None:
                raise InputError(f"{subject}: workers and site are given; give one of them")

    def __str__(self) -> str:
        usual = {entry.name: entry.default for entry in fields(self)}
        if self.is_of_job:
            usual["detect"] = self.detect
        texts = (
            f"{name}={value if isinstance(value, Law) else write(value)}"
            for name in _PARAMETERS[self.name]
            if (value := getattr(self, name)) != usual[name]
        )
        return f"{self.name}({', '.join(texts)})"

    @property
    def is_of_job(self) -> bool:
        """Whether it ends a round of all workers, and restores a checkpoint of the job."""
        return self.scope == "job"

    @property
    def restores(self) -> bool:
        """Whether a checkpoint is restored afterwards: of the server, or of the job."""
        return self.name == "outage" or self.is_of_job

    def is_due(self, versions: int, seconds: float) -> bool:
        """Return whether a checkpoint is due, by the versions and seconds since the last one."""
        if not self.is_of_job:
            return bool(self.checkpoint_every) and versions >= (self.checkpoint_every or 0)
        if isinstance(self.checkpoint, str):
            return versions >= int(self.checkpoint.split()[0])
        return self.checkpoint is not None and seconds >= self.checkpoint

    def _check_job(self, subject: str) -> None:
        """Check the parameters of a crash of a whole job; raise InputError for others."""
        require_choice(f"{subject}: scope", self.scope, ("worker", "job"))
        saving = quantity(f"{subject}: saving", self.saving, SECONDS)
        object.__setattr__(self, "saving", require_nonnegative(f"{subject}: saving", saving))
        if not self.is_of_job:
            if self.checkpoint is not None or self.saving:
                raise InputError(
                    f"{subject}: checkpoint and saving are of a job's crash; give scope='job', or "
                    "leave them out"
                )
            return
        if self.workers is not None or self.site is not None or self.together or self.detect:
            raise InputError(
                f"{subject}: scope = 'job': hits all workers at once; leave workers, site, "
                "together and detect out"
            )
        checkpoint = self.checkpoint
        if isinstance(checkpoint, str) and (match := _VERSIONS.fullmatch(checkpoint)):
            count = require_count(f"{subject}: checkpoint", int(match[1]))
            checkpoint = f"{count} versions"
        elif checkpoint is not None:
            try:
                seconds = quantity(f"{subject}: checkpoint", checkpoint, SECONDS)
            except InputError:
                raise InputError(
                    f"{subject}: checkpoint = {checkpoint!r}: must be a time, such as '10 min', or "
                    "'200 versions'"
                ) from None
            checkpoint = require_positive(f"{subject}: checkpoint", seconds)
        object.__setattr__(self, "checkpoint", checkpoint)

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


def crash(
    every: LawLike,
    lasts: LawLike,
    detect: float | str = 0.0,
    workers: int | Sequence[int] | None = None,
    site: int | None = None,
    together: bool = False,
    on: str | None = None,
    scope: str = "worker",
    checkpoint: float | str | None = None,
    saving: float | str = 0.0,
) -> Failure:
    """Return crashes: a worker disappears with its state, and returns after a while without it.

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
    scope : {"worker", "job"}
        With ``"job"`` the job crashes: all workers lose the round, and the messages on their way;
        after ``lasts`` all resume from the job's last checkpoint. For a `barrier`, with a
        server or an all-reduce.
    checkpoint : float or str, optional
        Of a job: the seconds, ``"10 min"``, or ``"200 versions"``, from the end of a checkpoint, or
        the restart, to the first version that is saved next. By default nothing is saved: the job
        begins from version 0.
    saving : float or str
        Seconds of saving a checkpoint, in which the workers wait. A crash meanwhile loses it.
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
    """Return pauses: a worker's computation stops and later continues; its messages travel on.

    Parameters as for `crash`.
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
    """Return slow spells: a worker computes at a ``speed`` relative to the usual 1, such as 0.2.

    A computation ends when the integral of the speed is the time that it takes at speed one. The
    speeds of simultaneous spells are multiplied. Other parameters as for `crash`.
    """
    return Failure("slow", **locals())


def outage(
    every: LawLike, lasts: LawLike, checkpoint_every: int = 100, checkpoint_time: float | str = 0.0
) -> Failure:
    """Return outages of the server: it stops serving, then resumes from its last checkpoint.

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
    return Failure("outage", **locals())


def loss(
    probability: float,
    timeout: float | str,
    resend: bool = True,
    workers: int | Sequence[int] | None = None,
    site: int | None = None,
) -> Failure:
    """Return losses of workers' messages on their way to the server, or without one to other
    workers.

    A lost message takes no place on a link. After ``timeout`` seconds its worker sends it again, as
    a transport would, and it may be lost again; or with ``resend=False`` the worker gives it up,
    reads the newest version and starts a new computation. That read costs as much as one after a
    `crash`. Requests to read and the server's replies always arrive. Without a server a share of a
    message that is given up comes back to the sender after ``timeout`` seconds; of an exchange
    between neighbours, both shares do.
    """
    return Failure("loss", **locals())


def leave(
    at: float | str, workers: int | Sequence[int] | None = None, site: int | None = None
) -> Failure:
    """Return a departure, announced, for good or until a later `join`: workers leave at a time (s).

    From then on no worker waits for them. Computations are cancelled; messages that were sent are
    still served.
    """
    return Failure("leave", **locals())


def join(
    at: float | str, workers: int | Sequence[int] | None = None, site: int | None = None
) -> Failure:
    """Return an arrival: workers are present from a time (s) on.

    They are absent before, unless they left earlier. They start with the newest version, and are
    counted from then on.
    """
    return Failure("join", **locals())


#: The failures by their names on the command line.
FAILURES: Mapping[str, Callable[..., Failure]] = {
    factory.__name__: factory for factory in (crash, pause, slow, outage, loss, leave, join)
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
    failures = []
    for entry in split(entries):
        if not isinstance(entry, str | Failure):
            hint = f"; call it, {form_of(entry)}" if entry in FAILURES.values() else ""
            raise InputError(f"failures: {entry!r} is not a failure{hint}")
        failures.append(
            called("failures", entry, FAILURES, units=True) if isinstance(entry, str) else entry
        )
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
        if "on" not in _PARAMETERS[failure.name]:
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


def _lasting(argument: str, value: Any) -> Law:
    law = as_law(argument, value)
    if not 0 < law.mean < as_float("inf"):
        raise InputError(f"{argument} = {law}: must have a mean above zero and finite")
    return law
