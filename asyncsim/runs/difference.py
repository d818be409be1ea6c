"""Differences between two finished studies: their options, and their curves on the same axes."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from asyncsim.base.errors import InputError, require_free
from asyncsim.base.files import CHECKSUM, flat
from asyncsim.drawing import look, plots
from asyncsim.runs.known import one_line
from asyncsim.runs.opened import TaggedStudy, open
from asyncsim.study import results
from asyncsim.study.ranking import Measure, tuned

#: Entries of a configuration that no option sets.
_NOT_OPTIONS = (results.COMMAND, results.FILES, results.INCOMPLETE, results.ALL_RUNS, CHECKSUM)
#: Text for a value that one configuration lacks, and longest printed value (characters).
_ABSENT, _LONGEST = "-", 60
#: Columns of a summary with runs.
_RATE = "method.learning_rate"
_COLUMNS = ("run_folder", "method", _RATE)


def differences(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Return the name and both values of each entry that differs in two configurations.

    Entries that only one of them has are left out.
    """
    pair = [
        {name: value for name, value in config.items() if name not in _NOT_OPTIONS}
        for config in (first, second)
    ]
    entries = [dict(flat(config)) for config in pair]
    names = dict.fromkeys([*entries[0], *entries[1]])
    values = [(name, *(entry.get(name, _ABSENT) for entry in entries)) for name in names]
    shared = [row for row in values if _ABSENT not in row[1:]]
    changed = [
        (name, one_line(a, _LONGEST), one_line(b, _LONGEST)) for name, a, b in shared if a != b
    ]
    return changed


def report(first: str, second: str, measure: str | None = None, out: str | None = None) -> None:
    """Print the options that differ in two studies, and the files of their common figure."""
    pair = open(first), open(second)
    rows = differences(pair[0].config, pair[1].config)
    print(f"{first} ({pair[0].config['study']}) and {second} ({pair[1].config['study']})")
    width = max((len(name) for name, _, _ in rows), default=0)
    for name, *values in rows:
        print(f"  {name:<{width}}  {'  |  '.join(values)}")
    if not rows:
        print("  the options are the same")
    for path in draw(pair, measure, out):
        print(path)


def draw(
    pair: tuple[TaggedStudy, TaggedStudy],
    measure: str | None = None,
    out: str | os.PathLike | None = None,
) -> list[Path]:
    """Draw a measure of all runs of two studies; return the paths of the PNG and the PDF.

    Lines are means over seeds; runs that differ in another option have separate lines. A method
    with several learning rates is drawn at the rate with the least training loss.

    ``measure``: by default the first of test accuracy, test loss and training loss that all runs
    have. ``out``: the path without its ending; by default the two names, in the working folder.

    Raises
    ------
    InputError
        A figure exists already, one of the studies has no runs, or the runs have no such measure.
    """
    target = Path(f"{pair[0].name}-{pair[1].name}" if out is None else Path(out).with_suffix(""))
    for kind in ("png", "pdf"):
        require_free("out", target.with_name(f"{target.name}.{kind}"))
    runs, labels = [], []
    for study in pair:
        rows = study.summary.reindex(
            columns=list(dict.fromkeys([*study.summary, *_COLUMNS]))
        ).dropna(subset="run_folder")
        if rows.empty:
            raise InputError(
                f"{study.name!r}: the summary in {study.folder} has no runs to draw; see its tables"
            )
        rates = rows[_RATE].nunique()
        cells = [name for name in results.cell_options(study.config) if name != "learning_rate"]
        rows = tuned(rows, ["method", *cells], Measure("train_loss"), [_RATE])
        for row in rows.to_dict("records"):
            runs.append(study.finished.run(row["run_folder"]))
            rate = f" at {row[_RATE]:g}" if rates > 1 else ""
            labels.append(f"{study.name}: {row['method']}{rate}")
    if measure is None:
        shared = set.intersection(*(set(run.evaluations) for run in runs))
        measure = next(
            (name for name in ("test_accuracy", "test_loss") if name in shared), "train_loss"
        )
    states = {study.name: results.unfinished(study.folder, study.config) for study in pair}
    remarks = [f"{name} is {state}" for name, state in states.items() if state]
    title = "; ".join([f"{pair[0].name} against {pair[1].name}", *remarks])
    figure = plots.compare(runs, measure, labels=labels, title=title)
    return look.save(figure, target)
