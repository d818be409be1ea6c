"""The loop of a replay on the host: plan a chunk, start it on the device, record the previous."""

import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from asyncsim.base.errors import InputError
from asyncsim.base.threads import require_wanted
from asyncsim.base.tracing import naming, tree_text, whole_products
from asyncsim.methods.method import Method
from asyncsim.problems.problem import Problem
from asyncsim.replays.local import Constants
from asyncsim.replays.observing import columns
from asyncsim.replays.parts import ShardedPlan
from asyncsim.replays.plan import Plan, method_key, purpose_key
from asyncsim.replays.programs import cast, compiled, on_device
from asyncsim.replays.recorders import Recorder
from asyncsim.replays.recording import Recording
from asyncsim.replays.state import ReplayState, Start
from asyncsim.replays.tuning import Form
from asyncsim.traces.trace import Trace


class SeveralProgramsError(Exception):
    """The methods of a batch do not share a program."""


class Running:
    """A replay of one run, or of the members of an ensemble, that can stop at the plan's stops.

    Parameters
    ----------
    trace, problem, recorders, dtype, device, form
    runs : sequence of (int, Method)
        The seed and the method of each member.
    stops : int array
        The numbers of commits at which it can stop; the last is that of the trace.

    Attributes
    ----------
    position : int
        Commits made so far.
    recordings : list of Recording
        One for each member.

    Raises
    ------
    SeveralProgramsError
        The methods of several runs do not share a program.
    """

    def __init__(
        self,
        trace: Trace,
        problem: Problem,
        runs: Sequence[tuple[int, Method]],
        recorders: Sequence[Recorder],
        stops: np.ndarray,
        dtype: Any,
        device: Any,
        form: Form,
    ):
        seeds, (_, method) = [seed for seed, _ in runs], runs[0]
        look_every = [recorder.every for recorder in recorders if recorder.look is not None]
        arguments = trace, problem, seeds, stops, look_every, dtype, device, form
        plan: Any = (ShardedPlan if trace.servers > 1 else Plan)(*arguments, method.same_reply)
        layout, self._batched = plan.layout(method), len(runs) > 1
        programs, starts, constants = set(), [], []
        for seed, of_run in runs:
            program, numbers = compiled(
                of_run, tuple(recorders), problem, layout, dtype, device, self._batched
            )
            initial, key = start(problem, seed, dtype, trace.workers)
            visits_key = method_key(seed) if of_run.needs_key else ()
            programs.add(program.engine)
            starts.append(initial)
            constants.append(Constants(key, visits_key, numbers))
        if len(programs) > 1:
            raise SeveralProgramsError(method.name)
        names = tensor_names(starts[0].params)
        self.trace, self.position = trace, 0
        self.recordings = [Recording(trace, names, columns(recorders)) for _ in runs]
        first, self._constants = starts[0], constants[0]
        if self._batched:
            first, self._constants = jax.tree.map(
                lambda *leaves: jnp.stack(leaves), *zip(starts, constants, strict=True)
            )
        self._problem, self._plan, self._program = problem, plan, program
        # The position of the last restore of each checkpoint, after which its copy is dropped; and
        # the restores by position.
        self._checkpoints = {stays: at for at, stays, *_ in plan.restores}
        self._restores = {at: (stays, slots, pushes) for at, stays, slots, pushes in plan.restores}
        self._kept: dict[int, Any] = {}
        self._train, self._test = on_device(problem, dtype, device)
        self._counted = program.honest.copy()  # the living among the honest
        of_problem = problem_state(problem, dtype)
        self._state: Any = program.engine.initial_state(
            self._constants.numbers, first, of_problem, **plan.sizes
        )
        #: The initial replicas, from which workers without a neighbour return.
        self._initial: Any = None
        if plan.changes and program.replicas is not None:
            self._initial = jnp.array(program.replicas(self._state, self._constants.numbers))

    @property
    def state(self) -> ReplayState:
        """The state after ``position`` commits; InputError after an interruption amid commits."""
        if self._state is None:
            raise InputError(
                "replay: was interrupted amid its commits, and cannot go on; make a new one"
            )
        return self._state

    def _central(self) -> Any:
        return self._program.engine.central(self.state)

    @property
    def over(self) -> bool:
        """Whether all members have diverged."""
        return all(recording.diverged_at is not None for recording in self.recordings)

    @whole_products()
    def advance(self, stop: int) -> None:
        """Replay up to ``stop`` commits, or until no member is finite.

        Raises
        ------
        InputError
            It cannot stop there, or was interrupted amid its commits.
        """
        if stop not in self._plan.stops:
            raise InputError(f"stop = {stop}: not one of the stops that this replay was made with")
        # Stored again at the end: the donated state is gone after an interruption, and its commits
        # are not recorded.
        state, self._state = self.state, None
        pending: tuple[np.ndarray, Any, Any] | None = None
        for starts, pieces in self._plan.chunks(self.position, stop):
            if self.over:
                break
            require_wanted()
            if self._plan.restores:
                state = self._restored(state, int(starts[0]))
            for change in self._plan.changes.get(int(starts[0]), ()):
                begins = change.kind == "begin"
                initial = self._initial[..., change.place, :] if begins else None
                state = self._program.engine.changed(
                    state, change, self._constants.numbers, initial
                )
                if change.kind != "message":
                    self._counted[change.place] = begins and self._program.honest[change.place]
            looked_at = self._plan.looked_at[starts[0]]
            inputs = self._train, self._constants, pieces
            # Before the piece runs, as it overwrites the state.
            looks = self._program.look(state, *inputs) if looked_at else []
            state, numbers = self._program.engine.advance(state, *inputs, np.int32(len(starts) - 1))
            # While the device works on a chunk, the host records the previous one and plans the
            # next.
            if pending is not None:
                self._take(*pending)
            pending = (starts, numbers, looks)
        if pending is not None:
            self._take(*pending)
        self._state = state

    def _restored(self, state: Any, position: int) -> Any:
        """Copy the server's states at a checkpoint, and restore them at a restore."""
        if position in self._checkpoints:
            self._kept[position] = self._program.engine.server_of(state)
        if position in self._restores:
            checkpoint, slots, push_slots = self._restores[position]
            state = self._program.engine.with_server(
                state, self._kept[checkpoint], slots, push_slots
            )
            if position == self._checkpoints[checkpoint]:
                del self._kept[checkpoint]
        return state

    @whole_products()
    def evaluate_members(self) -> list[dict[str, float]]:
        """Evaluate the central variables on all data; return a row for each finite member."""
        values = self._program.evaluate(
            self._central(), self._mean_problem_state(), self._train, self._test
        )
        if self._program.replicas is not None:
            values = {"consensus_distance": self._spread(), **values}
        return [
            recording.evaluated({name: float(value) for name, value in metrics.items()})
            for recording, metrics in zip(self.recordings, self._of_members(values), strict=True)
            if recording.diverged_at is None
        ]

    def params(self) -> list[Any]:
        """Return the members' central variables as trees of the problem with numpy arrays."""
        return [
            jax.tree.map(np.asarray, self._program.flat.unravel(member))
            for member in self._of_members(self._central())
        ]

    def replicas(self) -> list[Any]:
        """Return the members' replicas, with a leading axis of workers; None with a server."""
        if self._program.replicas is None:
            return [None] * len(self.recordings)
        replicas = self._program.replicas(self.state, self._constants.numbers)
        unravel = jax.vmap(self._program.flat.unravel)
        return [
            jax.tree.map(np.asarray, unravel(jnp.asarray(member)))
            for member in self._of_members(replicas)
        ]

    def _spread(self) -> Any:
        """Return the living replicas' mean squared distance from the central variable."""
        assert self._program.replicas is not None
        counted = self._counted if self._counted.any() else self._program.honest
        replicas = self._program.replicas(self.state, self._constants.numbers)[..., counted, :]
        return jnp.mean(jnp.sum((replicas - self._central()[..., None, :]) ** 2, -1), -1)

    def _take(self, starts: np.ndarray, numbers: Any, shown_looks: Any) -> None:
        numbers = np.asarray(numbers)
        looks = self._plan.looks[:, starts[0]].tolist()
        members = zip(
            self._of_members(numbers), self._of_members(shown_looks), self.recordings, strict=True
        )
        for member_numbers, member_looks, recording in members:
            if recording.diverged_at is None:
                recording.take(starts, member_numbers, itertools.compress(member_looks, looks))
        self.position = max(recording.position for recording in self.recordings)

    def _of_members(self, tree: Any) -> list[Any]:
        """Return each member's part of arrays with a leading axis of members."""
        if not self._batched:
            return [tree]
        arrays = jax.tree.map(np.asarray, tree)
        return [
            jax.tree.map(lambda leaf, i=i: leaf[i], arrays) for i in range(len(self.recordings))
        ]

    def _mean_problem_state(self) -> Any:
        """Return the workers' mean of the problem's non-trained state; None without one."""
        if self._problem.init_state is None:
            return None

        def mean(leaf: Any) -> Any:
            return jnp.mean(leaf, 0) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf[0]

        return jax.tree.map(
            jax.vmap(mean) if self._batched else mean,
            self._program.engine.problem_states(self.state),
        )


