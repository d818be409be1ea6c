"""Timing policies: which messages the server accepts, and when versions and workers wait.

All decisions depend on versions, counts and clocks, never on values, so they are taken in the
simulation and are part of the trace. The method decides how the server uses the values of accepted
messages.

A *version* is made by the message that completes it, at the end of that message's service. Its
other messages are buffered before. A worker whose message is discarded, or whose computation is
stopped, reads again and starts a new computation, from other examples.

On a cluster without a server, one with a topology, the policies are `asynchronous`, `neighbours`,
`overlap` and `handshake`. They decide when a worker takes up the messages of the others.
"""

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from asyncsim.base.declared import Count, Natural, Value, call_text, each, from_text
from asyncsim.base.errors import InputError, require_choice, require_count
from asyncsim.base.units import SECONDS, Duration, positive
from asyncsim.clusters.collectives import COLLECTIVES


def _by_worker(check: Callable[[str, Any], Any]) -> Callable[[str, Any], Any]:
    """Return the check of a number, or of a list of one for each worker."""

    def checked(argument: str, value: Any) -> Any:
        if isinstance(value, Sequence) and not isinstance(value, str):
            return each(check)(argument, value)
        return check(argument, value)

    return checked


class Policy(Value):
    """A rule for accepting messages and releasing workers.

    Parameters that a policy lacks are None.
    """

    kind: ClassVar[str] = "policy"
    lacking: ClassVar[frozenset[str]] = frozenset(
        ("bound", "count", "limit", "steps", "time", "grace", "mix", "collective")
    )
    #: Whether a worker with a buffered message waits for that message's version.
    waits_for_version: ClassVar[bool] = False
    #: Whether outdated computations are stopped.
    stops_computations: ClassVar[bool] = False
    #: Whether clusters with a server have this policy, and clusters without one.
    has_server: ClassVar[bool] = True
    has_peers: ClassVar[bool] = False

    @property
    def call(self) -> str:
        """The Python call that returns the policy: the text with quotes."""
        return f"asyncsim.{call_text(type(self), vars(self), json.dumps)}"

    @property
    def completes_between_messages(self) -> bool:
        """Whether a version may be completed at another instant than a message's."""
        return self.time is not None or self.grace is not None

    @property
    def staleness_limit(self) -> int | None:
        """Staleness from which on messages are discarded."""
        return self.limit

    @property
    def chooses_when_to_reply(self) -> bool:
        """Whether the server delays replies, or sends workers unrequested ones."""
        waits = self.bound is not None or self.time is not None
        return waits or self.waits_for_version or self.stops_computations

    def is_met_by(self, policy: "Policy") -> bool:
        """Return whether a method that needs this policy may run under another: where it needs a
        barrier without arguments, any barrier will do.
        """
        return policy == self or (self == barrier() and policy.name == "barrier")

    def per_version(self, workers: int) -> int:
        """Return the number of messages in a version: the least with a grace window, and the most
        with trials.
        """
        return self.count or 1

    def trial_times(self, workers: int) -> tuple[float, ...] | None:
        """Return the duration of each worker's trials (s); None under the other policies."""
        return None


@dataclass(frozen=True)
class asynchronous(Policy):
    """The policy without waiting.

    A server applies every message at the end of its service, whatever its staleness. Without a
    server a worker takes up all arrived messages when it starts a computation.
    """

    has_peers = True


@dataclass(frozen=True)
class bounded_staleness(Policy):
    """Stale synchronous parallel: no worker is more than ``bound`` commits ahead of the
    slowest.

    Every message is applied and makes a version. A worker's clock counts its commits. After a
    commit it continues if its clock is at most ``bound`` ahead of the slowest worker's; else it
    waits until that holds, and only then is its read answered (an exchange) or queued
    (write_then_read). Clocks are thus never more than ``bound + 1`` apart. With 0 all workers do
    one computation between two barriers, and each commit is a separate version.

    Notes
    -----
    Ho et al. let a worker use its cache while the bound allows it, and answer reads from several
    servers; here every commit is followed by a read, of the newest version.

    References
    ----------
    Ho et al. 2013, "More effective distributed ML via a stale synchronous parallel parameter
    server", section 2.
    """

    bound: Natural


@dataclass(frozen=True)
class buffered(Policy):
    """The policy by which ``count`` messages of any workers make a version, without waits.

    K-batch-async (Dutta et al.), FedBuff, and n-softsync with ``count = workers // n``. A worker
    may contribute several messages to a version. Its next read is of the newest version, which may
    not contain its own message yet.

    ``grace``: seconds, or text such as ``"200 ms"``. The version is then complete that long after
    its ``count``-th message; messages that are served in between, or at the last instant, belong to
    it. So a quorum with a grace window completes a version of Decoupled DiLoCo.

    Notes
    -----
    In a replay a version with a grace window appears at the commit of its last message, up to
    ``grace`` seconds early in the tables of a run; reads see it at its true time.

    References
    ----------
    Zhang, Gupta, Lian and Liu 2016, arXiv 1511.05950; Dutta et al. 2018, arXiv 1803.01113; Nguyen
    et al. 2022, arXiv 2106.06639, algorithm 1; Douillard et al. 2026, arXiv 2604.21428 (the grace
    window).
    """

    count: Count
    grace: Duration | None = None


