"""With how many workers, and at which learning rates, each method still learns.

Figure 1 of the GEM paper: minibatch loss against worker steps for several numbers of workers,
methods side by side on one trace per seed. Then the limits, by bisection: the largest stable number
of workers up to 100 at each learning rate, and the largest stable learning rate with the fewest and
the most workers, between a sixteenth and 32 times the lowest rate of the study.

Stable means: in every seed the run finishes, and its minibatch loss, averaged over the last tenth
of the commits, is below half of its mean over the workers' first steps. A rate too low to learn
within the steps thus counts as unstable. Numbers of workers are tried in steps of a fifth, rates in
steps of a factor of 1.4; a limit lies between the two values in limits.csv. Bisection assumes that
stability persists with fewer workers and at lower rates; limit_runs.csv has all of its runs.

At paper scale the grid is about 1.1 million commits of MNIST's network, one to two hours on two
cores; the limits, which --limits adds there, take three to six more.
"""

import bisect
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from asyncsim.base.calls import write
from asyncsim.base.console import counted, note, tell
from asyncsim.replays.replay import replay
from asyncsim.replays.run import Run
from asyncsim.simulation.simulate import simulate
from asyncsim.study.cell import Cell
from asyncsim.study.columns import titled
from asyncsim.study.comparison import Comparison, Further, Results, final_loss
from asyncsim.study.jobs import Job, Tables, measurement
from asyncsim.study.outcome import late_loss
from asyncsim.study.sweep import ComparisonConfig, preset, sweep

#: Files with the limits, and with the runs behind them.
TABLES = ("limits.csv", "limit_runs.csv")
#: Columns of the printed table.
_PRINTED = ("method", "question", "at", "largest_stable", "smallest_unstable")
_LEGEND = """no smallest unstable value: stable up to the largest value tried
no largest stable value: unstable at the smallest value tried, or the search failed (limits.csv)"""
#: Numbers of workers to try, each a fifth or one more than the one before.
_COUNTS = sorted({max(1, round(100 * 2 ** (-power / 4))) for power in range(28)})
#: Learning rates to try, relative to the lowest of the study.
_RATES = [2 ** (power / 2) for power in range(-8, 11)]
#: The final minibatch loss of a stable run is below this part of its first.
_STABLE = 0.5


@dataclass(frozen=True)
class Options(ComparisonConfig):
    """Options of the stability study."""

    limits: bool = True
    """Search the largest stable number of workers and learning rate; --no-limits skips this."""


Config, SCALES = preset(
    Options,
    small={
        "workers": (5, 10, 20, 30),
        "learning_rate": (0.05,),
        "steps": 100,
        "seeds": 2,
        "evaluate_every": None,
    },
    paper={
        "problem": "mnist",
        "learning_rate": (0.05, 0.01),
        "steps": 938,
        "seeds": 3,
        "evaluate_every": 469,
        "limits": False,
    },
)


class Search(NamedTuple):
    """A bisection for the largest stable number of workers, or learning rate, of a method."""

    question: str  #: the bisected quantity: ``workers`` or ``learning_rate``
    at: float  #: value of the fixed one
    cells: tuple[Cell, ...]  #: with only this method, by ascending values of the quantity

    @property
    def labels(self) -> dict[str, Any]:
        """The columns that name the search."""
        method = self.cells[0].methods[0].name
        return {"method": method, "question": self.question, "at": self.at}

    def job(self) -> Job:
        """Return the job of the search."""
        fixed = "workers" if self.question == "learning_rate" else "learning rate"
        words = f"{self.question.replace('_', ' ')} with {fixed} {write(self.at)}"
        seeds = counted(self.cells[0].config.seeds, "seed")
        return measurement(
            f"limits of {self.labels['method']}, {words}, {seeds}",
            limits_of,
            self,
            labels=self.labels,
            errors=TABLES[0],
        )


