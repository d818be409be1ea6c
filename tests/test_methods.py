"""The methods: what all of them keep to, and each against its paper."""

import functools
import inspect
import json
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import test_catalogue as catalogue
from event_loop import Memories, cast
from jax.flatten_util import ravel_pytree

from asyncsim import (
    Cluster,
    Gamma,
    InputError,
    methods,
    prescribed,
    problems,
    simulate,
)
from asyncsim.methods import METHODS, Visit, add
from asyncsim.methods.method import OF_MESSAGE
from asyncsim.replays.programs import on_vectors
from asyncsim.replays.replay import Replay, replay
from asyncsim.study.cell import meet

#: Methods without a server, held against their loops in `test_gossip`.
GOSSIP = {name for name, make in METHODS.items() if make().mix or make().meet}
CASES = {
    **{name: make for name, make in METHODS.items() if name not in GOSSIP},
    "gem, paper": functools.partial(methods.gem, variant="paper"),
    "gem without clip": functools.partial(methods.gem, pi_max=None),
    "downpour, own optimizer": functools.partial(methods.downpour, optimizer=optax.trace(0.9)),
    "downpour, schedule": functools.partial(
        methods.downpour, learning_rate=lambda visit: visit.time / 100
    ),
}
CATALOGUE = {name.partition(",")[0] for name in catalogue.RULES}
PROBLEMS = {
    "quadratic": lambda: problems.quadratic(np.linspace(0.1, 1, 5), noise=0.1),
    "tree": lambda: problems.custom(
        init=lambda key: {"a": jnp.ones(()), "b": (jnp.ones((2, 3)), jnp.ones(4))},
        loss=lambda params, batch, key: sum(
            jnp.sum((leaf - 2) ** 2) for leaf in jax.tree.leaves(params)
        ),
    ),
}


pytestmark = pytest.mark.usefixtures("float64")


# The contract, every method


def one_commit(method, problem, unravel, batch):
    """A commit as `Method` describes it."""
    optimizer = optax.with_extra_args_support(method.optimizer)

    def commit(state, visit, key):
        central, server, worker, optimizer_state, memory = state
        visit = visit._replace(delays=visit.staleness)
        worker = method.refresh(worker, central) if method.refresh else worker
        start = method.resume(worker, central) if method.resume else central
        at = unravel(start)
        if method.look_ahead:
            at = jax.tree.map(jnp.add, at, method.look_ahead(optimizer_state))
        gradients = jax.grad(problem.loss)(at, batch, key)
        steps, optimizer_state = optimizer.update(
            gradients, optimizer_state, unravel(start), visit=visit, start=unravel(start)
        )
        message, worker, diagnostics = method.message(
            worker, ravel_pytree(steps)[0], start, central, visit
        )
        visit = visit._replace(loss=problem.loss(unravel(start), batch, key))
        told = (
            [Memories(jax.tree.map(lambda leaf: jnp.stack([leaf] * 3), memory))]
            if method.sees_memories
            else []
        )
        if method.combine and method.apply is add and not hasattr(message, "shape"):
            of_message = {
                name: jax.tree.map(jnp.atleast_1d, getattr(visit, name)) for name in OF_MESSAGE
            }
            messages = jax.tree.map(lambda leaf: leaf[None], message)
            applied = method.combine(server, central, messages, visit._replace(**of_message))
            applied = applied._replace(memory=memory)
        else:
            applied = method.apply(server, central, message, memory, visit, *told)
        seen = (
            method.origin(worker, start) if method.origin else start,
            method.proxy(worker) if method.proxy else start,
            method.reply(applied.server, applied.central, applied.memory, visit)
            if method.reply
            else start,
        )
        return (
            (applied.central, applied.server, worker, optimizer_state, applied.memory),
            diagnostics,
            seen,
        )

    return commit


def shapes(tree):
    return jax.tree.map(lambda leaf: (jnp.shape(leaf), leaf.dtype), tree)


@pytest.mark.parametrize("name", CASES)
def test_what_a_method_computes_has_the_shapes_and_the_type_of_its_vectors(name):
    """In single precision; `test_catalogue` computes in double precision."""
    # Ringmaster LMO needs matrices.
    problem = PROBLEMS["tree" if name == "ringmaster_lmo" else "quadratic"]()
    dtype = jnp.float32
    method = on_vectors(CASES[name](), problem, dtype)
    params = cast(problem.init(jax.random.key(0)), dtype)
    central, unravel = ravel_pytree(params)
    batch = problem.train and jax.tree.map(lambda leaf: leaf[:4], cast(problem.train, dtype))
    state = (
        central,
        method.init_server(central),
        method.init_worker(central),
        method.optimizer.init(params),
        method.init_memory(central),
    )
    key = jax.random.key(1)
    visit = Visit(*map(jnp.int32, (3, 1, 1, 1)), jnp.ones((), dtype), jnp.int32(1))
    visit = visit._replace(key=key) if method.needs_key else visit
    commit = one_commit(method, problem, unravel, batch)
    new, diagnostics, seen = jax.eval_shape(commit, state, visit, key)
    assert shapes(new) == shapes(state)
    assert shapes(seen) == (shapes(central),) * 3
    for value in diagnostics.values():
        assert value.shape == central.shape and value.dtype in (dtype, bool)


