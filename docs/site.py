"""Generate the pages, figures and formulas that the site has beside the pages of this folder.

MkDocs calls the functions whose names begin with ``on_``; ``.mkdocs.yml`` names this file.
"""

import dataclasses
import hashlib
import html
import inspect
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from asyncsim.study.options import texts_of

ROOT = Path(__file__).resolve().parent.parent
#: Results of the commands whose figures the pages show.
GALLERY = ROOT / "results" / "gallery"
#: The pages of the API and their modules.
API = {
    "clusters": "clusters.cluster clusters.workers clusters.laws clusters.network clusters.policy "
    "clusters.collectives",
    "rollouts": "clusters.rollouts",
    "topologies": "clusters.topologies",
    "failures": "clusters.failures",
    "traces": "simulation.simulate traces.prescription traces.visits traces.trace traces.samples "
    "traces.lag",
    "methods": "methods methods.policy_gradient",
    "aggregation": "byzantine.aggregation",
    "attacks": "byzantine.attacks",
    "problems": "problems problems.policy",
    "recorders": "replays.recorders",
    "replay": "replays.replay replays.ensemble replays.post_training",
    "runs": "replays.run runs.opened",
    "plots": "drawing.plots",
    "theory": "theory",
    "calibration": "calibration calibration.prediction calibration.rollouts",
    "study": "study study.config study.sweep",
    "real": "real",
    "errors": "base.errors",
}
_FENCE = re.compile(r"^```(\w+) ([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_OUTSIDE = re.compile(r"\]\(\.\./([^)#]+)")
_FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)
_FILM = "<!-- film -->"


def on_files(files: Any, config: Any) -> Any:
    """Add generated pages, figures of commands, and linked files outside of this folder."""
    from mkdocs.structure.files import File

    for path, text in generated().items():
        files.append(File.generated(config, path, content=text))
    pages = {page.name: page.read_text() for page in sorted((ROOT / "docs").glob("*.md"))}
    outside = {path for text in pages.values() for path in _OUTSIDE.findall(text)}
    for path in sorted(outside | {"CHANGELOG.md"}):
        files.append(File.generated(config, path, abs_src_path=str(ROOT / path)))
    images = {
        image
        for text in pages.values()
        for command, _ in drawings(text)
        for image in run(command).glob("*.png")
    }
    for path in [*sorted(images), film(pages["tutorial.md"])]:
        files.append(
            File.generated(config, str(path.relative_to(GALLERY.parent)), abs_src_path=str(path))
        )
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Show figures below their commands and reduce the words behind a fence to the language."""
    if page.file.src_uri == "CHANGELOG.md":
        return markdown.replace("](docs/", "](")
    for command, figures in drawings(markdown):
        folder = run(command).relative_to(GALLERY.parent)
        images = "\n".join(f"![{figure} of {command}]({folder}/{figure}.png)" for figure in figures)
        fence = f"{command}\n```"
        markdown = markdown.replace(fence, f"{fence}\n\n{images}", 1)
    if _FILM in markdown:
        path = film((ROOT / "docs" / "tutorial.md").read_text()).relative_to(GALLERY.parent)
        markdown = markdown.replace(
            _FILM, f"![Workers around the central variable, two methods]({path})"
        )
    return _FENCE.sub(r"```\1\n\3```", _OUTSIDE.sub(r"](\1", markdown))


def on_page_content(content: str, page: Any, config: Any, files: Any) -> str:
    """Set formulas as MathML, and repair paragraphs of reStructuredText in front of formulas."""
    return _FORMULA.sub(mathml, content.replace("<p>::</p>", "").replace("::</p>", ":</p>"))


def mathml(formula: re.Match[str]) -> str:
    """Convert a formula from LaTeX to MathML."""
    from latex2mathml.converter import convert

    return convert(html.unescape(formula[2]), display="block" if formula[1] == "div" else "inline")


def drawings(page: str) -> list[tuple[str, list[str]]]:
    """Return the commands of the fences that say ``draw=a,b``, and the figures to show of each."""
    fences = [(info, text.strip()) for _, info, text in _FENCE.findall(page)]
    return [
        (text, info.removeprefix("draw=").split(","))
        for info, text in fences
        if info.startswith("draw=")
    ]


def run(command: str) -> Path:
    """Return the folder with the results of a study; run the study if it is missing."""
    study = command.split("study ")[1].split()[0]
    folder = GALLERY / f"{study}-{hashlib.sha256(command.encode()).hexdigest()[:8]}"
    if not any(folder.glob("*.png")):
        shutil.rmtree(folder, ignore_errors=True)  # an interrupted run
        _execute(*shlex.split(command)[1:], "--out", str(folder))
    return folder


def film(page: str) -> Path:
    """Return the animation of the page's study with ``--animate``; draw it if it is missing."""
    (command,) = [command for command, _ in drawings(page) if "--animate" in command]
    folder = run(command)
    path = folder.with_suffix(".gif")
    if not path.exists():
        _execute("animate", str(folder), "--frames", "90", "--out", str(path))
    return path


def _execute(*arguments: str) -> None:
    GALLERY.mkdir(parents=True, exist_ok=True)
    tutorial = (ROOT / "docs" / "tutorial.md").read_text()
    (source,) = re.findall(
        r"^```python\n(# mine\.py\n.*?)^```$", tutorial, re.MULTILINE | re.DOTALL
    )
    (GALLERY / "mine.py").write_text(source)
    variables = {"PYTHONPATH": str(ROOT), "ASYNCSIM_INDEX": str(GALLERY / "index")}
    command = [sys.executable, "-m", "asyncsim", *arguments]
    done = subprocess.run(
        command, cwd=GALLERY, env=os.environ | variables, capture_output=True, text=True
    )
    if done.returncode:
        raise RuntimeError(f"{shlex.join(command)}\n{done.stderr}")


def generated() -> dict[str, str]:
    """Return the pages that follow from the code: the API, all studies and all methods."""
    pages = {f"api/{name}.md": _api(name, modules) for name, modules in API.items()}
    return pages | {"options.md": options(), "catalogue.md": catalogue(), "claims.md": claims()}


def claims() -> str:
    """Return the page of published claims, from the table that the study ``claims`` wrote."""
    import pandas as pd

    from asyncsim import study

    table = pd.read_csv(ROOT / "docs" / "claims.csv", keep_default_na=False)
    lines = [
        "# Published claims",
        "",
        "`asyncsim study claims` tests the claims of the papers and computes these verdicts; lists "
        "may be chosen: `asyncsim study claims gem agn`. This is its table at small scale, on "
        "bundled problems; `--scale paper` runs the published set-ups. The command below each "
        "set-up repeats the test. A difference counts if its 95 % confidence interval over the "
        "seeds excludes equality; *undecided* differences state about how many seeds would decide. "
        "Each list was tested in an empty folder; the table joins the `claims.csv` of these "
        "folders.",
        "",
        study.load("claims").page(table),
    ]
    return "\n".join(lines)


def _api(name: str, modules: str) -> str:
    from asyncsim.methods import METHODS

    names = [f"asyncsim.{module}" for module in modules.split()]
    if name == "methods":  # a table, which static analysis does not follow
        names += [f"{factory.__module__}.{factory.__name__}" for factory in METHODS.values()]
    return "\n\n".join([f"# {name.capitalize()}", *(f"::: {path}" for path in names)]) + "\n"


def catalogue() -> str:
    """Return the page of all methods, problems, rules and attacks, from their docstrings."""
    from asyncsim.byzantine.aggregation import RULES
    from asyncsim.byzantine.attacks import ATTACKS
    from asyncsim.methods import METHODS
    from asyncsim.problems import PROBLEMS

    lines = [
        "# Methods and problems",
        "",
        'An entry of `--methods` is a call: `"gem(kappa=2)"`, or `"gem(kappa=[1, 2])"` for one '
        "method per value.",
        "`--learning-rate`, `--momentum`, `--optimizer` and `--batch-size` apply to entries that "
        "do not set them.",
        "`help(asyncsim.methods.gem)` has the formula, the source and every departure from it. "
        "This page follows from",
        "the docstrings.",
    ]
    for title, table in (
        ("method", METHODS),
        ("problem", PROBLEMS),
        ("rule", RULES),
        ("attack", ATTACKS),
    ):
        lines += [
            "",
            f"## {title.capitalize()}s",
            "",
            f"| {title} | description | arXiv |",
            "|---|---|---|",
        ]
        lines += [_entry(factory) for factory in table.values()]
    return "\n".join(lines) + "\n"


def _entry(factory: Any) -> str:
    from asyncsim.base.calls import form_of
    from asyncsim.base.console import summary_of

    function = getattr(factory, "func", factory)
    docstring = function.__doc__ or ""
    summary = summary_of(docstring).removeprefix("Return ").replace("|", r"\|")
    papers = re.findall(
        r"arXiv\s+(\d{4}\.\d{4,5})", f"{sys.modules[function.__module__].__doc__}{docstring}"
    )
    return (
        f"| `{form_of(factory)}` | {summary[:1].upper()}{summary[1:]} | "
        f"{', '.join(dict.fromkeys(papers))} |"
    )


def options() -> str:
    """Return the page of all studies: the question of each, and its options with their defaults."""
    from asyncsim import study
    from asyncsim.study.config import StudyConfig

    modules = {
        path.stem: study.load(path.stem)
        for path in sorted(study.shipped("studies").glob("[!_]*.py"))
    }
    lines = [
        "# All studies",
        "",
        "| study | question |",
        "|---|---|",
        *(
            f"| [`{name}`](#{name}) | {_paragraphs(module.__doc__ or '')[0]} |"
            for name, module in modules.items()
        ),
        "",
        "`asyncsim study NAME --help` prints the options below. An option's name on the command "
        "line has hyphens:",
        "`--learning-rate 0.1`; `--no-NAME` turns a switch off.",
        "",
        "## Common options",
        "",
        "The sections below list further options of each study, and options with another default. "
        "`fairness` and",
        "`validate`, which record real processes, and `scaling` and `throughput` have fewer of "
        "these.",
        *_table(_fields(StudyConfig)),
        "",
        *_paragraphs(StudyConfig.help_notes),
    ]
    common = _fields(StudyConfig)
    for name, module in modules.items():
        fields = {
            field: text
            for field, text in _fields(module.Config).items()
            if common.get(field) != text
        }
        lines += ["", f"## {name}", "", *_paragraphs(module.__doc__ or ""), *_table(fields)]
        if scales := getattr(module, "SCALES", None):
            lines += [
                "",
                f"`--scale` chooses other defaults: {', '.join(f'`{scale}`' for scale in scales)}.",
            ]
    return "\n".join(lines) + "\n"


def _fields(config: type) -> dict[str, tuple[str, str]]:
    """Return default and help (the text below the field) of each visible option of a Config."""
    texts = texts_of(config)
    fields = dataclasses.fields(config)
    return {
        field.name: (_default(field), texts[field.name]) for field in fields if texts[field.name]
    }


def _default(field: Any) -> str:
    value = field.default if field.default is not dataclasses.MISSING else field.default_factory()
    if isinstance(value, tuple):
        return " ".join(f'"{item}"' if "(" in str(item) else str(item) for item in value)
    return "" if value is None else str(value)


def _table(fields: dict[str, tuple[str, str]]) -> Iterator[str]:
    if fields:
        yield from ("", "| option | default | meaning |", "|---|---|---|")
    for name, (default, text) in fields.items():
        escaped = re.sub(r"([*_<|$])", r"\\\1", text)
        yield f"| `{name}` | {f'`{default}`' if default else ''} | {escaped} |"


def _paragraphs(text: str) -> list[str]:
    return inspect.cleandoc(text).replace("::\n", ":\n").splitlines()
