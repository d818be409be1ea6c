"""How energetic GEM's proxy may be: loss and median pi for several kappa, up to where it diverges.

Figure 8 of the GEM paper, which matches the energy of momentum SGD times kappa (its eq. 27) with 10 workers: better
with a larger kappa up to 3, diverging at 4. At paper scale about 200,000 commits of MNIST's network: twenty minutes on
two cores.
"""

import functools
from dataclasses import dataclass
from typing import ClassVar

from asyncsim.errors import InputError
from asyncsim.study.config import MethodLike
from asyncsim.study.finished import report
from asyncsim.study.sweep import Result, SweepConfig, run_cells, sweep


@dataclass(frozen=True)
class Config(SweepConfig):
    """Options of the kappa study."""

    varied: ClassVar = ("workers", "kappa")

    workers: tuple[int, ...] = (10,)
    """Workers of the clusters, one after the other."""
    # Several values here, of which each cell has one.
    kappa: tuple[float, ...] = (1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0)  # type: ignore[assignment]
    """Energies of the proxy relative to momentum SGD, one after the other (gem)."""
    methods: tuple[MethodLike, ...] = ("gem",)
    """Methods to compare; kappa is GEM's. Your own as FILE.py:FUNCTION (see the README)."""


SCALES = {
    "small": Config(),
    "paper": Config(scale="paper", problem="mnist", steps=938, evaluate_every=469),
}


def run(config: Config) -> Result:
    """Run the study; see `asyncsim.study.sweep.run_cells`.

    Raises
    ------
    InputError
        No method has a kappa.
    """
    config.check()
    with config.computing_device():
        grid = [{"workers": n, "kappa": kappa} for n in config.workers for kappa in config.kappa]
        cells = sweep(config, grid)
        if not any("kappa" in method.hyperparameters for method in cells[0].methods):
            names = ", ".join(method.name for method in cells[0].methods)
            raise InputError(f"methods = {names}: no kappa, which varies here; give gem, or your own")
        conclude = functools.partial(report, "kappa", by=("workers", "method", "kappa"))
        return run_cells("kappa", config, cells, conclude)
