"""Check that a trace suits a method: its server, its timing and its workers."""

from typing import Any

from asyncsim.base.errors import InputError
from asyncsim.byzantine.attacks import Attack
from asyncsim.clusters.policy import Policy, handshake
from asyncsim.methods.method import OF_JOURNEYS, Method, Timing
from asyncsim.replays.waves import Waves
from asyncsim.traces.trace import Trace


def require_formed(method: Method, waves: Waves) -> None:
    """Raise InputError if reads of a trace need a `Method.same_reply` that no commit has formed."""
    if method.same_reply and (waves.separate_pushes or waves.restores is not None):
        raise InputError(
            f"method = {method.name!r}: replies to its workers with more than the central "
            "variable, and this trace has messages formed with an earlier read, or a restored "
            "server; simulate one with Cluster(protocol='exchange') and no outage"
        )


def require_replies(method: Method, reads: str) -> None:
    """Raise InputError if a method replies to each worker, and `Waves.reads` are separate."""
    if method.reply is not None and not method.same_reply and reads == "separate":
        raise InputError(
            f"method = {method.name!r}: replies to its workers with more than the central "
            "variable, and not every read "
            "of this trace belongs to a commit; simulate one with Cluster(protocol='exchange'), "
            "under a policy that "
            "answers each message as it is applied: asynchronous() say"
        )


def require_server(method: Method, trace: Trace) -> None:
    """Raise InputError unless method and trace both have a server, or both have none."""
    gossips = method.gossips
    if gossips == (trace.protocol == "gossip"):
        meets = gossips and bool((trace.frame["partner"] >= 0).any())
        if meets != (method.meet is not None) and trace.workers > 1:
            do, policy = (
                ("meet in pairs", handshake())
                if method.meet
                else ("send messages", method.timing.policy)
            )
            raise InputError(
                f"method = {method.name!r}: its workers {do}, and this trace's policy is "
                f"{trace.policy}; simulate one "
                "with Cluster(topology=..., "
                f"policy={policy.call if policy else 'asyncsim.neighbours()'})"
            )
        return
    remedy = (
        "Cluster(topology=asyncsim.topologies.ring()), say"
        if gossips
        else "a Cluster without topology"
    )
    required = "no server" if gossips else "a server"
    raise InputError(
        f"method = {method.name!r}: needs a trace of a cluster with {required}, this one is of a "
        "cluster with "
        f"{'a server' if gossips else 'none'}; simulate {remedy}"
    )


def require_arrived(method: Method, trace: Trace) -> None:
    """Raise InputError unless a method may take up messages that arrive during its computation."""
    if method.mix is None or trace.takes_up != "commit":
        return
    policy = method.timing.policy
    if policy is None or policy.mix != "beside":
        raise InputError(
            f"method = {method.name!r}: its gradients may be of replicas that have mixed messages, "
            f"and in this trace, with {trace.policy}, they arrive while gradients are computed; "
            'simulate one with Cluster(topology=..., policy=asyncsim.neighbours(mix="before")), or '
            'choose a method with policy="neighbours(mix=beside)", such as dpsgd'
        )


def require_shards(
    servers: int, parameters: int, method: Method, attack: Attack | None = None
) -> None:
    """Raise InputError unless servers that each hold a shard can compute a method and an attack."""
    if servers > parameters:
        raise InputError(
            f"servers = {servers}: each holds a part of the parameters, and there are "
            f"{parameters}; give at most as many servers"
        )
    if servers > 1 and not method.coordinatewise:
        raise InputError(
            f"method = {method.name!r}: needs all parameters at one instant, and with servers = "
            f"{servers} each commits its shard at another time; give servers = 1, or a "
            "coordinate-wise method such as downpour"
        )
    if servers > 1 and attack is not None and not attack.coordinatewise:
        raise InputError(
            f"attack = {attack.text!r}: needs whole messages, and with servers = {servers} each "
            "gets its part at another time; give servers = 1, or a coordinate-wise attack such as "
            "alie"
        )


def require_timing(method: Method, trace: Trace) -> None:
    """Raise InputError unless a trace has the timing that a method needs."""
    require_enough(method.name, method.timing, trace.workers)
    for name, required in vars(method.timing).items():
        if name in OF_JOURNEYS or name == "fewest_workers":
            continue
        actual = getattr(trace, name)
        if name == "window" and trace.windows_differ:
            actual = tuple(sorted(set(trace.frame["local_steps"].tolist())))
        if required is None or actual == required:
            continue
        if name == "policy" and required.is_met_by(actual):
            continue
        if name == "policy" and trace.cluster is None and trace.protocol == "gossip":
            # A recorded trace has no policy: its rows alone show when messages were taken up.
            mixed = "commit" if required.mix == "beside" or required.name == "handshake" else "read"
            if trace.takes_up == mixed:
                continue
            raise InputError(
                f"method = {method.name!r}: with {required} messages are taken up at the {mixed}, "
                "and in this recorded "
                f"trace they were at the {trace.takes_up}; choose another method, or correct "
                "takes_up"
            )
        call = required.call if isinstance(required, Policy) else repr(required)
        raise InputError(
            f"method = {method.name!r}: needs a trace with {name} = {_value_text(required)}, this "
            "one "
            f"has {_value_text(actual)}; simulate one with Cluster({name}={call})"
        )


def require_enough(name: str, timing: Timing, workers: int) -> None:
    """Raise InputError if there are fewer workers than a method needs."""
    if timing.fewest_workers is not None and workers < timing.fewest_workers:
        raise InputError(
            f"method = {name!r}: with these arguments it needs at least {timing.fewest_workers} "
            "workers, and there are "
            f"{workers}; give more workers, or other arguments"
        )


def _value_text(value: Any) -> str:
    return str(value) if isinstance(value, Policy) else repr(value)
