"""Gradient energy matching (GEM): all workers together spend the energy of one momentum SGD."""

from typing import Literal, NamedTuple

import jax.numpy as jnp

from asyncsim.base.declared import Fraction, NonNegative, Positive
from asyncsim.methods.declared import Rate, declared
from asyncsim.methods.method import Array, Method, Timing, gradient_steps

#: Keeps the division by the update finite: added to its size (paper) or to its signed value
#: (program).
_EPSILON = {"paper": 1e-16, "program": 1e-12}


def scale(
    m: Array, d: Array, update: Array, kappa: float, pi_max: float | None, variant: str = "program"
) -> tuple[Array, dict[str, Array]]:
    """Return the factor ``pi`` of an update, and the diagnostics of `gem`.

    ``m``: the proxy's momentum; ``d``: the central variable's movement since the previous visit.
    """
    epsilon = _EPSILON[variant]
    size = jnp.abs(update) + epsilon if variant == "paper" else jnp.abs(update + epsilon)
    pi = (kappa * jnp.abs(m) - jnp.abs(d)) / size
    diagnostics = {"opposite_sign": d * update < 0}
    if pi_max is not None:
        diagnostics |= {"clipped_low": pi < 0, "clipped_high": pi > pi_max}
        pi = jnp.clip(pi, 0, pi_max)
    return pi, {"pi": pi, **diagnostics}


class GemWorker(NamedTuple):
    """A worker's state, vectors of shape ``[parameters]``."""

    momentum: Array  #: the proxy's momentum as this worker estimates it
    pulled: Array  #: the central variable at its previous visit, before its own commit


@declared
def gem(
    learning_rate: Rate = 0.05,
    momentum: Fraction = 0.9,
    kappa: NonNegative = 1.0,
    pi_max: Positive | None = 5.0,
    variant: Literal["program", "paper"] = "program",
) -> Method:
    """Return gradient energy matching.

    Element by element, with ``u = -learning_rate * gradient`` the update, ``m`` the worker's
    momentum and ``d`` how far the central variable moved since this worker's previous visit (before
    its own commit)::

        m  <- momentum * m + u
        pi  = clip((kappa |m| - |d|) / (|u| + eps), 0, pi_max)
        central <- central + pi u

    Parameters
    ----------
    momentum : float
        Of the proxy, in [0, 1).
    kappa : float
        Energy of the proxy: above one for a more energetic one (eq. 27). Zero or above.
    pi_max : float, optional
        Upper end of the clip; None for no clip at all, as the paper prints it.
    variant : {"program", "paper"}
        Where a worker resumes after its commit. The authors' program: at the central variable it
        pulled plus its own scaled update, which is the central variable after its commit. The
        paper's algorithm 1: at the central variable it pulled; this needs the protocol
        "read_then_write". (The protocol decides: on a read_then_write trace the program's variant
        resumes as the paper's.)

    Notes
    -----
    The paper's algorithm 1 has no clip and diverges without it on a quadratic from a few workers
    on. The authors' program clips to [0, 5]; here both variants do. The program adds its epsilon of
    1e-12 to the update before taking its size, the paper adds 1e-16 after; each variant follows its
    source. Equation 19 meets the proxy's energy only where ``d`` and ``u`` have the same sign.
    ``opposite_sign`` records the share of the other elements, ``clipped_low`` and ``clipped_high``
    the shares at either end of the clip.

    References
    ----------
    Hermans and Louppe 2018, "Gradient energy matching for distributed asynchronous gradient
    descent", arXiv 1805.08469, eq. 19, 23, 24 and 27, algorithm 1.
    """

    def message(worker, update, start, central, visit):
        m = momentum * worker.momentum + update
        pi, diagnostics = scale(m, central - worker.pulled, update, kappa, pi_max, variant)
        return pi * update, GemWorker(m, central), diagnostics

    return Method(
        gradient_steps(learning_rate),
        message=message,
        init_worker=lambda central: GemWorker(jnp.zeros_like(central), central),
        origin=lambda worker, read: worker.pulled,
        proxy=lambda worker: worker.momentum,
        timing=Timing(protocol="read_then_write") if variant == "paper" else Timing(),
        coordinatewise=True,
    )
