"""Measure many clusters by time alone: the time to a horizon, staleness, waiting and traffic.

No gradients are computed. A trace is measured from its columns and discarded.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from asyncsim.clusters.cluster import Cluster
from asyncsim.clusters.failures import crash, join
from asyncsim.clusters.laws import as_law
from asyncsim.simulation.simulate import simulate
from asyncsim.theory import throughput_theory
from asyncsim.traces.trace import Trace
from asyncsim.traces.trace_summary import counted_messages, time_shares, undone

#: Quantities that a horizon may be given in.
HORIZONS = ("versions", "gradients", "seconds")
#: Fewest rounds (commits per worker) for a meaningful time to the target of a replay.
FEWEST_ROUNDS = 10
#: Commits per worker of the first simulation to a horizon in seconds; the next one is longer than
#: estimated by the factor.
_FIRST_LOOK, _MARGIN = 8, 1.05
#: A staleness is lower if its ratio is below this.
_CLEARLY = 0.99
#: Identifies the draws of `settled`; lengths of absences among which one is drawn.
_SETTLED, _LENGTHS = 0x5E771ED, 4096
#: Commits per worker, in units of the staleness bound, until slightly faster workers wait.
_AHEAD = 4


class Horizon(NamedTuple):
    """The end of a plan: a number of versions, of gradients or of simulated seconds."""

    of: str  #: one of `HORIZONS`
    amount: float

    def __str__(self) -> str:
        return (
            f"{self.amount / 3600:g} hours"
            if self.of == "seconds"
            else f"{self.amount:,.10g} {self.of}"
        )


def measure(
    cluster: Cluster, message_bytes: tuple[float, float], horizon: Horizon, limit: int, seed: int
) -> dict[str, Any]:
    """Return the cost of a cluster until a horizon, from one simulation of at most about ``limit``
    commits.

    A horizon beyond the simulation is extrapolated with the rate after the start-up: one commit of
    each worker (with bounded staleness more, until fast workers wait), rounded to whole versions,
    at most half of all commits. Rates, shares of time and staleness exclude the start-up. With
    crashes such a simulation starts `settled`, and the rates are scaled to the `availability`,
    because the presence during one simulation may be far from it.

    Parameters
    ----------
    cluster : Cluster
    message_bytes : pair of float
        Bytes of a message up and of one down, or of each worker's part of an all-reduce.
    horizon : Horizon
    limit : int
        The most commits of the simulation.
    seed : int
        As in `asyncsim.simulate`: clusters with the same seed share their random numbers.

    Returns
    -------
    dict
        - ``seconds``, ``gradients``, ``versions``: at the horizon; ``extrapolated``: whether that
          is beyond the trace.
        - ``gradients_per_second``, ``versions_per_second``, ``bytes_per_second``: after the
          start-up.
        - ``staleness_mean``, ``staleness_q99``: of the messages taken up (versions).
        - ``computing``, ``sending``, ``waiting``, ``held``, ``away``: shares of the workers' time,
          as in `asyncsim.Trace.summary`: ``sending`` both ways, ``waiting`` at the server, ``held``
          by the policy or being served, ``away`` after a failure; ``in_vain`` is the part of
          ``computing`` whose gradients were lost.
        - ``goodput``: the share of the workers' time that went into gradients that count.
        - ``absences``: how often a worker or the server was away in the whole simulation.
    """
    trace = _simulated(cluster, horizon, limit, seed)
    amounts = _amounts(trace)
    time, group = amounts["seconds"], cluster.policy.per_version(cluster.workers)
    start = cluster.workers * (1 + _AHEAD * (cluster.policy.bound or 0))
    warm_up = min(group * math.ceil(start / group), max(1, len(time) // 2)) - 1
    lasting = time[-1] - time[warm_up]
    per_second = {
        name: float((values[-1] - values[warm_up]) / lasting) for name, values in amounts.items()
    }
    begin = float(trace.accepted.frame["commit_time"].iloc[warm_up])
    shares = _shares(trace, begin)
    beyond = amounts[horizon.of][-1] < horizon.amount
    if beyond and crashing(cluster):
        present = availability(cluster)
        scale = present / (1.0 - shares["away"])
        per_second |= {name: scale * per_second[name] for name in ("versions", "gradients")}
        shares = {name: scale * share for name, share in shares.items()} | {"away": 1.0 - present}
    if beyond:
        missing = (horizon.amount - amounts[horizon.of][-1]) / per_second[horizon.of]
        totals = {
            name: float(values[-1]) + missing * per_second[name] for name, values in amounts.items()
        }
    else:
        side: Literal["left", "right"] = "right" if horizon.of == "seconds" else "left"
        at = int(np.searchsorted(amounts[horizon.of], horizon.amount, side)) - (side == "right")
        totals = {name: float(values[at]) if at >= 0 else 0.0 for name, values in amounts.items()}
    if horizon.of == "seconds":
        totals["seconds"] = horizon.amount
    late = (trace.frame["commit_time"] > begin).to_numpy()
    up, down = message_bytes
    if cluster.policy.collective is not None:
        sent = cluster.all_reduced_bytes(up) * per_second["versions"]
    elif cluster.topology is not None:
        messages_per_gradient = trace.summary(warm_up + 1)["messages_mean"]
        sent = up * messages_per_gradient * per_second["gradients"] / cluster.mean_window
    else:
        messages = np.count_nonzero(late & (trace.frame["outcome"] != "cancelled").to_numpy())
        sent = (up * messages + down * np.count_nonzero(late)) / lasting
    staleness = counted_messages(trace, warm_up + 1)["staleness"].to_numpy()
    return {
        **totals,
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


def _simulated(cluster: Cluster, horizon: Horizon, limit: int, seed: int) -> Trace:
    """Simulate until the horizon or the limit, in whole versions and rounds."""
    per_version = cluster.policy.per_version(cluster.workers)
    unit = math.lcm(per_version, cluster.workers)
    unit = unit if unit <= limit // 4 else per_version
    limit = max(unit * (limit // unit), 2 * unit)
    first = {
        "versions": horizon.amount * per_version,
        "gradients": horizon.amount / cluster.mean_window,
    }
    length = first.get(horizon.of, _FIRST_LOOK * cluster.workers)
    while True:
        commits = min(limit, max(2 * unit, unit * math.ceil(min(length, limit) / unit)))
        trace = simulate(cluster, commits, seed, progress=False)
        reached = float(_amounts(trace)[horizon.of][-1])
        if reached >= horizon.amount:
            return trace
        if commits >= limit:
            from_long_run = settled(cluster, seed)
            if from_long_run is cluster:
                return trace
            return simulate(from_long_run, commits, seed, progress=False)
        length = max(commits + unit, commits * _MARGIN * horizon.amount / max(reached, 1e-300))


def crashing(cluster: Cluster) -> list[crash]:
    """Return the crashes of a cluster; none if its workers leave and join at given times, too."""
    if any(failure.at is not None for failure in cluster.failures):
        return []
    return [failure for failure in cluster.failures if isinstance(failure, crash)]


def availability(cluster: Cluster) -> float:
    """Return the share of the workers' time in which they are present, in the long run."""
    present = np.ones(cluster.workers)
    for failure in crashing(cluster):
        hit = np.concatenate(failure.groups(cluster.workers, cluster.sites))
        present[hit] *= 1.0 - _absence(failure)
    return float(present.mean())


