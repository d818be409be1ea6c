"""The command line and the study, end to end: lists, help, bad input, notes, interruptions, bytes,
and the wheel.
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
from test_gem_studies import stop_at

from asyncsim import (
    Cluster,
    InputError,
    Run,
    Trace,
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
from asyncsim.study import cell
from asyncsim.study.finished import TheoryValue, figures, read, with_theory
from asyncsim.study.help import texts_of
from asyncsim.study.outcome import outcome, own_measures
from asyncsim.study.sweep import ComparisonConfig, sweep

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
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "100"} | options.pop(
        "environment", {}
    )
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, env=environment, **options
    )


def own_study(name: str, text: str) -> Path:
    path = Path("studies", f"{name}.py")
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    return path


# The list and the help


def test_list_has_a_line_for_each_study(told):
    code, out, err = told()
    assert (code, err) == (0, [])
    _, of_clusters, of_papers = (part.splitlines() for part in "\n".join(out).split("studies of "))
    lines = [line.split(maxsplit=1) for line in (*of_clusters[1:], *of_papers[1:]) if line]
    assert all(text.endswith(".") for _, text in lines)
    assert all(len(line) <= 120 for line in out)
    names = {name for name, _ in lines}
    assert {"compare", "plan", "staleness"} <= names and "stability" not in names
    assert {"gem", "windows"} <= {line.split()[0] for line in of_papers[1:] if line}
    code, members, _ = told("gem")
    listed = {line.split()[0] for line in members[2:]}
    assert code == 0 and names - {"gem"} | listed == set(SHIPPED)


def test_list_from_a_clone_has_nothing_twice(told, monkeypatch):
    """Also from a clone beside the installed package, as after ``pip install .``."""
    before = told()
    own_study("staleness", OWN)
    Path("asyncsim").mkdir()
    Path("asyncsim", "__init__.py").touch()
    assert told() == before
    monkeypatch.chdir(ROOT)
    assert told() == before


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


def test_an_attack_is_printed_and_in_the_title(told):
    code, out, _ = told("staleness", *TOY, "--attack=sign_flip(1)")
    assert code == 0 and "attack sign_flip(1)" in out[0]
    curves = figures("comparison").curves(read(Path("results", "staleness"), "staleness"))
    title = curves.get_suptitle()
    assert "attack sign_flip(1)" in title.replace("\n", " ")


def test_device_that_is_not_there(told, tmp_path, monkeypatch):
    def none(kind):
        raise RuntimeError(f"Unknown backend: {kind!r}")

    monkeypatch.setattr(jax, "devices", none)
    code, _, err = told("staleness", *TOY, "--device=tpu")
    assert (code, len(err)) == (2, 1)
    assert "device = 'tpu': JAX finds none here; choose default" in err[0]
    assert list(tmp_path.iterdir()) == []


MINE = """
from asyncsim.methods import Method, declared, gradient_steps

@declared
def damped(learning_rate=0.01, patience=10):
    return Method(gradient_steps(learning_rate))

@declared
def stepping(steps=3):
    return Method(gradient_steps(0.1))

def needs(patience):
    return damped(patience=patience)

def other():
    return 3

def fails():
    raise RuntimeError("no luck")

