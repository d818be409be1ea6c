"""FedAsync: the server mixes in a worker's parameters with a weight that falls with staleness."""

import jax
import optax

from asyncsim.base.declared import NonNegative, Positive, Share
from asyncsim.methods.damping import StalenessLaw, staleness_weight
from asyncsim.methods.declared import Optimizer, Rate, declared
from asyncsim.methods.method import LEARNING_RATE, Applied, Method, local_steps


@declared
def fedasync(
    learning_rate: Rate = LEARNING_RATE,
    mixing: Share = 0.8,
    law: StalenessLaw = "polynomial",
    strength: Positive = 0.5,
    threshold: NonNegative = 4.0,
    rho: NonNegative = 0.0,
    optimizer: Optimizer | None = None,
) -> Method:
    """Return asynchronous federated optimization; the trace's window is a client's local steps.

    A client steps from the central variable ``s`` that it read, tied to it by a spring, and sends
    its final parameters ``x``; the server mixes them in::

        x       <- x - learning_rate * (gradient(x) + rho (x - s))         (each local step)
        weight  = mixing * law(staleness)
        central <- (1 - weight) central + weight * x

    Parameters
    ----------
    mixing : float
        Weight of fresh parameters, above zero and at most one.
    law, strength, threshold
        See `asyncsim.methods.damping`; the paper has constant, polynomial and hinge.
    rho : float
        Weight of the local objective's proximal term ``(rho / 2) |x - s|**2``, zero or above. Of no
        effect with a window of one.

    Notes
    -----
    The proximal term enters the gradient, as in the paper; the authors' program moves ``x`` towards
    ``s``, by the share ``learning_rate * rho``, before it computes the gradient there. The mixing
    is constant; the authors' runs halve it at some epoch. Mixing pulls the central variable back
    towards the client's start: below full weight this is no sequential method for one worker.

    References
    ----------
    Xie, Koyejo and Gupta 2019, "Asynchronous federated optimization", arXiv 1903.03934, and its
    authors' program.
    """
    local = local_steps(learning_rate, optimizer)
    factor = staleness_weight(law, strength, threshold)

    def message(worker, update, start, central, visit):
        return start + update, worker, {}

    def apply(server, central, message, memory, visit):
        weight = mixing * factor(visit, central)
        return Applied((1 - weight) * central + weight * message, server, memory)

    return Method(
        local if isinstance(rho, float | int) and rho == 0 else optax.chain(spring(rho), local),
        message=message,
        apply=apply,
        coordinatewise=True,
    )


def spring(rho: float) -> optax.GradientTransformationExtraArgs:
    """Return a transformation that adds ``rho (x - s)`` to a gradient; a window begins at ``s``."""

    def update(gradients, state, params=None, *, start=None, **_):
        return jax.tree.map(lambda g, x, s: g + rho * (x - s), gradients, params, start), state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)