def _absence(failure: crash) -> float:
    """Return the share of the time in which a worker is away by a crash."""
    every, lasts = as_law("every", failure.every).mean, as_law("lasts", failure.lasts).mean
    return lasts / (every + lasts)


def settled(cluster: Cluster, seed: int) -> Cluster:
    """Return the cluster without the workers that are away at a random moment of the long run.

    They join after the rest of their absence. The others' next crashes come as after a return,
    which is exact for exponential times.
    """
    generator = np.random.default_rng([_SETTLED, seed])
    joins: dict[int, float] = {}
    for failure in crashing(cluster):
        for group in failure.groups(cluster.workers, cluster.sites):
            if generator.random() < _absence(failure):
                # A moment meets an absence in proportion to its length, anywhere within it.
                lengths = as_law("lasts", failure.lasts).sample(generator, _LENGTHS)
                length = generator.choice(lengths, p=lengths / lengths.sum())
                rest = length * (1.0 - generator.random())
                joins |= {worker: max(rest, joins.get(worker, 0.0)) for worker in group}
    if not joins or len(joins) == cluster.workers:
        return cluster
    arrivals = tuple(join(at=rest, workers=worker) for worker, rest in joins.items())
    return dataclasses.replace(cluster, failures=(*cluster.failures, *arrivals))


