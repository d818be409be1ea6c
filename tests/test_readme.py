"""README, docs and the notebook: their code runs, their commands, links and names exist, and all
that there is has a row.
"""

import doctest
import importlib
import inspect
import json
import os
import pkgutil
import re
import shlex
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import pytest
from test_study import python

import asyncsim
from asyncsim import aggregation, attacks, recorders, study
from asyncsim.__main__ import main
from asyncsim.clusters import laws
from asyncsim.clusters.policy import POLICIES, WITHOUT_SERVER
from asyncsim.clusters.topologies import TOPOLOGIES
from asyncsim.study.entries import entry_of

pytestmark = pytest.mark.usefixtures("quick_figures")
ROOT = Path(asyncsim.__file__).resolve().parent.parent
PAGES = {path.stem: path for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]}
#: What makes a printed example small enough for a test.
SMALL = ((r"\bcommits=\d+_\d+", "commits=400"), (r"\bworkers=100\b", "workers=10"))


class Block(NamedTuple):
    """A fenced block: the words behind the fence, and the text between."""

    info: list[str]
    text: str


def blocks(page: str) -> list[Block]:
    found = re.findall(
        r"^```([^\n]*)\n(.*?)^```$", PAGES[page].read_text(), re.MULTILINE | re.DOTALL
    )
    return [Block(info.split(), text) for info, text in found]


@pytest.mark.parametrize("page", PAGES)
def test_page_runs(page, monkeypatch, lenient, capsys):
    """Python runs from top to bottom, unless it is a ``fragment``; of commands those that say
    ``run``, others are read.

    A block that begins with the comment ``# mine.py`` is also the file of that name.
    """
    monkeypatch.setenv("MPLBACKEND", "agg")
    names: dict = {"__name__": page}
    (own,) = [text for _, text in blocks("README") if text.startswith("# mine.py")]
    Path("mine.py").write_text(own)
    for info, text in blocks(page):
        if info[:1] == ["python"] and "fragment" not in info:
            file = re.match(r"# (\S+\.py)\n", text)
            if file:
                Path(file[1]).parent.mkdir(exist_ok=True)
                Path(file[1]).write_text(text)
            for pattern, small in SMALL:
                text = re.sub(pattern, small, text)
            exec(compile(text, str(PAGES[page]), "exec"), names)
        for line in (
            re.findall(r"^(?:[^#\n]*[ /])?asyncsim ([^#&|;\n]*)", text, re.M)
            if info[:1] == ["bash"]
            else ()
        ):
            command = shlex.split(line)
            if "run" in info:
                assert main(command) == 0, capsys.readouterr().err
            elif command[0] == "study" and len(command) > 1:
                read(command[1:], capsys)


def read(command: list[str], capsys) -> None:
    """Read a study's options and make its methods, as the command line does, but for a folder that
    is not there.
    """
    if "--resume" in command:
        place = command.index("--resume")
        command = command[:place] + command[place + 2 :]
    if not {"-h", "--help"}.isdisjoint(command):
        assert study.main(command) == 0, capsys.readouterr().err
        return
    _, config = study.configure(command[0], command[1:])
    if getattr(config, "methods", ()) and hasattr(config, "make_methods"):
        (config.at() if hasattr(config, "at") else config).make_methods()
        entry_of("problem", config.problem, asyncsim.problems.PROBLEMS)  # to make it may need data


def test_the_readme_is_short():
    assert len(PAGES["README"].read_bytes()) <= 10_000


def recorder_names() -> list[str]:
    found = inspect.getmembers(recorders, inspect.isfunction)
    return [
        name
        for name, one in found
        if name[0] != "_" and inspect.signature(one).return_annotation is recorders.Recorder
    ]


@pytest.mark.parametrize(
    ("page", "names"),
    [
        ("problems", asyncsim.problems.PROBLEMS),
        ("results", recorder_names()),
        ("clusters", [*POLICIES, *WITHOUT_SERVER, *TOPOLOGIES]),
        (
            "clusters",
            [
                name.lower()
                for name, one in vars(laws).items()
                if one in asyncsim.Law.__subclasses__()
            ],
        ),
    ],
)
def test_tables_name_all_that_there_is(page, names):
    cells = re.findall(r"^\| (`[^|]*) \|", PAGES[page].read_text(), re.MULTILINE)
    told = {name for cell in cells for name in re.findall(r"`(\w+)", cell)}
    assert names and not set(names) - told


@pytest.mark.parametrize("page", PAGES)
def test_links_and_names_exist(page):
    path = PAGES[page]
    text = path.read_text()
    assert not re.search(r"\)\{[^}]*\n", text)  # attributes of a link end in its line
    targets = re.findall(r"\]\((?!https?:|#|mailto:)([^)#\s]+)", text)
    generated = {f"{name}.md" for name in ("catalogue", "claims", "notebook")}
    assert [
        target
        for target in targets
        if not (path.parent / target).exists() and target not in generated
    ] == []
    assert [
        name
        for name in re.findall(r"\basyncsim(?:\.[A-Za-z_]\w*)+(?!\w*[/=])", text)
        if not reachable(name)
    ] == []
    named = re.findall(r"`((?:asyncsim|tests|studies|docs|figures)/[\w/]+\.\w+)`", text)
    assert [name for name in named if not (ROOT / name).exists() and "NAME" not in name] == []
    others = [stem for stem in PAGES if stem not in ("README", "index")]
    assert (
        page not in ("README", "index")
        or [stem for stem in others if f"{stem}.md)" not in text] == []
    )