made = damped()
"""


def test_a_method_of_an_own_file(capsys):
    Path("mine.py").write_text(MINE)
    (method,) = Config(methods="mine.py:damped").make_methods()
    assert method.hyperparameters == {"learning_rate": 0.01, "patience": 10}
    assert (
        capsys.readouterr().err
        == "note: mine.py:damped keeps its own learning_rate = 0.01 (the study's: 0.05)\n"
    )
    (method,) = Config(methods="mine.py:damped").make_methods(swept={"learning_rate"})
    assert method.hyperparameters["learning_rate"] == 0.05
    # Only options that methods are made from.
    (method,) = Config(methods="mine.py:stepping", steps=7).make_methods()
    assert method.hyperparameters == {"steps": 3}
    capsys.readouterr()
    method, _ = Config(methods=("mine.py:damped", "gem"), learning_rate=0.1).make_methods()
    assert method.hyperparameters == {"learning_rate": 0.1, "patience": 10}
    (method,) = Config(methods="mine.py:damped(patience=3)", learning_rate=0.1).make_methods()
    assert method.hyperparameters == {"learning_rate": 0.1, "patience": 3}
    (method,) = Config(methods="mine.py:stepping(7)").make_methods()
    assert method.hyperparameters["steps"] == 7 and capsys.readouterr().err == ""


def test_entries_with_arguments_and_sweeps(capsys):
    def made(*entries, **options):
        return {
            one.name: one.hyperparameters
            for one in Config(methods=entries, **options).make_methods()
        }

    assert list(made("gem(kappa=2)")) == ["gem"]
    found = made("gem", "gem(kappa=[1, 2.5], momentum=0.5)", "downpour", learning_rate=0.1)
    assert list(found) == [
        "gem",
        "gem(kappa=1,momentum=0.5)",
        "gem(kappa=2.5,momentum=0.5)",
        "downpour",
    ]
    assert [one.get("kappa") for one in found.values()] == [1.0, 1, 2.5, None]
    assert [one["learning_rate"] for one in found.values()] == [0.1] * 4
    # What all entries share sets none apart.
    assert list(made("gem(kappa=[1, 2], momentum=0.5, variant=paper)")) == [
        "gem(kappa=1)",
        "gem(kappa=2)",
    ]
    found = made(
        "downpour(optimizer=adam, learning_rate=0.002)", "easgd(policy=barrier(3))", optimizer="sgd"
    )
    assert (
        found["downpour"] == {"learning_rate": 0.002, "optimizer": "adam"}
        and found["easgd"]["optimizer"] == "sgd"
    )
    with pytest.raises(InputError, match="the same name twice"):
        made("gem(kappa=1)", "gem(kappa=1)")
    (method,) = Config(methods=("gem(0.2)",)).make_methods()
    assert method.hyperparameters["learning_rate"] == 0.2
    problem = Config(problem="quadratic(curvature=[2, 1], noise=0.5)").make_problem()
    assert (problem.config["curvature"], problem.config["noise"]) == ([2, 1], 0.5)
    assert capsys.readouterr().err == ""


def test_cells_share_only_what_is_the_same():
    one, other = (problems.quadratic([1.0], start=start) for start in (1.0, 2.0))
    config = ComparisonConfig(methods=("downpour",), workers=(2,), seeds=1, steps=2)
    grid = [{"workers": n, "problem": problem} for n, problem in ((2, one), (3, other), (4, one))]
    assert [cell.problem for cell in sweep(config, grid)] == [one, other, one]
    with pytest.raises(
        InputError, match=r"grid: two of its cells are called .workers-2_problem-Problem"
    ):
        sweep(config, [{"workers": 2, "problem": problem} for problem in (one, other)])


def test_long_values_are_cut_in_the_names_of_folders():
    config = ComparisonConfig(
        methods=("downpour",), workers=(2,), problem="quadratic", seeds=1, steps=2
    )
    laws = [f"empirical([{', '.join(['1.25'] * 60 + [last])}])" for last in ("1", "2")]
    names = [cell.name for cell in sweep(config, [{"workers": 2, "compute": law} for law in laws])]
    assert len(set(names)) == 2 and all(len(name) < 120 for name in names)


def test_own_methods_get_what_the_cells_of_a_study_differ_in(capsys):
    Path("mine.py").write_text(MINE)
    config = ComparisonConfig(
        methods=("mine.py:damped",), workers=(2, 3), problem="quadratic", seeds=1, steps=2
    )
    cells = sweep(
        config, [{"learning_rate": rate, "workers": n} for rate in (0.05, 0.2) for n in (2, 3)]
    )
    assert [cell.methods[0].hyperparameters["learning_rate"] for cell in cells] == [
        0.05,
        0.05,
        0.2,
        0.2,
    ]
    assert not capsys.readouterr().err
    cells = sweep(config, [{"workers": n} for n in (2, 3)])
    assert {cell.methods[0].hyperparameters["learning_rate"] for cell in cells} == {0.01}
    assert capsys.readouterr().err.count("keeps its own learning_rate = 0.01") == 1


MOONS = """
import functools

import jax.numpy as jnp
import numpy as np
from asyncsim.problems import custom

