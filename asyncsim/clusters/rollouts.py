"""Rollouts: slots that generate samples for learners, and the queue between the two.

In asynchronous RL post-training a pool of *slots* generates samples (rollouts) with some version of
the policy, and a *learner* updates the policy on batches of them. On such a cluster the workers are
the learners: a learner waits for a batch, computes for ``Cluster.compute`` seconds, and its update
makes a version. The staleness of a sample is the number of versions between the version that it
started with and the version that its update starts from.
"""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from asyncsim.base.calls import called, form_of, write
from asyncsim.base.errors import (
    InputError,
    require_choice,
    require_count,
    require_memory,
    require_nonnegative,
)
from asyncsim.clusters.laws import Constant, Law, LawLike, as_law
from asyncsim.clusters.workers import WORKER_BYTES

#: The units in which a free slot may begin work.
SUBMITS = ("rollout", "group", "batch")
#: The orders in which groups reach a learner.
ORDERS = ("finished", "started")
#: The moments at which a slot takes up a new version.
UPDATES = ("start", "in_flight", "abort_and_resume")
#: The samples that start again when a slot fails.
RETRIES = ("sample", "group")
_AT_ONCE = Constant(0.0)

#: The parameter of each queue and its least value.
_PARAMETERS: dict[str, tuple[str, int] | None] = {
    "pace": ("eta", 0),
    "drop_oldest": ("batches", 1),
    "discard": ("limit", 0),
    "keep": None,
}


@dataclass(frozen=True)
class Queue:
    """A queue between slots and learners; made by the function of the same name.

    Attributes
    ----------
    name : str
    eta : int or None
        Batches that may be open beyond the one that the learner works on.
    batches : int or None
        Finished batches that may wait.
    limit : int or None
        Largest staleness (versions) of a sample that a learner accepts.
    """

    name: str
    eta: int | None = None
    batches: int | None = None
    limit: int | None = None

    def __post_init__(self) -> None:
        parameter = _PARAMETERS[require_choice("queue", self.name, _PARAMETERS)]
        for name in ("eta", "batches", "limit"):
            value = getattr(self, name)
            if parameter is not None and name == parameter[0]:
                count = require_count(f"queue {self.name}: {name}", value, parameter[1])
                object.__setattr__(self, name, count)
            elif value is not None:
                raise InputError(f"queue {self.name}: {name} = {value!r}: it has no such parameter")

    def __str__(self) -> str:
        parameter = _PARAMETERS[self.name]
        value = "" if parameter is None else f"{parameter[0]}={getattr(self, parameter[0])}"
        return f"{self.name}({value})"


def pace(eta: int) -> Queue:
    """Start no sample while ``(eta + 1) * batch`` samples are open.

    A sample is open from its start until the version that was trained on it reaches the slots.
    While the window is full the mean staleness is exactly ``eta``; ``pace(0)`` is synchronous
    training. AReaL (2505.24298) bounds staleness this way.
    """
    return Queue("pace", eta=eta)


def drop_oldest(batches: int) -> Queue:
    """Drop the oldest finished group when more than ``batches`` batches of samples wait."""
    return Queue("drop_oldest", batches=batches)


def discard(limit: int) -> Queue:
    """Discard a group once a sample in it would be trained at a staleness above ``limit``.

    A learner judges a batch when it takes it; of several learners, the others may make versions
    before its update.
    """
    return Queue("discard", limit=limit)


def keep() -> Queue:
    """Keep all finished groups, however long they wait."""
    return Queue("keep")


#: The queues by name.
QUEUES: Mapping[str, Callable[..., Queue]] = {
    queue.__name__: queue for queue in (pace, drop_oldest, discard, keep)
}


