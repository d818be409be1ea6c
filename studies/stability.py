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

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pandas as pd

from asyncsim.base.calls import write
from asyncsim.base.console import counted, note, number_text, tell
from asyncsim.base.errors import InputError, require_count, require_positive
from asyncsim.replays.replay import replay
from asyncsim.replays.run import Run
from asyncsim.simulation.simulate import simulate
from asyncsim.study.cell import Cell
from asyncsim.study.finished import read, report
from asyncsim.study.jobs import Job, Tables, measurement
from asyncsim.study.outcome import FINAL_SHARE
from asyncsim.study.sweep import Result, SweepConfig, run_cells, sweep

#: The limits, and the runs that they follow from.
TABLES = ("limits.csv", "limit_runs.csv")
#: What stands in the printed table for a value that there is not, and what it means.
_SIGNS = {
    ">": "> x: stable up to x, the largest that was tried",
    "none": "none: not even the least that was tried is stable",
    "failed": "failed: the search ended with an error, which limits.csv has",
    "-": "-: not known, for that reason",
}
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
            searched = searches(cells, counts, rates, learning_rate=config.learning_rate, workers=rates_at)
        own = [cells[point] for point in dict.fromkeys(grid)]
        return run_cells("stability", config, own, _conclude, [job_of(one, config.fraction) for one in searched])


def _counts(most: int) -> list[int]:
    """Return the numbers of workers that are tried: from the most down, each a fifth less or one."""
    powers = range(4 * most.bit_length())
    return sorted({max(1, round(most * 2 ** (-power / 4))) for power in powers})


def _conclude(folder: Path, summary: pd.DataFrame) -> None:
    if (folder / TABLES[0]).exists():
        finished = read(folder, "stability")
        print(f"{limits_report(finished.config['problem'], finished.table(TABLES[0]))}\n")
        slow = too_slow(finished.table(TABLES[1]))
        if slow:
            note(
                f"{', '.join(slow)}: not stable with fewer workers, or at a lower rate, than somewhere where stable; "
                "limits take stability to end once: where runs are too short to learn, give more steps"
            )
    report(folder, summary, ("learning_rate", "method", "workers"))


def bisect(values: Sequence[Any], holds: Callable[[Any], bool]) -> tuple[Any, Any]:
    """Return the last of some ascending values up to which something holds, and the first at which it does not.

    Correct if there is only one change, from holding to not holding; None stands for a value beyond the ends. ``holds``
    is called once if it holds at the last value, as for a method that is stable with any number of workers, else about
    ``log2(len(values)) + 1`` times.
    """
    if holds(values[-1]):
        return values[-1], None
    held, failed = -1, len(values) - 1
    while failed - held > 1:
        middle = (held + failed) // 2
        if holds(values[middle]):
            held = middle
        else:
            failed = middle
    return values[held] if held >= 0 else None, values[failed]


class Search(NamedTuple):
    """What one bisection is to find: the largest stable number of workers, or learning rate, of a method."""

    method: str  #: Both: ``question`` is what the values are of, ``workers`` or ``learning_rate``
    question: str
    at: float  #: the other of the two
    values: tuple[Any, ...]  #: those that may be tried, ascending
    cells: "tuple[Cell, ...]"  #: one for each value, with only this method


def searches(
    cells: Mapping[tuple[int, float], Cell], counts: Sequence[int], rates: Sequence[float], **at: Sequence[Any]
) -> list[Search]:
    """Return the bisections over ``counts`` of workers ``at`` each ``learning_rate``, then those over ``rates``.

    ``cells``: from workers and learning rate to the cell, for all that may be tried. ``**at``: ``learning_rate`` and
    ``workers`` at which the other is looked for.
    """
    lines: list[tuple[str, float, Sequence[Any], list[Cell]]] = [
        *(("workers", rate, counts, [cells[n, rate] for n in counts]) for rate in at["learning_rate"]),
        *(("learning_rate", n, rates, [cells[n, rate] for rate in rates]) for n in at["workers"]),
    ]
    return [
        Search(
            method.name,
            question,
            one,
            tuple(values),
            tuple(cell._replace(methods=[cell.methods[place]]) for cell in own),
        )
        for question, one, values, own in lines
        for place, method in enumerate(own[0].methods)
    ]


def job_of(search: Search, fraction: float) -> Job:
    """Return a search as a job: its limits are for ``limits.csv``, the runs that they follow from ``limit_runs.csv``.

    A search that fails has its error in the place of its limits.
    """
    other = "workers" if search.question == "learning_rate" else "learning rate"
    seeds = counted(search.cells[0].config.seeds, "seed")
    return measurement(
        f"limits of {search.method}, {search.question.replace('_', ' ')} with {other} {search.at:.4g}",
        limits_of,
        search,
        fraction,
        place=f"parts/{search.method}-{search.question}-at-{write(search.at)}-{seeds}",
        labels=_labels(search),
        errors=TABLES[0],
        say=_found,
    )


