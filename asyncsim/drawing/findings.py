"""Sentences that state the finding of a figure: its caption on a page.

The caption of a figure is its label; without one it is the figure's description (see
`asyncsim.drawing.look.save`)::

    losses = summary.groupby("method")["train_loss"].agg(["mean", "min", "max"])
    figure.set_label(findings.best(losses, "training loss at the end"))
"""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import pandas as pd

from asyncsim.base.console import capital, number_text
from asyncsim.drawing.curves import Curve

#: Ratios outside of these are not written: the two values say enough.
_EQUAL_RATIO, _LARGE_RATIO = 1.05, 1000
#: Largest number of names in a list.
_NAMED = 3


def best(
    table: pd.DataFrame,
    quantity: str,
    setting: str = "",
    rising: bool = False,
    failed: Iterable[Any] = (),
) -> str:
    """State which row is the best, how far the next one is, and which one is the worst.

    Parameters
    ----------
    table : DataFrame
        Columns ``mean``, ``min`` and ``max``, over the seeds; the index has the names of the rows.
    quantity : str
        The words along its axis, with the unit in brackets.
    setting : str
        The setting, at the beginning of the sentence.
    rising : bool
        The best value is the highest, not the lowest.
    failed : iterable
        Rows with a diverged seed, which are named at the end, as are rows with an infinite mean.

    Returns
    -------
    str
        Empty if there is nothing to compare, or no row has a range, as with one seed.
    """
    if table.empty:
        return ""
    failed = list(failed)
    table = table.dropna(subset="mean")
    is_failed = table.index.isin(failed) | ~np.isfinite(table["mean"])
    rows = table[~is_failed].sort_values("mean", ascending=not rising)
    failed_names = dict.fromkeys([*failed, *table.index[is_failed]])
    if len(rows) + len(failed_names) < 2 or not (rows["max"] > rows["min"]).any():
        return ""
    clause = [f"{_listed(failed_names)} diverged in some seed"] if failed_names else []
    words, _, unit = quantity.partition(" (")
    unit = f" {unit.removesuffix(')')}" if unit else ""
    low, high = ("highest", "lowest") if rising else ("lowest", "highest")
    values = [f"{number_text(mean)}{unit}" for mean in rows["mean"]]
    text = f"the {words} is {low} for {rows.index[0]} ({values[0]})"
    if len(rows) > 1:
        text += f", then {rows.index[1]} ({values[1]}{_distance(rows.iloc[0], rows.iloc[1])})"
    if len(rows) > 2:
        text += f", and {high} for {rows.index[-1]} ({values[-1]})"
    return sentence("; ".join([f"{setting} {text}".strip(), *clause]))


def end(
    curves: Mapping[Any, Curve],
    labels: Mapping[Any, str],
    quantity: str,
    setting: str = "",
    rising: bool = False,
) -> str:
    """State which curve ends best, as `best` does; diverged ones are named at the end.

    ``curves``, ``labels``: by the same names.
    """
    ends = {}
    for name, curve in curves.items():
        if (finite := np.isfinite(curve.mean)).any():
            ends[labels[name]] = [
                values[finite][-1] for values in (curve.mean, curve.low, curve.high)
            ]
    table = pd.DataFrame.from_dict(ends, "index", columns=["mean", "min", "max"], dtype=float)
    failed = [labels[name] for name, curve in curves.items() if curve.ends]
    return best(table, f"{quantity} at the end", setting, rising, failed)


def sentence(text: str) -> str:
    """Begin a text with a capital letter and end it with a full stop."""
    return f"{capital(text)}." if text else ""


def _distance(first: pd.Series, second: pd.Series) -> str:
    """Say how many times as high the second mean is, or that the ranges of the rows overlap."""
    if first["min"] <= second["max"] and second["min"] <= first["max"]:
        return "; their ranges overlap"
    ratio = second["mean"] / first["mean"] if first["mean"] else np.inf
    return f", {number_text(ratio, 2)} times as high" if _EQUAL_RATIO < ratio < _LARGE_RATIO else ""


def _listed(names: Iterable[Any]) -> str:
    """Join names with commas and "and"; of many, name the first and count the others."""
    *rest, last = map(str, names)
    if len(rest) >= _NAMED:
        return f"{rest[0]} and {len(rest)} others"
    return f"{', '.join(rest)} and {last}" if rest else last
