"""What the site has beside the pages of this folder: links out of it, options, the API, and the gallery's figures.

MkDocs calls the functions whose names begin with ``on_``; ``.mkdocs.yml`` names this file.
"""

import ast
import dataclasses
import hashlib
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

ROOT = Path(__file__).resolve().parent.parent
#: What the gallery's commands have drawn already.
DRAWN = ROOT / "results" / "gallery"
#: The pages of the API and their modules.
API = {
    "clusters": "clusters.cluster clusters.workers clusters.laws clusters.network clusters.policy clusters.collectives "
    "clusters.rollouts",
    "topologies": "clusters.topologies",
    "failures": "clusters.failures",
    "traces": "simulation.simulate traces.prescription traces.visits traces.trace traces.samples traces.lag",
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


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that are made here, and what pages link to outside of their folder."""
    from mkdocs.structure.files import File

    made = {f"api/{name}.md": _api(name, modules) for name, modules in API.items()} | {"options.md": options()}
    for path, text in made.items():
        files.append(File.generated(config, path, content=text))
    pages = {page.name: page.read_text() for page in sorted((ROOT / "docs").glob("*.md"))}
    linked = {path for text in pages.values() for path in _OUTSIDE.findall(text)} - {"README.md"}
    for path in sorted(linked | {"CHANGELOG.md"}):
        files.append(File.generated(config, path, abs_src_path=str(ROOT / path)))
    for command, _ in gallery(pages["gallery.md"]):
        folder = drawn(command)
        for path in [*sorted(folder.glob("*.png")), *folder.glob("report.html")]:
            files.append(File.generated(config, f"gallery/{folder.name}/{path.name}", abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Rewrite links out of the folder, show the gallery's figures, and leave of a fence the language alone."""
    if page.file.src_uri == "CHANGELOG.md":
        return markdown.replace("](docs/", "](")
    markdown = _OUTSIDE.sub(lambda found: "](" + found[1].replace("README.md", "start.md"), markdown)
    if page.file.src_uri == "gallery.md":
        for command, figures in gallery(markdown):
            at = f"gallery/{_key(command)}"
            shown = "\n".join(f"![{figure} of {command}]({at}/{figure}.png)" for figure in figures)
            fence = f"{command}\n```"
            page_of = f"\n\n[Its page]({at}/report.html)" if (drawn(command) / "report.html").exists() else ""
            markdown = markdown.replace(fence, f"{fence}\n\n{shown}{page_of}", 1)
    return _FENCE.sub(r"```\1\n\3```", markdown)


def on_page_content(html: str, page: Any, config: Any, files: Any) -> str:
    """End the sentences before formulas of docstrings, which are reStructuredText, as one reads them."""
    return html.replace("::</p>", ":</p>")


def gallery(page: str) -> list[tuple[str, list[str]]]:
    """Return the commands of the gallery, and the figures of each that are shown: its fences say ``draw=a,b``."""
    fences = [(info, text.strip()) for _, info, text in _FENCE.findall(page)]
    return [(text, info.removeprefix("draw=").split(",")) for info, text in fences if info.startswith("draw=")]


def drawn(command: str) -> Path:
    """Return the folder of a study's results, which is run first unless it has been."""
    folder = DRAWN / _key(command)
    if not any(folder.glob("*.png")):
        shutil.rmtree(folder, ignore_errors=True)  # what was interrupted
        arguments = [sys.executable, *shlex.split(command)[1:], "--out", str(folder)]
        own = {"PYTHONPATH": str(ROOT), "ASYNCSIM_INDEX": str(DRAWN / "index")}
        done = subprocess.run(arguments, cwd=ROOT, env=os.environ | own, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{command}\n{done.stderr}")
    return folder


def _key(command: str) -> str:
    study = command.split("asyncsim.study ")[1].split()[0]
    return f"{study}-{hashlib.sha256(command.encode()).hexdigest()[:8]}"


def _api(name: str, modules: str) -> str:
    from asyncsim.methods import METHODS

    parts = [f"::: asyncsim.{module}" for module in modules.split()]
    if name == "methods":  # of a table; what reads the sources alone does not see them
        parts += [f"::: {one.__module__}.{one.__name__}" for one in METHODS.values()]
    return "\n\n".join([f"# {name.capitalize()}", *parts]) + "\n"


def options() -> str:
    """Return the page of all studies: what each is about, and its options with their defaults."""
    from asyncsim import study
    from asyncsim.study.config import StudyConfig

    lines = [
        "# All studies and their options",
        "",
        "`python -m asyncsim.study NAME --help` says the same. An option's name on the command line has hyphens:",
        "`--learning-rate 0.1`; a switch is turned off by `--no-NAME`.",
        "",
        "## Options of studies of methods",
        "",
        "Below, each study lists the options that it has besides these, or with another default. `fairness` and",
        "`validate`, which record real processes, and `scaling` and `throughput` have fewer of these.",
        *_table(_fields(StudyConfig)),
        "",
        *_paragraphs(StudyConfig.help_notes),
    ]
    shared = _fields(StudyConfig)
    for path in sorted(study.shipped("studies").glob("[!_]*.py")):
        module = study.load(path.stem)
        own = {name: told for name, told in _fields(module.Config).items() if shared.get(name) != told}
        lines += ["", f"## {path.stem}", "", *_paragraphs(module.__doc__ or ""), *_table(own)]
        if scales := getattr(module, "SCALES", None):
            lines += ["", f"`--scale` chooses other defaults: {', '.join(f'`{name}`' for name in scales)}."]
    return "\n".join(lines) + "\n"


def _fields(config: type) -> dict[str, tuple[str, str]]:
    """Return default and help of each option of a study's Config: the text below a field, of its own class or a base.

    What a class hides is no option.
    """
    helped: dict[str, str] = {}
    for one in reversed(config.__mro__[:-1]):
        body = ast.parse(inspect.getsource(one)).body[0].body
        for field, text in zip(body, [*body[1:], None], strict=True):
            if not isinstance(field, ast.AnnAssign):
                continue
            if ast.unparse(field.annotation).startswith("Hidden["):
                helped[field.target.id] = ""
            elif isinstance(text, ast.Expr):
                helped[field.target.id] = " ".join(text.value.value.split())
    fields = {field.name: (_default(field), helped[field.name]) for field in dataclasses.fields(config)}
    return {name: told for name, told in fields.items() if told[1]}


def _default(field: Any) -> str:
    value = field.default if field.default is not dataclasses.MISSING else field.default_factory()
    if isinstance(value, tuple):
        return " ".join(f'"{one}"' if "(" in str(one) else str(one) for one in value)
    return "" if value is None else str(value)


def _table(fields: dict[str, tuple[str, str]]) -> Iterator[str]:
    if fields:
        yield from ("", "| option | default | what |", "|---|---|---|")
    for name, (default, text) in fields.items():
        escaped = re.sub(r"([*_<|])", r"\\\1", text)
        yield f"| `{name}` | {f'`{default}`' if default else ''} | {escaped} |"


def _paragraphs(text: str) -> list[str]:
    return inspect.cleandoc(text).replace("::\n", ":\n").splitlines()
