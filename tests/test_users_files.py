"""Files of the user: methods, problems, topologies, rules, attacks and studies; functions that fail
are named with their line.
"""

import inspect
import re
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest
from test_study import Config

from asyncsim import Cluster, InputError, Trace, aggregation, problems, simulate, study, topologies
from asyncsim.base import tracing
from asyncsim.clusters.cluster_text import describe
from asyncsim.clusters.topologies import Topology, as_topology
from asyncsim.methods import Method, gradient_steps
from asyncsim.replays.check import check_method
from asyncsim.study.entries import from_file
from asyncsim.study.loading import files_of
from asyncsim.study.sweep import ComparisonConfig, sweep

pytestmark = pytest.mark.usefixtures("quick_figures")

FILES = {
    "mine": """
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
made = damped()
""",
    "moons": """
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

    return custom(lambda key: jnp.zeros(2), loss)

partial = functools.partial(undefined)
""",
    "functions": """
import dataclasses
import jax.numpy as jnp
import numpy as np
from asyncsim import aggregation, attacks, topologies
def line(workers):
    return topologies.adjacency(np.eye(workers, k=1) + np.eye(workers, k=-1))
def trim(f):
    return aggregation.trimmed_mean(f=f)._replace(text=f"trim(f={f})")
def reverse(workers, scale=3.0):
    def change(messages, honest, byzantine, key):
        mean = jnp.mean(messages, axis=0, where=honest[:, None])
        return jnp.where(byzantine[:, None], -scale * mean, messages)
    return attacks.Attack(workers, change=change, text=f"reverse(workers={workers})")
def number():
    return 3
""",
    "broken": "1 / 0\n",
}


@pytest.fixture(autouse=True)
def written(own_folders):
    for name, text in FILES.items():
        Path(f"{name}.py").write_text(text)


# Methods


@pytest.mark.parametrize(
    ("options", "hyperparameters", "note"),
    [
        (
            {},
            {"learning_rate": 0.01, "patience": 10},
            "note: mine.py:damped keeps its own learning_rate = 0.01 (the study's: 0.05)\n",
        ),
        ({"learning_rate": 0.1}, {"learning_rate": 0.1, "patience": 10}, ""),
        (
            {"methods": "mine.py:damped(patience=3)", "learning_rate": 0.1},
            {"learning_rate": 0.1, "patience": 3},
            "",
        ),
        # Only options that methods are made from.
        ({"methods": "mine.py:stepping", "steps": 7}, {"steps": 3}, None),
        ({"methods": "mine.py:stepping(7)"}, {"steps": 7}, ""),
    ],
)
def test_a_method_of_a_file(options, hyperparameters, note, capsys):
    (method,) = Config(**{"methods": "mine.py:damped"} | options).make_methods()
    assert method.hyperparameters == hyperparameters
    assert note in (None, capsys.readouterr().err)


def test_methods_of_a_file_get_the_values_that_cells_differ_in(capsys):
    config = ComparisonConfig(
        methods=("mine.py:damped",), workers=(2, 3), problem="quadratic", seeds=1, steps=2
    )

    def rates(grid):
        return [cell.methods[0].hyperparameters["learning_rate"] for cell in sweep(config, grid)]

    grid = [{"learning_rate": rate, "workers": n} for rate in (0.05, 0.2) for n in (2, 3)]
    assert rates(grid) == [0.05, 0.05, 0.2, 0.2] and not capsys.readouterr().err
    assert rates([{"workers": n} for n in (2, 3)]) == [0.01, 0.01]
    assert capsys.readouterr().err.count("keeps its own learning_rate = 0.01") == 1


# Problems


def test_a_problem_of_a_file(capsys):
    problem = Config(problem="moons.py:moons").make_problem()
    assert (problem.batch_size, problem.config["noise"], problem.name) == (8, 0.2, "moons of 100")
    for name in ("undefined", "partial"):  # which say no name themselves
        assert Config(problem=f"moons.py:{name}").make_problem().name == name
    problem = Config(problem="moons.py:moons(noise=0.3)", batch_size=4).make_problem()
    assert (problem.batch_size, problem.config["noise"]) == (4, 0.3)
    assert capsys.readouterr().err == ""
    grid = [{"workers": 2}, {"workers": 3, "problem": "moons.py:moons(noise=0.1)"}]
    cells = sweep(ComparisonConfig(problem="moons.py:moons", methods=("downpour",)), grid)
    of_cells = [(cell.problem.name, cell.problem.config["noise"]) for cell in cells]
    assert of_cells == [("moons of 2", 0.2), ("moons of 3", 0.1)]


