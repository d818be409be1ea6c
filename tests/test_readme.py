"""README: its notebook runs as printed, its commands exist, and so do the names in docstrings."""

import doctest
import importlib
import os
import pkgutil
import re
import shlex
from pathlib import Path
from typing import NamedTuple

import pytest

import asyncsim
from asyncsim import study
from asyncsim.study.entries import catalogue

README = Path(asyncsim.__file__).resolve().parent.parent / "README.md"
#: What makes a printed example small enough for a test.
SMALL = ((r"\bcommits=[\d_]+", "commits=400"), (r"\bsteps=[\d_]+", "steps=2"), (r"\bseeds=[\d_]+", "seeds=1"))


class Block(NamedTuple):
    """A fenced block: what stands behind the fence, and the text between."""

    info: str
    text: str


def blocks() -> list[Block]:
    return [
        Block(*found) for found in re.findall(r"^```([^\n]*)\n(.*?)^```$", README.read_text(), re.MULTILINE | re.DOTALL)
    ]


def to_run() -> list[str]:
    """Return the Python blocks, made small; ``python fragment`` behind the fence leaves one out."""
    infos = [(block.info.split(), block.text) for block in blocks()]
    chosen = [text for info, text in infos if info[:1] == ["python"] and "fragment" not in info]
    for pattern, small in SMALL:
        chosen = [re.sub(pattern, small, text) for text in chosen]
    return chosen


def commands() -> list[list[str]]:
    """Return the options of every ``python -m asyncsim.study`` in the README's fenced blocks."""
    lines = [line for block in blocks() for line in block.text.replace("\\\n", " ").splitlines()]
    found = [re.search(r"python -m asyncsim\.study\b([^#&|;]*)", line) for line in lines]
    return [shlex.split(match[1]) for match in found if match]


@pytest.mark.full
def test_python_blocks_run(tmp_path, monkeypatch):
    sources = to_run()
    assert any("asyncsim.replay" in source for source in sources)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "agg")
    names: dict = {"__name__": "readme"}  # later blocks go on where earlier ones ended, as in a notebook
    for source in sources:
        assert all(int(number.replace("_", "")) <= 400 for number in re.findall(r"\bcommits=([\d_]+)", source))
        exec(compile(source, str(README), "exec"), names)
    assert any(isinstance(value, asyncsim.Run) for value in names.values())


def test_the_own_study_runs(tmp_path, monkeypatch, capsys):
    (text,) = [block.text for block in blocks() if "fragment" in block.info and "def run(config)" in block.text]
    monkeypatch.chdir(tmp_path)
    Path("studies").mkdir()
    Path("studies/mine.py").write_text(text)
    assert study.main(["mine", "--workers", "3"]) == 0
    assert 0 < float(capsys.readouterr().out) < 4
    assert study.main([]) == 0
    assert re.search(r"\n  mine +Say how stale a cluster is\.\n", capsys.readouterr().out)


def test_commands_can_be_read(capsys):
    found = commands()
    assert any(options[:1] == ["staleness"] for options in found)
    for options in found:
        if options and "NAME" not in options and options != ["--help"]:
            name, *rest = options
            try:
                study.configure(name, rest)
            except SystemExit as end:
                assert end.code == 0, capsys.readouterr().err


def test_every_shipped_study_and_method_is_named():
    text = README.read_text()
    folder = study.shipped("studies")
    assert [path.stem for path in folder.glob("[!_]*.py") if path.stem not in text] == []
    made = 'python -c "from asyncsim.study.entries import catalogue as c; print(c(), end=str())" > docs/methods.md'
    assert (README.parent / "docs" / "methods.md").read_text() == catalogue(), f"make it again: {made}"


def test_nothing_is_left_to_fill_in():
    assert re.findall(r"@[A-Z_]+@|\bTODO\b|\bXXX\b", README.read_text()) == []


def test_links_into_the_repository_exist():
    targets = re.findall(r"\]\((?!https?:|#|mailto:)([^)#\s]+)", README.read_text())
    assert [target for target in targets if not (README.parent / target).exists()] == []


def modules() -> list[str]:
    package = os.path.dirname(asyncsim.__file__)
    return ["asyncsim", *(found.name for found in pkgutil.walk_packages([package], "asyncsim."))]


@pytest.mark.parametrize("name", modules())
def test_docstring_examples(name, tmp_path, monkeypatch):
    """Examples behind ``>>>`` print what they say; names that begin with ``asyncsim.`` are there."""
    monkeypatch.chdir(tmp_path)
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name not in ("ray", "torch"):
            raise
        pytest.skip(f"needs {error.name}, which only some of the project does")
    assert doctest.testmod(module, optionflags=doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS).failed == 0
    source = Path(module.__file__ or "").read_text()
    for path in re.findall(r"`{1,2}(asyncsim(?:\.\w+)+)`", source):
        assert reachable(path), f"{name} names {path}"


def reachable(path: str) -> bool:
    """Whether a dotted name is a module, or an attribute of something that is reachable."""
    try:
        pkgutil.resolve_name(path)
    except (ImportError, AttributeError):
        return False
    return True
