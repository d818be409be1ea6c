"""Fit a cluster to a trace: the laws of its times and the order of its server.

::

    cluster = asyncsim.calibrate(trace)
    again = asyncsim.simulate(cluster, commits=len(trace))
"""

import itertools
import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pandas as pd

import asyncsim.calibration.dependence as dependence
from asyncsim.base.console import counted
from asyncsim.base.errors import (
    InputError,
    require_choice,
    require_nonnegative,
    require_positive,
    require_switch,
)
from asyncsim.calibration.differences import alike, differ, without_gaps
from asyncsim.calibration.fitting import (
    ERRORS,
    FAMILIES,
    FEWEST,
    KINDS,
    NO_SPREAD,
    Fit,
    Part,
    fit,
    fitted,
    without,
)
from asyncsim.clusters.cluster import DISCIPLINES, Cluster
from asyncsim.clusters.failures import crash
from asyncsim.clusters.laws import Constant, Empirical
from asyncsim.clusters.network import per_worker as for_each
from asyncsim.traces.durations import (
    Durations,
    choices,
    deaths,
    durations,
    require_asynchronous,
    times_of,
)
from asyncsim.traces.trace import Trace

#: The parts of a trace in which workers died.
_DEATHS, _AWAY = "time to a death", "time away"
#: Workers by the names of their groups.
Groups = dict[str, list[int]]
#: Orders of service in which visits wait for one another.
_QUEUES = tuple(name for name in DISCIPLINES if name != "lock_free")


class CalibrationWarning(UserWarning):
    """A trace has properties that no cluster has: its calibration may predict it badly."""


@dataclass(frozen=True)
class Calibration:
    """A cluster fitted to a trace, with the durations and laws of the fit."""

    cluster: Cluster
    #: Durations and laws: compute, of all workers or of each, then service and latencies, and
    #: deaths.
    parts: tuple[Part, ...] = field(repr=False)
    notes: tuple[str, ...]  #: properties of the trace that no cluster has; doubts about the order
    durations: Durations = field(repr=False)  #: as recorded
    gaps: int = 0  #: gaps in a log of commits that were taken as absences

    @property
    def table(self) -> pd.DataFrame:
        """One row per law.

        ``what``; ``samples``, and their ``mean`` and ``std`` (s) per local step; ``law``, in a few
        words, and its ``law_mean`` and ``law_std`` (s); ``error``, the standard error of the mean
        (s), were the durations independent; ``distance``, the largest difference of the
        distribution functions. Where deaths cut computations short, the samples are the completed
        ones; mean, std and distance are of Kaplan and Meier's distribution.
        """
        return pd.DataFrame([part.row() for part in self.parts])

    @property
    def statements(self) -> list[str]:
        """What the fit takes from differences in the log."""
        quantities = sorted({part.quantity for part in self.parts if " of " in part.name})
        groups = f"groups of workers have their own laws of {', '.join(quantities)}"
        absences = f"{counted(self.gaps, 'gap')} taken as absences; --gaps-above sets their limit"
        fewest = np.bincount(self.durations.traveller, minlength=self.cluster.workers).min()
        few = (
            f"a worker has fewer than {FEWEST} visits: workers are not compared; --sites tells them"
        )
        return (
            [groups] * bool(quantities)
            + [few] * bool(self.cluster.workers > 1 and fewest < FEWEST and not quantities)
            + [absences] * bool(self.gaps)
        )

    def resampled(self, generator: np.random.Generator) -> Cluster:
        """Fit the cluster to resampled durations; the spread shows how well they determine it.

        The samples are stretches of successive durations, with the cube root of their number as
        length, so that their serial dependence is kept. The families are kept.

        References
        ----------
        Kuensch 1989, Annals of Statistics 17, 1217: the moving block bootstrap.
        """
        return _with_laws(self.cluster, [part.resampled(generator) for part in self.parts])


