"""A method's own diagnostics, of one commit now and then: a median over all parameters costs as much as a commit."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from asyncsim.methods.method import Array, Memories, Method, State, Visit
from asyncsim.replays.flat import Flat
from asyncsim.replays.replay_state import Layout, Pieces, ReplayState

if TYPE_CHECKING:
    import pandas as pd

    from asyncsim.traces.trace import Trace

#: Quantiles of each diagnostic that are recorded.
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
COLUMNS = ("commit", "quantity", "tensor", "quantile", "value")
_ENERGIES = ("central_energy", "proxy_energy")


class Formed(NamedTuple):
    """What a commit meets besides its update; vectors of shape ``[parameters]``.

    Attributes
    ----------
    worker : tree
        The method's state on the worker.
    start : Array
        Where its local steps start.
    central : Array
        The central variable that the message is formed with.
    applied : Applying
        ``()`` unless energies are diagnosed.
    """

    worker: State
    start: Array
    central: Array
    applied: Any


class Applying(NamedTuple):
    """What a commit's energies depend on besides its message."""

    server: State
    central: Array
    memory: State
    read: Array
    proxy: State
    memories: tuple[Memories, ...]  #: of all workers, for methods that see them


def build_before(method: Method, layout: Layout):
    """Return the jitted function that copies what the first commit of some planned pieces will meet.

    Its arguments: the state before these pieces, which running them will overwrite, and the pieces.
    """

    def before(state: ReplayState, pieces: Pieces) -> Formed:
        central = state.central
        if layout.separate_forms:
            central = jnp.where(pieces.form_offset[0, 0] < 0, state.form[pieces.form_slot[0, 0]], central)
        workers = state.workers._replace(learner=())
        row = jax.tree.map(lambda leaf: leaf[pieces.visit.worker[0, 0]], workers)
        read = state.read[pieces.slot[0, 0]]
        start = read if method.resume is None else method.resume(row.method, read)
        applied: Any = ()
        if layout.diagnose_energy:
            applied = Applying(state.server, state.central, row.memory, read, row.proxy, memories(state))
        return Formed(row.method, start, central, applied)

    def memories(state: ReplayState) -> tuple[Memories, ...]:
        if not method.sees_memories:
            return ()
        rows = state.workers.memory
        workers = jax.tree.leaves(rows)[0].shape[0]
        nothing_newer = jax.tree.map(lambda leaf: leaf[:1], rows), jnp.full(1, workers, jnp.int32)
        return (Memories(rows, *nothing_newer),)

    return jax.jit(before)


def build_diagnose(method: Method, flat: Flat, layout: Layout):
    """Return the jitted function that gives the diagnostics of the first commit of some pieces, tensor by tensor.

    Its arguments: what is formed before them, the first commit's update, the pieces and their losses; of these only the
    first is looked at, and none where the method sees no losses.
    """

    def diagnose(formed: Formed, update: Array, pieces: Pieces, losses: Array) -> dict[str, list[Array]]:
        visit = jax.tree.map(lambda leaf: leaf[0, 0], pieces.visit)
        if method.sees_loss:
            visit = visit._replace(loss=losses[0, 0])
        message, worker, diagnostics = method.message(formed.worker, update, formed.start, formed.central, visit)
        found = dict(diagnostics)
        if layout.diagnose_energy:
            found = energies(formed, update, message, worker, visit) | found
        return {name: jax.tree.leaves(flat.unravel(value)) for name, value in found.items()}

    def energies(formed: Formed, update: Array, message: State, worker: State, visit: Visit) -> dict[str, Array]:
        """Return the central and the proxy's energy, weight by weight; see `Run.commits` for their definition.

        And where the update goes back on what the central variable moved before this commit: what GEM's rule means by
        opposite signs, for methods that do not say so themselves.
        """
        given = formed.applied
        origin = method.origin(formed.worker, given.read) if method.origin else given.read
        central = method.apply(given.server, given.central, message, given.memory, visit, *given.memories).central
        proxy = method.proxy(worker) if method.proxy else layout.proxy_momentum * given.proxy + update
        opposite = (given.central - origin) * update < 0
        return dict(zip(_ENERGIES, ((central - origin) ** 2 / 2, proxy**2 / 2), strict=True)) | {
            "opposite_sign": opposite
        }

    return jax.jit(diagnose)


def diagnostic_rows(
    commit: int, diagnostics: Mapping[str, Sequence[Any]], tensors: Sequence[str]
) -> list[tuple[int, str, str, float, float]]:
    """Return one commit's diagnostics in long form, a tuple for each of `COLUMNS`.

    For each quantity its quantiles over all parameters (``tensor`` is empty) and the median of each tensor; for a
    boolean one the share of true elements (``quantile`` is NaN). Of the energies each tensor's sum (``quantile`` is
    NaN), and their ratio, ``weight_energy_ratio``, as a quantity of its own over the weights whose proxy has any.
    Sorted on the host: numpy is far quicker there than XLA on a CPU, and with AVX-512 sorts five to ten times as
    quickly as it selects (float32).
    """
    given = {name: [np.asarray(leaf).reshape(-1) for leaf in leaves] for name, leaves in diagnostics.items()}
    rows = []
    if _ENERGIES[0] in given:
        central, proxy = energies = [given.pop(name) for name in _ENERGIES]
        for quantity, values in zip(_ENERGIES, energies, strict=True):
            rows += [(commit, quantity, name, np.nan, float(v.sum())) for name, v in zip(tensors, values, strict=True)]
        with np.errstate(over="ignore", invalid="ignore"):  # of a run that diverges here
            given["weight_energy_ratio"] = [a[b > 0] / b[b > 0] for a, b in zip(central, proxy, strict=True)]
    for quantity, values in given.items():
        if all(tensor.dtype == bool for tensor in values):
            share = sum(map(np.count_nonzero, values)) / sum(tensor.size for tensor in values)
            rows.append((commit, quantity, "", np.nan, share))
            continue
        ordered = [np.sort(tensor) for tensor in values]
        everything = np.concatenate(ordered)
        everything.sort(kind="stable")  # merges what is in order already: a tenth of the time of sorting it anew
        quantiles = _quantiles(everything, QUANTILES)
        rows += [(commit, quantity, "", q, value) for q, value in zip(QUANTILES, quantiles, strict=True)]
        medians = [_quantiles(tensor, (0.5,))[0] for tensor in ordered]
        rows += [(commit, quantity, name, 0.5, value) for name, value in zip(tensors, medians, strict=True)]
    return rows


def _quantiles(ordered: np.ndarray, quantiles: Sequence[float]) -> list[float]:
    """Return the quantiles of a sorted array as numpy defines them, NaN if the array is empty or contains NaN.

    Between a finite and an infinite value they are infinite.
    """
    if not len(ordered) or np.isnan(ordered[-1]):
        return [np.nan] * len(quantiles)
    at = np.asarray(quantiles) * (len(ordered) - 1)
    below = at.astype(int)
    low, high = (ordered[index].astype(float) for index in (below, np.minimum(below + 1, len(ordered) - 1)))
    share = at - below
    with np.errstate(invalid="ignore"):  # of infinities: where not asked for, or between those of different signs
        between = (1 - share) * low + share * high
    return np.where((share > 0) & (low != high), between, low).tolist()


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
