"""How far the workers' joint energy is from momentum SGD's, with one worker to a hundred.

At every commit, the energy of the central variable's movement since the worker's last read,
relative to the energy of the proxy, momentum SGD (the GEM paper's equations 11 and 15): for the
whole vector, by weight, by tensor and by worker, over time. Stable means at most the proxy's energy
(equation 12), compliant means equal (equation 13). GEM scales an update by pi, clipped to [0, 5],
so it can neither revert the movement caused by the other workers nor add more than five updates;
the shares of the weights where the clip binds, and where the update opposes that movement, measure
how often. At paper scale 188 workers' epochs of MNIST, twice, for each seed: about an hour on two
cores.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from asyncsim.base.console import counted, number_text
from asyncsim.base.errors import InputError
from asyncsim.replays.run import Run
from asyncsim.study.columns import titled
from asyncsim.study.config import MethodLike
from asyncsim.study.finished import present, read
from asyncsim.study.outcome import FINAL_SHARE, energy_ratios
from asyncsim.study.sweep import Result, SweepConfig, run_cells, sweep

TABLES = ("compliance.csv", "energies.csv", "tensors.csv", "workers.csv")
#: Most points of a curve over time, and of a worker's curve.
_POINTS, _PARTS = 100, 10
#: Worker steps until a momentum of 0.9 is near its final size, and all workers have read a new
#: version.
_BEGINNING = 10
#: Explanation above the table.
_LEGEND = f"""central over proxy energy, means over the seeds
of the whole vector: median of the first {_BEGINNING} worker steps, highest later median of a \
stretch, median of the last tenth
of the weights: quartiles over the last tenth; shares of the weights where pi is clipped at 0 and \
at its upper end, and where update and drift have opposite signs
counted: commits before which the central variable has moved since the worker's read; a diverged \
run until its end, except for its loss and its last median"""
_QUARTILES = [f"weight_ratio_{quantile}" for quantile in (25, 50, 75)]
_SHARES = ["clipped_low", "clipped_high", "opposite_sign"]


@dataclass(frozen=True)
class Config(SweepConfig):
    """Options of the energy study."""

    workers: tuple[int, ...] = (1, 2, 5, 10, 20, 50, 100)
    """Workers of the clusters, one after the other."""
    methods: tuple[MethodLike, ...] = ("gem", "downpour")
    """Methods to compare: any of the package, or your own as FILE.py:FUNCTION (see the README)."""
    steps: int = 100
    """Commits per worker, on average; a trace has steps * workers commits."""
    seeds: int = 2
    """Number of seeds: 0, 1, ... One trace per seed, shared by the methods."""
    diagnose_energy: bool = True
    """Record also the energies of each tensor, and the distribution of their ratio over the
    weights.
    """

    def check(self) -> None:
        """Check the options; see `StudyOptions.check`."""
        super().check()
        if self.diagnose_every == 0 or not self.diagnose_energy:
            raise InputError(
                f"diagnose_every = {self.diagnose_every}, diagnose_energy = "
                f"{self.diagnose_energy}: this study needs "
                "their records; leave both out"
            )


SCALES = {
    "small": Config(),
    "paper": Config(
        scale="paper", problem="mnist", steps=938, seeds=3, evaluate_every=469, diagnose_every=10
    ),
}


def run(config: Config) -> Result:
    """Run the study; see `asyncsim.study.sweep.run_cells`."""
    config.check()
    with config.computing_device():
        return run_cells(
            "energy", config, sweep(config, [{"workers": n} for n in config.workers]), _conclude
        )


