"""The figures of a paper: a table of them, the studies that they are drawn from, and the command line that draws them.

A paper is a module or a package in ``figures/`` that says which figures it has; everything else is here::

    PAPER = Paper("gem", "Figures of ...", STUDIES, FIGURES)
    draw, draw_study, main = PAPER.draw, PAPER.draw_study, PAPER.main
"""

import argparse
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.figure import Figure

from asyncsim.base.calls import split
from asyncsim.base.console import note, tell
from asyncsim.base.errors import InputError, require_choice
from asyncsim.drawing import look
from asyncsim.study.finished import Finished, read

#: A column that every summary has.
_NEEDED = "seed"


class Study(NamedTuple):
    """Where results come from."""

    name: str  #: of the study
    cost: str  #: of its run, on two cores
    options: str = "--scale small|paper"  #: of its command, if the results are not those of ``--scale``


class Task(NamedTuple):
    """The task that a paper's numbers were measured on; they are drawn beside results of the same task only."""

    problem: str  #: its name
    network: str  #: as its config names it; a problem that names none may have this one

    def is_that_of(self, results: Finished) -> bool:
        """Return whether results are of this task; True if unknown."""
        return self.is_posed_by(results.config.get("problem"), results.config.get("problem_config", {}))

    def is_posed_by(self, problem: object, config: Mapping[str, Any]) -> bool:
        """Return whether a problem of that name and config is this one."""
        return problem == self.problem and config.get("network", self.network) == self.network


class Drawing(NamedTuple):
    """A figure."""

    folder: str  #: of the results; see `Paper`
    shows: str
    draw: Callable[[Finished], Figure]  #: from the results to the figure
    #: From the results to rows that say how far they are from the published ones; none if they are of another task.
    measure: Callable[[Finished], Sequence[Any]] | None = None


@dataclass(frozen=True)
class Paper:
    """The figures of a paper."""

    name: str  #: of the module in ``figures/``, and of the folder of figures inside that of the results
    about: str  #: one line
    studies: Mapping[str, Study]  #: by the folders of their results
    figures: Mapping[str, Drawing]  #: by their names
    #: From what the figures measured, and the folder of the figures, to the file that it wrote.
    keep: Callable[[Sequence[Any], Path], Path] | None = None

    def draw(self, results: Path, out: Path | None = None, only: Iterable[str] = ()) -> list[Path]:
        """Draw figures from a folder of results; those without results are named with what makes them.

        ``results``: holds a folder for each study. ``out``: where to draw; by default one with the paper's name in the
        folder of results. ``only``: names of figures; by default all. Returned are a PNG and a PDF of each figure,
        and the table of what was measured if there is one.
        """
        names = [require_choice("only", name, self.figures) for name in only] or list(self.figures)
        out = results / self.name if out is None else out
        folders = {folder: results / folder for folder in self.studies}
        written, missing = self._draw(names, folders, out, lambda error, name: f"{error}; {self.remedy(name)}")
        if not written:
            raise InputError("\n".join(["nothing could be drawn", *missing]))
        for why in missing:
            tell(f"missing: {why}")
        return written

    def draw_study(self, study: str, folder: Path) -> list[Path]:
        """Draw the figures of a study into the folder of its results, as far as they have what these need.

        ``study``: one of the paper's by its folder; of others nothing is drawn. Returns what `draw` does.
        """
        names = [name for name, drawing in self.figures.items() if drawing.folder == study]
        # Without a remedy: what is not there was not asked for, or failed with a message.
        written, missing = self._draw(names, {study: Path(folder)}, Path(folder), lambda error, _: str(error))
        for why in missing:
            note(f"not drawn: {why}")
        return written

    def remedy(self, figure: str) -> str:
        """Return how to make the results of a figure, and what that costs."""
        folder = self.figures[figure].folder
        study = self.studies[folder]
        command = f"python -m asyncsim.study {study.name} {study.options} --out RESULTS/{folder}"
        return f"make them with: {command} ({study.cost})"

    def main(self, arguments: Sequence[str] | None = None) -> int:
        """Draw figures from the command line; return the exit code (2 for bad input, or if nothing could be drawn)."""
        width = max(map(len, self.figures))
        listed = [f"  {name:<{width}}  {one.shows} (results/{one.folder})" for name, one in self.figures.items()]
        parser = argparse.ArgumentParser(
            prog=f"asyncsim figures {self.name}",
            description=self.about,
            epilog="\n".join(["figures:", *listed]),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        parser.add_argument("--only", help="names of figures with commas between them; all otherwise", metavar="NAMES")
        parser.add_argument("--results", type=Path, default=Path("results"), help="holds a folder for each study")
        parser.add_argument("--out", type=Path, help=f"where to draw; {self.name} in the folder of results otherwise")
        given = parser.parse_args(arguments)
        return report(lambda: self.draw(given.results, given.out, split(given.only or "")))

    def _draw(
        self, names: Sequence[str], folders: dict[str, Path], out: Path, tell: Callable[[InputError, str], str]
    ) -> tuple[list[Path], list[str]]:
        """Draw figures; return the files written, and a message for each figure that could not be drawn.

        ``tell`` goes from the error and the figure's name to the text; figures with one text share a line.
        """
        written: list[Path] = []
        missing: dict[str, list[str]] = {}
        measured: list[Any] = []
        with look.style():
            for name in names:
                drawing = self.figures[name]
                try:
                    results = _read(folders[drawing.folder], self.studies[drawing.folder].name)
                    figure = drawing.draw(results)
                    found = drawing.measure(results) if drawing.measure else []
                except InputError as error:
                    missing.setdefault(tell(error, name), []).append(name)
                    continue
                written += look.save(figure, out / name)
                measured += found
        if measured and self.keep is not None:
            written.append(self.keep(measured, out))
        return written, [f"{', '.join(figures)}: {why}" for why, figures in missing.items()]


def drawer(
    study: str, columns: Sequence[str], **figures: Callable[[Finished], Figure | None]
) -> Callable[[str | os.PathLike], list[Path]]:
    """Return the function that draws the figures of a study into the folder of its results.

    It returns a PNG and a PDF of each. ``columns``: that the study's summary must have. ``figures``: by their names,
    from the results to the figure; one that is None is not drawn.
    """

    def draw(folder: str | os.PathLike) -> list[Path]:
        finished = read(folder, study, columns)
        with look.style():
            written: list[Path] = []
            for name, make in figures.items():
                if (figure := make(finished)) is not None:
                    written += look.save(figure, finished.folder / name)
            return written

    return draw


def _read(folder: Path, study: str) -> Finished:
    """Read results; a missing folder gives a short message, as many figures may need it."""
    if not folder.is_dir():
        raise InputError(f"no results in {folder}")
    results = read(folder, study)
    if _NEEDED not in results.summary:
        raise InputError(f"folder = {str(folder)!r}: its summary.csv lacks {_NEEDED}; copy it again")
    return results


def report(draw: Callable[[], Iterable[Path]]) -> int:
    """Print the paths of what is drawn, or why it cannot be; return the exit code (2 for bad input)."""
    try:
        for path in draw():
            print(path)
    except InputError as error:
        tell(f"error: {error}")
        return 2
    return 0
