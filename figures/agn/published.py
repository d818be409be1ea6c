"""The numbers that Hermans' thesis prints, as a table.

``published.csv`` holds the grid of workers and windows (49 cells, from the LaTeX of
JoeriHermans/master-thesis on GitHub, rounded to seconds), the temporal efficiencies, and the values
for DOWNPOUR, DynSGD and staleness in figures and captions; each number with its origin. Accuracies
are shares. Training accuracies are measured on workers'
minibatches: 97.66 %, a frequent value, is 125 of 128 examples.
"""

import functools
from pathlib import Path

import pandas as pd

from asyncsim.drawing.paper import PaperTask

#: Name of the source in figures.
SOURCE = "Hermans 2017, thesis"
#: The thesis' task.
TASK = PaperTask("mnist", network="mlp")


def grid(quantity: str, method: str) -> pd.Series:
    """Return the published values of a quantity by workers and window; empty if there are none."""
    table = _table()
    rows = table[(table["quantity"] == quantity) & (table["method"] == method)]
    return rows.set_index(["workers", "window"])["value"]


def modes() -> pd.Series:
    """Return the published modes of the staleness by workers."""
    table = _table()
    return table[table["quantity"] == "staleness_mode"].set_index("workers")["value"]


@functools.cache
def _table() -> pd.DataFrame:
    return pd.read_csv(
        Path(__file__).with_name("published.csv"), dtype={"window": "Int64"}, keep_default_na=False
    )
