"""Measure clusters by time alone, many at once: how long until a horizon, how stale, who waits, what is sent.

No gradients. A trace is measured from its columns, and not kept.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from asyncsim.clusters.cluster import Cluster
from asyncsim.clusters.collectives import collective_bytes
from asyncsim.simulation.simulate import simulate
from asyncsim.theory import throughput_theory
from asyncsim.traces.columns import ACCEPTED, previous_rows
from asyncsim.traces.trace import Trace
from asyncsim.traces.trace_summary import counted_messages, undone

#: Quantities that a horizon may be given in.
HORIZONS = ("versions", "gradients", "seconds")
#: Rounds, commits of each worker on average, before which a replay's time to the target is no answer.
FEWEST_ROUNDS = 10
#: Commits per worker of the first simulation to a horizon in seconds, and the factor by which the next one is longer
#: than estimated.
_FIRST_LOOK, _MARGIN = 8, 1.05
#: Staleness is lower if it is below this share of the other.
_CLEARLY = 0.99
#: Commits per worker, in units of the staleness bound, until slightly faster workers wait.
_AHEAD = 4


class Horizon(NamedTuple):
    """The end of a plan: a number of versions, of gradients or of simulated seconds."""

    of: str  #: one of `HORIZONS`
    amount: float

    def __str__(self) -> str:
        return f"{self.amount / 3600:g} hours" if self.of == "seconds" else f"{self.amount:,.10g} {self.of}"


def measure(
    cluster: Cluster, message_bytes: tuple[float, float], horizon: Horizon, most: int, seed: int
) -> dict[str, Any]:
    """Return what a cluster needs until a horizon, from one simulation of at most about ``most`` commits.

    A horizon that is further away is reached at the rate that the simulation has after its start-up: one commit of each
    worker, with bounded staleness as many more as it takes until the fast ones wait, and whole versions, at most half
    of all. Rates, shares of time and staleness are without it.

    Parameters
    ----------
    cluster : Cluster
    message_bytes : pair of float
        Bytes of a message up and of one down, or of each worker's part of an all-reduce.
    horizon : Horizon
    most : int
        Commits that are simulated, if so many are needed.
    seed : int
        As of `asyncsim.simulate`: clusters of one seed share their random numbers.

    Returns
    -------
    dict
        - ``seconds``, ``gradients``, ``versions``: at the horizon; ``extrapolated``: whether that is beyond the trace.
        - ``gradients_per_second``, ``versions_per_second``, ``bytes_per_second``: after the start-up.
        - ``staleness_mean``, ``staleness_q99``: of the messages taken up (versions).
        - ``computing``, ``sending``, ``waiting``, ``held``, ``away``: shares of the workers' time, of whole cycles from
          one visit's end to the next: ``sending`` both ways, ``waiting`` at the server, ``held`` by the policy or being
          served, ``away`` after a failure; ``in_vain`` is the part of ``computing`` of which nothing came.
        - ``goodput``: the share of the workers' time that went into gradients that count.
        - ``absences``: how often a worker or the server was away in the whole simulation.
    """
    trace = _simulated(cluster, horizon, most, seed)
    accepted = trace.frame["outcome"].isin(ACCEPTED).to_numpy()
    column = {name: trace.frame[name].to_numpy() for name in _NEEDED}
    amounts = _amounts(trace)
    time, group = amounts["seconds"], cluster.policy.per_version(cluster.workers)
    start = cluster.workers * (1 + _AHEAD * (cluster.policy.bound or 0))
    warm_up = min(group * math.ceil(start / group), max(1, len(time) // 2)) - 1
    lasting = time[-1] - time[warm_up]
    per_second = {name: float((values[-1] - values[warm_up]) / lasting) for name, values in amounts.items()}
    beyond = amounts[horizon.of][-1] < horizon.amount
    if beyond:
        missing = (horizon.amount - amounts[horizon.of][-1]) / per_second[horizon.of]
        found = {name: float(values[-1]) + missing * per_second[name] for name, values in amounts.items()}
    else:
        side: Literal["left", "right"] = "right" if horizon.of == "seconds" else "left"
        at = int(np.searchsorted(amounts[horizon.of], horizon.amount, side)) - (side == "right")
        found = {name: float(values[at]) if at >= 0 else 0.0 for name, values in amounts.items()}
    if horizon.of == "seconds":
        found["seconds"] = horizon.amount
    begin = column["commit_time"][accepted][warm_up]
    late = column["commit_time"] > begin
    up, down = message_bytes
    if cluster.policy.collective is not None:
        sent = collective_bytes(cluster.policy.collective, up, cluster.workers, cluster.sites).total
        sent *= per_second["versions"]
    else:
        messages = np.count_nonzero(late & (trace.frame["outcome"] != "cancelled").to_numpy())
        sent = (up * messages + down * np.count_nonzero(late)) / lasting
    staleness = counted_messages(trace, warm_up + 1)["staleness"].to_numpy()
    shares = _shares_with_failures(trace, warm_up) if trace.has_failures else _shares(column, accepted, begin)
    return {
        **found,
        "extrapolated": bool(beyond),
        "gradients_per_second": per_second["gradients"],
        "versions_per_second": per_second["versions"],
        "bytes_per_second": sent,
        "staleness_mean": float(staleness.mean()),
        "staleness_q99": float(np.quantile(staleness, 0.99)),
        **shares,
        "goodput": shares["computing"] - shares["in_vain"],
        "absences": len(trace.spells),
    }


#: Columns of a trace that are measured.
_NEEDED = ("worker", "read_time", "start_time", "send_time", "arrive_time", "serve_time", "commit_time")


def _simulated(cluster: Cluster, horizon: Horizon, most: int, seed: int) -> Trace:
    """Return a trace that reaches the horizon, or has all the commits that it may have: whole versions and rounds."""
    per_version = cluster.policy.per_version(cluster.workers)
    whole = math.lcm(per_version, cluster.workers)
    whole = whole if whole <= most // 4 else per_version
    most = max(whole * (most // whole), 2 * whole)
    first = {"versions": horizon.amount * per_version, "gradients": horizon.amount / cluster.mean_window}
    needed = first.get(horizon.of, _FIRST_LOOK * cluster.workers)
    while True:
        commits = min(most, max(2 * whole, whole * math.ceil(min(needed, most) / whole)))
        trace = simulate(cluster, commits, seed, progress=False)
        reached = float(_amounts(trace)[horizon.of][-1])
        if reached >= horizon.amount or commits >= most:
            return trace
        needed = max(commits + whole, commits * _MARGIN * horizon.amount / max(reached, 1e-300))


def _amounts(trace: Trace) -> dict[str, np.ndarray]:
    """Return the versions, gradients and seconds after each message that was taken up.

    A version of an all-reduce is there once that is done. What a server lost when it went back to a checkpoint does not
    count.
    """
    frame, done = trace.accepted.frame, 0.0 if trace.cluster is None else trace.cluster.collective_time
    counts = ~undone(trace.accepted)
    return {
        "versions": np.cumsum((frame["outcome"] == "applied").to_numpy() & counts),
        "gradients": np.cumsum(frame["local_steps"].to_numpy() * counts),
        "seconds": frame["commit_time"].to_numpy() + done,
    }


def _shares(column: Mapping[str, np.ndarray], accepted: np.ndarray, begin: float) -> dict[str, float]:
    """Return the shares of the workers' time, over their whole cycles after the start-up."""
    before = previous_rows(column["worker"])
    commit = column["commit_time"]
    last = np.where(before >= 0, commit[before], 0.0)
    whole = (before >= 0) & (last >= begin)
    total = (commit - last)[whole].sum()
    if not total > 0:
        return dict.fromkeys(("computing", "sending", "waiting", "held", "away", "in_vain"), np.nan)
    computing = np.maximum(column["send_time"] - column["start_time"], 0.0)
    returning = column["start_time"] - np.maximum(column["read_time"], last)
    sending = np.maximum(column["arrive_time"] - column["send_time"], 0.0) + np.maximum(returning, 0.0)
    waiting = np.maximum(column["serve_time"] - column["arrive_time"], 0.0)
    parts = {"computing": computing, "sending": sending, "waiting": waiting}
    shares = {name: float(values[whole].sum() / total) for name, values in parts.items()}
    in_vain = float(computing[whole & ~accepted].sum() / total)
    return {**shares, "held": max(0.0, 1.0 - sum(shares.values())), "away": 0.0, "in_vain": in_vain}


