"""Real processes: their coroutines in one process, and a few recordings by Ray's processes."""

import asyncio
import functools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pandas as pd
import pytest
from cases import PROTOCOLS, combining, needs_ray, noisy
from edits import without_cluster
from world import messages_are_taken_up_by_the_policy, shares_are_conserved, versions_are_counted

from asyncsim import Cluster, InputError, Trace, methods, problems, replay, simulate, study
from asyncsim.base.files import write_json
from asyncsim.methods.gossip import PushMessage
from asyncsim.real import agreement, peers, record
from asyncsim.real.arrays import Computing, Task
from asyncsim.real.peers import Peer
from asyncsim.real.recording import assemble, check
from asyncsim.real.server import RealWorker, Server
from asyncsim.study.finished import figures as figures_of
from asyncsim.study.finished import read

ROOT = study.shipped("studies").parent
#: Float64, a hundred commits: a dot product summed in another order, and what follows.
CLOSE = 1e-12
OPTIMIZED = True  # as the recorded processes are, which are held against replays here
#: Method, topology and policy.
GOSSIP = {
    "D-PSGD": (methods.dpsgd(0.05), "ring()", "neighbours(mix=beside)"),
    "SGP": (methods.sgp(0.05), "one_peer_exponential()", "neighbours()"),
    "SGP, nobody waits": (methods.sgp(0.05, policy=None), "ring()", "asynchronous()"),
    "overlap SGP": (methods.osgp(0.05), "exponential()", "overlap(1)"),
    "AD-PSGD": (methods.adpsgd(0.05), "complete()", "handshake()"),
    "ClippedGossip": (methods.clipped_gossip(0.05), "ring()", "neighbours()"),
}


@functools.cache
def problem():
    return problems.digits(batch_size=8, hidden=(8,))


def task_of(method, commits=60, workers=3, task=None, **options):
    options = {"compute": "exponential(0.002)", **options}
    return Task(method, task or problem(), Cluster(workers, **options), commits, 0, "float64")


class Remote:
    """A server whose calls go on when their caller dies."""

    def __init__(self, server):
        self._server = server

    def __getattr__(self, name):
        return lambda *arguments: asyncio.shield(getattr(self._server, name)(*arguments))


def recorded_here(task, lose=None):
    """Record with coroutines of one process; ``lose``: a worker, and the commits before its
    death.
    """

    async def with_server():
        server = Server(task, 20)
        workers = [RealWorker(index, task) for index in range(task.cluster.workers)]
        await server.start()
        loops = [asyncio.create_task(worker.run(Remote(server))) for worker in workers]
        if lose is not None:
            index, commits = lose
            while await server.progress() < commits:
                await asyncio.sleep(0)
            loops[index].cancel()
            await server.lose(index)
            loops[index] = asyncio.create_task(RealWorker(index, task).run(server))
        await asyncio.gather(*loops)
        return [await server.result()]

    async def without_server():
        workers = [Peer(index, task) for index in range(task.cluster.workers)]
        await workers[0].start()
        await asyncio.gather(*(worker.run(workers) for worker in workers))
        return [await worker.result() for worker in workers]

    # For all threads: coroutines compute in threads of their own.
    jax.config.update("jax_enable_x64", True)
    try:
        with pytest.MonkeyPatch.context() as patch:
            # All compute with the same programs, which are compiled once.
            computing = Computing(task)
            functions = peers._compiled(computing.method)
            patch.setattr(peers, "_compiled", lambda method: functions)
            for module in ("peers", "server"):
                patch.setattr(f"asyncsim.real.{module}.Computing", lambda task: computing)
            run = with_server if task.cluster.topology is None else without_server
            results = asyncio.run(run())
        return assemble(task, results)
    finally:
        jax.config.update("jax_enable_x64", False)


def difference(recorded):
    """Return the largest difference between a recording and its replay, which must hold."""
    comparison = agreement(recorded)
    assert comparison.holds
    assert comparison.compared == len(recorded.commits) == recorded.task.commits
    return comparison.worst


