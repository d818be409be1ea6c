"""The command line and the study, end to end: lists, help, notes, records, interruptions, and the
wheel.
"""

import dataclasses
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pandas as pd
import pytest

from asyncsim import (
    Cluster,
    InputError,
    Run,
    methods,
    problems,
    recorders,
    replay,
    simulate,
    study,
)
from asyncsim.base.calls import name_of
from asyncsim.clusters.laws import Gamma
from asyncsim.methods import METHODS
from asyncsim.problems import PROBLEMS
from asyncsim.study.finished import TheoryValue, with_theory
from asyncsim.study.help import texts_of
from asyncsim.study.outcome import outcome, own_measures
from asyncsim.study.sweep import sweep

ROOT = study.shipped("studies").parent
HEAVY = ("jax", "jaxlib", "matplotlib", "optax", "pandas", "pyarrow", "scipy", "simpy", "sklearn")
#: Options that make any staleness study a matter of seconds.
TOY = (
    *("--workers=2", "--steps=2", "--seeds=1", "--problem=quadratic", "--methods=downpour"),
    "--learning-rate=0.05",
)
Config = study.load("staleness").Config
SHIPPED = sorted(path.stem for path in (ROOT / "studies").glob("[!_]*.py"))


def python(*arguments: str, **options) -> subprocess.CompletedProcess:
    """Run Python on the project's code."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "100"}
    environment |= options.pop("environment", {})
    usual = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.run([sys.executable, *arguments], env=environment, **usual | options)


# The list and the help


def test_list_has_a_line_for_each_study(told):
    code, out, err = told()
    assert (code, err) == (0, []) and max(map(len, out)) <= 120
    _, of_clusters, of_papers = (part.splitlines() for part in "\n".join(out).split("studies of "))
    clusters, papers = (
        dict(line.split(maxsplit=1) for line in part[1:] if line)
        for part in (of_clusters, of_papers)
    )
    assert all(text.endswith(".") for text in (*clusters.values(), *papers.values()))
    names = {*clusters, *papers}
    assert {"compare", "plan", "staleness"} <= set(clusters) and "stability" not in names
    assert {"gem", "windows"} <= set(papers)
    code, members, _ = told("gem")
    listed = {line.split()[0] for line in members[2:]}
    assert code == 0 and names - {"gem"} | listed == set(SHIPPED)


def test_help_and_bad_options_import_nothing_heavy_and_help_names_every_choice():
    program = """
import sys
from asyncsim import study
for name in ("throughput", "momentum", "real", "staleness"):
    for arguments in ([], [name, "--help"], [name, "-h"]):
        assert study.main(arguments) == 0
loaded = lambda: print("loaded:", *sorted({name.partition(".")[0] for name in sys.modules}))
loaded()
for options in ("--bogus 3", "--seeds x", "--workers 0", "--methods gme", "--problem mnits"):
    assert study.main(["staleness", *options.split()]) == 2
