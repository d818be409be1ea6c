"""FedAsync: the server mixes each worker's parameters into its own, less the staler they are."""

import optax

from asyncsim.errors import require_share
from asyncsim.methods.damping import staleness_weight
from asyncsim.methods.method import LEARNING_RATE, Applied, Method, Schedule, local_steps


def fedasync(
    learning_rate: float | Schedule = LEARNING_RATE,
    mixing: float = 0.8,
    law: str = "polynomial",
    strength: float = 0.5,
    threshold: float = 4.0,
    optimizer: optax.GradientTransformation | None = None,
) -> Method:
    """Return asynchronous federated optimization, the window of the trace being a client's local steps.

    A client sends its parameters ``x`` after its local steps; the server mixes them in::

        weight  = mixing * law(staleness)
        central <- (1 - weight) central + weight * x

    Parameters
    ----------
    learning_rate : float or schedule of the Visit
        Of the plain local steps.
    mixing : float
        Weight of fresh parameters, above zero and at most one.
    law : {"constant", "inverse", "exponential", "polynomial", "hinge", "ratio"}
        See `asyncsim.methods.damping`; the paper has constant, polynomial and hinge.
    strength : float
    threshold : float
        Of the hinge (versions).
    optimizer : optax.GradientTransformation, optional
        The clients' local optimizer, in the place of plain steps.

    Raises
    ------
    InputError
        For a rate or strength that is not above zero, a mixing outside (0, 1], an unknown law, a negative threshold,
        or a rate beside an optimizer.

    Notes
    -----
    Without the paper's proximal term of the local steps (its rho is zero here), and with a constant mixing, which the
    authors' runs halve at some epoch. Mixing in parameters drags the central variable back towards where the client
    began: below full weight this is no sequential method for one worker.

    References
    ----------
    Xie, Koyejo and Gupta 2019, "Asynchronous federated optimization", arXiv 1903.03934, and its authors' program.
    """
    named, local = local_steps(learning_rate, optimizer)
    require_share("mixing", mixing)
    factor = staleness_weight(law, strength, threshold)

    def message(worker, update, start, central, visit):
        return start + update, worker, {}

    def apply(server, central, message, memory, visit):
        weight = mixing * factor(visit, central)
        return Applied((1 - weight) * central + weight * message, server, memory)

    return Method(
        name="fedasync",
        hyperparameters={**named, "mixing": mixing, "law": law, "strength": strength, "threshold": threshold},
        optimizer=local,
        message=message,
        apply=apply,
        elementwise=True,
    )