def require_loadable(trace, folder):
    trace.save(folder / "trace.parquet")
    loaded = Trace.load(folder / "trace.parquet")
    assert loaded.frame.equals(trace.frame) and loaded.summary() == trace.summary()
    assert loaded.policy == trace.policy and loaded.cluster is None


@pytest.mark.parametrize(
    ("method", "protocol", "options"),
    [
        (methods.gem(0.01), "read_then_write, two visits", {"window": 2}),
        (noisy(0.01, replies=True), "exchange", {}),
        (methods.lgd(0.01, policy=None), "write_then_read", {}),
        (methods.batch_sgd(0.05), "exchange", {"policy": "barrier()"}),
        pytest.param(
            *(methods.batch_sgd(0.05, "first_of(2)"), "write_then_read", {"policy": "first_of(2)"}),
            marks=pytest.mark.full,
        ),
        (
            methods.rennala(0.05, "discard_stale(1, 5)"),
            "exchange",
            {"policy": "discard_stale(1, 5)"},
        ),
        (combining(), "read_then_write", {"policy": "buffered(4)"}),
        (methods.downpour(0.05), "exchange", {"policy": "bounded_staleness(1)"}),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_a_recording_with_a_server_is_its_replay(method, protocol, options, tmp_path):
    task = task_of(method, **PROTOCOLS[protocol], **options)
    check(task)
    recorded = recorded_here(task)
    assert difference(recorded) < CLOSE
    require_loadable(recorded.trace, tmp_path)
    times = ["read_time", "start_time", "send_time", "serve_time", "commit_time"]
    assert (np.diff(recorded.trace.frame[times]) >= 0).all()
    versions_are_counted(recorded.trace)
    messages_are_taken_up_by_the_policy(recorded.trace)


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.full] * (n in ("SGP", "overlap SGP"))) for n in GOSSIP],
)
def test_a_recording_without_a_server_is_its_replay(name, tmp_path):
    """Losses, final replicas and the central variable; and which messages were taken up."""
    method, topology, policy = GOSSIP[name]
    task = task_of(method, 66, 4, topology=topology, policy=policy)
    check(task)
    recorded = recorded_here(task)
    assert difference(recorded) < CLOSE
    trace = recorded.trace
    require_loadable(trace, tmp_path)
    shares_are_conserved(trace)
    frame = trace.frame
    if method.meet is None:
        # Nobody waits for longer than the policy says.
        job = frame["job"].to_numpy()
        age = job[trace.taken_up["row"]] - job[trace.taken_up["source"]]
        bounds = {"neighbours": (1, 1), "overlap": (-np.inf, 2)}
        lowest, highest = bounds.get(trace.policy.name, (-np.inf, np.inf))
        assert lowest <= age.min() and age.max() <= highest
    else:
        assert (frame["partner"] != frame["worker"]).all() and (frame["partner"] >= 0).all()
        assert (np.diff(frame["commit_time"]) > 0).all()
    if trace.policy.name in ("neighbours", "overlap"):
        assert np.bincount(frame["worker"]).tolist() == [17, 17, 16, 16]


def test_a_recording_of_one_worker_is_sgd():
    tasks = [
        task_of(method, 20, 1, topology=topology, policy=policy)
        for method, topology, policy in map(GOSSIP.get, ("D-PSGD", "SGP", "AD-PSGD"))
    ]
    losses = [recorded_here(task).commits["loss"].tolist() for task in tasks]
    assert losses[0] == losses[1] == losses[2]


