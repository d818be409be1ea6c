"""The command ``asyncsim figures``: draws the figures of a paper, or of a folder of results."""

from collections.abc import Sequence
from pathlib import Path

from asyncsim.base.console import tell_error
from asyncsim.base.errors import InputError, choices_like, reading_results
from asyncsim.drawing.look import collecting
from asyncsim.drawing.paper import report
from asyncsim.pages.page import write_page
from asyncsim.study import finished
from asyncsim.study.finished import PAPERS, figures, study_of
from asyncsim.study.results import unfinished

_USAGE = """usage: asyncsim figures PAPER [options]  draw the figures of a paper, of several studies
       asyncsim figures FOLDER           redraw the figures of one study into its folder; if the
                                         folder has a paper's name, write ./FOLDER

papers:"""


def main(arguments: Sequence[str]) -> int:
    """Draw the figures of a paper or of a folder of results; return the exit code, 2 if bad."""
    name, *options = arguments or ["--help"]
    if name in ("-h", "--help"):
        print("\n".join([_USAGE, *(f"  {paper:<14}  {about}" for paper, about in PAPERS.items())]))
        return 0
    if name in PAPERS:
        return figures(name).main(options)
    if not Path(name).is_dir():
        tell_error(
            f"{name!r}: neither a folder of results nor a paper; {choices_like(name, PAPERS)}"
        )
        return 2
    if options:
        tell_error(f"{options[0]!r}: the figures of a folder have no options; leave it out")
        return 2
    return report(lambda: draw_folder(Path(name)))


def draw_folder(folder: Path) -> list[Path]:
    """Redraw the figures and the page of a study into its folder; return the written files."""
    _, study = study_of(folder)
    with reading_results(folder), collecting(unfinished(folder)) as drawn:
        paths = finished.draw(folder)
        if not paths:
            raise InputError(
                f"folder = {str(folder)!r}: there are no figures of the study {study!r}"
            )
        return [*paths, write_page(folder, drawn)]


def draw_page(folder: Path, out: Path) -> Path:
    """Draw the page of a study to a file elsewhere; leave the study's folder unchanged."""
    study_of(folder)
    with reading_results(folder), collecting(unfinished(folder), files=False) as drawn:
        finished.draw(folder)
        return write_page(folder, drawn, out)
