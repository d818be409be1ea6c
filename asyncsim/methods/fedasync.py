"""FedAsync: the server mixes in a worker's parameters with a weight that falls with staleness."""

import jax
import optax

from asyncsim.base.errors import require_nonnegative, require_share
from asyncsim.methods.damping import staleness_weight
from asyncsim.methods.method import LEARNING_RATE, Applied, Method, Schedule, local_steps
from asyncsim.methods.recipe import shares_programs


@shares_programs
def fedasync(
    learning_rate: float | Schedule = LEARNING_RATE,
    mixing: float = 0.8,
    law: str = "polynomial",
    strength: float = 0.5,
    threshold: float = 4.0,
    rho: float = 0.0,
    optimizer: optax.GradientTransformation | None = None,
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
    named, local = local_steps(learning_rate, optimizer)
    require_share("mixing", mixing)
    require_nonnegative("rho", rho)
    factor = staleness_weight(law, strength, threshold)

    def message(worker, update, start, central, visit):
        return start + update, worker, {}

    def apply(server, central, message, memory, visit):
        weight = mixing * factor(visit, central)
        return Applied((1 - weight) * central + weight * message, server, memory)

    return Method(
        name="fedasync",
        hyperparameters=dict(
            **named, mixing=mixing, law=law, strength=strength, threshold=threshold, rho=rho
        ),
        optimizer=local
        if isinstance(rho, float | int) and rho == 0
        else optax.chain(spring(rho), local),
        message=message,
        apply=apply,
        coordinatewise=True,
    )


def spring(rho: float) -> optax.GradientTransformationExtraArgs:
    """Return a transformation that adds ``rho (x - s)`` to a gradient; a window begins at ``s``."""

    def update(gradients, state, params=None, *, start=None, **_):
        return jax.tree.map(lambda g, x, s: g + rho * (x - s), gradients, params, start), state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)
