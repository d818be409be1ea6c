"""Durations between the columns of a trace, and the order in which its server took visits."""

import dataclasses
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import pandas as pd

from asyncsim.base.errors import InputError
from asyncsim.clusters.policy import asynchronous
from asyncsim.traces.columns import CANCELLED, GOSSIP, arrays_of
from asyncsim.traces.trace import Trace
from asyncsim.traces.trace_summary import warm_up_of

#: Of the services that overlap with the one before, at most this share is a matter of clocks.
_OVERLAPS = 0.01
#: A discipline is believed if this share of the choices among waiting visits agrees with it.
_AGREES = 0.95
#: Fewer choices than these say nothing.
_FEWEST_CHOICES = 20
#: Times that must not pass in another order, with what lies between.
_ORDER = {
    ("read_time", "start_time"): "the way down",
    ("start_time", "send_time"): "a computation",
    ("send_time", "arrive_time"): "the way up",
    ("start_time", "arrive_time"): "a computation",
    ("arrive_time", "serve_time"): "a wait",
    ("serve_time", "commit_time"): "a service",
    ("read_arrive_time", "read_serve_time"): "a wait",
    ("read_serve_time", "read_time"): "a service",
}


class Cancelled(NamedTuple):
    """Computations that a worker's death cut short: arrays with an entry for each, seconds."""

    compute: (
        np.ndarray
    )  #: from the start to the death; the whole computation would have been longer
    worker: np.ndarray
    begin: np.ndarray  #: seconds since the start of the trace


class Durations(NamedTuple):
    """Durations in the order in which they ended, seconds: arrays with an entry per computation,
    unless said.
    """

    #: From the start of a computation until its message sets off; to its arrival where that time is
    #: not recorded. Completed computations only.
    compute: np.ndarray
    worker: np.ndarray  #: the worker of each
    begin: np.ndarray  #: its start, seconds since the start of the trace
    concurrent: np.ndarray  #: the number of other computations under way at that time
    service: (
        np.ndarray
    )  #: per visit, with the time in which the visit waited although the server was free
    up: np.ndarray | None  #: the way up after each computation; None where it is not recorded
    down: np.ndarray  #: per journey
    traveller: np.ndarray  #: the worker of each journey
    #: Per journey: way down and way up together, between a read visit and the write visit that
    #: follows it; None where a message is formed before it leaves.
    round_trip: np.ndarray | None
    cancelled: Cancelled

    @property
    def attempts(self) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        """Completed and cancelled computations in the order in which they ended.

        Their durations, their workers, and whether each was cancelled; None if none was.
        """
        cancelled = self.cancelled
        if not len(cancelled.compute):
            return self.compute, self.worker, None
        seconds = np.concatenate([self.compute, cancelled.compute])
        ends = np.concatenate([self.begin, cancelled.begin]) + seconds
        order = np.argsort(ends, kind="stable")
        worker = np.concatenate([self.worker, cancelled.worker])
        return seconds[order], worker[order], order >= len(self.compute)


def require_asynchronous(argument: str, trace: Trace) -> None:
    """Raise InputError unless a trace has times, and its server took up every message as it came.

    Computations may have gone with workers that died.
    """
    if not isinstance(trace, Trace):
        raise InputError(f"{argument} = {trace!r}: must be a Trace, simulated or recorded")
    if trace.protocol == "prescribed":
        raise InputError(
            f"{argument}: a prescribed trace, which has no times; give a recorded or a simulated "
            "one"
        )
    if trace.protocol == GOSSIP:
        raise InputError(
            f"{argument}: a trace without a server; only those of servers can be calibrated"
        )
    if trace.servers > 1:
        raise InputError(
            f"{argument}: made with servers = {trace.servers}; only traces of one server can be "
            "calibrated"
        )
    if trace.policy != asynchronous():
        raise InputError(
            f"{argument}: made under the policy {trace.policy}; only asynchronous traces can be "
            "calibrated"
        )
    if trace.windows_differ:
        raise InputError(
            f"{argument}: its workers have different windows; only traces of one window can be "
            "calibrated"
        )
    lost = ~trace.frame["outcome"].isin(["applied", "cancelled"]).to_numpy()
    if lost.any():
        row = int(np.argmax(lost))
        raise InputError(
            f"{argument}: outcome of row {row} is {trace.frame['outcome'].iloc[row]!r}; only a "
            "trace can be calibrated of which every message was applied, or went with its worker: "
            "record with an asynchronous server"
        )
    failures = () if trace.cluster is None else trace.cluster.failures
    refused = [failure for failure in failures if failure.name != "crash"]
    if refused:
        raise InputError(
            f"{argument}: has failures, {refused[0]}; only traces with crashes alone can be "
            "calibrated"
        )


