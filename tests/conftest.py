"""Strict JAX for all tests: no implicit promotion between types; one device unless a test asks for more."""

import jax
import pytest

# Before anything asks JAX for its devices.
jax.config.update("jax_num_cpu_devices", 3)


@pytest.fixture(autouse=True, scope="session")
def strict_promotion():
    jax.config.update("jax_numpy_dtype_promotion", "strict")


@pytest.fixture(autouse=True, scope="session")
def one_device():
    jax.config.update("jax_default_device", jax.devices()[0])


@pytest.fixture
def lenient():
    """JAX as a user has it: optax and schedules mix types."""
    with jax.numpy_dtype_promotion("standard"):
        yield
