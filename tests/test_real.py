"""Real processes: bookkeeping and recovery in one process, and recordings by Ray's, killed and gone
on with.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pandas as pd
import pytest
from cases import PROTOCOLS, combining, needs_ray, noisy

from asyncsim import (
    Cluster,
    InputError,
    Trace,
    methods,
    problems,
    recorders,
    replay,
    simulate,
    study,
)
from asyncsim.base.files import write_json
from asyncsim.real import Processes, load, record
from asyncsim.real.agreement import agreement, evaluate
from asyncsim.real.recording import HEADER, LOG, Header, Log
from asyncsim.real.server import RealWorker, Server, ServerActor
from asyncsim.real.supervisor import _prepare
from asyncsim.study.finished import figures as figures_of

ROOT = study.shipped("studies").parent
WORKERS = 3
#: Float64, a hundred commits: a dot product summed in another order, and what follows.
CLOSE = 1e-12
OPTIMIZED = True  # as the recorded processes are, which are held against replays here


def problem():
    return problems.digits(batch_size=8, hidden=(8,))


def header(method, processes, commits, precision="float64"):
    named = {"name": method.name}
    return Header(
        processes, commits, 0, precision, named, {"name": "digits"}, method.reply is not None
    )


class Broken(Exception):
    """Ends a server as a kill would: at once, and with nothing written after it."""


def in_threads(folder, method, processes, commits, task, until=None, keep_states=True, lose=()):
    """Record with threads in the place of processes; break off after the log has ``until``
    events.
    """
    asked = header(method, processes, commits)
    if not (folder / "recording.json").exists():
        folder.mkdir(parents=True, exist_ok=True)
        asked.save(folder)
    server = Server(method, task, asked, str(folder), 20, keep_states)
    if until is not None:
        enter = server._enter

        def break_off(event):
            if server._events >= until:
                raise Broken
            enter(event)

        server._enter = break_off
    workers = [RealWorker(index, method, task, asked) for index in range(processes.workers)]
    server.start()
    threads = [threading.Thread(target=worker.run, args=(server, True)) for worker in workers]
    for thread in threads:
        thread.start()
    for version, worker in lose:
        while server.commits() < version:
            time.sleep(0.001)
        server.lost(worker, "process died")
        threads[worker].join()
        again = threading.Thread(
            target=RealWorker(worker, method, task, asked).run, args=(server, True)
        )
        threads.append(again)
        again.start()
    trouble = server.wait()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    server._log.file.close()  # as the end of its process does
    return server, trouble


def central_of(server):
    return np.asarray(server._parameters.state.central)


def replayed(trace, method, task, server):
    with jax.enable_x64(True):
        record = [recorders.energy()]
        run = replay(trace, method, task, 0, precision="float64", record=record)
        return np.asarray(server._computing.flat.ravel(run.params)), run


def close(found, expected):
    return np.linalg.norm(found - expected) <= CLOSE * np.linalg.norm(expected)


@pytest.mark.full
@pytest.mark.parametrize(
    ("protocol", "method"),
    [
        ("read_then_write, two visits", methods.gem),
        ("exchange", lambda learning_rate: noisy(learning_rate, replies=True)),
        ("write_then_read", lambda learning_rate: methods.lgd(learning_rate, policy=None)),
        ("exchange", combining),
    ],
)
def test_broken_off_and_gone_on_with_is_the_replay_of_its_trace(tmp_path, protocol, method):
    task, method = problem(), method(0.01)
    processes = Processes(WORKERS, delay="exponential(0.001)", window=2, **PROTOCOLS[protocol])
    in_threads(tmp_path, method, processes, 100, task, until=70)
    before = (tmp_path / LOG).read_bytes()
    assert before.count(b"\n") == 70
    # A line that was cut off is no event.
    (tmp_path / LOG).write_bytes(before + b'{"event": "comm')
    part = load(tmp_path)
    assert 30 <= len(part.commits) <= 70 and not part.complete

    server, trouble = in_threads(tmp_path, method, processes, 100, task)
    recorded = load(tmp_path)
    assert trouble == "" and (tmp_path / LOG).read_bytes().startswith(before) and recorded.complete
    assert recorded.faults["what"].tolist() == ["resumed"]
    assert recorded.trace.frame.iloc[: len(part.trace)].equals(part.trace.frame)
    central, run = replayed(recorded.trace, method, task, server)
    assert close(central_of(server), central)
    for name in ("loss", "update_norm", "central_energy", "proxy_energy"):
        assert close(recorded.commits[name].to_numpy(), run.commits[name].to_numpy()), name
    found = agreement(recorded, method, task)
    assert found.worst("forced") < CLOSE and found.holds
    loaded = Trace.load(tmp_path / "trace.parquet")
    assert (
        loaded.frame.equals(recorded.trace.frame) and loaded.summary() == recorded.trace.summary()
    )


def test_training_without_data_ends_with_a_loss(tmp_path):
    method, task = methods.downpour(0.1), problems.quadratic([1.0, 2.0])
    server, _ = in_threads(tmp_path, method, Processes(2), 20, task)
    loss = np.array([1.0, 2.0]) @ central_of(server) ** 2 / 2
    assert evaluate(load(tmp_path), method, task) == {"train_loss": pytest.approx(loss, rel=1e-12)}


@pytest.mark.skipif(sys.platform == "win32", reason="links of POSIX")
@pytest.mark.parametrize(
    "name",
    [LOG, "checkpoint.npz.broken", "states"],
)
def test_no_link_in_a_recording_is_followed(tmp_path, name):
    task, method, processes = problem(), methods.downpour(learning_rate=0.01), Processes(WORKERS)
    folder, victim = tmp_path / "recording", tmp_path / "victim"
    in_threads(folder, method, processes, 60, task, until=40)
    if name == "checkpoint.npz.broken":
        (folder / "checkpoint.npz").write_bytes(b"")
        (folder / name).write_bytes(b"mine")
    (folder / name).rename(victim)
    (folder / name).symlink_to(victim)

    def state():
        paths = [victim, *sorted(victim.rglob("*"))]
        return [
            (path, path.lstat().st_mtime_ns, path.is_file() and path.read_bytes()) for path in paths
        ]

    before = state()
    with pytest.raises(InputError, match="is a link"):
        _prepare(folder, header(method, processes, 60), resume=True)
        _, trouble = in_threads(folder, method, processes, 60, task)
        raise InputError(trouble)
    assert state() == before and (folder / name).is_symlink()


def test_damaged_recordings_are_not_gone_on_with_in_silence(tmp_path, capsys):
    task, method, processes = problem(), methods.downpour(learning_rate=0.01), Processes(WORKERS)
    whole = tmp_path / "whole"
    server, _ = in_threads(whole, method, processes, 60, task)
    checkpoint, log = whole / "checkpoint.npz", whole / LOG
    # The log is cut amid the recording.
    contents = log.read_bytes()
    log.write_bytes(b"".join(contents.splitlines(keepends=True)[:30]))
    refused = (
        r"checkpoint\.npz': a checkpoint after 61 events, and the log .* has 30: .* put .* back, "
        r"or remove the"
    )
    with pytest.raises(InputError, match=refused):
        in_threads(whole, method, processes, 60, task)
    with pytest.raises(InputError, match=refused):
        _prepare(whole, header(method, processes, 60), resume=True)
    # A digit is another one.
    log.write_bytes(contents.replace(b'"staleness": 2', b'"staleness": 1', 1))
    for go_on in (
        lambda: load(whole),
        lambda: _prepare(whole, header(method, processes, 60), resume=True),
    ):
        with pytest.raises(InputError, match=r"a damaged log \(line \d+ has another checksum\)"):
            go_on()
    # The remedies: the log, or no checkpoint.
    log.write_bytes(contents)
    assert in_threads(whole, method, processes, 60, task)[0].commits() == 60
    # A broken checkpoint is computed again from the log.
    flipped = bytearray(checkpoint.read_bytes())
    flipped[len(flipped) // 2] ^= 1
    for broken in (b"", checkpoint.read_bytes()[:-500], flipped):
        checkpoint.write_bytes(broken)
        again, trouble = in_threads(whole, method, processes, 60, task)
        assert trouble == "" and close(central_of(again), central_of(server))
        assert (whole / "checkpoint.npz.broken").read_bytes() == broken
        assert "a broken checkpoint" in capsys.readouterr().err


@needs_ray
def test_a_server_serves_only_whom_it_gave_its_key(tmp_path):
    from ray import cloudpickle

    method, processes = methods.downpour(), Processes(1)
    server = ServerActor(
        cloudpickle.dumps((method, problem())), header(method, processes, 5), "key", str(tmp_path)
    )
    with pytest.raises(PermissionError, match="of a process that this recording did not start"):
        server.call("guessed", "commit", 0, None)
    assert server.call("key", "commits") == 0


@pytest.mark.full
@pytest.mark.parametrize("protocol", ["read_then_write, two visits"])
def test_lost_worker_goes_on_with_the_next_job_from_a_read_of_its_own(tmp_path, protocol):
    task, method = problem(), methods.downpour(learning_rate=0.01)
    processes = Processes(WORKERS, delay="constant(0.01)", **PROTOCOLS[protocol])
    server, _ = in_threads(tmp_path, method, processes, 80, task, lose=[(25, 1)])
    recorded = load(tmp_path)
    assert recorded.faults["what"].tolist() == ["process died", "restarted"]
    assert recorded.faults["worker"].tolist() == [1, 1]
    frame = recorded.trace.frame
    assert (frame["outcome"] == "applied").sum() == 80
    own = frame[frame["worker"] == 1]
    assert own["job"].tolist() == list(range(len(own)))
    lost = own[own["outcome"] == "cancelled"]
    assert len(lost) == 1
    after = own[own["job"] == lost["job"].iloc[0] + 1].iloc[0]
    assert after["read_time"] >= lost["commit_time"].iloc[0] and after["read_version"] >= 25
    assert close(central_of(server), replayed(recorded.trace, method, task, server)[0])


@pytest.mark.full
def test_lowest_rank_is_served_first_where_the_server_is_never_idle(tmp_path):
    task, method = problem(), methods.downpour(learning_rate=0.01)
    processes = Processes(WORKERS, service="constant(0.01)", discipline="lowest_rank")
    in_threads(tmp_path, method, processes, 60, task)
    counts = (
        load(tmp_path).trace.frame["worker"].value_counts().reindex(range(WORKERS), fill_value=0)
    )
    # Two workers keep a server busy whose service takes longer than anything else; the last one
    # commits once or never.
    assert counts[2] <= 5 and counts[0] >= 25


@needs_ray
def test_what_processes_cannot_do_is_refused(tmp_path):
    with pytest.raises(InputError, match="delay = a list of 2 laws"):
        Processes(3, delay="[constant(1), constant(2)]")
    with pytest.raises(InputError, match="exclusive = False"):
        Processes(3, exclusive=False)
    given = {
        "problem": problem(),
        "processes": Processes(2),
        "commits": 5,
        "folder": tmp_path / "none",
    }
    with pytest.raises(InputError, match="needs policy = "):
        record(methods.fedbuff(), **given)
    stale = methods.downpour(
        learning_rate=lambda visit: 0.1 / (1.0 + jnp.asarray(visit.staleness, float))
    )
    with pytest.raises(InputError, match="depend on the visit's staleness"):
        record(stale, **given)
    for keeps in (
        {"init_worker": lambda central: jax.random.key(0)},
        {
            "optimizer": optax.GradientTransformation(
                lambda params: jax.random.key(0), lambda u, key, params=None: (u, key)
            )
        },
    ):
        with pytest.raises(
            InputError, match=r"keeps a random key in a state, .* or draw from visit\.key"
        ):
            record(methods.downpour()._replace(**keeps), **given)
    with pytest.raises(InputError, match="holds no recording"):
        record(methods.downpour(), **given, resume=True)
    assert not (tmp_path / "none").exists()


def test_without_ray_the_remedy_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr("asyncsim.real.processes.importlib.util.find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"pip install \"asyncsim\[ray\]\""):
        record(methods.downpour(), problem(), Processes(2), 5, folder=tmp_path / "none")
    validate = study.load("validate")
    with pytest.raises(InputError, match="asyncsim"):
        validate.run(validate.Config(workers=2, methods=("downpour",), out=tmp_path / "out"))
    assert not any(tmp_path.iterdir())


def test_recordings_that_cannot_be_read_are_refused(tmp_path):
    with pytest.raises(InputError, match="holds no recording"):
        load(tmp_path)
    header(methods.downpour(), Processes(2), 5).save(tmp_path)
    assert len(load(tmp_path).trace) == 0
    for log in ("nonsense", '{"event": "danced"}', '{"event": "read", "worker": 7}', "[]"):
        (tmp_path / LOG).write_text(log + "\n")
        with pytest.raises(InputError, match="a damaged log"):
            load(tmp_path)
    values = json.loads((tmp_path / HEADER).read_text())
    (tmp_path / HEADER).write_text(json.dumps({**values, "format": 2}))
    with pytest.raises(InputError, match="recording of format 2, this asyncsim reads 1"):
        load(tmp_path)


@pytest.mark.skipif(sys.platform == "win32", reason="locks of POSIX")
def test_nobody_else_records_in_a_folder_meanwhile(tmp_path):
    log = Log(tmp_path)
    with pytest.raises(
        InputError, match=r"^folder = .*: another process records there; wait for its end"
    ):
        Log(tmp_path)
    log.file.close()
    Log(tmp_path).file.close()


def test_fairness_of_one_discipline_is_predicted_from_another(tmp_path):
    fairness = study.load("fairness")
    traces = {
        discipline: simulate(
            Cluster(4, "gamma(0.05, 0.3)", "constant(0.04)", discipline=discipline), 400
        )
        for discipline in fairness.DISCIPLINES
    }
    laws = fairness.observed(traces["fifo"])
    assert laws[0].mean == pytest.approx(0.05, rel=4 * 0.3 / 20) and laws[1].mean == pytest.approx(
        0.04
    )
    tables = [fairness.predicted(trace, one, laws, 5, 7) for one, trace in traces.items()]
    for table in tables:
        # Shares of 400 commits; a worker's varies by less than a binomial's.
        assert np.abs(table["share"] - table["simulated_share"]).max() < 4 * np.sqrt(0.25 / 400)
    assert tables[1]["simulated_share"].iloc[3] < 0.1 < tables[0]["simulated_share"].iloc[3]
    pd.concat(tables).to_csv(tmp_path / "summary.csv", index=False)
    write_json(tmp_path / "config.json", {"study": "fairness"})
    assert [path.name for path in figures_of("fairness").draw(tmp_path)] == [
        "fairness.png",
        "fairness.pdf",
    ]


@needs_ray
def test_processes_of_a_local_cluster_are_recorded_and_replayed(tmp_path):
    task, method = problem(), methods.downpour(learning_rate=0.01)
    processes = Processes(2, delay="exponential(0.005)")
    options = {
        "folder": tmp_path,
        "precision": "float64",
        "checkpoint_every": 20,
        "keep_states": True,
    }
    recorded = record(method, task, processes, 60, **options, progress=False)
    assert recorded.complete and recorded.trace.workers == 2 and not len(recorded.faults)
    assert recorded.trace.cluster is None and recorded.trace.summary()["wait_mean"] >= 0
    frame = recorded.trace.frame
    times = ["read_time", "start_time", "send_time", "arrive_time", "serve_time", "commit_time"]
    assert (np.diff(frame[times].to_numpy()) >= 0).all() and (
        frame["send_time"] > frame["start_time"]
    ).any()
    found = agreement(recorded, method, task)
    assert found.holds and found.worst("free") < 1e-10
    with pytest.raises(InputError, match="resume: seed"):
        record(method, task, processes, 60, 1, **options, resume=True)


def children(process: int) -> dict[int, str]:
    """Return the command lines of all processes that a process has started."""
    found: dict[int, str] = {}
    ahead = [process]
    while ahead:
        folder = Path("/proc", str(ahead.pop()))
        try:
            own = [
                int(one)
                for path in folder.glob("task/*/children")
                for one in path.read_text().split()
            ]
            found |= {one: Path("/proc", str(one), "cmdline").read_text() for one in own}
        except OSError:  # ended meanwhile
            continue
        ahead += own
    return found


@needs_ray
@pytest.mark.full
@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="finds processes in /proc")
@pytest.mark.parametrize("killed", ["worker", "server"])
def test_a_killed_process_loses_nothing_that_was_recorded(tmp_path, killed):
    folder = tmp_path / "study"
    command = [sys.executable, "-m", "asyncsim.study", "validate"]
    # A worker that starts again takes some ten seconds, in which the other one must not finish.
    steps, delay = (300, 0.05) if killed == "worker" else (150, 0.02)
    options = [
        "--workers=2",
        f"--steps={steps}",
        "--methods=downpour",
        f"--delay=exponential({delay})",
        "--x64",
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    driver = subprocess.Popen(
        [*command, *options, "--restart", f"--out={folder}"],
        env=environment,
        stderr=subprocess.PIPE,
    )
    log = folder / "recordings" / "downpour-seed0" / LOG
    # The first checkpoint is written beside what goes on.
    while not (log.parent / "trace.parquet").exists() or log.read_bytes().count(b"\n") < 70:
        assert driver.poll() is None, driver.stderr.read()
        time.sleep(0.02)
    started = children(driver.pid)
    named = {"worker": "ray::WorkerActor", "server": "ray::ServerActor"}[killed]
    os.kill(next(process for process, line in started.items() if named in line), signal.SIGKILL)
    before = log.read_bytes()
    before = before[: before.rfind(b"\n") + 1]
    errors = driver.communicate(timeout=300)[1].decode()
    assert driver.returncode == {"worker": 0, "server": 2}[killed], errors
    if killed == "server":
        assert len(load(log.parent).commits) >= 60 and (log.parent / "checkpoint.npz").exists()
        assert len(Trace.load(log.parent / "trace.parquet")) >= 50
        subprocess.run([*command, f"--resume={folder}"], env=environment, check=True, timeout=300)
    recorded = load(log.parent)
    assert log.read_bytes().startswith(before) and recorded.complete
    what = ["process died", "restarted"] if killed == "worker" else ["resumed"]
    assert recorded.faults["what"].tolist() == what
    summary = pd.read_csv(folder / "summary.csv")
    assert summary["holds"].tolist() == [True] and summary["held_to"].tolist() == ["free"]
