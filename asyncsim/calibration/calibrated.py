"""From a trace to the cluster that could have made it: laws of its times, order of its server.

::

    cluster = asyncsim.calibrate(trace)
    again = asyncsim.simulate(cluster, commits=len(trace))
"""

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pandas as pd
from scipy.stats import kruskal

import asyncsim.calibration.dependence as dependence
from asyncsim.base.errors import InputError, require_choice, require_switch
from asyncsim.calibration.fitting import ERRORS, FAMILIES, FEWEST, KINDS, NO_SPREAD, Fit, Part, fit, fitted, without
from asyncsim.clusters.cluster import DISCIPLINES, Cluster
from asyncsim.clusters.failures import crash
from asyncsim.clusters.laws import Constant, Empirical, Law, as_law
from asyncsim.traces.durations import Durations, choices, deaths, durations
from asyncsim.traces.trace import Trace

#: The parts that a trace has in which workers died.
_DEATHS, _AWAY = "time to a death", "time away"
#: Who is served next where visits wait for one another.
_QUEUES = tuple(name for name in DISCIPLINES if name != "lock_free")


class CalibrationWarning(UserWarning):
    """A trace has what no cluster has: its calibration may predict it badly."""


@dataclass(frozen=True)
class Calibration:
    """A cluster fitted to a trace, and what it was fitted to."""

    cluster: Cluster
    #: Durations and laws: compute, of all workers or of each, then service and latencies, and those of deaths.
    parts: tuple[Part, ...] = field(repr=False)
    notes: tuple[str, ...]  #: what the trace has that no cluster has, and how sure the discipline is
    durations: Durations = field(repr=False)  #: as they were recorded
    law: str  #: how the laws were chosen

    @property
    def table(self) -> pd.DataFrame:
        """One row per law.

        ``what``; ``samples``, and their ``mean`` and ``std`` (s) per local step; ``law``, in a few words, and its
        ``law_mean`` and ``law_std`` (s); ``error``, the standard error of the mean (s), were the durations independent;
        ``distance``, the largest difference of the distribution functions. Where deaths cut computations short, the
        samples are the completed ones; mean, std and distance are of Kaplan and Meier's distribution.
        """
        return pd.DataFrame([part.row() for part in self.parts])

    def resampled(self, generator: np.random.Generator) -> Cluster:
        """Return the cluster fitted to durations drawn anew from these: how well they determine it.

        Drawn are stretches of successive durations, of as many as the cube root of their number, so that their serial
        dependence is kept, and the families are chosen anew.

        References
        ----------
        Kuensch 1989, Annals of Statistics 17, 1217: the moving block bootstrap.
        """
        kinds = [_of_deaths(part, self.law) for part in self.parts]
        parts = [part.resampled(generator, kind) for part, kind in zip(self.parts, kinds, strict=True)]
        return _with_laws(self.cluster, parts)


