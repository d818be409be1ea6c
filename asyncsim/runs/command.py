"""The commands for finished studies: ``asyncsim runs``, ``tag``, ``warp``, ``show``, ..."""

import os
import shutil
import sys
import webbrowser
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from asyncsim.base.console import Parser, counted, note, tell_error
from asyncsim.base.errors import InputError
from asyncsim.base.files import folder_name
from asyncsim.pages.contents import write_contents
from asyncsim.runs import known
from asyncsim.runs.known import one_line
from asyncsim.runs.shells import SCRIPTS
from asyncsim.study.results import index_folder

#: Rows of a table without --all.
_ROWS = 40
#: Commands whose arguments may be tags.
_WITH_NAMES = ("warp", "show", "tag")


def _parser(command: Callable[..., Any]) -> Parser:
    """Create the parser of a command, with its docstring as the description."""
    return Parser(
        prog=f"asyncsim {command.__name__}", description=" ".join((command.__doc__ or "").split())
    )


def run(command: str, arguments: Sequence[str]) -> int:
    """Run one of the commands; return the exit code: 2 for bad input."""
    try:
        return COMMANDS[command](arguments)
    except InputError as error:
        tell_error(error, Parser.latest.hint(str(error)))
        return 2


def runs(arguments: Sequence[str]) -> int:
    """List finished studies, the newest first."""
    parser = _parser(runs)
    parser.add_argument(
        "text", nargs="?", default="", help="only studies whose tags, name or methods contain this"
    )
    parser.add_argument("--all", action="store_true", help=f"all, not only the newest {_ROWS}")
    parser.add_argument("--root", help="search this folder for results, too; it is remembered")
    parser.add_argument(
        "--forget", action="store_true", help="remove missing folders from the list"
    )
    parser.add_argument("--names", action="store_true", help="print the names of all tags alone")
    options = parser.parse_args(arguments)
    if options.root is not None:
        known.add_root(options.root)
    if options.forget:
        print(f"forgot {counted(known.forget(), 'folder')}")
    entries = known.entries()
    if options.names:
        print("\n".join(sorted({tag.name for entry in entries for tag in entry.tags})))
        return 0
    matches = [
        entry
        for entry in entries
        if any(
            options.text in text
            for text in (entry.study, entry.methods, *(tag.name for tag in entry.tags))
        )
    ]
    printed = matches if options.all else matches[:_ROWS]
    if printed:
        print(_table(printed))
    else:
        about = f" with {options.text!r}" if options.text else ""
        print(f"no results{about} are known; asyncsim runs --root FOLDER searches a folder")
    if len(printed) < len(matches):
        print(f"and {counted(len(matches) - len(printed), 'older folder')}: asyncsim runs --all")
    for folder in known.missing():
        note(f"{folder} is gone; was it moved? asyncsim runs --root FOLDER, else --forget")
    return 0


def tag(arguments: Sequence[str]) -> int:
    """Name a folder, or a commit of one of its runs."""
    parser = _parser(tag)
    parser.usage = f"{parser.prog} [options] [folder] name"
    parser.add_argument(
        "folder", nargs="?", help="any folder, its name, or one of its tags; by default this one"
    )
    parser.add_argument("name", help="letters, digits, '.', '_' and '-'")
    parser.add_argument("--note", default="", help="a line of explanation")
    parser.add_argument("--run", help="name this run, such as downpour-seed0")
    parser.add_argument("--commit", type=int, help="name this commit of the run")
    parser.add_argument("--remove", action="store_true", help="remove the tag of this name")
    options = parser.parse_args(arguments)
    if options.remove:
        print(f"removed {options.name} from {known.untag(options.name).folder}")
        return 0
    name = options.folder or os.curdir
    folder = Path(name).absolute() if os.path.isdir(name) else known.find(name).folder
    created = known.tag(folder, options.name, options.note, options.run, options.commit)
    print(f"{created.name}: {created.folder}")
    return 0


def warp(arguments: Sequence[str]) -> int:
    """Print the folder that a tag names; cd $(asyncsim warp NAME)"""
    parser = _parser(warp)
    parser.add_argument("name", nargs="?", help="a tag, or the name of a folder of results")
    parser.add_argument("--open", action="store_true", help="show its page as well")
    parser.add_argument(
        "--shell",
        choices=SCRIPTS,
        help="print a function warp that changes to the folder, and the completion of tags, for "
        "the shell's start-up file",
    )
    options = parser.parse_args(arguments)
    if options.shell is not None:
        print(SCRIPTS[options.shell].replace("COMMANDS", " ".join(_WITH_NAMES)), end="")
        return 0
    if options.name is None:
        raise InputError("give a name: asyncsim warp baseline; asyncsim runs lists all")
    tag = known.find(options.name)
    print(tag.folder)
    if tag.run:
        note(f"the place is {known.place_text(tag, 'runs/')}{f': {tag.note}' if tag.note else ''}")
    if options.open:
        _show(tag.folder)
    return 0


def show(arguments: Sequence[str]) -> int:
    """Open the page of a finished study in the browser, or the page that lists all of them."""
    parser = _parser(show)
    parser.add_argument(
        "name", nargs="?", help="a tag, or a folder of results; by default the list of all"
    )
    name = parser.parse_args(arguments).name
    if name is None:
        _open(write_contents(known.entries()))
    else:
        _show(known.find(name).folder)
    return 0


