"""Executors: failed runs are rows, what was interrupted is resumed, and Ray gives the bytes that
this process does.
"""

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
from asyncsim.study.executor import Completion, Local
from asyncsim.study.jobs import Runner, measurement

ROOT = study.shipped("studies").parent
#: Four runs in a moment.
STUDY = (
    "toy",
    "--workers=2",
    "--steps=2",
    "--seeds=4",
    "--problem=quadratic",
    "--methods=downpour",
)
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


@pytest.fixture(autouse=True)
def working_folder(tmp_path, monkeypatch):
    enter(tmp_path, monkeypatch)


@pytest.fixture
def told(capsys):
    """Run the command line; return the exit code and the lines on standard error."""

    def run(*arguments: str) -> tuple[int, list[str]]:
        code = study.main(arguments)
        return code, capsys.readouterr().err.replace("\nhint: ", "; ").splitlines()

    return run


@pytest.fixture
def replayed(monkeypatch):
    """What is replayed; an error in ``stops`` ends the replay of that number, from one, and is
    taken out.
    """
    from asyncsim.study import cell

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
        assert study.main([*STUDY, "--out=whole"]) == 0
        return files("whole")


def enter(folder: Path, monkeypatch) -> None:
    """Make a folder with the study in it the working one."""
    Path(folder, "studies").mkdir()
    Path(folder, "studies", "toy.py").write_text(TOY)
    monkeypatch.chdir(folder)


def files(folder: str) -> dict[str, bytes]:
    """Return all tables, traces and runs in a folder; figures are drawn from these."""
    paths = [
        path
        for path in Path(folder).rglob("*")
        if path.is_file() and path.suffix not in (".png", ".pdf")
    ]
    # made.json says when and for how long.
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in paths
        if path.name != "made.json"
    }


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


@pytest.mark.parametrize("how", ["interrupted", "left"])
def test_jobs_that_go_on_end_with_those_who_wait_for_them(how):
    started = threading.Event()

    def job(number):
        if number == 0:
            started.wait(20)
            if how == "interrupted":
                raise KeyboardInterrupt
            return number
        started.set()
        while True:
            require_wanted()  # as a replay does
            time.sleep(0.01)

    before = threading.active_count()
    results = Local(2).map(job, [(0,), (1,)])
    if how == "interrupted":
        with pytest.raises(KeyboardInterrupt):
            next(results)
    else:
        assert next(results) == Completion(0, 0)
        results.close()
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


@pytest.fixture
def at_once(monkeypatch):
    monkeypatch.setattr(tuning, "replays_at_once", lambda problem, workers: 3)


def test_of_several_runs_at_once_that_fail_the_others_are_kept_and_resumed(
    told, at_once, replayed, undisturbed
):
    replayed.stops |= {2: RuntimeError("out of memory"), 4: KeyboardInterrupt()}
    assert told(*STUDY, "--out=mine")[0] == 130
    assert (
        len(json.loads(Path("mine/config.json").read_text())["incomplete"]) >= 2
    )  # these two at least
    assert told(*STUDY, "--resume=mine")[0] == 0
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
def test_failed_and_lost_runs_are_rows_and_computed_again(told, replayed, undisturbed):
    replayed.stops |= {2: RuntimeError("out of\nmemory"), 4: KeyboardInterrupt()}
    code, err = told(*STUDY, "--out=mine")
    assert code == 130 and "[2/4] downpour, seed 1: failed: RuntimeError: out of memory" in err
    assert any(line.startswith("Traceback") for line in err)
    summary = pd.read_csv("mine/summary.csv")
    assert list(summary["status"]) == ["finished", "failed", "finished"]
    assert summary["error"][1] == "RuntimeError: out of memory"
    assert json.loads(Path("mine/config.json").read_text())["incomplete"] == RUNS[1::2]
    # Never taken: what a process leaves that is killed while it writes a run, one that lacks a
    # file, another seed's.
    shutil.copytree("mine/runs/downpour-seed0", "mine/runs/.downpour-seed3.0123abcd.partial")
    Path("mine/runs/downpour-seed0/params.npz").unlink()
    shutil.copytree("mine/runs/downpour-seed2", "mine/runs/downpour-seed1")
    shutil.copy("mine/traces/seed0.parquet", "mine/traces/seed2.parquet")
    replayed.calls.clear()
    replayed.stops[1] = RuntimeError("again")
    code, err = told(*STUDY, "--resume=mine")
    assert code == 3 and replayed.calls == [0, 1, 3]
    assert any("downpour-seed0" in line and line.endswith("computed again") for line in err)
    aside = "moved to mine/aside/runs/downpour-seed1, and computed again"
    assert f"note: run runs/downpour-seed1: is another's, of seed 2, not 1: {aside}" in err
    assert err[-1].startswith("note: 1 of 4 runs failed; summary.csv has their errors")
    shutil.rmtree("mine/aside")
    assert told(*STUDY, "--resume=mine")[0] == 0
    assert files("mine") == undisturbed


