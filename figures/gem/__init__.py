"""Figures of "Gradient Energy Matching" (Hermans and Louppe 2018, arXiv 1805.08469) from our own runs.

Drawn from folders of results, one for each study, with the published curves in grey where they are known::

    python -m figures gem                                   # in a clone: all that there are results for
    python -m figures gem --only 1a,3 --results results
    python -m asyncsim.figures gem                          # installed

Results of the paper's own task (MNIST) are compared with the published curves in numbers too: ``deviations.csv``.
"""

import argparse
import functools
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import pandas as pd
from matplotlib.figure import Figure

from asyncsim import look
from asyncsim.drawing import told
from asyncsim.errors import InputError, require_choice
from asyncsim.results import write_csv
from asyncsim.study_config import split_names
from asyncsim.sweep import Finished, read

from . import energy, forensics, kappa, limits, losses, momentum, pace, published, queue, tensors
from .panels import is_paper

#: The table of deviations, beside the figures.
DEVIATIONS = "deviations.csv"


class Study(NamedTuple):
    """Where results come from.

    Attributes
    ----------
    name : str
        Of the study.
    cost : str
        Of its run, on two cores.
    options : str
        Of its command, if the results are not those of ``--scale``.
    """

    name: str
    cost: str
    options: str = "--scale small|paper"


class Drawing(NamedTuple):
    """A figure.

    Attributes
    ----------
    folder : str
        Of the results; see `STUDIES`.
    shows : str
    draw : function
        From the results to the figure.
    measure : function, optional
        From results of the paper's own task to how far they are from the published ones.
    """

    folder: str
    shows: str
    draw: Callable[[Finished], Figure]
    measure: Callable[[Finished], list[published.Deviation]] | None = None

    @property
    def remedy(self) -> str:
        """How to make the results, and what that costs."""
        study = STUDIES[self.folder]
        command = f"python -m asyncsim.study {study.name} {study.options} --out RESULTS/{self.folder}"
        return f"make them with: {command} ({study.cost})"


def _minutes(small: int, paper: int) -> str:
    return f"on two cores about {small} min with small, {paper} min with paper"


#: The studies by the folders of their results.
STUDIES = {
    "stability": Study("stability", _minutes(2, 75)),
    "hundred": Study(
        "staleness",
        "on two cores about 25 min; without --problem mnist --steps 938 less than 1 min",
        "--problem mnist --workers 100 --steps 938 --methods gem",
    ),
    "speedup": Study("speedup", _minutes(1, 10)),
    "generalization": Study("generalization", _minutes(1, 30)),
    "misspecification": Study("misspecification", _minutes(1, 90)),
    "kappa": Study("kappa", _minutes(1, 15)),
    "tensors": Study("tensors", _minutes(1, 60)),
    "energy": Study("energy", _minutes(1, 60)),
    "queue": Study("queue", _minutes(1, 10)),
    "momentum": Study("momentum", _minutes(1, 5)),
    "forensics": Study("forensics", _minutes(1, 240)),
}

_of = functools.partial

#: The figures by their names: those of the paper by its numbers, then our own.
FIGURES = {
    **{
        panel: Drawing(
            "stability",
            f"loss of {look.METHOD_LOOKS[method].label} with n workers",
            _of(losses.of_workers, panel=panel),
            _of(losses.measure_of_workers, panel=panel),
        )
        for panel, method in losses.METHODS.items()
    },
    "1d": Drawing("stability", "final loss against n", losses.final, losses.measure_final),
    "2": Drawing("hundred", "loss of GEM with 100 workers over time", losses.hundred, losses.measure_hundred),
    "3": Drawing("stability", "GEM's median factor with n workers", losses.factors, losses.measure_factors),
    "4": Drawing("speedup", "loss over time, a batch divided among n workers", pace.speedup),
    "5": Drawing("generalization", "training and validation loss over data epochs", pace.generalization),
    "6a": Drawing("misspecification", "GEM and SGD at too high a rate", _of(pace.misspecified, panel="6a")),
    "6b": Drawing("misspecification", "DOWNPOUR at too high a rate", _of(pace.misspecified, panel="6b")),
    "8a": Drawing("kappa", "loss by the energy of the proxy", kappa.losses),
    "8b": Drawing("kappa", "GEM's median factor by the energy of the proxy", kappa.factors),
    "9": Drawing("tensors", "median factor of each tensor, fewer workers", _of(tensors.heat_map, place=0)),
    "10": Drawing("tensors", "median factor of each tensor, more workers", _of(tensors.heat_map, place=1)),
    "learning_rates": Drawing("stability", "figure 1a to c at each learning rate", losses.of_workers_at_all_rates),
    "misspecification": Drawing("misspecification", "final loss against the learning rate", pace.rates),
    "limits": Drawing("stability", "largest stable n and learning rate of each method", limits.limits),
    "energy": Drawing("energy", "central over proxy energy against n; where the clip binds", energy.by_workers),
    "energy_time": Drawing("energy", "energies over time, by tensor and by worker", energy.over_time),
    "queue": Drawing("queue", "first come or lowest rank first: shares, staleness, losses", queue.discipline),
    "momentum": Drawing("momentum", "implicit momentum against 1 - 1/n", momentum.implicit),
    "forensics": Drawing("forensics", "which cluster fits the published curves", forensics.fitted, forensics.measure),
}