def calibrate(
    trace: Trace,
    *,
    law: str = "best",
    per_worker: bool | None = None,
    latency_up: float | None = None,
    discipline: str | None = None,
    warm_up: int | None = None,
    sites: Sequence[Any] | None = None,
    gaps_above: float | None = None,
) -> Cluster:
    """Fit a cluster to the durations of a trace, simulated or recorded.

    A worker's way down is from ``read_time`` to ``start_time``, its computation from there to
    ``send_time``, its way up to ``arrive_time``, and a service from ``serve_time`` to
    ``commit_time``, or from ``read_serve_time`` to ``read_time`` for separate reads. If a visit
    waits although the server is free, as real visits do until a process takes them up, the wait is
    part of the service.

    The transfer times of message sizes are part of the latencies, with one exception. Separate
    read_then_write visits show the transfer times of messages without parameters; a bandwidth then
    explains the longer times of messages with parameters, the same for both ways. Its value is 1,
    with the message size in seconds: only their quotient has a meaning. `Calibration.resampled`
    keeps it.

    Workers that died give the cluster an `asyncsim.failures.crash`: the time to the next death is
    exponential, with the workers' time at work per death as its mean, and the time away is drawn
    from the recorded ones. A log of commits alone shows an absence as a gap, a far longer way down
    than the others: see `asyncsim.calibration.differences.without_gaps`. Workers whose latencies
    differ are groups with a law each; so are their absences, if their rates differ, too.

    A computation that a death cut short is a censored observation: long computations die more often
    than short ones. So the mean of an exponential law is the computed time over the number of
    completed computations. The other families maximize the censored likelihood, and empirical laws
    use the estimate of Kaplan and Meier.

    Parameters
    ----------
    trace : Trace
        Of an asynchronous server.
    law : str
        ``"best"``: the named family with the least BIC, each at its largest likelihood. The
        durations themselves if that law misses their distribution function by more than 0.1
        somewhere and by more than chance at this sample size, or their mean by more than a tenth.
        ``"empirical"``: the durations themselves. Or the name of a family, such as ``"gamma"``, for
        all times that are not constant. With a window above one only exponential and gamma laws can
        be fitted, because only their sums have a known law.
    per_worker : bool, optional
        Whether each worker gets its own compute law; by default if these laws together have a
        smaller BIC than one law for all.
    latency_up : float, optional
        The way up (s), a constant; by default its law from the trace. If the trace does not record
        when messages leave, the default is 0; if it does not record when requests to read leave, it
        is the difference between both ways around the read and the way down, a constant if that
        varies, with a warning.
    discipline : str, optional
        ``"fifo"``, ``"lowest_rank"`` or ``"random"``; by default the first that agrees with 95 % of
        the server's choices. An explicit discipline is checked against them.
    warm_up : int, optional
        Commits left out at the start; by default one per worker, at most half of all. Every
        worker's first computation is always left out.
    sites : sequence, optional
        The site of each worker, a name or a number: computing, latencies and absences have a law
        for each site. By default groups of workers whose latencies differ have their own laws.
    gaps_above : float, optional
        Ways down that are longer (s) are absences; by default far longer than the others.

    Returns
    -------
    Cluster

    Raises
    ------
    InputError
        If the trace was prescribed, has a policy or failures other than deaths; if times are
        missing, negative or not finite; if services overlap; if a law has fewer than 20 durations;
        or if an argument contradicts the trace.

    Warns
    -----
    CalibrationWarning
        If the durations are no independent draws: they drift, are correlated, depend on the number
        of computing workers, or shared a link.

    Notes
    -----
    Computations that were unfinished at the end of the trace are not seen, so that the last ones
    are biased towards short ones, by the order of one computation of each worker. In a recording of
    real workers a computation that a death cut short begins at its read, so that its way down
    counts as computing.
    """
    calibration = examine(**locals())
    for note in calibration.notes:
        warnings.warn(f"trace: {note}", CalibrationWarning, stacklevel=2)
    return calibration.cluster


