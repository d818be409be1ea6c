"""The command line of the figures of one study: a folder of its results in, the paths of the figures out."""

import argparse
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from asyncsim.errors import InputError


def draw_folder(
    study: str, draw: Callable[[str | os.PathLike], Iterable[Path]], arguments: Sequence[str] | None = None
) -> int:
    """Draw the figures of the folder that the arguments name and print their paths.

    Parameters
    ----------
    study : str
        Whose results the folder holds; also the name of the module in ``figures/``.
    draw : function
        From the folder to the files that it wrote.
    arguments : sequence of str, optional
        By default those of the process.

    Returns
    -------
    int
        The exit code: 2 for bad input.
    """
    parser = argparse.ArgumentParser(
        prog=f"python -m figures.{study}", description=f"Draw the figures of a {study} study."
    )
    parser.add_argument("folder", help=f"what `python -m asyncsim.study {study}` wrote")
    return told(lambda: draw(parser.parse_args(arguments).folder))


def told(draw: Callable[[], Iterable[Path]]) -> int:
    """Print the paths of what is drawn, or why it cannot be; return the exit code (2 for bad input)."""
    try:
        for path in draw():
            print(path)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0