def moons(batch_size=8, noise=0.2, workers=1):
    x = np.random.default_rng(workers).normal(size=(40, 2))

    def loss(params, batch, key):
        return jnp.mean((batch["x"] @ params - batch["y"]) ** 2)

    data = {"x": x, "y": x[:, 0]}
    name = f"moons of {workers}"
    config = {"noise": noise}
    return custom(lambda key: jnp.zeros(2), loss, data, data, batch_size, name=name, config=config)

def none():
    return None

def fails():
    return custom(1, 2)

def exits():
    raise SystemExit(5)

def fixed():
    return moons()

def nan():
    return custom(lambda key: jnp.zeros(2), lambda params, batch, key: jnp.nan * params.sum())

def undefined():
    def loss(params, batch, key):
        return jnp.mean((params - 1) ** 2)

    def evaluate(params, data):
        return {"loss": loss(params, data, None), "share": jnp.where(params[0] > 0, jnp.nan, 0.0)}

    return custom(lambda key: jnp.zeros(2), loss, evaluate=evaluate)

partial = functools.partial(undefined)
three = 3
"""


def test_a_problem_of_an_own_file(capsys):
    Path("mine.py").write_text(MOONS)
    problem = Config(problem="mine.py:moons").make_problem()
    assert (problem.batch_size, problem.config["noise"], problem.name) == (8, 0.2, "moons of 100")
    assert capsys.readouterr().err == ""
    for name in ("undefined", "partial"):  # which say no name themselves
        assert Config(problem=f"mine.py:{name}").make_problem().name == name
    problem = Config(problem="mine.py:moons(noise=0.3)", batch_size=4).make_problem()
    assert (problem.batch_size, problem.config["noise"]) == (4, 0.3)
    assert capsys.readouterr().err == ""
    grid = [{"workers": 2}, {"workers": 3, "problem": "mine.py:moons(noise=0.1)"}]
    cells = sweep(ComparisonConfig(problem="mine.py:moons", methods=("downpour",)), grid)
    assert [cell.problem.name for cell in cells] == ["moons of 2", "moons of 3"]
    assert [cell.problem.config["noise"] for cell in cells] == [0.2, 0.1]


@pytest.mark.parametrize(
    ("option", "entry", "message"),
    [
        (
            "methods",
            "mine.py",
            "methods = 'mine.py': is a file; name its function, too: mine.py:FUNCTION",
        ),
        ("methods", "mine:own", "methods = 'mine:own': write FILE.py:FUNCTION for one of your own"),
        (
            "methods",
            "mine.py:dampd",
            "mine.py has no function dampd; did you mean 'damped'? choose from damped",
        ),
        ("methods", "mine.py:made", "made is a Method, must be a function that returns a Method"),
        ("methods", "mine.py:needs", "patience missing; write needs(patience)"),
        ("methods", "mine.py:other", "methods = 'mine.py:other': returned 3; must return a Method"),
        (
            "methods",
            "broken.py:damped",
            "cannot be imported: line 1: ZeroDivisionError: division by zero",
        ),
        ("problem", "moons.py:moon", "problem = 'moons.py:moon': moons.py has no function moon"),
        (
            "problem",
            "moons.py:none",
            "returned None; must return a Problem, as problems.custom() does",
        ),
        ("problem", "moons.py:fails", "init = 1: must be a function"),
        (
            "problem",
            "moons.py:exits",
            "problem = 'moons.py:exits': cannot be made: line 26: SystemExit: 5",
        ),
        ("problem", "yours.py:moons", "problem = 'yours.py:moons': there is no file yours.py"),
    ],
)
def test_an_own_file_without_a_method_or_a_problem(option, entry, message):
    for name, text in (("mine", MINE), ("moons", MOONS), ("broken", "1 / 0\n")):
        Path(f"{name}.py").write_text(text)
    config = Config(**{option: entry})
    with pytest.raises(InputError, match=re.escape(message)):
        config.make_methods() if option == "methods" else config.make_problem()


@pytest.mark.parametrize(
    ("name", "problem", "message"),
    [
        (
            "speedup",
            "fixed",
            "problem = 'moons of 1': has minibatches of 8, but this study derives their size from",
        ),
        (
            "staleness",
            "nan",
            "problem: its train loss is nan at the initial parameters, before any commit",
        ),
    ],
)
def test_own_problems_that_a_study_cannot_take(told, name, problem, message):
    Path("mine.py").write_text(MOONS)
    code, _, err = told(name, *TOY, f"--problem=mine.py:{problem}")
    assert code == 2 and message in "\n".join(err)


def test_what_lies_beside_an_own_file_can_be_imported(tmp_path, monkeypatch):
    folder = tmp_path / "beside"
    folder.mkdir()
    (folder / "helping_moons.py").write_text(MOONS)
    (folder / "main_moons.py").write_text("from helping_moons import moons\n")
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert Config(problem=f"{folder / 'main_moons.py'}:moons").make_problem().batch_size == 8


# What is said aloud


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
            [
                "compute: one law per worker was given and all 2 are constant(value=1), which "
                "changes nothing; "
            ],
        ),
    ],
)
def test_options_that_change_nothing_are_said_aloud_once(capsys, options, notes):
    config = Config(**options)
    config.check()
    sweep(config, [{}])
    output = capsys.readouterr()
    lines = output.err.splitlines()
    assert output.out == "" and len(lines) == len(notes)
    assert all(line.startswith(f"note: {note}") for line, note in zip(lines, notes, strict=True))


# A user's own studies

OWN = '''"""Say hello.