def searches(config: Options, cells: list[Cell]) -> list[Job]:
    """Return the bisections of each method, with limits for ``limits.csv`` and runs for
    ``limit_runs.csv``; a failed one has an error instead of its limits.
    """
    if not config.limits:
        return []
    workers, at_rates = (
        sorted(config.varied.get(name, (getattr(config, name),)))
        for name in ("workers", "learning_rate")
    )
    lines = [
        *(("workers", rate, [(n, rate) for n in _COUNTS]) for rate in at_rates),
        *(
            ("learning_rate", n, [(n, at_rates[0] * ratio) for ratio in _RATES])
            for n in dict.fromkeys((workers[0], workers[-1]))
        ),
    ]
    # Swept together, so that cells of one learning rate share compiled programs.
    points = list(dict.fromkeys(point for *_, line in lines for point in line))
    tried = sweep(config, [{"learning_rate": rate, "workers": n} for n, rate in points])
    by_point = dict(zip(points, tried, strict=True))

    def alone(point: Any, place: int) -> Cell:
        cell = by_point[point]
        return cell._replace(methods=[cell.methods[place]])

    return [
        Search(question, at, tuple(alone(point, place) for point in line)).job()
        for question, at, line in lines
        for place in range(len(cells[0].methods))
    ]


def limits_of(search: Search) -> Tables:
    """Search the limits; return their row and a row for each run, by table."""
    cells, tried = search.cells, []

    def is_unstable(cell: Cell) -> bool:
        # In any seed; the first unstable seed ends the trial.
        for seed in range(cell.config.seeds):
            tried.append(_run_trial(cell, seed))
            if not tried[-1]["stable"]:
                return True
        return False

    place = len(cells)
    if is_unstable(cells[-1]):
        place = bisect.bisect_left(cells[:-1], True, key=is_unstable)
    values = [cell.values[search.question] for cell in cells]
    limits = {
        **search.labels,
        "largest_stable": values[place - 1] if place else None,
        # If nothing is stable, the values may also be too low to learn within the steps.
        "smallest_unstable": values[place] if 0 < place < len(values) else None,
        "seeds": cells[0].config.seeds,
    }
    return dict(zip(TABLES, ([limits], tried), strict=True))


def _run_trial(cell: Cell, seed: int) -> dict[str, Any]:
    config, (method,) = cell.config, cell.methods
    cluster, commits = cell.cluster_of(method)
    trace = simulate(cluster, commits, seed)
    with config.computing_device():
        run = replay(
            trace,
            method,
            cell.problem,
            seed,
            precision=config.precision,
            evaluate_every=len(trace),  # only the minibatch losses are used
        )
    first, last = first_and_last(run, len(trace))
    stable = run.status == "finished" and last < _STABLE * first
    row = {"method": method.name, **cell.values, "seed": seed, "status": run.status}
    cell_text = f"workers {cluster.workers}, learning rate {config.learning_rate:.3g}"
    outcome = f"{method.name}, {cell_text}, seed {seed}: {'stable' if stable else 'not stable'}"
    tell(f"[limits] {outcome}, {run.status}, loss {first:.3g} to {last:.3g}")
    return {**row, "first_loss": first, "final_loss": last, "stable": stable}


def too_slow(tried: pd.DataFrame) -> list[str]:
    """List the methods that are unstable with fewer workers and a lower rate than at some stable
    point.

    They may be too slow to learn within the steps, which misleads bisection.
    """
    methods = []
    for method, runs in tried.groupby("method", sort=False):
        stable = runs.groupby(["workers", "learning_rate"])["stable"].all()
        stable_points, failed = (
            np.array(stable[stable == is_stable].index.to_list()) for is_stable in (True, False)
        )
        if len(stable_points) and len(failed) and (failed[:, None] <= stable_points).all(-1).any():
            methods.append(str(method))
    return methods


def limits(table: Results) -> Further:
    """Print the limits of stability."""
    if not (table.finished.folder / TABLES[0]).exists():
        return {}, []
    # Without any limit, as all searches failed, the columns are absent.
    rows = table.finished.table(TABLES[0]).reindex(columns=list(_PRINTED))
    if slow := too_slow(table.finished.table(TABLES[1])):
        note(
            f"{', '.join(slow)}: stable, but not with fewer workers or at a lower rate; the limits "
            "assume one change from stable to unstable: if runs are too short to learn, give more "
            "steps"
        )
    for name in _PRINTED[2:]:  # rates and numbers of workers
        rows[name] = ["-" if np.isnan(value) else f"{value:.3g}" for value in rows[name]]
    return {}, ["limits of stability", titled(rows, _PRINTED), _LEGEND]


def first_and_last(run: Run, commits: int) -> tuple[float, float]:
    """Return the mean minibatch loss over the workers' first steps, and over the last tenth of a
    trace.
    """
    first = run.commits.loc[run.commits["worker_step"] == 0, "loss"].mean()
    return float(first), late_loss(run.commits, commits)


run = Comparison("stability", measure=final_loss, further=limits, measurements=searches).run
