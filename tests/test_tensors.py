"""Methods that see tensors: the same numbers as the method of vectors in every way of replaying;
Muon's singular values.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
import test_real
from cases import combining, make_problem, make_torn, make_trace
from formulas import JORDAN, POLAR_EXPRESS, newton_schulz
from jax.flatten_util import ravel_pytree

from asyncsim import (
    Cluster,
    Gamma,
    InputError,
    methods,
    problems,
    recorders,
    replay,
    simulate,
)
from asyncsim.methods import Applied, Method, declared, gradient_steps
from asyncsim.methods.ringmaster_lmo import orthogonalized

pytestmark = pytest.mark.usefixtures("float64")
DIGITS = make_problem("digits")


def init(key):
    return {"a": jnp.ones(()), "W": jax.random.normal(key, (2, 3)), "b": (jnp.ones(4),)}


def loss(params, batch, key):
    noise = jax.random.normal(key, (4,))
    terms = [jnp.sum((leaf - 2) ** 2) for leaf in jax.tree.leaves(params)]
    return sum(terms) / 2 + 0.1 * jnp.sum(noise.astype(terms[0].dtype) * params["b"][0])


#: A matrix, a vector and a number, with noisy gradients.
TASK = problems.custom(init=init, loss=loss)


def in_tensors(method, problem=TASK):
    """The method whose server sees trees of parameters, and its own vectors inside."""
    vector_of_params, tree = ravel_pytree(problem.init(jax.random.key(0)))
    structure = jax.tree.structure(tree(vector_of_params))

    def is_tree(value):
        return jax.tree.structure(value) == structure

    def vector(value):
        return jax.tree.map(
            lambda part: ravel_pytree(part)[0] if is_tree(part) else part, value, is_leaf=is_tree
        )

    def apply(server, central, message, *others):
        applied = method.apply(server, vector(central), vector(message), *others)
        return applied._replace(central=tree(applied.central))

    def combine(server, central, messages, visits):
        applied = method.combine(server, vector(central), jax.vmap(vector)(messages), visits)
        return applied._replace(central=tree(applied.central))

    changed = {
        "apply": apply,
        "combine": method.combine and combine,
        "init_server": lambda central: method.init_server(vector(central)),
        "reply": method.reply
        and (lambda server, central, *rest: tree(method.reply(server, vector(central), *rest))),
    }
    if method.combine:
        del changed["apply"]
    return method._replace(space="tensors", recipe=None, **changed)


def failing(**options):
    crash = "crash(every=8, lasts=2)"
    return simulate(Cluster(4, Gamma(1.0, 0.4), failures=[crash], **options), 80)


CASES = {
    "updates": (methods.downpour, make_trace(commits=80)),
    "diagnostics, origin and proxy": (
        methods.gem,
        make_trace("read_then_write, two visits", commits=80),
    ),
    "memory and reply": (lambda: methods.dana_zero(0.01), make_trace(commits=80)),
    "resume": (methods.aeasgd, make_trace(window=3, commits=80)),
    "torn reads": (methods.hogwild, make_torn(8, commits=120)),
    "combine": (
        lambda: methods.batch_sgd(policy="barrier(3)"),
        make_trace(policy="barrier(3)", commits=80),
    ),
    "combine and receive a tree": (combining, make_trace(policy="barrier(3)", commits=80)),
    "all memories": (lambda: methods.zeno_pp(rho=0.004), make_trace(commits=80)),
    "restarts": (lambda: methods.gem(0.01), failing()),
}
#: In the default run: one of each border.
DEFAULT = {"diagnostics, origin and proxy", "memory and reply", "combine and receive a tree"}


def unless(default, *values):
    return pytest.param(*values, marks=[] if default else pytest.mark.full)


@pytest.mark.parametrize("name", [unless(name in DEFAULT, name) for name in CASES])
def test_a_method_of_tensors_is_its_method_of_vectors(name, problem=TASK):
    make, trace = CASES[name]
    shows = name.startswith("diagnostics")
    record = [recorders.energy(), recorders.diagnostics(every=5)] if shows else []
    flat = make()
    runs = [
        replay(trace, method, problem, precision="float64", record=record)
        for method in (flat, in_tensors(flat, problem))
    ]
    for column in ("loss", "update_norm", *(["central_energy"] * shows)):
        np.testing.assert_allclose(*(run.commits[column] for run in runs), rtol=1e-9)
    for pair in zip(*(jax.tree.leaves(run.params) for run in runs), strict=True):
        np.testing.assert_allclose(*pair, rtol=0, atol=1e-11)
    if shows:
        np.testing.assert_allclose(*(run.diagnostics["value"] for run in runs), atol=1e-9)


@pytest.mark.parametrize(
    ("name", "attack"),
    [
        unless(True, "updates", "alie(workers=2)"),
        unless(False, "combine", "inner_product(workers=2)"),
    ],
)
def test_attacks_act_on_the_vector_of_a_message(name, attack):
    make, trace = CASES[name]
    flat = make()
    runs = [
        replay(trace, method, TASK, precision="float64", attack=attack)
        for method in (flat, in_tensors(flat))
    ]
    honest = replay(trace, flat, TASK, precision="float64")
    for pair in zip(*(jax.tree.leaves(run.params) for run in runs), strict=True):
        np.testing.assert_allclose(*pair, rtol=0, atol=1e-11)
    assert not np.allclose(runs[0].commits["loss"], honest.commits["loss"])


@declared
def scaled(learning_rate=0.05, trust=0.02):
    """LARS at the server: each tensor's step has a length in proportion to the tensor's."""

    def apply(server, central, message, memory, visit):
        def step(x, g):
            return x - learning_rate * trust * jnp.linalg.norm(x) / (jnp.linalg.norm(g) + 1e-9) * g

        return Applied(jax.tree.map(step, central, message), server, memory)

    return Method(optax.identity(), apply=apply, space="tensors")


# Real processes


def test_a_recording_is_its_replay(optimized):
    assert test_real.difference(test_real.recorded_here(test_real.task_of(scaled()))) < 1e-12


# Checks


def mine(**fields):
    fields = {"optimizer": gradient_steps(0.1), "space": "tensors"} | fields
    return Method(name="mine", **fields)


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


def test_stale_gradients_are_cancelled_or_refused():
    """The policy is part of the method, and is its name in tables."""
    for policy, outcome in (("cancel_stale(2)", "cancelled"), ("discard_stale(2)", "discarded")):
        method = methods.ringmaster_lmo(policy=policy)
        assert method.hyperparameters["policy"] == f"{policy[:-2]}limit=2)"
        trace = simulate(Cluster(6, Gamma(1.0, 0.4), policy=policy), 120)
        assert (trace.frame["outcome"] == outcome).any()
        assert trace.accepted.frame["staleness"].max() < 2
        loss = replay(trace, method, DIGITS).evaluations["train_loss"]
        assert loss.iloc[-1] < 0.6 * loss.iloc[0]
    with pytest.raises(InputError, match="policy = "):
        replay(make_trace(commits=40), method, DIGITS)


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
