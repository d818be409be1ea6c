"""Optimizers of optax at the server, on stale gradients, with a rate that adapts to the delay."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.flatten_util import ravel_pytree

from asyncsim.base.errors import InputError, require_switch
from asyncsim.methods.method import LEARNING_RATE, Applied, Method, Schedule, Timing, local_steps
from asyncsim.methods.recipe import shares_programs


@shares_programs
def server_optimizer(
    learning_rate: float | Schedule = LEARNING_RATE,
    adaptive: bool = True,
    optimizer: optax.GradientTransformation | None = None,
) -> Method:
    """Return asynchronous SGD with any optimizer of optax at the server.

    Workers send gradients ``g``. With ``tau`` a gradient's staleness and ``n`` workers::

        step, state <- optimizer(g, state, central)
        central     <- central + min(1, n / tau) * step

    Parameters
    ----------
    learning_rate : float or schedule of the Visit
        Of plain steps, without an ``optimizer``; the method is then `delay_adaptive`.
    adaptive : bool
        Whether a step shrinks with a staleness beyond ``n``; without, all steps are whole.
    optimizer : optax.GradientTransformation, optional
        ``optax.adamw(1e-3)``, ``optax.lion(1e-4)``, ... ; it has its own learning rate.

    Raises
    ------
    InputError
        For an optimizer whose step depends on the shapes of tensors, such as
        ``optax.contrib.muon`` or ``optax.lamb``: the server sees one vector of all parameters.

    Notes
    -----
    The factor scales the whole step, weight decay included, as a smaller learning rate would; the
    optimizer's moments take the whole gradient. The factor is that of Mishchenko et al., whose
    method has plain steps. Zmushko et al. compare optimizers under a constant delay of one, without
    a factor (``adaptive=False``); their correction by error feedback is left out.

    With ``downpour(optimizer=...)`` each worker has an optimizer and sends its steps, with
    ``async_local_sgd(server_optimizer=...)`` the server's optimizer takes a worker's sum of local
    steps, which depends on the worker's rate.

    References
    ----------
    Zmushko, Petrov, Abdullaev, Khrushchev and Horvath 2026, "One-step gradient delay is not a
    barrier for large-scale asynchronous pipeline parallel LLM pretraining", arXiv 2606.30634;
    Mishchenko, Bach, Even and Woodworth 2022, "Asynchronous SGD beats minibatch SGD under arbitrary
    delays", arXiv 2206.07638.
    """
    require_switch("adaptive", adaptive)
    named, chosen = local_steps(learning_rate, optimizer)
    if optimizer is not None:
        _require_vectors(chosen)
    server_steps = optax.with_extra_args_support(chosen)

    def apply(server, central, message, memory, visit):
        with jax.numpy_dtype_promotion("standard"):  # optax mixes integer counts with numbers
            step, server = server_steps.update(message, server, central, visit=visit)
        if adaptive:
            tau, n = (
                jnp.asarray(count, central.dtype) for count in (visit.staleness, visit.workers)
            )
            step = n / jnp.maximum(n, tau) * step
        return Applied(optax.apply_updates(central, step), server, memory)

    return Method(
        name="server_optimizer",
        hyperparameters={**named, "adaptive": adaptive},
        optimizer=optax.identity(),  # the worker's "step" is its gradient
        apply=apply,
        init_server=chosen.init,
        timing=Timing(window=1),
        coordinatewise=optimizer is None,
    )


def _require_vectors(optimizer: optax.GradientTransformation) -> None:
    """Raise InputError if tensors and the vector of their entries get different steps."""
    tensors = {"a": jnp.array([[3.0, 1.0], [-2.0, 0.5]]), "b": jnp.array([[0.1, 0.2, 0.4]])}
    vector, _ = ravel_pytree(tensors)
    try:
        with jax.numpy_dtype_promotion("standard"):
            same = jnp.allclose(
                _two_steps(optimizer, vector), _two_steps(optimizer, tensors), rtol=1e-4, atol=0
            )
    except TypeError as error:
        raise InputError(
            f"optimizer: a step needs more than gradients and parameters: {error}; give an "
            "optimizer "
            "such as optax.adamw(1e-3)"
        ) from None
    # In a program for several rates the method was checked when it was made.
    if not isinstance(same, jax.core.Tracer) and not same:
        raise InputError(
            "optimizer: its step depends on the shapes of tensors, and the server has one vector "
            "of all "
            "parameters; give an optimizer such as optax.adamw(1e-3)"
        )


def _two_steps(optimizer: optax.GradientTransformation, params: Any) -> Any:
    """Return the second step with the gradients sin(3 x), then cos(x), as a vector."""
    _, state = optimizer.update(
        jax.tree.map(lambda x: jnp.sin(3 * x), params), optimizer.init(params), params
    )
    return ravel_pytree(optimizer.update(jax.tree.map(jnp.cos, params), state, params)[0])[0]