@dataclass(frozen=True)
class first_of(Policy):
    """K-async: the first ``count`` workers make a version and wait; the others compute on.

    ``grace``: see `buffered`; the version is complete earlier once it has a message of every
    worker. With ``first_of(1, grace)`` the server waits after the first arrival and averages all
    that come meanwhile: the grace period of asynchronous local SGD.

    References
    ----------
    Dutta et al. 2018, "Slow and stale gradients can win the race", arXiv 1803.01113; Liu et al.
    2024, arXiv 2401.09135 (the grace period).
    """

    count: Count
    grace: Duration | None = None
    waits_for_version = True


@dataclass(frozen=True)
class barrier(Policy):
    """K-sync: all start from one version, the first ``count`` make the next, the others are
    stopped.

    Without a count the server waits for all workers: synchronous SGD. With a count this is also
    synchronous SGD with ``workers - count`` backup workers. When a version is made, computations
    from the previous one are stopped at that instant ("cancelled"); their workers, and those that
    wait in the buffer, are sent the new version. A computation that would start from an outdated
    version, because its reply travelled for long, is stopped at its start. A message that is
    already on its way, queued or in service is served and "discarded".

    Parameters
    ----------
    count : int, optional
        Messages that make a version; by default one of each worker.
    collective : str, optional
        Replaces the server: an all-reduce of all workers follows the barrier, one of
        `asyncsim.clusters.collectives.COLLECTIVES`. A round lasts until the slowest has computed,
        plus `asyncsim.clusters.collectives.collective_time` of the cluster's message, bandwidth and
        latency.

    Notes
    -----
    The order to stop takes no time; the new version that follows it takes the way down like every
    reply. In the trace an all-reduce is the way down: its messages have no way up, and no worker
    waits.

    References
    ----------
    Chen, Pan, Monga, Bengio and Jozefowicz 2016, arXiv 1604.00981; Dutta et al. 2018, arXiv
    1803.01113.
    """

    count: Count | None = None
    collective: Annotated[str, functools.partial(require_choice, choices=COLLECTIVES)] | None = None
    waits_for_version = stops_computations = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.collective is not None and self.count is not None:
            raise InputError(
                f"policy barrier: count = {self.count}: an all-reduce has the messages of all "
                "workers; leave out count or collective"
            )

    @property
    def staleness_limit(self) -> int:
        """Staleness from which on messages are discarded."""
        return 1

    def per_version(self, workers: int) -> int:
        """Return the number of messages in a version."""
        return self.count or workers


@dataclass(frozen=True)
class discard_stale(Policy):
    """The policy that discards messages of staleness ``limit`` or more.

    ``count`` other messages make a version.

    Rennala SGD is ``discard_stale(1, batch)``, Ringmaster ASGD without stops
    ``discard_stale(limit)``. A worker whose message was discarded reads the newest version and
    continues.

    References
    ----------
    Tyurin and Richtarik 2023, arXiv 2305.12387 (Rennala); Maranjyan, Tyurin and Richtarik 2025,
    arXiv 2501.16168 (Ringmaster, the variant that ignores old gradients).
    """

    limit: Count
    count: Count = 1


@dataclass(frozen=True)
class cancel_stale(Policy):
    """`discard_stale` with stops: a computation whose delay reaches ``limit`` is stopped at
    that instant.

    Ringmaster ASGD with stops is ``cancel_stale(limit)``; K-batch-sync (Dutta et al.) and the
    preemptive form of Rennala are ``cancel_stale(1, count)``. `barrier` explains the stops.

    References
    ----------
    Maranjyan, Tyurin and Richtarik 2025, arXiv 2501.16168 (Ringmaster, the variant that stops
    computations).
    """

    limit: Count
    count: Count = 1
    stops_computations = True


@dataclass(frozen=True)
class rounds(Policy):
    """Ringleader's rounds, in which every worker makes one version.

    A round first collects: messages are buffered until there is at least one of every worker, and
    the message that completes the table makes the round's first version. Then each other worker's
    next message makes one; further messages of workers that have made their version are buffered
    for the next round. When all have made one, the next round collects the missing messages.
    Workers continue at once with the newest version.

    References
    ----------
    Maranjyan and Richtarik 2025, "Ringleader ASGD", arXiv 2509.22860, algorithm 1.
    """


@dataclass(frozen=True)
class buckets(Policy):
    """BASGD's buckets: a version is made once each bucket has a message; workers never wait.

    Worker ``s`` puts its messages into bucket ``s mod count``. The message into the last empty
    bucket makes a version of all messages, and the buckets are emptied. ``count``: at most the
    workers.

    References
    ----------
    Yang and Li 2021, "BASGD: buffered asynchronous SGD for Byzantine learning", arXiv 2003.00937,
    algorithm 2.
    """

    count: Count


