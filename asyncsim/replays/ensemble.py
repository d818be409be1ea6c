"""Ensembles: seeds and hyper-parameter values that share a trace, replayed together."""

import functools
import inspect
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from asyncsim.base.errors import InputError, require_choice, require_count, require_switch
from asyncsim.base.tracing import forget_other_precision, jax_settings
from asyncsim.byzantine.attacks import Attack, parse_attack
from asyncsim.methods.method import Method
from asyncsim.problems.problem import Problem
from asyncsim.replays.attacked import among_the_living, under_attack, warn_of_weakness
from asyncsim.replays.check import check_method
from asyncsim.replays.local import Constants
from asyncsim.replays.observing import columns
from asyncsim.replays.plan import Plan
from asyncsim.replays.programs import Family, compiled_ensemble, on_vectors
from asyncsim.replays.recorders import Recorder
from asyncsim.replays.recording import Recording
from asyncsim.replays.replay import (
    PRECISIONS,
    check_replay,
    evaluation_stops,
    has_samples,
    look_every,
    replay,
    run_to_the_end,
)
from asyncsim.replays.run import Run
from asyncsim.replays.running import Running, start, tensor_names
from asyncsim.replays.state import Recorders
from asyncsim.replays.tuning import batches_members, default_devices
from asyncsim.traces.trace import Trace


def replay_ensemble(
    trace: Trace,
    factory: Callable[..., Method],
    problem: Problem,
    *,
    seeds: Iterable[int] = (0,),
    precision: str = "float32",
    evaluate_every: int | None = None,
    attack: Attack | str | None = None,
    record: Sequence[Recorder] = (),
    progress: bool | None = None,
    batched: bool | None = None,
    **hyperparameters: Any,
) -> list[Run]:
    """Replay a trace for every seed and every combination of hyper-parameter values.

    Parameters
    ----------
    trace : Trace
    factory : function
        Makes the method from its hyper-parameters, for example `asyncsim.methods.gem`.
    problem : Problem
    seeds : iterable of int
    precision, evaluate_every, attack, record, progress
        As in `asyncsim.replay`.
    batched : bool, optional
        Whether all runs are computed as one, in batches over them; by default where that is faster:
        on accelerators, and on a CPU for problems of few parameters. Else they run one by one, as
        do those of several servers.
    **hyperparameters
        Of the factory. A list, tuple or array holds the values to combine; any other value is the
        same for all. If batched, values to combine are numbers used in arithmetic alone.

    Returns
    -------
    list of Run
        Seeds vary slowest, the last hyper-parameter fastest. Each is the run of `replay`, up to the
        order of floating-point sums. A run that diverges ends there; the others continue.

    Raises
    ------
    InputError
        As in `replay`; a factory that is no function or lacks the hyper-parameter; no seeds or
        values; values to batch that are not numbers.

    Examples
    --------
    >>> from asyncsim import Cluster, Gamma, methods, problems, replay_ensemble, simulate
    >>> trace = simulate(Cluster(workers=4, compute=Gamma(mean=1.0, cv=0.2)), commits=40)
    >>> problem = problems.quadratic(curvature=[0.1, 1.0])
    >>> rates = [0.05, 0.1, 0.2]
    >>> runs = replay_ensemble(trace, methods.gem, problem, seeds=range(2), learning_rate=rates)
    >>> len(runs)
    6
    """
    if not isinstance(seeds, Iterable):
        raise InputError(f"seeds = {seeds!r}: must be several, [0, 1, 2] say, or range(3)")
    for name, switch in (("progress", progress), ("batched", batched)):
        if switch is not None:
            require_switch(name, switch)
    _check_factory(factory, hyperparameters)
    grid = _grid(factory, list(seeds), hyperparameters)

    def replay_each() -> list[Run]:
        # One object for each method, so that its seeds share programs.
        return [
            replay(
                trace,
                method,
                problem,
                seed,
                precision=precision,
                evaluate_every=evaluate_every,
                attack=attack,
                record=record,
                progress=progress,
            )
            for seed, method in grid.runs()
        ]

    # With rollouts the program serves all learning rates: runs one by one compile once.
    if has_samples(trace, grid.methods[0], problem):
        return replay_each()
    attack, learnt = parse_attack(attack), problem
    config = {"precision": precision, "attack": attack and attack.text, **jax_settings()}
    recorders = check_replay(trace, grid.methods[0], problem, record)
    if batched and trace.servers > 1:
        raise InputError(
            f"batched = True: replays of several servers ({trace.servers}) run one by one; leave "
            "batched out"
        )
    if batched is None and trace.servers == 1:
        batched = batches_members(problem.parameter_count) and grid.can_be_batched(problem)
    if not batched:
        for method in grid.methods[1:]:  # members of a batch differ in numbers alone
            check_replay(trace, method, problem, record)
        return replay_each()
    grid.numbers(jnp.float32)  # first, for an error that names the values that are no numbers
    if not grid.can_be_batched(problem):
        names = " or ".join(grid.combinations[0])
        raise InputError(
            f"{names}: a count or a choice of the method must be the same in a batch; give "
            "batched=False"
        )
    with jax.enable_x64(require_choice("precision", precision, PRECISIONS) == "float64"):
        # Members are made from traced values: each trace makes a new method, never a cached one.
        dtype = jnp.dtype(precision)
        grid = grid.changed(lambda method: on_vectors(method, learnt, dtype))
        if attack is not None:
            warn_of_weakness(attack, trace.workers)
            _, problem = under_attack(grid.methods[0], problem, attack, trace.workers)
            grid = grid.changed(
                lambda method: under_attack(method, learnt, attack, trace.workers)[0]
            )
            recorders = check_replay(trace, grid.methods[0], problem, record)
        accepted = trace.accepted
        grid = grid.changed(lambda method: among_the_living(method, accepted, attack))
        forget_other_precision()
        trace = trace.accepted
        stops = evaluation_stops(trace, evaluate_every)
        ends = np.union1d(stops, len(trace)).astype(int)
        running = _running(trace, grid, problem, dtype, ends, recorders)
        run_to_the_end(
            running, stops, f"{grid.methods[0].name} x {len(running.recordings)}", progress
        )
        return [
            recording.run(method, learnt, params, {"seed": seed} | config, replicas)
            for (seed, method), recording, params, replicas in zip(
                grid.runs(), running.recordings, running.params(), running.replicas(), strict=True
            )
        ]


