"""Executors: failed runs are rows, interrupted studies resume, and Ray gives the same bytes."""

import contextlib
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import jax
import pandas as pd
import pytest
from cases import needs_ray

from asyncsim import InputError, study
from asyncsim.base.files import unsealed, write_sealed
from asyncsim.base.threads import cached, require_wanted
from asyncsim.methods import METHODS
from asyncsim.problems import PROBLEMS
from asyncsim.replays import tuning
from asyncsim.replays.tuning import replays_at_once  # as it is; tests have another in its place
from asyncsim.study import cell
from asyncsim.study.executor import Completion, Local
from asyncsim.study.jobs import Runner, measurement

ROOT = study.shipped("studies").parent
#: Four runs in a moment.
FOUR = ["--workers=2", "--steps=2", "--seeds=4", "--problem=quadratic", "--methods=downpour"]
RUNS = [f"runs/downpour-seed{seed}" for seed in range(4)]


#: A study that draws nothing.
TOY = """
from asyncsim.study.config import StudyConfig as Config
from asyncsim.study.sweep import run_cells, sweep
def run(config):
    config.check()
    with config.computing_device():
        return run_cells("toy", config, sweep(config, [{}]), lambda folder, summary: None)
"""


def enter(folder: Path, monkeypatch) -> None:
    """Make a folder with the study in it the working one."""
    Path(folder, "studies").mkdir()
    Path(folder, "studies", "toy.py").write_text(TOY)
    monkeypatch.chdir(folder)


@pytest.fixture(autouse=True)
def working_folder(tmp_path, monkeypatch):
    enter(tmp_path, monkeypatch)


@pytest.fixture
def toy(told):
    """Run the study; assert its exit code and words of its last line, and return the lines on
    standard error.
    """

    def run(*options: str, code: int = 0, message: str = "") -> list[str]:
        ended, _, err = told("toy", *options)
        assert ended == code and message in (err or [""])[-1], err
        return err

    return run