def start(problem: Problem, seed: int, dtype: Any, workers: int) -> tuple[Start, jax.Array]:
    """Return a seed's initial parameters and the key of the problem's randomness.

    Raises
    ------
    InputError
        A worker's initial parameters have other shapes than the problem's.
    """
    init_key, key = jax.random.split(purpose_key(seed, "problem"))
    params = cast(jax.jit(problem.init)(init_key), dtype)
    if problem.init_replica is None:
        return Start(params), key
    replicas = []
    for worker in range(workers):
        init_replica = naming(f"init_replica(key, {worker})", problem.init_replica)
        replica = cast(init_replica(init_key, worker), dtype)
        shapes, expected = (tree_text(jax.tree.map(jnp.asarray, x)) for x in (replica, params))
        if shapes != expected:
            raise InputError(
                f"init_replica(key, {worker}): returned {shapes}: must return initial parameters "
                f"like those of init, {expected}, for every worker"
            )
        replicas.append(replica)
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *replicas)
    # Differences from the first replica, so that the mean of equal replicas is exact.
    mean = jax.tree.map(lambda leaf: leaf[0] + jnp.mean(leaf - leaf[0], 0), stacked)
    return Start(mean, stacked), key


def problem_state(problem: Problem, dtype: Any) -> Any:
    """Return the problem's non-trained state at the start; ``()`` without one."""
    return cast(problem.init_state(), dtype) if problem.init_state else ()


def tensor_names(params: Any) -> list[str]:
    """Return the names of the tensors of a tree of parameters."""
    return [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(params)]
