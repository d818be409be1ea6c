"""The momentum that asynchrony brings about, measured against 1 - 1/n."""

from typing import Any

import numpy as np
from matplotlib.figure import Figure

from asyncsim import look
from asyncsim.sweep import Finished

from .panels import PANEL, finish, own_table, problem

_COLUMNS = ["workers", "momentum_measured", "standard_error", "momentum_theory"]
#: Error bars, in standard errors.
_SIGMAS = 2


def implicit(results: Finished) -> Figure:
    """Draw measured and theoretical momentum against the number of workers, and how far apart they are."""
    table = own_table(results, "momentum.csv", _COLUMNS).sort_values("workers")
    figure, (above, below) = look.new_figure(*PANEL, 1, 2, sharex=True, gridspec_kw={"height_ratios": [2.2, 1]})
    theory = table.drop_duplicates("workers")
    above.plot(
        theory["workers"], theory["momentum_theory"], color=look.BLACK, linewidth=1, label="theory: 1 \u2212 1/n"
    )
    bars: dict[str, Any] = {"fmt": "o", "color": look.BLUE, "markersize": 3, "capsize": 2, "linewidth": 0.9}
    error = _SIGMAS * table["standard_error"]
    above.errorbar(
        table["workers"], table["momentum_measured"], error, label=f"measured, \u00b1{_SIGMAS} standard errors", **bars
    )
    below.errorbar(table["workers"], table["momentum_measured"] - table["momentum_theory"], error, **bars)
    below.axhline(0, color=look.BLACK, linewidth=0.8)
    above.set_ylabel("momentum")
    below.set_ylabel("difference")
    below.set_xscale("log")
    counts = np.sort(table["workers"].unique())
    below.set_xticks(counts, [str(n) for n in counts])
    below.minorticks_off()
    below.set_xlabel("workers n")
    finish(figure, above, f"implicit momentum of asynchrony; {problem(results)}", columns=2)
    return figure
