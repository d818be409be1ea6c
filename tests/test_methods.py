"""The methods: what all of them keep to, and each against its paper."""

import dataclasses
import functools
import inspect
import json
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
import test_catalogue as catalogue
from formulas import JORDAN, POLAR_EXPRESS, newton_schulz

from asyncsim import (
    Cluster,
    Gamma,
    InputError,
    buffered,
    methods,
    prescribed,
    problems,
    recorders,
    replay,
    simulate,
)
from asyncsim.clusters.policy import as_policy
from asyncsim.methods import METHODS, Method, Timing, Visit, gradient_steps
from asyncsim.methods.compression import quantized
from asyncsim.methods.ringmaster_lmo import orthogonalized
from asyncsim.replays.check import check_method
from asyncsim.replays.plan import method_key, visit_key
from asyncsim.replays.replay import Replay
from asyncsim.study.cell import meet

CASES = {
    **METHODS,
    "gem, paper": functools.partial(methods.gem, variant="paper"),
    "gem without clip": functools.partial(methods.gem, pi_max=None),
    "downpour, own optimizer": functools.partial(methods.downpour, optimizer=optax.trace(0.9)),
    "downpour, schedule": functools.partial(
        methods.downpour, learning_rate=lambda visit: visit.time / 100
    ),
}
pytestmark = pytest.mark.usefixtures("float64")


@pytest.mark.parametrize("name", CASES)
def test_what_a_method_computes_has_the_shapes_and_the_type_of_its_vectors(name):
    """In single precision; `test_catalogue` computes in double precision."""
    # Ringmaster LMO needs matrices.
    tree = {"a": np.ones(()), "b": (np.ones((2, 3)), np.ones(4))}
    with jax.enable_x64(False):
        check_method(CASES[name](), tree if name == "ringmaster_lmo" else np.ones(5))


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
    """Those without a server have their loops in `test_gossip`."""
    without_server = {name for name, make in METHODS.items() if make().mix or make().meet}
    assert {name.partition(",")[0] for name in catalogue.RULES} | without_server == {*METHODS}


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


# Policies


PARAMS = problems.digits(hidden=(3,)).shapes


def by_loss(gradients, state, params=None, *, visit, **others):
    return jax.tree.map(lambda g: -g * visit.loss, gradients), state


def damped(**fields):
    return methods.downpour()._replace(name="damped", **fields)


@pytest.mark.parametrize("text", ["barrier(8)", "neighbours(mix=before)", "cancel_stale(3)"])
def test_timing_takes_a_policys_text_as_a_cluster_does(text):
    timing = Timing(policy=text)
    assert timing == Timing(policy=as_policy(text)) and hash(timing) == hash(timing)
    assert dataclasses.replace(Timing(), policy=text) == timing
    check_method(damped(timing=timing), np.ones(3))
    for policy in ("bariers(8)", buffered, 3):
        with pytest.raises(InputError, match="policy = "):
            Timing(policy=policy)


def test_a_method_with_a_policys_text_replays():
    trace = simulate(Cluster(4, 1.0, policy="barrier(2)"), 8)
    replay(trace, damped(timing=Timing(policy="barrier(count=2)")), problems.quadratic([1.0]))
    with pytest.raises(InputError, match=r"needs a trace with policy = barrier\(count=4\)"):
        replay(trace, damped(timing=Timing(policy="barrier(count=4)")), problems.quadratic([1.0]))


# Draws


def telling(**options):
    """DOWNPOUR that shows what it draws."""

    def message(worker, update, start, central, visit):
        return update, worker, {"drawn": jax.random.normal(visit.key, update.shape, update.dtype)}

    return Method(gradient_steps(0.05), "telling", message=message, needs_key=True, **options)