# The factories


@pytest.mark.parametrize("name", METHODS)
def test_factories_name_and_explain_what_they_take(name):
    factory = METHODS[name]
    method, parameters = factory(), inspect.signature(factory).parameters
    assert method.name == name == factory.__name__
    assert all(
        p.default is not p.empty and p.annotation is not p.empty for p in parameters.values()
    )
    explained = f"{methods.__doc__}{factory.__doc__}"
    assert [
        parameter for parameter in parameters if not re.search(rf"\b{parameter}\b", explained)
    ] == []
    expected = {
        parameter: p.default for parameter, p in parameters.items() if "optimizer" not in parameter
    }
    assert dict(method.hyperparameters) == expected
    assert json.loads(json.dumps(dict(method.hyperparameters))) == expected


#: Values that each kind of argument refuses, and the arguments.
KINDS = {
    "above zero": (
        [0, -1, math.nan, "few"],
        "learning_rate pi_max gamma strength smoothness alpha "
        "beta server_rate weight radius outer_rate gamma_least rho_least",
    ),
    "zero or above": (
        [-0.1, math.nan, math.inf, "few"],
        "rho kappa threshold compensation spread shrink turn epsilon noise",
    ),
    "below one": (
        [-0.1, 1, math.nan, "few"],
        "blend momentum initial_momentum smoothing "
        "decay server_momentum worker_momentum step_pull scoping",
    ),
    "a share": (
        [0, 1.5, math.nan, "few"],
        "success fraction mixing pull global_pull keep shrink_limit",
    ),
    "a count": (
        [0, 2.5, "few", True],
        "fragments levels delay bucket blocks curvature_window period groups global_every count",
    ),
    "an index": ([-1, 2.5, "first", True], "overlap f trusted"),
    "a switch": (["yes", 1], "eager memory averaged look_ahead modulated adaptive"),
    "a choice": (["linear", "", 1], "average outer variant proxy_step form law rule order restart"),
    "a policy": (["buffred(10)", "buffered(0)", 3], "policy"),
    "tensors": (["all", [], 16], "tensors"),
}
BAD = {name: values for values, names in KINDS.values() for name in names.split()}


@pytest.mark.parametrize("name", METHODS)
def test_factories_refuse_what_cannot_be_used(name):
    factory = METHODS[name]
    for parameter in inspect.signature(factory).parameters:
        if "optimizer" in parameter:
            continue
        for value in BAD[parameter]:
            with pytest.raises(InputError, match="^" + parameter + " = ") as error:
                factory(**{parameter: value})
            assert repr(value) in str(error.value)


@pytest.mark.parametrize(
    "name",
    [
        *("gap_aware", "dc_asgd", "downpour", "gem"),
        *(pytest.param(name, marks=pytest.mark.full) for name in ("adag", "kardam")),
    ],
)
def test_a_rate_that_is_zero_at_some_visits(name):
    """A warm-up from zero, and zero again later: such a step leaves everything finite."""
    # The form that divides by it; and what so few workers allow.
    options = {"adag": {"form": "original"}, "kardam": {"f": 0}}.get(name, {})

    def rate(visit):
        return jnp.where(visit.commit == 7, 0.0, 0.1 * jnp.minimum(visit.worker_step / 3, 1.0))

    method = METHODS[name](learning_rate=rate, **options)
    workers = 1 if method.timing.workers == 1 else 3
    trace = simulate(meet(Cluster(workers, Gamma(1.0, 0.2)), method.timing), 15)
    assert replay(trace, method, problems.quadratic([0.5, 1.0]), progress=False).diverged_at is None


