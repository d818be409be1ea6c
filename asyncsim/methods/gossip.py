"""Gossip: workers without a server that average with their neighbours."""

from typing import NamedTuple

import jax.numpy as jnp

from asyncsim.base.declared import Count
from asyncsim.clusters.policy import handshake, overlap
from asyncsim.methods.declared import Optimizer, PolicyLike, Rate, declared
from asyncsim.methods.method import LEARNING_RATE, Array, Method, Timing, local_steps


class MixingWorker(NamedTuple):
    """A worker's state, vectors of shape ``[parameters]``: its replica before and after mixing."""

    replica: Array
    mixed: Array


class PushMessage(NamedTuple):
    """A push-sum message: a biased replica, of shape ``[parameters]``, and its weight, a number."""

    biased: Array
    weight: Array


class PushWorker(NamedTuple):
    """A worker's state: the mixed biased replica, its weight, and the update that the next mixing
    adds.

    Between two commits the update is stored separately: the quotient is then the replica of the
    last gradient.
    """

    biased: Array
    weight: Array
    update: Array


@declared
def dpsgd(
    learning_rate: Rate = LEARNING_RATE,
    optimizer: Optimizer | None = None,
    policy: PolicyLike = "neighbours(mix=beside)",
) -> Method:
    """Return D-PSGD: replicas are averaged with their neighbours' while the gradient is computed.

    With ``W`` the topology's weights and ``g`` the gradient at the replica before mixing::

        x_i <- sum over j of W_ij x_j - learning_rate * g(x_i)

    Parameters
    ----------
    policy : Policy or text, optional
        Decides which messages a worker takes up. None: any trace.

    Notes
    -----
    The paper expects equal weights on both sides of each edge: with weights that are not symmetric
    the replicas tend to a weighted mean (see `sgp`). It waits for all neighbours; here the trace
    decides.

    References
    ----------
    Lian, Zhang, Zhang, Hsieh, Zhang and Liu 2017, "Can decentralized algorithms outperform
    centralized algorithms?", arXiv 1705.09056, algorithm 1.
    """

    def mix(worker, inbox, visit):
        return MixingWorker(worker.replica, visit.kept * worker.replica + inbox)

    def message(worker, update, start, central, visit):
        x = worker.mixed + update
        return x, MixingWorker(x, x), {}

    return Method(
        local_steps(learning_rate, optimizer),
        message=message,
        init_worker=lambda central: MixingWorker(central, central),
        resume=lambda worker, read: worker.replica,
        mix=mix,
        last=lambda worker: worker.replica,
        timing=Timing(policy=policy),
    )


@declared
def sgp(
    learning_rate: Rate = LEARNING_RATE,
    optimizer: Optimizer | None = None,
    policy: PolicyLike = "neighbours()",
) -> Method:
    """Return stochastic gradient push: replicas are sent in shares, with weights that undo the
    bias.

    A worker retains a share of its replica ``x`` and weight ``w`` and pushes the other shares to
    its neighbours. It adds the arrivals to its own share, and takes its gradient at the quotient::

        x_i <- sum over j of p_ij x_j,   w_i <- sum over j of p_ij w_j
        x_i <- x_i - learning_rate * g(x_i / w_i)

    Parameters
    ----------
    policy : Policy or text, optional
        Decides which messages a worker takes up. None: any trace.

    Notes
    -----
    Overlap SGP is the same method on the trace of another policy, `osgp`. The authors' program
    omits the weight where it is always one, on their regular graphs; here it is always sent. Lost
    messages remove mass. An attack changes the whole message, including the weight.

    References
    ----------
    Assran, Loizou, Ballas and Rabbat 2019, "Stochastic gradient push for distributed deep
    learning", arXiv 1811.10792, algorithm 1.
    """

    def mix(worker, inbox, visit):
        share = visit.kept.astype(worker.weight.dtype)
        biased = share * (worker.biased + worker.update) + inbox.biased
        return worker._replace(biased=biased, weight=share * worker.weight + inbox.weight)

    def message(worker, update, start, central, visit):
        return (
            PushMessage(worker.biased + update, worker.weight),
            worker._replace(update=update),
            {},
        )

    return Method(
        local_steps(learning_rate, optimizer),
        message=message,
        init_worker=lambda central: PushWorker(
            central, jnp.ones((), central.dtype), jnp.zeros_like(central)
        ),
        resume=lambda worker, read: worker.biased / worker.weight,
        mix=mix,
        replica=lambda sent: (sent.biased, sent.weight),
        last=lambda worker: PushMessage(worker.biased + worker.update, worker.weight),
        timing=Timing(policy=policy),
    )


@declared
def osgp(
    learning_rate: Rate = LEARNING_RATE,
    delay: Count = 1,
    optimizer: Optimizer | None = None,
) -> Method:
    """Return overlap SGP: `sgp` whose messages travel while the next gradients are computed.

    Parameters
    ----------
    delay : int
        Rounds after which a worker waits for a message, at least one.

    References
    ----------
    Assran, Loizou, Ballas and Rabbat 2019, arXiv 1811.10792, algorithm 2.
    """
    return sgp(learning_rate, optimizer, overlap(delay))


@declared
def adpsgd(
    learning_rate: Rate = LEARNING_RATE,
    optimizer: Optimizer | None = None,
) -> Method:
    """Return AD-PSGD: after its gradient a worker averages with one neighbour, then adds its step.

    The neighbour is not interrupted. With ``s`` the worker's replica after its last commit::

        x_i, x_j <- (x_i + x_j) / 2
        x_i      <- x_i - learning_rate * g(s)

    References
    ----------
    Lian, Zhang, Zhang and Liu 2018, "Asynchronous decentralized parallel stochastic gradient
    descent", arXiv 1710.06952, algorithm 1.
    """

    def meet(replica, partner, visit):
        mean = (replica + partner) / 2
        return mean, mean

    def message(worker, update, start, central, visit):
        return worker + update, worker + update, {}

    return Method(
        local_steps(learning_rate, optimizer),
        message=message,
        init_worker=lambda central: central,
        meet=meet,
        timing=Timing(policy=handshake()),
    )