def compliance(run: Run) -> pd.DataFrame:
    """Tabulate, for each diagnosed commit, its energies and the distribution of their ratio over
    the weights.

    ``energy_ratio``: of the whole vector. ``weight_ratio_05`` to ``weight_ratio_95``: quantiles
    over the weights whose proxy has energy. ``potential_energy``: minus the learning rate times the
    minibatch loss. Shares of all weights: where GEM's pi is clipped at 0 (``clipped_low``) and at
    ``pi_max`` (``clipped_high``), both NaN for other methods, and where the update opposes the
    previous movement (``opposite_sign``).
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
    table = run.commits[
        ["commit", "commit_time", "worker", "central_energy", "proxy_energy"]
    ].copy()
    table.insert(2, "worker_step", table["commit"] / run.config["workers"])
    rate = run.config["hyperparameters"].get("learning_rate")
    table["potential_energy"] = (
        -rate * run.commits["loss"] if isinstance(rate, int | float) else np.nan
    )
    table["energy_ratio"] = _ratio(table)
    return table


def over_time(run: Run, points: int, by: tuple[str, ...] = ()) -> pd.DataFrame:
    """Compute medians of the energies and of their ratio over stretches of the run, also ``by``
    worker.

    The ratio is `asyncsim.study.outcome.energy_ratios`, NaN without any movement of the central
    variable. ``stable``: share of the commits with at most the proxy's energy (equation 12).
    ``worker_step``: middle of the stretch.
    """
    table = energies(run)
    steps = run.config["commits"] / run.config["workers"]
    width = max(1.0, steps / points)
    table["worker_step"] = (table["worker_step"] // width + 0.5) * width
    # A commit without movement is stable, but must not lower the median ratio.
    table["stable"] = table["energy_ratio"] <= 1
    table["energy_ratio"] = energy_ratios(table)
    groups = table.groupby([*by, "worker_step"])
    of_energies = [
        "commit_time",
        "central_energy",
        "proxy_energy",
        "potential_energy",
        "energy_ratio",
    ]
    return groups[of_energies].median().join(groups["stable"].mean()).reset_index()


def tensor_energies(run: Run) -> pd.DataFrame:
    """Return the energies of each tensor at each diagnosed commit."""
    quantities = ["central_energy", "proxy_energy"]
    energies = run.diagnostics[run.diagnostics["quantity"].isin(quantities)]
    table = energies.pivot(index=["commit", "tensor"], columns="quantity", values="value")[
        quantities
    ].reset_index()
    table.insert(1, "worker_step", table["commit"] / run.config["workers"])
    table["energy_ratio"] = _ratio(table)
    return table


def report(summary: pd.DataFrame, table: pd.DataFrame, curves: pd.DataFrame) -> pd.DataFrame:
    """Format the printed table from the summary, the compliance table and the curves."""
    rows = []
    for (method, workers), runs in summary.groupby(["method", "workers"], sort=False):
        weights, curve = (
            selection[(selection["method"] == method) & (selection["workers"] == workers)]
            for selection in (table, curves)
        )
        last, moved = _last(weights), _last(weights[weights["central_energy"] > 0])
        later = curve[curve["worker_step"] >= _BEGINNING]
        rows.append(
            {
                "method": method,
                "workers": workers,
                "seeds": len(runs),
                "diverged": (runs["status"] == "diverged").sum(),
                "final_loss": runs["final_loss"].mean(),
                "first_steps": curve[curve["worker_step"] < _BEGINNING]["energy_ratio"].median(),
                "highest": later.groupby("seed")["energy_ratio"].max().mean(),
                "last": runs["energy_ratio"].mean(),
                **moved[_QUARTILES].mean(),
                **last[_SHARES].mean(),
            }
        )
    return titled(pd.DataFrame(rows))


def _verdict(summary: pd.DataFrame) -> str:
    """Say how far the energy of the central variable ends from the proxy's, by method."""
    clauses = []
    for method, runs in summary.groupby("method", sort=False):
        ratios = runs.groupby("workers")["energy_ratio"].mean().dropna()
        if len(ratios):
            ends = " to ".join(dict.fromkeys(map(number_text, (ratios.min(), ratios.max()))))
            workers = counted(int(ratios.idxmax()), "worker")
            clauses.append(f"{method} ends at {ends} times the proxy's energy, most at {workers}")
    return "; ".join(clauses) or "all runs diverged"


def _last(table: pd.DataFrame) -> pd.DataFrame:
    """Select the last tenth of each seed's run; at least its last diagnosed commit."""
    ends = table.groupby("seed")["worker_step"].transform("max")
    return table[table["worker_step"] >= (1 - FINAL_SHARE) * ends]


def _conclude(folder: Path, summary: pd.DataFrame) -> None:
    finished = read(folder, "energy")
    tables = finished.each_run(_tables)
    present(
        folder,
        dict(zip(TABLES, tables, strict=True)),
        _LEGEND,
        report(finished.summary, *tables[:2]),
        verdict=_verdict(finished.summary),
    )


def _tables(run: Run) -> list[pd.DataFrame]:
    """Return a run's rows of each table."""
    return [
        compliance(run),
        over_time(run, _POINTS),
        tensor_energies(run),
        over_time(run, _PARTS, ("worker",)),
    ]


def _ratio(table: pd.DataFrame) -> pd.Series:
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        return table["central_energy"] / table["proxy_energy"]
