"""A method's own diagnostics, of one commit now and then: a median over all parameters costs more than a gradient."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from asyncsim.flat import Flat
from asyncsim.methods.method import Array, Method, State
from asyncsim.replay_state import First, Layout, Pieces, ReplayState

if TYPE_CHECKING:
    import pandas as pd

    from asyncsim.trace import Trace

#: Quantiles of each diagnostic that are recorded.
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
COLUMNS = ("commit", "quantity", "tensor", "quantile", "value")


class Formed(NamedTuple):
    """What a commit's message is formed with besides its update; vectors of shape ``[parameters]``."""

    worker: State
    central: Array


def build_before(layout: Layout):
    """Return the jitted function that copies what the first commit of some planned pieces will meet.

    Its arguments: the state before these pieces, which running them will overwrite, and the pieces.
    """

    def before(state: ReplayState, pieces: Pieces) -> Formed:
        central = state.central
        if layout.separate_forms:
            central = jnp.where(pieces.form_offset[0, 0] < 0, state.form[pieces.form_slot[0, 0]], central)
        return Formed(jax.tree.map(lambda leaf: leaf[pieces.visit.worker[0, 0]], state.workers.method), central)

    return jax.jit(before)


def build_diagnose(method: Method, flat: Flat):
    """Return the jitted function that gives the diagnostics of the first commit of some pieces, tensor by tensor."""

    def diagnose(formed: Formed, first: First, pieces: Pieces) -> dict[str, list[Array]]:
        visit = jax.tree.map(lambda leaf: leaf[0, 0], pieces.visit)
        diagnostics = method.message(formed.worker, first.update, first.start, formed.central, visit)[2]
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


def diagnostics_table(rows: list[tuple[int, str, str, float, float]], trace: "Trace") -> "pd.DataFrame":
    """Return the rows as a table, with time, worker and worker step of their commits from the trace."""
    import pandas as pd

    table = pd.DataFrame(rows, columns=list(COLUMNS)).astype({"commit": int, "quantile": float, "value": float})
    index = table["commit"].to_numpy()
    commits = trace.frame.iloc[index]
    table.insert(1, "commit_time", commits["commit_time"].to_numpy())
    table.insert(2, "worker", commits["worker"].to_numpy())
    table.insert(3, "worker_step", trace.worker_step[index])
    return table
