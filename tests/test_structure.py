"""The structure of the package: imports point down, class names are unique, and nothing heavy is
below the clusters; natural calls pass a type checker.
"""

import ast
import functools
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

import asyncsim

PACKAGE = Path(asyncsim.__file__).parent
MODULES = {
    ".".join(("asyncsim", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(
        ".__init__"
    ): path
    for path in PACKAGE.rglob("*.py")
}
#: Folders from the bottom up; a module imports from its own line and those above.
ORDER = """
base
clusters
traces
simulation theory
methods problems byzantine
replays
study
drawing
pages calibration real claims
runs
"""
RANKS = {folder: rank for rank, line in enumerate(ORDER.split("\n")) for folder in line.split()}
#: A class and the functions of its summary, or its parts, name each other in annotations.
FOR_TYPES = {
    *(
        (f"asyncsim.traces.{name}", "asyncsim.traces.trace")
        for name in ("archive", "phases", "rules", "tables", "trace_summary")
    ),
    ("asyncsim.simulation.absences", "asyncsim.simulation.world"),
    ("asyncsim.simulation.shards", "asyncsim.simulation.world"),
}


def imported(tree):
    """Return the names of modules in a file: imports anywhere in it, also for type checkers, and
    texts.
    """
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            inside = {f"{node.module}.{alias.name}" for alias in node.names}
            names |= inside if inside <= set(MODULES) else {node.module, *inside}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names.add(node.value)
    return names


@functools.cache
def imports():
    """Return the modules of the package that each module imports, without the package itself."""
    return {
        module: (imported(ast.parse(path.read_text())) & set(MODULES)) - {module, "asyncsim"}
        for module, path in MODULES.items()
    }


def reached(module):
    seen, waiting = set(), [module]
    while waiting:
        last = waiting.pop()
        new = {name for name in imports()[last] if (last, name) not in FOR_TYPES} - seen
        seen |= new
        waiting += new
    return seen


def folder_of(module):
    return module.split(".")[1] if module.count(".") else ""


def test_a_hidden_import_is_seen():
    hidden = """
    if TYPE_CHECKING:
        from asyncsim.theory import queueing
    def plot(): return importlib.import_module("asyncsim.drawing.plots")
    def run(): from asyncsim.study.jobs import run_jobs
    """
    found = imported(ast.parse("if True:\n" + hidden)) & set(MODULES)
    assert found == {"asyncsim.theory.queueing", "asyncsim.drawing.plots", "asyncsim.study.jobs"}


def test_there_are_no_circles_of_imports():
    assert [module for module in MODULES if module in reached(module)] == []


def test_imports_point_down():
    """Only the package itself, its command line and the modules that start it are above all
    folders.
    """
    assert {folder_of(module) for module, path in MODULES.items() if path.parent != PACKAGE} == set(
        RANKS
    )
    upward = [
        (module, name)
        for module, names in imports().items()
        for name in names
        if MODULES[module].parent != PACKAGE and not module.endswith("__main__")
        if RANKS.get(folder_of(name), len(ORDER)) > RANKS[folder_of(module)]
    ]
    assert upward == []


def test_the_nouns_do_not_mix():
    """Time never knows arrays, methods never know clocks or data."""
    for module in MODULES:
        below = {folder_of(name) for name in reached(module)}
        if folder_of(module) in ("methods", "problems", "byzantine"):
            assert not below & {"simulation", "traces", "theory"}, module


def test_no_two_classes_have_one_name():
    trees = [ast.parse(path.read_text()) for path in MODULES.values()]
    names = Counter(
        node.name for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)
    )
    assert [name for name, count in names.items() if count > 1] == []


@pytest.mark.parametrize(
    ("module", "heavy"),
    [
        ("asyncsim", "simpy pandas jax scipy matplotlib"),
        ("asyncsim.simulation.simulate", "jax"),
        ("asyncsim.clusters.laws", "jax scipy pandas matplotlib"),
        ("asyncsim.methods", "simpy"),
        ("asyncsim.runs.known", "pandas jax matplotlib"),
    ],
)
def test_nothing_heavy_is_loaded(module, heavy):
    program = f"import {module}, sys; print(*(set({heavy.split()}) & set(sys.modules)))"
    assert (
        subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, check=True
        ).stdout
        == "\n"
    )


USE = """
import asyncsim
from asyncsim import Cluster, Gamma, methods, problems

latency = (0.1, Gamma(1, 0.2))
cluster = Cluster(workers=3, compute=1.0, service="0.1", latency=latency, policy="barrier(2)")
Cluster(2, ["gamma(1, 0.2)", 2.0], bandwidth=1e6, message_bytes=(1, 2), window=[1, 2])
asyncsim.Mixture([asyncsim.Constant(1), 9.0], [0.9, 0.1])
trace = asyncsim.simulate(cluster, commits=20, seed=0)
digits = problems.digits(batch_size=8)
run = asyncsim.replay(trace, methods.gem(learning_rate=0.05, kappa=2), digits, seed=0)
run.params, run.commits["loss"], trace.frame, trace.summary()["throughput"]
Cluster(workers="ten", compute=1.0)  # wrong
asyncsim.simulate(cluster, commits="many")  # wrong
methods.gem(kappa="large")  # wrong
asyncsim.replay(cluster, methods.gem(), problems.digits())  # wrong
asyncsim.unknown  # wrong
trace.unknown  # wrong
"""


@pytest.mark.full
def test_natural_calls_are_typed(tmp_path):
    api = pytest.importorskip("mypy.api")
    use = tmp_path / "use.py"
    use.write_text(USE)
    # The project's own options, so that its cache serves.
    text, _, _ = api.run([f"--config-file={PACKAGE.parent / 'pyproject.toml'}", str(use)])
    lines = {int(line.split(":")[1]) for line in text.splitlines() if ": error: " in line}
    wrong = {i for i, line in enumerate(USE.splitlines(), 1) if line.endswith("# wrong")}
    assert lines == wrong, text
