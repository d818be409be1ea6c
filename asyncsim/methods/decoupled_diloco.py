"""Decoupled DiLoCo: learners never wait, and a quorum with a grace window merges fragments."""

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from asyncsim.base.declared import Count, Fraction, Natural, Positive
from asyncsim.methods.declared import Optimizer, PolicyLike, Rate, declared
from asyncsim.methods.fragments import Exchange, Sizes, begin_server, begin_worker, check_exchange
from asyncsim.methods.method import LEARNING_RATE, Array, Method, Timing, local_steps, present


class LearnerMessage(NamedTuple):
    """A learner's message; the server uses one fragment of it."""

    progress: Array  #: its replica less the central variable, shape ``[parameters]``
    steps: Array  #: its local steps since it took up each fragment, shape ``[fragments]``


@declared
def decoupled_diloco(
    learning_rate: Rate = LEARNING_RATE,
    server_rate: Positive = 0.7,
    server_momentum: Fraction = 0.9,
    fragments: Count = 4,
    overlap: Natural = 2,
    blend: Fraction = 0.5,
    average: Literal["radial", "mean"] = "radial",
    tensors: Sizes | None = None,
    optimizer: Optimizer | None = None,
    policy: PolicyLike = "buffered(count=4, grace=1)",
) -> Method:
    """Return Decoupled DiLoCo: a version synchronises a fragment of the replicas that came in time.

    Version ``k`` synchronises fragment ``p = k mod fragments``. With ``theta`` the central
    variable, ``x_i`` the replica in the newest message of learner ``i``, ``w_i`` its local steps
    since it took up fragment ``p``, and on fragment ``p`` alone::

        D_i    = x_i - theta
        length = sum of w_i |D_i| / sum of w_i
        u      = sum of w_i D_i / |D_i|
        D      = length u / |u|

        m     <- server_momentum m + D                                  (overlap versions later)
        theta <- theta + server_rate (server_momentum m + D)
        x_i   <- blend x_i + (1 - blend) theta                          (at a learner's next read)

    Parameters
    ----------
    fragments : int
        Parts of the parameters; 24 in the paper, with a window of one: each is synchronised once in
        24 local steps.
    overlap : int
        Versions until a fragment's step is applied, 0 to ``fragments - 1``; 2 in the paper.
    blend : float
        Share of its replica that a learner retains where a fragment arrives, in [0, 1); 0
        overwrites.
    average : {"radial", "mean"}
        "radial", above; "mean", the mean of the ``D_i`` with weights ``w_i``.
    tensors : list of int, optional
        Numbers of parameters of the problem's tensors, in order: tensor ``i`` belongs to fragment
        ``i mod fragments``, and each tensor has its length and direction. None: fragments are runs
        of parameters, with one length and direction each.
    optimizer : optax.GradientTransformation, optional
        The learners' inner optimizer; its state stays with the learner.
    policy : Policy or text, optional
        Its count is the quorum; `asyncsim.buffered` has the grace window.

    Raises
    ------
    InputError
        For an overlap that reaches the fragment's next version, or more fragments than parameters
        or tensors.

    Notes
    -----
    The paper's weight is tokens^2 / steps; here all batches have one size, so that it is
    proportional to the steps. Where the directions cancel, ``D`` is the weighted mean.

    Departures: the quorum counts messages, and the paper's counts learners; of two messages of a
    fast learner the newest counts. The grace window is a constant, the paper's adapts
    to the slack that computations leave. Each learner sends a message after every window, without
    being asked. A step waits at the server for ``overlap`` versions, the paper's at each learner
    for local steps. Embeddings are not averaged differently. The message up has one fragment
    (``message_size``), the way down all parameters. A fragment whose step is exactly zero counts as
    not arrived. ``blend`` and the server's rate and momentum come from public programs and
    DiLoCo; the paper is known second-hand.

    References
    ----------
    Douillard et al. 2026, "Decoupled DiLoCo for resilient distributed pre-training", arXiv
    2604.21428.
    """
    exchange = check_exchange(
        Exchange(server_rate, server_momentum, fragments, overlap, blend, tensors)
    )

    def message(worker, update, start, central, visit):
        x = start + update
        steps = worker.steps + visit.local_steps.astype(central.dtype)
        return LearnerMessage(x - central, steps), worker._replace(replica=x, steps=steps), {}

    def combine(server, central, messages, visits):
        parts = exchange.parts(central.size)
        blocks, block_count = jnp.asarray(parts.blocks), parts.block_count
        is_present = present(messages, visits)
        place = jnp.arange(len(is_present))
        is_later = (visits.worker == visits.worker[:, None]) & (place > place[:, None])
        is_newest = is_present & ~jnp.any(is_later & is_present, axis=1)
        weight = jnp.where(is_newest, messages.steps[:, server.version % fragments], 0)
        # Whole numbers, so that opposite directions of single parameters cancel exactly.
        total = jnp.sum(weight)
        rows = jnp.where(is_newest[:, None], messages.progress, 0)
        progress = weight @ rows / total
        if average == "radial":
            lengths = jnp.sqrt(jax.vmap(lambda row: _sums(row**2, blocks, block_count))(rows))
            u = weight @ (rows / _divisor(lengths)[:, blocks])
            u_length = jnp.sqrt(_sums(u**2, blocks, block_count))[blocks]
            radial = (weight @ lengths / total)[blocks] * u / _divisor(u_length)
            progress = jnp.where(u_length > 0, radial, progress)
        return exchange.outer_step(server, central, progress)

    return Method(
        local_steps(learning_rate, optimizer),
        message=message,
        combine=combine,
        init_worker=lambda central: begin_worker(central, fragments),
        init_server=begin_server,
        refresh=exchange.merge,
        resume=lambda worker, read: worker.replica,
        timing=Timing(policy=policy, message_size=1 / fragments),
    )


def _sums(values: Array, blocks: Array, count: int) -> Array:
    return jax.ops.segment_sum(values, blocks, count)


def _divisor(length: Array) -> Array:
    return jnp.where(length > 0, length, 1)