def test_modules_beside_a_users_file_can_be_imported(tmp_path, monkeypatch):
    folder = tmp_path / "beside"
    folder.mkdir()
    (folder / "helping_moons.py").write_text(FILES["moons"])
    (folder / "main_moons.py").write_text("from helping_moons import moons\n")
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert Config(problem=f"{folder / 'main_moons.py'}:moons").make_problem().batch_size == 8


# Topologies, rules and attacks


def test_a_named_matrix_has_its_name_in_titles_and_its_entries_in_files(tmp_path):
    grid = topologies.adjacency(np.ones((9, 9)), label="my grid")
    slow = topologies.slow_links(grid, [[0, 1, 5]])
    assert (repr(grid), repr(slow)) == ("my grid", "slow_links(my grid, [[0, 1, 5]])")
    assert as_topology(str(grid)) == grid and as_topology(str(slow)) == slow
    cluster = Cluster(workers=9, compute=1.0, topology=grid)
    assert describe(cluster).endswith("no server, my grid")
    simulate(cluster, commits=9).save(tmp_path / "trace.parquet")
    assert Trace.load(tmp_path / "trace.parquet").cluster == cluster
    with pytest.raises(InputError, match="name = 'a/b': names folders and files; leave out"):
        topologies.adjacency(np.ones((2, 2)), label="a/b")


def test_a_topology_of_a_file_knows_the_workers_and_is_named_after_its_function(told):
    line = from_file("topology", "functions.py:line", Topology, 4)
    assert repr(line) == "line" and line.neighbours(4) == [[1], [0, 2], [1, 3], [2]]
    assert from_file("topology", "functions.py:line", Topology, 4) is line
    assert from_file("topology", "ring()", Topology, 4) == "ring()"
    options = "--workers=4 --steps=2 --methods=dpsgd --tune=0.1 --problem=quadratic --out=out"
    assert told("gossip", *options.split(), "--topology", "functions.py:line", "ring()")[0] == 0
    table = pd.read_csv("out/summary.csv").drop_duplicates("topology")
    assert table["topology"].tolist() == ["functions.py:line", "ring()"]
    gap = 1 - sorted(abs(np.linalg.eigvals(line.matrices(4)[0])))[-2]
    assert table["spectral_gap"][0] == pytest.approx(gap)


@pytest.mark.parametrize(
    ("attack", "text"),
    [
        ("functions.py:reverse(scale=5)", "functions.py:reverse(workers=2, scale=5)"),
        ("zero", "zero(workers=2)"),
        ("none", None),
    ],
)
def test_attacks_of_robustness_get_their_workers(attack, text):
    config = study.load("robustness").Config(attack=attack)
    assert config.at(byzantine=2, attack=attack).attack == text
    assert config.at(byzantine=0, attack=attack).attack is None


def test_rules_get_the_number_of_byzantine_workers():
    robustness = study.load("robustness")
    rules = ("functions.py:trim(f=f)", "nnm(krum(f=f), f=f)", aggregation.mean())
    config = robustness.Config(rules=rules, workers=7)
    cells = robustness.with_rules(config, sweep(config, config.points()[-1:]))
    (cell,) = [cell for cell in cells if cell.values["byzantine"] == 2]
    assert [(method.name, method.hyperparameters.get("rule")) for method in cell.methods] == [
        ("batch_sgd", None),
        ("trim(f=f)", "trim(f=2)"),
        ("nnm(krum(f=f), f=f)", "nnm(krum(f=2), f=2)"),
        ("mean()", "mean()"),
    ]


