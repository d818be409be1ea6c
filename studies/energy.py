"""How far the workers' joint energy is from momentum SGD's, with one worker to a hundred.

At every commit, the energy of the central variable's movement since the worker's last read,
relative to the energy of the proxy, momentum SGD (the GEM paper's equations 11 and 15): for the
whole vector and by weight, over time. Stable means at most the proxy's energy (equation 12),
compliant means equal (equation 13). GEM scales an update by pi, clipped to [0, 5],
so it can neither revert the movement caused by the other workers nor add more than five updates;
the shares of the weights where the clip binds, and where the update opposes that movement, measure
how often. At paper scale 188 workers' epochs of MNIST, twice, for each seed: about an hour on two
cores.
"""

from typing import Any

from asyncsim.base.errors import InputError
from asyncsim.replays.run import Run
from asyncsim.study.cell import Cell, CellRun
from asyncsim.study.columns import Column
from asyncsim.study.comparison import Comparison, final_loss
from asyncsim.study.outcome import FINAL_SHARE, energy_ratios
from asyncsim.study.sweep import ComparisonConfig, preset
from asyncsim.traces.trace import Trace

#: Most points of the ratio over time.
_POINTS = 100
#: Worker steps until a momentum of 0.9 is near its final size, and all workers have read a new
#: version.
_BEGINNING = 10
#: Explanation of the columns.
_LEGEND = f"""central over proxy energy
of the whole vector: median of the first {_BEGINNING} worker steps, highest later median of a \
stretch, median of the last tenth
of the weights, over the last tenth: quartiles; shares where pi is clipped at 0 and at its upper \
end, and where update and drift have opposite signs"""
_SHARES = ("clipped_low", "clipped_high", "opposite_sign")


Config, SCALES = preset(
    small={
        "workers": (1, 2, 5, 10, 20, 50, 100),
        "methods": ("gem", "downpour"),
        "steps": 100,
        "seeds": 2,
        "diagnose_energy": True,
        "evaluate_every": None,
    },
    paper={
        "problem": "mnist",
        "steps": 938,
        "seeds": 3,
        "evaluate_every": 469,
        "diagnose_every": 10,
    },
)


def diagnosed(config: ComparisonConfig, cells: list[Cell]) -> list[Cell]:
    """Raise InputError without the records that this study needs."""
    if config.diagnose_every == 0 or not config.diagnose_energy:
        raise InputError(
            f"diagnose_every = {config.diagnose_every}, diagnose_energy = "
            f"{config.diagnose_energy}: this study needs their records; leave both out"
        )
    return cells


def compliance(job: CellRun, run: Run, trace: Trace) -> dict[str, Any]:
    """Return the energy ratio at the beginning of a run and at its highest later, and of the
    weights in its last tenth.

    ``weight_ratio_05`` to ``weight_ratio_95``: quantiles of the ratio over the weights whose proxy
    has energy. Shares of all weights: where GEM's pi is clipped at 0 (``clipped_low``) and at
    ``pi_max`` (``clipped_high``), both NaN for other methods, and where the update opposes the
    previous movement (``opposite_sign``). Medians over the commits.
    """
    step = run.commits["commit"] / trace.workers
    ratio, later = energy_ratios(run.commits), step >= _BEGINNING
    width = max(1.0, run.config["commits"] / trace.workers / _POINTS)
    # The single tensor of a vector has no name either.
    totals = run.diagnostics[run.diagnostics["tensor"] == ""].drop_duplicates(
        ["commit", "quantity", "quantile"]
    )
    late = totals[totals["commit"] >= (1 - FINAL_SHARE) * totals["commit"].max()]
    of_weights = late[late["quantity"] == "weight_energy_ratio"].groupby("quantile")["value"]
    shares = late.groupby("quantity")["value"].median().reindex(_SHARES)
    return {
        "first_steps": ratio[~later].median(),
        "highest": ratio[later].groupby(step[later] // width).median().max(),
        **of_weights.median().rename(lambda quantile: f"weight_ratio_{100 * quantile:02.0f}"),
        **shares,
    }


run = Comparison(
    "energy",
    measure=final_loss,
    columns=(
        *("first_steps", "highest", Column("energy_ratio", "last")),
        *(Column(f"weight_ratio_{quantile}", f"{quantile} %") for quantile in (25, 50, 75)),
        *_SHARES,
    ),
    of_run=compliance,
    prepare=diagnosed,
    further=lambda table: ({}, [_LEGEND]),
).run