def test_what_is_resumed_has_the_options_that_it_was_begun_with(told, replayed):
    assert told(*STUDY, "--problem=quadratic(noise=0.2)", "--executor=local", "--out=mine")[0] == 0
    config = json.loads(Path("mine/config.json").read_text())
    assert config["command"] == [*STUDY[1:], "--problem=quadratic(noise=0.2)"]
    before, calls = files("mine"), len(replayed.calls)
    shutil.rmtree(f"mine/{RUNS[1]}")
    code, err = told("toy", "--resume", "mine")
    assert code == 0 and err[0] == f"resuming with {shlex.join(config['command'])}"
    assert len(replayed.calls) == calls + 1 and files("mine") == before
    # Also beside others that are the same; what is typed anew counts.
    assert told("toy", "--seeds=4", "--problem", "quadratic(noise=0.2)", "--resume=mine")[0] == 0
    code, err = told("toy", "--problem=quadratic(noise=0.3)", "--resume=mine")
    assert (
        code == 2
        and "holds results of another configuration (problem_config.noise = 0.2, not 0.3); "
        in err[-1]
    )
    # What was run in Python has them only there, as has what cannot be read.
    write_sealed(
        Path("mine/config.json"),
        {name: value for name, value in config.items() if name != "command"},
    )
    assert "(workers = 2, not 100; steps = 2, not 200; " in told("toy", "--resume=mine")[1][-1]
    Path("mine/config.json").write_text("[1]")
    assert (
        "resume = 'mine': its config.json cannot be used (no table in JSON)"
        in told("toy", "--resume=mine")[1][-1]
    )


def test_a_study_gets_more_seeds_and_methods_but_not_fewer(told, replayed):
    more = ("--seeds=3", "--methods", "downpour", "sgd")
    assert told(*STUDY, *more, "--out=at-once")[0] == 0
    assert told(*STUDY, "--seeds=2", "--out=mine")[0] == 0
    before = len(replayed.calls)
    code, err = told("toy", *more, "--resume=mine")
    assert (
        code == 0
        and sum(line.endswith(", read") for line in err) == 2
        and len(replayed.calls) == before + 4
    )
    of_results = [
        {
            name: of
            for name, of in files(where).items()
            if name not in ("config.json", "report.html")
        }
        for where in ("at-once", "mine")
    ]
    assert of_results[0] == of_results[1]
    for fewer, message in [
        (("--seeds=1",), "(seeds = 3, not 1"),
        (("--methods=sgd",), "(methods = ['downpour', 'sgd'], not ['sgd']; "),
    ]:
        code, err = told("toy", *fewer, "--resume=mine")
        assert code == 2 and message in err[-1]
    # A folder that somebody has edited is another configuration, too.
    config = json.loads(Path("mine/config.json").read_text())
    for name, value in (("methods", None), ("command", 5)):
        write_sealed(Path("mine/config.json"), config | {name: value})
        code, err = told(*STUDY, *more, "--resume=mine")
        assert code == (0 if name == "command" else 2) and "Error" not in err[-1]
    # What was typed is kept where the study goes on in Python.
    write_sealed(Path("mine/config.json"), config)
    toy = study.load("toy")
    options = {"workers": 2, "steps": 2, "problem": "quadratic", "methods": ("downpour", "sgd")}
    toy.run(toy.Config(**options, seeds=4, resume=Path("mine")))
    assert json.loads(Path("mine/config.json").read_text())["command"] == config["command"]
    write_sealed(Path("mine/config.json"), config)
    # One of other hyper-parameters is another method's results.
    code, err = told("toy", "--learning-rate=0.1", "--resume=mine")
    assert code == 2 and "learning_rate = 0.05, not 0.1" in err[-1]


