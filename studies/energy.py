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

import pandas as pd

from asyncsim.base.errors import InputError
from asyncsim.replays.run import Run
from asyncsim.study.cell import Cell
from asyncsim.study.columns import titled
from asyncsim.study.comparison import Comparison, Further, Results, final_loss
from asyncsim.study.outcome import FINAL_SHARE, energy_ratios
from asyncsim.study.sweep import ComparisonConfig, preset

TABLE = "compliance.csv"
#: Most points of a curve over time.
_POINTS = 100
#: Worker steps until a momentum of 0.9 is near its final size, and all workers have read a new
#: version.
_BEGINNING = 10
#: Explanation above the table.
_LEGEND = f"""central over proxy energy, means over the seeds
of the whole vector: median of the first {_BEGINNING} worker steps, highest later median of a \
stretch, median of the last tenth; stable: share of the commits with at most the proxy's energy
of the weights: quartiles over the last tenth; shares of the weights where pi is clipped at 0 and \
at its upper end, and where update and drift have opposite signs
counted: commits before which the central variable has moved since the worker's read; a diverged \
run until its end, except for its last median"""
_QUARTILES = [f"weight_ratio_{quantile}" for quantile in (25, 50, 75)]
_SHARES = ["clipped_low", "clipped_high", "opposite_sign"]


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


def compliance(run: Run) -> pd.DataFrame:
    """Tabulate, for each diagnosed commit, its energies and the distribution of their ratio over
    the weights.

    ``energy_ratio``: of the whole vector. ``weight_ratio_05`` to ``weight_ratio_95``: quantiles
    over the weights whose proxy has energy. Shares of all weights: where GEM's pi is clipped at 0
    (``clipped_low``) and at ``pi_max`` (``clipped_high``), both NaN for other methods, and where
    the update opposes the previous movement (``opposite_sign``).
    """
    # The single tensor of a vector has no name either.
    totals = run.diagnostics[run.diagnostics["tensor"] == ""].drop_duplicates(
        ["commit", "quantity", "quantile"]
    )
    ratios = totals[totals["quantity"] == "weight_energy_ratio"].pivot(
        index="commit", columns="quantile", values="value"
    )
    shares = totals[totals["quantity"].isin(_SHARES)].pivot(
        index="commit", columns="quantity", values="value"
    )
    table = energies(run).set_index("commit")
    table = table.join(
        ratios.rename(columns=lambda quantile: f"weight_ratio_{100 * quantile:02.0f}"), how="inner"
    )
    return table.join(shares.reindex(columns=_SHARES)).reset_index()


def energies(run: Run) -> pd.DataFrame:
    """Compute the energies of every commit, and their ratio."""
    table = run.commits[["commit", "commit_time", "worker", "central_energy", "proxy_energy"]]
    return table.assign(
        worker_step=table["commit"] / run.config["workers"],
        energy_ratio=table["central_energy"] / table["proxy_energy"],
    )


def over_time(run: Run) -> pd.DataFrame:
    """Compute medians of the energies' ratio over stretches of the run.

    The ratio is `asyncsim.study.outcome.energy_ratios`, NaN without any movement of the central
    variable. ``stable``: share of the commits with at most the proxy's energy (equation 12).
    ``worker_step``: middle of the stretch.
    """
    table = energies(run)
    width = max(1.0, run.config["commits"] / run.config["workers"] / _POINTS)
    stretch = (table["worker_step"] // width + 0.5) * width
    # A commit without movement is stable, but must not lower the median ratio.
    table = table.assign(stable=table["energy_ratio"] <= 1, energy_ratio=energy_ratios(table))
    groups = table.groupby(stretch)
    return groups.agg({"energy_ratio": "median", "stable": "mean"}).reset_index()


def report(summary: pd.DataFrame, weights: pd.DataFrame, curves: pd.DataFrame) -> pd.DataFrame:
    """Return the printed table from the summary, the compliance table and the curves."""
    by = ["method", "workers"]
    is_begun = curves["worker_step"] >= _BEGINNING
    highest = curves[is_begun].groupby([*by, "seed"])["energy_ratio"].max()
    rows = [
        summary.groupby(by, sort=False)["energy_ratio"].mean().rename("last"),
        curves[~is_begun].groupby(by)["energy_ratio"].median().rename("first_steps"),
        highest.groupby(by).mean().rename("highest"),
        curves.groupby(by)["stable"].mean(),
        _last(weights[weights["central_energy"] > 0]).groupby(by)[_QUARTILES].mean(),
        _last(weights).groupby(by)[_SHARES].mean(),
    ]
    table = rows[0].to_frame().join(rows[1:]).reset_index()
    return titled(table, [*by, "first_steps", "highest", "last", "stable", *_QUARTILES, *_SHARES])


def _last(weights: pd.DataFrame) -> pd.DataFrame:
    """Select the last tenth of each run; at least its last diagnosed commit."""
    ends = weights.groupby(["method", "workers", "seed"])["worker_step"].transform("max")
    return weights[weights["worker_step"] >= (1 - FINAL_SHARE) * ends]


def by_workers(table: Results) -> Further:
    """Tabulate the energies of the diagnosed commits; print them by workers."""
    weights, curves = table.finished.each_run(lambda run: [compliance(run), over_time(run)])
    return {TABLE: weights}, [_LEGEND, report(table.finished.summary, weights, curves)]


run = Comparison(
    "energy",
    measure=final_loss,
    columns=("energy_ratio",),
    prepare=diagnosed,
    further=by_workers,
).run
