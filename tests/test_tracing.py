"""Functions of a user's that fail: what went wrong, and in which line of which file."""

import inspect
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from asyncsim import InputError, problems
from asyncsim.base import tracing
from asyncsim.methods import Method, gradient_steps
from asyncsim.replays.check import check_method

X = np.zeros((20, 5), np.float32)


def too_long(params, batch, key):
    return jnp.mean(batch @ params)


def looks_at_values(params, batch, key):
    return float(jnp.mean(batch))


def not_in_jax(params, batch, key):
    return jnp.float32(np.asarray(batch).sum())


def unknown(worker, update, start, central, visit):
    return nowhere(update), worker, {}  # noqa: F821  the mistake


def line_of(function):
    return f"({Path(__file__).name}, line {inspect.getsourcelines(function)[1] + 1})"


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (too_long, "loss(params, batch, key): failed: TypeError: dot_general requires "),
        (looks_at_values, "loss(params, batch, key): failed: ConcretizationTypeError: "),
        (not_in_jax, "loss(params, batch, key): failed: TracerArrayConversionError: "),
    ],
)
def test_losses(loss, message):
    with pytest.raises(InputError) as error:
        problems.custom(lambda key: jnp.zeros(4), loss, X, batch_size=2)
    assert str(error.value).startswith(message) and str(error.value).endswith(line_of(loss))
    assert "\n" not in str(error.value)


def test_what_is_computed_outside_of_jax_has_another_remedy():
    for loss in (looks_at_values, not_in_jax):
        with pytest.raises(
            InputError, match=r"; compute with jax\.numpy, without float\(\) and int\(\) \(test_"
        ):
            problems.custom(lambda key: jnp.zeros(4), loss, X, batch_size=2)


def test_other_functions_of_a_problem():
    def init(key):
        return unheard_of  # noqa: F821  the mistake

    def loss(params, batch, key):
        return jnp.sum(params) + jnp.sum(batch.reshape(2, 5))  # a batch, and never all examples

    def good(params, batch, key):
        return jnp.sum(params) + jnp.mean(batch)

    with pytest.raises(InputError, match=r"^init\(key\): failed: NameError"):
        problems.custom(init, good, X, batch_size=2)
    with pytest.raises(
        InputError, match=r"^loss of all examples, as there is no evaluate: failed: TypeError"
    ):
        problems.custom(lambda key: jnp.zeros(4), loss, X, batch_size=2)
    with pytest.raises(InputError, match=r"^evaluate\(params, data\): failed: AttributeError"):
        problems.custom(
            lambda key: jnp.zeros(4), good, X, batch_size=2, evaluate=lambda p, d: jnp.nope(p)
        )


@pytest.mark.parametrize(
    ("file", "own"),
    [
        (__file__, True),
        ("/tmp/ipykernel_1/123.py", True),
        ("<ipython-input-3-abc>", True),
        ("<string>", False),
        ("/home/me/.local/lib/python3.11/site-packages/flax/linen.py", False),
        (tracing.__file__, False),
        (f"{Path(tracing.__file__).parents[1]}_mine.py", True),
    ],
)
def test_whose_file_it_is(file, own):
    assert tracing._is_own(file) is own


def test_a_cell_has_no_name():
    scope = {}
    exec(
        compile("def fail():\n    raise ValueError('no')", "/tmp/ipykernel_1/123.py", "exec"), scope
    )
    message = r"^fail\(\): failed: ValueError: no \(a cell, line 2\)$"
    with pytest.raises(InputError, match=message), tracing.naming_failures("fail()"):
        scope["fail"]()


def test_methods():
    method = Method(gradient_steps(0.1), "mine", message=unknown)
    with pytest.raises(InputError) as error:
        check_method(method, {"x": jnp.zeros(3)})
    assert str(error.value).endswith(
        f"failed: NameError: name 'nowhere' is not defined {line_of(unknown)}"
    )


def test_what_is_drawn_or_counted_outside_of_jax_is_told():
    """It would be the same in all commits; what is drawn with JAX is traced the same each time."""
    calls = []

    def counts(params, batch, key):
        calls.append(key)
        return jnp.mean(batch) * len(calls)

    def draws(worker, update, start, central, visit):
        return update + np.random.default_rng().normal(size=4).astype(np.float32), worker, {}

    def draws_with_jax(worker, update, start, central, visit):
        key = jax.random.fold_in(jax.random.key(0), visit.commit)
        return update + jax.nn.relu(jax.random.normal(key, update.shape)), worker, {}

    with pytest.raises(
        InputError,
        match=r"loss\(params, batch, key\): computes something else when .* from the key",
    ):
        problems.custom(lambda key: jnp.zeros(4), counts, X, batch_size=2)
    with pytest.raises(
        InputError,
        match=r"own: a commit: .* something else .* from visit\.key, with needs_key=True",
    ):
        check_method(Method(gradient_steps(0.1), "own", message=draws), jnp.zeros(4))
    check_method(Method(gradient_steps(0.1), "own", message=draws_with_jax), jnp.zeros(4))
