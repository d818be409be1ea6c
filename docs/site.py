"""Generate the pages, figures and formulas that the site has beside the pages of this folder.

MkDocs calls the functions whose names begin with ``on_``; ``.mkdocs.yml`` names this file.
"""

import ast
import contextlib
import hashlib
import html
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).resolve().parent.parent
#: Results of the commands whose figures the pages show.
GALLERY = ROOT / "results" / "gallery"
NOTEBOOK = ROOT / "studies" / "energy_curves.ipynb"
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
#: Further pages of the API: methods by family. The other methods are ``asynchronous``.
FAMILIES = {
    "local_sgd": "aeasgd async_local_sgd averaging decoupled_diloco delayed_nesterov diloco eamsgd "
    "easgd entropy_sgd fedasync fedbuff lgd lsgd parle streaming_diloco",
    "unequal_workers": "batch_sgd ia2sgd malenia mindflayer rennala rescaled_asgd ringleader "
    "ringmaster ringmaster_lmo softsync",
    "gossip": "adpsgd clipped_gossip dpsgd osgp robust_gossip sgp",
    "robust": "basgd kardam robust zeno_pp",
}
_FENCE = re.compile(r"^```(\w+) ([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_OUTSIDE = re.compile(r"\]\(\.\./([^)#]+)")
_FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)


def on_files(files: Any, config: Any) -> Any:
    """Add generated pages, figures of commands, and linked files outside of this folder."""
    from mkdocs.structure.files import File

    rendered = {"notebook.md": (notebook() / "page.md").read_text()}
    for path, text in (generated() | rendered).items():
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
    for path in [*sorted(images), *sorted(notebook().glob("*.png"))]:
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


def notebook() -> Path:
    """Return the folder with the notebook's page and figures; run the notebook if it is missing."""
    import matplotlib.pyplot as plt

    source = NOTEBOOK.read_bytes()
    folder = GALLERY / f"notebook-{hashlib.sha256(source).hexdigest()[:8]}"
    if (folder / "page.md").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    plt.switch_backend("agg")
    names: dict[str, Any] = {}
    parts = []
    with mock.patch.object(plt, "show"):
        for cell in json.loads(source)["cells"]:
            text = "".join(cell["source"])
            if cell["cell_type"] == "markdown":
                parts.append(text)
                continue
            parts += [f"```python\n{text}\n```", *_outputs(text, names)]
            for figure in map(plt.figure, plt.get_fignums()):
                path = folder / f"{len(parts)}.png"
                figure.savefig(path, dpi=150)
                parts.append(f"![Figure of the cell above]({path.relative_to(GALLERY.parent)})")
            plt.close("all")
    (folder / "page.md").write_text("\n\n".join(parts) + "\n")
    return folder


def _outputs(cell: str, names: dict[str, Any]) -> list[str]:
    """Run a cell of the notebook; return the printed text, and the value of its last line."""
    tree = ast.parse(cell)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(tree, str(NOTEBOOK), "exec"), names)
        value = (
            eval(compile(ast.Expression(last.value), str(NOTEBOOK), "eval"), names)
            if last
            else None
        )
    outputs = [f"```text\n{printed.getvalue()}```"] if printed.getvalue() else []
    if hasattr(value, "_repr_html_"):
        table = "".join(line.strip() for line in value._repr_html_().splitlines())
        outputs.append(f"<div>{table}</div>")
    elif value is not None:
        outputs.append(f"```text\n{value!r}\n```")
    return outputs


def generated() -> dict[str, str]:
    """Return the pages that follow from the code: the API, the catalogue and the claims."""
    from asyncsim.methods import METHODS

    pages = {name: [f"asyncsim.{module}" for module in text.split()] for name, text in API.items()}
    families = {family: names.split() for family, names in FAMILIES.items()}
    others = set(METHODS).difference(*families.values())
    for family, names in (families | {"asynchronous": sorted(others)}).items():
        # The table of methods, which static analysis does not follow.
        factories = [METHODS[name] for name in names]
        pages[f"methods_{family}"] = [f"{one.__module__}.{one.__name__}" for one in factories]
    api = {f"api/{name}.md": _api(name, paths) for name, paths in pages.items()}
    return api | {"catalogue.md": catalogue(), "claims.md": claims()}


def claims() -> str:
    """Return the page of published claims, from the table that the study ``claims`` wrote."""
    import pandas as pd

    from asyncsim import study

    table = pd.read_csv(ROOT / "docs" / "claims.csv", keep_default_na=False)
    verdicts = table["verdict"].str.partition(":")[0]
    counts = verdicts.value_counts()
    rest = ", ".join(f"{count} {verdict}" for verdict, count in counts.drop("holds").items())
    lists = pd.crosstab(table["list"], verdicts)[counts.index]
    rows = [["list", *lists], ["---"] * (1 + len(counts)), *lists.reset_index().values.tolist()]
    lines = [
        "# Published claims",
        "",
        f"**{counts['holds']} of {len(table)} claims hold**; {rest}.",
        "",
        *(f"| {' | '.join(map(str, row))} |" for row in rows),
        "",
        "`asyncsim study claims gem agn` tests lists of claims again; the command below each "
        "set-up repeats a single test. These are verdicts at small scale, on bundled problems; "
        "`--scale paper` runs the published set-ups. A difference counts if its 95 % confidence "
        "interval over the seeds excludes equality; *undecided* differences state about how many "
        "seeds would decide.",
        "",
        study.load("claims").page(table),
    ]
    return "\n".join(lines)


def _api(name: str, paths: list[str]) -> str:
    title = name.replace("_", ": ", 1).replace("_", " ").capitalize()
    return "\n\n".join([f"# {title}", *(f"::: {path}" for path in paths)]) + "\n"


def catalogue() -> str:
    """Return the page of all methods, problems, rules, attacks and studies, from docstrings."""
    from asyncsim import study
    from asyncsim.byzantine.aggregation import RULES
    from asyncsim.byzantine.attacks import ATTACKS
    from asyncsim.methods import METHODS
    from asyncsim.problems import PROBLEMS

    lines = [
        "# Methods, problems, studies",
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
    lines += ["", "## Studies", "", "| study | question |", "|---|---|"]
    for path in sorted(study.shipped("studies").glob("[!_]*.py")):
        question = (study.load(path.stem).__doc__ or "").splitlines()[0]
        lines.append(f"| `{path.stem}` | {question} |")
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