class _Grid(NamedTuple):
    """The runs of an ensemble.

    Attributes
    ----------
    factory : function
        With the hyper-parameters that all share.
    seeds : list of int
    combinations : list of dict
        The hyper-parameters that differ, by name.
    methods : list of Method
        One for each combination.
    """

    factory: Callable[..., Method]
    seeds: list[int]
    combinations: list[dict[str, Any]]
    methods: list[Method]

    def changed(self, change: Callable[[Method], Method]) -> "_Grid":
        """Return the grid whose factory changes each method that it makes."""
        make = self.factory

        def factory(**values: Any) -> Method:
            return change(make(**values))

        methods = [factory(**values) for values in self.combinations]
        return self._replace(factory=factory, methods=methods)

    def runs(self) -> list[tuple[int, Method]]:
        return list(itertools.product(self.seeds, self.methods))

    def numbers(self, dtype: Any) -> dict[str, jax.Array]:
        """Return the combinations, once for each seed, as arrays of shape ``[members]``.

        Raises
        ------
        InputError
            Values that are no numbers.
        """
        differing = {}
        for name in self.combinations[0]:
            values = [combination[name] for combination in self.combinations]
            # A bool is a choice between programs, and members share one program.
            if any(
                isinstance(value, bool) or not isinstance(value, int | float | np.number)
                for value in values
            ):
                raise InputError(
                    f"{name} = {values!r}: values of one batch must be numbers; run them with "
                    "batched=False"
                )
            differing[name] = jnp.tile(jnp.asarray(values, dtype), len(self.seeds))
        return differing

    def can_be_batched(self, problem: Problem) -> bool:
        """Return whether factory and method accept traced values: no counts, no choices."""

        def check_member(values: Any) -> int:
            check_method(self.factory(**values), params)
            return 0

        if not self.combinations[0]:
            return True
        try:
            params = problem.shapes
            jax.eval_shape(jax.vmap(check_member), self.numbers(jnp.float32))
        except (TypeError, InputError):
            return False
        return True