def _amounts(trace: Trace) -> dict[str, np.ndarray]:
    """Return the versions, gradients and seconds after each accepted message.

    A version of an all-reduce exists once the all-reduce has ended. Messages that a server lost by
    returning to a checkpoint do not count.
    """
    frame, delay = (
        trace.accepted.frame,
        0.0 if trace.cluster is None else trace.cluster.collective_time,
    )
    counts = ~undone(trace.accepted)
    return {
        "versions": np.cumsum((frame["outcome"] == "applied").to_numpy() & counts),
        "gradients": np.cumsum(frame["local_steps"].to_numpy() * counts),
        "seconds": frame["commit_time"].to_numpy() + delay,
    }


def _shares(trace: Trace, begin: float) -> dict[str, float]:
    """Return the shares of the workers' time after the start-up."""
    shares = time_shares(trace, begin, float(trace.accepted.frame["commit_time"].iloc[-1]))
    return {
        "computing": shares["computing_share"],
        "sending": shares["sending_share"] + shares["returning_share"],
        "waiting": shares["waiting_share"],
        "held": shares["served_share"] + shares["held_share"],
        "away": shares["away_share"],
        "in_vain": shares["computing_share"] - shares["counted_share"],
    }


class Candidate(NamedTuple):
    """A cluster of a plan."""

    labels: Mapping[str, Any]  #: its name, and its choices by their names
    cluster: Cluster
    message_bytes: tuple[float, float]  #: up and down


def measure_all(
    candidates: Sequence[Candidate], horizon: Horizon, limit: int, seeds: int, table: str
) -> Any:
    """Return a table with a row for each candidate and seed: labels, measurements, and theory of
    `known_cost`.
    """
    rows = []
    for candidate in candidates:
        theory = known_cost(candidate.cluster, horizon)._asdict()
        for seed in range(seeds):
            measured = measure(candidate.cluster, candidate.message_bytes, horizon, limit, seed)
            rows.append({**candidate.labels, "seed": seed, **measured, **theory})
    return {table: rows}


class KnownCost(NamedTuple):
    """The time to a horizon by a closed form; for a horizon in seconds, the time of a thousand
    gradients.
    """

    theory: float  #: seconds in the long run, or the least possible; not a number if there is none
    theory_name: str
    exact: bool  #: whether that is the time


def known_cost(cluster: Cluster, horizon: Horizon) -> KnownCost:
    """Return the theoretical cost of a horizon; with failures, a lower bound."""
    theory = throughput_theory(
        dataclasses.replace(cluster, failures=()) if cluster.failures else cluster
    )
    if theory is None:
        return KnownCost(math.nan, "", False)
    if cluster.failures:
        theory = theory._replace(name=f"{theory.name}, without failures", exact=False)
    commits = {
        "versions": horizon.amount * cluster.policy.per_version(cluster.workers),
        "gradients": horizon.amount / cluster.mean_window,
        "seconds": 1000 / cluster.mean_window,
    }
    return KnownCost(commits[horizon.of] / theory.commits, theory.name, theory.exact)


def pareto(cost: np.ndarray, staleness: np.ndarray) -> np.ndarray:
    """Mark the candidates on the Pareto front of cost and staleness, ``[candidates]``; the first of
    equal ones.

    Only a difference of at least a hundredth makes a staleness lower.
    """
    front = np.zeros(len(cost), bool)
    lowest = np.inf
    for place in np.lexsort((staleness, cost)):
        if staleness[place] < _CLEARLY * lowest:
            front[place], lowest = True, staleness[place]
    return front