def test_the_site_has_every_page_and_name():
    """Pages are in the navigation; studies, methods and public names are on generated pages."""
    site = study.load_file("docs_site", ROOT / "docs" / "site.py")
    navigation = (ROOT / ".mkdocs.yml").read_text()
    pages = site.generated()
    wanted = [f"{stem}.md" for stem in PAGES if stem != "README"] + list(pages)
    assert [page for page in wanted if f": {page}\n" not in navigation] == []
    for path in study.shipped("studies").glob("[!_]*.py"):
        assert f"\n| `{path.stem}` | " in pages["catalogue.md"]
    families = [pages[f"api/methods_{family}.md"] for family in (*site.FAMILIES, "asynchronous")]
    for name, factory in asyncsim.methods.METHODS.items():
        heading = f"::: {factory.__module__}.{name}\n"
        assert sum(heading in page for page in families) == 1, name
    tables = (
        asyncsim.methods.METHODS,
        asyncsim.problems.PROBLEMS,
        aggregation.RULES,
        attacks.ATTACKS,
    )
    assert [name for name in chain(*tables) if f"\n| `{name}(" not in pages["catalogue.md"]] == []
    modules = tuple(f"asyncsim.{module}" for text in site.API.values() for module in text.split())
    named = [getattr(asyncsim, name) for name in asyncsim.__all__]
    homes = {one.__name__ if inspect.ismodule(one) else one.__module__ for one in named}
    missing = [home for home in homes if not home.startswith(modules)]
    assert [
        home for home in missing if not any(module.startswith(f"{home}.") for module in modules)
    ] == []


def test_every_column_is_explained():
    """Columns of tables of a run, a trace and a study are named on the page of results."""
    compare = study.load("compare")
    options = {"methods": ("gem",), "problem": "quadratic", "workers": 2, "steps": 20, "seeds": 1}
    folder, summary = compare.run(compare.Config(**options, diagnose_every=1))
    run = asyncsim.Run.load(folder / summary["run_folder"][0])
    traces = [asyncsim.Trace.load(folder / summary["trace_file"][0])]
    for further in (
        {"policy": asyncsim.neighbours(), "topology": "ring()"},
        {"failures": [asyncsim.failures.loss(0.1, timeout=1)]},
    ):
        cluster = asyncsim.Cluster(4, "constant(1)", **further)
        traces.append(asyncsim.simulate(cluster, commits=20, seed=0))
    columns = {name for name in summary if not name.startswith(("method.", "trace."))}
    tables = [table for trace in traces for table in (trace.frame, trace.summary())]
    tables += [run.commits, run.evaluations, run.diagnostics]
    explained = set(re.findall(r"`(\w+)`", PAGES["results"].read_text()))
    assert columns.union(*tables) - {"learning_rate"} - explained == set()


def modules() -> list[str]:
    package = os.path.dirname(asyncsim.__file__)
    return ["asyncsim", *(found.name for found in pkgutil.walk_packages([package], "asyncsim."))]


@pytest.mark.parametrize("name", modules())
def test_docstring_examples(name):
    """Examples behind ``>>>`` print what they say; names that begin with ``asyncsim.`` are
    there.
    """
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name not in ("ray", "torch"):
            raise
        pytest.skip(f"needs {error.name}, which only some of the project does")
    assert (
        doctest.testmod(module, optionflags=doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS).failed
        == 0
    )
    source = Path(module.__file__ or "").read_text()
    for path in re.findall(r"`{1,2}(asyncsim(?:\.\w+)+)`", source):
        assert reachable(path), f"{name} names {path}"


def reachable(path: str) -> bool:
    """Whether a dotted name is a module, or an attribute of something that is there."""
    try:
        importlib.import_module(path)
    except ModuleNotFoundError as error:
        if error.name not in ("ray", "torch"):  # which only some of the project needs
            parent, _, name = path.rpartition(".")
            return hasattr(pkgutil.resolve_name(parent), name)
    return True


NOTEBOOK = study.shipped("studies") / "energy_curves.ipynb"


def test_the_notebook_is_valid_and_saved_without_outputs():
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert len(code) > 5
    assert not any(cell["outputs"] or cell["execution_count"] is not None for cell in code)
    nbformat = pytest.importorskip("nbformat")
    nbformat.validate(nbformat.read(NOTEBOOK, as_version=4))


@pytest.mark.full
def test_the_cells_of_the_notebook_run():
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    source = "\n".join(code) + "\n"
    for small in ("WORKERS = 4", "STEPS = 12"):
        name = small.split()[0]
        source, count = re.subn(rf"^{name} = \d+", small, source, flags=re.MULTILINE)
        assert count == 1
    Path("cells.py").write_text(source)
    ended = python("-W", "error:::__main__", "cells.py", environment={"MPLBACKEND": "agg"})
    assert ended.returncode == 0, ended.stderr
    finished = re.findall(r"^(GEM|DOWNPOUR|exact root) .* finished$", ended.stdout, re.MULTILINE)
    assert finished == ["GEM", "DOWNPOUR", "exact root"]
    assert [*map(str, Path().iterdir())] == ["cells.py"]
