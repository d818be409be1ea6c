"""How two finished studies differ: in their options, and in their curves on the same axes."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from asyncsim.base.errors import InputError, require_free
from asyncsim.base.files import CHECKSUM
from asyncsim.drawing import look, plots
from asyncsim.replays.run import flat
from asyncsim.runs.folders import one_line
from asyncsim.runs.opened import Opened, open
from asyncsim.study import results

#: Entries of a configuration that no option sets.
_NOT_OPTIONS = (results.COMMAND, results.FILES, results.INCOMPLETE, results.ALL_RUNS, CHECKSUM)
#: Of a value that one configuration lacks, and the longest that is shown (characters).
_ABSENT, _LONGEST = "-", 60


def differences(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Return the name and both values of each entry that differs in two configurations; of tables, of their entries.

    Entries that one of them does not have are left out, and the hashes of code unless nothing else differs.
    """
    pair = [{name: value for name, value in one.items() if name not in _NOT_OPTIONS} for one in (first, second)]
    entries = [dict(flat(config)) for config in pair]
    names = dict.fromkeys([*entries[0], *entries[1]])
    values = [(name, *(entry.get(name, _ABSENT) for entry in entries)) for name in names]
    shared = [one for one in values if _ABSENT not in one[1:]]
    changed = [(name, one_line(one, _LONGEST), one_line(two, _LONGEST)) for name, one, two in shared if one != two]
    return [one for one in changed if not one[0].startswith("code ")] or changed


def report(first: str, second: str, measure: str | None = None, out: str | None = None) -> None:
    """Print which options of two studies differ, and the files in which both are drawn."""
    pair = open(first), open(second)
    rows = differences(pair[0].config, pair[1].config)
    print(f"{first} ({pair[0].config['study']}) and {second} ({pair[1].config['study']})")
    width = max((len(name) for name, _, _ in rows), default=0)
    for name, value, other in rows:
        print(f"  {name:<{width}}  {value}  |  {other}")
    if not rows:
        print("  the options are the same")
    for path in draw(pair, measure, out):
        print(path)


def draw(pair: tuple[Opened, Opened], measure: str | None = None, out: str | os.PathLike | None = None) -> list[Path]:
    """Draw a measure of all runs of two studies; return the paths of the PNG and the PDF.

    Lines are means over seeds; runs that differ in anything else are lines of their own. Of a method whose learning
    rate was tuned only the best rate is drawn: the one of the study's table, else the one of the least training loss.

    ``measure``: by default the first of test accuracy, test loss and training loss that all runs have. ``out``: the
    path without its ending; by default made of the two names, in the working folder.

    Raises
    ------
    InputError
        A figure exists already, one of the studies has no runs, or the runs have no such measure.
    """
    target = Path(f"{pair[0].name}-{pair[1].name}" if out is None else Path(out).with_suffix(""))
    for kind in ("png", "pdf"):
        require_free("out", target.with_name(f"{target.name}.{kind}"))
    runs, labels = [], []
    for one in pair:
        rows = one.summary.dropna(subset="run_folder") if "run_folder" in one.summary else one.summary[:0]
        if rows.empty:
            raise InputError(f"{one.name!r}: the summary in {one.folder} has no runs to draw; see its tables")
        rates = "method.learning_rate" in rows and rows["method.learning_rate"].nunique() > 1
        if rates and (one.folder / results.RANKING).exists():
            best = one.finished.table(results.RANKING, ("method", "learning_rate"))
            best = best.rename(columns={"learning_rate": "method.learning_rate"})
            rows = rows.merge(best[["method", "method.learning_rate"]])
        elif rates:
            cells = [name for name in results.cell_options(one.config) if name in rows and name != "learning_rate"]
            by = [rows[name] for name in ("method", *cells)]
            loss = rows["train_loss"].where(np.isfinite(rows["train_loss"]), np.inf)
            mean = loss.groupby([*by, rows["method.learning_rate"]], dropna=False).transform("mean")
            rows = rows[mean == mean.groupby(by, dropna=False).transform("min")]
        for row in rows.to_dict("records"):
            runs.append(one.finished.run(row["run_folder"]))
            rate = f" at {row['method.learning_rate']:g}" if rates else ""
            labels.append(f"{one.name}: {row.get('method', 'run')}{rate}")
    if measure is None:
        shared = set.intersection(*(set(run.evaluations) for run in runs))
        measure = next((name for name in ("test_accuracy", "test_loss") if name in shared), "train_loss")
    states = {one.name: results.unfinished(one.folder, one.config) for one in pair}
    remarks = [f"{name} is {state}" for name, state in states.items() if state]
    title = "; ".join([f"{pair[0].name} against {pair[1].name}", *remarks])
    figure = plots.compare(runs, measure, labels=labels, title=title)
    return look.save(figure, target)
