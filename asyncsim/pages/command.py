"""The command ``asyncsim figures``: draws the figures of a paper, or of a folder of results."""

import argparse
import os
import shlex
from collections.abc import Sequence
from pathlib import Path

from asyncsim.base.calls import split
from asyncsim.base.console import Parser, tell_error
from asyncsim.base.errors import InputError, choices_like, reading_results, shown
from asyncsim.drawing.look import appearance, collecting
from asyncsim.drawing.paper import choosing
from asyncsim.pages.page import write_page
from asyncsim.study import finished, shipped
from asyncsim.study.finished import PAPERS, figures, study_of
from asyncsim.study.results import unfinished

_ABOUT = """Draw the figures of a paper from the results of several studies, or redraw the figures
and the page of one study into its folder. If the folder has a paper's name, write ./FOLDER."""


def main(arguments: Sequence[str]) -> int:
    """Draw the figures of a paper or of a folder of results; return the exit code, 2 if bad."""
    typed = list(arguments) or ["--help"]
    try:
        for path in _draw(_parser(typed[0]).parse_args(typed)):
            print(path)
    except InputError as error:
        tell_error(error, "asyncsim figures --help explains the options")
        return 2
    return 0


def _parser(name: str) -> Parser:
    """Create the parser; its help ends with the papers, or with the figures of the paper."""
    about = "\n".join(["papers:", *(f"  {paper:<14}  {text}" for paper, text in PAPERS.items())])
    parser = Parser(
        prog="asyncsim figures",
        description=_ABOUT,
        epilog=figures(name).PAPER.listing() if name in PAPERS else about,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("name", metavar="PAPER or FOLDER")
    parser.add_argument(
        "--only", metavar="NAMES", default="", help="figures, with commas between their names"
    )
    parser.add_argument("--width", type=float, help="inches of every figure, from 1 to 20")
    parser.add_argument(
        "--panel",
        metavar="TEXT",
        help="of each figure the panel with this text in its title or along its axes: without the "
        "figure's title, at most 2.6 inches high",
    )
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="where to draw, without a page")
    parser.add_argument(
        "--results", type=Path, metavar="FOLDER", help="of a paper: holds a folder for each study"
    )
    return parser


def _draw(options: argparse.Namespace) -> list[Path]:
    """Draw the figures that the options select; return the written files."""
    name, only = options.name, split(options.only)
    with appearance(options.width):
        if name in PAPERS:
            with choosing(panel=options.panel):
                results = options.results or Path("results")
                return figures(name).PAPER.draw(results, options.out, only)
        if not os.path.isdir(name):
            raise InputError(
                f"{shown(name)}: neither a folder of results nor a paper; "
                f"{choices_like(name, PAPERS)}"
            )
        if options.results is not None:
            raise InputError(f"results = {str(options.results)!r}: of a paper only; leave it out")
        if not (only or options.panel or options.out):
            return draw_folder(Path(name))
        with choosing(only, options.panel, options.out):
            return _drawn(Path(name))


def draw_folder(folder: Path) -> list[Path]:
    """Redraw the figures and the page of a study into its folder; return the written files."""
    with collecting(unfinished(folder)) as drawn:
        return [*_drawn(folder), write_page(folder, drawn)]


def _drawn(folder: Path) -> list[Path]:
    """Draw the figures of a study; return the written files."""
    _, study = study_of(folder)
    if study not in {path.stem for path in shipped("studies").glob("*.py")}:
        raise InputError(
            f"folder = {str(folder)!r}: holds {study!r}, which is no shipped study; asyncsim show "
            f"{shlex.quote(str(folder))} draws its page"
        )
    with reading_results(folder):
        return finished.draw(folder)


def draw_page(folder: Path, out: Path) -> Path:
    """Draw the page of a study to a file elsewhere; leave the study's folder unchanged."""
    study_of(folder)
    with reading_results(folder), collecting(unfinished(folder), files=False) as drawn:
        finished.draw(folder)
        return write_page(folder, drawn, out)