def test_only_the_same_configuration_is_resumed(told):
    assert told(*STUDY, "--out=mine")[0] == 0
    before = files("mine")
    write_sealed(Path("studies/config.json"), {})
    for options, message in [
        (
            ("--steps=3", "--resume=mine"),
            "resume = 'mine': holds results of another configuration (steps = 2, not 3)",
        ),
        (
            (
                "--steps=3",
                "--workers=3",
                "--problem=quadratic(noise=0.2)",
                "--seeds=1",
                "--resume=mine",
            ),
            "seeds = 4, not 1; and 1 other); ",
        ),
        (
            ("--seeds=3", "--resume=mine"),
            "(seeds = 4, not 3); give the options, files and versions of that folder, to",
        ),
        (("--resume=absent",), "resume = 'absent': no results of a study"),
        (
            ("--resume=studies",),
            "resume = 'studies': its config.json names no study; give a folder of results",
        ),
        (
            ("--resume=mine", "--out=other"),
            "out = 'other': results that are resumed stay where they are; leave it out",
        ),
    ]:
        code, err = told(*STUDY, *options)
        assert code == 2 and message in err[-1], err
    with jax.threefry_partitionable(False):
        code, err = told(*STUDY, "--resume=mine")
    assert code == 2 and "(jax_threefry_partitionable = True, not False)" in err[-1]
    assert files("mine") == before and sorted(path.name for path in Path().iterdir()) == [
        "mine",
        "studies",
    ]


