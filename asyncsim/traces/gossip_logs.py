"""A trace without a server, from the log of its workers: the order of gradients, and shares."""

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

    def row_of(argument: str, row: int, pair: Any) -> int:
        """Return the row of a source."""
        try:
            return numbers[tuple(int(part) for part in pair)]
        except (KeyError, TypeError, ValueError):
            raise InputError(
                f"{argument}: a source of row {row} is {pair!r}; it must be a pair (worker, job) "
                "that is there"
            ) from None

    try:
        sources = [list(names) for names in rows["sources"]]
        weights = [[float(weight) for weight in shares] for shares in rows["weights"]]
    except (TypeError, ValueError) as error:
        raise InputError(f"visits: sources and weights must be lists ({error})") from None
    for row, sent, shares in zip(rows["row"], sources, weights, strict=True):
        if len(sent) != len(shares):
            raise InputError(
                f"visits: row {row} has {len(sent)} sources and {len(shares)} weights; give a "
                "weight for each source"
            )
    earlier = [
        [row_of("visits", row, name) for name in names]
        for row, names in zip(rows["row"], sources, strict=True)
    ]
    order = _order_of(rows, earlier, source.workers)
    place = {row: number for number, row in enumerate(order)}
    ordered = rows.loc[order].reset_index(drop=True)
    ordered["commit_time"] = ordered["commit_time"].cummax()
    ordered = ordered.assign(
        send_time=ordered.get("send_time", np.nan),
        local_steps=window,
        kept=ordered["kept"].astype(float),
    )
    messages = [
        (place[sent], by, weight)
        for by, row in enumerate(order)
        for sent, weight in zip(earlier[row], weights[row], strict=True)
    ]
    of_messages = ("step", "by", "weight")
    taken_up = dict(zip(of_messages, np.array(messages, float).reshape(-1, 3).T, strict=True))
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
    step = [
        place[row_of("in_flight", row, name)] for row, name in enumerate(flying.table["source"])
    ]
    trace = trace_without_server(
        source,
        {name: ordered[name].to_numpy() for name in _GOSSIP_RECORD},
        taken_up,
        columns | {"step": step, "arrive_time": arrives},
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


def _order_of(rows: pd.DataFrame, earlier: list[list[int]], workers: int) -> list[int]:
    """Order the gradients of workers by time, each after its sources, the ``earlier`` rows, and
    after the previous row of each replica that it changes.
    """
    worker, partner, time = (rows[name].tolist() for name in ("worker", "partner", "commit_time"))
    sorter, last = graphlib.TopologicalSorter[int](), dict[int, int]()
    averages, everyone = max(partner) >= 0, set(range(workers))
    # Rows are sorted by time; averages of an instant also by the number of their gradient.
    for row in rows.sort_values(["commit_time", "job"]).index if averages else rows.index:
        replicas = {worker[row], partner[row]} & everyone
        sorter.add(row, *earlier[row], *(last[replica] for replica in replicas if replica in last))
        last |= dict.fromkeys(replicas, row)
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
