"""Published values and titles for the figures of the thesis."""

import pandas as pd

from asyncsim.drawing import paper
from asyncsim.study.finished import Finished

from . import published


def is_thesis(results: Finished) -> bool:
    """Return whether the results belong to the thesis' task, so that its numbers may be drawn
    beside them.
    """
    return published.TASK.is_that_of(results)


def published_grid(results: Finished, quantity: str, method: str) -> pd.Series:
    """Return the published values of a quantity; empty if there are none, or if our task is
    another.
    """
    values = published.grid(quantity, method)
    return values if is_thesis(results) else values.head(0)


def setting(results: Finished, *parts: str) -> str:
    """Format a title with the source of published values, if there are any."""
    source = [f"published: {published.SOURCE}"] if is_thesis(results) else []
    return paper.setting(results, *parts, *source)
