"""Recordings in which workers died and came back: their calibration, and what it predicts."""

import dataclasses
import threading
import time

import numpy as np
import pandas as pd
import pytest

from asyncsim import Cluster, InputError, Trace, calibrate, failures, methods, problems, simulate
from asyncsim.calibration import examine
from asyncsim.prediction import LOST, predict
from asyncsim.real import Processes
from asyncsim.real.recording import Header, load
from asyncsim.real.server import Server, Worker
from asyncsim.traces.columns import COLUMNS, OUTCOMES
from asyncsim.traces.durations import deaths

CRASH = failures.crash(every="exponential(20)", lasts="gamma(6, 0.3)")
CLUSTER = Cluster(4, "gamma(0.5, 0.3)", 0.01, failures=[CRASH])


def as_recorded(trace):
    """Return a simulated trace with the columns of a recording, which knows of no spells."""
    frame = trace.frame[list(COLUMNS)]
    frame = frame.assign(outcome=pd.Categorical(frame["outcome"].astype(str), OUTCOMES))
    return Trace(frame, dataclasses.replace(trace.source, cluster=None), trace.open_reads, trace.present)


def test_rows_tell_of_deaths_what_spells_do():
    trace = simulate(CLUSTER, 2_000, seed=2)
    crashes = trace.spells[trace.spells["kind"] == "crash"]
    told, found = deaths(trace), deaths(as_recorded(trace))
    end = trace.frame["commit_time"].max()
    absent = np.minimum(crashes["end"].fillna(np.inf), end) - crashes["begin"]
    assert told.between.sum() == pytest.approx(4 * end - absent.sum())
    np.testing.assert_allclose(np.sort(told.away), np.sort((crashes["end"] - crashes["begin"])[crashes["end"] <= end]))
    # Not those of workers whose message was at the server, and those of workers that are away at the end.
    assert 0.9 * len(told.between) <= len(found.between) <= len(told.between)
    assert found.away.mean() == pytest.approx(told.away.mean(), rel=0.05)
    assert len(deaths(simulate(Cluster(2, 1.0), 20)).between) == 0


@pytest.mark.parametrize("recorded", [True, False])
def test_deaths_are_calibrated_and_predicted(recorded):
    trace = simulate(CLUSTER, 4_000, seed=1)
    found = examine(as_recorded(trace) if recorded else trace)
    (crash,) = found.cluster.failures
    deaths_ = int(found.table.set_index("what").loc["time to a death", "samples"])
    assert deaths_ > 60 and crash.every.mean == pytest.approx(20, rel=3 / deaths_**0.5)
    assert crash.lasts.mean == pytest.approx(6, rel=3 * 0.3 / deaths_**0.5)
    assert found.cluster.compute.mean == pytest.approx(0.5, rel=0.02)
    prediction = predict(as_recorded(trace) if recorded else trace, runs=39)
    rows = prediction.table.set_index("quantity")
    assert rows.loc["throughput (commits/s)", "within"] and rows.loc[LOST, "within"]
    assert 0 < rows.loc[LOST, "low"] < rows.loc[LOST, "measured"]


def test_other_failures_are_refused():
    trace = simulate(Cluster(4, 1.0, failures=[failures.slow("exponential(9)", "exponential(5)", 0.5)]), 100)
    with pytest.raises(InputError, match=r"trace: has failures, slow\(.*; only traces with crashes alone"):
        calibrate(trace)


@pytest.mark.full
def test_real_workers_that_die_are_calibrated_and_predicted(tmp_path):
    """Threads in the place of processes: what they had is entered as lost, and they read anew."""
    processes = Processes(4, delay="gamma(0.05, 0.3)")
    method, problem = methods.downpour(), problems.digits(batch_size=8, hidden=(8,))
    header = Header(processes, 800, 0, "float32", {"name": "downpour"}, {"name": "digits"}, False)
    header.save(tmp_path)
    server = Server(method, problem, header, str(tmp_path), 100)
    started: list[threading.Thread] = []

    def start(index):
        worker = Worker(index, method, problem, header)
        started.append(threading.Thread(target=worker.run, args=(server, True)))
        started[-1].start()

    for index in range(4):
        Worker(index, method, problem, header).warm_up()
    server.start()
    for index in range(4):
        start(index)
    generator = np.random.default_rng(0)
    for version in np.sort(generator.integers(40, 760, 30)).tolist():
        while server.commits() < version:
            time.sleep(0.001)
        index = int(generator.integers(4))
        server.lost(index, "process died")
        time.sleep(0.2)  # its thread finds that nobody waits for it
        start(index)
    assert not server.wait()
    for thread in started:
        thread.join(60)
    server._log.file.close()
    recorded = load(tmp_path)
    assert (recorded.faults["what"] == "process died").sum() == 30
    prediction = predict(recorded.trace, runs=99)
    rows = prediction.table.set_index("quantity")
    assert rows.loc["throughput (commits/s)", "within"] and rows.loc[LOST, "within"], prediction.text
