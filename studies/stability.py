"""With how many workers, and at which learning rates, each method still learns.

Figure 1 of the GEM paper: minibatch loss against worker steps for several numbers of workers, methods side by side on
one trace per seed. At paper scale the grid is about 1.1 million commits of MNIST's network: one to two hours on two
cores.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from asyncsim.errors import InputError, require_positive
from asyncsim.sweep import Result, SweepConfig, report, run_cells, sweep

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Config(SweepConfig):
    """Options of the stability study."""

    learning_rate: tuple[float, ...] = (0.05,)
    """Step sizes of a gradient, one after the other, for all methods."""

    def check(self) -> None:
        """Check what can be checked before anything heavy is imported.

        Raises
        ------
        InputError
            An option that cannot be used.
        """
        super().check()
        if not self.learning_rate:
            raise InputError("learning_rate: none given; give one number or more")
        for rate in self.learning_rate:
            require_positive("learning_rate", rate)


SCALES = {
    "small": Config(),
    "paper": Config(
        scale="paper",
        problem="mnist",
        learning_rate=(0.05, 0.01),
        steps=938,
        evaluate_every=469,
    ),
}


def run(config: Config) -> Result:
    """Run the study.

    Raises
    ------
    InputError
        An option that cannot be used, or a folder or disk that cannot be written.
    KeyboardInterrupt
        Passed on; tables and figures of the runs that were finished are there then.
    """
    config.check()
    with config.computing_device():
        grid = [{"learning_rate": rate, "workers": n} for rate in config.learning_rate for n in config.workers]
        return run_cells("stability", config, sweep(config, grid), _conclude)


def _conclude(folder: Path, summary: "pd.DataFrame") -> None:
    report("stability", folder, summary, ("learning_rate", "method", "workers"))
