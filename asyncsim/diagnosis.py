"""A method's own diagnostics, of one commit now and then: a median over all parameters costs more than a gradient."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from asyncsim.flat import Flat
from asyncsim.kernel import Layout, Pieces, ReplayState
from asyncsim.local import build_local
from asyncsim.methods.method import Array, Method
from asyncsim.problems.problem import Problem

if TYPE_CHECKING:
    import pandas as pd

#: Quantiles of each diagnostic that are recorded.
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
COLUMNS = ("commit", "quantity", "tensor", "quantile", "value")


def build_diagnose(method: Method, problem: Problem, layout: Layout, flat: Flat):
    """Return the jitted function that gives the diagnostics of the first commit of some planned pieces.

    Its arguments: the state before these pieces, the training data, the key of the problem's randomness, the pieces. It
    computes the commit's update once more and leaves the state as it is.
    """
    local = build_local(method, problem, layout.window, flat)

    def diagnose(state: ReplayState, data, key: Array, pieces: Pieces) -> dict[str, list[Array]]:
        # The first commit of the first piece; the reads belong to a piece as a whole.
        of_commits = ("slot", "form_slot", "form_offset", "visit", "job", "rows")
        first = pieces._replace(
            **{name: jax.tree.map(lambda leaf: leaf[0, 0], getattr(pieces, name)) for name in of_commits}
        )
        worker = jax.tree.map(lambda leaf: leaf[first.visit.worker], state.workers)
        read = state.read[first.slot]
        result = local(data, key, worker, read, first.visit, first.job, first.rows)
        start = result.start if method.resume else read
        form = state.central
        if layout.separate_forms:
            form = jnp.where(first.form_offset < 0, state.form[first.form_slot], form)
        diagnostics = method.message(worker.method, result.update, start, form, first.visit)[2]
        return {name: jax.tree.leaves(flat.unravel(value)) for name, value in diagnostics.items()}

    return jax.jit(diagnose)


def diagnostic_rows(
    commit: int, diagnostics: Mapping[str, Sequence[Any]], tensors: Sequence[str]
) -> list[tuple[int, str, str, float, float]]:
    """Return one commit's diagnostics in long form, a tuple for each of `COLUMNS`.

    For each quantity its quantiles over all parameters (``tensor`` is empty) and the median of each tensor; for a
    boolean one the share of true elements (``quantile`` is NaN). Selected on the host: sorting there is far quicker
    than XLA's on a CPU.
    """
    rows = []
    for quantity, leaves in diagnostics.items():
        values = [np.asarray(leaf).reshape(-1) for leaf in leaves]
        everything = np.concatenate(values)
        if everything.dtype == bool:
            rows.append((commit, quantity, "", np.nan, float(everything.mean())))
            continue
        quantiles = np.quantile(everything, QUANTILES)
        rows += [(commit, quantity, "", q, float(value)) for q, value in zip(QUANTILES, quantiles, strict=True)]
        rows += [(commit, quantity, name, 0.5, float(np.median(v))) for name, v in zip(tensors, values, strict=True)]
    return rows


def diagnostics_table(rows: list[tuple[int, str, str, float, float]], frame: "pd.DataFrame") -> "pd.DataFrame":
    """Return the rows as a table, with time, worker and worker step of their commits from the trace's frame."""
    import pandas as pd

    table = pd.DataFrame(rows, columns=list(COLUMNS)).astype({"commit": int, "quantile": float, "value": float})
    commits = frame.iloc[table["commit"].to_numpy()]
    table.insert(1, "commit_time", commits["commit_time"].to_numpy())
    table.insert(2, "worker", commits["worker"].to_numpy())
    table.insert(3, "worker_step", commits["job"].to_numpy())
    return table