def drawn_by(workers, seed, **options):
    """What is drawn at each visit, its median, by worker and step."""
    trace = simulate(
        Cluster(workers=workers, compute="exponential(mean=1)"), 100 * workers, seed=seed
    )
    run = replay(
        trace,
        telling(**options),
        problems.quadratic(np.ones(5)),
        seed=seed,
        record=[recorders.diagnostics(1)],
        progress=False,
    )
    table = run.diagnostics.query("quantity == 'drawn' and quantile == 0.5 and tensor == ''")
    # A quadratic's only tensor has no name, and so the row of all has its twin.
    return table.groupby(["worker", "worker_step"])["value"].first()


def test_draws_hang_on_the_seed_the_worker_and_its_step_alone():
    few, more, other = drawn_by(2, 0), drawn_by(5, 0), drawn_by(2, 1)
    assert len(few) > 10 and few.is_unique
    both = few.index.intersection(more.index)
    assert len(both) > 5
    np.testing.assert_array_equal(few[both], more[both])
    assert not np.isin(other, few).any()
    # All workers' numbers differ, also those of the same step.
    assert more.is_unique


@pytest.mark.full
def test_each_local_step_draws_its_own():
    def update(gradients, state, params=None, *, visit, **_):
        return jax.tree.map(
            lambda leaf: jax.random.normal(visit.key, leaf.shape, leaf.dtype), gradients
        ), state

    steps = optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)
    walk = Method(steps, "walk", needs_key=True)
    for window in (1, 4):
        trace = prescribed(0, 50, 5, window)
        end = replay(
            trace, walk, problems.quadratic(np.full(400, 1e-6), start=0.0), progress=False
        ).params
        assert np.std(np.asarray(end)) == pytest.approx(np.sqrt(50 * window), rel=0.15)


@pytest.mark.parametrize(
    ("levels", "bucket", "size"),
    [
        (7, 64, 64),
        *(
            pytest.param(*case, marks=pytest.mark.full)
            for case in ((1, None, 300), (7, 100, 100), (3, 999, 300))
        ),
    ],
)
def test_quantized_messages_are_the_update_in_the_mean_and_within_their_bound(levels, bucket, size):
    vector = jax.random.normal(jax.random.key(1), (300,))
    places = (index.ravel() for index in np.indices((40, 50), np.int32))
    keys = jax.vmap(visit_key, (None, 0, 0))(method_key(0), *places)
    drawn = np.asarray(jax.vmap(lambda key: quantized(key, vector, levels, bucket))(keys))
    parts = np.array_split(np.asarray(vector), range(size, 300, size))
    norms = np.concatenate([np.full(len(part), np.linalg.norm(part)) for part in parts])
    on_levels = drawn * levels / norms
    np.testing.assert_allclose(on_levels, np.round(on_levels), atol=1e-4)
    # Of independent draws the mean would be this far away on average; it is not if those of visits
    # hang together.
    chance = levels * np.abs(vector) / norms % 1
    spread = norms / levels * np.sqrt(chance * (1 - chance) / len(drawn))
    assert 0.8 < np.sqrt(np.mean(((drawn.mean(0) - vector) / spread) ** 2)) < 1.2
    bound = 1 + min(size / levels**2, np.sqrt(size) / levels)
    assert 1 < (drawn**2).sum(1).mean() / (vector**2).sum() <= bound


def test_a_quantized_zero_is_zero():
    assert not np.asarray(quantized(method_key(0), jnp.zeros(10), 3, 4)).any()


def test_langevin_noise_has_its_stationary_variance():
    """2 noise^2 / ((h + 1 / gamma) (2 - a)), with a = learning rate (h + 1 / gamma), of a step that
    is not small.
    """
    size, h, rate, noise = 20_000, 0.7, 0.2, 0.3
    problem = problems.quadratic(np.full(size, h), start=np.zeros(size))
    method = methods.entropy_sgd(rate, gamma=1.0, noise=noise, decay=0.0, momentum=0.0)
    run = replay(
        simulate(Cluster(1, 1.0, window=60), 1),
        method,
        problem,
        precision="float64",
        progress=False,
    )
    expected = 2 * noise**2 / ((h + 1) * (2 - rate * (h + 1)))
    assert np.mean(np.asarray(run.params) ** 2) == pytest.approx(
        expected, rel=4 * np.sqrt(2 / size)
    )


