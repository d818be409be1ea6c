"""How two finished studies differ: in their options, and in their curves on the same axes."""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from asyncsim import plots
from asyncsim.drawing import look
from asyncsim.errors import InputError
from asyncsim.files import CHECKSUM
from asyncsim.runs.index import one_line
from asyncsim.runs.opened import Opened
from asyncsim.study import results
from asyncsim.wording import over_seeds

#: Entries of a configuration that no option sets.
_NOT_OPTIONS = (results.COMMAND, results.FILES, results.INCOMPLETE, CHECKSUM)
#: Of a value that one configuration lacks, and the longest that is shown (characters).
_ABSENT, _LONGEST = "-", 60


def differences(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Return the name and both values of each entry that differs in two configurations; of tables, of their entries.

    Entries that one of them does not have are left out, and the hashes of code unless nothing else differs.
    """
    pair = [{name: value for name, value in one.items() if name not in _NOT_OPTIONS} for one in (first, second)]
    found = [dict(_flat("", one)) for one in pair]
    names = dict.fromkeys([*found[0], *found[1]])
    values = [(name, *(one.get(name, _ABSENT) for one in found)) for name in names]
    shared = [one for one in values if _ABSENT not in one[1:]]
    changed = [(name, one_line(one, _LONGEST), one_line(two, _LONGEST)) for name, one, two in shared if one != two]
    return [one for one in changed if not one[0].startswith("code ")] or changed


def draw(pair: tuple[Opened, Opened], measure: str | None = None, out: str | os.PathLike | None = None) -> list[Path]:
    """Draw a measure of all runs of two studies, means over seeds; return the paths of the PNG and the PDF.

    ``measure``: by default the first of test accuracy, test loss and training loss that all runs have. ``out``: the
    path without its ending; by default made of the two names, in the working folder.

    Raises
    ------
    InputError
        One of the studies has no runs, or the runs have no such measure.
    """
    runs, labels = [], []
    for one in pair:
        rows = one.summary.dropna(subset="run_folder") if "run_folder" in one.summary else one.summary[:0]
        if rows.empty:
            raise InputError(f"{one.name!r}: the summary in {one.folder} has no runs to draw; see its tables")
        rates = "method.learning_rate" in rows and rows["method.learning_rate"].nunique() > 1
        if rates:  # of a tuned method the best only
            loss = rows["train_loss"].where(np.isfinite(rows["train_loss"]), np.inf)
            mean = loss.groupby([rows["method"], rows["method.learning_rate"]]).transform("mean")
            rows = rows[mean == mean.groupby(rows["method"]).transform("min")]
        for row in rows.to_dict("records"):
            runs.append(one.finished.run(row["run_folder"]))
            rate = f" at {row['method.learning_rate']:g}" if rates else ""
            labels.append(f"{one.name}: {row.get('method', 'run')}{rate}")
    if measure is None:
        shared = set.intersection(*(set(run.evaluations) for run in runs))
        measure = next((name for name in ("test_accuracy", "test_loss") if name in shared), "train_loss")
    counts = [one.summary["seed"].nunique() if "seed" in one.summary else 1 for one in pair]
    title = f"{pair[0].name} against {pair[1].name}; {over_seeds(max(counts), fewest=min(counts))}"
    figure = plots.compare(runs, measure, labels=labels, title=title)
    target = f"{pair[0].name}-{pair[1].name}" if out is None else Path(out).with_suffix("")
    return look.save(figure, target)


def _flat(prefix: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the entries of nested tables, their names joined by dots."""
    if isinstance(value, Mapping) and value:
        for name, entry in value.items():
            yield from _flat(f"{prefix}.{name}" if prefix else str(name), entry)
    else:
        yield prefix, value
