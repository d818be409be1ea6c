"""The figures of a paper: a table of them, the studies that they are drawn from, and the command
line that draws them.

A paper is a module or a package in ``figures/`` that lists its figures; this module does the rest::

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
from asyncsim.base.console import note, tell, tell_error
from asyncsim.base.errors import InputError, require_choice
from asyncsim.drawing import look
from asyncsim.study.finished import Finished, read

#: A column that every summary has.
_REQUIRED = "seed"


class Study(NamedTuple):
    """The study that produces a folder of results."""

    name: str  #: of the study
    cost: str  #: of its run, on two cores
    options: str = "--scale small|paper"  #: of its command


class PaperTask(NamedTuple):
    """The task of a paper's published numbers; they are drawn beside results of the same task
    only.
    """

    problem: str  #: its name
    network: str  #: as its config names it; a problem that names none may have this one

    def is_that_of(self, results: Finished) -> bool:
        """Return whether results belong to this task; True if unknown."""
        return self.is_posed_by(
            results.config.get("problem"), results.config.get("problem_config", {})
        )

    def is_posed_by(self, problem: object, config: Mapping[str, Any]) -> bool:
        """Return whether a problem's name and config match this task."""
        return problem == self.problem and config.get("network", self.network) == self.network


class Drawing(NamedTuple):
    """A figure of a paper: its results, its description and the functions that draw and measure
    it.
    """

    folder: str  #: of the results; see `Paper`
    shows: str
    draw: Callable[[Finished], Figure | None]  #: None: the results have nothing to show
    #: Compute rows of deviations from the published results; no rows if the task is another.
    measure: Callable[[Finished], Sequence[Any]] | None = None


@dataclass(frozen=True)
class Paper:
    """The figures of a paper, the studies behind them and their command line."""

    name: str  #: of the module in ``figures/``, and of the folder of figures inside the results
    about: str  #: one line
    studies: Mapping[str, Study]  #: by the folders of their results
    figures: Mapping[str, Drawing]  #: by their names
    #: Write the measured rows into the folder of the figures; return the file.
    keep: Callable[[Sequence[Any], Path], Path] | None = None

    def draw(self, results: Path, out: Path | None = None, only: Iterable[str] = ()) -> list[Path]:
        """Draw figures from a folder of results; report the commands that produce missing results.

        ``results``: holds a folder for each study. ``out``: folder of the figures; by default named
        after the paper, in ``results``. ``only``: names of figures; by default all. Returns the PNG
        and the PDF of each figure, and the table of deviations if there is one.
        """
        names = [require_choice("only", name, self.figures) for name in only] or list(self.figures)
        out = results / self.name if out is None else out
        folders = {folder: results / folder for folder in self.studies}
        paths, missing = self._draw(
            names, folders, out, lambda error, name: f"{error}; {self.remedy(name)}"
        )
        if not paths:
            raise InputError("\n".join(["nothing could be drawn", *missing]))
        for why in missing:
            tell(f"missing: {why}")
        return paths

    def draw_study(self, study: str, folder: Path) -> list[Path]:
        """Draw the figures of a study into the folder of its results, as far as its columns
        suffice.

        ``study``: folder of one of the paper's studies; for any other, nothing is drawn. Returns
        paths.
        """
        names = [name for name, drawing in self.figures.items() if drawing.folder == study]
        # Without a remedy: missing results were not requested, or failed with a message.
        paths, missing = self._draw(
            names, {study: Path(folder)}, Path(folder), lambda error, _: str(error)
        )
        for why in missing:
            note(f"not drawn: {why}")
        return paths

    def remedy(self, figure: str) -> str:
        """Return the command that produces the results of a figure, and its cost."""
        folder = self.figures[figure].folder
        study = self.studies[folder]
        command = f"asyncsim study {study.name} {study.options} --out RESULTS/{folder}"
        return f"make them with: {command} ({study.cost})"

    def main(self, arguments: Sequence[str] | None = None) -> int:
        """Draw figures from the command line; return the exit code (2 for bad input, or if nothing
        could be drawn).
        """
        width = max(map(len, self.figures))
        listed = [
            f"  {name:<{width}}  {drawing.shows} (results/{drawing.folder})"
            for name, drawing in self.figures.items()
        ]
        parser = argparse.ArgumentParser(
            prog=f"asyncsim figures {self.name}",
            description=self.about,
            epilog="\n".join(["figures:", *listed]),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        parser.add_argument(
            "--only",
            help="names of figures with commas between them; all otherwise",
            metavar="NAMES",
        )
        parser.add_argument(
            "--results", type=Path, default=Path("results"), help="holds a folder for each study"
        )
        parser.add_argument(
            "--out",
            type=Path,
            help=f"where to draw; {self.name} in the folder of results otherwise",
        )
        options = parser.parse_args(arguments)
        return report(lambda: self.draw(options.results, options.out, split(options.only or "")))

    def _draw(
        self,
        names: Sequence[str],
        folders: dict[str, Path],
        out: Path,
        message: Callable[[InputError, str], str],
    ) -> tuple[list[Path], list[str]]:
        """Draw figures; return the paths, and a message for each figure that could not be drawn.

        ``message`` formats an error and the figure's name; figures with one text share a line.
        """
        paths: list[Path] = []
        missing: dict[str, list[str]] = {}
        measured: list[Any] = []
        with look.style():
            for name in names:
                drawing = self.figures[name]
                try:
                    results = _read(folders[drawing.folder], self.studies[drawing.folder].name)
                    figure = drawing.draw(results)
                    rows = drawing.measure(results) if drawing.measure else []
                except InputError as error:
                    missing.setdefault(message(error, name), []).append(name)
                    continue
                if figure is not None:
                    paths += look.save(figure, out / name, drawing.draw)
                measured += rows
        if measured and self.keep is not None:
            paths.append(self.keep(measured, out))
        return paths, [f"{', '.join(figures)}: {why}" for why, figures in missing.items()]


def drawer(
    study: str, columns: Sequence[str], **figures: Callable[[Finished], Figure | None]
) -> Callable[[str | os.PathLike], list[Path]]:
    """Return the function that draws the figures of a study into the folder of its results.

    It returns the PNG and the PDF of each. ``columns``: required columns of the study's summary.
    ``figures``: functions by name; one that returns None draws nothing.
    """

    def draw(folder: str | os.PathLike) -> list[Path]:
        finished = read(folder, study, columns)
        with look.style():
            paths: list[Path] = []
            for name, make in figures.items():
                if (figure := make(finished)) is not None:
                    paths += look.save(figure, finished.folder / name, make)
            return paths

    return draw


def _read(folder: Path, study: str) -> Finished:
    """Read results; a missing folder gives a short message, because several figures may need it."""
    if not folder.is_dir():
        raise InputError(f"no results in {folder}")
    results = read(folder, study)
    if _REQUIRED not in results.summary:
        raise InputError(
            f"folder = {str(folder)!r}: its summary.csv lacks {_REQUIRED}; copy it again"
        )
    return results


def report(draw: Callable[[], Iterable[Path]]) -> int:
    """Draw figures and print their paths, or the error; return the exit code (2 for bad input)."""
    try:
        for path in draw():
            print(path)
    except InputError as error:
        tell_error(error)
        return 2
    return 0