More.
"""
from dataclasses import dataclass

@dataclass(frozen=True)
class Config:
    """Options."""

    times: int = 1
    """How often."""

def run(config):
    print("hello" * config.times)
'''


def test_own_study_is_listed_and_run_beside_the_shipped(told):
    own_study("mine", OWN)
    own_study("_helper", "raise ValueError")
    _, out, err = told()
    assert ["mine", "Say hello."] in [line.split(maxsplit=1) for line in out] and err == []
    assert told("mine", "--times", "2") == (0, ["hellohello"], [])
    own_study("needs", OWN.replace("times: int = 1", "times: int"))
    assert told("needs", "--times", "2") == (0, ["hellohello"], [])
    code, _, err = told("needs")
    assert code == 2 and any("--times" in line for line in err)


def test_own_study_of_another_folder_is_another_study(told, monkeypatch):
    for word in ("here", "there"):
        folder = Path(word).absolute()
        folder.mkdir()
        monkeypatch.chdir(folder)
        own_study("mine", OWN.replace("hello", word))
        assert told("mine") == (0, [word], [])
        monkeypatch.chdir(folder.parent)


def test_own_study_never_takes_the_place_of_a_shipped_one(told):
    path = own_study("staleness", OWN).absolute()
    note = f"note: {path} is not used: a shipped study is called staleness; rename yours"
    code, out, err = told()
    assert (code, err) == (0, [note])
    assert sum("staleness" in line.split()[:1] for line in out) == 1 and not any(
        "hello" in line for line in out
    )
    assert study.load("staleness").__file__ == str(study.shipped("studies") / "staleness.py")
    code, _, err = told("staleness", "--workers", "0")
    hint = "asyncsim study staleness --help explains the options"
    assert (code, err) == (2, [note, f"error: workers = 0: must be at least 1; {hint}"])


@pytest.mark.parametrize(
    ("text", "listed", "error"),
    [
        ('"""Text."""\nimport (\n', "(cannot be read: line 2: ", "cannot be imported: line 2: "),
        ("\0", "(cannot be read: ", "cannot be imported: "),
        (
            '"""Text."""\nimport no_such_module\n',
            "Text.",
            "cannot be imported: line 2: ModuleNotFoundError: No module",
        ),
        ('"""Text."""\n\nexit(3)\n', "Text.", "cannot be imported: line 3: SystemExit: 3"),
        (
            "x = 1\n",
            "(no docstring)",
            "has no Config and no run; a study is a dataclass Config and a function run",
        ),
        ("class Config: pass\n", "(no docstring)", "has no run; a study is"),
    ],
)
def test_broken_own_study_does_not_break_the_others(told, text, listed, error):
    own_study("broken", text)
    code, out, err = told()
    assert (code, err) == (0, [])
    assert any(re.match(rf"  broken +{re.escape(listed)}", line) for line in out)
    assert any(line.startswith("  staleness ") for line in out)
    code, out, err = told("broken")
    assert (code, out, len(err)) == (2, [], 1)
    assert err[0].startswith("error: study = 'broken': ") and error in err[0]


# Running


def test_study_says_and_writes_what_can_be_read(told, quick_figures):
    code, out, err = told("staleness", "--workers=2", "--steps=20", "--seeds=1")
    assert code == 0, err
    words = (*Config().methods, "staleness, mean", "test accuracy", "diverged")
    assert [word for word in words if word not in "\n".join(out)] == []
    assert len(err) == 3 * 4 and "] adaptive_staleness, seed 0: loss" in "\n".join(err)
    folder = Path("results", "staleness")
    named = out[-2].partition("wrote results/staleness: ")[2].split(", ")
    assert sorted(named) == sorted(path.name for path in folder.iterdir())
    config = json.loads((folder / "config.json").read_text())
    assert (config["study"], config["workers"], config["problem"]) == ("staleness", 2, "digits")
    summary = pd.read_csv(folder / "summary.csv")
    assert list(summary["method"]) == list(Config().methods) and set(summary["status"]) == {
        "finished"
    }
    for row in summary.itertuples():
        trace, run = Trace.load(folder / row.trace_file), Run.load(folder / row.run_folder)
        assert len(trace) == len(run.commits) == 40
        assert row.test_accuracy == run.evaluations["test_accuracy"].iloc[-1]
    assert not [path for path in folder.rglob(".*")]


@pytest.mark.full
def test_double_precision_on_a_chosen_device(told, quick_figures):
    before = jax.config.jax_default_device
    code, _, err = told("staleness", *TOY, "--x64", "--device=cpu", "--out=mine")
    assert code == 0, err
    run = Run.load("mine/runs/downpour-seed0")
    assert run.config["precision"] == "float64" and run.params.dtype == np.float64
    assert not jax.config.jax_enable_x64 and jax.config.jax_default_device is before


@pytest.mark.full
def test_study_from_python(tmp_path, capsys, quick_figures):
    staleness = study.load("staleness")
    own = methods.downpour(learning_rate=0.02)._replace(name="mine")
    config = staleness.Config(
        workers=np.int64(3),
        steps=4,
        seeds=2,
        compute=[Gamma(mean=1, cv=0.2), "exponential(1)", 2.0],
        service=0.01,
        methods=(own, "downpour"),
        tune=None,
        problem=problems.quadratic([1.0, 0.1]),
        batch_size=8,
        out=tmp_path / "mine",
    )
    result = staleness.run(config)
    assert result.folder == tmp_path / "mine"
    assert list(result.summary["method"]) == ["mine", "downpour"] * 2
    assert set(result.summary["method.learning_rate"]) == {0.02, 0.05}
    summary = pd.read_csv(result.folder / "summary.csv")
    pd.testing.assert_frame_equal(
        summary, result.summary.astype({"diverged_at": float}), check_dtype=False
    )
    written = json.loads((result.folder / "config.json").read_text())
    assert written["compute"] == ["gamma(mean=1, cv=0.2)", "exponential(1)", 2.0]
    assert (written["workers"], written["methods"], written["problem"]) == (
        3,
        ["mine", "downpour"],
        "quadratic",
    )
    assert written["problem_config"] == {"curvature": [1.0, 0.1], "noise": 0.0, "start": 1.0}
    assert written["hyperparameters"] == {
        "mine": {"learning_rate": 0.02},
        "downpour": {"learning_rate": 0.05},
    }
    assert written["versions_of"]["jax"] == jax.__version__ and "numpy" in written["versions_of"]
    # What these objects do not use is not written, least of all with its default.
    assert not {"out", "batch_size", "learning_rate"} & set(written)
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
def test_what_is_printed_to_a_full_disk():
    with open("/dev/full", "w") as full:
        buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
        ended = subprocess.run(
            [sys.executable, "-m", "asyncsim.study"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            env=buffered,
        )
    assert ended.returncode == 2 and "Traceback" not in ended.stderr
    assert ended.stderr.endswith(
        "error: standard output cannot be written: No space left on device\nhint: free some space\n"
    )


def test_options_are_chosen_where_they_are_given(capsys):
    """Also at their defaults, on the command line; in Python where they have another value."""
    _, given = study.configure(
        "staleness", ["--momentum=0.9", "--protocol", "read_then_write", "--batch-size", "16"]
    )
    assert {name for name in vars(given) if given.changed(name)} == {
        "momentum",
        "protocol",
        "batch_size",
    }
    made = dataclasses.replace(given)
    assert {name for name in vars(made) if made.changed(name)} == {"protocol", "batch_size"}
    _, scaled = study.configure("windows", ["--scale", "paper"])
    assert [name for name in ("network", "learning_rate", "scale") if scaled.changed(name)] == [
        "scale"
    ]
    _, ignored = study.configure("staleness", ["--problem", "quadratic", "--batch-size", "None"])
    ignored.make_problem()
    assert "note: --batch-size changes nothing for quadratic\n" in capsys.readouterr().err


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
        moved = run.commits[3::4]
        assert (
            (run.commits["central_energy"] > 0).sum()
            == rounds
            == (moved["central_energy"] > 0).sum()
        )
        ratios = (moved["central_energy"] / moved["proxy_energy"]).tail(late)
        assert outcome(run, trace)["energy_ratio"] == pytest.approx(ratios.median())


# What is left when it ends early

TWO = (*TOY[:4], TOY[-1], "--methods=downpour,adaptive_staleness", "--out=mine")


def test_interrupted_study_without_finished_runs_leaves_nothing(told, monkeypatch, tmp_path):
    stop_at(monkeypatch, cell, 1)
    code, out, err = told("staleness", *TWO)
    assert (code, out, err[-1]) == (130, [], "interrupted: nothing was finished")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.full
def test_control_c(tmp_path):
    # A job that a shell started in the background ignores interrupts, and so would what it starts.
    program = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from asyncsim import study
sys.exit(study.main(sys.argv[1:]))
"""
    command = [
        sys.executable,
        "-c",
        program,
        "staleness",
        "--workers=10",
        "--steps=500",
        "--seeds=12",
        "--learning-rate=0.05",
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        [*command, "--methods=downpour"],
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stderr is not None
        assert process.stderr.readline().startswith("[1/12] downpour, seed ")  # several at once
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=120)
    assert process.returncode == 130
    assert (
        "interrupted: the finished results are in results/staleness" in err
        and "Traceback" not in err
    )
    folder = tmp_path / "results" / "staleness"
    finished = pd.read_csv(folder / "summary.csv")["run_folder"]
    assert len(finished) >= 1
    assert all(Run.load(folder / run).status == "finished" for run in finished)


