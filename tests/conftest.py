"""Strict JAX for all tests: no implicit promotion between types."""

import jax
import pytest


@pytest.fixture(autouse=True, scope="session")
def strict_promotion():
    jax.config.update("jax_numpy_dtype_promotion", "strict")
