"""Rollouts: slots that generate samples for learners, and the queue between the two.

In asynchronous RL post-training a pool of *slots* generates samples (rollouts) with some version of
the policy, and a *learner* updates the policy on batches of them. On such a cluster the workers are
the learners: a learner waits for a batch, computes for ``Cluster.compute`` seconds, and its update
makes a version. The staleness of a sample is the number of versions between the version that it
started with and the version that its update starts from.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from asyncsim.base.declared import Count, Natural, NonNegative, Value, from_text
from asyncsim.base.errors import InputError, require_memory
from asyncsim.clusters.laws import Constant, Law, as_law, lasting
from asyncsim.clusters.workers import WORKER_BYTES

_AT_ONCE = Constant(0.0)


class Queue(Value):
    """The rule by which finished groups wait for a learner. Parameters that it lacks are None."""

    kind: ClassVar[str] = "queue"
    lacking: ClassVar[frozenset[str]] = frozenset(("eta", "batches", "limit"))


@dataclass(frozen=True)
class pace(Queue):
    """Start no sample while ``(eta + 1) * batch`` samples are open.

    A sample is open from its start until the version that was trained on it reaches the slots.
    While the window is full the mean staleness is exactly ``eta``; ``pace(0)`` is synchronous
    training. AReaL (2505.24298) bounds staleness this way.
    """

    eta: Natural


@dataclass(frozen=True)
class drop_oldest(Queue):
    """Drop the oldest finished group when more than ``batches`` batches of samples wait."""

    batches: Count


@dataclass(frozen=True)
class discard(Queue):
    """Discard a group once a sample in it would be trained at a staleness above ``limit``.

    A learner judges a batch when it takes it; of several learners, the others may make versions
    before its update.
    """

    limit: Natural


@dataclass(frozen=True)
class keep(Queue):
    """Keep all finished groups, however long they wait."""


#: The queues by name.
QUEUES: Mapping[str, type[Queue]] = {
    queue.__name__: queue for queue in (pace, drop_oldest, discard, keep)
}


def as_queue(argument: str, value: Any) -> Queue:
    """Return a queue from itself or its text; raise InputError for anything else."""
    return from_text(argument, value, Queue, QUEUES, "asyncsim.pace(4)")


@dataclass(frozen=True)
class Rollouts(Value):
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

    Raises
    ------
    InputError
        A batch that is no multiple of the group; a window of `pace` or `drop_oldest` that holds no
        group; a parameter that is none of the above.
    """

    slots: Count
    length: Annotated[Law, lasting]
    group: Count = 1
    batch: Count = 1
    submit: Literal["rollout", "group", "batch"] = "rollout"
    consume: Literal["finished", "started"] = "finished"
    queue: Annotated[Queue, as_queue] = pace(1)
    updates: Literal["start", "in_flight", "abort_and_resume"] = "start"
    prefill: NonNegative = 0.0
    transfer: Annotated[Law, as_law] = _AT_ONCE
    kind: ClassVar[str] = "set of rollouts"

    def __post_init__(self) -> None:
        super().__post_init__()
        require_memory(f"slots = {self.slots}", "a cluster of so many", self.slots * WORKER_BYTES)
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

    @property
    def subject(self) -> str:
        """The name in error messages."""
        return self.name


def as_rollouts(argument: str, value: Any) -> Rollouts:
    """Return rollouts from themselves or their text.

    Raises
    ------
    InputError
        Neither rollouts nor the text of them.
    """
    example = "asyncsim.Rollouts(slots=..., length=..., batch=...)"
    return from_text(argument, value, Rollouts, {"rollouts": Rollouts}, example)
