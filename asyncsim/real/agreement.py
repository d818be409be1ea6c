"""Comparison of a recording with its replay: same order, same seed, so the same losses and the same parameters.

Three replays of the recorded order. *Free*: from the seed alone. *Perturbed*: another free one whose initial parameters
differ from it by one unit of round-off in every element; what it is away from the first is what round-off may do over
the length of the recording, whatever computed it. *Forced*: it takes over the server's recorded state at every
checkpoint, so that a difference of one commit does not grow over many. A free replay that is further away than the bar
is no disagreement if the perturbed one is, too: then round-off alone does as much, and the forced one is held to it.

With rectifiers the loss is not smooth: a unit that is zero but for round-off, on one example, switches its gradient,
and parameters that had agreed to 1e-7 are some 1e-6 apart at once, and 1e-3 after hundreds of commits. So these replays
compute each gradient on its own on a CPU, as the workers do, and not several as a batch, whose sums have another
order: there they mostly are the recording bit for bit.
"""

import dataclasses
import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from asyncsim.errors import InputError
from asyncsim.methods.method import Method
from asyncsim.problems.problem import Problem
from asyncsim.real.computing import Computing
from asyncsim.real.folder import STATES, Recorded
from asyncsim.real.parameters import Parameters, State, load_state
from asyncsim.replays.programs import Same, cast
from asyncsim.replays.replay import Replay
from asyncsim.replays.replay_state import ReplayState
from asyncsim.replays.waves import find_waves

if TYPE_CHECKING:
    import pandas as pd

#: Largest relative difference of parameters and losses over a thousand commits, by precision.
BARS = {"float32": 1e-5, "float64": 1e-10}
REPLAYS = ("free", "perturbed", "forced")


class Agreement(NamedTuple):
    """How far a recording and its replays are apart.

    Attributes
    ----------
    table : pandas.DataFrame
        One row per commit, ``commit`` counting those made: of each replay in `REPLAYS` the columns ``loss_...``, the
        difference of that commit's loss relative to the largest loss recorded, and ``params_...``, the norm of the
        difference of the central variables relative to its norm, at the checkpoints (else nan). The perturbed replay's
        are those to the free one, the others' those to the recording.
    bar : float
    """

    table: "pd.DataFrame"
    bar: float

    def worst(self, replay: str) -> float:
        """Return the largest difference of a replay's losses and parameters; nan if one is not finite."""
        return float(self.table[[f"loss_{replay}", f"params_{replay}"]].max().max())

    @property
    def amplifies(self) -> bool:
        """Whether one unit of round-off in the initial parameters grows beyond the bar."""
        return not self.worst("perturbed") <= self.bar

    @property
    def held_to(self) -> str:
        """Which of the replays is held to the bar: the free one, unless round-off alone can bring it above."""
        return "forced" if self.worst("free") > self.bar and self.amplifies else "free"

    @property
    def holds(self) -> bool:
        """Whether that one meets it."""
        return self.worst(self.held_to) <= self.bar

    def row(self) -> dict[str, Any]:
        """Return it in one row of a table."""
        worst = {
            f"{what}_{replay}": float(self.table[f"{what}_{replay}"].max())
            for replay in REPLAYS
            for what in ("loss", "params")
        }
        return {**worst, "bar": self.bar, "held_to": self.held_to, "holds": self.holds}


def agreement(recorded: Recorded, method: Method, problem: Problem) -> Agreement:
    """Replay a recording three times, and compare.

    Parameters
    ----------
    recorded : Recorded
        With the states of all checkpoints (``keep_states``).
    method, problem : Method, Problem
        Those of the recording.

    Raises
    ------
    InputError
        There are no states.
    """
    import pandas as pd

    precision = recorded.header.precision
    problem = _in_turn(Same(problem))
    paths = {int(path.stem): path for path in sorted((recorded.folder / STATES).glob("[0-9]*.npz"))}
    paths = {stop: path for stop, path in paths.items() if stop <= len(recorded.commits)}
    if not paths:
        raise InputError(f"folder = {str(recorded.folder)!r}: no states of checkpoints; record it with keep_states")
    with jax.enable_x64(precision == "float64"):
        states = _States(recorded, method, problem, paths)
        shifted = dataclasses.replace(problem, init=_shifted(problem, jnp.dtype(precision)))
        free = _follow(recorded, method, problem, states, forced=False)
        perturbed = _follow(recorded, method, shifted, states, forced=False)
        forced = _follow(recorded, method, problem, states, forced=True)
    true_loss = recorded.commits["loss"].to_numpy()
    truth = _Followed(true_loss, {stop: np.asarray(states.at(stop).central) for stop in paths})
    table: dict[str, Any] = {"commit": np.arange(1, len(true_loss) + 1)}
    for name, one, other in (("free", free, truth), ("perturbed", perturbed, free), ("forced", forced, truth)):
        table |= {f"{what}_{name}": values for what, values in _differences(one, other).items()}
    return Agreement(pd.DataFrame(table), BARS[precision])


