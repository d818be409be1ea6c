"""With how many workers, and at which learning rates, each method still learns.

Figure 1 of the GEM paper: minibatch loss against worker steps for several numbers of workers, methods side by side on
one trace per seed. Then the limits, by bisection: the largest stable number of workers at each learning rate, up to
--most-workers, and the largest stable learning rate at some numbers of workers, between a sixteenth and 32 times the
lowest rate of the study.

Stable means: finished in every seed, and in each the minibatch loss, averaged over the last tenth of the commits, is
below --fraction of its mean over the workers' first steps. So a rate at which the steps are too few to learn counts as
not stable. Numbers of workers are tried in steps of a fifth, rates in steps of a factor of 1.4, and a limit lies
between the two values that limits.csv gives. Bisection takes it that what is stable stays so with fewer workers, or at
a lower rate; limit_runs.csv has every run that it made.

At paper scale the grid is about 1.1 million commits of MNIST's network, one to two hours on two cores; the limits,
which --limits adds there, take three to six more.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from asyncsim.errors import InputError, require_count, require_positive
from asyncsim.study.finished import read, report
from asyncsim.study.sweep import Result, SweepConfig, run_cells, sweep
from asyncsim.wording import note

if TYPE_CHECKING:
    import pandas as pd


#: Learning rates that are tried, relative to the lowest of the study.
_RATES = [2 ** (power / 2) for power in range(-8, 11)]
#: Options of the limits alone.
_OF_LIMITS = ("most_workers", "rates_at", "fraction")


@dataclass(frozen=True)
class Config(SweepConfig):
    """Options of the stability study."""

    varied: ClassVar = ("workers", "learning_rate")

    seeds: int = 2
    """Number of seeds: 0, 1, ... One trace per seed, shared by the methods."""
    steps: int = 100
    """Commits per worker, on average; a trace has steps * workers commits."""
    # Several values here, of which each cell has one.
    learning_rate: tuple[float, ...] = (0.05,)  # type: ignore[assignment]
    """Step sizes of a gradient, one after the other, for all methods."""
    limits: bool = True
    """Look for the largest stable number of workers and learning rate; --no-limits leaves that out."""
    most_workers: int = 100
    """The most workers that are tried for the limit."""
    rates_at: tuple[int, ...] | None = None
    """Workers with which the largest learning rate is looked for. None: the fewest and the most of workers."""
    fraction: float = 0.5
    """A run is stable if its final minibatch loss is below this fraction of its first."""

    def check(self) -> None:
        """Check the options; see `StudyOptions.check`."""
        super().check()
        require_count("most_workers", self.most_workers)
        for count in self.rates_at or ():
            require_count("rates_at", count)
        if require_positive("fraction", self.fraction) > 1:
            raise InputError(
                f"fraction = {self.fraction!r}: above one, a loss that grows would count; give at most one"
            )


SCALES = {
    "small": Config(),
    "paper": Config(
        scale="paper",
        problem="mnist",
        learning_rate=(0.05, 0.01),
        steps=938,
        seeds=3,
        evaluate_every=469,
        limits=False,
    ),
}


def run(config: Config) -> Result:
    """Run the study; see `asyncsim.study.sweep.run_cells`."""
    from asyncsim.study import limits

    config.check()
    if not config.limits:
        config.say_ignored(_OF_LIMITS, "without --limits")
    grid = [(n, rate) for rate in config.learning_rate for n in config.workers]
    rates_at = config.rates_at or tuple(sorted({min(config.workers), max(config.workers)}))
    counts = _counts(config.most_workers)
    rates = [min(config.learning_rate) * ratio for ratio in _RATES]
    tried = [(n, rate) for rate in config.learning_rate for n in counts]
    tried += [(n, rate) for n in rates_at for rate in rates]
    with config.computing_device():
        # Made together, as cells of one learning rate then share what is compiled.
        points = list(dict.fromkeys([*grid, *tried] if config.limits else grid))
        cells = dict(zip(points, sweep(config, [{"learning_rate": r, "workers": n} for n, r in points]), strict=True))
        searched = []
        if config.limits:
            searched = limits.searches(cells, counts, rates, learning_rate=config.learning_rate, workers=rates_at)
        own = [cells[point] for point in dict.fromkeys(grid)]
        return run_cells("stability", config, own, _conclude, [limits.job(one, config.fraction) for one in searched])


def _counts(most: int) -> list[int]:
    """Return the numbers of workers that are tried: from the most down, each a fifth less or one."""
    powers = range(4 * most.bit_length())
    return sorted({max(1, round(most * 2 ** (-power / 4))) for power in powers})


def _conclude(folder: Path, summary: "pd.DataFrame") -> None:
    from asyncsim.study import limits

    if (folder / limits.TABLES[0]).exists():
        finished = read(folder, "stability")
        print(f"{limits.report(finished.config['problem'], finished.table(limits.TABLES[0]))}\n")
        slow = limits.too_slow(finished.table(limits.TABLES[1]))
        if slow:
            note(
                f"{', '.join(slow)}: not stable with fewer workers, or at a lower rate, than somewhere where stable; "
                "limits take stability to end once: where runs are too short to learn, give more steps"
            )
    report("stability", folder, summary, ("learning_rate", "method", "workers"), limits.TABLES)
