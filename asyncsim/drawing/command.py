"""What the command line of figures does: draws those of a folder of results, and tells which files it wrote."""

import sys
from collections.abc import Callable, Collection, Iterable
from pathlib import Path

from asyncsim.errors import InputError
from asyncsim.study import results, shipped
from asyncsim.study.finished import figures


def draw_folder(folder: Path, papers: Collection[str]) -> list[Path]:
    """Draw the figures of a study again, into the folder of its results.

    Parameters
    ----------
    folder : Path
    papers : collection of str
        The modules in ``figures/`` that have figures of several studies; others are of the study of their name.

    Returns
    -------
    list of Path
        The files that were written.

    Raises
    ------
    InputError
        There are no results, or no figures of that study, or a file is missing or cannot be written.
    """
    study = results.config_of(folder).get("study")
    if study is None:
        raise InputError(
            f"folder = {str(folder)!r}: no results of a study (no {results.CONFIG} that names one); give its folder"
        )
    if study not in papers and (shipped("figures") / f"{study}.py").exists():
        return figures(study).draw(folder)
    written = [path for paper in papers for path in figures(paper).draw_study(study, folder)]
    if not written:
        raise InputError(f"folder = {str(folder)!r}: there are no figures of the study {study}")
    return written


def told(draw: Callable[[], Iterable[Path]]) -> int:
    """Print the paths of what is drawn, or why it cannot be; return the exit code (2 for bad input)."""
    try:
        for path in draw():
            print(path)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0