@pytest.fixture
def replayed(monkeypatch):
    """What is replayed; an error in ``stops`` ends the replay of that number, from one, and is
    taken out.
    """
    replay, calls, stops = cell.replay, [], {}

    def watched(trace, method, problem, seed, **options):
        calls.append(seed)
        if len(calls) in stops:
            raise stops.pop(len(calls))
        return replay(trace, method, problem, seed=seed, **options)

    monkeypatch.setattr(cell, "replay", watched)
    return SimpleNamespace(calls=calls, stops=stops)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The files of the study when nothing comes between."""
    with pytest.MonkeyPatch.context() as patch:
        enter(tmp_path_factory.mktemp("undisturbed"), patch)
        assert study.main(["toy", *FOUR, "--out=whole"]) == 0
        return files("whole")


def files(folder: str) -> dict[str, bytes]:
    """Return all files in a folder but that which says when and for how long a study ran."""
    every = (path for path in Path(folder).rglob("*") if path.is_file())
    paths = [path for path in every if path.name != "made.json"]
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def config_of(folder: str = "mine") -> dict:
    return json.loads(Path(folder, "config.json").read_text())


# Several at once


def test_jobs_are_computed_at_the_same_time_but_no_more_than_may_be():
    together, running, most = threading.Barrier(2), [], []

    def job(number):
        running.append(number)
        most.append(len(running))
        together.wait(timeout=20)
        running.remove(number)
        return 2 * number

    done = list(Local(2).map(job, [(number,) for number in range(6)]))
    assert sorted(done) == [Completion(number, 2 * number) for number in range(6)]
    assert max(most) == 2


@pytest.mark.parametrize("interrupted", [True, False])
def test_running_jobs_end_with_their_reader(interrupted):
    started = threading.Event()

    def job(number):
        if number == 0:
            started.wait(20)
            if interrupted:
                raise KeyboardInterrupt
            return number
        started.set()
        while True:
            require_wanted()  # as a replay does
            time.sleep(0.01)

    before = threading.active_count()
    results = Local(2).map(job, [(0,), (1,)])
    with pytest.raises(KeyboardInterrupt) if interrupted else contextlib.closing(results):
        assert next(results) == Completion(0, 0)
    assert threading.active_count() == before


def test_jobs_have_the_settings_of_jax_that_hold_around_them():
    def job(number):
        return jax.config.jax_default_matmul_precision, jax.config.jax_numpy_dtype_promotion

    with jax.default_matmul_precision("highest"), jax.numpy_dtype_promotion("standard"):
        assert [done.value for done in Local(2).map(job, [(0,), (1,)])] == [
            ("highest", "standard")
        ] * 2


def test_what_several_threads_ask_for_is_made_once():
    made = []

    @cached(maxsize=1)
    def make(name):
        time.sleep(0.05)
        made.append(name)
        return name

    assert [done.value for done in Local(4).map(make, [("a",)] * 4)] == ["a"] * 4
    assert made == ["a"]


def test_of_several_runs_at_once_that_fail_the_others_are_kept_and_resumed(
    toy, monkeypatch, replayed, undisturbed
):
    monkeypatch.setattr(tuning, "replays_at_once", lambda problem, workers: 3)
    replayed.stops |= {2: RuntimeError("out of memory"), 4: KeyboardInterrupt()}
    toy(*FOUR, "--out=mine", code=130)
    assert len(config_of()["incomplete"]) >= 2  # these two at least
    toy(*FOUR, "--resume=mine")
    assert files("mine") == undisturbed


def test_only_replays_that_keep_one_core_busy_are_computed_at_once(monkeypatch):
    monkeypatch.setenv("NPROC", "64")
    small = PROBLEMS["digits"]()
    assert replays_at_once(small, 1_000) == 4
    assert replays_at_once(small, 10_000) == 1
    assert replays_at_once(PROBLEMS["digits"](hidden=[1000, 100]), 10) == 1
    assert replays_at_once(PROBLEMS["quadratic"](curvature=[1.0], noise=0.0), 10) == 1
    monkeypatch.setattr(tuning, "default_device", lambda: SimpleNamespace(platform="gpu"))
    assert replays_at_once(small, 10) == 1


# Resuming


@pytest.mark.full
def test_failed_and_lost_runs_are_rows_and_computed_again(toy, replayed, undisturbed):
    replayed.stops |= {2: RuntimeError("out of\nmemory"), 4: KeyboardInterrupt()}
    err = toy(*FOUR, "--out=mine", code=130)
    assert "[2/4] downpour, seed 1: failed: RuntimeError: out of memory" in err
    assert any(line.startswith("Traceback") for line in err)
    summary = pd.read_csv("mine/summary.csv")
    assert list(summary["status"]) == ["finished", "failed", "finished"]
    assert summary["error"][1] == "RuntimeError: out of memory"
    assert config_of()["incomplete"] == RUNS[1::2]
    # Never taken: the partial run of a killed process, one that lacks a file, another seed's.
    shutil.copytree("mine/runs/downpour-seed0", "mine/runs/.downpour-seed3.0123abcd.partial")
    Path("mine/runs/downpour-seed0/params.npz").unlink()
    shutil.copytree("mine/runs/downpour-seed2", "mine/runs/downpour-seed1")
    shutil.copy("mine/traces/seed0.parquet", "mine/traces/seed2.parquet")
    replayed.calls.clear()
    replayed.stops[1] = RuntimeError("again")
    message = "note: 1 of 4 runs failed; summary.csv has their errors"
    err = toy("--resume=mine", code=3, message=message)
    assert replayed.calls == [0, 1, 3]
    assert any("downpour-seed0" in line and line.endswith("computed again") for line in err)
    aside = "moved to mine/aside/runs/downpour-seed1, and computed again"
    assert f"note: run runs/downpour-seed1: is another's, of seed 2, not 1: {aside}" in err
    shutil.rmtree("mine/aside")
    toy("--resume=mine")
    assert files("mine") == undisturbed


def test_a_resumed_study_has_its_original_options(toy, replayed):
    toy(*FOUR, "--problem=quadratic(noise=0.2)", "--executor=local", "--out=mine")
    config = config_of()
    assert config["command"] == [*FOUR, "--problem=quadratic(noise=0.2)"]
    before, calls = files("mine"), len(replayed.calls)
    shutil.rmtree(f"mine/{RUNS[1]}")
    err = toy("--resume", "mine")
    assert err[0] == f"resuming with {shlex.join(config['command'])}"
    assert len(replayed.calls) == calls + 1 and files("mine") == before
    # Also beside others that are the same; options on the command line override them.
    toy("--seeds=4", "--problem", "quadratic(noise=0.2)", "--resume=mine")
    message = "holds results of another configuration (problem_config.noise = 0.2, not 0.3); "
    toy("--problem=quadratic(noise=0.3)", "--resume=mine", code=2, message=message)
    # A study that ran in Python has them only there.
    del config["command"]
    write_sealed(Path("mine/config.json"), config)
    toy("--resume=mine", code=2, message="(workers = 2, not 100; steps = 2, not 200; ")


def test_a_study_gets_more_seeds_and_methods_but_not_fewer(toy, replayed):
    more = ("--seeds=3", "--methods", "downpour", "sgd")
    toy(*FOUR, *more, "--out=at-once")
    toy(*FOUR, "--seeds=2", "--out=mine")
    before = len(replayed.calls)
    err = toy(*more, "--resume=mine")
    assert sum(line.endswith(", read") for line in err) == 2
    assert len(replayed.calls) == before + 4
    whole, grown = files("at-once"), files("mine")
    differing = {name for name in whole if whole[name] != grown[name]}
    assert set(whole) == set(grown) and differing <= {"config.json", "report.html"}
    toy("--seeds=1", "--resume=mine", code=2, message="(seeds = 3, not 1")
    fewer = "(methods = ['downpour', 'sgd'], not ['sgd']; "
    toy("--methods=sgd", "--resume=mine", code=2, message=fewer)
    # A folder that somebody has edited is another configuration, too.
    config = config_of()
    for name, value, code in (("methods", None, 2), ("command", 5, 0)):
        write_sealed(Path("mine/config.json"), config | {name: value})
        assert "Error" not in toy(*FOUR, *more, "--resume=mine", code=code)[-1]
    # The command is kept where the study is resumed in Python.
    write_sealed(Path("mine/config.json"), config)
    module = study.load("toy")
    options = {"workers": 2, "steps": 2, "problem": "quadratic", "methods": ("downpour", "sgd")}
    module.run(module.Config(**options, seeds=4, resume=Path("mine")))
    assert config_of()["command"] == config["command"]
    write_sealed(Path("mine/config.json"), config)
    # A method of other hyper-parameters is another's results.
    another = "learning_rate = 0.05, not 0.1"
    toy("--learning-rate=0.1", "--resume=mine", code=2, message=another)


def test_only_the_same_configuration_is_resumed(toy):
    toy(*FOUR, "--out=mine")
    before, three = files("mine"), "--steps=3 --workers=3 --problem=quadratic(noise=0.2) --seeds=1"
    write_sealed(Path("studies/config.json"), {})
    for options, message in (
        ("--steps=3 --resume=mine", "results of another configuration (steps = 2, not 3)"),
        (f"{three} --resume=mine", "seeds = 4, not 1; and 1 other); "),
        ("--seeds=3 --resume=mine", "(seeds = 4, not 3); give the options, files and versions of"),
        ("--resume=absent", "resume = 'absent': no results of a study"),
        ("--resume=studies", "its config.json names no study; give a folder of results"),
        ("--resume=mine --out=other", "results that are resumed stay where they are; leave it out"),
    ):
        toy(*FOUR, *options.split(), code=2, message=message)
    with jax.threefry_partitionable(False):
        message = "(jax_threefry_partitionable = True, not False)"
        toy(*FOUR, "--resume=mine", code=2, message=message)
    assert files("mine") == before
    assert sorted(map(str, Path().iterdir())) == ["mine", "studies"]
    Path("mine/config.json").write_text("[1]")
    message = "resume = 'mine': its config.json cannot be used (no table in JSON)"
    toy("--resume=mine", code=2, message=message)


def test_tables_have_the_rows_of_jobs_in_their_order_beside_the_errors_and_are_kept(capsys):
    class LastFirst(Local):
        def map(self, function, jobs):
            return reversed(list(super().map(function, jobs)))

    def measured(x):
        return {"a.csv": [{"x": x, "inverse": 1 / (x // 2)}], "b.csv": [{"x": x}] * (x - 1)}

    def run(function):
        options = {"folder": "parts/of", "errors": "b.csv", "say": lambda tables: "said"}
        jobs = [measurement(f"job {x}", function, x, labels={"x": x}, **options) for x in range(4)]
        runner = Runner(Path(), LastFirst())
        runner.run(jobs)
        return runner, runner.tables()["b.csv"], capsys.readouterr().err.splitlines()

    runner, rows, err = run(measured)
    kept = [pd.read_csv(name)["x"].tolist() for name in ("a.csv", "b.csv")]
    assert kept == [[2, 3], rows["x"].tolist()] == [[2, 3], [0, 1, 2, 3, 3]]
    error = "ZeroDivisionError: division by zero"
    assert rows[["status", "error"]].dropna().values.tolist() == [["failed", error]] * 2
    assert runner.missing == ["parts/of/job 0.json", "parts/of/job 1.json"]
    assert unsealed(Path("parts/of/job 2.json"))["tables"] == measured(2)
    assert err[0].startswith("[1/4] job 3: said, in ")
    assert err[-1] == f"[4/4] job 0: failed: {error}"
    # Of two errors that are the same.
    assert sum(line.startswith("Traceback") for line in err) == 1
    _, rows, err = run(lambda x: {"b.csv": [{"x": x}]})
    assert len(rows) == 5 and err[0] == "[1/4] job 2: said, read"


@pytest.mark.parametrize(
    "damaged", ["[1, ", "[1]", '{"tables": {}}', '{"tables": {}, "sha256": "0"}', "[" * 100_000]
)
def test_a_damaged_part_is_computed_again_aloud(capsys, damaged):
    job = measurement("a", lambda: {"a.csv": [{"x": 1}]})
    Path("parts").mkdir()
    Path("parts/a.json").write_text(damaged)
    for _ in range(2):
        runner = Runner(Path(), Local())
        runner.run([job])
        assert runner.tables()["a.csv"]["x"].tolist() == [1]
    assert capsys.readouterr().err.count("a.json: damaged") == 1


def test_a_study_of_which_all_runs_fail_ends_with_the_error(toy, replayed):
    replayed.stops |= dict.fromkeys(range(1, 5), RuntimeError("no"))
    message = "error: all 4 runs failed, the first with RuntimeError: no"
    err = toy(*FOUR, "--out=mine", code=2, message=message)
    assert sum(line.startswith("Traceback") for line in err) == 1


# Ray


def test_ray_that_is_not_installed(toy, monkeypatch):
    monkeypatch.setattr("asyncsim.study.config.find_spec", lambda name: None)
    message = 'Ray is not installed; install it with: pip install "asyncsim[ray]"'
    toy(*FOUR, "--executor=ray", code=2, message=message)


@pytest.fixture(scope="module")
def cluster():
    """Start a Ray cluster that all tests share; executors that find one stay with it."""
    from asyncsim.study.ray_executor import joined

    with joined(None):
        yield


@needs_ray
def test_ray_brings_values_failures_and_lost_jobs(cluster, tmp_path):
    from asyncsim.study.ray_executor import RayExecutor

    def job(number):
        if number == 1:
            raise ValueError("one")
        if number == 2 and not (tmp_path / "was here").exists():
            (tmp_path / "was here").touch()
            os._exit(1)  # as the system does with a process that takes too much memory
        return number, os.getpid()

    jobs = [(number,) for number in range(4)]
    values = {end.place: end.value for end in RayExecutor(1, 0.0).map(job, jobs)}
    failure = values.pop(1)
    assert failure.error == "ValueError: one" and "in job" in failure.traceback
    assert {place: number for place, (number, _) in values.items()} == {0: 0, 2: 2, 3: 3}
    assert os.getpid() not in {process for _, process in values.values()}


HALF = """
from asyncsim.methods import Applied, downpour
SCALE = 0.5
def scaled(central, message):
    return Applied(central + SCALE * message)