def examine(
    trace: Trace,
    *,
    law: str = "best",
    per_worker: bool | None = None,
    latency_up: float | None = None,
    discipline: str | None = None,
    warm_up: int | None = None,
    sites: Sequence[Any] | None = None,
    gaps_above: float | None = None,
) -> Calibration:
    """Calibrate, and return the durations and the fits, with notes instead of warnings."""
    require_choice("law", law, (*KINDS, *FAMILIES))
    if per_worker is not None:
        require_switch("per_worker", per_worker)
    if gaps_above is not None:
        require_positive("gaps_above", gaps_above)
    require_asynchronous("trace", trace)
    trace, gaps = without_gaps(trace, gaps_above)
    recorded = durations(trace, warm_up)
    groups = _groups_of(recorded, trace.workers, sites)
    told = None if sites is None else groups
    down = _laws("latency down", recorded.down, recorded.traveller, law, groups, separate=told)
    up, computed, notes = _uplink(recorded, latency_up, down, law, groups, told)
    compute = _compute(recorded._replace(compute=computed), trace, law, per_worker, told)
    service = fitted("service", recorded.service, law)
    # The extra time of messages with parameters, down and up together, if it is no chance.
    longer = 0.0
    if recorded.round_trip is not None and recorded.up is not None:
        longer = float(recorded.round_trip.mean() - recorded.up.mean() - recorded.down.mean())
        error = math.sqrt(
            sum(
                float(times.var()) / len(times)
                for times in (recorded.round_trip, recorded.up, recorded.down)
            )
        )
        chance = max(ERRORS * error, NO_SPREAD * float(recorded.round_trip.mean()))
        longer = float(f"{longer:.9g}") if longer > chance else 0.0
    service_order = choices(trace)
    if discipline is None:
        discipline = trace.discipline if trace.discipline in _QUEUES else service_order.discipline
    require_choice("discipline", discipline, _QUEUES)
    if not service_order.agree_with(discipline):
        raise InputError(
            f"discipline = {discipline!r}: the order of service says {service_order.discipline!r}: "
            f"{service_order}; "
            "leave it out"
        )
    frame = Cluster(
        workers=trace.workers,
        bandwidth=1.0 if longer else None,
        message_bytes=longer / 2 if longer else None,
        compute=Constant(1.0),
        window=trace.window,
        protocol=trace.protocol,
        exclusive=trace.protocol != "read_then_write" or not trace.separate_reads,
        discipline=discipline,
    )
    if trace.cluster is not None and trace.cluster.shared_bandwidth:
        notes.append(
            "messages waited for a shared link; the calibrated cluster has independent transfer "
            "times, so that "
            "queues and the spread of staleness differ"
        )
    died = pd.concat([deaths(trace), gaps])
    end = float(trace.frame["commit_time"].max())
    parts = (*compute, service, *up, *down, *_deaths(died, end, groups))
    return Calibration(
        _with_laws(frame, parts),
        parts,
        (*dependence.notes(recorded), *notes),
        recorded,
        len(gaps),
    )


def _groups_of(recorded: Durations, workers: int, sites: Sequence[Any] | None) -> Groups:
    """Return groups of workers by their names: the sites, or workers with alike latencies."""
    if sites is not None:
        if len(sites) != workers:
            raise InputError(f"sites: names {len(sites)} of {workers} workers; give each its site")
        named = pd.Series(sites).groupby(sites).groups
        return {f"site {site}": members.tolist() for site, members in named.items()}
    fewest = int(np.bincount(recorded.traveller, minlength=workers).min())
    if recorded.round_trip is not None or fewest < FEWEST:
        return {"all": list(range(workers))}
    groups = alike(recorded.down, recorded.traveller)
    names = [", ".join(map(str, group[:4])) + ", ..." * (len(group) > 4) for group in groups]
    return {f"workers {name}": group for name, group in zip(names, groups, strict=True)}


def _laws(
    name: str,
    seconds: np.ndarray,
    worker: np.ndarray,
    law: str,
    groups: Groups,
    steps: int = 1,
    censored: np.ndarray | None = None,
    separate: Any = None,
) -> list[Part]:
    """Fit one law for all workers, or one for each group.

    ``separate``: True or groups that were told; False; by default what has the smaller BIC.
    """
    pooled = fitted(name, seconds, law, steps, censored)
    if len(groups) == 1 or separate is False:
        return [pooled]
    parts = []
    for label, group in groups.items():
        chosen = np.isin(worker, group)
        cut = None if censored is None else censored[chosen]
        part = fitted(f"{name} of {label}", seconds[chosen], law, steps, cut)
        parts.append(part._replace(workers=tuple(group)))
    samples = [part.uncensored for part in parts]
    completed = sum(map(len, samples))
    different = sum(part.fit.bic(completed) for part in parts) < pooled.fit.bic(completed)
    if law == "empirical" or any(isinstance(part.fit.law, Empirical) for part in parts):
        different = differ(samples)  # empirical laws have no BIC
    return parts if separate or different else [pooled]


