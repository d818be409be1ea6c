"""Ensembles: seeds and hyper-parameter values that share a trace, replayed together."""

import inspect
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from asyncsim.base.errors import InputError, require_choice, require_count, require_switch
from asyncsim.base.tracing import forget_other_precision
from asyncsim.byzantine.attacks import Attack, parse_attack
from asyncsim.methods.method import Method
from asyncsim.problems.problem import Problem
from asyncsim.replays.attacked import warn_of_weakness
from asyncsim.replays.recorders import Recorder
from asyncsim.replays.replay import (
    PRECISIONS,
    check_replay,
    configuration,
    evaluation_stops,
    has_samples,
    replay,
    replayed_as,
    run_to_the_end,
)
from asyncsim.replays.run import Run
from asyncsim.replays.running import Running, SeveralProgramsError
from asyncsim.replays.tuning import batches_members, default_device
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
        on accelerators, and on a CPU for problems of few parameters. Else they run one by one.
    **hyperparameters
        Of the factory. A list, tuple or array holds the values to combine; any other value is the
        same for all. If batched, the methods differ in numbers used in arithmetic alone.

    Returns
    -------
    list of Run
        Seeds vary slowest, the last hyper-parameter fastest. Each is the run of `replay`, up to the
        order of floating-point sums. A run that diverges ends there; the others continue.

    Raises
    ------
    InputError
        As in `replay`; a factory that is no function or lacks the hyper-parameter; no seeds or
        values; methods to batch that do not share a program.

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
    for method in grid.methods:
        recorders = check_replay(trace, method, problem, record)
    runs, wanted = grid.runs(), batched
    if batched is None:
        wanted = batches_members(problem.parameter_count)
    if not wanted or len(runs) == 1:
        return replay_each()
    attack, trace = parse_attack(attack), trace.accepted
    with jax.enable_x64(require_choice("precision", precision, PRECISIONS) == "float64"):
        forget_other_precision()
        dtype, device = jnp.dtype(precision), default_device()
        stops = evaluation_stops(trace, evaluate_every)
        ends = np.union1d(stops, len(trace)).astype(int)
        members = [replayed_as(method, problem, trace, attack, dtype) for _, method in runs]
        computed = [(seed, member) for (seed, _), (member, _) in zip(runs, members, strict=True)]
        _, attacked = members[0]
        try:
            running = Running(trace, attacked, computed, recorders, ends, dtype, device, "batch")
        except SeveralProgramsError as error:
            if not batched:
                return replay_each()
            raise InputError(
                f"{' or '.join(grid.differing)}: a count or a choice must be the same in a batch; "
                "give batched=False"
            ) from error
        warn_of_weakness(attack, trace.workers)
        run_to_the_end(running, stops, f"{runs[0][1].name} x {len(runs)}", progress)
        results = running.recordings, running.params(), running.replicas()
        return [
            recording.run(
                method, problem, params, {"seed": seed} | configuration(precision, attack), replicas
            )
            for (seed, method), recording, params, replicas in zip(runs, *results, strict=True)
        ]


class _Grid(NamedTuple):
    """The runs of an ensemble: every seed with every method."""

    seeds: list[int]
    methods: list[Method]
    differing: list[str]  #: names of the hyper-parameters with several values

    def runs(self) -> list[tuple[int, Method]]:
        return list(itertools.product(self.seeds, self.methods))


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
    combinations = itertools.product(*differing.values())
    methods = [
        factory(**shared, **dict(zip(differing, values, strict=True))) for values in combinations
    ]
    return _Grid(seeds, methods, list(differing))


def _is_many(value: Any) -> bool:
    # An optimizer of optax is a NamedTuple: a tuple, but a single value.
    is_single = isinstance(value, str) or hasattr(value, "_fields")
    return (isinstance(value, Sequence) and not is_single) or getattr(value, "ndim", 0) == 1
