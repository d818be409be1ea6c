"""With how many workers, and at which learning rates, each method still learns.

Figure 1 of the GEM paper: minibatch loss against worker steps for several numbers of workers,
methods side by side on one trace per seed. Then the limits, by bisection: the largest stable number
of workers at each learning rate, up to --most-workers, and the largest stable learning rate at some
numbers of workers, between a sixteenth and 32 times the lowest rate of the study.

Stable means: in every seed the run finishes, and its minibatch loss, averaged over the last tenth
of the commits, is below --fraction of its mean over the workers' first steps. A rate too low to
learn within the steps thus counts as unstable. Numbers of workers are tried in steps of a fifth,
rates in steps of a factor of 1.4; a limit lies between the two values in limits.csv. Bisection
assumes that stability persists with fewer workers and at lower rates; limit_runs.csv has all of its
runs.

At paper scale the grid is about 1.1 million commits of MNIST's network, one to two hours on two
cores; the limits, which --limits adds there, take three to six more.
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
from asyncsim.study.columns import titled
from asyncsim.study.finished import outcomes, present, read
from asyncsim.study.jobs import Job, Tables, measurement
from asyncsim.study.outcome import FINAL_SHARE, leading
from asyncsim.study.sweep import Result, SweepConfig, run_cells, sweep

#: Files with the limits, and with the runs behind them.
TABLES = ("limits.csv", "limit_runs.csv")
#: Signs for missing values in the printed table, and their explanations.
_SIGNS = {
    ">": "> x: stable up to x, the largest value tried",
    "none": "none: not even the smallest value tried is stable",
    "failed": "failed: the search ended with an error (see limits.csv)",
    "-": "-: unknown for that reason",
}
#: Learning rates to try, relative to the lowest of the study.
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
    # A sequence, unlike in the base class: each cell has one value.
    learning_rate: tuple[float, ...] = (0.05,)  # type: ignore[assignment]
    """Step sizes of a gradient, one after the other, for all methods."""
    limits: bool = True
    """Search the largest stable number of workers and learning rate; --no-limits skips this."""
    most_workers: int = 100
    """Largest number of workers to try for the limit."""
    rates_at: tuple[int, ...] | None = None
    """Numbers of workers at which the largest learning rate is searched. none: the smallest and the
    largest of --workers."""
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
                f"fraction = {self.fraction!r}: above one, a growing loss would count as stable; "
                "give at most one"
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
        # Built together, so that cells of one learning rate share compiled programs.
        points = list(dict.fromkeys([*grid, *tried] if config.limits else grid))
        cells = dict(
            zip(
                points,
                sweep(config, [{"learning_rate": r, "workers": n} for n, r in points]),
                strict=True,
            )
        )
        searched = []
        if config.limits:
            searched = searches(
                cells, counts, rates, learning_rate=config.learning_rate, workers=rates_at
            )
        grid_cells = [cells[point] for point in dict.fromkeys(grid)]
        return run_cells(
            "stability",
            config,
            grid_cells,
            _conclude,
            [job_of(search, config.fraction) for search in searched],
        )


def _counts(maximum: int) -> list[int]:
    """Return the numbers of workers to try: from ``maximum`` down, each a fifth less, or one
    less.
    """
    powers = range(4 * maximum.bit_length())
    return sorted({max(1, round(maximum * 2 ** (-power / 4))) for power in powers})


def _conclude(folder: Path, summary: pd.DataFrame) -> None:
    by = ("learning_rate", "method", "workers")
    parts: list[str | pd.DataFrame] = []
    verdict = leading(summary, by)
    if (folder / TABLES[0]).exists():
        finished = read(folder, "stability")
        limits = finished.table(TABLES[0])
        parts, verdict = limits_report(finished.config["problem"], limits), _verdict(limits)
        slow = too_slow(finished.table(TABLES[1]))
        if slow:
            note(
                f"{', '.join(slow)}: stable, but not with fewer workers or at a lower rate; the "
                "limits assume one "
                "change from stable to unstable: if runs are too short to learn, give more steps"
            )
    present(folder, {}, *parts, *outcomes(folder, summary, by), verdict=verdict)


def bisect(values: Sequence[Any], holds: Callable[[Any], bool]) -> tuple[Any, Any]:
    """Return the largest of ascending values at which ``holds`` is true, and the next one.

    Correct if ``holds`` changes once, from true to false; None stands for a value beyond the ends.
    ``holds`` is called once if it is true at the last value, otherwise about
    ``log2(len(values)) + 1`` times.
    """
    if holds(values[-1]):
        return values[-1], None
    passed, failed = -1, len(values) - 1
    while failed - passed > 1:
        middle = (passed + failed) // 2
        if holds(values[middle]):
            passed = middle
        else:
            failed = middle
    return values[passed] if passed >= 0 else None, values[failed]


class Search(NamedTuple):
    """A bisection for the largest stable number of workers, or learning rate, of a method."""

    method: str
    question: str  #: the bisected quantity: ``workers`` or ``learning_rate``
    at: float  #: value of the fixed one
    values: tuple[Any, ...]  #: to try, ascending
    cells: "tuple[Cell, ...]"  #: one for each value, with only this method


def searches(
    cells: Mapping[tuple[int, float], Cell],
    counts: Sequence[int],
    rates: Sequence[float],
    **at: Sequence[Any],
) -> list[Search]:
    """Build the bisections over ``counts`` of workers at each learning rate, then over ``rates``.

    ``cells``: by workers and learning rate, for all values to try. ``**at``: fixed values of
    ``learning_rate`` and ``workers``.
    """
    lines: list[tuple[str, float, Sequence[Any], list[Cell]]] = [
        *(
            ("workers", rate, counts, [cells[n, rate] for n in counts])
            for rate in at["learning_rate"]
        ),
        *(("learning_rate", n, rates, [cells[n, rate] for rate in rates]) for n in at["workers"]),
    ]
    return [
        Search(
            method.name,
            question,
            at_value,
            tuple(values),
            tuple(cell._replace(methods=[cell.methods[place]]) for cell in line_cells),
        )
        for question, at_value, values, line_cells in lines
        for place, method in enumerate(line_cells[0].methods)
    ]


def job_of(search: Search, fraction: float) -> Job:
    """Return a search as a job, with limits for ``limits.csv`` and runs for ``limit_runs.csv``.

    A failed search has an error instead of its limits.
    """
    fixed = "workers" if search.question == "learning_rate" else "learning rate"
    seeds = counted(search.cells[0].config.seeds, "seed")
    return measurement(
        f"limits of {search.method}, {search.question.replace('_', ' ')} with {fixed} "
        f"{write(search.at)}, {seeds}",
        limits_of,
        search,
        fraction,
        labels=_labels(search),
        errors=TABLES[0],
        say=_search_text,
    )


def _labels(search: Search) -> dict[str, Any]:
    return {"method": search.method, "question": search.question, "at": search.at}


def _search_text(tables: Tables) -> str:
    (row,), tried = (tables[name] for name in TABLES)
    largest = row["largest_stable"]
    return (
        f"{'nothing stable' if largest is None else f'stable up to {largest:.4g}'}, "
        f"{counted(len(tried), 'run')}"
    )


def limits_of(search: Search, fraction: float) -> Tables:
    """Search the limits; return their row and a row for each run, by table.

    ``fraction``: a run is stable if its final minibatch loss is below this fraction of its first.
    """
    cells = dict(zip(search.values, search.cells, strict=True))
    tried: list[dict[str, Any]] = []

    def stable(value: Any) -> bool:
        # Stable in every seed; the first unstable seed ends the trial.
        for seed in range(cells[value].config.seeds):
            tried.append(_run_trial(cells[value], seed, fraction))
            if not tried[-1]["stable"]:
                return False
        return True

    largest, smallest = bisect(search.values, stable)
    # If nothing is stable, the values may also be too low to learn within the steps.
    smallest = None if largest is None else smallest
    seeds = search.cells[0].config.seeds
    limits = {
        **_labels(search),
        "largest_stable": largest,
        "smallest_unstable": smallest,
        "seeds": seeds,
    }
    return dict(zip(TABLES, ([limits], tried), strict=True))


def _run_trial(cell: Cell, seed: int, fraction: float) -> dict[str, Any]:
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
    stable = run.status == "finished" and last < fraction * first
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


def _verdict(table: pd.DataFrame) -> str:
    """Say up to which number of workers, or learning rate, each method is stable."""
    clauses = []
    for row in table.to_dict("records"):
        text = _limit_texts(row)
        fixed = (
            f"{text['at']} workers" if row["question"] == "learning_rate" else f"rate {text['at']}"
        )
        unit = "a rate of" if row["question"] == "learning_rate" else "workers:"
        clauses.append(
            f"{row['method']} with {fixed} is stable up to {unit} {text['largest_stable']}"
        )
    return "; ".join(clauses)


def limits_report(problem: str, table: pd.DataFrame) -> list[str | pd.DataFrame]:
    """Return ``limits.csv`` for printing, with a line that explains its signs."""
    printed = pd.DataFrame([_limit_texts(row) for row in table.to_dict("records")])
    seeds = table.get("seeds", pd.Series(dtype=float)).dropna()  # missing for a failed search
    seed_text = f", {counted(int(seeds.max()), 'seed')}" if len(seeds) else ""
    cells = [*printed["largest_stable"], *printed["smallest_unstable"]]
    signs = [
        meaning for sign, meaning in _SIGNS.items() if any(text.startswith(sign) for text in cells)
    ]
    return [f"limits of stability, {problem}{seed_text}", titled(printed), "; ".join(signs)]


def _limit_texts(row: Mapping[Any, Any]) -> dict[str, str]:
    """Format a row of ``limits.csv``, with distinct signs for the kinds of missing values."""

    def text(value: Any) -> str:
        return f"{value:,.0f}" if row["question"] == "workers" else number_text(value)

    largest, smallest = row.get("largest_stable"), row.get("smallest_unstable")
    if pd.isna(largest):
        ends = "none" if pd.isna(row.get("error")) else "failed", "-"
    else:
        ends = text(largest), f"> {text(largest)}" if pd.isna(smallest) else text(smallest)
    question = row["question"].replace("_", " ")
    at = f"{row['at']:,.0f}" if row["question"] == "learning_rate" else f"{row['at']:g}"
    names = ("method", "question", "at", "largest_stable", "smallest_unstable")
    return dict(zip(names, (row["method"], question, at, *ends), strict=True))


def first_and_last(run: Run, commits: int) -> tuple[float, float]:
    """Return the mean minibatch loss over the workers' first steps, and over the last tenth of a
    trace.
    """
    loss = run.commits["loss"]
    first = loss[run.commits["worker_step"] == 0].mean()
    return float(first), float(loss.tail(max(1, round(FINAL_SHARE * commits))).mean())
