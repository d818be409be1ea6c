"""A trace without a server, from the log of its workers: the order of gradients, and shares."""

import copy
import graphlib
import heapq
from typing import Any

import numpy as np
import pandas as pd

from asyncsim.base.errors import InputError, require_choice, require_count
from asyncsim.clusters.policy import Policy
from asyncsim.traces.bookkeeping import trace_without_server
from asyncsim.traces.columns import GOSSIP, TAKES_UP, Source, arrays_of, previous_rows
from asyncsim.traces.logs import Log, count_workers, put_in_order
from asyncsim.traces.trace import Trace

_GOSSIP_RECORD = (
    "worker",
    "local_steps",
    "start_time",
    "send_time",
    "commit_time",
    "partner",
    "kept",
)
_GOSSIP_TIMES = ("start_time", "send_time", "commit_time")
#: By how much shares that sum to one may miss it.
_ROUND_OFF = 1e-9
_SHARE = "must be above 0 and at most 1"


def trace_of_gossip(
    visits: Any,
    workers: int | None,
    window: int,
    begin: float | None,
    seed: int,
    takes_up: str,
    in_flight: Any,
    policy: Policy,
) -> Trace:
    """Build the trace of workers that recorded their gradients and the messages mixed in."""
    require_choice("takes_up", takes_up, TAKES_UP)
    window, seed = require_count("window", window), require_count("seed", seed, minimum=0)
    required = ("worker", "start_time", "commit_time", "sources", "weights", "kept")
    log = Log.of("visits", visits, required)
    if log.table.empty:
        raise InputError("visits: holds no row; record one for each gradient")
    times = [name for name in _GOSSIP_TIMES if name in log.table]
    log.take_times(times)
    begin, workers = log.begin(begin), count_workers(log, workers)
    source = Source(
        workers=workers,
        protocol=GOSSIP,
        window=window,
        seed=seed,
        takes_up=takes_up,
        recorded_policy=str(policy),
    )
    put_in_order(log, times, begin, source.workers)
    for name in {"job", "kept", "partner"} & set(log.table):
        log.table[name] = log.numbers(name)
    if "job" in log.table:
        log.table = log.table.sort_values("job", kind="stable").reset_index(drop=True)
    rows = log.table
    job = rows.groupby("worker").cumcount()
    if "job" in rows:
        log.require("job", rows["job"] == job, "must count a worker's gradients from 0")
    rows = rows.assign(job=job, partner=rows.get("partner", pd.Series(-1, rows.index)).astype(int))
    pairs = zip(rows["worker"], job, strict=True)
    numbers: dict[Any, int] = {pair: row for row, pair in enumerate(pairs)}

    def row_of(pair: Any) -> int:
        """Return the row of a source, -1 for none."""
        try:
            return numbers[tuple(int(part) for part in pair)]
        except (KeyError, TypeError, ValueError):
            return -1

    def rows_of(log: Log, column: str) -> np.ndarray:
        """Return the rows of a column of sources."""
        sources = np.array([row_of(pair) for pair in log.table[column]], np.int64)
        log.require(column, sources >= 0, "must be a pair (worker, job) that is there")
        return sources

    try:
        counts = rows[["sources", "weights"]].map(len)
    except TypeError as error:
        raise InputError(f"visits: sources and weights must be lists ({error})") from None
    is_paired = counts["sources"] == counts["weights"]
    log.require("weights", is_paired, "must have a weight for each source")
    messages, sends = copy.copy(log), rows[counts["sources"] > 0]
    messages.table = sends.assign(by=sends.index).explode(["sources", "weights"], ignore_index=True)
    by, step = messages.table["by"].to_numpy(), rows_of(messages, "sources")
    weights = messages.numbers("weights")
    order = _order_of(rows, by, step, source.workers)
    place = np.argsort(order)
    ordered = rows.loc[order].reset_index(drop=True)
    ordered["commit_time"] = ordered["commit_time"].cummax()
    ordered = ordered.assign(send_time=ordered.get("send_time", np.nan), local_steps=window)
    names = ("source", "taker", "weight")
    flying = Log.of(
        "in_flight", dict.fromkeys(names, ()) if in_flight is None else in_flight, names
    )
    columns = {name: flying.numbers(name) for name in names[1:]}
    is_taker = np.isin(columns["taker"], np.arange(source.workers))
    flying.require("taker", is_taker, f"must be a worker from 0 to {source.workers - 1}")
    flying.require("weight", _is_share(columns["weight"]), _SHARE)
    arrives = np.full(len(flying.table), float(ordered["commit_time"].iloc[-1]))
    if "arrive_time" in flying.table:
        flying.take_times(["arrive_time"], like=log)
        arrives = flying.table["arrive_time"].to_numpy() - begin
    trace = trace_without_server(
        source,
        {name: ordered[name].to_numpy() for name in _GOSSIP_RECORD},
        {"step": place[step], "by": place[by], "weight": weights},
        columns | {"step": place[rows_of(flying, "source")], "arrive_time": arrives},
        {"start_time": np.full(source.workers, np.nan)},
    )
    log.table = ordered
    _require_shares(log, trace)
    return trace


