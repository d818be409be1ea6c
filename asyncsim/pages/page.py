"""Write pages: `report.html` of a finished study, and a page with an animation alone."""

import ast
import base64
import contextlib
import csv
import io
import json
import math
import shlex
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import pandas as pd

from asyncsim.base.console import counted, number_text
from asyncsim.base.errors import InputError
from asyncsim.base.files import read_rows, read_text, within, write_text
from asyncsim.drawing.look import collecting
from asyncsim.pages.film import (
    MOST_WORKERS,
    film,
    frame_times,
    on_screen,
    rings,
    scale,
)
from asyncsim.pages.packing import pack
from asyncsim.pages.timeline import timeline
from asyncsim.replays.run import Run
from asyncsim.study import results
from asyncsim.study.columns import as_column, axis_of
from asyncsim.study.finished import EXAMPLE, answer_of
from asyncsim.study.loading import studies
from asyncsim.traces.trace import Trace

#: The files of a page by their marks in its template; uPlot (MIT) draws the timeline's axes.
_ASSETS = {
    "/* library style */": "uplot/uPlot.min.css",
    "/* style */": "page.css",
    "/* library */": "uplot/uPlot.min.js",
    "/* timeline */": "timeline.js",
    "/* animation */": "animation.js",
    "/* script */": "page.js",
}
#: Largest numbers of rows of a table and of frames of an animation.
_MOST_ROWS, _MOST_FRAMES = 2000, 400
#: Largest size of the films in an animation, in bytes: with many workers there are fewer frames.
_MOST_BYTES = 2_000_000
#: The integer for an offset of 1 in the page's data, and the integer for an unknown place.
_UNIT, _NOWHERE = 28_000, -32_768
#: A run on a page: its title, the run and its trace.
PageRun = tuple[str, Run, Trace]
#: Descriptions of the forces on replicas; see `asyncsim.pages.film.Film`.
_FORCES = {
    "spring": " Springs join the replicas and the central variable.",
    "leader": " Lines lead to the present leader, which has a ring.",
}


@contextlib.contextmanager
def on_a_page(folder: Path) -> Iterator[None]:
    """Collect figures within a block, then write the page of a study's folder."""
    with collecting(results.unfinished(folder)) as drawn:
        yield
    write_page(folder, drawn)


def write_page(
    folder: Path, figures: Sequence[tuple[str, bytes, str]] = (), out: Path | None = None
) -> Path:
    """Write the self-contained page of a finished study.

    ``figures``: names, SVG and captions. ``out``: the file, by default in the study's folder. The
    page contains no times of day and no paths: the same results give the same page.
    """
    config = results.config_of(folder)
    study = str(config.get("study", folder.name))
    chosen = shown_runs(folder)
    typed = results.typed_in(folder)
    title = f"{study}: {config['problem']}" if isinstance(config.get("problem"), str) else study
    unfinished = results.unfinished(folder)
    of = f" ({unfinished})" if unfinished else ""
    tables = sorted(folder.glob("*.csv"), key=lambda file: file.name == results.SUMMARY)
    verdicts, answer = answer_of(folder)
    headlines, details = [], []
    for verdict in verdicts:
        headline, _, detail = verdict.partition("\n")
        headlines.append(headline)
        if detail:  # of several settings its own stands before it
            details.append({"text": verdict if verdicts[1:] else detail})
    page = {
        "title": f"{title}{of}",
        "origin": _origin(folder, config),
        "verdict": "\n".join(filter(None, [unfinished, *headlines])) or None,
        "question": _question(study),
        "answer": [*details, *answer],
        "command": None
        if typed is None
        else f"asyncsim study {study} {shlex.join(typed)}".rstrip(),
        "figures": [
            (name, f"data:image/svg+xml;base64,{base64.b64encode(svg).decode()}", caption)
            for name, svg, caption in figures
        ],
        "tables": [{**_table(file, out), "name": f"{file.name}{of}"} for file in tables],
        "config": config,
        "timelines": _timelines(folder, chosen),
        "animation": animation(chosen) if chosen and config.get("animate") else None,
    }
    return _write(out or folder / results.PAGE, page)