loaded()
"""
    ended = python("-c", program)
    assert ended.returncode == 0, ended.stderr
    by_help, by_errors = re.findall("^loaded: .*", ended.stdout, re.MULTILINE)
    assert not set(by_help.split()) & set(HEAVY)
    assert set(by_errors.split()).isdisjoint({"jax", "optax", "pandas", "matplotlib"})
    laws = [name_of(law) for law in Gamma.__base__.__subclasses__()]
    assert set(laws) | set(METHODS) | set(PROBLEMS) <= set(re.split(r"[^a-z0-9_]+", ended.stdout))


@pytest.mark.parametrize("name", SHIPPED)
def test_help_names_every_option_and_its_example_can_be_read(told, monkeypatch, name):
    monkeypatch.setenv("COLUMNS", "80")
    config = study.load(name, options_alone=True).Config
    options = {field for field, text in texts_of(config).items() if text}
    code, lines, err = told(name, "--help")
    listed = {
        option.replace("-", "_") for option in re.findall(r"--([a-z0-9-]+)", "\n".join(lines))
    }
    assert (code, err) == (0, []) and options <= listed
    code, brief, err = told(name, "-h")
    assert (code, err) == (0, []) and len(brief) < len(lines) and len(brief) <= 40
    (example,) = (line for line in brief if line.startswith(f"example: asyncsim study {name}"))
    study.configure(name, shlex.split(example.partition(name)[2]))


# Options


def test_switches_can_be_said_either_way():
    for scale, by_default in (("small", True), ("paper", False)):
        for option, limits in (("--limits", True), ("--no-limits", False)):
            _, config = study.configure("stability", ["--scale", scale, option])
            assert config.limits is limits
        _, config = study.configure("stability", ["--scale", scale])
        assert config.limits is by_default


@pytest.mark.parametrize(
    ("study_name", "given", "field", "values"),
    [
        ("throughput", "--workers 10,100", "workers", (10, 100)),
        ("throughput", "--workers=10,100", "workers", (10, 100)),
        ("throughput", "--workers 10 100", "workers", (10, 100)),
        ("delays", "--server-momentum -0.5,0.5,1e-3", "server_momentum", (-0.5, 0.5, 1e-3)),
        ("staleness", "--compute gamma(1,0.2)", "compute", "gamma(1,0.2)"),
        ("staleness", "--seeds 2 --seeds 5", "seeds", 5),
        ("plan", "--tune none", "tune", None),
        ("plan", "--model-parameters None", "model_parameters", None),
        ("gossip", "--split none 0.1", "split", (None, 0.1)),
    ],
)
def test_values_are_read_as_they_are_typed(study_name, given, field, values):
    _, config = study.configure(study_name, given.split(" "))
    assert getattr(config, field) == values


def test_methods_with_spaces_or_commas_or_one_name_from_python():
    for given in ("gem,downpour", "gem downpour", "gem, downpour", "gem ,downpour,"):
        _, config = study.configure("staleness", ["--methods", *given.split(" ")])
        assert [method.name for method in config.make_methods()] == ["gem", "downpour"]
    assert [method.name for method in Config(methods="gem").make_methods()] == ["gem"]


def test_device_that_is_not_there(told, tmp_path, monkeypatch):
    def none(kind):
        raise RuntimeError(f"Unknown backend: {kind!r}")

    monkeypatch.setattr(jax, "devices", none)
    code, _, err = told("staleness", *TOY, "--device=tpu")
    assert (code, len(err)) == (2, 1)
    assert "device = 'tpu': JAX finds none here; choose default" in err[0]
    assert list(tmp_path.iterdir()) == []


def test_entries_with_arguments_and_sweeps(capsys):
    def made(*entries, **options):
        every = Config(methods=entries, **options).make_methods()
        return {method.name: method.hyperparameters for method in every}

    assert list(made("gem(kappa=2)")) == ["gem"]
    entries = made("gem", "gem(kappa=[1, 2.5], momentum=0.5)", "downpour", learning_rate=0.1)
    assert [(name, entry.get("kappa")) for name, entry in entries.items()] == [
        ("gem", 1.0),
        ("gem(kappa=1,momentum=0.5)", 1),
        ("gem(kappa=2.5,momentum=0.5)", 2.5),
        ("downpour", None),
    ]
    assert [entry["learning_rate"] for entry in entries.values()] == [0.1] * 4
    # What all entries share sets none apart.
    shared = made("gem(kappa=[1, 2], momentum=0.5, variant=paper)")
    assert list(shared) == ["gem(kappa=1)", "gem(kappa=2)"]
    adam = "downpour(optimizer=adam, learning_rate=0.002)"
    entries = made(adam, "easgd(policy=barrier(3))", optimizer="sgd")
    assert entries["downpour"] == {"learning_rate": 0.002, "optimizer": "adam"}
    assert entries["easgd"]["optimizer"] == "sgd"
    with pytest.raises(InputError, match="the same name twice"):
        made("gem(kappa=1)", "gem(kappa=1)")
    assert made("gem(0.2)")["gem"]["learning_rate"] == 0.2
    problem = Config(problem="quadratic(curvature=[2, 1], noise=0.5)").make_problem()
    assert (problem.config["curvature"], problem.config["noise"]) == ([2, 1], 0.5)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("options", "notes"),
    [
        ({}, []),
        ({"optimizer": "adam"}, ["--optimizer changes nothing for gem"]),
        (
            {"diagnose_every": 0, "diagnose_energy": True},
            ["--diagnose-energy changes nothing with --diagnose-every 0"],
        ),
        ({"problem": "quadratic", "batch_size": 8}, ["--batch-size changes nothing for quadratic"]),
        (
            {"methods": ("gem", methods.downpour()._replace(name="mine")), "learning_rate": 0.1},
            ["--learning-rate changes nothing for mine"],
        ),
        (
            {"workers": 2, "compute": "[constant(1)]*2"},
            ["compute: one law per worker was given and all 2 are constant(value=1), which"],
        ),
    ],
)
def test_options_that_change_nothing_are_noted_once(capsys, options, notes):
    config = Config(**options)
    config.check()
    sweep(config, [{}])
    out, err = capsys.readouterr()
    lines = [
        line[: len(f"note: {note}")] for line, note in zip(err.splitlines(), notes, strict=True)
    ]
    assert out == "" and lines == [f"note: {note}" for note in notes]


def test_options_are_chosen_where_they_are_given(capsys):
    """Also at their defaults, on the command line; in Python where they have another value."""

    def changed(config):
        return {name for name in vars(config) if config.changed(name)}

    options = "--momentum=0.9 --protocol read_then_write --batch-size 16"
    _, typed = study.configure("staleness", options.split())
    assert changed(typed) == {"momentum", "protocol", "batch_size"}
    assert changed(dataclasses.replace(typed)) == {"protocol", "batch_size"}
    _, scaled = study.configure("windows", ["--scale", "paper"])
    assert changed(scaled) & {"network", "learning_rate", "scale"} == {"scale"}
    _, ignored = study.configure("staleness", ["--problem", "quadratic", "--batch-size", "None"])
    ignored.make_problem()
    assert "note: --batch-size changes nothing for quadratic\n" in capsys.readouterr().err


# Running


@pytest.mark.full
def test_double_precision_on_a_chosen_device(told, quick_figures):
    before = jax.config.jax_default_device
    code, _, err = told("staleness", *TOY, "--x64", "--device=cpu", "--out=mine")
    assert code == 0, err
    run = Run.load("mine/runs/downpour-seed0")
    assert run.config["precision"] == "float64" and run.params.dtype == np.float64
    assert not jax.config.jax_enable_x64 and jax.config.jax_default_device is before


@pytest.mark.full
def test_a_study_from_python_is_recorded(capsys, quick_figures):
    staleness = study.load("staleness")
    config = staleness.Config(
        workers=np.int64(3),
        steps=4,
        seeds=2,
        compute=[Gamma(mean=1, cv=0.2), "exponential(1)", 2.0],
        methods=(methods.downpour(learning_rate=0.02)._replace(name="mine"), "downpour"),
        tune=None,
        problem=problems.quadratic([1.0, 0.1]),
        batch_size=8,
        out=Path("mine"),
    )
    folder, summary = staleness.run(config)
    assert folder == Path("mine") and list(summary["method"]) == ["mine", "downpour"] * 2
    assert set(summary["method.learning_rate"]) == {0.02, 0.05}
    written = pd.read_csv(folder / "summary.csv")
    expected = summary.astype({"diverged_at": float})
    pd.testing.assert_frame_equal(written, expected, check_dtype=False)
    record = json.loads((folder / "config.json").read_text())
    versions = record.pop("versions_of")
    assert versions["jax"] == jax.__version__ and "numpy" in versions
    expected = {
        "compute": ["gamma(mean=1, cv=0.2)", "exponential(1)", 2.0],
        "workers": 3,
        "methods": ["mine", "downpour"],
        "hyperparameters": {"mine": {"learning_rate": 0.02}, "downpour": {"learning_rate": 0.05}},
        "problem": "quadratic",
        "problem_config": {"curvature": [1.0, 0.1], "noise": 0.0, "start": 1.0},
    }
    assert record == record | expected
    # What these objects do not use is not written, least of all with its default.
    assert not {"out", "batch_size", "learning_rate"} & set(record)
    assert capsys.readouterr().err.count("note: --batch-size changes nothing for quadratic") == 1


@pytest.mark.parametrize(
    ("measured", "steps", "exact", "said"),
    [
        (5.04, 100, False, "at most 4.98 (a bound, which short traces exceed)"),
        (5.04, 1000, False, "at most 4.98 (a bound)"),  # nothing excuses it
        (4.980000001, 10, False, "at most 4.98 (a bound)"),  # round-off, which does not show
        (5.04, 10, True, "4.98 (a bound)"),
    ],
)
def test_bounds_that_short_traces_exceed(measured, steps, exact, said):
    assert with_theory(TheoryValue(4.98, "a bound", exact), measured, 2, steps) == (
        f"{measured:.2f}",
        said,
    )
    assert with_theory(None, measured, 2, steps) == (f"{measured:.2f}", "")


@pytest.mark.full
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a full disk of Linux")
def test_printing_to_a_full_disk():
    with open("/dev/full", "w") as full:
        buffered = {"PYTHONUNBUFFERED": ""}
        ended = python("-m", "asyncsim.study", environment=buffered, stdout=full)
    assert ended.returncode == 2 and "Traceback" not in ended.stderr
    assert ended.stderr.endswith(
        "error: standard output cannot be written: No space left on device\nhint: free some space\n"
    )


@pytest.mark.parametrize("part", ["train", "test"])
def test_a_table_shows_measures_of_ones_own(part):
    measured = [f"{part}_{name}" for name in ("loss", "recall", "mae", "bias")]
    assert own_measures(["train_loss", "train_gap", *measured]) == [
        *(["train_gap"] if part == "train" else []),
        *measured[1:],
    ]


def test_the_energy_ratio_is_of_the_commits_that_moved_the_central_variable():
    """A server that waits for all: only the last message of each round moves it."""
    method, problem = methods.batch_sgd(), problems.quadratic([1.0, 0.1], noise=0.1)
    for rounds, late in ((20, 2), (3, 1)):  # one round is longer than the last tenth of three
        trace = simulate(Cluster(4, "gamma(1, 0.2)", policy="barrier()"), 4 * rounds, seed=0)
        run = replay(trace, method, problem, seed=0, record=[recorders.energy()])
        moves = run.commits["central_energy"] > 0
        assert moves.tolist() == [False, False, False, True] * rounds
        ratios = (run.commits["central_energy"] / run.commits["proxy_energy"])[moves].tail(late)
        assert outcome(run, trace)["energy_ratio"] == pytest.approx(ratios.median())


@pytest.mark.full
def test_control_c(tmp_path):
    # A job that a shell started in the background ignores interrupts, and so would what it starts.
    program = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from asyncsim import study
sys.exit(study.main(sys.argv[1:]))
"""
    options = "--workers=10 --steps=500 --seeds=12 --learning-rate=0.05 --methods=downpour"
    with subprocess.Popen(
        [sys.executable, "-c", program, "staleness", *options.split()],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        # Several at once.
        assert process.stderr.readline().startswith("[1/12] downpour, seed ")
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=120)
    assert process.returncode == 130 and "Traceback" not in err
    assert "interrupted: the finished results are in results/staleness" in err
    folder = Path("results", "staleness")
    runs = pd.read_csv(folder / "summary.csv")["run_folder"]
    assert {Run.load(folder / run).status for run in runs} == {"finished"}


