"""BibTeX of asyncsim and of the papers of methods, from ``asyncsim/methods/references.bib``."""

import os
import re
from collections.abc import Iterable
from pathlib import Path

import asyncsim.methods
from asyncsim.base.errors import InputError, choices_like, shown
from asyncsim.runs.known import one_line
from asyncsim.study.results import config_of

SOFTWARE = f"""@software{{asyncsim,
  title = {{asyncsim: a discrete-event simulator for the dynamics of asynchronous SGD}},
  author = {{{{The asyncsim authors}}}},
  year = {{2026}},
  version = {{{asyncsim.__version__}}},
}}"""


def references() -> dict[str, dict[str, str]]:
    """Return the entries of each method's papers, by their keys: ``keywords`` names the methods."""
    file = Path(asyncsim.methods.__file__).with_name("references.bib")
    papers: dict[str, dict[str, str]] = {method: {} for method in asyncsim.methods.METHODS}
    for entry in file.read_text(encoding="utf-8").strip().split("\n\n"):
        before, methods, after = re.split(r"  keywords = \{(.*)\},\n", entry)
        key = before[before.index("{") + 1 : before.index(",")]
        for method in methods.split(", "):
            papers[method][key] = before + after
    return papers


def bibtex(names: Iterable[str]) -> str:
    """Return the entries of asyncsim and of the papers of methods, or of the methods of folders of
    results.
    """
    papers_of, methods = references(), []
    for name in names:
        if name in papers_of:
            methods.append(name)
        elif os.path.isdir(name):
            methods += _methods_of(Path(name))
        else:
            raise InputError(
                f"{shown(name)}: neither a method nor a folder of results; "
                f"{choices_like(name, sorted(papers_of))}"
            )
    entries, lines = {"asyncsim": SOFTWARE}, []
    for method in dict.fromkeys(methods):
        papers = papers_of.get(method, {})
        lines.append(f"% {method}: {', '.join(papers) or 'no paper is known'}")
        entries |= papers
    return "\n\n".join([*(["\n".join(lines)] if lines else []), *entries.values()])


def _methods_of(folder: Path) -> list[str]:
    """Return the names of the methods of a folder of results, without their arguments."""
    config = config_of(folder)
    names = config.get("methods")
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise InputError(
            f"folder = {str(folder)!r}: holds no results with methods; give a folder of results"
        )
    return [one_line(name.partition("(")[0]) for name in names]
