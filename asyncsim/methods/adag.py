"""ADAG of Hermans' thesis: an update counts less, weight by weight, the further the central
variable has moved.
"""

from typing import Literal

from asyncsim.base.declared import Positive
from asyncsim.base.errors import InputError
from asyncsim.methods.declared import Optimizer, Rate, declared
from asyncsim.methods.method import LEARNING_RATE, Applied, Method, divisor, local_steps, rate_at


@declared
def adag(
    learning_rate: Rate = LEARNING_RATE,
    gamma: Positive = 1e-4,
    form: Literal["scaled", "original", "squared"] = "scaled",
    averaged: bool = False,
    optimizer: Optimizer | None = None,
) -> Method:
    """Return asynchronous distributed adaptive gradients.

    Staleness is a distance here, not a count. Element by element, with ``s`` the parameters that
    the worker read::

        central <- central + sent / ((central - s)^2 / gamma + 1)

    Parameters
    ----------
    gamma : float
        How far the central variable may move before an update is damped; the thesis lowers it if a
        run diverges.
    form : {"scaled", "original", "squared"}
        The factor's denominator: "scaled" as above, the thesis' practical form; "original" with the
        learning rate instead of gamma; "squared" is ``((central - s) / gamma)^2 + 1``, proposed but
        not tried in its conclusion.
    averaged : bool
        Whether a worker sends the mean of its window's local steps, as AGN does, instead of their
        sum.
    optimizer : optax.GradientTransformation, optional
        The workers' local optimizer, instead of plain steps; not with the original form, which
        needs a learning rate.

    Notes
    -----
    The thesis prints a squared norm and uses it weight by weight; so does this. It measures the
    distance in three ways: the worker sends ``s`` along; the server keeps it; or the worker pulls,
    scales its update itself and continues from that copy. All agree where the worker reads and
    commits in one visit; where other commits come in between, this is the first. The thesis argues
    that the original form's factor does not depend on the learning rate; it does, as
    ``learning_rate (sum of gradients)^2``, and comparing with gamma shows it. dist-keras calls this
    method Experimental, with ``averaged=True`` and gamma as its "learning_rate"; its ADAG is
    `asyncsim.methods.agn`. The diagnostic ``factor`` of each weight is the inverse denominator when
    the message is formed.

    References
    ----------
    Hermans 2017, "On scalable deep learning and parallelizing gradient descent", master thesis,
    Maastricht University, chapter on asynchronous distributed adaptive gradients.
    """
    if form == "original" and optimizer is not None:
        raise InputError(
            "form = 'original': divides by the learning rate, which an optimizer has not; choose "
            "scaled"
        )

    def denominator(moved, visit):
        if form == "squared":
            return (moved / gamma) ** 2 + 1
        scale = gamma if form == "scaled" else divisor(rate_at(learning_rate, visit, moved))
        return moved**2 / scale + 1

    def message(worker, update, start, central, visit):
        sent = update / visit.local_steps.astype(update.dtype) if averaged else update
        return (sent, start), worker, {"factor": 1 / denominator(central - start, visit)}

    def apply(server, central, message, memory, visit):
        sent, start = message
        return Applied(central + sent / denominator(central - start, visit), server, memory)

    return Method(
        local_steps(learning_rate, optimizer),
        message=message,
        apply=apply,
        coordinatewise=True,
    )