# The wheel


@pytest.mark.full
def test_wheel_carries_studies_and_figures(tmp_path):
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    subprocess.run([*pip, "wheel", str(ROOT), "--no-deps", "-w", str(tmp_path)], check=True)
    (wheel,) = tmp_path.glob("asyncsim-*.whl")
    installed, empty = tmp_path / "installed", tmp_path / "empty"
    empty.mkdir()
    subprocess.run(
        [*pip, "install", "--no-deps", "--target", str(installed), str(wheel)], check=True
    )
    assert {path.name for path in installed.iterdir() if not path.name.endswith(".dist-info")} == {
        "asyncsim",
        "bin",
    }
    assert {"staleness.py", "throughput.py"} <= {
        path.name for path in (installed / "asyncsim/studies").iterdir()
    }
    assert (installed / "asyncsim/problems/queues.txt").is_file()

    (scripts,) = installed.glob("asyncsim-*.dist-info/entry_points.txt")
    assert scripts.read_text().split() == [
        "[console_scripts]",
        "asyncsim",
        "=",
        "asyncsim.__main__:main",
    ]

    environment = {"PYTHONPATH": str(installed)}
    where = python(
        "-c", "import asyncsim; print(asyncsim.__file__)", cwd=empty, environment=environment
    )
    assert where.stdout.strip() == str(installed / "asyncsim/__init__.py")
    listed = python("-m", "asyncsim.study", cwd=empty, environment=environment)
    assert "  staleness " in listed.stdout and "  throughput " in listed.stdout
    ended = python("-m", "asyncsim.study", "staleness", *TOY, cwd=empty, environment=environment)
    assert ended.returncode == 0, ended.stderr
    drawn = python(
        "-m", "asyncsim", "figures", "results/staleness", cwd=empty, environment=environment
    )
    assert drawn.returncode == 0, drawn.stderr
