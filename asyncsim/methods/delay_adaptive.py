"""Delay-adaptive asynchronous SGD: only gradients staler than there are workers are damped."""

import jax.numpy as jnp

from asyncsim.errors import require_choice, require_positive
from asyncsim.methods.checks import require_rate
from asyncsim.methods.method import LEARNING_RATE, Applied, Method, Schedule, gradient_steps, rate_at

_RULES = ("mishchenko", "koloskova", "drop")


def delay_adaptive(
    learning_rate: float | Schedule = LEARNING_RATE, rule: str = "mishchenko", smoothness: float = 1.0
) -> Method:
    """Return asynchronous SGD whose step shrinks with the staleness ``tau`` beyond the ``n`` workers.

    ::

        central <- central - rate * gradient,   rate =
            learning_rate * n / max(n, tau)                                          (mishchenko)
            learning_rate if tau <= n, else min(learning_rate, 1 / (4 smoothness tau))  (koloskova)
            learning_rate if tau <= n, else 0                                        (drop)

    Parameters
    ----------
    learning_rate : float or schedule of the Visit
        Theory of Koloskova et al. asks for at most ``1 / (4 smoothness)``.
    rule : {"mishchenko", "koloskova", "drop"}
        The last is Koloskova's as well, whose theorem holds for any step below the middle one.
    smoothness : float
        Largest curvature of the loss (koloskova).

    Notes
    -----
    Koloskova et al. compare with the number of gradients in flight, which is that of the workers if each has one job.
    A dropped gradient still makes a version. In the program of Mishchenko et al. a worker goes on from the central
    variable before its own gradient is applied: a trace with the protocol "read_then_write" does that.

    References
    ----------
    Koloskova, Stich and Jaggi 2022, arXiv 2206.08307; Mishchenko, Bach, Even and Woodworth 2022,
    arXiv 2206.07638, and its authors' notebook.
    """
    require_rate("learning_rate", learning_rate)
    require_choice("rule", rule, _RULES)
    require_positive("smoothness", smoothness)

    def apply(server, central, message, memory, visit):
        tau, n = visit.staleness.astype(central.dtype), jnp.asarray(visit.workers, central.dtype)
        if rule == "mishchenko":
            factor = n / jnp.maximum(n, tau)
        elif rule == "koloskova":
            rate = rate_at(learning_rate, visit, central)
            factor = jnp.where(tau <= n, 1, jnp.minimum(1, 1 / (4 * smoothness * tau * rate)))
        else:
            factor = jnp.where(tau <= n, jnp.ones_like(tau), 0)
        return Applied(central + factor * message, server, memory)

    return Method(
        name="delay_adaptive",
        hyperparameters={"learning_rate": learning_rate, "rule": rule, "smoothness": smoothness},
        optimizer=gradient_steps(learning_rate),
        apply=apply,
        elementwise=True,
    )
