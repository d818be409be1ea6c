"""The structure of the package: dependencies point one way, and nothing heavy is below the cluster side."""

import ast
import functools
import subprocess
import sys
from pathlib import Path

import pytest

import asyncsim

PACKAGE = Path(asyncsim.__file__).parent
MODULES = {
    ".".join(("asyncsim", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__"): path
    for path in PACKAGE.rglob("*.py")
}


def walk(node, inside=False, typing=False):
    """Yield the imports of a module, and whether they are inside a function; those for type checkers are none."""
    for child in ast.iter_child_nodes(node):
        for_types = typing or (isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test))
        if isinstance(child, ast.Import | ast.ImportFrom) and not for_types:
            yield child, inside
        yield from walk(child, inside or isinstance(child, ast.FunctionDef), for_types)


@functools.cache
def imports():
    """What each module imports of ours, wherever it does."""
    found = {}
    for module, path in MODULES.items():
        names = set()
        for node, _ in walk(ast.parse(path.read_text())):
            base = getattr(node, "module", "")
            names |= {base, *(f"{base}.{one.name}".lstrip(".") for one in node.names)}
        found[module] = (names & set(MODULES)) - {module, "asyncsim"}
    return found


def reached(module):
    seen, waiting = set(), [module]
    while waiting:
        new = imports()[waiting.pop()] - seen
        seen |= new
        waiting += new
    return seen


def test_there_are_no_circles_of_imports():
    assert [module for module in MODULES if module in reached(module)] == []


def test_the_nouns_do_not_mix():
    """Time never knows arrays, methods never know clocks or data."""
    for module in MODULES:
        part = module.split(".")[1] if "." in module else ""
        below = {name.split(".")[1] for name in reached(module)}
        if part in ("clusters", "simulation", "traces", "theory"):
            assert not below & {"methods", "problems", "replays", "recorders", "tracing", "study"}, module
        if part in ("methods", "problems") and module != "asyncsim.methods.check":  # which looks at the trace, too
            assert not below & {"simulation", "traces", "theory", "replays", "study"}, module


@pytest.mark.parametrize(
    ("module", "heavy"),
    [
        ("asyncsim", "simpy pandas jax scipy matplotlib"),
        ("asyncsim.simulation.simulate", "jax"),
        ("asyncsim.methods", "simpy"),
    ],
)
def test_nothing_heavy_is_loaded(module, heavy):
    program = f"import {module}, sys; print(*(set({heavy.split()}) & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout == "\n"
