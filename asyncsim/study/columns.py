"""Columns of the tables of studies, each declared once: its name in files, its title in printed
tables, its axis.

Pages show the words of the axis where the mouse is over a column's name.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from asyncsim.base.console import in_texts


class Column(NamedTuple):
    """A column of tables."""

    name: str  #: in files
    title: str = ""  #: in printed tables; by default the name in words
    axis: str = ""  #: of a figure, with the unit; by default the title
    of: str = (
        ""  #: the column of the whole that this is a part of: both are printed as one, ``2 of 3``
    )


#: Printed for an infinite time, or number of gradients, until a target.
NOT_REACHED = "not reached"
#: Columns of a printed table, some by their names alone.
Columns = list[str | Column]
#: The columns that several studies have. Others have their names as titles.
COLUMNS = {
    column.name: column
    for column in (
        Column("learning_rate", "rate", "learning rate"),
        Column("reached", of="seeds"),
        Column("diverged", of="seeds"),
        Column("time_to_target", "time (s)", "simulated time to the target (s)"),
        Column("gradients_to_target", "gradients", "gradients to the target"),
        Column("rounds_to_target", "rounds"),
        Column("first_touch", "first touch (s)"),
        Column("simulated_seconds", "simulated s"),
        Column("final_loss", "minibatch loss"),
        Column("train_loss", "training loss"),
        Column("train_accuracy", "training accuracy"),
        Column("throughput", "commits/s"),
        Column("trace.throughput", "commits/s"),
        Column("staleness_mean", "staleness", "mean staleness (versions)"),
        Column("staleness_q99", "99 % quantile", "99 % quantile of the staleness (versions)"),
        Column("spectral_gap", "gap", "spectral gap"),
        Column("consensus_distance", axis="mean squared distance from the mean"),
        Column("service", "service (s)", "service time (s)"),
        Column("cv", "CV", "CV of the compute time"),
        Column("momentum_measured", "momentum"),
        Column("momentum_theory", "theory"),
        Column("step_measured", "step x n"),
        Column("step_theory", "in theory"),
        Column("assumptions_hold", "assumed"),
        Column("byzantine_weight", "their weight"),
        Column("per_second_min", "minimum"),
        Column("per_second_max", "maximum"),
        Column("within_bar", of="recordings"),
    )
}


def as_column(column: str | Column) -> Column:
    """Return a column by its name, with its title and the words along its axis."""
    declared = COLUMNS.get(column, Column(column)) if isinstance(column, str) else column
    title = declared.title or declared.name.replace("_", " ")
    return declared._replace(title=title, axis=declared.axis or title)


def axis_of(column: str | Column) -> str:
    """Return the words along the axis of a figure that shows a column."""
    return as_column(column).axis


def with_titles(table: pd.DataFrame, columns: Iterable[str | Column] | None = None) -> pd.DataFrame:
    """Return some columns of a table with their printed titles; absent columns are skipped.

    By default all columns except totals, which are printed beside their parts.
    """
    titled = {}
    if columns is None:
        wholes = {as_column(name).of for name in table}
        columns = [name for name in table if name not in wholes - {""}]
    for column in map(as_column, columns):
        if column.name in table:
            values = table[column.name]
            if column.of and column.of in table:
                values = [
                    f"{part} of {total}"
                    for part, total in zip(values, table[column.of], strict=True)
                ]
            elif is_until_target(column.name) and pd.api.types.is_float_dtype(values):
                values = values.astype(object).mask(np.isinf(values), NOT_REACHED)
            titled[column.title] = values
    return pd.DataFrame(titled, table.index)


def setting_text(name: str, value: Any) -> str:
    """Return an option and its value in words; a ``name`` stands alone, and data that are alike
    have an infinite ``split``.
    """
    if name == "name":
        return str(value)
    return f"{name.replace('_', ' ')} {'none' if value in (None, np.inf) else value}"


def is_until_target(name: str) -> bool:
    """Return whether a column is infinite where a target was not reached."""
    return name.endswith("_to_target") or name == "first_touch"


def titled(
    table: pd.DataFrame, columns: Iterable[str | Column] | None = None, digits: int = 3
) -> pd.DataFrame:
    """Return some columns of a table as texts with their printed titles; ``digits``: significant
    ones of floats.
    """
    return in_texts(with_titles(table, columns), digits)
