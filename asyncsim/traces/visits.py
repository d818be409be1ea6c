"""A trace from visits that a real server recorded: what its log has to say, and what follows from
it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np
import pandas as pd

from asyncsim.base.errors import InputError, require_count
from asyncsim.clusters.cluster import Cluster
from asyncsim.clusters.laws import Constant
from asyncsim.clusters.policy import Policy, as_policy
from asyncsim.traces.bookkeeping import (
    COMMIT_RECORD,
    reads_of_commits,
    trace_of,
    with_first,
)
from asyncsim.traces.columns import (
    COLUMNS,
    GOSSIP,
    OUTCOMES,
    READ_COLUMNS,
)
from asyncsim.traces.gossip_logs import trace_of_gossip
from asyncsim.traces.logs import CLOCK, Log, count_workers, put_in_order
from asyncsim.traces.trace import Trace

Table: TypeAlias = pd.DataFrame | Mapping[str, Sequence[Any]] | Sequence[Mapping[str, Any]]

#: The times of a visit in the order in which they pass; all but these are needed.
COMMIT_TIMES = ("start_time", "send_time", "arrive_time", "serve_time", "commit_time")
_READ_TIMES = ("read_arrive_time", "read_serve_time", "read_time")
_OPTIONAL = ("send_time",)
_PRESENT = ("worker", "arrive_time")
#: Columns that are computed, and checked if present.
_COUNTED = tuple(
    name for name, unit in COLUMNS.items() if unit != "s" and name not in ("worker", "outcome")
)


def recorded(
    visits: Table,
    *,
    workers: int | None = None,
    reads: Table | None = None,
    protocol: str = "exchange",
    exclusive: bool = True,
    window: int = 1,
    begin: float | None = None,
    seed: int = 0,
    present: Table | None = None,
    takes_up: str = "read",
    in_flight: Table | None = None,
    policy: Policy | str = "asynchronous()",
) -> Trace:
    """Build the trace of a real run from its server's record of each visit.

    The smallest log has five numbers for each commit: ``worker``, ``start_time``, ``arrive_time``,
    ``serve_time`` and ``commit_time``. Jobs, versions and staleness are counted from these: every
    worker holds version 0 at the begin, and its job ``j`` computes from its read ``j``.

    Parameters
    ----------
    visits : table
        A pandas DataFrame, a dict of columns or a list of dicts; one row per commit, in any order.

        ``worker``
            From 0. The begin of the computation, seconds. May be left out if ``begin`` is given,
            when workers have separate clocks: then it is the end of the read's service, and the way
            down counts as computing.
        ``send_time``
            The departure of the message. May be left out: then the way up counts as computing.
        ``arrive_time``, ``serve_time``, ``commit_time``
            When the message reached the server's queue, when its service began, and when it was
            applied.
        ``outcome``
            May be left out; ``"applied"``, or ``"cancelled"`` for a lost computation, whose three
            times above are when it was stopped. Under a policy also ``"buffered"`` and
            ``"discarded"``; ``"applied"`` is then the message that completes a version.

        Other columns of a trace are allowed, and must agree with the counted values.

        Without a server (``protocol="gossip"``) workers record their own gradients, each with
        ``start_time``, ``commit_time``, ``sources``, ``weights`` and ``kept`` as a trace has them,
        and ``partner`` if they averaged in pairs. A source is a pair (worker, which of its
        gradients, from 0). ``job`` may be left out: a worker's gradients then come in the order of
        ``commit_time``.
    workers : int, optional
        The number of workers, numbered from 0; by default one more than the largest in ``visits``,
        and then each needs a visit there.
    reads : table, optional
        All reads but the first of every worker, one row each: ``worker``, ``read_arrive_time``,
        ``read_serve_time``, ``read_time``. Required if reads are separate visits, after a lost
        computation, and under a policy by which workers wait for the answer. ``read_version`` may
        be left out: it is the number of commits by ``read_time``. If present, it decides which came
        first where a read and a commit have the same time.
    protocol, exclusive, window
        The form of a visit, and the local steps per commit, as in `asyncsim.Cluster`; ``"gossip"``
        without a server.
    begin : float, optional
        The clock's reading when the workers had version 0; by default the first ``start_time``. The
        trace's times are counted from it.
    seed : int
        The seed of the run, for the record; give it to `asyncsim.replay` as well, for the same
        batches.
    present : table, optional
        ``worker`` and ``arrive_time`` of the visits that waited or were served when the last commit
        was applied.
    takes_up : str
        Without a server: whether messages were mixed in before the gradient, ``"read"``, or when it
        was applied, ``"commit"``.
    in_flight : table, optional
        Without a server, the messages that no gradient has taken up: ``source``, ``taker``,
        ``weight`` and, if known, ``arrive_time``.
    policy : Policy or str
        The timing policy under which the outcomes came about.

    Returns
    -------
    Trace
        Without a cluster; `asyncsim.calibrate` fits one. Without a server gradients have no total
        order: the rows have one that agrees with each worker's order and with the sources, and else
        with the times. A ``commit_time`` before the previous row's, as clocks of machines differ,
        is set to that.

    Raises
    ------
    InputError
        A column is missing; a worker has no visit, and ``workers`` is not given; a value is not
        finite, or a time is before the one that it follows; reads and commits do not fit together;
        a column contradicts the counted values. Row numbers in errors are the table's, from 0.

    Examples
    --------
    >>> import asyncsim
    >>> log = [(0, 0.0, 2.0, 2.0, 2.5), (1, 0.0, 2.1, 2.5, 3.0), (0, 2.5, 4.0, 4.0, 4.5)]
    >>> names = ("worker", "start_time", "arrive_time", "serve_time", "commit_time")
    >>> trace = asyncsim.recorded([dict(zip(names, row)) for row in log])
    >>> trace.frame[["worker", "job", "read_version", "staleness"]].to_numpy().tolist()
    [[0, 0, 0, 0], [1, 0, 0, 1], [0, 1, 1, 1]]
    """
    policy = as_policy(policy)
    if protocol == GOSSIP:
        return trace_of_gossip(visits, workers, window, begin, seed, takes_up, in_flight, policy)
    optional = _OPTIONAL if begin is None else ("start_time", *_OPTIONAL)
    required = ("worker", *(name for name in COMMIT_TIMES if name not in optional))
    log = Log.of("visits", visits, required)
    log.take_times([name for name in COMMIT_TIMES if name in log.table])
    return trace_of_log(
        log,
        workers,
        reads,
        begin,
        seed,
        present,
        window=window,
        protocol=protocol,
        exclusive=exclusive,
        policy=policy,
    )


def trace_of_log(
    log: Log,
    workers: int | None = None,
    reads: Table | None = None,
    begin: Any = None,
    seed: int = 0,
    present: Table | None = None,
    **form_of_visits: Any,
) -> Trace:
    """Build the trace of a log whose times are read; the other arguments are as of `recorded`."""
    if log.table.empty:
        raise InputError(f"{log.name}: holds no row; record one for each commit")
    seed = require_count("seed", seed, minimum=0)
    begin, workers = log.begin(begin), count_workers(log, workers)
    form = Cluster(workers, Constant(1.0), **form_of_visits)  # of a visit, not its duration
    put_in_order(log, COMMIT_TIMES, begin, form.workers)
    commits = log.table
    waits = _side_log("present", present, _PRESENT, log, begin, form.workers)
    waiting = waits.table = waits.table.sort_values("worker")
    last = float(commits["commit_time"].max())
    is_unique = ~waiting["worker"].duplicated()
    waits.require("worker", is_unique, "must differ in each row: no worker waits twice")
    in_trace = waiting["arrive_time"] <= last
    rule = f"must not be after the last commit, at {last:g} from the begin"
    waits.require("arrive_time", in_trace, rule)
    commit_columns = {
        name: commits[name].to_numpy() if name in commits else np.full(len(commits), np.nan)
        for name in COMMIT_RECORD
    }
    outcome = _outcomes(log)
    applied = outcome == "applied"
    if reads is None and form.separate_reads:
        raise InputError(
            f"reads: missing; with protocol {form.protocol!r} in two visits the reads have a table "
            "of their own"
        )
    if reads is None and (form.policy.chooses_when_to_reply or (outcome == "cancelled").any()):
        raise InputError(
            "reads: missing; after a lost computation, or where the server delays its answer, the "
            "next read is no part of a commit: give all reads"
        )
    codes = pd.Categorical(outcome, OUTCOMES).codes
    commit_columns |= {"outcome": codes, "version": np.cumsum(applied)}
    if reads is None:
        read_columns = reads_of_commits(form, commit_columns)
    else:
        served = _side_log("reads", reads, ("worker", *_READ_TIMES), log, begin, form.workers)
        reader = served.table["worker"].to_numpy()
        _check_reads(form, commits["worker"].to_numpy(), reader)
        served.table["read_version"] = _read_versions(form, served, commits[applied])
        read_columns = {
            name: served.table[column].to_numpy() for name, column in READ_COLUMNS.items()
        }
        read_columns = with_first({**read_columns, "worker": reader}, form.workers)
    present_columns = {name: waiting[name].to_numpy() for name in _PRESENT}
    trace = trace_of(form, seed, commit_columns, read_columns, present_columns)
    steps = trace.steps
    if "start_time" not in commits:
        steps = steps.assign(start_time=trace.reads["time"].to_numpy()[steps["read"]])
    trace = replace(trace, cluster=None, recorded_policy=str(form.policy), steps=steps)
    _check_counted(log, trace.frame)
    return trace


def _side_log(
    argument: str, rows: Any, required: tuple[str, ...], visits: Log, begin: float, workers: int
) -> Log:
    """Read an optional table, in order; empty if it is missing."""
    log = Log.of(argument, {name: [] for name in required} if rows is None else rows, required)
    log.take_times(required[1:], like=visits)
    put_in_order(log, required[1:], begin, workers)
    return log


def _outcomes(log: Log) -> np.ndarray:
    """Return the outcome of each row, ``[rows]``; by default all are applied."""
    if "outcome" not in log.table:
        return np.full(len(log.table), "applied")
    outcome = log.table["outcome"].astype(str)
    known = [name for name in OUTCOMES if name != "lost"]
    rule = f"must be one of {', '.join(map(repr, known))}"
    log.require("outcome", outcome.isin(known), rule)
    return outcome.to_numpy()


def _read_versions(form: Cluster, log: Log, commits: pd.DataFrame) -> np.ndarray:
    """Return the versions read, counted by the times of the ``commits``, ``[reads]``.

    If a read and a commit have the same time, ``read_version`` decides which came first; without it
    the commit did, or the read if one visit reads first. The protocol decides for the worker's own
    commit in the same visit.
    """
    reads, times = log.table, commits["commit_time"].to_numpy()
    lowest, highest = (
        np.searchsorted(times, reads["read_time"], side=side) for side in ("left", "right")
    )
    before_own = form.protocol == "read_then_write" and not form.separate_reads
    counted = lowest if before_own else highest
    if not form.separate_reads:
        visits = set(zip(commits["worker"], commits["commit_time"], strict=True))
        is_own = np.array(
            [visit in visits for visit in zip(reads["worker"], reads["read_time"], strict=True)],
            int,
        )
        lowest, highest = (lowest, highest - is_own) if before_own else (lowest + is_own, highest)
    if "read_version" in reads:
        stated = log.numbers("read_version")
        agrees = (lowest <= stated) & (stated <= highest) & (stated % 1 == 0)
        first = int(np.argmin(agrees))
        choices = " or ".join(map(str, dict.fromkeys((lowest[first], highest[first]))))
        rule = f"must be {choices}, the number of commits by read_time; correct it or leave it out"
        log.require("read_version", agrees, rule)
        counted = stated
    return counted.astype(np.float64)


def _check_reads(form: Cluster, worker: np.ndarray, reader: np.ndarray) -> None:
    """Raise InputError unless every job has one read."""
    jobs, reads = (np.bincount(rows, minlength=form.workers) for rows in (worker, reader))
    # The first job computes from version 0. With the pull before its commit a job needs the next
    # read as well.
    lowest = (
        jobs
        if form.separate_reads and form.protocol == "read_then_write"
        else np.maximum(jobs - 1, 0)
    )
    wrong = (reads < lowest) | (reads > lowest + 1)
    if wrong.any():
        index = int(np.argmax(wrong))
        raise InputError(
            f"reads: worker {index} has {reads[index]} for its {jobs[index]} computations; with "
            f"protocol {form.protocol!r} it must have {lowest[index]} or {lowest[index] + 1}, the "
            "first of version 0 not counted"
        )


def _check_counted(log: Log, frame: pd.DataFrame) -> None:
    """Raise InputError for a computation before its read, or a column unlike the count."""
    first = next(name for name in COMMIT_TIMES if name in log.table)
    late = frame[first] >= frame["read_time"]
    rule = (
        f"must not be before its read was served: a worker has one computation in flight; {CLOCK}"
    )
    log.require(first, late, rule)
    is_formed = frame["push_time"] <= frame["commit_time"]
    log.require("commit_time", is_formed, f"must not be before the read for its message; {CLOCK}")
    for name in _COUNTED:
        if name in log.table:
            counted = frame[name].to_numpy()
            agrees = log.table[name] == counted
            rule = (
                f"must be {counted[np.argmin(agrees)]}, counted from the times; correct it or "
                "leave it out"
            )
            log.require(name, agrees, rule)