@functools.lru_cache(maxsize=4)  # what is compiled for a problem is kept by the very object
def _in_turn(problem: Same) -> Problem:
    return dataclasses.replace(problem.value, map_on_cpu=True)


class _Followed(NamedTuple):
    """The loss of each commit, and the central variable at the checkpoints."""

    loss: np.ndarray
    central: dict[int, np.ndarray]


class _States:
    """The server's states at the checkpoints of a recording."""

    def __init__(self, recorded: Recorded, method: Method, problem: Problem, paths: dict[int, Path]):
        header = recorded.header
        processes = header.processes
        computing = Computing(method, problem, processes.workers, processes.window, header.seed, header.precision)
        self._like = Parameters(method, processes, computing).state
        self._paths = paths
        self.stops = sorted(paths)

    def at(self, stop: int) -> State:
        """Return the state after so many commits."""
        return load_state(self._paths[stop], self._like)[0]


def _follow(recorded: Recorded, method: Method, problem: Problem, states: _States, forced: bool) -> _Followed:
    """Replay a recording from checkpoint to checkpoint."""
    header, stops = recorded.header, np.array([*states.stops, len(recorded.commits)])
    replay = Replay(
        recorded.trace,
        method,
        problem,
        header.seed,
        precision=header.precision,
        stops=np.unique(stops),
        diagnose_every=0,
        devices=jax.devices()[:1],
    )
    central: dict[int, np.ndarray] = {}
    for stop in states.stops:
        replay.advance(stop)
        if replay.diverged_at is not None:
            break
        central[stop] = np.array(replay.state.central)
        if forced and stop < len(recorded.commits):
            replay.go_on_from(replay_state(states.at(stop), replay))
    if replay.diverged_at is None:
        replay.advance(int(stops[-1]))
    loss = np.full(len(recorded.commits), np.nan)
    found = replay.result().commits["loss"].to_numpy()
    loss[: len(found)] = found
    return _Followed(loss, central)


def replay_state(state: State, replay: Replay) -> ReplayState:
    """Return a server's state as that of a replay which has made as many commits.

    What waits in the replay's slots is what the workers had read; what a visit of its own read at this very position is
    the central variable.
    """
    stop, waves, now = replay.position, find_waves(replay.trace), replay.state
    read: Any = np.array(now.read)
    form: Any = np.array(now.form)
    waiting: dict[int, int] = {}
    worker = replay.trace.frame["worker"].to_numpy()
    for commit in range(stop, len(worker)):
        ahead = waiting.setdefault(worker[commit], 0)
        waiting[worker[commit]] += 1
        if ahead == 0 or (ahead == 1 and waves.reads == "separate"):
            held = state.read if ahead == 0 else state.pulled
            if waves.read[commit] <= stop:
                atomic = waves.reads != "separate"  # perhaps a reply, which is more than the central variable
                own = atomic or waves.read[commit] < stop
                read[waves.slot[commit]] = held[worker[commit]] if own else state.central
        if ahead == 0 and waves.separate_forms and waves.form[commit] <= stop:
            seen = state.pulled[worker[commit]] if waves.form[commit] < stop else state.central
            form[waves.form_slot[commit]] = seen
    rows = jax.tree.map(lambda *leaves: np.stack([np.asarray(leaf) for leaf in leaves]), *state.workers)
    return ReplayState(state.central, state.server, read, form, rows)


def _shifted(problem: Problem, dtype: Any):
    """Return the problem's initial parameters, each moved to the next number above."""

    def init(key: jax.Array) -> Any:
        params = cast(problem.init(key), dtype)
        return jax.tree.map(lambda leaf: jnp.nextafter(leaf, jnp.full_like(leaf, jnp.inf)), params)

    return init


def _differences(one: _Followed, other: _Followed) -> dict[str, np.ndarray]:
    """Return the columns of a table; what is not finite is infinitely far away."""
    loss = np.abs(one.loss - other.loss) / np.nanmax(np.abs(other.loss))
    params = np.full(len(loss), np.nan)
    for stop, expected in other.central.items():
        found = one.central.get(stop)
        far = np.inf if found is None else np.linalg.norm(found - expected) / np.linalg.norm(expected)
        params[stop - 1] = far if np.isfinite(far) else np.inf
    return {"loss": np.where(np.isfinite(loss), loss, np.inf), "params": params}
