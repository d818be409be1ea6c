"""Recorded visits: a log gives the trace that a simulation of the same visits gives, and wrong logs
are told.
"""

import numpy as np
import pandas as pd
import pytest

from asyncsim import Cluster, InputError, Trace, recorded, simulate
from asyncsim.base.files import field_values
from asyncsim.traces.bookkeeping import COMMIT_RECORD
from asyncsim.traces.columns import Source

PROTOCOLS = {
    "exchange": {},
    "read_then_write": {"protocol": "read_then_write"},
    "read_then_write, two visits": {"protocol": "read_then_write", "exclusive": False},
    "write_then_read": {"protocol": "write_then_read", "window": 2},
}
READ_TIMES = ["read_arrive_time", "read_serve_time", "read_time"]
SMALLEST = [name for name in COMMIT_RECORD if name != "send_time"]
LOG = pd.DataFrame(
    [
        (0, 0.0, 2.0, 2.0, 2.5),
        (1, 0.0, 2.1, 2.5, 3.0),
        (0, 2.5, 4.0, 4.0, 4.5),
        (1, 3.0, 4.2, 4.5, 5.0),
    ],
    columns=SMALLEST,
)

#: The reads that are part of the first three commits.
READS = pd.DataFrame({"worker": [0, 1, 0]}).assign(**{name: [2.5, 3.0, 4.5] for name in READ_TIMES})


def simulated(**options):
    return simulate(
        Cluster(5, "gamma(1, 0.5)", "exponential(0.1)", "exponential(0.1)", **options), 300, seed=1
    )


def all_reads(trace):
    tables = [
        table.loc[table["job"] > 0, ["worker", *READ_TIMES]]
        for table in (trace.frame, trace.open_reads)
    ]
    return pd.concat(tables)


@pytest.mark.parametrize("with_reads", [False, True])
@pytest.mark.parametrize("options", PROTOCOLS.values(), ids=PROTOCOLS)
def test_the_log_of_a_simulation_gives_its_trace(options, with_reads):
    """In any order, on a clock that does not begin at zero, and whether reads are told or follow
    from the commits.
    """
    trace = simulated(**options)
    if trace.separate_reads > with_reads:
        pytest.skip("reads of their own must be told")
    log = trace.frame[list(COMMIT_RECORD)].sample(frac=1, random_state=0)
    made = recorded(
        log,
        reads=all_reads(trace) if with_reads else None,
        present=trace.present,
        seed=1,
        **options,
    )
    for name in ("frame", "open_reads", "present"):
        tables = [getattr(made, name), getattr(trace, name)]
        if name == "open_reads":
            tables = [
                table.sort_values(["worker", "job"]).reset_index(drop=True) for table in tables
            ]
        pd.testing.assert_frame_equal(*tables, check_exact=True)
    assert field_values(made, Source) == field_values(trace, Source) | {"cluster": None}


def test_without_the_workers_clocks():
    """The computation is taken to begin when its read was served."""
    frame = recorded(LOG.drop(columns="start_time"), begin=0.0).frame
    assert frame["start_time"].tolist() == [0.0, 0.0, 2.5, 3.0]


def test_when_messages_set_off_may_be_told():
    """Without it sending counts as computing."""
    log = LOG.assign(send_time=[1.5, 1.1, 3.5, 4.2])
    assert recorded(log, begin=0.0).frame["send_time"].tolist() == [1.5, 1.1, 3.5, 4.2]
    assert recorded(LOG).frame["send_time"].isna().all()
    shares = [recorded(visits).summary(warm_up=0) for visits in (log, LOG)]
    for told, summary in zip((True, False), shares, strict=True):
        spent = 10 * np.array(
            [summary[f"{what}_share"] for what in ("computing", "sending", "waiting", "served")]
        )
        assert spent == pytest.approx([5.3, 2.0, 0.7, 2.0] if told else [7.3, 0.0, 0.7, 2.0])
    with pytest.raises(
        InputError, match=r"arrive_time of row 1 is 2\.1; it must not be before send_time"
    ):
        recorded(LOG.assign(send_time=[1.5, 2.2, 3.5, 4.2]))


def test_a_worker_that_is_killed_and_reads_afresh(tmp_path):
    """Its lost computation is a row; what it commits next was computed from the fresh read."""
    log = LOG.assign(outcome="applied")
    lost = {
        "worker": 0,
        "start_time": 4.5,
        "arrive_time": 4.7,
        "serve_time": 4.7,
        "commit_time": 4.7,
    }
    after = {
        "worker": 0,
        "start_time": 6.0,
        "arrive_time": 7.0,
        "serve_time": 7.0,
        "commit_time": 7.5,
    }
    log = pd.concat(
        [log, pd.DataFrame([{**lost, "outcome": "cancelled"}, {**after, "outcome": "applied"}])]
    )
    reads = log.rename(columns={"arrive_time": "read_arrive_time", "serve_time": "read_serve_time"})
    reads = reads.assign(read_time=reads["commit_time"], version=0)
    reads.loc[reads["outcome"] == "cancelled", READ_TIMES] = 5.8
    trace = recorded(log, reads=reads)
    worker_0 = trace.frame[trace.frame["worker"] == 0]
    assert worker_0["job"].tolist() == [0, 1, 2, 3]
    assert worker_0["read_time"].tolist() == [0.0, 2.5, 4.5, 5.8]
    assert worker_0["read_version"].tolist() == [0, 1, 3, 4]
    assert worker_0["staleness"].tolist() == [0, 1, 0, 0]
    assert len(trace.accepted) == 5
    assert (
        Trace.load(trace.save(tmp_path / "trace.parquet")).frame["outcome"].tolist()[3]
        == "cancelled"
    )


def test_reads_that_are_missing():
    trace = simulated(protocol="write_then_read")
    reads = all_reads(trace)
    reads = reads[reads["worker"] != 3]
    with pytest.raises(
        InputError, match=r"reads: worker 3 has 0 for its \d+ computations; .* must have \d+ or \d+"
    ):
        recorded(trace.frame[list(COMMIT_RECORD)], reads=reads, protocol="write_then_read")


def test_workers_are_numbered_from_zero():
    later = LOG.assign(worker=LOG["worker"] + 1)
    with pytest.raises(
        InputError,
        match=r"worker 0 has none, though there is a worker 2; number the workers from 0",
    ):
        recorded(later)
    assert recorded(later, workers=3).workers == 3
    far = LOG.assign(worker=LOG["worker"].replace(1, 999_999_999))
    with pytest.raises(InputError, match=r"there is a worker 999999999; number the workers from 0"):
        recorded(far)
    with pytest.raises(InputError, match=r"workers = \d+: a cluster of so many needs at least"):
        recorded(far, workers=10**11)


def changed(row, **values):
    return LOG.assign(
        **{name: LOG[name].where(LOG.index != row, value) for name, value in values.items()}
    )
