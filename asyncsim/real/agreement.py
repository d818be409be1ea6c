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
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd

from asyncsim.base.errors import InputError
from asyncsim.methods.method import Method
from asyncsim.problems.problem import Problem
from asyncsim.real.computing import RECORDER, Computing, Parameters, State, load_state
from asyncsim.real.peers import first_state
from asyncsim.real.recording import Recorded, states_in
from asyncsim.replays.programs import cast
from asyncsim.replays.replay import Replay
from asyncsim.replays.state import ReplayState
from asyncsim.replays.waves import find_waves

#: Largest relative difference of parameters and losses over a thousand commits, by precision.
BARS = {"float32": 1e-5, "float64": 1e-10}
REPLAYS = ("free", "perturbed", "forced")


class Agreement(NamedTuple):
    """How far a recording and its replays are apart."""

    #: One row per commit, ``commit`` counting those made: of each replay in `REPLAYS` the columns ``loss_...``, the
    #: difference of that commit's loss relative to the largest loss recorded, and ``params_...``, the norm of the
    #: difference of the central variables relative to its norm, at the checkpoints (else nan). The perturbed replay is
    #: compared with the free one, the others with the recording. Without a server the workers' own states count, too,
    #: there is one checkpoint, at the end, and the forced replay is the free one.
    table: pd.DataFrame
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

    ``recorded``: with the states of all checkpoints (``keep_states``). ``method``, ``problem``: those of the recording.
    """
    header = recorded.header
    paths = {stop: path for stop, path in states_in(recorded.folder).items() if stop <= len(recorded.commits)}
    if not paths:
        raise InputError(f"folder = {str(recorded.folder)!r}: no states of checkpoints; record it with keep_states")
    dtype = jnp.dtype(header.precision)

    def shifted(key: jax.Array) -> Any:
        """Return the problem's initial parameters, each moved to the next number above."""
        params = cast(problem.init(key), dtype)
        return jax.tree.map(lambda leaf: jnp.nextafter(leaf, jnp.full_like(leaf, jnp.inf)), params)

    with jax.enable_x64(header.precision == "float64"):
        computing = Computing(method, problem, header)
        if header.processes.topology is None:
            like = Parameters(method, header.processes, computing).state
        else:
            like = first_state(method, header.processes.workers, computing)
        free = _follow(recorded, method, problem, paths)
        perturbed = _follow(recorded, method, dataclasses.replace(problem, init=shifted), paths)
        forced = _follow(recorded, method, problem, paths, like)
        central = {}
        for stop, path in paths.items():
            state = load_state(path, like)[0]
            own = jax.tree.map(lambda *leaves: np.stack(leaves), *(row.method for row in state.workers))
            central[stop] = _compared(recorded, state.central, own)
    truth = _Followed(recorded.commits["loss"].to_numpy(), central)
    table: dict[str, Any] = {"commit": np.arange(1, len(truth.loss) + 1)}
    for name, one, other in (("free", free, truth), ("perturbed", perturbed, free), ("forced", forced, truth)):
        loss = np.abs(one.loss - other.loss) / np.nanmax(np.abs(other.loss))
        params = np.full(len(loss), np.nan)
        for stop, expected in other.central.items():
            found = one.central.get(stop)
            far = np.inf if found is None else np.linalg.norm(found - expected) / np.linalg.norm(expected)
            params[stop - 1] = far if np.isfinite(far) else np.inf
        # What is not finite is infinitely far away.
        table |= {f"loss_{name}": np.where(np.isfinite(loss), loss, np.inf), f"params_{name}": params}
    return Agreement(pd.DataFrame(table), BARS[header.precision])


def _compared(recorded: Recorded, central: Any, own: Any) -> np.ndarray:
    """Return what is compared at a checkpoint: the central variable, and without a server the workers' own states."""
    parts = () if recorded.header.processes.topology is None else jax.tree.leaves(own)
    return np.concatenate([np.ravel(part) for part in (central, *parts)])


class _Followed(NamedTuple):
    """The loss of each commit, and the central variable at the checkpoints."""

    loss: np.ndarray
    central: dict[int, np.ndarray]


def _follow(
    recorded: Recorded, method: Method, problem: Problem, paths: dict[int, Path], forced_like: State | None = None
) -> _Followed:
    """Replay a recording from checkpoint to checkpoint; given the structure of a state, take over the recorded ones."""
    commits = len(recorded.commits)
    replay = Replay(
        recorded.trace,
        method,
        problem,
        recorded.header.seed,
        precision=recorded.header.precision,
        stops=np.unique([*paths, commits]),
        record=[RECORDER],
        form="single",
        devices=jax.devices()[:1],
    )
    central: dict[int, np.ndarray] = {}
    for stop, path in paths.items():
        replay.advance(stop)
        if replay.diverged_at is not None:
            break
        central[stop] = _compared(recorded, replay.state.central, replay.state.workers.method)
        if forced_like is not None and stop < commits:
            replay.go_on_from(_replay_state(load_state(path, forced_like)[0], replay))
    if replay.diverged_at is None:
        replay.advance(commits)
    found = replay.result().commits["loss"].to_numpy()
    return _Followed(np.concatenate([found, np.full(commits - len(found), np.nan)]), central)


def _replay_state(state: State, replay: Replay) -> ReplayState:
    """Return a server's state in the layout of a replay that has made as many commits.

    The replay's slots hold what the workers had read; what a visit of its own read at this very position is the central
    variable.
    """
    stop, waves, now = replay.position, find_waves(replay.trace), replay.state
    read: Any = np.array(now.read)
    push_read: Any = np.array(now.push_read)
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
        if ahead == 0 and waves.separate_pushes and waves.push[commit] <= stop:
            seen = state.pulled[worker[commit]] if waves.push[commit] < stop else state.central
            push_read[waves.push_slot[commit]] = seen
    rows = jax.tree.map(lambda *leaves: np.stack([np.asarray(leaf) for leaf in leaves]), *state.workers)
    arrays = {"central": state.central, "server": state.server, "read": read, "push_read": push_read}
    return now._replace(**arrays, workers=rows)