# Muon


def spectrum(rows, columns, smallest, seed=0):
    """A matrix whose singular values fall geometrically, with a Frobenius norm of one."""
    rng, count = np.random.default_rng(seed), min(rows, columns)
    u, v = (np.linalg.qr(rng.normal(size=(size, count)))[0] for size in (rows, columns))
    s = np.geomspace(1, smallest, count)
    s /= np.linalg.norm(s)
    return u, s, v


@pytest.mark.parametrize("shape", [(5, 5), (4, 24), (24, 4)])
@pytest.mark.parametrize("length", [300.0])
def test_newton_schulz_is_the_polynomial_of_the_singular_values(shape, length):
    u, s, v = spectrum(*shape, smallest=1e-4)
    matrix = jnp.asarray(length * (u * s) @ v.T)
    expected = s * (length / (length + 1e-7))
    for a, b, c in POLAR_EXPRESS:
        expected = a * expected + b * expected**3 + c * expected**5
    scale = np.sqrt(max(1, shape[0] / shape[1]))
    result = np.asarray(orthogonalized(matrix)) / scale
    np.testing.assert_allclose(result, (u * expected) @ v.T, rtol=0, atol=1e-10)
    np.testing.assert_allclose(
        result, newton_schulz(np.asarray(matrix), POLAR_EXPRESS, 1e-7), rtol=0, atol=1e-10
    )


@pytest.mark.parametrize("precision", [jnp.float32])
def test_singular_values_end_near_one(precision):
    """The polynomial's own bounds are 0.85887 and 1.14113; float32 adds round-off."""
    room = 0.01
    for seed in range(10):
        for shape, smallest in (((8, 8), 1e-3), ((12, 40), 1e-5), ((60, 30), 1e-2)):
            u, s, v = spectrum(*shape, smallest, seed)
            result = orthogonalized(jnp.asarray((u * s) @ v.T, precision))
            values = np.linalg.svd(np.asarray(result, float), compute_uv=False)
            values /= np.sqrt(max(1, shape[0] / shape[1]))
            assert values.max() <= 1.14113 + room
            large = s >= 0.001
            assert values[: large.sum()].min() >= 0.85887 - room
    assert np.all(np.asarray(orthogonalized(jnp.zeros((3, 2)))) == 0)


def test_the_policy_that_a_method_is_given_is_part_of_it():
    """And its name in tables."""
    method = methods.ringmaster_lmo(policy="cancel_stale(2)")
    assert method.hyperparameters["policy"] == "cancel_stale(limit=2)"
    with pytest.raises(InputError, match="policy = "):
        replay(prescribed(0, 3, 1), method, problems.digits(hidden=(3,)))


@pytest.mark.parametrize(
    "make",
    [
        functools.partial(methods.async_local_sgd, server_optimizer=optax.contrib.muon(0.02)),
        functools.partial(methods.downpour, optimizer=optax.contrib.muon(0.02)),
    ],
)
def test_muon_steps_on_matrices_wherever_it_is(make, lenient):
    """The first step of a matrix has singular values near 1 times the rate."""
    task = problems.custom(
        init=lambda key: {"W": jnp.arange(12.0).reshape(3, 4) / 10, "b": jnp.zeros(3)},
        loss=lambda params, batch, key: (
            jnp.sum(jnp.sin(params["W"]) ** 2) + jnp.sum((params["b"] - 1) ** 2)
        ),
    )
    trace = simulate(Cluster(1, 1.0), 1)
    run = replay(trace, make(), task, precision="float64")
    start = task.init(jax.random.key(0))["W"]
    moved = (start - run.params["W"]) / 0.02 / np.sqrt(4 / 3)
    expected = newton_schulz(np.asarray(jnp.sin(2 * start)), JORDAN, 1e-8)
    np.testing.assert_allclose(moved, expected, atol=1e-6)