@pytest.mark.parametrize("protocol", ["exchange", "read_then_write, two visits"])
def test_a_lost_worker_continues_with_the_next_job_from_a_new_read(protocol):
    task = task_of(methods.downpour(0.01), 80, compute="constant(0.01)", **PROTOCOLS[protocol])
    recorded = recorded_here(task, lose=(1, 25))
    assert recorded.faults["what"].tolist() == ["process died", "restarted"]
    assert recorded.faults["worker"].tolist() == [1, 1]
    frame = recorded.trace.frame
    of_worker = frame[frame["worker"] == 1]
    assert of_worker["job"].tolist() == list(range(len(of_worker)))
    (lost,) = of_worker[of_worker["outcome"] == "cancelled"].to_dict("records")
    after = of_worker[of_worker["job"] == lost["job"] + 1].iloc[0]
    assert after["read_time"] >= lost["commit_time"] and after["read_version"] >= 25
    assert difference(recorded) < CLOSE


def test_the_lowest_rank_is_served_first_where_the_server_is_never_idle():
    options = {"service": "constant(0.01)", "discipline": "lowest_rank"}
    trace = recorded_here(task_of(methods.downpour(0.01), **options)).trace
    counts = np.bincount(trace.frame["worker"], minlength=3)
    # Two workers keep a server busy whose service takes longer than anything else; the last one
    # commits once or never.
    assert counts[2] <= 5 and counts[0] >= 25


def test_training_without_data_ends_with_a_loss():
    task = task_of(methods.downpour(0.1), 20, 2, problems.quadratic([1.0, 2.0]))
    recorded = recorded_here(task)
    loss = np.array([1.0, 2.0]) @ recorded.central[20] ** 2 / 2
    assert recorded.evaluation == {"train_loss": pytest.approx(loss, rel=CLOSE)}


def test_commits_beyond_the_growth_of_round_off_are_not_judged():
    recorded = recorded_here(task_of(methods.gem(0.5, momentum=0.99), 60))
    altered = recorded.commits.assign(loss=recorded.commits["loss"] * (1 + 1e-9))
    assert not agreement(recorded._replace(commits=altered)).holds
    comparison = agreement(recorded)
    table = comparison.table.assign(loss_perturbed=np.geomspace(1e-16, 1, 60))
    limited = comparison._replace(table=table)
    assert limited.compared == int(np.argmax(table["loss_perturbed"] > 1e-10)) < 60
    table.loc[limited.compared :, "loss_free"] = 1.0
    assert limited._replace(table=table).holds
    assert not limited._replace(table=table.assign(loss_perturbed=0.0)).holds


def centred(own, update, start, central, visit):
    return PushMessage(own.biased + 0 * central, own.weight), own, {}


def stale(visit):
    return 0.1 / (1.0 + jax.numpy.asarray(visit.staleness, float))


RING = {"topology": "ring()"}


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        (methods.fedbuff(), {}, r"needs a trace with policy = buffered\(count=10\)"),
        (methods.downpour(stale), {}, "depend on the visit's time, staleness or commit"),
        (methods.downpour(), {"policy": "cancel_stale(3)"}, "stops computations or cuts versions"),
        (methods.downpour(), {"policy": "buffered(2, grace=1)"}, "stops computations or cuts"),
        (methods.batch_sgd(policy=None), {"policy": "buffered(7)"}, "a multiple of the 7 messages"),
        (methods.downpour(), {"latency": 0.1}, "cluster: latency: are real"),
        (methods.downpour(), {"window": (1, 2)}, "needs one window for all workers"),
        (noisy(replies=True), {"protocol": "write_then_read"}, "which no other read carries"),
        (methods.downpour(), RING, "needs a trace of a cluster with a server"),
        (methods.sgp(policy=None), {**RING, "policy": "handshake()"}, "workers send messages"),
        (methods.adpsgd(), RING, r"meet in pairs, and this trace's policy is asynchronous\(\)"),
        (methods.sgp(policy=None), {**RING, "policy": "neighbours(beside)"}, "have mixed"),
        (methods.sgp(policy=None)._replace(message=centred), RING, "or the central variable"),
        (methods.sgp(stale, policy=None), RING, "depend on the visit's time, staleness"),
    ],
)
def test_tasks_that_real_processes_cannot_compute(method, options, message):
    with pytest.raises(InputError, match=message):
        check(task_of(method, 60, 2, **options))