@dataclass(frozen=True)
class Rollouts:
    """Slots that generate samples, and the queue that takes these to the learners.

    Attributes
    ----------
    slots : int
        Samples that are generated at once.
    length : Law
        Seconds that a sample takes at unit speed. Timing must not depend on values, so lengths come
        from a law and are given to the problem: a long sample is a hard prompt.
    group : int
        Samples of one prompt. A group reaches a learner when all its samples are finished.
    batch : int
        Samples of an update, a multiple of ``group``.
    submit : {"rollout", "group", "batch"}
        What free slots begin: the next sample, or the next group or batch as soon as enough slots
        are free for all of it (all slots, if it is larger).
    consume : {"finished", "started"}
        The order in which groups reach a learner: by their last sample's finish, or by
        their first sample's start, in which a learner waits for the oldest group.
    queue : Queue
        `pace`, `drop_oldest`, `discard` or `keep`; may come as its text, ``"pace(4)"``.
    updates : {"start", "in_flight", "abort_and_resume"}
        When a slot takes up a version that reaches it: at its next sample; at once, amid a sample;
        or at once, having stopped since the update was made.
    prefill : float
        Seconds to read one second's worth of a sample again after a version changed amid it.
    transfer : Law
        Seconds from an update to the arrival of its version at the slots.
    publish : int
        Every how many updates a version is sent to the slots.
    retry : {"sample", "group"}
        What starts again when a slot crashes: its sample, or the whole group.
    far_slots : int
        The number of slots at another site than the learner, the last ones.
    far_latency : Law
        Seconds more that a version takes to these slots, and a finished sample from them.

    Raises
    ------
    InputError
        A batch that is no multiple of the group; a window of `pace` or `drop_oldest` that holds no
        group; a parameter that is none of the above.
    """

    slots: int
    length: Law
    group: int = 1
    batch: int = 1
    submit: str = "rollout"
    consume: str = "finished"
    queue: Queue = Queue("pace", eta=1)
    updates: str = "start"
    prefill: float = 0.0
    transfer: Law = _AT_ONCE
    publish: int = 1
    retry: str = "sample"
    far_slots: int = 0
    far_latency: Law = _AT_ONCE

    if TYPE_CHECKING:  # the arguments; the fields hold checked values

        def __init__(
            self,
            slots: int,
            length: LawLike,
            group: int = 1,
            batch: int = 1,
            submit: str = "rollout",
            consume: str = "finished",
            queue: Queue | str = "pace(1)",
            updates: str = "start",
            prefill: float = 0.0,
            transfer: LawLike = 0.0,
            publish: int = 1,
            retry: str = "sample",
            far_slots: int = 0,
            far_latency: LawLike = 0.0,
        ): ...

    def __post_init__(self) -> None:
        def store(name: str, value: Any) -> None:
            object.__setattr__(self, name, value)

        for name in ("slots", "group", "batch", "publish"):
            store(name, require_count(f"rollouts: {name}", getattr(self, name)))
        require_memory(f"slots = {self.slots}", "a cluster of so many", self.slots * WORKER_BYTES)
        for name, choices in (
            ("submit", SUBMITS),
            ("consume", ORDERS),
            ("updates", UPDATES),
            ("retry", RETRIES),
        ):
            require_choice(f"rollouts: {name}", getattr(self, name), choices)
        store("length", _as_length(self.length))
        store("transfer", as_law("rollouts: transfer", self.transfer))
        store("prefill", require_nonnegative("rollouts: prefill", self.prefill))
        store("queue", as_queue(self.queue))
        store("far_latency", as_law("rollouts: far_latency", self.far_latency))
        if require_count("rollouts: far_slots", self.far_slots, 0) > self.slots:
            raise InputError(
                f"rollouts: far_slots = {self.far_slots}: must be at most slots = {self.slots}"
            )
        if self.far_slots and self.updates == "abort_and_resume":
            raise InputError(
                "rollouts: updates = 'abort_and_resume': not simulated for slots at another site; "
                "give 'in_flight', or leave far_slots out"
            )
        if not self.far_slots and self.far_latency != _AT_ONCE:
            raise InputError(
                f"rollouts: far_latency = {self.far_latency}: no slot is far; give far_slots as "
                "well"
            )
        if self.batch % self.group:
            raise InputError(
                f"rollouts: batch = {self.batch}: is no multiple of group = {self.group}, and "
                "whole "
                f"groups are consumed; give {self.batch - self.batch % self.group or self.group}"
            )
        if self.updates == "start" and self.prefill:
            raise InputError(
                f"rollouts: prefill = {self.prefill}: with updates='start' no version changes amid "
                "a sample; leave prefill out, or give updates='in_flight'"
            )

    @property
    def unit(self) -> int:
        """Samples that begin together, if enough slots are free."""
        return {"rollout": 1, "group": self.group, "batch": self.batch}[self.submit]

    def __str__(self) -> str:
        texts = (
            f"{field.name}={value if isinstance(value, Law | Queue) else write(value)}"
            for field in dataclasses.fields(self)
            if (value := getattr(self, field.name)) != field.default
        )
        return f"rollouts({', '.join(texts)})"


def as_queue(value: Any) -> Queue:
    """Return a queue from itself or its text.

    Raises
    ------
    InputError
        Neither a queue nor the text of one.
    """
    if isinstance(value, str):
        return called("rollouts: queue", value, QUEUES)
    if not isinstance(value, Queue):
        hint = f"; call it, {form_of(value)}" if value in QUEUES.values() else ""
        raise InputError(f"rollouts: queue = {value!r}: must be a queue, pace(4) for example{hint}")
    return value


def as_rollouts(value: Any) -> Rollouts:
    """Return rollouts from themselves or their text.

    Raises
    ------
    InputError
        Neither rollouts nor the text of them.
    """
    if isinstance(value, str):
        return called("rollouts", value, {"rollouts": Rollouts}, units=True)
    if not isinstance(value, Rollouts):
        raise InputError(
            f"rollouts = {value!r}: must be asyncsim.Rollouts(slots=..., length=..., batch=...)"
        )
    return value


def _as_length(value: Any) -> Law:
    law = as_law("rollouts: length", value)
    if not 0 < law.mean < float("inf"):
        raise InputError(f"rollouts: length = {law}: must have a mean above zero and finite")
    return law
