"""BibTeX of asyncsim and of the papers of methods, from the references in the methods'
docstrings.
"""

import ast
import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import asyncsim.methods
from asyncsim.base.errors import InputError, choices_like
from asyncsim.study.results import config_of

SOFTWARE = f"""@software{{asyncsim,
  title = {{asyncsim: a discrete-event simulator for the dynamics of asynchronous SGD}},
  author = {{{{The asyncsim authors}}}},
  year = {{2026}},
  version = {{{asyncsim.__version__}}},
}}"""
_NAME = r"[A-Z][\w'-]*(?: [A-Z][\w'-]+)*"
#: The start of a reference: ``Hermans and Louppe 2018``, ``Liu et al. 2024``.
_START = re.compile(rf"\b({_NAME}(?:, {_NAME})*(?: and {_NAME})?)( et al\.)? (\d{{4}})\b")
#: Words of a title that no key is made from.
_ARTICLES = frozenset(("a", "an", "the", "on", "some", "can"))


class Reference(NamedTuple):
    """A paper, as a docstring names it."""

    authors: tuple[str, ...]  #: last names
    others: bool  #: whether there are more authors, "et al."
    year: int
    title: str
    arxiv: str
    thesis: bool

    @property
    def key(self) -> str:
        """The name of the entry: ``hermans2018gradient``."""
        words = re.findall(r"[a-z]+", self.title.lower())
        word = next((word for word in words if word not in _ARTICLES), "")
        return re.sub(r"\W", "", f"{self.authors[0].lower()}{self.year}{word}")

    @property
    def bibtex(self) -> str:
        """The entry."""
        names = [f"{{{name}}}" if " " in name else name for name in self.authors]
        fields = {
            "title": f"{{{self.title}}}",  # keeps its capitals
            "author": " and ".join([*names, *(["others"] if self.others else [])]),
            "year": str(self.year),
        }
        if self.thesis:
            fields["school"] = "Maastricht University"
        if self.arxiv:
            fields |= {"eprint": self.arxiv, "archivePrefix": "arXiv"}
        lines = [f"  {name} = {{{value}}}," for name, value in fields.items()]
        return "\n".join(
            [f"@{'mastersthesis' if self.thesis else 'misc'}{{{self.key},", *lines, "}"]
        )


def references() -> dict[str, list[Reference]]:
    """Return the references of each method; a paper without its title has that of its other
    mentions.
    """
    texts = {}
    for path in sorted(Path(asyncsim.methods.__file__).parent.glob("*.py")):
        for statement in ast.parse(path.read_text()).body:
            if (
                isinstance(statement, ast.FunctionDef)
                and statement.name in asyncsim.methods.METHODS
            ):
                text = ast.get_docstring(statement) or ""
                texts[statement.name] = " ".join(
                    text.partition("References\n----------\n")[2].split()
                )
    parsed = {method: _parse(text) for method, text in texts.items()}
    papers = [
        paper for papers in parsed.values() for paper in papers if paper.title and paper.arxiv
    ]
    titled = {paper.arxiv: paper for paper in sorted(papers, key=lambda paper: not paper.others)}
    return {
        method: [titled.get(paper.arxiv, paper) for paper in papers]
        for method, papers in parsed.items()
    }


def bibtex(names: Iterable[str]) -> str:
    """Return the entries of asyncsim and of the papers of methods, or of the methods of folders of
    results.
    """
    papers_of, methods = references(), []
    for name in names:
        if name in papers_of:
            methods.append(name)
        elif Path(name).is_dir():
            methods += _methods_of(Path(name))
        else:
            raise InputError(
                f"{name!r}: neither a method nor a folder of results; "
                f"{choices_like(name, sorted(papers_of))}"
            )
    entries, lines = {"asyncsim": SOFTWARE}, []
    for method in dict.fromkeys(methods):
        papers = papers_of.get(method, [])
        lines.append(
            f"% {method}: {', '.join(paper.key for paper in papers) or 'no paper is known'}"
        )
        entries |= {paper.key: paper.bibtex for paper in papers}
    return "\n\n".join([*(["\n".join(lines)] if lines else []), *entries.values()])


def _methods_of(folder: Path) -> list[str]:
    """Return the names of the methods of a folder of results, without their arguments."""
    config = config_of(folder)
    names = config.get("methods")
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise InputError(
            f"folder = {str(folder)!r}: holds no results with methods; give a folder of results"
        )
    return [name.partition("(")[0] for name in names]


def _parse(text: str) -> list[Reference]:
    starts = list(_START.finditer(text))
    ends = [start.start() for start in starts[1:]] + [len(text)]
    papers = []
    for start, end in zip(starts, ends, strict=True):
        details = text[start.end() : end]
        title = re.match(r',? "([^"]+?),?"', details)
        arxiv = re.search(r"arXiv (\d{4}\.\d{4,5})", details)
        papers.append(
            Reference(
                authors=tuple(re.split(r", | and ", start[1])),
                others=start[2] is not None,
                year=int(start[3]),
                title=title[1] if title else "",
                arxiv=arxiv[1] if arxiv else "",
                thesis="thesis" in details,
            )
        )
    return papers