@pytest.mark.parametrize(
    "make",
    [
        methods.gap_aware,
        pytest.param(
            functools.partial(methods.dc_asgd, compensation=2.0, adaptive=True),
            marks=pytest.mark.full,
        ),
    ],
)
def test_gradients_of_steps_at_a_rate_of_zero_are_not_lost(make):
    """What the server keeps of them does not depend on the rate: a mean of squares, a velocity."""
    task = problems.quadratic([0.5, 1.0], start=[1.0, -2.0])

    def after_two(least):
        method = make(lambda visit: jnp.where(visit.commit < 1, least, 0.1))
        replayed = Replay(prescribed(0, 2, 1), method, task, precision="float64")
        replayed.advance(2)
        return replayed.state

    with jax.enable_x64(True):
        zero, faint = after_two(0.0), after_two(1e-13)
    assert all(np.asarray(leaf).any() for leaf in jax.tree.leaves(zero.server))
    for name in ("central", "server"):
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9),
            getattr(zero, name),
            getattr(faint, name),
        )


def test_arrivals_cannot_apply_more_than_the_whole_momentum():
    for spread in (0.3, np.float32(0.3)):
        with pytest.raises(InputError, match=r"^spread = .*: must be at most 1 / period = 0\.25"):
            methods.delayed_nesterov(period=4, spread=spread)
    # As many arrivals as workers: who these are, the trace says.
    task, trace = problems.quadratic([0.5, 1.0]), prescribed(3, 40, 4)
    ends = [
        replay(trace, methods.delayed_nesterov(spread=share), task, progress=False).params
        for share in (0.3, 0.25)
    ]
    np.testing.assert_array_equal(*ends)


# GEM


def test_every_method_has_a_formula():
    assert CATALOGUE | GOSSIP | {"entropy_sgd", "parle"} == {*METHODS}


@pytest.mark.parametrize(
    ("variant", "sign"), [("program", 1), ("program", -1), ("paper", 1), ("paper", -1)]
)
def test_gems_epsilons(variant, sign):
    """The program's epsilon is added to the signed update, the paper's to its size."""
    method = methods.gem(variant=variant, pi_max=None, momentum=0.5)
    u = sign * np.array([3e-12, 5e-16, 1e-3])
    m, x, pulled = (
        np.array([0.1, -0.2, 0.3]),
        np.array([1.0, 2.0, 3.0]),
        np.array([1.01, 1.95, 3.0]),
    )
    worker = method.init_worker(jnp.zeros(3))._replace(
        momentum=jnp.asarray(m), pulled=jnp.asarray(pulled)
    )
    pi = method.message(worker, jnp.asarray(u), None, jnp.asarray(x), None)[2]["pi"]
    size = np.abs(u) + 1e-16 if variant == "paper" else np.abs(u + 1e-12)
    np.testing.assert_allclose(pi, (np.abs(0.5 * m + u) - np.abs(x - pulled)) / size, rtol=1e-13)


@pytest.mark.parametrize(("kappa", "pi_max"), [(2.0, 3.0), (0.5, None)])
def test_gems_kappa_and_clip(kappa, pi_max):
    method = methods.gem(kappa=kappa, pi_max=pi_max, momentum=0.0)
    u, d = np.array([1.0, -2.0, 0.1, -1.0]), np.array([0.0, 1.0, 3.0, -0.5])
    worker = method.init_worker(jnp.zeros(4))
    message, after, shown = method.message(worker, jnp.asarray(u), None, jnp.asarray(d), None)
    pi = (kappa * np.abs(u) - np.abs(d)) / np.abs(u)
    pi = pi if pi_max is None else np.clip(pi, 0, pi_max)
    np.testing.assert_allclose(message, pi * u, rtol=1e-10)
    assert shown["opposite_sign"].tolist() == [False, True, False, False]
    assert np.array_equal(after.momentum, u) and np.array_equal(after.pulled, d)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(("difference", "applied"), [(0.0, True), (4.0, True), (1e6, False)])
def test_kardam_takes_updates_that_differ_by_round_off_as_equal(dtype, difference, applied):
    """Two updates at one point, some units of round-off apart."""
    with jax.enable_x64(dtype == "float64"):
        central = jnp.asarray([1.0, -2.0, 0.5], dtype)
        method = methods.kardam(0.1, f=1)
        memory = method.init_memory(central)._replace(update=-0.1 * central)
        update = memory.update * (1 + difference * float(jnp.finfo(dtype).eps))
        zero = jnp.int32(0)
        visit = Visit(
            staleness=zero,
            worker=zero,
            worker_step=zero + 1,
            commit=zero,
            time=zero,
            local_steps=zero + 1,
        )

        class Coefficients:
            def of_all(self, name):
                return jnp.asarray([-1.0, 1.0, 1.0, 1.0], dtype)

        after = method.apply(
            method.init_server(central), central, update, memory, visit, Coefficients()
        )
    np.testing.assert_allclose(after.central, central + update if applied else central, rtol=1e-6)
    assert float(after.memory.lipschitz) == (0 if applied else float(jnp.finfo(dtype).max))
