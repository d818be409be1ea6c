"""The trace: the visits of workers to the server, and the staleness of each message."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from asyncsim.base import hooks
from asyncsim.base.console import counted
from asyncsim.base.errors import InputError
from asyncsim.base.markup import card
from asyncsim.traces.archive import load_trace, save_trace
from asyncsim.traces.columns import (
    GOSSIP,
)
from asyncsim.traces.samples import Audit, RolloutTables, audit, law_of_staleness
from asyncsim.traces.tables import Tables
from asyncsim.traces.trace_summary import per_worker, queue, summary, waits


@dataclass(frozen=True, eq=False)
class Trace(Tables):
    """The order and the times of all server visits.

    Four tables hold it, whatever their origin; `frame` joins them for readers.

    Attributes
    ----------
    steps : pandas.DataFrame
        One row per message or stopped computation: ``worker``, ``job``, ``local_steps``, ``read``
        (the row of `reads` that it was computed from), ``start_time``, ``send_time``,
        ``arrive_time``, ``serve_time``, ``commit_time``, ``outcome``, ``version``, ``push_read``
        (the row of `reads` with which its message was formed, if that is a separate visit; else
        -1), ``failed_by``, ``incarnation``, ``partner``, ``kept``. They mean the same as in
        `frame`.
    reads : pandas.DataFrame
        One row per read: ``worker``, the ``job`` that is computed from it, ``version``,
        ``arrive_time``, ``serve_time``, ``time`` (its end), and ``is_open``: whether no step has
        consumed it. With several servers also one row per ``shard`` of each read; the ``shard`` of
        a full read is -1. So also with groups of tensors (`asyncsim.prescribed`): there a full read
        has the version of its oldest shard, and its shards follow in the order of the full reads.
    messages : pandas.DataFrame
        One row per message that was taken up or is under way: its ``worker`` and ``step``, -1 for a
        visit that waits at the server and has no row yet; ``by``, the step that took it up, at a
        server the one that completed the version (-1: none so far, or the version was dropped for a
        restored one); ``taker``, a worker, or -1 for the server; ``weight``, its share of the
        sender's state; ``arrive_time`` (s), not a number if not recorded. Without a server a
        ``taker`` of -1 is a worker that died with the message, at ``arrive_time``.

        With several servers one row per part of a message: ``shard``, ``read`` and ``push_read``
        (rows of `reads`, as of a step), ``serve_time``, ``commit_time`` and ``outcome``; `parts`
        joins it with its reads. Its ``step`` is -1 if parts of the message are missing at the end.
    absences : pandas.DataFrame
        One row per absence of a worker, and per outage of the server (``worker`` -1): ``kind``
        (``"crash"``, ``"leave"``, ``"outage"``), ``begin``, ``end``, ``detected`` (s),
        ``from_row``, ``to_row``: the steps at which the server did not count the worker, the last
        exclusive; an outage ends before ``to_row``. ``version``: of the checkpoint restored after
        an outage; else -1. Values after the end are not a number.
    rollouts : RolloutTables or None
        The tables of samples, of a cluster with rollouts.
    frame : pandas.DataFrame
        One row per message, in the order in which they were served, and per cancelled computation.
        Times are seconds since the start.

        ``commit``
            0, 1, 2, ...: the rows, including discarded messages.
        ``worker``, ``job``
            The worker, and the number of the computation among its own, from 0.
        ``local_steps``
            Steps of the computation.
        ``read_version``, ``read_time``
            The version that the computation started from, and the end of the service that read it.
            ``read_arrive_time`` and ``read_serve_time``: the arrival and the begin of that visit.
            All are zero for a worker's first job.
        ``start_time``
            The begin of the computation.
        ``send_time``
            Its end, at which the message departs; with separate read_then_write visits, the request
            to read. For a cancelled computation, when it was stopped. Not a number if not recorded.
        ``push_version``, ``push_time``
            The central version with which the message was formed, and the time of that read: the
            version before the commit, at ``commit_time``; with separate read_then_write visits, the
            version of the preceding read visit.
        ``arrive_time``, ``serve_time``, ``commit_time``
            The message reaches the server, its service begins and ends; then it is applied. For a
            cancelled computation all three are when it was stopped.
        ``staleness``
            Versions between the read and the commit: the version before it less ``read_version``.
        ``version``
            The version after the commit.
        ``outcome``
            ``"applied"``: this message completed a version, with the buffered messages.
            ``"buffered"``: it goes into the next version. ``"discarded"``: served, without effect.
            ``"cancelled"``: a stopped computation, which sent no message.

        Under the policy `asyncsim.trials`, and with a grace window, a version may be made between
        two rows, of the buffered messages. The next computation after a cut trial starts from the
        same version without a visit: its ``read_arrive_time`` and ``read_serve_time`` are not a
        number.

        Without a server (``protocol`` is ``"gossip"``) there is one row per gradient, in the order
        in which they are applied, and the columns mean:

        ``read_version``, ``read_time``
            The version that the worker's previous row completed, and the begin of the computation.
            ``read_arrive_time`` is when that row was applied: in between the worker waited for
            others.
        ``arrive_time``, ``serve_time``, ``commit_time``
            When the gradient is applied to the worker's replica.
        ``sources``, ``weights``
            Lists: the rows, all earlier, whose messages were taken up for this one, ascending, and
            the share of each. See ``takes_up`` for when.
        ``kept``
            The share of its state that the worker kept, after its previous row, when it sent the
            rest; 1 in its first row.
        ``partner``
            The worker with which it averaged when this gradient was applied; -1: none.

        With failures, ``sources`` may contain an earlier row of the same worker: a returned share
        that no worker took up. The first row of a returning worker has as ``read_version`` the
        version whose replica it copied (0: the initial one), as ``read_arrive_time`` its return,
        and 1 as ``kept``.

        With failures ``outcome`` may also be ``"lost"``: a message that did not arrive, with the
        time-out as its ``arrive_time``, ``serve_time`` and ``commit_time``. A version may be made
        between two rows: from the buffered messages, when the death is detected for which a barrier
        waited; and when a checkpoint is restored. There are also:

        ``failed_by``
            ``"crash"`` and ``"leave"``: the computation, or its reply, was lost with its worker.
            ``"loss"``: its message was lost and given up; ``"resent"``: it was sent again, as the
            next row of its worker, with the same ``job``. Otherwise ``"nothing"``.
        ``incarnation``
            The number of losses of the worker's state before this computation.
        ``restored``
            The version of the checkpoint that the server restored since the previous row; -1: none.
        ``restores``
            The number of such restores; each makes a new version.

        With several servers a row is a message, whose parts are in ``parts``. A version counts
        messages; a message is read, or committed, with the last of its parts, whose times the row
        has. It is ``"discarded"`` if all its parts are.
    parts : pandas.DataFrame
        With several servers, one row per part of a message, in the order of ``commit_time``; the
        columns are as in ``frame``, and versions are of the part's shard. With one server,
        empty.

        ``part``
            0, 1, 2, ...: the rows.
        ``commit``
            The row of ``frame`` with the message; -1 if parts of it are missing at the end.
        ``shard``
            The server, from 0.
    """

    def __repr__(self) -> str:
        lost = len(self) - len(self.accepted)
        commits = f"{len(self) - lost} commits{f' and {lost} lost computations' if lost else ''}"
        servers = f" at {self.servers} servers" if self.servers > 1 else ""
        if self.shards > 1:
            servers = f" in {self.shards} groups of tensors"
        return (
            f"<Trace of {commits} by {counted(self.workers, 'worker')}{servers}, {self.protocol}, "
            f"seed {self.seed}>"
        )

    def _repr_html_(self) -> str:
        """Show the trace in a notebook, with its summary as a table."""
        return card(repr(self).strip("<>"), {} if self.rollouts else self.summary())

    def plot(self) -> Any:
        """Draw the staleness of commits and the workers' first steps; `asyncsim.plots` has more."""
        return hooks.plots().overview(self)

    @property
    def samples(self) -> pd.DataFrame:
        """The samples of a cluster with rollouts; see `asyncsim.traces.samples.RolloutTables`."""
        return self._rollouts().samples

    def staleness(self, weight: str = "samples") -> pd.Series:
        """Return the law of the samples' staleness; see
        `asyncsim.traces.samples.law_of_staleness`.
        """
        return law_of_staleness(self._rollouts(), weight)

    def check(self) -> Audit:
        """Compare ages and counts of samples; see `asyncsim.traces.samples.audit`."""
        tables = self._rollouts()
        assert self.cluster is not None
        return audit(tables, self.cluster)

    def _rollouts(self) -> RolloutTables:
        if self.rollouts is None:
            raise InputError(
                "trace: has no samples; simulate a cluster with rollouts=asyncsim.Rollouts(...)"
            )
        return self.rollouts

    def summary(self, warm_up: int | None = None) -> dict[str, float]:
        """Summarize the trace in numbers; see `asyncsim.traces.trace_summary.summary`."""
        return summary(self, warm_up)

    def per_worker(self, warm_up: int | None = None) -> pd.DataFrame:
        """Summarize each worker; see `asyncsim.traces.trace_summary.per_worker`."""
        return per_worker(self, warm_up)

    def queue(self) -> pd.DataFrame:
        """Count the visits at the server over time; see `asyncsim.traces.trace_summary.queue`.

        Without a server: the messages in flight.
        """
        return queue(self)

    def waits(self) -> np.ndarray:
        """Return the waits between workers (s); see `asyncsim.traces.trace_summary.waits`."""
        if self.protocol != GOSSIP:
            raise InputError(
                f"protocol = {self.protocol!r}: workers wait for a server, not for each other; see "
                "summary()"
            )
        return waits(self)

    def save(self, path: str | os.PathLike) -> Path:
        """Write one parquet file, a row with a list for each column; on failure, nothing.

        The same trace gives the same bytes.

        Returns
        -------
        pathlib.Path
            The file.

        Raises
        ------
        InputError
            The file exists already, or cannot be written.
        """
        return save_trace(self, path)

    @classmethod
    def load(cls, path: str | os.PathLike) -> "Trace":
        """Read a trace that `save` wrote.

        Raises
        ------
        InputError
            No such file; a truncated or damaged one; not a trace; or a trace of another format.
        """
        return load_trace(cls, path)
