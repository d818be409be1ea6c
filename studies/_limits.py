"""The largest number of workers, and the largest learning rate, with which a method still learns: by bisection."""

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from asyncsim import results
from asyncsim.comparison import FINAL_SHARE, meet, same_gradients
from asyncsim.simulation import simulate
from asyncsim.wave_replay import replay

if TYPE_CHECKING:
    from asyncsim.comparison import Cell
    from asyncsim.methods import Method
    from asyncsim.run import Run


def bisect(values: Sequence[Any], holds: Callable[[Any], bool]) -> tuple[Any, Any]:
    """Return the last of some ascending values up to which something holds, and the first at which it does not.

    Correct if there is only one change, from holding to not holding; None stands for a value beyond the ends. ``holds``
    is called about ``log2(len(values) + 1)`` times.
    """
    held, failed = -1, len(values)
    while failed - held > 1:
        middle = (held + failed) // 2
        if holds(values[middle]):
            held = middle
        else:
            failed = middle
    return values[held] if held >= 0 else None, values[failed] if failed < len(values) else None


class Limits:
    """The limits of a study's methods, and the runs that they follow from.

    Parameters
    ----------
    cells : mapping
        From workers and learning rate to the cell, for all that may be tried.
    fraction : float
        A run is stable if its final minibatch loss is below this fraction of its first.
    """

    def __init__(self, cells: "Mapping[tuple[int, float], Cell]", fraction: float):
        self._cells, self._fraction = cells, fraction
        self._found: list[dict[str, Any]] = []
        self._tried: list[dict[str, Any]] = []

    def of_workers(self, counts: Sequence[int], rate: float, folder: Path) -> None:
        """Find and write the largest stable number of workers of each method at a learning rate."""
        for place, method in enumerate(self._cells[counts[0], rate].methods):
            cells = [self._cells[n, rate] for n in counts]
            limits = bisect(counts, functools.partial(self._stable, dict(zip(counts, cells, strict=True)), place))
            self._keep(method.name, "workers", rate, limits, folder)

    def of_rates(self, rates: Sequence[float], workers: int, folder: Path) -> None:
        """Find and write the largest stable learning rate of each method with a number of workers."""
        for place, method in enumerate(self._cells[workers, rates[0]].methods):
            cells = [self._cells[workers, rate] for rate in rates]
            limits = bisect(rates, functools.partial(self._stable, dict(zip(rates, cells, strict=True)), place))
            self._keep(method.name, "learning_rate", workers, limits, folder)

    def _stable(self, cells: "Mapping[Any, Cell]", place: int, value: Any) -> bool:
        """Whether a method is stable in every seed; those after the first that is not are not run."""
        cell = cells[value]
        return all(self._try(cell, cell.methods[place], seed) for seed in range(cell.config.seeds))

    def _try(self, cell: "Cell", method: "Method", seed: int) -> bool:
        config, cluster = cell.config, meet(cell.cluster, method.timing)
        trace = simulate(cluster, same_gradients(config.commits, cell.cluster, cluster), seed)
        run = replay(
            trace,
            method,
            cell.problem,
            seed,
            precision=config.precision,
            evaluate_every=len(trace),  # nothing but the losses of the minibatches is looked at
            diagnose_every=0,
            proxy_momentum=config.momentum,
        )
        first, last = first_and_last(run, len(trace))
        stable = run.status == "finished" and last < self._fraction * first
        row = {"method": method.name, **cell.values, "seed": seed, "status": run.status}
        self._tried.append({**row, "first_loss": first, "final_loss": last, "stable": stable})
        where = f"workers {cluster.workers}, learning rate {config.learning_rate:.3g}"
        told = f"{method.name}, {where}, seed {seed}: {'stable' if stable else 'not stable'}"
        print(f"[limits] {told}, {run.status}, loss {first:.3g} to {last:.3g}", file=sys.stderr, flush=True)
        return stable

    def _keep(self, method: str, question: str, at: float, limits: tuple[Any, Any], folder: Path) -> None:
        largest, smallest = limits
        row = {"method": method, "question": question, "at": at}
        seeds = next(iter(self._cells.values())).config.seeds
        self._found.append({**row, "largest_stable": largest, "smallest_unstable": smallest, "seeds": seeds})
        results.write_csv(folder / "limits.csv", pd.DataFrame(self._found))
        results.write_csv(folder / "limit_runs.csv", pd.DataFrame(self._tried))


def first_and_last(run: "Run", commits: int) -> tuple[float, float]:
    """Return the mean minibatch loss of the workers' first steps, and of the last tenth of a trace."""
    loss = run.commits["loss"]
    first = loss[run.commits["worker_step"] == 0].mean()
    return float(first), float(loss.tail(max(1, round(FINAL_SHARE * commits))).mean())