def draw(results: Path, out: Path | None = None, only: Iterable[str] = ()) -> list[Path]:
    """Draw figures from a folder of results; those without results are named with what makes them.

    Parameters
    ----------
    results : Path
        Holds a folder for each study, as `STUDIES` has them.
    out : Path, optional
        Where to draw; by default ``gem`` in the folder of results.
    only : iterable of str, optional
        Names of figures; by default all.

    Returns
    -------
    list of Path
        A PNG and a PDF of each figure, and the table of the deviations if there are any.

    Raises
    ------
    InputError
        A figure that there is not, or nothing that could be drawn.
    """
    names = [require_choice("only", name, FIGURES) for name in only] or list(FIGURES)
    out = results / "gem" if out is None else out
    written, missing = _draw(names, {folder: results / folder for folder in STUDIES}, out)
    if not written:
        raise InputError("; ".join(["nothing could be drawn", *missing]))
    for why in missing:
        print(f"missing: {why}", file=sys.stderr)
    return written


def draw_study(study: str, folder: Path) -> list[Path]:
    """Draw the figures of a study into the folder of its results, as far as they have what these need.

    Parameters
    ----------
    study : str
        One of `STUDIES`; of others nothing is drawn.
    folder : Path

    Returns
    -------
    list of Path
        As `draw` returns them.
    """
    names = [name for name, drawing in FIGURES.items() if drawing.folder == study]
    written, missing = _draw(names, {study: Path(folder)}, Path(folder))
    for why in missing:
        print(f"note: not drawn: {why}", file=sys.stderr)
    return written


def main(arguments: Sequence[str] | None = None) -> int:
    """Draw figures from the command line; return the exit code (2 for bad input, or if nothing could be drawn)."""
    width = max(map(len, FIGURES))
    listed = [f"  {name:<{width}}  {drawing.shows} (results/{drawing.folder})" for name, drawing in FIGURES.items()]
    parser = argparse.ArgumentParser(
        prog="python -m figures gem",
        description=(__doc__ or "").partition("\n")[0],
        epilog="\n".join(["figures:", *listed]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--only", help="names of figures with commas between them; all otherwise", metavar="NAMES")
    parser.add_argument("--results", type=Path, default=Path("results"), help="holds a folder for each study")
    parser.add_argument("--out", type=Path, help="where to draw; gem in the folder of results otherwise")
    given = parser.parse_args(arguments)
    return told(lambda: draw(given.results, given.out, split_names(given.only or "")))


def _draw(names: Sequence[str], folders: dict[str, Path], out: Path) -> tuple[list[Path], list[str]]:
    """Draw figures; return what was written, and of each figure that could not be drawn why, and the remedy."""
    written: list[Path] = []
    missing: dict[str, list[str]] = {}
    deviations: list[published.Deviation] = []
    with look.style():
        for name in names:
            drawing = FIGURES[name]
            try:
                results = _read(folders[drawing.folder], STUDIES[drawing.folder].name)
                figure = drawing.draw(results)
                found = drawing.measure(results) if drawing.measure and is_paper(results) else []
            except InputError as error:
                missing.setdefault(f"{error}; {drawing.remedy}", []).append(name)
                continue
            written += look.save(figure, out / name)
            deviations += found
    if deviations:
        written.append(_keep(deviations, out / DEVIATIONS))
    return written, [f"{', '.join(figures)}: {why}" for why, figures in missing.items()]


def _read(folder: Path, study: str) -> Finished:
    """Read results; the message of a folder that is not there is made short, as many figures may lack it."""
    if not folder.is_dir():
        raise InputError(f"no results in {folder}")
    return read(folder, study)


def _keep(deviations: Sequence[published.Deviation], path: Path) -> Path:
    """Print the deviations, and put them into the table in place of those that it has of the same figures."""
    table = published.table(deviations)
    shown = table.to_string(index=False, na_rep="-", float_format="{:.4g}".format)
    print(shown)
    if path.exists():
        before = pd.read_csv(path, dtype={"figure": str})
        kept = before[~before["figure"].isin(table["figure"])]
        table = pd.concat([kept, table]).sort_values("figure", key=_place, kind="stable") if len(kept) else table
    return write_csv(path, table)


def _place(figures: pd.Series) -> pd.Series:
    """Return the places of figures in the table of them."""
    names = list(FIGURES)
    return figures.map(lambda name: names.index(name) if name in names else len(names))
