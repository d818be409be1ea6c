"""Real workers without a server: recordings by threads and by Ray's processes are their replays."""

import json
import threading

import jax
import numpy as np
import pytest
from cases import needs_ray

from asyncsim import InputError, Trace, methods, problems, replay, study
from asyncsim.clusters.topologies import as_topology
from asyncsim.methods.gossip import PushMessage
from asyncsim.real import Processes, load, peers, record
from asyncsim.real.agreement import agreement
from asyncsim.real.computing import Computing
from asyncsim.real.recording import LOG, Header

OPTIMIZED = True  # as the recorded processes are, which are held against replays here
WORKERS = 4
#: Method, topology and policy.
CASES = {
    "D-PSGD": (methods.dpsgd(0.05), "ring()", "neighbours(mix=beside)"),
    "SGP": (methods.sgp(0.05), "one_peer_exponential()", "neighbours()"),
    "SGP, nobody waits": (methods.sgp(0.05, policy=None), "ring()", "asynchronous()"),
    "overlap SGP": (methods.osgp(0.05), "exponential()", "overlap(1)"),
    "AD-PSGD": (methods.adpsgd(0.05), "complete()", "handshake()"),
    "ClippedGossip": (methods.clipped_gossip(0.05), "ring()", "neighbours()"),
}


def problem():
    return problems.digits(batch_size=8, hidden=(8,))


def in_threads(folder, method, processes, commits):
    """Record with threads in the place of processes; return the workers."""
    task = problem()
    header = Header(
        processes, commits, 0, "float64", {"name": method.name}, {"name": task.name}, False
    )
    workers = [peers.Peer(index, method, task, header) for index in range(processes.workers)]
    workers[0].begin()

    def call(index, name, *arguments):
        answer = getattr(workers[index], name)(*arguments)
        return lambda: answer

    threads = [
        threading.Thread(target=one.run, args=(call, index == 0))
        for index, one in enumerate(workers)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    central = Computing(method, task, header).first_job().start
    peers.write(folder, header, central, [one.result() for one in workers])
    return workers


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(one, marks=[pytest.mark.full] * (one in ("SGP", "overlap SGP")))
        for one in CASES
    ],
)
def test_the_recorded_order_replayed_is_the_recording(name, tmp_path):
    """Losses, final replicas and the central variable; which messages were taken up; and the
    files.
    """
    method, topology, policy = CASES[name]
    commits = 4 * WORKERS * 4 + 2
    processes = Processes(WORKERS, delay="exponential(0.004)", topology=topology, policy=policy)
    in_threads(tmp_path, method, processes, commits)
    recorded = load(tmp_path)
    frame, trace = recorded.trace.frame, recorded.trace
    assert (
        recorded.complete
        and len(trace) == len(recorded.commits) == commits
        and trace.cluster is None
    )
    assert (
        Trace.load(tmp_path / "trace.parquet").frame.equals(frame)
        and recorded.header.processes == processes
    )
    found = agreement(recorded, method, problem())
    # Float64, some sixty gradients: a sum in another order, and what follows.
    assert found.holds and found.held_to == "free" and found.worst("free") < 1e-12
    if method.meet is None:
        # All that is sent is taken up or in flight, and nobody waits for longer than the policy
        # says.
        cycle = as_topology(topology).sends(WORKERS)
        steps = zip(frame["worker"], frame["job"], strict=True)
        sent = sum(len(cycle[job % len(cycle)][worker]) for worker, job in steps)
        assert sent == len(trace.taken_up) + len(trace.in_flight)
        age = (
            frame["job"].to_numpy()[trace.taken_up["row"]]
            - frame["job"].to_numpy()[trace.taken_up["source"]]
        )
        steps = {"neighbours": (1, 1), "overlap": (-np.inf, 2)}.get(
            processes.policy.name, (-np.inf, np.inf)
        )
        assert steps[0] <= age.min() and age.max() <= steps[1]
    else:
        assert (frame["partner"] != frame["worker"]).all() and (frame["partner"] >= 0).all()
        assert (np.diff(frame["commit_time"]) > 0).all()
    if processes.policy.name in ("neighbours", "overlap"):
        assert np.bincount(frame["worker"]).tolist() == [17, 17, 16, 16]


def test_a_recording_of_one_worker_is_sgd(tmp_path):
    losses = []
    for name in ("D-PSGD", "SGP", "AD-PSGD"):
        method, topology, policy = CASES[name]
        in_threads(tmp_path / name, method, Processes(1, topology=topology, policy=policy), 20)
        losses.append(load(tmp_path / name).commits["loss"].tolist())
    assert losses[0] == losses[1] == losses[2]