@pytest.mark.full
def test_the_second_start_compiles_nothing_and_gives_the_same(tmp_path, monkeypatch):
    for name in [name for name in os.environ if name.startswith("JAX_")]:
        monkeypatch.delenv(name)
    cache = tmp_path / "cache"

    def start(out: str, *options: str) -> set[str]:
        environment = {"XDG_CACHE_HOME": str(cache), "MPLBACKEND": "agg"}
        command = ("-m", "asyncsim.study", "staleness", *TOY, f"--out={out}", *options)
        ended = python(*command, environment=environment)
        assert ended.returncode == 0, ended.stderr
        return {path.name for path in cache.rglob("*-cache")}

    assert start("off", "--no-compilation-cache") == set()
    compiled = start("first")
    assert any("advance" in name for name in compiled) and start("second") == compiled
    for name in ("summary.csv", "runs/downpour-seed0/commits.parquet"):
        assert Path("first", name).read_bytes() == Path("second", name).read_bytes()


# The wheel


@pytest.mark.full
def test_wheel_carries_studies_and_figures(tmp_path):
    def pip(*arguments):
        quiet = ("-m", "pip", "--disable-pip-version-check", "-q")
        python(*quiet, *arguments, check=True)

    pip("wheel", str(ROOT), "--no-deps", "-w", str(tmp_path))
    (wheel,) = tmp_path.glob("asyncsim-*.whl")
    installed, empty = tmp_path / "installed", tmp_path / "empty"
    empty.mkdir()
    pip("install", "--no-deps", "--target", str(installed), str(wheel))
    names = {path.name for path in installed.iterdir() if path.suffix != ".dist-info"}
    assert names == {"asyncsim", "bin"}
    for file in ("studies/staleness.py", "studies/throughput.py", "problems/queues.txt"):
        assert (installed / "asyncsim" / file).is_file()
    (scripts,) = installed.glob("asyncsim-*.dist-info/entry_points.txt")
    assert "asyncsim = asyncsim.__main__:main\n" in scripts.read_text()

    def run(*arguments):
        environment = {"PYTHONPATH": str(installed)}
        ended = python(*arguments, cwd=empty, environment=environment)
        assert ended.returncode == 0, ended.stderr
        return ended.stdout

    where = run("-c", "import asyncsim; print(asyncsim.__file__)")
    assert where.strip() == str(installed / "asyncsim/__init__.py")
    listed = run("-m", "asyncsim.study")
    assert "  staleness " in listed and "  throughput " in listed
    run("-m", "asyncsim.study", "staleness", *TOY)
    run("-m", "asyncsim", "figures", "results/staleness")