def durations(trace: Trace, warm_up: int | None = None) -> Durations:
    """Return the durations of a trace.

    ``warm_up``: commits left out at the start; by default one per worker, at most half of all.
    Every worker's first job is left out in any case: no way down led to it, and real programs
    compile in it.
    """
    require_asynchronous("trace", trace)
    _check_times(trace.frame)
    _check_services(trace)
    trace = attended(trace)
    warm_up, frame = warm_up_of(trace, warm_up), trace.frame
    applied = frame["outcome"] == "applied"
    # Computations after a death are left out: they began from a read in a visit that is no row's.
    follows = applied.groupby(frame["worker"], sort=False).shift(fill_value=True)
    observed = ((np.cumsum(applied) > warm_up) & (frame["job"] > 0) & follows).to_numpy()
    used = observed & applied.to_numpy()
    starts, sent, arrived, stopped = arrays_of(
        frame, "start_time", "send_time", "arrive_time", "commit_time"
    )
    down, round_trip = starts - frame["read_time"].to_numpy(), None
    service = (frame["commit_time"] - frame["serve_time"]).to_numpy()[used]
    if trace.separate_reads:
        service = np.concatenate(
            [service, (frame["read_time"] - frame["read_serve_time"]).to_numpy()[used]]
        )
        if trace.protocol == "read_then_write":
            round_trip = (arrived - frame["push_time"].to_numpy())[used]
            pulled = trace.steps["push_read"].to_numpy()
            arrived = np.where(pulled >= 0, trace.reads["arrive_time"].to_numpy()[pulled], np.nan)
            committed = frame.groupby("worker", sort=False)["commit_time"].shift()
            down = starts - committed.to_numpy()
    has_arrived = np.isfinite(arrived)
    used = used & has_arrived  # a new array, as a column may be read-only
    tells = not np.isnan(sent).any()
    ends = sent if tells else arrived
    # A worker may also die after its computation, before its message sets off: that duration is
    # complete.
    died = observed & ~applied.to_numpy() & (stopped > starts)
    computed = used | (died & has_arrived & (ends < stopped))
    died &= ~computed
    first, last = np.sort(starts[has_arrived]), np.sort(ends[has_arrived])
    under_way = np.searchsorted(first, starts, side="right") - np.searchsorted(
        last, starts, side="right"
    )
    worker = frame["worker"].to_numpy()
    return Durations(
        (ends - starts)[computed],
        worker[computed],
        starts[computed],
        under_way[computed] - 1,
        service,
        (arrived - sent)[computed] if tells else None,
        down[used],
        worker[used],
        round_trip,
        Cancelled((stopped - starts)[died], worker[died], starts[died]),
    )


def attended(trace: Trace) -> Trace:
    """Return a trace in which every service begins as soon as the visit waits and the server is
    free.

    A real server takes a while to take a visit up, and can do nothing else meanwhile: that is
    service as well. A simulated trace stays as it is.
    """
    visits = _in_order(trace)
    arrive, serve, end = arrays_of(visits, "arrive", "serve", "end")
    free = np.concatenate([[0.0], np.maximum.accumulate(end)[:-1]])
    serve_times = np.empty(len(visits))
    serve_times[visits.index] = np.minimum(serve, np.maximum(arrive, free))
    is_served = (trace.steps["outcome"].cat.codes < CANCELLED).to_numpy()
    tables: dict[str, pd.DataFrame] = {}
    count = int(is_served.sum())
    for name, rows, times in (
        ("steps", np.flatnonzero(is_served), serve_times[:count]),
        ("reads", trace.read_visits.index, serve_times[count:]),
    ):
        table = getattr(trace, name)
        served = table["serve_time"].to_numpy(copy=True)
        served[rows] = times[: len(rows)]
        tables[name] = table.assign(serve_time=served)
    return dataclasses.replace(trace, **tables)


class Deaths(NamedTuple):
    """The times of some workers at work between deaths, and away, seconds."""

    #: The workers' time at work put end to end, cut where one died; its last part and its first are
    #: one, so that the mean is that of the time at work per death. Empty without deaths.
    between: np.ndarray
    away: np.ndarray  #: of those that came back, how long each time


def deaths(trace: Trace) -> pd.DataFrame:
    """Return the deaths of workers: simulated crashes, or computations lost with a worker.

    Columns: ``worker``, ``begin`` and ``end`` (s) of its absence; the end is infinite if it never
    came back. A lost computation is a row with the outcome ``"cancelled"``; its worker is back when
    it reads again.
    """
    spells = trace.absences[trace.absences["kind"] == "crash"].sort_values("begin")
    if len(spells):
        return spells[["worker", "begin", "end"]].fillna({"end": np.inf})
    names = ["worker", "read_arrive_time", "read_time", "start_time", "commit_time", "outcome"]
    rows = pd.concat(
        [trace.frame[names], trace.open_reads.reindex(columns=names)], ignore_index=True
    )
    later = rows.groupby("worker", sort=False).shift(-1)
    # A worker that resumes from its earlier read is back when it computes again.
    back = later["read_arrive_time"].where(
        later["read_arrive_time"] >= rows["commit_time"], later["start_time"]
    )
    spells = rows[["worker"]].assign(begin=rows["commit_time"], end=back.fillna(np.inf))
    return spells[rows["outcome"] == "cancelled"]


