"""The commands that find finished studies again and show them: ``asyncsim runs``, ``tag``, ``warp``, ``show``, ..."""

import argparse
import re
import shutil
import sys
import webbrowser
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn

from asyncsim.base.console import counted, note, tell
from asyncsim.base.errors import InputError, choices_like
from asyncsim.pages.trust import is_trusted, page_of
from asyncsim.runs import index
from asyncsim.runs.folders import one_line
from asyncsim.study.results import PAGE

#: Folders that a table shows unless all are asked for.
_SHOWN = 40


class Parser(argparse.ArgumentParser):
    """Reads options; raises InputError where argparse would end the program."""

    def error(self, message: str) -> NoReturn:
        """Raise InputError with argparse's own words, and where the options are listed."""
        raise InputError(f"{message}; {self.prog} --help lists what there is")


def _parser(command: Callable[..., Any]) -> Parser:
    """Return the parser of a command, which its docstring describes."""
    return Parser(prog=f"asyncsim {command.__name__}", description=" ".join((command.__doc__ or "").split()))


def run(command: str, arguments: Sequence[str]) -> int:
    """Run one of the commands; return the exit code: 2 for bad input."""
    try:
        return COMMANDS[command](arguments)
    except InputError as error:
        tell(f"error: {error}")
        return 2


def runs(arguments: Sequence[str]) -> int:
    """List finished studies, the newest first."""
    parser = _parser(runs)
    parser.add_argument("--study", help="only results of this study")
    parser.add_argument("--method", help="only results with this method")
    parser.add_argument("--tag", help="only results with a tag that has this in its name")
    parser.add_argument("--all", action="store_true", help=f"all, not only the newest {_SHOWN}")
    parser.add_argument("--root", help="search this folder for results, too, from now on")
    parser.add_argument("--forget", action="store_true", help="remove folders that are gone from the list")
    given = parser.parse_args(arguments)
    if given.root is not None:
        index.add_root(given.root)
    if given.forget:
        print(f"forgot {counted(index.forget(), 'folder')}")
    found = index.entries()
    there = [entry for entry in found if not entry.gone]
    for name, names in (("study", {entry.study for entry in there}), ("method", _methods(there))):
        value = getattr(given, name)
        if value is not None and value not in names:
            raise InputError(f"--{name} {value!r}: no results; {choices_like(value, sorted(names))}")
    kept = [
        entry
        for entry in there
        if given.study in (None, entry.study)
        and (given.method is None or given.method in _methods([entry]))
        and (given.tag is None or any(given.tag in tag.name for tag in entry.tags))
    ]
    shown = kept if given.all else kept[:_SHOWN]
    if not kept:
        print("no results are known; asyncsim runs --root FOLDER searches a folder for them")
    else:
        print(_table(shown))
    if len(shown) < len(kept):
        print(f"and {counted(len(kept) - len(shown), 'older folder')}: asyncsim runs --all")
    for entry in found:
        if entry.gone:
            tags = f" ({', '.join(tag.name for tag in entry.tags)})" if entry.tags else ""
            note(f"{entry.folder}{tags} is gone; was it moved? asyncsim runs --root FOLDER, else --forget")
    return 0


def tag(arguments: Sequence[str]) -> int:
    """Name a folder of results, or a commit of one of its runs."""
    parser = _parser(tag)
    parser.add_argument("folder", nargs="?", help="the folder of results, or its name, or a tag that it has")
    parser.add_argument("name", nargs="?", help="letters, digits, '.', '_' and '-'")
    parser.add_argument("--note", default="", help="a line that says why")
    parser.add_argument("--run", help="name this run: downpour-seed0, say")
    parser.add_argument("--commit", type=int, help="name this commit of the run")
    parser.add_argument("--remove", metavar="NAME", help="remove a tag")
    given = parser.parse_args(arguments)
    if given.remove is not None:
        if given.folder is not None:
            raise InputError(f"--remove {given.remove!r}: takes no folder; leave {given.folder!r} out")
        print(f"removed {given.remove} from {index.untag(given.remove).folder}")
        return 0
    if given.folder is None or given.name is None:
        raise InputError("give a folder and a name: asyncsim tag results/compare baseline")
    folder = Path(given.folder)
    folder = folder if folder.is_dir() else index.find(given.folder).folder
    made = index.tag(folder, given.name, given.note, given.run, given.commit)
    print(f"{made.name}: {made.folder}")
    return 0


def warp(arguments: Sequence[str]) -> int:
    """Print the folder that a tag names; cd $(asyncsim warp NAME)"""
    parser = _parser(warp)
    parser.add_argument("name", help="a tag, or the name of a folder of results")
    parser.add_argument("--open", action="store_true", help="show its page as well")
    given = parser.parse_args(arguments)
    found = index.find(given.name)
    print(found.folder)
    if found.run:
        at = "" if found.commit is None else f", commit {found.commit}"
        note(f"the place is runs/{found.run}{at}{f': {found.note}' if found.note else ''}")
    if given.open:
        _show(found.folder)
    return 0


