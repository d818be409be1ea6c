"""How far from the energy of one momentum SGD the workers together are, from one worker to a hundred.

At every commit, the energy of all that the central variable moved since that worker last looked, against the energy of
the proxy, momentum SGD (the GEM paper's equations 11 and 15): of the whole vector, weight by weight, of each tensor
and of each worker, over time. Stable is at most the proxy's energy (equation 12), compliant just that (equation 13).
GEM's rule scales an update by pi, clipped from 0 to 5, so it can neither take back what the others have moved nor add
more than that; the shares of the weights where the clip binds, and where the update goes against what was moved
before, say how often. At paper scale 188 workers' epochs of MNIST, twice, for each seed: about an hour on two cores.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from asyncsim.base.console import table_text
from asyncsim.base.errors import InputError
from asyncsim.replays.run import Run
from asyncsim.study.config import MethodLike
from asyncsim.study.finished import present, read
from asyncsim.study.outcome import FINAL_SHARE, energy_ratios
from asyncsim.study.sweep import Result, SweepConfig, run_cells, sweep

TABLES = ("compliance.csv", "energies.csv", "tensors.csv", "workers.csv")
#: Most points of a curve over time, and parts of a run for those of each worker.
_POINTS, _PARTS = 100, 10
#: Worker steps in which a momentum of 0.9 comes near its final size, and all workers have read something new.
_BEGINNING = 10
#: What stands above the table.
_LEGEND = f"""Central over proxy energy. Of the whole vector: the median of the first {_BEGINNING} worker steps, the
highest median of a stretch after that, the median of the last tenth. Then quartiles over the weights, and the shares of
the weights where pi is clipped at 0 and at its upper end, and where update and drift have opposite signs, all of the
last tenth. Ratios are of the commits by which the central variable had moved since the worker's read. Means over the
seeds; a run that diverged counts as far as it went, but for its loss and its last median."""
_SHARES = ("clipped_low", "clipped_high", "opposite_sign")


@dataclass(frozen=True)
class Config(SweepConfig):
    """Options of the energy study."""

    workers: tuple[int, ...] = (1, 2, 5, 10, 20, 50, 100)
    """Workers of the clusters, one after the other."""
    methods: tuple[MethodLike, ...] = ("gem", "downpour")
    """Methods to compare: any that there are, or your own as FILE.py:FUNCTION (see the README)."""
    steps: int = 100
    """Commits per worker, on average; a trace has steps * workers commits."""
    seeds: int = 2
    """Number of seeds: 0, 1, ... One trace per seed, shared by the methods."""
    diagnose_energy: bool = True
    """Record also the energies of each tensor, and the distribution of their ratio over the weights."""

    def check(self) -> None:
        """Check the options; see `StudyOptions.check`."""
        super().check()
        if self.diagnose_every == 0 or not self.diagnose_energy:
            raise InputError(
                f"diagnose_every = {self.diagnose_every}, diagnose_energy = {self.diagnose_energy}: this study is of "
                "what they record; leave them as they are"
            )


SCALES = {
    "small": Config(),
    "paper": Config(scale="paper", problem="mnist", steps=938, seeds=3, evaluate_every=469, diagnose_every=10),
}


def run(config: Config) -> Result:
    """Run the study; see `asyncsim.study.sweep.run_cells`."""
    config.check()
    with config.computing_device():
        return run_cells("energy", config, sweep(config, [{"workers": n} for n in config.workers]), _conclude)


def compliance(run: Run) -> pd.DataFrame:
    """Return a row for each diagnosed commit: its energies, and how their ratio is distributed over the weights.

    ``energy_ratio`` is that of the whole vector; ``weight_ratio_05`` to ``weight_ratio_95`` are quantiles over the
    weights whose proxy has any energy; ``potential_energy`` is minus the learning rate times the minibatch's loss. The
    shares are of all weights: where GEM's pi is clipped at 0 (``clipped_low``) and at ``pi_max`` (``clipped_high``),
    which is NaN for other methods, and where the update goes against what was moved before (``opposite_sign``).
    """
    # The one tensor of a vector has no name either.
    found = run.diagnostics[run.diagnostics["tensor"] == ""].drop_duplicates(["commit", "quantity", "quantile"])
    ratios = found[found["quantity"] == "weight_energy_ratio"].pivot(index="commit", columns="quantile", values="value")
    shares = found[found["quantity"].isin(_SHARES)].pivot(index="commit", columns="quantity", values="value")
    table = energies(run).set_index("commit")
    table = table.join(ratios.rename(columns=lambda quantile: f"weight_ratio_{100 * quantile:02.0f}"), how="inner")
    return table.join(shares.reindex(columns=list(_SHARES))).reset_index()


def energies(run: Run) -> pd.DataFrame:
    """Return the energies of every commit, and their ratio."""
    table = run.commits[["commit", "commit_time", "worker", "central_energy", "proxy_energy"]].copy()
    table.insert(2, "worker_step", table["commit"] / run.config["workers"])
    rate = run.config["hyperparameters"].get("learning_rate")
    table["potential_energy"] = -rate * run.commits["loss"] if isinstance(rate, int | float) else np.nan
    table["energy_ratio"] = _ratio(table)
    return table


def over_time(run: Run, points: int, by: tuple[str, ...] = ()) -> pd.DataFrame:
    """Return medians of the energies and of their ratio over stretches of the run; ``by`` worker, if that is given.

    The ratio is that of `asyncsim.study.outcome.energy_ratios`, NaN where the central variable moved by no commit.
    ``stable`` is the share of the commits with no more than the proxy's energy (equation 12), ``worker_step`` the
    middle of the stretch.
    """
    table = energies(run)
    steps = run.config["commits"] / run.config["workers"]
    width = max(1.0, steps / points)
    table["worker_step"] = (table["worker_step"] // width + 0.5) * width
    # A commit that moved nothing has less than the proxy's energy, but no say in how far the others exceed it.
    table["stable"] = table["energy_ratio"] <= 1
    table["energy_ratio"] = energy_ratios(table)
    groups = table.groupby([*by, "worker_step"])
    of_energies = ["commit_time", "central_energy", "proxy_energy", "potential_energy", "energy_ratio"]
    return groups[of_energies].median().join(groups["stable"].mean()).reset_index()


def tensor_energies(run: Run) -> pd.DataFrame:
    """Return the energies of each tensor at each diagnosed commit."""
    quantities = ["central_energy", "proxy_energy"]
    found = run.diagnostics[run.diagnostics["quantity"].isin(quantities)]
    table = found.pivot(index=["commit", "tensor"], columns="quantity", values="value")[quantities].reset_index()
    table.insert(1, "worker_step", table["commit"] / run.config["workers"])
    table["energy_ratio"] = _ratio(table)
    return table


def report(summary: pd.DataFrame, table: pd.DataFrame, curves: pd.DataFrame) -> str:
    """Return the table that the study prints, from the summary of the runs and the first two of its own tables."""
    rows = []
    for (method, workers), own in summary.groupby(["method", "workers"], sort=False):
        weights, curve = (
            found[(found["method"] == method) & (found["workers"] == workers)] for found in (table, curves)
        )
        last, moved = _last(weights), _last(weights[weights["central_energy"] > 0])
        begun = curve[curve["worker_step"] >= _BEGINNING]
        rows.append(
            {
                "method": method,
                "workers": workers,
                "diverged": f"{(own['status'] == 'diverged').sum()} of {len(own)}",
                "loss": own["final_loss"].mean(),
                "first steps": curve[curve["worker_step"] < _BEGINNING]["energy_ratio"].median(),
                "highest": begun.groupby("seed")["energy_ratio"].max().mean(),
                "last": own["energy_ratio"].mean(),
                **{f"{quantile} %": moved[f"weight_ratio_{quantile}"].mean() for quantile in (25, 50, 75)},
                **{name.replace("_", " "): last[name].mean() for name in _SHARES},
            }
        )
    return table_text(pd.DataFrame(rows))


def _last(table: pd.DataFrame) -> pd.DataFrame:
    """Return the last tenth of what there is of each seed's run; at least its last diagnosed commit."""
    ends = table.groupby("seed")["worker_step"].transform("max")
    return table[table["worker_step"] >= (1 - FINAL_SHARE) * ends]


def _conclude(folder: Path, summary: pd.DataFrame) -> None:
    """Write the tables, print one, and draw the figures of the runs that there are."""
    finished = read(folder, "energy")
    tables = finished.each_run(_tables)
    present(folder, dict(zip(TABLES, tables, strict=True)), _LEGEND, report(finished.summary, *tables[:2]))


def _tables(run: Run) -> list[pd.DataFrame]:
    """Return a run's part of each of the tables."""
    return [compliance(run), over_time(run, _POINTS), tensor_energies(run), over_time(run, _PARTS, ("worker",))]


def _ratio(table: pd.DataFrame) -> pd.Series:
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        return table["central_energy"] / table["proxy_energy"]