def times_of(spells: pd.DataFrame, workers: Iterable[int], end: float) -> Deaths:
    """Return the times between the deaths of some workers, and away, in a trace that ends at
    ``end``; ``spells`` as of `deaths`.
    """
    points, away, before = [], [], 0.0
    for worker in workers:
        began = 0.0
        chosen = spells[spells["worker"] == worker]
        for at, back in chosen[["begin", "end"]].itertuples(index=False, name=None):
            before += at - began
            points.append(before)
            began = min(back, end)
            away += [back - at] if back <= end else []
        before += end - began
    cuts = np.array(points)
    return Deaths(np.diff(cuts, append=cuts[:1] + before), np.array(away))


class Choices(NamedTuple):
    """The order in which a server chose among waiting visits."""

    total: int  #: the number of choices, with two or more waiting visits
    first: int  #: how often it chose the earliest arrival, and the lowest worker
    lowest: int

    @property
    def discipline(self) -> str:
        """First in first out, or else the lowest worker first, if 95 % of the choices agree; else
        at random.

        First in first out as well if there were fewer than 20 choices.
        """
        matches = [name for name in ("fifo", "lowest_rank") if self.agree_with(name)]
        return matches[0] if matches else "random"

    def agree_with(self, discipline: str) -> bool:
        """Return whether a discipline explains the choices; fewer than 20 agree with any."""
        if self.total < _FEWEST_CHOICES:
            return True
        threshold = _AGREES * self.total
        agrees = {"fifo": self.first >= threshold, "lowest_rank": self.lowest >= threshold}
        return agrees.get(discipline, not any(agrees.values()))

    def __str__(self) -> str:
        if not self.total:
            return "never two visits waited"
        shares = [f"{count / self.total:.0%}" for count in (self.first, self.lowest)]
        return (
            f"of {self.total} choices among waiting visits {shares[0]} were the first, {shares[1]} "
            "the lowest worker"
        )


def choices(trace: Trace) -> Choices:
    """Count how often a server chose the earliest waiting visit, and the lowest worker's."""
    worker, arrive, serve = arrays_of(_in_order(trace), "worker", "arrive", "serve")
    visits = np.arange(len(worker))
    # Visits are numbered in the order of service: only later ones may wait.
    earliest = np.append(np.minimum.accumulate(arrive[:0:-1])[::-1], np.inf)
    lowest = np.full(len(worker), trace.workers)
    for index in reversed(range(trace.workers)):
        rows = np.flatnonzero(worker == index)
        following = np.append(arrive[rows], np.inf)[np.searchsorted(rows, visits, side="right")]
        lowest[following < serve] = index
    is_choice = earliest < serve
    agrees = (is_choice, is_choice & (arrive <= earliest), is_choice & (worker <= lowest))
    return Choices(*(int(chosen.sum()) for chosen in agrees))


def _in_order(trace: Trace) -> pd.DataFrame:
    """Return `Trace.visits` in the order of service; waiting ones are last."""
    return trace.visits.sort_values(["serve", "end"])


def _check_times(frame: pd.DataFrame) -> None:
    tells = not frame["send_time"].isna().all()
    for (earlier, later), interval in _ORDER.items():
        if "send_time" in (earlier, later) and not tells:
            continue
        duration = (frame[later] - frame[earlier]).to_numpy()
        for holds, rule in (
            (np.isfinite(duration), "must be finite"),
            (duration >= 0, "must not be negative"),
        ):
            if not holds.all():
                row = int(np.argmin(holds))
                raise InputError(
                    f"trace: {interval} from {earlier} to {later} of row {row} lasts "
                    f"{duration[row]} s; it {rule}: "
                    "record all times on one clock, such as the server's"
                )


def _check_services(trace: Trace) -> None:
    serve, end = arrays_of(_in_order(trace), "serve", "end")
    overlaps = int(np.count_nonzero(serve[1:] < end[:-1]))
    if overlaps > _OVERLAPS * len(serve):
        raise InputError(
            f"trace: {overlaps} of {len(serve)} services begin before the one before has ended, "
            "and the server of a Cluster serves one at a time; record as serve_time when the visit "
            "has the server for itself"
        )
