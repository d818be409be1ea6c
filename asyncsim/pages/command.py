"""The command ``asyncsim figures``: draws the figures of a paper, or of a folder of results."""

import os
import shlex
from collections.abc import Sequence
from pathlib import Path

from asyncsim.base.console import Parser, tell_error
from asyncsim.base.errors import InputError, choices_like, reading_results, shown
from asyncsim.drawing.look import appearance, collecting
from asyncsim.drawing.paper import report
from asyncsim.pages.page import write_page
from asyncsim.study import finished, shipped
from asyncsim.study.finished import PAPERS, figures, study_of
from asyncsim.study.results import unfinished

_USAGE = """usage: asyncsim figures PAPER [options]  draw the figures of a paper, of several studies
       asyncsim figures FOLDER           redraw the figures and the page of one study into its
                                         folder; if the folder has a paper's name, write ./FOLDER

option of both:
  --width INCHES   width of every figure, from 1 to 20

papers:"""


def main(arguments: Sequence[str]) -> int:
    """Draw the figures of a paper or of a folder of results; return the exit code, 2 if bad."""
    name, *options = arguments or ["--help"]
    if name in ("-h", "--help"):
        print("\n".join([_USAGE, *(f"  {paper:<14}  {about}" for paper, about in PAPERS.items())]))
        return 0
    if name not in PAPERS and not os.path.isdir(name):
        tell_error(
            f"{shown(name)}: neither a folder of results nor a paper; {choices_like(name, PAPERS)}"
        )
        return 2
    parser = Parser(prog="asyncsim figures", add_help=False, allow_abbrev=False)
    parser.add_argument("--width", type=float)
    try:
        chosen, rest = parser.parse_known_args(options)
        with appearance(chosen.width):
            if name in PAPERS:
                code = figures(name).main(rest)
            elif rest:
                raise InputError(
                    f"{rest[0]!r}: no option for the figures of a folder; leave it out"
                )
            else:
                code = report(lambda: draw_folder(Path(name)))
        return code
    except InputError as error:
        tell_error(error, "asyncsim figures --help explains the options")
        return 2


def draw_folder(folder: Path) -> list[Path]:
    """Redraw the figures and the page of a study into its folder; return the written files."""
    _, study = study_of(folder)
    if study not in {path.stem for path in shipped("studies").glob("*.py")}:
        raise InputError(
            f"folder = {str(folder)!r}: holds {study!r}, which is no shipped study; asyncsim show "
            f"{shlex.quote(str(folder))} draws its page"
        )
    with reading_results(folder), collecting(unfinished(folder)) as drawn:
        return [*finished.draw(folder), write_page(folder, drawn)]


def draw_page(folder: Path, out: Path) -> Path:
    """Draw the page of a study to a file elsewhere; leave the study's folder unchanged."""
    study_of(folder)
    with reading_results(folder), collecting(unfinished(folder), files=False) as drawn:
        finished.draw(folder)
        return write_page(folder, drawn, out)
