"""What one run records while it is replayed."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from asyncsim.files import plain
from asyncsim.methods.method import Method
from asyncsim.problems.problem import Problem
from asyncsim.replays.diagnosis import diagnostic_rows, diagnostics_table
from asyncsim.replays.replay_state import Records
from asyncsim.replays.run import Run
from asyncsim.traces.trace import Trace

if TYPE_CHECKING:
    import pandas as pd

#: Values of an evaluation by which a run diverges; others, of the user's own, may be undefined now and then.
LOSSES = ("train_loss", "test_loss")


class Recording:
    """The records of a run so far.

    Attributes
    ----------
    position : int
        Commits recorded.
    diverged_at : int or None
        The first commit of which a value is not finite; nothing is recorded after it.
    """

    def __init__(self, trace: Trace, tensors: Sequence[str]):
        self.trace = trace
        self.position = 0
        self.diverged_at: int | None = None
        self._tensors = tensors
        self._recorded: list[dict[str, np.ndarray]] = []
        self._diagnosed: list[tuple[int, str, str, float, float]] = []
        self._evaluations: list[dict[str, float]] = []

    def take(self, starts: np.ndarray, records: Records, diagnostics: Mapping[str, Sequence[Any]]) -> None:
        """Keep a chunk's records, up to the first commit that is not finite.

        ``records`` have shape ``[pieces, piece_size]``, ``diagnostics`` are those of the chunk's first commit.
        """
        self._diagnosed += diagnostic_rows(int(starts[0]), diagnostics, self._tensors)
        sizes = np.diff(starts)
        valid = np.arange(records.loss.shape[1]) < sizes[:, None]
        columns = {name: np.asarray(values)[: len(sizes)][valid] for name, values in records._asdict().items()}
        finite = np.logical_and.reduce([np.isfinite(column) for column in columns.values()])
        kept = len(finite)
        if not finite.all():
            first = int(np.argmin(finite))
            self.diverged_at, kept = int(starts[0]) + first, first + 1
        self._recorded.append({name: column[:kept] for name, column in columns.items()})
        self.position = int(starts[0]) + kept

    def evaluated(self, values: Mapping[str, float]) -> dict[str, float]:
        """Keep an evaluation of the central variable as it is now; return its row of `Run.evaluations`.

        A loss that is not finite means that the run has diverged by the last commit.
        """
        frame, done = self.trace.frame, self.position
        row = {
            "commit": done,
            "commit_time": float(frame["commit_time"].iloc[done - 1]) if done else 0.0,
            "worker_step": done / self.trace.workers,
            "gradients": int(frame["local_steps"].iloc[:done].sum()),
            **values,
        }
        if done and not np.isfinite([row[name] for name in LOSSES if name in row]).all():
            self.diverged_at = done - 1
        self._evaluations.append(row)
        return row

    def run(self, method: Method, problem: Problem, params: Any, config: Mapping[str, Any]) -> Run:
        """Return it as a Run, with the parameters as they are now."""
        import pandas as pd

        trace = self.trace
        return Run(
            commits=self._commits(),
            evaluations=pd.DataFrame(self._evaluations),
            diagnostics=diagnostics_table(self._diagnosed, trace),
            params=params,
            diverged_at=self.diverged_at,
            config={
                "method": method.name,
                "hyperparameters": plain(method.hyperparameters),
                "problem": problem.name,
                "problem_config": plain(problem.config),
                **config,
                "workers": trace.workers,
                "commits": len(trace),
                "trace_seed": trace.seed,
                "versions": {**trace.versions, "jax": jax.__version__},
            },
        )

    def _commits(self) -> "pd.DataFrame":
        frame = self.trace.frame.iloc[: self.position]
        table = frame[["commit", "commit_time", "worker", "staleness"]].reset_index(drop=True)
        table.insert(3, "worker_step", self.trace.worker_step[: self.position])
        for name in Records._fields:
            parts = [recorded[name] for recorded in self._recorded]
            table[name] = np.concatenate(parts) if parts else np.empty(0)
        return table
