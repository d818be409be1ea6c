"""What Kardam takes as equal."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from asyncsim import methods
from asyncsim.methods import Visit


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