def calibrate(
    trace: Trace,
    *,
    law: str = "best",
    per_worker: bool | None = None,
    latency_up: Law | float | str | None = None,
    discipline: str | None = None,
    warm_up: int | None = None,
) -> Cluster:
    """Return the cluster whose laws fit the durations of a trace, simulated or recorded.

    A worker's way down is from ``read_time`` to ``start_time``, its computation from there to ``send_time``, its way up
    to ``arrive_time``, and a service from ``serve_time`` to ``commit_time``, or from ``read_serve_time`` to
    ``read_time`` where reads are visits of their own. If a visit waits although the server is free, as real ones do
    that need a while to take it up, that is service as well. The time that messages take for their size is part of the
    latencies; but where separate read_then_write visits tell how long messages without parameters are under way, a
    bandwidth says what those with parameters take longer, as if both ways took the same. It is 1, and the size of a
    message in seconds then: only their quotient means something. `Calibration.resampled` keeps it as it is.

    Workers that died make a cluster with `asyncsim.failures.crash`: the time to the next death is exponential, with the
    workers' time at work per death as its mean, and the time away is drawn from the recorded ones. A computation that a
    death cut short is a censored observation: long computations die more often than short ones. So the mean of an
    exponential law is the computed time over the number of completed computations. The other families maximize the
    censored likelihood, and empirical laws use the estimate of Kaplan and Meier.

    Parameters
    ----------
    trace : Trace
        Of an asynchronous server.
    law : str
        ``"best"``: of the named families the one with the least BIC, each at its largest likelihood; the durations
        themselves if even that one is off by more than 0.1 somewhere in its distribution function, and by more than a
        sample of this size is by chance, or by a tenth in its mean. ``"empirical"``: the durations themselves. Or the
        name of a family, such as ``"gamma"``, for all that is not constant. With a window above one only exponential
        and gamma laws can be told, of which the sum is known.
    per_worker : bool, optional
        Whether each worker gets a law of its own for computing; by default if their laws together have a smaller BIC
        than one for all.
    latency_up : Law, number or text, optional
        The way up; by default as the trace has it. Where a trace does not tell when messages set off, it counts as
        computing by default, and is zero. ``"down"``: the law of the way down. What is given is taken out of the time
        from ``start_time`` to the arrival, a constant exactly, another law by mean and variance. Where a trace of
        separate read_then_write visits does not tell when requests to read set off, the default is the difference
        between the two ways around the read and the way down, by mean and variance; where they hardly differ a
        constant, with a warning.
    discipline : str, optional
        ``"fifo"``, ``"lowest_rank"`` or ``"random"``; by default the first that 95 % of the server's choices agree
        with. What is given is checked against them.
    warm_up : int, optional
        Commits left out at the start; by default one per worker, at most half of all. Every worker's first computation
        is always left out.

    Returns
    -------
    Cluster

    Raises
    ------
    InputError
        The trace was prescribed, has a policy or failures other than deaths; times are missing, negative or not
        finite; services overlap; a law has fewer than 20 durations to be fitted to; or an argument contradicts the
        trace.

    Warns
    -----
    CalibrationWarning
        The durations are no independent draws: they drift, are correlated, depend on how many compute at once, or had a
        link to share.

    Notes
    -----
    Computations that had not ended with the trace are not seen, so that of the last ones the short ones are: a bias of
    the order of one computation in those of each worker. In a recording of real workers a computation that a death cut
    short begins at its read, so that the way down counts as computing there.
    """
    found = examine(**locals())
    for note in found.notes:
        warnings.warn(f"trace: {note}", CalibrationWarning, stacklevel=2)
    return found.cluster


def examine(
    trace: Trace,
    *,
    law: str = "best",
    per_worker: bool | None = None,
    latency_up: Law | float | str | None = None,
    discipline: str | None = None,
    warm_up: int | None = None,
) -> Calibration:
    """Return what `calibrate` does, with the durations, how well the laws fit them, and notes in place of warnings."""
    require_choice("law", law, (*KINDS, *FAMILIES))
    if per_worker is not None:
        require_switch("per_worker", per_worker)
    found = durations(trace, warm_up)
    down = fitted("latency down", found.down, law)
    up, computed, notes = _uplink(found, latency_up, down.fit.law, law)
    compute = _compute(found._replace(compute=computed), trace, law, per_worker)
    service = fitted("service", found.service, law)
    # How much longer messages with parameters take, down and up together, than those without, where it is no chance.
    longer = 0.0
    if found.round_trip is not None and found.up is not None:
        longer = float(found.round_trip.mean() - found.up.mean() - found.down.mean())
        error = math.sqrt(sum(float(times.var()) / len(times) for times in (found.round_trip, found.up, found.down)))
        chance = max(ERRORS * error, NO_SPREAD * float(found.round_trip.mean()))
        longer = float(f"{longer:.9g}") if longer > chance else 0.0
    served = choices(trace)
    if discipline is None:
        discipline = trace.discipline if trace.discipline in _QUEUES else served.discipline
    require_choice("discipline", discipline, _QUEUES)
    if not served.agree_with(discipline):
        raise InputError(
            f"discipline = {discipline!r}: the order of service says {served.discipline!r}: {served}; leave it out"
        )
    frame = Cluster(
        workers=trace.workers,
        bandwidth=1.0 if longer else None,
        message_bytes=longer / 2 if longer else None,
        compute=Constant(1.0),
        window=trace.window,
        protocol=trace.protocol,
        exclusive=trace.protocol != "read_then_write" or not trace.source.separate_reads,
        discipline=discipline,
    )
    if trace.cluster is not None and trace.cluster.shared_bandwidth:
        notes.append(
            "messages waited for a link that they shared; here they are under way independently of one another, and "
            "queues and the spread of staleness differ"
        )
    parts = (*compute, service, up, down)
    died = deaths(trace)
    if len(died.between):
        if not died.away.sum() > 0:
            raise InputError("trace: a worker died and none came back; end the trace before, or start it again")
        for name, values in ((_DEATHS, died.between), (_AWAY, died.away)):
            part = Part(name, values, Fit(Constant(0.0), 0.0, 0, 0.0))
            parts = (*parts, part._replace(fit=fit(values, _of_deaths(part, law))))
    return Calibration(_with_laws(frame, parts), parts, (*dependence.notes(found), *notes), found, law)


