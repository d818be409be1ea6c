"""The processes of a recording: the number of workers, their delays, and who sends to whom."""

import importlib.util
import itertools
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from asyncsim.base.errors import InputError, require_choice
from asyncsim.base.files import field_values
from asyncsim.clusters.cluster import Cluster
from asyncsim.clusters.laws import Constant, Law, as_law, parse
from asyncsim.clusters.policy import Policy, asynchronous
from asyncsim.clusters.topologies import Topology, as_topology

_NO_TIME, _ASYNCHRONOUS = Constant(0.0), asynchronous()


@dataclass(frozen=True)
class Processes:
    """Worker processes around one server process; or with a topology, workers that send each other
    messages.

    Attributes
    ----------
    workers : int
        Number of worker processes, which compute at the same time.
    delay : Law or tuple of Law
        Seconds that a worker sleeps per local step, besides the gradient; a list gives one law per
        worker.
    service : Law
        Seconds that the server sleeps per visit, besides applying the message.
    window, protocol, exclusive, discipline
        As for `asyncsim.Cluster`.
    topology, policy
        As for `asyncsim.Cluster` without a server; also as texts.
    """

    workers: int
    delay: Law | tuple[Law, ...] = _NO_TIME
    service: Law = _NO_TIME
    window: int = 1
    protocol: str = "exchange"
    exclusive: bool = True
    discipline: str = "fifo"
    topology: Topology | None = None
    policy: Policy = _ASYNCHRONOUS

    def __post_init__(self) -> None:
        require_choice("discipline", self.discipline, ("fifo", "lowest_rank", "random"))
        if self.topology is not None and as_topology(self.topology).slow:
            raise InputError(
                f"topology = {self.topology!s}: real links have their own speed; leave slow_links "
                "out"
            )
        values = field_values(self)
        delay = _law("delay", values.pop("delay"))
        # Cluster checks the options that both share.
        cluster = Cluster(
            compute=Constant(1.0), **{**values, "service": _law("service", self.service)}
        )
        if cluster.topology is None and cluster.policy != _ASYNCHRONOUS:
            raise InputError(
                f"policy = {cluster.policy}: a real server takes up all that comes; leave policy "
                "out, or give a "
                "topology and one without a server"
            )
        if not isinstance(delay, list | tuple):
            delay = as_law("delay", delay)
        elif len(delay) != cluster.workers:
            raise InputError(
                f"delay = a list of {len(delay)} laws: must hold one law per worker, and there are "
                f"{cluster.workers}; "
                "give one law for all, or as many as workers"
            )
        else:
            delay = tuple(as_law(f"delay[{i}]", law) for i, law in enumerate(delay))
        for name, value in (("delay", delay), *((name, getattr(cluster, name)) for name in values)):
            object.__setattr__(self, name, value)

    @property
    def delay_laws(self) -> tuple[Law, ...]:
        """The law of the delay of a local step of each worker, length ``workers``."""
        return (self.delay,) * self.workers if isinstance(self.delay, Law) else self.delay

    @property
    def separate_reads(self) -> bool:
        """Whether a worker visits the server twice per commit."""
        return self.protocol == "write_then_read" or not self.exclusive

    @property
    def pulls(self) -> bool:
        """Whether a worker reads, in a separate visit, the parameters for its next message."""
        return self.protocol == "read_then_write" and not self.exclusive

    def to_dict(self) -> dict[str, Any]:
        """Return values for JSON; laws as the text that `asyncsim.clusters.laws.parse` reads."""
        laws = [self.delay] if isinstance(self.delay, Law) else self.delay
        delay = " + ".join(
            f"[{text}]*{len(list(run))}" for text, run in itertools.groupby(map(str, laws))
        )
        values = field_values(self)
        if self.topology is None:
            del values["topology"], values["policy"]  # absent in older recordings
        else:
            values |= {"topology": str(self.topology), "policy": str(self.policy)}
        delay = str(self.delay) if isinstance(self.delay, Law) else delay
        return {**values, "delay": delay, "service": str(self.service)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Processes":
        """Create processes from the result of `to_dict`."""
        return cls(**values)


def require_ray() -> Any:
    """Import Ray; raise InputError if it is not installed."""
    if importlib.util.find_spec("ray") is None:
        raise InputError(
            'ray: is not installed, and real processes need it; pip install "asyncsim[ray]"'
        )
    # Silences Ray's announcement of a change that does not matter here.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    import ray

    return ray


def _law(argument: str, value: Any) -> Any:
    try:
        return parse(value) if isinstance(value, str) else value
    except InputError as error:
        raise InputError(f"{argument} = {value!r}: {error}") from None