def test_what_jobs_bring_is_in_the_tables_in_their_order_beside_the_errors_and_is_kept(capsys):
    class LastFirst(Local):
        def map(self, function, jobs):
            return reversed(list(super().map(function, jobs)))

    def measured(x):
        return {"a.csv": [{"x": x, "inverse": 1 / (x // 2)}], "b.csv": [{"x": x}] * (x - 1)}

    def run(function):
        options = {"folder": "parts/of", "errors": "b.csv", "say": lambda tables: "said"}
        runner = Runner(Path(), LastFirst())
        runner.run(
            [measurement(f"job {x}", function, x, labels={"x": x}, **options) for x in range(4)]
        )
        return runner

    runner = run(measured)
    error = "ZeroDivisionError: division by zero"
    for name, rows in (("a.csv", [2, 3]), ("b.csv", [0, 1, 2, 3, 3])):
        assert runner.tables()[name]["x"].tolist() == pd.read_csv(name)["x"].tolist() == rows
    failed = runner.tables()["b.csv"][["status", "error"]].dropna()
    assert failed.values.tolist() == [["failed", error]] * 2
    assert runner.missing == ["parts/of/job 0.json", "parts/of/job 1.json"]
    assert unsealed(Path("parts/of/job 2.json"))["tables"] == measured(2)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("[1/4] job 3: said, in ")
    assert lines[-1] == f"[4/4] job 0: failed: {error}"
    # Of two errors that are the same.
    assert sum(line.startswith("Traceback") for line in lines) == 1
    assert len(run(lambda x: {"b.csv": [{"x": x}]}).tables()["b.csv"]) == 5
    assert capsys.readouterr().err.splitlines()[0] == "[1/4] job 2: said, read"


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


# Failures


def test_a_study_of_which_all_runs_fail_ends_with_the_error(told, replayed):
    replayed.stops |= dict.fromkeys(range(1, 5), RuntimeError("no"))
    code, err = told(*STUDY, "--out=mine")
    assert code == 2 and err[-1].startswith(
        "error: all 4 runs failed, the first with RuntimeError: no"
    )
    assert sum(line.startswith("Traceback") for line in err) == 1


# Ray


def test_ray_that_is_not_installed(told, monkeypatch):
    monkeypatch.setattr("asyncsim.study.config.find_spec", lambda name: None)
    code, err = told(*STUDY, "--executor=ray")
    assert code == 2 and err[-1].endswith(
        'Ray is not installed; install it with: pip install "asyncsim[ray]"'
    )


@pytest.fixture(scope="module")
def cluster():
    """Start a Ray cluster that all tests share; executors that find one stay with it."""
    from asyncsim.study.ray_executor import joined

    with joined(None):
        yield


def spread(cpus=1, accelerators=0.0):
    from asyncsim.study.ray_executor import RayExecutor

    return RayExecutor(cpus, accelerators)


@needs_ray
def test_ray_brings_values_failures_and_lost_jobs(cluster, tmp_path):
    def job(number):
        if number == 1:
            raise ValueError("one")
        if number == 2 and not (tmp_path / "was here").exists():
            (tmp_path / "was here").touch()
            os._exit(1)  # as the system does with a process that takes too much memory
        return number, os.getpid()

    done = {
        done.place: done.value for done in spread().map(job, [(number,) for number in range(4)])
    }
    assert sorted(done) == [0, 1, 2, 3]
    assert [done[place][0] for place in (0, 2, 3)] == [0, 2, 3] and os.getpid() not in {
        done[0][1],
        done[2][1],
    }
    assert done[1].error == "ValueError: one" and "in job" in done[1].traceback


@needs_ray
@pytest.mark.full
def test_ray_gives_the_bytes_of_this_process(cluster, told, optimized):
    Path("mine.py").write_text(
        "from asyncsim.methods import Applied, downpour\n"
        "SCALE = 0.5\n"
        "def scaled(central, message):\n"
        "    return Applied(central + SCALE * message)\n"
        "def half():\n"
        "    apply = lambda server, central, message, memory, visit: scaled(central, message)\n"
        "    return downpour(0.05)._replace(name='half', apply=apply)\n"
    )
    options = ("--workers=3", "--steps=8", "--seeds=2", "--problem=quadratic", "--device=cpu")
    command = ("toy", "--methods=downpour,mine.py:half", *options)
    assert told(*command, "--out=here")[0] == 0
    code, err = told(*command, "--executor=ray", "--out=there")
    assert code == 0, err
    assert sorted(line.split(":")[0].split("] ")[1] for line in err if line.startswith("[")) == [
        f"{method}, seed {seed}" for method in ("downpour", "half") for seed in range(2)
    ]
    assert files("there") == files("here")


@needs_ray
@pytest.mark.full
def test_a_node_that_is_killed_costs_no_row(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "RAY_AUTH_MODE": "disabled",
        "JAX_NUM_CPU_DEVICES": "2",
    }
    # Runs take seconds, so that the node has one amid its commits when it is killed.
    command = [
        sys.executable,
        "-m",
        "asyncsim.study",
        "toy",
        "--workers=4",
        "--steps=1500",
        "--seeds=3",
    ]
    command.append("--methods=gem,downpour")
    options = {"env": environment, "cwd": tmp_path, "text": True, "stderr": subprocess.PIPE}
    ray_start = [
        shutil.which("ray", path=Path(sys.executable).parent),
        "start",
        "--block",
        "--num-cpus=1",
    ]
    ray_start += ["--disable-usage-stats", "--object-store-memory=200000000"]
    nodes = []

    def start(*given):
        # Each with its processes in a group of its own, which dies at once.
        node = subprocess.Popen(
            [*ray_start, *given],
            start_new_session=True,
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        nodes.append(node)
        assert any("Ray runtime started" in line for line in node.stdout)

    try:
        start("--head", f"--port={port}", "--include-dashboard=false")
        start(f"--address=127.0.0.1:{port}")
        start(f"--address=127.0.0.1:{port}")
        err = []
        with subprocess.Popen(
            [*command, "--executor=ray", f"--address=127.0.0.1:{port}", "--out=there"], **options
        ) as run:
            for line in run.stderr:
                err.append(line)
                if line.startswith("[3/6]"):  # so late that all nodes are at work
                    os.killpg(nodes[1].pid, signal.SIGKILL)
        assert run.returncode == 0, "".join(err)
    finally:
        for node in nodes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(node.pid, signal.SIGKILL)
            node.communicate()
    here = subprocess.run([*command, "--out=here"], **options)
    assert here.returncode == 0, here.stderr
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

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    modes = []

    def init(**options):
        modes.append(get_authentication_mode())
        token.write_text("secret")

    token = tmp_path / ".ray" / "auth_token"
    token.parent.mkdir()
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    for chosen in (
        "disabled",
        None,
    ):  # what is wanted of other clusters says nothing of one that is started here
        if chosen is None:
            monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
        else:
            monkeypatch.setenv("RAY_AUTH_MODE", chosen)
        with joined(None):
            assert os.environ["RAY_AUTH_MODE"] == "token"
        assert os.environ.get("RAY_AUTH_MODE") == chosen
    with (
        pytest.raises(InputError, match=r"address = 'auto': whether .* set RAY_AUTH_MODE=token"),
        joined("auto"),
    ):
        pass
    assert modes == [AuthenticationMode.TOKEN] * 2
    assert token.stat().st_mode & 0o777 == 0o600