@pytest.mark.parametrize(
    "text",
    [
        "robust(rule='mine.py:trim(f=2)')",
        "gem, robust(rule=['mine.py:trim(f=2)', 'krum(f=1)'])",
        "mine.py:own(rule='krum(f=1)')",
    ],
)
def test_a_file_inside_an_argument_has_its_hash(text):
    assert list(files_of({"methods": (text,)})) == ["mine.py"]


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("staleness --methods mine.py", "is a file; name its function, too: mine.py:FUNCTION"),
        ("staleness --methods mine:own", "write FILE.py:FUNCTION for one of your own"),
        ("staleness --methods mine.py:dampd", "did you mean 'damped'? choose from damped"),
        ("staleness --methods mine.py:made", "made is a Method, must be a function that returns a"),
        ("staleness --methods mine.py:needs", "patience missing; write needs(patience)"),
        ("staleness --methods mine.py:other", "'mine.py:other': returned 3; must return a Method"),
        ("staleness --methods broken.py:damped", "line 1: ZeroDivisionError: division by zero"),
        ("staleness --problem moons.py:moon", "'moons.py:moon': moons.py has no function moon"),
        ("staleness --problem moons.py:none", "returned None; must return a Problem, as problems."),
        ("staleness --problem moons.py:fails", "init = 1: must be a function"),
        ("staleness --problem moons.py:exits", "cannot be made: line 26: SystemExit: 5"),
        ("staleness --problem yours.py:moons", "'yours.py:moons': there is no file yours.py"),
        ("speedup --problem moons.py:fixed", "'moons of 1': has minibatches of 8, but this study"),
        ("staleness --problem moons.py:nan", "its train loss is nan at the initial parameters"),
        ("gossip --topology functions.py:lime", "has no function lime; did you mean 'line'?"),
        ("gossip --topology functions.py:number", "returned 3; must return a Topology, as topolo"),
        ("gossip --topology no.py:line", "topology = 'no.py:line': there is no file no.py; give"),
        ("gossip --topology functions.py:line(3)", "a graph of 3 workers, and there are 16; give"),
        ("robustness --rules functions.py:trim", "f missing; write trim(f)"),
        ("robustness --rules functions.py:number", "returned 3; must return a Rule, as aggreg"),
        ("robustness --attack functions.py:number", "parameter = 'workers': unknown"),
        ("robustness --attack functions.py:reverse(workers=3)", "its workers follow from --byzan"),
        ("staleness --attack functions.py:reverse", "workers missing"),
        ("staleness --attack functions.py:number", "returned 3; must return an Attack, as attacks"),
        ("compare --methods robust(rule='mine.py:trip')", "rule = 'mine.py:trip': mine.py has no"),
    ],
)
def test_a_wrong_file_or_function_is_named(command, message, told):
    few = "--problem=quadratic --seeds=1 --steps=2 --out=out"
    name, *options = command.split()
    code, _, err = told(name, *few.split(), *options)
    assert code == 2 and message in "\n".join(err) and "Traceback" not in "\n".join(err)
    assert not Path("out").exists()


# Studies

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


def own_study(name: str, text: str = OWN) -> Path:
    path = Path("studies", f"{name}.py")
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    return path


def test_a_users_study_is_listed_and_run_beside_the_shipped(told):
    own_study("mine")
    own_study("_helper", "raise ValueError")
    _, out, err = told()
    assert ["mine", "Say hello."] in [line.split(maxsplit=1) for line in out] and err == []
    assert told("mine", "--times", "2") == (0, ["hellohello"], [])
    own_study("needs", OWN.replace("times: int = 1", "times: int"))
    assert told("needs", "--times", "2") == (0, ["hellohello"], [])
    code, _, err = told("needs")
    assert code == 2 and any("--times" in line for line in err)


def test_a_users_study_of_another_folder_is_another_study(told, tmp_path, monkeypatch):
    for word in ("here", "there"):
        (tmp_path / word).mkdir()
        monkeypatch.chdir(tmp_path / word)
        own_study("mine", OWN.replace("hello", word))
        assert told("mine") == (0, [word], [])


def test_a_users_study_never_takes_the_place_of_a_shipped_one(told, monkeypatch):
    """From a clone nothing is listed twice, also beside the installed package."""
    before = told()
    note = f"note: {own_study('staleness').absolute()} is not used: a shipped study is called "
    note += "staleness; rename yours"
    assert told() == (*before[:2], [note])
    shipped = study.shipped("studies")
    assert study.load("staleness").__file__ == str(shipped / "staleness.py")
    code, _, err = told("staleness", "--workers", "0")
    hint = "asyncsim study staleness --help explains the options"
    assert (code, err) == (2, [note, f"error: workers = 0: must be at least 1; {hint}"])
    Path("asyncsim").mkdir()
    Path("asyncsim", "__init__.py").touch()
    assert told() == before
    monkeypatch.chdir(shipped.parent)
    assert told() == before


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
def test_a_broken_study_does_not_break_the_others(told, text, listed, error):
    own_study("broken", text)
    code, out, err = told()
    assert (code, err) == (0, [])
    assert any(re.match(rf"  broken +{re.escape(listed)}", line) for line in out)
    assert any(line.startswith("  staleness ") for line in out)
    code, out, (line,) = told("broken")
    assert (code, out) == (2, [])
    assert line.startswith("error: study = 'broken': ") and error in line