def _labels(search: Search) -> dict[str, Any]:
    return {"method": search.method, "question": search.question, "at": search.at}


def _found(tables: Tables) -> str:
    (row,), tried = (tables[name] for name in TABLES)
    largest = row["largest_stable"]
    return f"{'nothing stable' if largest is None else f'stable up to {largest:.4g}'}, {counted(len(tried), 'run')}"


def limits_of(search: Search, fraction: float) -> dict[str, list[dict[str, Any]]]:
    """Return the row of the limits that a search finds, and one for each run that it made, by their tables.

    ``fraction``: a run is stable if its final minibatch loss is below this fraction of its first.
    """
    cells = dict(zip(search.values, search.cells, strict=True))
    tried: list[dict[str, Any]] = []

    def stable(value: Any) -> bool:
        # In every seed; those after the first that is not are not run.
        for seed in range(cells[value].config.seeds):
            tried.append(_try(cells[value], seed, fraction))
            if not tried[-1]["stable"]:
                return False
        return True

    largest, smallest = bisect(search.values, stable)
    # Nothing is stable: values may also be too low to learn in so few steps.
    smallest = None if largest is None else smallest
    seeds = search.cells[0].config.seeds
    limits = {**_labels(search), "largest_stable": largest, "smallest_unstable": smallest, "seeds": seeds}
    return dict(zip(TABLES, ([limits], tried), strict=True))


def _try(cell: Cell, seed: int, fraction: float) -> dict[str, Any]:
    config, (method,) = cell.config, cell.methods
    cluster, commits = cell.own(method)
    trace = simulate(cluster, commits, seed)
    with config.computing_device():
        run = replay(
            trace,
            method,
            cell.problem,
            seed,
            precision=config.precision,
            evaluate_every=len(trace),  # nothing but the losses of the minibatches is looked at
        )
    first, last = first_and_last(run, len(trace))
    stable = run.status == "finished" and last < fraction * first
    row = {"method": method.name, **cell.values, "seed": seed, "status": run.status}
    where = f"workers {cluster.workers}, learning rate {config.learning_rate:.3g}"
    told = f"{method.name}, {where}, seed {seed}: {'stable' if stable else 'not stable'}"
    tell(f"[limits] {told}, {run.status}, loss {first:.3g} to {last:.3g}")
    return {**row, "first_loss": first, "final_loss": last, "stable": stable}


def too_slow(tried: pd.DataFrame) -> list[str]:
    """Return the methods that are stable with more workers, or at a higher rate, than somewhere where they are not.

    There they may be too slow to learn in so many steps, and bisection, which takes stability to end once, be wrong.
    """
    found = []
    for method, runs in tried.groupby("method", sort=False):
        stable = runs.groupby(["workers", "learning_rate"])["stable"].all()
        held, failed = (np.array(stable[stable == is_stable].index.to_list()) for is_stable in (True, False))
        if len(held) and len(failed) and (failed[:, None] <= held).all(-1).any():
            found.append(str(method))
    return found


def limits_report(problem: str, table: pd.DataFrame) -> str:
    """Return ``limits.csv`` as the study prints it, with what its signs mean in a line of their own."""
    shown = pd.DataFrame([_told(row) for row in table.to_dict("records")])
    seeds = table.get("seeds", pd.Series(dtype=float)).dropna()  # a search that failed has none
    told = f", {counted(int(seeds.max()), 'seed')}" if len(seeds) else ""
    cells = [*shown["largest stable"], *shown["smallest unstable"]]
    signs = [meaning for sign, meaning in _SIGNS.items() if any(text.startswith(sign) for text in cells)]
    lines = [f"limits of stability, {problem}{told}", shown.to_string(index=False), "; ".join(signs)]
    return "\n".join(filter(None, lines))


def _told(row: Mapping[Any, Any]) -> dict[str, str]:
    """Return the texts of a row of ``limits.csv``; none of the missing values stands for another."""

    def text(value: Any) -> str:
        return f"{value:,.0f}" if row["question"] == "workers" else number_text(value)

    largest, smallest = row.get("largest_stable"), row.get("smallest_unstable")
    if pd.isna(largest):
        ends = "none" if pd.isna(row.get("error")) else "failed", "-"
    else:
        ends = text(largest), f"> {text(largest)}" if pd.isna(smallest) else text(smallest)
    question = row["question"].replace("_", " ")
    at = f"{row['at']:,.0f}" if row["question"] == "learning_rate" else f"{row['at']:g}"
    names = ("method", "question", "at", "largest stable", "smallest unstable")
    return dict(zip(names, (row["method"], question, at, *ends), strict=True))


def first_and_last(run: Run, commits: int) -> tuple[float, float]:
    """Return the mean minibatch loss of the workers' first steps, and of the last tenth of a trace."""
    loss = run.commits["loss"]
    first = loss[run.commits["worker_step"] == 0].mean()
    return float(first), float(loss.tail(max(1, round(FINAL_SHARE * commits))).mean())