def _timelines(folder: Path, chosen: Sequence[PageRun]) -> list[dict[str, Any]]:
    """Return the timelines of the runs; without runs, of an example, the first
    trace or the first recording.
    """
    if chosen:
        return [timeline(title, trace, run) for title, run, trace in chosen]
    for pattern in (f"{EXAMPLE}/*.parquet", "traces/**/*.parquet", "recordings/*/trace.parquet"):
        for file in sorted(folder.glob(pattern)):
            name = file.parent.name if file.stem == "trace" else file.stem
            with contextlib.suppress(InputError, OSError):  # damaged, or reads at several servers
                return [timeline(name, Trace.load(file))]
    return []


def animation(chosen: Sequence[PageRun]) -> dict[str, Any]:
    """Return an animation's data for the page's script: arrays as base64, the rest as JSON."""
    most = min(MOST_WORKERS, max(trace.workers for _, _, trace in chosen))
    frames = max(2, min(_MOST_FRAMES, _MOST_BYTES // (6 * most * len(chosen))))
    times = frame_times([trace for _, _, trace in chosen], frames)
    films = [film(run, trace, times, title) for title, run, trace in chosen]
    bend, largest = scale(films)
    gossips = films[0].offset is None
    losses = [loss for film in films for _, loss in film.loss if loss > 0]
    first = max((film.loss[0][1] for film in films if film.loss), default=1.0)
    high = min(max(losses, default=1.0), 10 * first) if first > 0 else 1.0
    low = max(min(losses, default=0.1), 1e-6 * high)
    workers = chosen[0][2].workers
    count = workers if gossips else len(films[0].workers)
    drawn = counted(count, "worker") + ("" if count == workers else f" of {workers}")
    about = (
        f"{drawn} on their graph; a dot along an edge is a message under way."
        if gossips
        else f"{drawn} around the central variable, the square. The distance from the square is "
        "that of the read from the central variable, linear near the centre, logarithmic far out. "
        "The direction is taken in the plane in which the reads spread most. A gradient is "
        "computed where its worker is drawn, and is applied at the centre."
    )
    forces = dict.fromkeys(film.force for film in films)
    about += "".join(_FORCES[force] for force in forces if force)
    if any(not low <= loss <= high for animated in films for _, loss in animated.loss):
        about += (
            f" Training losses are drawn from {number_text(low)} to {number_text(high)}, others at "
            "the edge."
        )
    return {
        "about": about,
        "duration": float(times[-1]),
        # Each worker has committed twice: staleness is nearly as large as later.
        "start": min(float(times[-1]) / 2, _time_of_commit(chosen[0][2], 2 * count)),
        "rings": rings(bend, largest),
        "limits": (low, high),
        "unit": _UNIT,
        "nowhere": _NOWHERE,
        "films": [
            {
                "title": film.title,
                "trace": number,
                "workers": film.workers.tolist(),
                "places": None
                if film.offset is None
                else _places(on_screen(film.offset, bend, largest)),
                "loss": film.loss,
                "ended": film.ended,
                "force": film.force,
                "leader": pack({"index": film.leader}),
            }
            for number, film in enumerate(films)
        ],
    }


def _time_of_commit(trace: Trace, number: int) -> float:
    """Return the time (s) of a commit, of the last one if there are fewer."""
    times = trace.accepted.frame["commit_time"].to_numpy()
    return float(times[min(number, len(times)) - 1])


def _places(places: np.ndarray) -> dict[str, Any]:
    """Pack the places of workers in each frame: both axes, `_NOWHERE` if unknown."""
    integers = np.where(np.isfinite(places), np.round(np.nan_to_num(places) * _UNIT), _NOWHERE)
    return pack({"x": integers[..., 0].ravel(), "y": integers[..., 1].ravel()})


def shown_runs(folder: Path) -> list[PageRun]:
    """Return the titled run of a study's best row, with ``--animate`` also the worst row's; of a
    row the run with the first seed.

    The rows are from `results.RANKING`; without it, the runs by their final training loss.
    """
    config = results.config_of(folder)
    keys = ["method", *results.cell_options(config), "learning_rate"]
    try:
        runs = pd.DataFrame(read_rows(folder / results.SUMMARY))
        runs = runs[(runs["run_folder"] != "") & (runs["trace_file"] != "")]
        if "method.learning_rate" in runs:
            runs = runs.assign(learning_rate=runs["method.learning_rate"])
        keys = [name for name in dict.fromkeys(keys) if name in runs]
        named = [name for name in keys if name == "method" or runs[name].nunique() > 1]
        if (folder / results.RANKING).exists():
            runs = pd.DataFrame(read_rows(folder / results.RANKING))[keys].merge(runs, on=keys)
        else:
            runs = runs.sort_values("train_loss", key=pd.to_numeric, kind="stable")
        rows = runs.drop_duplicates(keys).iloc[[0, -1] if config.get("animate") else [0]]
        return [
            (
                ", ".join(_in_words(name, row[name]) for name in (*named, "seed")),
                Run.load(within(folder, row["run_folder"])),
                Trace.load(within(folder, row["trace_file"])),
            )
            for row in rows.drop_duplicates().to_dict("records")
        ]
    except (InputError, OSError, ValueError, LookupError, csv.Error):  # a damaged folder
        return []


def _in_words(name: str, value: str) -> str:
    """Return the value of an option; a number has the option's name."""
    with contextlib.suppress(ValueError):
        return f"{as_column(name).title} {float(value):g}"
    return value.removesuffix("()")


def _origin(folder: Path, config: Mapping[str, Any]) -> str:
    """Return the version that a study was run with, and the day on which it began."""
    origin = results.json_table(folder / results.ORIGIN)
    version, date = (str(origin.get(name, "")) for name in ("version", "date"))
    study = f"study {config.get('study', folder.name)}"
    return ", ".join(filter(None, [f"asyncsim {version}".strip(), study, date[:10]]))


def _question(study: str) -> list[str]:
    """Return the paragraphs of a study's docstring, with lines if code; none if unreadable."""
    path = studies().get(study)
    try:
        docstring = ast.get_docstring(ast.parse(path.read_bytes())) if path else None
    except (OSError, SyntaxError, ValueError):
        return []
    paragraphs = (docstring or "").replace("``", "").replace("::", ":").split("\n\n")
    return [
        textwrap.dedent(text) if text.startswith(" ") else " ".join(text.split())
        for text in paragraphs
    ]


def _table(file: Path, out: Path | None) -> dict[str, Any]:
    """Read a CSV file as texts: the columns with several values, their titles, the first rows, and
    a link for a page in the same folder, or at ``out``.
    """
    try:
        columns, *rows = list(csv.reader(io.StringIO(read_text(file), newline=""))) or [[]]
    except (OSError, ValueError, csv.Error):
        columns, rows = [], []
    rows = [row for row in rows if len(row) == len(columns)]
    varied = [i for i in range(len(columns)) if len({row[i] for row in rows}) > 1]
    varied = varied if len(rows) > 1 else list(range(len(columns)))
    return {
        "link": quote(file.name) if out is None else file.absolute().as_uri(),
        "count": len(rows),
        "constant": len(columns) - len(varied),
        "columns": [columns[i] for i in varied],
        "words": [axis_of(columns[i]) for i in varied],
        "rows": [[row[i] for i in varied] for row in rows[:_MOST_ROWS]],
    }


def _finite(value: Any) -> Any:
    """Replace infinities and NaN, which JSON lacks, by texts."""
    if isinstance(value, dict):
        return {name: _finite(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(entry) for entry in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _write(path: Path, page: dict[str, Any]) -> Path:
    """Write a page: the template with the style, the script and the data."""
    assets = Path(__file__).parent
    text = (assets / "page.html").read_text(encoding="utf-8")
    parts = {
        **{mark: (assets / file).read_text(encoding="utf-8") for mark, file in _ASSETS.items()},
        # Escaped, so that no text in the data can end its element.
        "/* data */": json.dumps(_finite(page), allow_nan=False).replace("<", "\\u003c"),
    }
    for place, part in parts.items():
        before, separator, after = text.partition(place)
        assert separator
        text = f"{before}{part}{after}"
    return write_text(path, text)