@pytest.mark.parametrize(
    ("method", "options"),
    [
        (methods.dpsgd(), RING | {"policy": "neighbours(mix=beside)"}),
        (methods.batch_sgd(), {"policy": "barrier()"}),
    ],
)
def test_workers_that_others_wait_for_are_not_restarted(method, options):
    with pytest.raises(InputError, match="restart = True: workers that wait"):
        check(task_of(method, 60, 2, **options), restart=True)


def test_without_ray_the_remedy_is_told(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(InputError, match=r"pip install \"asyncsim\[ray\]\""):
        record(methods.downpour(), problem(), Cluster(2, 1e-6), 5)
    real = study.load("real")
    with pytest.raises(InputError, match="asyncsim"):
        real.run(real.Config(workers=2, methods=("downpour",), out=tmp_path / "out"))
    assert not any(tmp_path.iterdir())


def test_a_recorded_trace_says_when_messages_were_taken_up():
    mixed = simulate(Cluster(2, 1.0, policy="neighbours(mix=beside)", topology="ring()"), 8)
    with pytest.raises(InputError, match="and in this recorded trace they were at the commit"):
        replay(without_cluster(mixed), methods.sgp(), problem())


def test_shares_under_a_discipline_are_predicted_from_another(tmp_path):
    real, options = study.load("real"), {"compute": "gamma(0.05, 0.3)", "service": "constant(0.04)"}
    disciplines = ("fifo", "lowest_rank")
    traces = [simulate(Cluster(4, **options, discipline=name), 400) for name in disciplines]
    laws = real.observed(traces[0])
    assert laws[0].mean == pytest.approx(0.05, rel=4 * 0.3 / 20)
    assert laws[1].mean == pytest.approx(0.04)
    tables = [
        real.predicted(trace, name, laws, 7, simulations=5).assign(discipline=name)
        for name, trace in zip(disciplines, traces, strict=True)
    ]
    for table in tables:
        # Shares of 400 commits; a worker's varies by less than a binomial's.
        assert np.abs(table["share"] - table["simulated_share"]).max() < 4 * np.sqrt(0.25 / 400)
    assert tables[1]["simulated_share"].iloc[3] < 0.1 < tables[0]["simulated_share"].iloc[3]
    pd.concat(tables).to_csv(tmp_path / "shares.csv", index=False)
    summary = {"method": ["a"], "discipline": ["fifo"], "precision": ["float32"], "folder": ["f"]}
    pd.DataFrame(summary).to_csv(tmp_path / "summary.csv", index=False)
    write_json(tmp_path / "config.json", {"study": "real"})
    drawn = [path.name for path in figures_of("real").draw(tmp_path)]
    assert drawn == ["fairness.png", "fairness.pdf"]
    label = figures_of("real").fairness(read(tmp_path, "real")).get_label()
    shares = tables[1]["share"]
    assert f"{shares.min():.0%} to {shares.max():.0%} of the commits" in label


@needs_ray
def test_processes_of_a_local_cluster_are_recorded_and_replayed():
    cluster = Cluster(2, "exponential(0.005)", policy="buffered(3)")
    method = methods.batch_sgd(0.01, policy="buffered(3)")
    recorded = record(method, problem(), cluster, 60, 0, "float64", progress=False)
    assert recorded.trace.workers == 2 and not len(recorded.faults)
    assert recorded.trace.cluster is None and recorded.trace.policy == cluster.policy
    assert difference(recorded) < 1e-10 and recorded.trace.summary()["wait_mean"] >= 0


TWO_NODES = """
from ray.cluster_utils import Cluster as Machines

from asyncsim import Cluster, methods, problems
from asyncsim.real import agreement, record

machines = Machines(initialize_head=True, head_node_args={"num_cpus": 1})
machines.add_node(num_cpus=2)
task = methods.downpour(0.01), problems.digits(batch_size=8, hidden=(8,)), Cluster(2, 0.005)
recorded = record(*task, 60, 0, "float64", address=machines.address, progress=False)
machines.shutdown()
assert agreement(recorded).worst < 1e-10
"""


@needs_ray
@pytest.mark.full
def test_processes_on_two_nodes_are_recorded_and_replayed():
    # In a process of its own: Ray reads its mode of authentication once.
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "RAY_AUTH_MODE": "disabled"}
    subprocess.run([sys.executable, "-c", TWO_NODES], env=environment, check=True, timeout=600)