def _shares_with_failures(trace: Trace, warm_up: int) -> dict[str, float]:
    """Return the same of a cluster with failures, whose workers have no cycles."""
    found = trace.summary(warm_up + 1)
    return {
        "computing": found["computing_share"],
        "sending": found["sending_share"] + found["returning_share"],
        "waiting": found["waiting_share"],
        "held": found["served_share"] + found["held_share"],
        "away": found["away_share"],
        "in_vain": found["computing_share"] - found["counted_share"],
    }


class Candidate(NamedTuple):
    """A cluster of a plan."""

    labels: Mapping[str, Any]  #: its choices by their names
    cluster: Cluster
    message_bytes: tuple[float, float]  #: up and down


def measure_all(candidates: Sequence[Candidate], horizon: Horizon, most: int, seeds: int, table: str) -> Any:
    """Return the rows of a table, for each candidate and seed: its labels, what is measured, what `known_cost` says."""
    rows = []
    for one in candidates:
        known = known_cost(one.cluster, horizon)._asdict()
        for seed in range(seeds):
            found = measure(one.cluster, one.message_bytes, horizon, most, seed)
            rows.append({**one.labels, "seed": seed, **found, **known})
    return {table: rows}


class KnownCost(NamedTuple):
    """What a closed form says of the time to a horizon; of one in seconds, of the time of a thousand gradients."""

    theory: float  #: seconds in the long run, or the least possible; not a number if there is none
    theory_name: str
    exact: bool  #: whether that is the time


def known_cost(cluster: Cluster, horizon: Horizon) -> KnownCost:
    """Return what is known of the cost of a horizon; with failures, what it is at least."""
    known = throughput_theory(dataclasses.replace(cluster, failures=()) if cluster.failures else cluster)
    if known is None:
        return KnownCost(math.nan, "", False)
    if cluster.failures:
        known = known._replace(name=f"{known.name}, without failures", exact=False)
    commits = {
        "versions": horizon.amount * cluster.policy.per_version(cluster.workers),
        "gradients": horizon.amount / cluster.mean_window,
        "seconds": 1000 / cluster.mean_window,
    }
    return KnownCost(commits[horizon.of] / known.commits, known.name, known.exact)


def pareto(cost: np.ndarray, staleness: np.ndarray) -> np.ndarray:
    """Return which candidates no other beats in both cost and staleness, ``[candidates]``; of equal ones the first.

    Staleness must be less by a hundredth.
    """
    front = np.zeros(len(cost), bool)
    least = np.inf
    for place in np.lexsort((staleness, cost)):
        if staleness[place] < _CLEARLY * least:
            front[place], least = True, staleness[place]
    return front
