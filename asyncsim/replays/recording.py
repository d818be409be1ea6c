"""The records of one run during its replay."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import pandas as pd

from asyncsim.base.files import plain
from asyncsim.methods.method import Method
from asyncsim.problems.problem import Problem
from asyncsim.replays.observing import RECORDED
from asyncsim.replays.recorders import ENERGIES, ENERGY_RATIO
from asyncsim.replays.run import Run
from asyncsim.traces.trace import Trace

#: Quantiles of each diagnostic that are recorded.
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
COLUMNS = ("commit", "quantity", "tensor", "quantile", "value")
#: Values of an evaluation by which a run diverges; a user's other values may be undefined at times.
LOSSES = ("train_loss", "test_loss")


class Recording:
    """The records of a run so far.

    Attributes
    ----------
    position : int
        Commits recorded.
    diverged_at : int or None
        The first commit with a value that is not finite; nothing is recorded after it.
    """

    def __init__(self, trace: Trace, tensors: Sequence[str], columns: Sequence[str]):
        self.trace = trace
        self.position = 0
        self.diverged_at: int | None = None
        self._tensors, self._columns = tensors, columns
        self._recorded: list[np.ndarray] = []
        self._diagnosed: list[tuple[int, str, str, float, float]] = []
        self._evaluations: list[dict[str, float]] = []

    def take(
        self, starts: np.ndarray, numbers: np.ndarray, looks: Iterable[Mapping[str, Sequence[Any]]]
    ) -> None:
        """Append a chunk's numbers, up to the first commit whose loss or step is not finite.

        ``numbers`` have shape ``[pieces, piece_size, columns]``; ``looks`` are the recorders'
        values of the first commit.
        """
        diagnostics = {name: values for look in looks for name, values in look.items()}
        self._diagnosed += diagnostic_rows(int(starts[0]), diagnostics, self._tensors)
        sizes = np.diff(starts)
        valid = np.arange(numbers.shape[1]) < sizes[:, None]
        rows = numbers[: len(sizes)][valid]
        # Recorders' numbers may be undefined at times, and must not decide where a run ends.
        finite = np.isfinite(rows[:, : len(RECORDED)]).all(1)
        count = len(finite)
        if not finite.all():
            first = int(np.argmin(finite))
            self.diverged_at, count = int(starts[0]) + first, first + 1
        self._recorded.append(rows[:count])
        self.position = int(starts[0]) + count

    def evaluated(self, values: Mapping[str, float]) -> dict[str, float]:
        """Append an evaluation of the central variable; return its row of `Run.evaluations`.

        A loss that is not finite means that the run has diverged by the last commit.
        """
        frame, commits = self.trace.frame, self.position
        row = {
            "commit": commits,
            "commit_time": float(frame["commit_time"].iloc[commits - 1]) if commits else 0.0,
            "worker_step": commits / self.trace.workers,
            "gradients": int(frame["local_steps"].iloc[:commits].sum()),
            **values,
        }
        if commits and not np.isfinite([row[name] for name in LOSSES if name in row]).all():
            self.diverged_at = commits - 1
        self._evaluations.append(row)
        return row

    def run(
        self,
        method: Method,
        problem: Problem,
        params: Any,
        config: Mapping[str, Any],
        replicas: Any = None,
    ) -> Run:
        """Build the Run of the present records and parameters."""
        trace = self.trace
        return Run(
            commits=self._commits(),
            evaluations=pd.DataFrame(self._evaluations),
            diagnostics=diagnostics_table(self._diagnosed, trace),
            params=params,
            replicas=replicas,
            diverged_at=self.diverged_at,
            config={
                "method": method.name,
                "hyperparameters": plain(method.hyperparameters),
                "problem": problem.name,
                "problem_config": plain(problem.config),
                **config,
                "cluster": None if trace.cluster is None else plain(trace.cluster.to_dict()),
                "workers": trace.workers,
                "commits": len(trace),
                "trace_seed": trace.seed,
                "versions": {**trace.versions, "jax": jax.__version__},
            },
        )

    def _commits(self) -> pd.DataFrame:
        frame = self.trace.frame.iloc[: self.position]
        table = frame[["commit", "commit_time", "worker", "staleness"]].reset_index(drop=True)
        table.insert(3, "worker_step", self.trace.worker_step[: self.position])
        numbers = (
            np.concatenate(self._recorded) if self._recorded else np.empty((0, len(self._columns)))
        )
        for place, name in enumerate(self._columns):
            table[name] = numbers[:, place]
        return table


def diagnostic_rows(
    commit: int, diagnostics: Mapping[str, Sequence[Any]], tensors: Sequence[str]
) -> list[tuple[int, str, str, float, float]]:
    """Return one commit's diagnostics in long form, a tuple for each of `COLUMNS`.

    For each quantity its quantiles over all parameters (``tensor`` is empty) and the median of each
    tensor; for a boolean quantity the share of true elements (``quantile`` is NaN). For the
    energies each tensor's sum (``quantile`` is NaN), and a further quantity
    ``weight_energy_ratio``, their ratio over the weights with a proxy energy above zero.
    """
    # On the host: numpy selects far quicker than XLA on a CPU.
    quantities = {
        name: [np.asarray(leaf).reshape(-1) for leaf in leaves]
        for name, leaves in diagnostics.items()
    }
    rows = []
    if set(ENERGIES) <= quantities.keys():
        central, proxy = energies = [quantities.pop(name) for name in ENERGIES]
        for quantity, values in zip(ENERGIES, energies, strict=True):
            rows += [
                (commit, quantity, name, np.nan, float(v.sum()))
                for name, v in zip(tensors, values, strict=True)
            ]
        with np.errstate(over="ignore", invalid="ignore"):  # in a run that diverges here
            quantities[ENERGY_RATIO] = [
                a[b > 0] / b[b > 0] for a, b in zip(central, proxy, strict=True)
            ]
    for quantity, values in quantities.items():
        if all(tensor.dtype == bool for tensor in values):
            share = sum(map(np.count_nonzero, values)) / sum(tensor.size for tensor in values)
            rows.append((commit, quantity, "", np.nan, share))
            continue
        of_quantiles = zip(QUANTILES, _quantiles(np.concatenate(values), QUANTILES), strict=True)
        rows += [(commit, quantity, "", q, float(value)) for q, value in of_quantiles]
        rows += [
            (commit, quantity, name, 0.5, float(_quantiles(tensor, 0.5)))
            for name, tensor in zip(tensors, values, strict=True)
        ]
    return rows


def _quantiles(values: np.ndarray, quantiles: Any) -> np.ndarray:
    """Return quantiles in float64, NaN without values."""
    if not values.size:
        return np.full_like(quantiles, np.nan)
    ordered = np.sort(values).astype(float)  # float32 is sorted quickly, and then selected quickly
    with np.errstate(invalid="ignore"):  # between infinities
        return np.quantile(ordered, quantiles)


def diagnostics_table(rows: list[tuple[int, str, str, float, float]], trace: Trace) -> pd.DataFrame:
    """Build the table of the rows, with time, worker and worker step from the trace."""
    table = pd.DataFrame(rows, columns=list(COLUMNS)).astype(
        {"commit": int, "quantile": float, "value": float}
    )
    index = table["commit"].to_numpy()
    commits = trace.frame.iloc[index]
    table.insert(1, "commit_time", commits["commit_time"].to_numpy())
    table.insert(2, "worker", commits["worker"].to_numpy())
    table.insert(3, "worker_step", trace.worker_step[index])
    return table