def _check_factory(factory: Any, hyperparameters: dict[str, Any]) -> None:
    if not callable(factory):
        hint = (
            "; give the function that makes it, methods.gem without brackets"
            if isinstance(factory, Method)
            else ""
        )
        raise InputError(f"factory: is a {type(factory).__name__}, must be a function{hint}")
    try:
        signature = inspect.signature(factory)
    except ValueError:  # a built-in without one
        return
    try:
        signature.bind(**hyperparameters)
    except TypeError as error:
        raise InputError(
            f"hyperparameters: {error}; the factory takes {', '.join(signature.parameters)}"
        ) from None


def _grid(
    factory: Callable[..., Method], seeds: list[int], hyperparameters: dict[str, Any]
) -> _Grid:
    if not seeds:
        raise InputError("seeds: none given; give at least one")
    seeds = [require_count("seeds", seed, minimum=0) for seed in seeds]
    if len(set(seeds)) < len(seeds):
        raise InputError(f"seeds = {seeds}: one of them is there twice; give each once")
    differing = {name: list(value) for name, value in hyperparameters.items() if _is_many(value)}
    for name, values in differing.items():
        if not values:
            raise InputError(f"{name}: no values given; give at least one")
    shared = {name: value for name, value in hyperparameters.items() if name not in differing}
    combinations = [
        dict(zip(differing, values, strict=True))
        for values in itertools.product(*differing.values())
    ]
    factory = functools.partial(factory, **shared)
    return _Grid(
        factory, seeds, combinations, [factory(**combination) for combination in combinations]
    )


def _is_many(value: Any) -> bool:
    # An optimizer of optax is a NamedTuple: a tuple, but a single value.
    is_single = isinstance(value, str) or hasattr(value, "_fields")
    return (isinstance(value, Sequence) and not is_single) or getattr(value, "ndim", 0) == 1


def _running(
    trace: Trace,
    grid: _Grid,
    problem: Problem,
    dtype: Any,
    stops: np.ndarray,
    recorders: Recorders,
) -> Running:
    """Build the replay of all members, at its start."""
    device = default_devices(problem.parameter_count)[0]
    runs, first_method = grid.runs(), grid.methods[0]
    seeds = [seed for seed, _ in runs]
    # Not all members need draws: with a noise of zero a method has none.
    draws = any(method.needs_key for method in grid.methods)
    same_reply = any(method.same_reply for method in grid.methods)
    looks = look_every(recorders)
    plan = Plan(trace, problem, seeds, stops, looks, dtype, [device], "batch", draws, same_reply)
    family = Family(lambda numbers: grid.factory(**numbers), first_method)
    program = compiled_ensemble(
        family, recorders, problem, plan.layout(first_method), dtype, device
    )
    starts = {seed: start(problem, seed, dtype, trace.workers) for seed in grid.seeds}
    initial = jax.tree.map(
        lambda *leaves: jnp.stack(leaves), *(starts[seed][0] for seed, _ in runs)
    )
    key = jnp.stack([starts[seed][1] for seed, _ in runs])
    names = tensor_names(starts[grid.seeds[0]][0].params)
    return Running(
        problem,
        plan,
        program,
        initial,
        Constants(key, grid.numbers(dtype)),
        dtype,
        [Recording(trace, names, columns(recorders)) for _ in runs],
    )
