"""The figures of a paper or of a study: a table of them, and the studies that they are drawn from.

A paper is a module or a package in ``figures/`` that lists its figures; this module does the rest::

    PAPER = Paper("gem", "Figures of ...", STUDIES, FIGURES)
    draw, draw_study = PAPER.draw, PAPER.draw_study
"""

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from asyncsim.base.console import note, over_seeds, tell
from asyncsim.base.errors import InputError, require_choice
from asyncsim.drawing import layout, look
from asyncsim.study.finished import Finished, read

#: Names of problems in titles.
_PROBLEMS = {"mnist": "MNIST", "cifar10": "CIFAR-10"}


class _Choice(NamedTuple):
    """The reader's choice; see `choosing`."""

    only: Sequence[str]
    panel: str | None
    out: Path | None
    offered: list[str]  #: names of all figures
    panels: list[str]  #: of figures without the wanted one
    paths: list[Path]


_CHOICE: ContextVar[_Choice | None] = ContextVar("choice", default=None)


@contextlib.contextmanager
def choosing(
    only: Sequence[str] = (), panel: str | None = None, out: Path | None = None
) -> Iterator[None]:
    """Draw only some figures inside, of each one panel, into another folder.

    Raises
    ------
    InputError
        No figure has a name in ``only``, or such a panel (see `layout.alone`).
    """
    choice = _Choice(only, panel, out, [], [], [])
    token = _CHOICE.set(choice)
    try:
        yield
        for name in only:
            require_choice("only", name, choice.offered)
        if choice.panels and not choice.paths:
            names = ", ".join(dict.fromkeys(choice.panels))
            raise InputError(f"panel = {panel!r}: in no figure; choose from {names}")
    finally:
        _CHOICE.reset(token)


def _is_wanted(name: str) -> bool:
    """Return whether the reader wants a figure."""
    choice = _CHOICE.get()
    if choice is None:
        return True
    choice.offered.append(name)
    return not choice.only or name in choice.only


def _save(figure: Figure | None, path: Path, drawn_by: Callable[..., Any]) -> list[Path]:
    """Write a figure, if there is one, as the reader wants it; see `look.save`."""
    if figure is None:
        return []
    choice = _CHOICE.get()
    if choice is None:
        return look.save(figure, path, drawn_by)
    if choice.panel is not None and (others := layout.alone(figure, choice.panel)):
        choice.panels.extend(others)
        return []
    paths = look.save(figure, (choice.out or path.parent) / path.name, drawn_by)
    choice.paths.extend(paths)
    return paths


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
    #: Compute rows of deviations from the published results.
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
    task: PaperTask | None = None  #: of the published results, for deviations

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
        named = [name for name, drawing in self.figures.items() if drawing.folder == study]
        names = [name for name in named if _is_wanted(name)]
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

    def listing(self) -> str:
        """List the figures with the folders of their results."""
        width = max(map(len, self.figures))
        lines = [
            f"  {name:<{width}}  {drawing.shows} (results/{drawing.folder})"
            for name, drawing in self.figures.items()
        ]
        return "\n".join([self.about, *lines])

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
                    if drawing.measure and self.task and self.task.is_that_of(results):
                        measured += drawing.measure(results)
                except InputError as error:
                    missing.setdefault(message(error, name), []).append(name)
                    continue
                paths += _save(figure, out / name, drawing.draw)
        if measured and self.keep is not None:
            paths.append(self.keep(measured, out))
        return paths, [f"{', '.join(figures)}: {why}" for why, figures in missing.items()]


def setting(results: Finished, *parts: str, statistic: str = "mean and range of") -> str:
    """Format a title: ``parts``, the problem, the local optimizer and the learning rate if all runs
    have one, ``statistic`` of the seeds.
    """
    summary, name = results.summary, str(results.config.get("problem", ""))
    optimizers = summary.get("method.optimizer", pd.Series(dtype=object)).dropna().unique()
    all_rates = rate_of(summary).dropna().unique()
    words = [*parts, _PROBLEMS.get(name, name)]
    words += [f"local steps of {optimizers[0]}"] if len(optimizers) == 1 else []
    words += [f"\u03b7\u00a0=\u00a0{all_rates[0]:g}"] if len(all_rates) == 1 else []
    return "; ".join(filter(None, [*words, over_seeds(summary["seed"].nunique(), statistic)]))


def rate_of(summary: pd.DataFrame) -> pd.Series:
    """Return the learning rate of each run; NaN if it has none, or a schedule."""
    rates = summary.get("method.learning_rate", pd.Series(np.nan, summary.index))
    return pd.to_numeric(rates, errors="coerce")


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
            selected = {name: make for name, make in figures.items() if _is_wanted(name)}
            return [
                path
                for name, make in selected.items()
                for path in _save(make(finished), finished.folder / name, make)
            ]

    return draw


def _read(folder: Path, study: str) -> Finished:
    """Read results; a missing folder gives a short message, because several figures may need it."""
    if not folder.is_dir():
        raise InputError(f"no results in {folder}")
    results = read(folder, study)
    results.require(("seed",))
    return results
