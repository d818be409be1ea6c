"""Where JAX computes."""

import contextlib
from collections.abc import Iterator

from asyncsim.errors import InputError


@contextlib.contextmanager
def computing_device(kind: str) -> Iterator[None]:
    """Let JAX compute on a kind of device, for the length of a ``with`` block; ``default`` leaves it to JAX.

    Raises
    ------
    InputError
        JAX finds no such device.
    """
    import jax

    if kind == "default":
        yield
        return
    try:
        device = jax.devices(kind)[0]
    except RuntimeError:
        raise InputError(
            f"device = {kind!r}: JAX finds none here; choose default, which is {jax.default_backend()}"
        ) from None
    with jax.default_device(device):
        yield