def _deaths(died: pd.DataFrame, end: float, groups: Groups) -> list[Part]:
    """Fit the times to a death and away, of each group of workers."""
    parts = []
    for label, group in groups.items():
        between, away = times_of(died, group, end)
        if away.sum() > 0:
            name = f" of {label}" if len(groups) > 1 else ""
            for what, times, law in ((_DEATHS, between, "exponential"), (_AWAY, away, "empirical")):
                parts.append(Part(what + name, times, fit(times, law), workers=tuple(group)))
    if len(died) and not parts:
        raise InputError(
            "trace: a worker died and none came back; end the trace before, or restart it"
        )
    return parts


def _compute(
    durations: Durations,
    trace: Trace,
    law: str,
    per_worker: bool | None,
    sites: Groups | None,
) -> list[Part]:
    """Fit the laws of computing, one for all workers, or one for each or for each site."""
    if durations.compute.mean() <= 0:
        raise InputError(
            "trace: computations take no time; record start_time when a computation begins"
        )
    seconds, workers, cancelled = durations.attempts
    fewest = int(np.bincount(durations.worker, minlength=trace.workers).min())
    if sites is None and per_worker is None and fewest < FEWEST:
        per_worker = False
    groups = sites or {f"worker {worker}": [worker] for worker in range(trace.workers)}
    separate = sites if per_worker is None else per_worker
    return _laws("compute", seconds, workers, law, groups, trace.window, cancelled, separate)


def _uplink(
    recorded: Durations,
    override: float | None,
    down: Sequence[Part],
    law: str,
    groups: Groups,
    told: Groups | None,
) -> tuple[list[Part], np.ndarray, list[str]]:
    """Return the laws of the way up, the durations of computing without it, and notes."""
    computed, seconds = recorded.compute, 0.0
    notes: list[str] = []
    if override is not None:
        seconds = require_nonnegative("latency_up", override)
        combined = computed if recorded.up is None else computed + recorded.up
        computed = without("latency_up", combined, seconds)
    elif recorded.up is not None:
        up = _laws("latency up", recorded.up, recorded.worker, law, groups, separate=told)
        return up, computed, notes
    elif recorded.round_trip is not None and isinstance(down[0].fit.law, Constant):
        round_trip = np.maximum(recorded.round_trip - down[0].fit.law.value, 0.0)
        part = fitted("latency up", round_trip, law)
        return [part], np.maximum(computed - part.fit.law.mean, 0.0), notes
    elif recorded.round_trip is not None:
        seconds = max(0.0, float(recorded.round_trip.mean()) - down[0].fit.law.mean)
        computed = np.maximum(computed - seconds, 0.0)
        notes.append(
            f"the way up is modelled as a constant, {seconds:.2g} s, because the way down varies; "
            "give latency_up"
        )
    part = Part("latency up", np.zeros(0), Fit(Constant(seconds), 0.0, 0, 0.0))
    return [part], computed, notes


def _with_laws(cluster: Cluster, parts: Sequence[Part]) -> Cluster:
    """Return a cluster with the laws of the parts, per worker where groups differ."""
    everyone = range(cluster.workers)
    laws: dict[str, list[Any]] = {}
    for part in parts:
        of_workers = laws.setdefault(part.quantity, [None] * cluster.workers)
        for worker in everyone if part.workers is None else part.workers:
            of_workers[worker] = part.fit.law
    differ = {part.quantity for part in parts if part.workers is not None}
    latency = list(zip(laws["latency up"], laws["latency down"], strict=True))
    crashes = [
        crash(
            between.fit.law,
            away.fit.law,
            workers=between.workers if between.name != _DEATHS else None,
        )
        for between, away in itertools.pairwise(parts)
        if between.quantity == _DEATHS
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the workers' laws may turn out equal
        return replace(
            cluster,
            compute=tuple(laws["compute"]) if "compute" in differ else laws["compute"][0],
            service=laws["service"][0],
            latency=for_each(latency) if differ & {"latency up", "latency down"} else latency[0],
            failures=crashes,
        )
