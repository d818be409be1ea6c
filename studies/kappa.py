"""How energetic GEM's proxy may be: loss and median pi for several kappa, up to divergence.

Figure 8 of the GEM paper, which matches the energy of momentum SGD times kappa (its eq. 27): better
with a larger kappa up to 3, diverging at 4. The paper names no number of workers; its curve of
kappa = 1 is nearest to its curve of 5 workers. At paper scale about 100,000 commits of MNIST's
network: ten minutes on two cores.
"""

import functools
from dataclasses import dataclass

from asyncsim.base.errors import InputError
from asyncsim.study.config import MethodLike
from asyncsim.study.finished import report
from asyncsim.study.sweep import Result, SweepConfig, run_cells, sweep


@dataclass(frozen=True)
class Config(SweepConfig):
    """Options of the kappa study."""

    workers: tuple[int, ...] = (5,)
    """Workers of the clusters, one after the other."""
    methods: tuple[MethodLike, ...] = ("gem(kappa=[1, 1.5, 2, 2.5, 3, 3.5, 4])",)
    """Methods to compare: gem, with the energies of its proxy relative to momentum SGD, or your own
    as FILE.py:FUNCTION (see the README)."""


SCALES = {
    "small": Config(),
    "paper": Config(scale="paper", problem="mnist", steps=938, evaluate_every=469),
}


def run(config: Config) -> Result:
    """Run the study; see `asyncsim.study.sweep.run_cells`."""
    config.check()
    with config.computing_device():
        cells = sweep(config, [{"workers": n} for n in config.workers])
        if not any("kappa" in method.hyperparameters for method in cells[0].methods):
            names = ", ".join(method.name for method in cells[0].methods)
            raise InputError(
                f"methods = {names}: no kappa, which varies here; give gem, or your own"
            )
        conclude = functools.partial(report, by=("workers", "method"))
        return run_cells("kappa", config, cells, conclude)