def cite(arguments: Sequence[str]) -> int:
    """Print BibTeX of asyncsim and of the papers of methods."""
    parser = _parser(cite)
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help="a method, or a folder of results for its methods"
    )
    from asyncsim.runs.citations import bibtex  # which loads JAX

    print(bibtex(parser.parse_args(arguments).names))
    return 0


def export(arguments: Sequence[str]) -> int:
    """Write the tables of a study as tidy CSV files, which R, pandas and LaTeX's pgfplots read.

    summary.csv has a row per run, with its number in the column "run"; commits.csv and
    evaluations.csv have the rows of all runs, with that number, the method, the seed and the
    options that differ. Every other table of the study is there, too.
    """
    parser = _parser(export)
    parser.add_argument("name", metavar="FOLDER", help="a tag, or a folder of results")
    parser.add_argument("--csv", action="store_true", required=True, help="the only format so far")
    parser.add_argument("--out", help="a new folder; by default NAME-csv, NAME-csv-2, ...")
    options = parser.parse_args(arguments)
    from asyncsim.runs.export import write_tables  # loads JAX

    for path in write_tables(options.name, options.out):
        print(path)
    return 0


def calibrate(arguments: Sequence[str]) -> int:
    """Fit a cluster to the log of a parameter server and predict another number of workers.

    The log is CSV named .csv, or parquet, with a row per commit and the columns worker, start_time,
    arrive_time, serve_time and commit_time, optionally send_time: when the worker began to compute,
    when its message reached the queue, when its service began, when it was applied. Or a trace that
    Trace.save wrote. The folder gets cluster.json, prediction.csv, and the
    fit as fit.csv, fit.png and fit.pdf.
    """
    parser = _parser(calibrate)
    parser.add_argument("path", metavar="FILE", help="the log")
    parser.add_argument("--workers", type=int, help="workers to predict; by default the log's")
    parser.add_argument("--unit", help="of the log's times: s, which is the default, ms, us or ns")
    parser.add_argument("--law", default="best", help="best, empirical, or a family such as gamma")
    parser.add_argument("--runs", type=int, default=199, help="simulated runs of the prediction")
    parser.add_argument("--seed", type=int, default=0, help="seed of the simulated runs")
    parser.add_argument("--sites", metavar="COLUMN", help="column with the site of each worker")
    parser.add_argument(
        "--gaps-above",
        type=float,
        metavar="SECONDS",
        help="longer ways from a commit to the next start are absences",
    )
    parser.add_argument(
        "--out", help="a new folder; by default NAME-calibrated, NAME-calibrated-2, ..."
    )
    from asyncsim.calibration.command import report  # which loads SciPy and matplotlib

    report(**vars(parser.parse_args(arguments)))
    return 0


def check_lag(arguments: Sequence[str]) -> int:
    """Print the staleness in a log of rollouts and which limit binds; exit with 1 if a bound is
    violated.

    The log is parquet, or CSV named .csv, with a row per sample. Its columns: read_version, the
    version on the slot at the start of the sample; version, the learner's version when it took the
    sample, before the update that uses it, empty if it was never trained; staleness = version -
    read_version. Optional: outcome (trained, dropped, discarded, cancelled, open); group; slot,
    which generates a single sample at a time; and the seconds start_time and end_time of the
    sample, take_time and train_time, the begin and end of its update.
    """
    from asyncsim.traces import lag  # which loads pandas

    parser = _parser(check_lag)
    parser.prog = "asyncsim check-lag"
    parser.add_argument("path", metavar="FILE", help="the log")
    parser.add_argument(
        "--bound", type=int, help="the largest staleness (versions) that is allowed"
    )
    report = lag.check_lag(**vars(parser.parse_args(arguments)))
    print(report)
    return 0 if report.beyond is None else 1


def _show(folder: Path) -> None:
    """Draw a folder's page outside the folder, and open it in the browser.

    The page in the folder may be a stranger's, and could run anything.
    """
    from asyncsim.pages.command import draw_page

    name = folder_name(f"{folder.absolute()}.html")
    _open(draw_page(folder, index_folder() / "drawn" / name))


def _open(page: Path) -> None:
    """Print the path of a page and open it in the browser."""
    print(page)
    if not webbrowser.open(page.absolute().as_uri()):
        note("no browser could be opened; open the file in a browser")


def _table(entries: Sequence[known.KnownStudy]) -> str:
    """Format the entries as a table that fits the terminal; cut long cells, but no folder."""
    rows = [["tag", "study", "cluster", "methods", "verdict", "date", "folder"]]
    for entry in entries:
        tags = ", ".join(tag.name for tag in entry.tags) or "-"
        study = entry.study or "-"
        methods = one_line(entry.methods)
        date, folder = entry.date[:10], _short(entry.folder)
        rows.append([tags, study, entry.cluster, methods, entry.verdict, date, folder])
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    room = shutil.get_terminal_size((120, 0)).columns if sys.stdout.isatty() else 10_000
    while sum(widths) + 2 * len(widths) > room and max(widths[:5]) > 12:
        widths[widths.index(max(widths[:5]))] -= 1
    lines = []
    for row in rows:
        cells = [*map(one_line, row[:-1], widths), row[-1]]
        lines.append(
            "  ".join(
                f"{cell:<{width}}" for cell, width in zip(cells, widths, strict=True)
            ).rstrip()
        )
    return "\n".join(lines)


def _short(folder: Path) -> str:
    """Return a path relative to the working folder or to the user's home, if it is inside."""
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
    "cite": cite,
    "export": export,
    "calibrate": calibrate,
    "check-lag": check_lag,
}
