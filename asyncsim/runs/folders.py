"""Folders of results: find them, and describe each in a few words for the index and its table."""

import contextlib
import csv
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from asyncsim.base.console import number_text
from asyncsim.base.errors import InputError
from asyncsim.base.files import RUN, files_below, read_rows
from asyncsim.study import results

#: Names of tags.
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
#: Levels of folders below a root that are searched for results.
_DEPTH = 3
#: Longest text in the index, and longest list of methods or note, in characters.
LONGEST_TEXT, _LONGEST_LIST = 100, 1000
#: Largest number of tags of a folder.
_MOST_TAGS = 1000


def roots(file: str = results.FOLDER_LIST) -> list[Path]:
    """List the folders to search: added roots, and folders outside them to which studies wrote.

    ``file``: with `asyncsim.study.results.TAGGED_LIST`, the tagged folders without results.
    """
    try:
        lines = (results.index_folder() / file).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return []
    return [Path(line) for line in dict.fromkeys(lines) if os.path.isabs(line)]


def search(known_paths: Iterable[str]) -> Iterator[Path]:
    """Yield each folder of results once: known ones first, then below roots and ``results``; then
    other folders with tags.
    """
    visited = set()
    for path in map(Path, known_paths):
        if (path / results.CONFIG).exists():
            visited.add(path)
            yield path
    waiting = [(root, 0) for root in (Path("results").absolute(), *roots())]
    while waiting:
        folder, depth = waiting.pop()
        # A database or a terminal may refuse names that are not printable.
        if folder in visited or not str(folder).isprintable():
            continue
        visited.add(folder)
        if (folder / results.CONFIG).exists():
            if isinstance(results.config_of(folder).get("study"), str):
                yield folder
        elif depth < _DEPTH:
            with contextlib.suppress(OSError), os.scandir(folder) as inside:
                waiting += [
                    (Path(entry.path), depth + 1)
                    for entry in inside
                    if entry.is_dir(follow_symlinks=False) and not entry.name.startswith(".")
                ]
    for path in roots(results.TAGGED_LIST):
        if not (path / results.CONFIG).exists() and _tags(path):
            yield path


def stamp(folder: Path) -> str:
    """Return a text that changes whenever a file in the index changes."""
    stamps = []
    for name in (results.CONFIG, results.SUMMARY, results.ORIGIN, "tags"):
        try:
            status = os.stat(folder / name)
            stamps.append(f"{status.st_mtime_ns}.{status.st_size}.{status.st_ino}")
        except OSError:
            stamps.append("")
    return " ".join(stamps)


def describe(folder: Path) -> dict[str, Any]:
    """Return a folder's entry in the index: study, date, cluster, methods, headline and tags."""
    tags = _tags(folder)
    if not (folder / results.CONFIG).exists():
        texts = dict.fromkeys(("id", "study", "cluster", "methods", "headline"), "")
        return {**texts, "date": max((tag["date"] for tag in tags), default=""), "runs": 0} | {
            "tags": tags
        }
    config, record = results.config_of(folder), results.json_table(folder / results.ORIGIN)
    date = record.get("date")
    if not isinstance(date, str):
        date = ""
        with contextlib.suppress(OSError):
            modified = (folder / results.CONFIG).stat().st_mtime
            date = datetime.fromtimestamp(modified, UTC).isoformat(timespec="seconds")
    rows = _rows(folder / results.SUMMARY)
    methods = config.get("methods")
    headline = "; ".join(
        filter(None, [results.unfinished(folder, config), _headline(rows, config)])
    )
    return {
        "id": one_line(record.get("id") or ""),
        "study": one_line(config.get("study", "")),
        "date": one_line(date),
        "cluster": one_line(_cluster(config)),
        "methods": one_line(
            ", ".join(map(str, methods)) if isinstance(methods, list) else "", _LONGEST_LIST
        ),
        "headline": one_line(headline),
        "runs": len(rows),
        "tags": tags,
    }


