"""Elastic averaging (EASGD): persistent replicas, tied to the central variable by springs."""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from asyncsim.base.declared import Fraction, Positive
from asyncsim.methods.buffer import sum_messages
from asyncsim.methods.declared import Optimizer, PolicyLike, Rate, declared
from asyncsim.methods.method import (
    LEARNING_RATE,
    Applied,
    Array,
    Method,
    State,
    Timing,
    Visit,
    gradient_steps,
    local_steps,
)


class ElasticWorker(NamedTuple):
    """A worker's state, vectors of shape ``[parameters]``."""

    replica: Array  #: its own parameters: after the exchange, or in the paper's order before it
    pull: State  #: the paper's order: the last exchange's part of the replica; else ``()``


@declared
def aeasgd(
    learning_rate: Rate = LEARNING_RATE,
    alpha: Positive | None = None,
    beta: Positive = 0.9,
    order: Literal["moved", "remembered"] = "moved",
    optimizer: Optimizer | None = None,
) -> Method:
    """Return asynchronous elastic averaging SGD, with the communication window of the trace.

    After its local steps, a worker and the server move towards each other, ``x`` being the worker's
    own replica::

        E       = alpha (x - central)
        x       <- x - E
        central <- central + E

    Parameters
    ----------
    alpha : float, optional
        The elastic step, the paper's ``learning rate * rho``; None for ``beta / workers``.
    beta : float
        The elastic step of all workers together; without effect if alpha is given.
    order : {"moved", "remembered"}
        Where the gradient after an exchange is computed. "moved", as in dist-keras: at the replica
        after the exchange. "remembered", as in the paper and its authors' program: at ``x`` before
        the exchange, while the step is added to the replica after it; only with a window of one,
        since later steps of a window continue from the moved replica.

    Notes
    -----
    An exchange conserves the sum of the replica and the central variable. A worker never adopts the
    central variable: with one worker this is no sequential method. The exchange uses the central
    variable at the visit; in dist-keras other commits can come between pull and commit, as under
    the protocol "read_then_write" with ``exclusive=False``. Its learning rate enters only alpha
    (0.05 for workers, 0.5 for its trainer), and its first window has a batch less than the others.
    TensorFlow's optimizer divides beta by the window as well, and adds the springs to the loss of
    every local step: another method.

    `asyncsim.theory.elastic_stable_alpha` has the limit of stability of the order "remembered",
    with a window of one; "moved" is stable beyond it.

    References
    ----------
    Zhang, Choromanska and LeCun 2015, "Deep learning with elastic averaging SGD", arXiv 1412.6651;
    the rule as the first author's program has it.
    """
    exchange = _exchange(alpha, beta)
    remembers = order == "remembered"

    def message(worker, update, start, central, visit):
        x = start + update - worker.pull if remembers else start + update
        pull = exchange(x, central, visit)
        return pull, ElasticWorker(x, pull) if remembers else ElasticWorker(x - pull, ()), {}

    return Method(
        local_steps(learning_rate, optimizer),
        message=message,
        init_worker=lambda central: ElasticWorker(
            central, jnp.zeros_like(central) if remembers else ()
        ),
        resume=lambda worker, read: worker.replica,
        timing=Timing(window=1) if remembers else Timing(),
        coordinatewise=True,
    )


@declared
def eamsgd(
    learning_rate: Rate = LEARNING_RATE,
    momentum: Fraction = 0.9,
    alpha: Positive | None = None,
    beta: Positive = 0.9,
) -> Method:
    """Return asynchronous elastic averaging with Nesterov momentum on the workers, with the window
    of the trace.

    With ``x`` the worker's replica and ``v`` its velocity, in each local step, and then at the
    visit::

        v       <- momentum * v - learning_rate * gradient(x + momentum * v)
        x       <- x + v

        E       = alpha (x - central)
        x       <- x - E
        central <- central + E

    ``momentum``: in [0, 1); 0.99 in the paper's runs. ``alpha``, ``beta``: see `aeasgd`.

    Notes
    -----
    The velocity is neither reset nor exchanged. dist-keras looks ahead to the wrong side,
    ``x - momentum * v`` with this sign of ``v``, and multiplies two learning rates. This is the
    paper's rule, with gradients at the moved replica (see `aeasgd`).

    References
    ----------
    Zhang, Choromanska and LeCun 2015, arXiv 1412.6651;
    the rule as the first author's program has it.
    """

    def look_ahead(optimizer_state):
        return jax.tree.map(lambda v: momentum * v, optimizer_state[1].trace)

    return aeasgd(learning_rate, alpha, beta)._replace(
        optimizer=optax.chain(gradient_steps(learning_rate), optax.trace(momentum)),
        look_ahead=look_ahead,
    )


@declared
def easgd(
    learning_rate: Rate = LEARNING_RATE,
    alpha: Positive | None = None,
    beta: Positive = 0.9,
    optimizer: Optimizer | None = None,
    policy: PolicyLike = "barrier()",
) -> Method:
    """Return synchronous elastic averaging SGD, for versions of one message of each worker.

    With ``x`` a worker's replica before its local steps, and ``central`` of the previous version::

        E       = alpha (x - central)
        x       <- x + local steps - E
        central <- central + sum of all E          = (1 - beta) central + beta * mean of all x

    ``alpha``, ``beta``: see `aeasgd`.

    Notes
    -----
    Both moves use the old replicas and the old central variable, as the paper prints them for a
    window of one; with a longer window the exchange comes at its start. On a trace without a
    barrier the springs of a version are added when it is complete, so that each version still has
    one central variable. The default policy is the paper's barrier; `aeasgd` and `lsgd` have no
    default, and take up messages as the trace's policy does.

    `asyncsim.theory.elastic_stable_beta` has the limit of stability.

    References
    ----------
    Zhang, Choromanska and LeCun 2015, arXiv 1412.6651; the rule as public programs have it.
    """
    exchange = _exchange(alpha, beta)

    def message(worker, update, start, central, visit):
        pull = exchange(start, central, visit)
        return pull, ElasticWorker(start + update - pull, ()), {}

    def combine(server, central, messages, visits):
        return Applied(central + sum_messages(messages, visits))

    return Method(
        local_steps(learning_rate, optimizer),
        message=message,
        combine=combine,
        init_worker=lambda central: ElasticWorker(central, ()),
        resume=lambda worker, read: worker.replica,
        timing=Timing(policy=policy),
        coordinatewise=True,
    )


def _exchange(alpha: Any, beta: Any) -> Callable[[Array, Array, Visit], Array]:
    """Return a function that computes an exchange's part of a replica."""

    def exchange(x: Array, central: Array, visit: Visit) -> Array:
        step = beta / jnp.asarray(visit.workers, x.dtype) if alpha is None else alpha
        return step * (x - central)

    return exchange