def _is_share(weights: np.ndarray) -> np.ndarray:
    return (weights > 0) & (weights <= 1 + _ROUND_OFF)


def _require_shares(log: Log, trace: Trace) -> None:
    """Raise InputError unless each row's state is kept, sent and taken up exactly once."""
    rows, workers = len(trace), trace.workers
    worker, kept, partner = arrays_of(trace.steps, "worker", "kept", "partner")
    row, sent, weight = arrays_of(trace.taken_up, "row", "source", "weight")
    previous = previous_rows(worker)
    shares = 1.0 - trace.kept_after
    goes_on = previous >= 0
    shares += np.bincount(previous[goes_on], kept[goes_on], rows)
    is_last = np.bincount(previous[goes_on], minlength=rows) == 0
    is_unique = ~pd.MultiIndex.from_arrays([worker[row], sent]).duplicated()

    def everywhere(holds: np.ndarray) -> np.ndarray:
        """Return the mask of rows whose messages all obey a rule."""
        return np.bincount(row[~holds], minlength=rows) == 0

    for column, holds, rule in (
        ("sources", everywhere(worker[sent] != worker[row]), "must be rows of other workers"),
        ("sources", everywhere(is_unique), "must be taken up only once by a worker"),
        ("weights", everywhere(_is_share(weight)), _SHARE),
        ("kept", (kept >= 0) & (kept <= 1 + _ROUND_OFF), "must be from 0 to 1"),
        ("kept", (kept == 1) | goes_on, "must be 1 in the first row of a worker"),
        (
            "weights",
            (shares <= 1 + _ROUND_OFF) & (is_last | (shares >= 1 - _ROUND_OFF)),
            "are of rows of which more, or less, than all is taken up, kept or in flight",
        ),
        (
            "partner",
            np.isin(partner, np.arange(-1, workers)),
            f"must be a worker from 0 to {workers - 1}, or -1 for none",
        ),
        ("partner", partner != worker, "must be another worker"),
    ):
        log.require(column, holds, rule)


def _order_of(rows: pd.DataFrame, by: np.ndarray, step: np.ndarray, workers: int) -> list[int]:
    """Order the gradients of workers by time, each after its sources, and after the previous row of
    each replica that it changes. Row ``by`` takes up the message of row ``step``.
    """
    worker, partner, time = (rows[name].tolist() for name in ("worker", "partner", "commit_time"))
    sorter, last = graphlib.TopologicalSorter[int](), dict[int, int]()
    averages, everyone = max(partner) >= 0, set(range(workers))
    # Rows are sorted by time; averages of an instant also by the number of their gradient.
    for row in rows.sort_values(["commit_time", "job"]).index if averages else rows.index:
        replicas = {worker[row], partner[row]} & everyone
        sorter.add(row, *(last[replica] for replica in replicas if replica in last))
        last |= dict.fromkeys(replicas, row)
    for taker, source in zip(by.tolist(), step.tolist(), strict=True):
        sorter.add(taker, source)
    try:
        sorter.prepare()
    except graphlib.CycleError as error:
        row = rows["row"][min(error.args[1])]
        raise InputError(
            f"visits: row {row} takes up a later row, by way of its sources; correct the sources"
        ) from None
    ready: list[tuple[float, int, int]] = []
    order: list[int] = []
    while sorter.is_active():
        for row in sorter.get_ready():
            heapq.heappush(ready, (time[row], worker[row], row))
        order.append(heapq.heappop(ready)[-1])
        sorter.done(order[-1])
    return order
