"""Functions of a user's that fail: what went wrong, and in which line of which file."""

import inspect
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from asyncsim import InputError, problems
from asyncsim.method_check import check_method
from asyncsim.methods import Method, gradient_steps
from asyncsim.tracing import told

X = np.zeros((20, 5), np.float32)


def too_long(params, batch, key):
    return jnp.mean(batch @ params)


def looks_at_values(params, batch, key):
    return float(jnp.mean(batch))


def unknown(worker, update, start, central, visit):
    return nowhere(update), worker, {}  # noqa: F821  the mistake


def line_of(function):
    return f"({Path(__file__).name}, line {inspect.getsourcelines(function)[1] + 1})"


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (too_long, "loss(params, batch, key): failed: TypeError: dot_general requires "),
        (looks_at_values, "loss(params, batch, key): failed: ConcretizationTypeError: "),
    ],
)
def test_losses(loss, message):
    with pytest.raises(InputError) as error:
        problems.custom(lambda key: jnp.zeros(4), loss, X, batch_size=2)
    assert str(error.value).startswith(message) and str(error.value).endswith(line_of(loss))
    assert "\n" not in str(error.value)


def test_methods():
    method = Method("mine", {}, gradient_steps(0.1), message=unknown)
    with pytest.raises(InputError) as error:
        check_method(method, {"x": jnp.zeros(3)})
    assert str(error.value).endswith(f"failed: NameError: name 'nowhere' is not defined {line_of(unknown)}")


def test_trees_are_told_by_kinds_and_shapes():
    assert told({"a": jnp.zeros((2, 3), jnp.float32), "b": None}) == "{'a': float32[2, 3], 'b': None}"
