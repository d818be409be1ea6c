"""Compare a recording with its replay: same order and seed, so the same losses and parameters.

*Free*: a replay from the seed alone. *Perturbed*: another whose initial parameters differ by one
unit of round-off in every element. The free replay must be within the bar as long as the perturbed
one is: beyond, round-off alone explains any difference. Gradients are computed one by one, as the
workers do; such replays mostly equal the recording bit for bit.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd

from asyncsim.real.arrays import RECORDER
from asyncsim.real.recording import Recorded
from asyncsim.replays.programs import cast
from asyncsim.replays.replay import Replay

#: Largest relative difference of parameters and losses, by precision.
BARS = {"float32": 1e-5, "float64": 1e-10}


class Agreement(NamedTuple):
    """The differences between a recording and its replays.

    Attributes
    ----------
    table : pandas.DataFrame
        One row per commit. ``loss_free``: the difference of the free replay's loss from the
        recorded, relative to the largest recorded loss. ``params_free``: the norm of the difference
        of the central variables relative to its norm, where the recording has a copy, else nan;
        without a server with the workers' states. ``loss_perturbed`` and ``params_perturbed``: the
        same of the perturbed replay from the free one.
    bar : float
    """

    table: pd.DataFrame
    bar: float

    @property
    def compared(self) -> int:
        """The number of commits before a unit of round-off has grown beyond the bar."""
        beyond = (self.table[["loss_perturbed", "params_perturbed"]] > self.bar).any(axis=1)
        return int(np.argmax(beyond)) if beyond.any() else len(beyond)

    @property
    def worst(self) -> float:
        """The largest difference of the free replay in the compared commits."""
        return float(self.table[["loss_free", "params_free"]][: self.compared].max().max())

    @property
    def holds(self) -> bool:
        """Whether the compared commits are within the bar."""
        return self.compared > 0 and self.worst <= self.bar

    def row(self) -> dict[str, Any]:
        """Return the largest differences and the verdict as a row of a table."""
        largest = self.table.drop(columns="commit").max().to_dict()
        verdict = {"compared": self.compared, "worst": self.worst, "holds": self.holds}
        return {**largest, "bar": self.bar, **verdict}


def agreement(recorded: Recorded) -> Agreement:
    """Replay a recording twice, and compare."""
    task = recorded.task
    dtype = jnp.dtype(task.precision)

    def shifted(init: Any) -> Any:
        """Move each initial parameter to the next larger number."""

        def up(leaf: Any) -> Any:
            return jnp.nextafter(leaf, jnp.full_like(leaf, jnp.inf))

        return lambda *arguments: jax.tree.map(up, cast(init(*arguments), dtype))

    inits = {name: getattr(task.problem, name) for name in ("init", "init_replica")}
    moved = {name: shifted(init) for name, init in inits.items() if init is not None}
    with task.in_precision():
        free = _follow(recorded, task.problem)
        perturbed = _follow(recorded, dataclasses.replace(task.problem, **moved))
    truth = recorded.commits["loss"].to_numpy(), recorded.central
    table: dict[str, Any] = {"commit": np.arange(1, len(truth[0]) + 1)}
    for name, course, reference in (("free", free, truth), ("perturbed", perturbed, free)):
        losses, central = course
        far = np.full(len(losses), np.nan)
        for stop, value in reference[1].items():
            distance = np.linalg.norm(central.get(stop, np.inf) - value)
            far[stop - 1] = distance / np.linalg.norm(value)
        loss = np.abs(losses - reference[0]) / np.nanmax(np.abs(reference[0]))
        # A replay that diverged is infinitely far away.
        table |= {f"loss_{name}": np.nan_to_num(loss, nan=np.inf), f"params_{name}": far}
    return Agreement(pd.DataFrame(table), BARS[task.precision])


def _follow(recorded: Recorded, problem: Any) -> tuple[np.ndarray, dict[int, Any]]:
    """Replay; return the losses, and the central variable where the recording has it."""
    task, stops = recorded.task, sorted(recorded.central)
    replay = Replay(
        recorded.trace,
        task.method,
        problem,
        task.seed,
        precision=task.precision,
        stops=np.array(stops),
        record=[RECORDER],
        form="single",
    )
    central = {}
    for stop in stops:
        replay.advance(stop)
        if replay.diverged_at is not None:
            break
        vectors = [replay.state.central]
        if task.cluster.topology is not None:
            leaves = jax.tree.leaves(replay.state.workers.method)
            vectors += [leaf[i].ravel() for i in range(task.cluster.workers) for leaf in leaves]
        central[stop] = np.concatenate([np.asarray(vector) for vector in vectors])
    losses = replay.result().commits["loss"].to_numpy()
    missing = np.full(len(recorded.commits) - len(losses), np.nan)
    return np.concatenate([losses, missing]), central