# Functions that fail

X = np.zeros((20, 5), np.float32)


def custom(loss, init=lambda key: jnp.zeros(4), **options):
    return problems.custom(init, loss, X, batch_size=2, **options)


def too_long(params, batch, key):
    return jnp.mean(batch @ params)


def looks_at_values(params, batch, key):
    return float(jnp.mean(batch))


def not_in_jax(params, batch, key):
    return jnp.float32(np.asarray(batch).sum())


def unknown(worker, update, start, central, visit):
    return nowhere(update), worker, {}  # noqa: F821  the mistake


def line_of(function):
    return f"({Path(__file__).name}, line {inspect.getsourcelines(function)[1] + 1})"


REMEDY = "; compute with jax.numpy, without float() and int() "


@pytest.mark.parametrize(
    ("loss", "error", "remedy"),
    [
        (too_long, "TypeError: dot_general requires ", ""),
        (looks_at_values, "ConcretizationTypeError: ", REMEDY),
        (not_in_jax, "TracerArrayConversionError: ", REMEDY),
    ],
)
def test_a_loss_that_fails(loss, error, remedy):
    with pytest.raises(InputError) as raised:
        custom(loss)
    text = str(raised.value)
    assert text.startswith(f"loss(params, batch, key): failed: {error}") and "\n" not in text
    assert text.endswith(remedy + line_of(loss))


def test_other_functions_that_fail():
    def init(key):
        return unheard_of  # noqa: F821  the mistake

    def loss(params, batch, key):
        return jnp.sum(params) + jnp.sum(batch.reshape(2, 5))  # a batch, and never all examples

    def good(params, batch, key):
        return jnp.sum(params) + jnp.mean(batch)

    with pytest.raises(InputError, match=r"^init\(key\): failed: NameError"):
        custom(good, init)
    every = r"^loss of all examples, as there is no evaluate: failed: TypeError"
    with pytest.raises(InputError, match=every):
        custom(loss)
    with pytest.raises(InputError, match=r"^evaluate\(params, data\): failed: AttributeError"):
        custom(good, evaluate=lambda params, data: jnp.nope(params))
    message = re.escape(f"failed: NameError: name 'nowhere' is not defined {line_of(unknown)}")
    with pytest.raises(InputError, match=message):
        check_method(Method(gradient_steps(0.1), "mine", message=unknown), {"x": jnp.zeros(3)})


@pytest.mark.parametrize(
    ("file", "own"),
    [
        (__file__, True),
        ("/tmp/ipykernel_1/123.py", True),
        ("<ipython-input-3-abc>", True),
        ("<string>", False),
        ("/home/me/.local/lib/python3.11/site-packages/flax/linen.py", False),
        (tracing.__file__, False),
        (f"{Path(tracing.__file__).parents[1]}_mine.py", True),
    ],
)
def test_whose_file_it_is(file, own):
    assert tracing._is_own(file) is own


def test_a_cell_has_no_name():
    scope, text = {}, "def fail():\n    raise ValueError('no')"
    exec(compile(text, "/tmp/ipykernel_1/123.py", "exec"), scope)
    message = r"^fail\(\): failed: ValueError: no \(a cell, line 2\)$"
    with pytest.raises(InputError, match=message), tracing.naming_failures("fail()"):
        scope["fail"]()


def test_draws_and_counts_outside_of_jax_are_named():
    """They would be the same in all commits; draws with JAX are traced the same each time."""
    calls = []

    def counts(params, batch, key):
        calls.append(key)
        return jnp.mean(batch) * len(calls)

    def draws(worker, update, start, central, visit):
        return update + np.random.default_rng().normal(size=4).astype(np.float32), worker, {}

    def draws_with_jax(worker, update, start, central, visit):
        key = jax.random.fold_in(jax.random.key(0), visit.commit)
        return update + jax.nn.relu(jax.random.normal(key, update.shape)), worker, {}

    def check(message):
        check_method(Method(gradient_steps(0.1), "own", message=message), jnp.zeros(4))

    message = r"loss\(params, batch, key\): computes something else when .* from the key"
    with pytest.raises(InputError, match=message):
        custom(counts)
    message = r"own: a commit: .* something else .* from visit\.key, with needs_key=True"
    with pytest.raises(InputError, match=message):
        check(draws)
    check(draws_with_jax)
