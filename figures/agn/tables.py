"""Published values and titles for the figures of the thesis."""

import pandas as pd

from asyncsim.base.console import counted
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
    """Format a title: ``parts``, the problem, the workers' local optimizer and the number of
    seeds.
    """
    summary, problem = results.summary, str(results.config.get("problem", ""))
    title_parts = [*parts, "MNIST" if problem == "mnist" else problem]
    rates = (
        summary["method.learning_rate"].dropna().unique()
        if "method.learning_rate" in summary
        else []
    )
    names = summary["method.optimizer"].dropna().unique() if "method.optimizer" in summary else []
    if len(rates) == 1 and len(names) <= 1:
        title_parts.append(
            f"{f'local steps of {names[0]}' if len(names) else 'gradient steps'}, "
            f"\u03b7\u00a0=\u00a0{rates[0]:g}"
        )
    title_parts.append(counted(int(summary["seed"].nunique()), "seed"))
    if is_thesis(results):
        title_parts.append(f"published: {published.SOURCE}")
    return "; ".join(title_parts)
