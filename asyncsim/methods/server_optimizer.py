"""Optimizers of optax at the server, on stale gradients, with a rate that adapts to the delay."""

import jax
import jax.numpy as jnp
import optax

from asyncsim.methods.declared import Optimizer, Rate, declared
from asyncsim.methods.method import LEARNING_RATE, Applied, Method, Timing, local_steps


@declared
def server_optimizer(
    learning_rate: Rate = LEARNING_RATE,
    adaptive: bool = True,
    optimizer: Optimizer | None = None,
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
        ``optax.adamw(1e-3)``, ``optax.lion(1e-4)``, ``optax.contrib.muon(0.02)``, ... ; it has its
        own learning rate and sees the problem's tensors.

    Notes
    -----
    The factor scales the whole step, weight decay included, as a smaller learning rate would; the
    optimizer's moments take the whole gradient. The factor is from Mishchenko et al., whose
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
    chosen = local_steps(learning_rate, optimizer)
    server_steps = optax.with_extra_args_support(chosen)

    def apply(server, central, message, memory, visit):
        with jax.numpy_dtype_promotion("standard"):  # optax mixes integer counts with numbers
            step, server = server_steps.update(message, server, central, visit=visit)
        if adaptive:
            kind = jax.tree.leaves(central)[0].dtype
            tau, n = (jnp.asarray(count, kind) for count in (visit.staleness, visit.workers))
            step = jax.tree.map(lambda leaf: n / jnp.maximum(n, tau) * leaf, step)
        return Applied(optax.apply_updates(central, step), server, memory)

    return Method(
        optax.identity(),  # the worker's "step" is its gradient
        apply=apply,
        init_server=chosen.init,
        timing=Timing(window=1),
        # Plain steps are the same on a vector, and quicker.
        space="vector" if optimizer is None else "tensors",
        coordinatewise=optimizer is None,
    )
