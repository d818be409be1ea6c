"""Streaming DiLoCo: replicas that synchronise one fragment of the parameters at a time."""

from typing import NamedTuple

import jax.numpy as jnp

from asyncsim.base.declared import Count, Fraction, Natural, Positive
from asyncsim.base.errors import InputError
from asyncsim.methods.buffer import mean_message
from asyncsim.methods.declared import Optimizer, PolicyLike, Rate, declared
from asyncsim.methods.fragments import Exchange, Sizes, begin_server, begin_worker, check_exchange
from asyncsim.methods.method import LEARNING_RATE, Array, Method, Timing, count_living, local_steps


class EagerWorker(NamedTuple):
    """A worker's state with eager updates, vectors of shape ``[parameters]`` and a count."""

    replica: Array
    anchor: Array  #: its replica where it last began each fragment
    momentum: Array  #: outer, of the worker's progress
    visits: Array


@declared
def streaming_diloco(
    learning_rate: Rate = LEARNING_RATE,
    server_rate: Positive = 0.7,
    server_momentum: Fraction = 0.9,
    fragments: Count = 4,
    overlap: Natural = 1,
    blend: Fraction = 0.5,
    eager: bool = False,
    tensors: Sizes | None = None,
    optimizer: Optimizer | None = None,
    policy: PolicyLike = "barrier()",
) -> Method:
    """Return Streaming DiLoCo, the trace's window being the local steps between two fragments.

    Round ``k`` synchronises fragment ``p = k mod fragments``, so that each is synchronised once in
    ``H = fragments * window`` local steps. With ``theta`` the central variable, ``x`` a worker's
    replica after its local steps, and on fragment ``p`` alone::

        D     = mean over the workers of (x - theta)

        m     <- server_momentum m + D                                  (overlap rounds later)
        theta <- theta + server_rate (server_momentum m + D)
        x     <- blend x + (1 - blend) theta                            (each worker)

    With eager updates worker ``i`` of ``n`` does not wait: it uses its own new progress and the
    others' of the fragment's round before. With ``theta_i`` its own outer parameters, which replace
    ``x`` at once::

        D_i     = x - theta_i
        E_i     = mean of the others' and its own previous D + (D_i - its previous D_i) / n
        m_i     <- server_momentum m_i + E_i
        theta_i <- theta_i + server_rate (server_momentum m_i + E_i)

    Parameters
    ----------
    fragments : int
        Parts of the parameters.
    overlap : int
        Rounds, of one window each, until a fragment's step is applied: ``tau`` local steps are
        ``tau / window`` rounds. 0 to ``fragments - 1``.
    blend : float
        The paper's ``alpha``: the share of its replica that a worker retains where a fragment
        arrives, in [0, 1). Not used with eager updates.
    eager : bool
        Eager updates; ``overlap`` must then be at least 1.
    tensors : list of int, optional
        Numbers of parameters of the problem's tensors, in order: tensor ``i`` belongs to fragment
        ``i mod fragments``. None: fragments are runs of parameters, as equal as possible.
    optimizer : optax.GradientTransformation, optional
        The workers' inner optimizer; its state stays with the worker.

    Raises
    ------
    InputError
        For an overlap that reaches the fragment's next round, eager updates without an overlap, or
        more fragments than parameters or tensors.

    Notes
    -----
    Departures: the overlap is a whole number of windows, and fragments are synchronised at equal
    intervals. A round of the trace ends with its messages, and the worker waits for the newest
    version; where the paper hides a message behind computations, give the cluster no latency. The
    message up has one fragment (``message_size``), the way down all parameters: give
    ``message_bytes`` as a pair to shorten it. Messages keep their numbers of bits; the paper sends
    four. A fragment whose step is exactly zero counts as not arrived. The learning rate and
    momentum of the server are DiLoCo's.

    The eager rule is linear, so that ``theta_i`` equals ``theta`` before the round's step plus one
    Nesterov step with ``D_i / n`` and a momentum of these; the code computes this form.

    References
    ----------
    Douillard et al. 2025, "Streaming DiLoCo with overlapping communication: towards a distributed
    free lunch", arXiv 2501.18512; Kale, Douillard and Donchev 2025, "Eager updates for overlapped
    communication and computation in DiLoCo", arXiv 2502.12996. Both are known second-hand.
    """
    exchange = check_exchange(
        Exchange(server_rate, server_momentum, fragments, overlap, blend, tensors)
    )
    if eager and not exchange.overlap:
        raise InputError(
            "eager = True: with overlap = 0 the others' progress is not late; give an overlap of "
            "1 or more"
        )

    def send_progress(worker, update, start, central, visit):
        x = start + update
        return x - central, worker._replace(replica=x), {}

    def send_eagerly(worker, update, start, central, visit):
        mu, rate = exchange.server_momentum, exchange.server_rate
        is_due = jnp.asarray(exchange.parts(central.size).of) == worker.visits % fragments
        x = start + update
        progress = x - worker.anchor
        m = jnp.where(is_due, mu * worker.momentum + progress, worker.momentum)
        n = count_living(visit).astype(central.dtype)
        anchor = jnp.where(is_due, central + rate / n * (mu * m + progress), worker.anchor)
        after = EagerWorker(jnp.where(is_due, anchor, x), anchor, m, worker.visits + 1)
        return progress, after, {}

    def combine(server, central, messages, visits):
        return exchange.outer_step(server, central, mean_message(messages, visits))

    def init_worker(central):
        if eager:
            return EagerWorker(central, central, jnp.zeros_like(central), jnp.int32(0))
        return begin_worker(central, fragments)

    return Method(
        local_steps(learning_rate, optimizer),
        message=send_eagerly if eager else send_progress,
        combine=combine,
        init_worker=init_worker,
        init_server=begin_server,
        refresh=None if eager else exchange.merge,
        resume=lambda worker, read: worker.replica,
        timing=Timing(policy=policy, message_size=1 / fragments),
    )