@needs_ray
@pytest.mark.full
def test_processes_without_a_server_are_recorded_and_replayed(tmp_path):
    method, topology, policy = CASES["SGP"]
    processes = Processes(2, delay="exponential(0.005)", topology=topology, policy=policy)
    folder = tmp_path / "recording"
    recorded = record(
        method, problem(), processes, 31, folder=folder, precision="float64", progress=False
    )
    assert recorded.complete and len(recorded.trace) == 31 and not len(recorded.faults)
    assert agreement(recorded, method, problem()).worst("free") < 1e-12
    summary = recorded.trace.summary()
    assert 0 < summary["waiting_share"] < 1 and summary["throughput"] > 0
    with pytest.raises(InputError, match="exists and is not empty"):
        record(method, problem(), processes, 31, folder=folder)
    log = (folder / LOG).read_text().splitlines(keepends=True)
    (folder / LOG).write_text("".join(log[:-1]))
    with pytest.raises(InputError, match="a damaged log"):
        load(folder)


@needs_ray
@pytest.mark.full
def test_the_study_holds_recordings_without_a_server_against_their_replays(tmp_path):
    validate = study.load("validate")
    options = {"workers": 2, "steps": 40, "methods": ("dpsgd", "adpsgd"), "topology": "ring()"}
    folder, summary = validate.run(validate.Config(**options, out=tmp_path / "out"))
    assert summary["holds"].tolist() == [True] * 2 and summary["held_to"].tolist() == ["free"] * 2
    assert (summary[["loss_free", "params_free"]] < 1e-5).all(axis=None) and (
        folder / "agreement.png"
    ).exists()
    assert json.loads((folder / "config.json").read_text())["topology"] == "ring()"


@needs_ray
@pytest.mark.full
def test_a_worker_that_fails_ends_the_recording(tmp_path):
    method, topology, policy = CASES["SGP"]

    def callback(step):
        if step > 3:
            raise ValueError("no message today")
        return step

    def message(worker, update, start, central, visit):
        step = jax.pure_callback(callback, jax.ShapeDtypeStruct((), np.int32), visit.worker_step)
        sent, worker, seen = method.message(
            worker, update + 0 * step.astype(update.dtype), start, central, visit
        )
        return sent, worker, seen

    processes = Processes(2, topology=topology, policy=policy)
    with pytest.raises(InputError, match=r"worker \d: failed: .*CpuCallback.*nothing is kept"):
        record(method._replace(message=message), problem(), processes, 40, folder=tmp_path / "out")
    assert not any((tmp_path / "out").iterdir())


def centred(own, update, start, central, visit):
    return PushMessage(own.biased + 0 * central, own.weight), own, {}


@needs_ray
@pytest.mark.parametrize(
    ("method", "given", "message"),
    [
        (
            methods.downpour(),
            {"topology": "ring()"},
            "'downpour': has a server, unlike these processes; choose dpsgd",
        ),
        (
            methods.sgp(),
            {"topology": "ring()"},
            r"needs policy = neighbours\(mix=before\), and .* asynchronous\(\)",
        ),
        (
            methods.sgp(policy=None),
            {"topology": "ring()", "policy": "handshake()"},
            "its workers send messages",
        ),
        (
            methods.adpsgd(),
            {"topology": "ring()"},
            r"its workers meet in pairs, .* give handshake\(\)",
        ),
        (
            methods.sgp(policy=None),
            {"topology": "ring()", "policy": "neighbours(beside)"},
            "nothing says that its gradients are of replicas that are not mixed",
        ),
        (
            methods.sgp(policy=None)._replace(message=centred),
            {"topology": "ring()"},
            "message needs the central variable, which no worker has",
        ),
        (
            methods.sgp(
                lambda visit: 0.1 / (1.0 + jax.numpy.asarray(visit.staleness, float)), policy=None
            ),
            {"topology": "ring()"},
            "depend on the visit's staleness",
        ),
    ],
)
def test_methods_that_workers_alone_cannot_run(method, given, message, tmp_path):
    with pytest.raises(InputError, match=message):
        record(method, problem(), Processes(2, **given), 10, folder=tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_a_recorded_trace_says_itself_when_messages_were_taken_up(tmp_path):
    method, topology, policy = CASES["D-PSGD"]
    in_threads(tmp_path, method, Processes(2, topology=topology, policy=policy), 8)
    with pytest.raises(
        InputError, match="taken up at the read, and in this recorded trace they were at the commit"
    ):
        replay(load(tmp_path).trace, methods.sgp(), problem())