@dataclass(frozen=True)
class trials(Policy):
    """MindFlayer's rounds of trials: computations that last too long are cut.

    All workers start a round from one version, and each makes ``count`` trials. A computation that
    would last longer than ``time`` is cut then ("cancelled"), and its worker starts the next trial
    at once, with other examples, from the same version. Other computations send their messages; the
    server's answer lets their worker start its next trial. A worker without trials left waits. When
    all trials have ended, the messages of the round make a version, and all workers are sent the
    newest one. A round without a message makes none.

    Parameters
    ----------
    time : float, text or list
        Seconds, or text such as ``"2 s"``: one for all workers, or a list of one number per worker.
        The paper's ``tau_i + t_i``: it counts from the start of the computation, with all local
        steps of a window.
    count : int or list of int
        Trials in a round, the paper's ``B_i``, for all workers or one per worker.

    Notes
    -----
    The server knows the times, so that no message says that a trial was cut. A version that is
    complete with a cut trial appears in a replay at the commit of its last message; see `buffered`.
    A worker that goes away takes its trials with it once its failure is detected.

    References
    ----------
    Maranjyan, Shaikh Omar and Richtarik 2025, "MindFlayer SGD: efficient parallel SGD in the
    presence of heterogeneous and random worker compute times", arXiv 2410.04285.
    """

    time: Annotated[Any, _by_worker(functools.partial(positive, units=SECONDS))]
    count: Annotated[Any, _by_worker(require_count)] = 1

    def per_version(self, workers: int) -> int:
        """Return the largest number of messages in a version."""
        return sum(self.trials_of(workers))

    def trials_of(self, workers: int) -> tuple[int, ...]:
        """Return the trials of each worker in a round."""
        return self.count if isinstance(self.count, tuple) else (self.count,) * workers

    def trial_times(self, workers: int) -> tuple[float, ...]:
        """Return the duration of each worker's trials (s)."""
        return self.time if isinstance(self.time, tuple) else (self.time,) * workers


class _OfPeers(Policy):
    """A policy of clusters without a server."""

    has_server, has_peers = False, True


@dataclass(frozen=True)
class neighbours(_OfPeers):
    """The barrier among neighbours, on clusters without a server.

    A worker's round takes up its neighbours' messages from their previous round, and waits for
    them. Workers that are not neighbours may be rounds apart.

    Parameters
    ----------
    mix : str
        ``"before"``: messages are mixed in before the gradient, which is of the mixed replica:
        stochastic gradient push. A round lasts computing and latency. ``"beside"``: they travel
        while the gradient is computed, of the replica after the worker's last round, and are mixed
        in when it is applied: D-PSGD. A round lasts the longer of the two.

    References
    ----------
    Lian et al. 2017, "Can decentralized algorithms outperform centralized algorithms?", arXiv
    1705.09056 (D-PSGD); Assran, Loizou, Ballas and Rabbat 2019, "Stochastic gradient push", arXiv
    1811.10792.
    """

    mix: Literal["before", "beside"] = "before"


@dataclass(frozen=True)
class overlap(_OfPeers):
    """The policy of overlap SGP, without a server: a message may be ``steps`` rounds late.

    When a worker starts a computation it takes up all arrived messages. It waits for messages that
    were sent to it ``steps`` or more rounds before its last completed round: with 1, from its
    neighbours' round before that.

    References
    ----------
    Assran, Loizou, Ballas and Rabbat 2019, arXiv 1811.10792, algorithm 2.
    """

    steps: Count


@dataclass(frozen=True)
class handshake(_OfPeers):
    """The policy of AD-PSGD, without a server: workers average in pairs.

    After a gradient a worker averages with a random neighbour. The exchange is atomic: it locks
    both replicas from its start to its end, when both become their mean and the gradient is
    applied. It lasts two messages, there and back. The neighbour computes on.

    No worker waits for ever: an exchange queues for both replicas at the same instant, so that the
    one that has waited longest of all is first in both of its queues. It holds neither while it
    waits for the other.

    References
    ----------
    Lian, Zhang, Zhang and Liu 2018, "Asynchronous decentralized parallel SGD", arXiv 1710.06952.
    """


#: The policies by their names on the command line.
POLICIES: Mapping[str, type[Policy]] = {
    policy.__name__: policy
    for policy in (
        *(asynchronous, bounded_staleness, buffered, first_of, barrier, discard_stale),
        *(cancel_stale, rounds, buckets, trials, neighbours, overlap, handshake),
    )
}
#: The names of those that clusters without a server have.
WITHOUT_SERVER = tuple(name for name, policy in POLICIES.items() if policy.has_peers)


def as_policy(value: Any) -> Policy:
    """Convert a policy or its text, with units as in ``"trials(200 ms)"``, to a policy."""
    return from_text("policy", value, Policy, POLICIES, "asyncsim.asynchronous()")