@needs_ray
@pytest.mark.full
def test_a_worker_that_fails_ends_the_recording():
    method, topology, policy = GOSSIP["SGP"]

    def callback(step):
        if step > 3:
            raise ValueError("no message today")
        return step

    def message(worker, update, start, central, visit):
        step = jax.pure_callback(callback, jax.ShapeDtypeStruct((), np.int32), visit.worker_step)
        return method.message(worker, update + 0 * step.astype(update.dtype), start, central, visit)

    cluster = Cluster(2, 1e-6, topology=topology, policy=policy)
    with pytest.raises(InputError, match=r"worker \d: failed: .*CpuCallback.*; record again"):
        record(method._replace(message=message), problem(), cluster, 40)


def children(process: int) -> dict[int, str]:
    """Return the command lines of all processes that a process has started."""
    commands: dict[int, str] = {}
    ahead = [process]
    while ahead:
        try:
            for path in Path("/proc", str(ahead.pop())).glob("task/*/children"):
                for child in map(int, path.read_text().split()):
                    commands[child] = Path("/proc", str(child), "cmdline").read_text()
                    ahead.append(child)
        except OSError:  # ended meanwhile
            continue
    return commands


@needs_ray
@pytest.mark.full
@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="finds processes in /proc")
def test_the_study_restarts_a_killed_worker_and_is_resumed(tmp_path):
    folder = tmp_path / "study"
    command = [sys.executable, "-m", "asyncsim.study", "real"]
    # A worker that starts again takes some ten seconds, in which the other one must not finish.
    options = ["--workers=2", "--steps=300", "--methods", "downpour", "--compute=exponential(0.05)"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    driver = subprocess.Popen(
        [*command, *options, "--x64", "--restart", f"--out={folder}"],
        env=environment,
        stderr=subprocess.PIPE,
    )
    while not any("ray::RealWorker.run" in line for line in children(driver.pid).values()):
        assert driver.poll() is None, driver.stderr.read()
        time.sleep(0.1)
    time.sleep(5)
    running = [
        process for process, line in children(driver.pid).items() if "ray::RealWorker" in line
    ]
    os.kill(running[0], signal.SIGKILL)
    errors = driver.communicate(timeout=300)[1].decode()
    assert driver.returncode == 0, errors
    (row,) = pd.read_csv(folder / "summary.csv").to_dict("records")
    assert row["holds"] and row["commits"] == row["compared"] == 600 and row["faults"] == 2
    trace = Trace.load(folder / row["folder"] / "trace.parquet")
    assert (trace.frame["outcome"] == "cancelled").sum() == 1
    before = (folder / row["folder"] / "trace.parquet").stat().st_mtime_ns
    subprocess.run([*command, f"--resume={folder}"], env=environment, check=True, timeout=300)
    assert (folder / row["folder"] / "trace.parquet").stat().st_mtime_ns == before


@needs_ray
@pytest.mark.full
def test_the_study_records_without_a_server(tmp_path):
    real = study.load("real")
    options = {"workers": 2, "steps": 40, "methods": ("dpsgd", "adpsgd"), "topology": "ring()"}
    folder, summary = real.run(real.Config(**options, out=tmp_path / "out"))
    assert summary["holds"].tolist() == [True] * 2
    assert (summary[["loss_free", "params_free"]] < 1e-5).all(axis=None)
    assert (folder / "agreement.png").exists()
    assert json.loads((folder / "config.json").read_text())["topology"] == "ring()"