def _compute(durations: Durations, trace: Trace, law: str, per_worker: bool | None) -> Sequence[Part]:
    """Return the law of computing, of all workers or of each."""
    seconds, workers, cancelled = durations.attempts
    completed = len(durations.compute)
    pooled = fitted("compute", seconds, law, trace.window, cancelled)
    if durations.compute.mean() <= 0:
        raise InputError("trace: computations take no time; record start_time when a computation begins")
    fewest = int(np.bincount(durations.worker, minlength=trace.workers).min())
    if trace.workers == 1 or per_worker is False or (per_worker is None and fewest < FEWEST):
        return [pooled]
    separate = []
    for worker in range(trace.workers):
        chosen = workers == worker
        its_cancelled = None if cancelled is None else cancelled[chosen]
        separate.append(fitted(f"compute of worker {worker}", seconds[chosen], law, trace.window, its_cancelled))
    different = sum(part.fit.bic(completed) for part in separate) < pooled.fit.bic(completed)
    if law == "empirical" or any(isinstance(part.fit.law, Empirical) for part in separate):
        # Kruskal and Wallis' test of ranks, as empirical laws have no BIC.
        samples = [part.uncensored for part in separate]
        different = bool(np.ptp(np.concatenate(samples)) > 0 and kruskal(*samples).pvalue < 1e-3)
    return separate if per_worker or different else [pooled]


def _uplink(found: Durations, given: Any, down: Law, law: str) -> tuple[Part, np.ndarray, list[str]]:
    """Return the law of the way up, the durations of computing without it, and notes."""

    def unfitted(up: Law) -> Part:
        return Part("latency up", np.zeros(0), Fit(up, 0.0, 0, 0.0))

    if given is not None:
        taken = down if given == "down" else as_law("latency_up", given)
        together = found.compute if found.up is None else found.compute + found.up
        return unfitted(taken), without("latency_up", together, taken), []
    if found.up is not None:
        return fitted("latency up", found.up, law), found.compute, []
    if found.round_trip is None:
        return unfitted(Constant(0.0)), found.compute, []
    notes = []
    try:
        times = without("latency down", found.round_trip, down)
    except InputError:  # what is left is less than the noise of what it is the difference of
        mean = max(0.0, float(found.round_trip.mean()) - down.mean)
        times = np.full(len(found.round_trip), mean)
        notes.append(
            f"the way up is taken for a constant, {mean:.2g} s: it is too short beside the way down for its law to be "
            "found; give latency_up"
        )
    up = fitted("latency up", times, law)
    return up, without("latency up", found.compute, up.fit.law), notes


def _of_deaths(part: Part, law: str) -> str:
    """Return how the law of a part is chosen: as all are, but for the times of deaths."""
    if part.name == _DEATHS:
        return "exponential"
    return "empirical" if part.name == _AWAY else law


def _with_laws(cluster: Cluster, parts: Sequence[Part]) -> Cluster:
    laws = {part.name: part.fit.law for part in parts}
    compute = [law for name, law in laws.items() if name.startswith("compute")]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # laws of their own may come out equal
        return replace(
            cluster,
            compute=compute[0] if len(compute) == 1 else tuple(compute),
            service=laws["service"],
            latency=(laws["latency up"], laws["latency down"]),
            failures=(crash(laws[_DEATHS], laws[_AWAY]),) if _DEATHS in laws else (),
        )