def _tags(folder: Path) -> list[dict[str, Any]]:
    """Read the name, run, commit, note and date of each tag in a folder."""
    files: list[Path] = []
    with contextlib.suppress(OSError, InputError):  # the folder has no tags
        files = sorted(files_below(folder / "tags"), key=lambda file: file.stem)
    tags = []
    for file in [file for file in files if file.suffix == ".json" and NAME.fullmatch(file.stem)][
        :_MOST_TAGS
    ]:
        values = results.json_table(file)
        run, commit = values.get("run"), values.get("commit")
        tags.append(
            {
                "name": file.stem,
                "run": one_line(run) if isinstance(run, str) else None,
                "commit": commit if isinstance(commit, int) and abs(commit) < 2**62 else None,
                "note": one_line(values.get("note") or "", _LONGEST_LIST),
                "date": one_line(values.get("date", "")),
            }
        )
    return tags


def runs_in(folder: Path) -> list[str]:
    """List the runs in a folder of results: ``gem-seed0``, or in a cell ``workers-5/gem-seed0``."""
    runs = folder / "runs"
    names = (
        path.parent.relative_to(runs).as_posix() for path in files_below(runs) if path.name == RUN
    )
    return sorted(name for name in names if "/." not in f"/{name}")  # leading dot: half-written


def one_line(value: Any, longest: int = LONGEST_TEXT) -> str:
    """Convert a value to a short text of one line, without control characters for a terminal."""
    text = "".join(
        character if character.isprintable() else "?" for character in str(value)[: longest + 1]
    )
    return text if len(text) <= longest else f"{text[: longest - 3]}..."


def _rows(file: Path) -> list[dict[str, str]]:
    """Read the rows of a summary as texts; none if it cannot be read."""
    try:
        if file.stat().st_size > results.LARGEST:
            return []
        return read_rows(file)
    except (OSError, ValueError, csv.Error):
        return []


def _cluster(config: Mapping[str, Any]) -> str:
    """Describe the cluster of a study: its workers, and options that differ from the defaults."""
    workers = config.get("workers")
    count = (
        ", ".join(map(str, workers))
        if isinstance(workers, list)
        else ""
        if workers is None
        else str(workers)
    )
    parts = [f"{count} worker{'' if count == '1' else 's'}"] if count else []
    for name, usual in (("topology", None), ("policy", "asynchronous"), ("protocol", "exchange")):
        value = config.get(name)
        if isinstance(value, str) and value != usual:
            parts.append(value)
    return ", ".join(parts)


#: Columns for a headline, in order of preference, and whether larger values are better.
_HEADLINES = (
    ("time_to_target", False),
    ("test_accuracy", True),
    ("test_loss", False),
    ("train_loss", False),
    ("final_loss", False),
)


def _headline(rows: Sequence[Mapping[str, str]], config: Mapping[str, Any]) -> str:
    """Return the best mean over seeds of a measure, and its method; without a measure, the mean
    staleness.

    A study whose runs differ in more than method, learning rate and seed has no best: its headline
    is the range of its means.
    """
    options = [name for name in results.cell_options(config) if name != "learning_rate"]
    unlike = [name for name in options if len({row.get(name) for row in rows}) > 1]
    for column, is_larger_better in _HEADLINES:
        groups: dict[tuple[str, ...], list[float]] = {}
        for row in rows:
            conditions = (
                str(row.get(name) or "") for name in ("method", "method.learning_rate", *unlike)
            )
            with contextlib.suppress(KeyError, TypeError, ValueError):
                value = float(row[column])
                groups.setdefault(tuple(conditions), []).append(value)
        means = {key: sum(seeds) / len(seeds) for key, seeds in groups.items()}
        means = {key: mean for key, mean in means.items() if math.isfinite(mean)}
        if not means:
            continue
        name = column.replace("train_", "training_").replace("_", " ")
        unit = " s" if column == "time_to_target" else ""
        if unlike:
            ends = dict.fromkeys(map(number_text, (min(means.values()), max(means.values()))))
            return f"{name} {' to '.join(ends)}{unit}, by {', '.join(unlike)}"
        best = (max if is_larger_better else min)(means, key=means.__getitem__)
        return f"{name} {number_text(means[best])}{unit} {best[0]}".rstrip()
    with contextlib.suppress(KeyError, TypeError, ValueError, ZeroDivisionError):
        values = [float(row["trace.staleness_mean"]) for row in rows]
        return f"staleness {number_text(sum(values) / len(values))}"
    return ""
