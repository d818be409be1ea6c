"""Trees as vectors: joined or written in parts, the same."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from asyncsim.replays.flat import flatten

TREE = {"weight": jnp.arange(6.0).reshape(2, 3) + 1, "bias": jnp.array(7.0), "none": jnp.zeros((0, 4))}


@pytest.mark.parametrize("padded", [None, 7, 10])
def test_written_in_parts_or_joined_it_is_the_same(padded):
    joined, written = (flatten(TREE, padded, in_parts) for in_parts in (False, True))
    steps = [str(jax.make_jaxpr(flat.ravel)(TREE)) for flat in (joined, written)]
    assert ["dynamic_update_slice" in text for text in steps] == [False, True]
    vector = jax.jit(written.ravel)(TREE)
    assert vector.dtype == joined.ravel(TREE).dtype
    assert np.array_equal(vector, joined.ravel(TREE))
    assert jax.tree.all(jax.tree.map(np.array_equal, written.unravel(vector), TREE))


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="what XLA makes of it on a CPU")
def test_the_memory_that_parts_are_written_into_is_not_made_of_the_first_of_them():
    tree = {"bias": jnp.ones(1000), "weight": jnp.ones((999, 1001))}
    written = jax.jit(flatten(tree, in_parts=True).ravel).lower(tree).compile().as_text()
    assert " dynamic-update-slice(" in written
    assert " pad(" not in written and " copy(" not in written


@pytest.mark.parametrize("padded", [None, 10])
def test_a_row_is_set_to_the_vector_and_no_other(padded):
    flat = flatten(TREE, padded)
    vector = flat.ravel(TREE)
    rows = jax.jit(flat.set_row)(jnp.zeros((3, vector.size)), TREE, jnp.int32(1))
    assert np.array_equal(rows, jnp.stack([0 * vector, vector, 0 * vector]))