def half():
    apply = lambda server, central, message, memory, visit: scaled(central, message)
    return downpour(0.05)._replace(name='half', apply=apply)
"""


@needs_ray
@pytest.mark.full
def test_ray_gives_the_bytes_of_this_process(cluster, toy, optimized):
    Path("mine.py").write_text(HALF)
    options = ["--workers=3", "--steps=8", "--seeds=2", "--problem=quadratic", "--device=cpu"]
    options.append("--methods=downpour,mine.py:half")
    toy(*options, "--out=here")
    err = toy(*options, "--executor=ray", "--out=there")
    assert sorted(line.split(":")[0].split("] ")[1] for line in err if line.startswith("[")) == [
        f"{method}, seed {seed}" for method in ("downpour", "half") for seed in range(2)
    ]
    assert files("there") == files("here")


@needs_ray
@pytest.mark.full
def test_a_node_that_is_killed_costs_no_row(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "RAY_AUTH_MODE": "disabled"}
    environment["JAX_NUM_CPU_DEVICES"] = "2"
    # Runs take seconds, so that the node has one amid its commits when it is killed.
    options = ["toy", "--workers=4", "--steps=1500", "--seeds=3", "--methods=gem,downpour"]
    command = [sys.executable, "-m", "asyncsim.study", *options]
    ray = shutil.which("ray", path=Path(sys.executable).parent)
    limits = "--num-cpus=1 --object-store-memory=200000000 --disable-usage-stats"
    ray_start = [ray, "start", "--block", *limits.split()]
    nodes = []

    def start(*arguments):
        # Each with its processes in a group of its own, which dies at once.
        streams = {"stdout": subprocess.PIPE, "text": True, "env": environment}
        node = subprocess.Popen([*ray_start, *arguments], start_new_session=True, **streams)
        nodes.append(node)
        assert any("Ray runtime started" in line for line in node.stdout)

    def run(*arguments, every=lambda line: None):
        streams = {"stderr": subprocess.PIPE, "text": True, "env": environment}
        with subprocess.Popen([*command, *arguments], **streams) as process:
            err = [(line, every(line)) for line in process.stderr]
        assert process.returncode == 0, err

    def kill_late(line):
        if line.startswith("[3/6]"):  # so late that all nodes are at work
            os.killpg(nodes[1].pid, signal.SIGKILL)

    try:
        start("--head", f"--port={address.split(':')[1]}", "--include-dashboard=false")
        start(f"--address={address}")
        start(f"--address={address}")
        run("--executor=ray", f"--address={address}", "--out=there", every=kill_late)
    finally:
        for node in nodes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(node.pid, signal.SIGKILL)
            node.communicate()
    run("--out=here")
    assert list(pd.read_csv("there/summary.csv")["status"]) == ["finished"] * 6
    assert files("there") == files("here")


@needs_ray
def test_every_method_can_be_sent():
    import ray.cloudpickle as cloudpickle

    for name, factory in METHODS.items():
        assert cloudpickle.loads(cloudpickle.dumps(factory())).name == name


@needs_ray
def test_a_cluster_has_a_token_and_one_that_is_joined_was_chosen(monkeypatch, tmp_path):
    import ray
    from ray._raylet import AuthenticationMode, get_authentication_mode

    from asyncsim.study.ray_executor import joined

    modes, token = [], tmp_path / ".ray" / "auth_token"
    token.parent.mkdir()

    def init(**options):
        modes.append(get_authentication_mode())
        token.write_text("secret")

    monkeypatch.setenv("HOME", str(tmp_path))
    for name, value in (("is_initialized", lambda: False), ("init", init), ("shutdown", int)):
        monkeypatch.setattr(ray, name, value)
    # The mode of other clusters does not count for one that is started here.
    for chosen in ("disabled", None):
        monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
        if chosen is not None:
            monkeypatch.setenv("RAY_AUTH_MODE", chosen)
        with joined(None):
            assert os.environ["RAY_AUTH_MODE"] == "token"
        assert os.environ.get("RAY_AUTH_MODE") == chosen
    message = r"address = 'auto': whether .* set RAY_AUTH_MODE=token"
    with pytest.raises(InputError, match=message), joined("auto"):
        pass
    assert modes == [AuthenticationMode.TOKEN] * 2
    assert token.stat().st_mode & 0o777 == 0o600