def show(arguments: Sequence[str]) -> int:
    """Open the page of a finished study in the browser."""
    parser = _parser(show)
    parser.add_argument("name", help="a tag, or a folder of results")
    _show(index.find(parser.parse_args(arguments).name).folder)
    return 0


def diff(arguments: Sequence[str]) -> int:
    """Print which options of two studies differ; draw both on the same axes."""
    parser = _parser(diff)
    parser.add_argument("first", help="a tag, or a folder of results")
    parser.add_argument("second", help="another")
    parser.add_argument("--measure", help="what is drawn: train_loss, test_accuracy, ...")
    parser.add_argument("--out", help="where the figure is written; a PNG and a PDF of the tags' names otherwise")
    from asyncsim.runs.difference import report  # which loads matplotlib

    report(**vars(parser.parse_args(arguments)))
    return 0


def animate(arguments: Sequence[str]) -> int:
    """Write a page in which the workers of a run, or of two side by side, move around the central variable.

    Studies that were run with --animate show distances, others the staleness.
    """
    parser = _parser(animate)
    parser.add_argument("name", help="a tag, or a folder of results")
    parser.add_argument(
        "--runs", nargs="+", metavar="RUN", help="one or two of its runs; by default runs of two methods"
    )
    parser.add_argument("--frames", type=int, help="at most 1500, which is the default; 300 for a GIF or MP4")
    parser.add_argument("--out", help="the file: .html, .gif or .mp4 (with ffmpeg); by default NAME-animation.html")
    parser.add_argument("--force", action="store_true", help="overwrite the file if it exists")
    from asyncsim.runs import animation  # which loads matplotlib

    print(animation.animate(**vars(parser.parse_args(arguments))))
    return 0


def check_lag(arguments: Sequence[str]) -> int:
    """Print the staleness in a log of rollouts and which limit binds; exit with 1 if a bound is violated.

    The log is parquet, or CSV named .csv, with a row per sample: read_version, version (empty if it was never trained),
    and optionally group, slot, start_time, end_time, take_time, train_time.
    """
    from asyncsim.traces import lag  # which loads pandas

    parser = _parser(check_lag)
    parser.prog = "asyncsim check-lag"
    parser.add_argument("path", metavar="FILE", help="the log")
    parser.add_argument("--bound", type=int, help="the largest staleness (versions) that is allowed")
    report = lag.check_lag(**vars(parser.parse_args(arguments)))
    print(report)
    return 0 if report.beyond is None else 1


def _show(folder: Path) -> None:
    """Open the page of a folder of results in the browser; draw a new one unless this machine wrote it."""
    page = folder / PAGE
    if not is_trusted(page):
        from asyncsim.pages.command import draw_page

        note(f"{page} is not known to be this machine's, and could run anything: the page is drawn anew")
        page = draw_page(folder, page_of(folder))
    print(page)
    if not webbrowser.open(page.absolute().as_uri()):
        note("no browser could be opened; open that file in one")


def _methods(entries: Sequence[index.IndexEntry]) -> set[str]:
    """Return the methods of some entries, with their hyper-parameters and by their names alone."""
    # Commas inside brackets are between hyper-parameters.
    calls = {call for entry in entries for call in re.split(r", (?![^(]*\))", entry.methods) if call}
    return calls | {call.partition("(")[0] for call in calls}


def _table(entries: Sequence[index.IndexEntry]) -> str:
    """Return the entries as a table that fits the terminal: long cells are cut, the folder never."""
    now = datetime.now(UTC)
    rows = [["tag", "study", "cluster", "methods", "best", "age", "folder"]]
    for one in entries:
        tags = ", ".join(tag.name for tag in one.tags) or "-"
        methods = one_line(one.methods)
        rows.append([tags, one.study, one.cluster, methods, one.headline, _age(one.date, now), _short(one.folder)])
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    room = shutil.get_terminal_size((120, 0)).columns if sys.stdout.isatty() else 10_000
    while sum(widths) + 2 * len(widths) > room and max(widths[:5]) > 12:
        widths[widths.index(max(widths[:5]))] -= 1
    lines = []
    for row in rows:
        cells = [*map(one_line, row[:-1], widths), row[-1]]
        lines.append("  ".join(f"{cell:<{width}}" for cell, width in zip(cells, widths, strict=True)).rstrip())
    return "\n".join(lines)


def _age(date: str, now: datetime) -> str:
    """Return how long ago a date was, in the largest unit of which there is at least one."""
    try:
        seconds = (now - datetime.fromisoformat(date).astimezone(UTC)).total_seconds()
    except ValueError:
        return "?"
    for unit, length in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(0, seconds):.0f} s"


def _short(folder: Path) -> str:
    """Return a path relative to the working folder or to the user's own, if it is inside."""
    for base, prefix in ((Path.cwd(), ""), (Path.home(), "~/")):
        if folder.is_relative_to(base):
            return f"{prefix}{folder.relative_to(base)}"
    return str(folder)


#: The commands by name.
COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {
    "runs": runs,
    "tag": tag,
    "warp": warp,
    "show": show,
    "diff": diff,
    "animate": animate,
    "check-lag": check_lag,
}
