"""Leader SGD (LSGD): persistent replicas, each pulled towards the best of them."""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from asyncsim.base.declared import Count, Fraction, Share
from asyncsim.methods.declared import Optimizer, PolicyLike, Rate, declared
from asyncsim.methods.method import (
    LEARNING_RATE,
    Applied,
    Array,
    Memories,
    Method,
    State,
    Timing,
    Visit,
    local_steps,
    present,
)


class ResumingWorker(NamedTuple):
    """A worker's state in `lgd`: it resumes at ``rest + pull * leader``."""

    rest: Array  #: shape ``[parameters]``
    pull: Array  #: a scalar, zero before the first round


class LeaderMemory(NamedTuple):
    """The server's memory of a worker, vectors of shape ``[parameters]``."""

    replica: Array  #: the worker's last message
    loss: Array  #: sent with it; before the first visit the largest finite number
    #: With pulls at every step: the leader of its group, and the overall leader of its last global
    #: pull; else ``()``.
    leader: State
    overall: State


@declared
def lsgd(
    learning_rate: Rate = LEARNING_RATE,
    pull: Share = 0.1,
    groups: Count = 1,
    global_pull: Share = 0.1,
    global_every: Count = 4,
    step_pull: Fraction = 0.0,
    optimizer: Optimizer | None = None,
) -> Method:
    """Return asynchronous leader SGD with one or several leaders.

    The workers form ``groups`` of neighbours. At its visit a worker sends its replica ``x`` and its
    loss, and is pulled to the leaders: the replicas with the least loss at their workers' last
    visits. ``z`` is the leader of its group; ``Z`` is the overall leader, which pulls at every
    ``global_every``-th visit of the worker if there are several groups::

        x <- x - pull (x - z)
        x <- x - global_pull (x - Z)

    Parameters
    ----------
    pull : float
        Towards the leader of the group; above zero and at most one.
    groups : int
        Worker ``i`` of ``n`` is in group ``i * groups // n``; with ``n`` groups or more each leads
        itself.
    global_pull : float
        Towards the overall leader.
    global_every : int
        Visits of a worker between two pulls to the overall leader.
    step_pull : float
        From the authors' program, 0.1 in its runs; zero, the paper's rule, disables it. After each
        local step, before the pulls at its visit, the worker is pulled to the leaders of its last
        visit, which may have moved since: ``step_pull / global_every`` of the way to the overall
        leader, if there are several groups, then ``step_pull`` of the way to its group's. Only with
        a window of one, since later steps of a window do not see the leaders.

    Notes
    -----
    The central variable is the mean of the replicas in their workers' last messages, which is what
    the authors test. No worker adopts it. The overall leader feels no force, and with one worker
    this is sequential SGD; with ``step_pull`` neither holds, since a leader, too, is pulled to its
    earlier position.

    The paper's trigger counts the local steps of all workers, and pulls all of them at once; in the
    authors' program they wait for each other at that point. Here workers do not wait, unless the
    trace's policy says so (`easgd` and `lgd` have a barrier by default): each is pulled at its own
    visits, to replicas as old as their workers' last visits. A loss is the mean
    of the minibatch losses of the window before the visit: the running mean of the authors' runs,
    which is as long as their window (by default it has 10 losses). The authors' program keeps a
    worker's optimizer state over its pulls; so does this. After a test, its pulls of every step go
    to the tested mean until there is a new overall leader; here they do not.

    Workers communicate as in the paper: at a visit the loss goes up, one number, and a leader's
    replica comes down from the worker that leads, with several groups at ``1 / global_every`` of
    the visits a second one. The replica in the message here is what the leader's worker keeps. The
    leader's own visits cost as much as others', because the leader's identity depends on values.

    On a cluster with sites, if no group spans two of them, studies simulate a trace on which a
    worker leaves its site only for the visits with a pull to the overall leader
    (``Cluster(far_every=...)``): near communication for the group, far for all, as in the paper.
    Such a visit takes equally long wherever the overall leader is, even at the worker's own site,
    because the leader's identity depends on values.

    On a trace with failures the leaders are chosen among the workers that the server counts; the
    central variable is still the mean of all last replicas. A worker that returns adopts the
    central variable.

    References
    ----------
    Teng, Gao, Chalus, Choromanska, Goldfarb and Weller 2019, "Leader stochastic gradient descent
    for distributed training of deep learning models", arXiv 1905.10395, the rule as its poster
    prints it; ``step_pull`` as the authors' program has it.
    """
    several = groups > 1

    def init_memory(central: Array) -> LeaderMemory:
        leader = central if step_pull else ()
        return LeaderMemory(central, _no_loss(central), leader, leader if several else ())

    def message(worker, update, start, central, visit):
        return start + update, worker, {}

    def apply(server, central, message, memory, visit, memories):
        x = message
        if step_pull and several:
            x = x - step_pull / global_every * (x - memory.overall)
        if step_pull:
            x = x - step_pull * (x - memory.leader)
        after = central + (x - memory.replica) / jnp.asarray(visit.workers, x.dtype)
        losses = memories.of_all("loss")
        if not isinstance(visit.counted, tuple):  # a worker that is away does not lead
            losses = jnp.where(visit.counted, losses, _no_loss(central))
        losses = losses.at[visit.worker].set(visit.loss)
        group = jnp.asarray(np.arange(len(losses)) * groups // len(losses))
        leader = _best(x, jnp.where(group == group[visit.worker], losses, jnp.inf), visit, memories)
        pulled = x - pull * (x - leader)
        overall = memory.overall
        if several:
            is_due = (visit.worker_step + 1) % global_every == 0
            best = _best(x, losses, visit, memories)
            pulled = jnp.where(is_due, pulled - global_pull * (pulled - best), pulled)
            overall = jnp.where(is_due, best, overall) if step_pull else ()
        return Applied(
            after, pulled, LeaderMemory(x, visit.loss, leader if step_pull else (), overall)
        )

    return Method(
        local_steps(learning_rate, optimizer),
        message=message,
        apply=apply,
        init_server=lambda central: central,
        init_memory=init_memory,
        resume=lambda worker, read: read,
        reply=lambda server, central, memory, visit: server,
        timing=Timing(
            protocol="exchange",
            window=1 if step_pull else None,
            # The loss goes up, leaders come down: the overall one at some visits.
            message_numbers=1,
            reply_size=1 + 1 / global_every if several else None,
            far_every=global_every if several else None,
            groups=groups if several else None,
        ),
        sees_memories=True,
        coordinatewise=True,
    )


@declared
def lgd(
    learning_rate: Rate = LEARNING_RATE,
    pull: Share = 0.1,
    optimizer: Optimizer | None = None,
    policy: PolicyLike = "barrier()",
) -> Method:
    """Return synchronous leader gradient descent, for versions of one message of each worker.

    With ``x`` the workers' replicas at the start of a round::

        leader <- the x of least loss
        x      <- x + local steps - pull (x - leader)

    ``pull``: above zero and at most one; the paper's ``learning rate * lambda``.

    Notes
    -----
    Steps, losses and pulls use the same replicas, as in the paper's objective: with exact gradients
    and a window of one the leader is the best replica, and a leader that rests is a stationary
    point of the loss. With minibatches the losses are the gradients' minibatch losses; with a
    longer window they are means over it, and leader and pulls belong to its start. The central
    variable is the leader before its steps: one round behind. With one worker this is sequential
    SGD.

    There is one group; the pulls of several would need more than a central variable. Where a policy
    cancels computations, a worker that lost its computation resumes at its replica, with the newest
    leader's pull replacing the last. The authors' program has a barrier, too, but elects among the
    replicas after their steps, as `lsgd` does.

    References
    ----------
    Teng et al. 2019, arXiv 1905.10395, the objective as its poster prints it, and its gradient
    step.
    """

    def message(worker, update, start, central, visit):
        # The next replica, less the leader's part, which is not known yet.
        rest = start + update - pull * start
        return start, ResumingWorker(rest, jnp.asarray(pull, rest.dtype)), {}

    def combine(server, central, messages, visits):
        losses = jnp.where(
            present(messages, visits) & jnp.isfinite(visits.loss), visits.loss, jnp.inf
        )
        return Applied(messages[jnp.argmin(losses)])

    return Method(
        local_steps(learning_rate, optimizer),
        message=message,
        combine=combine,
        init_worker=lambda central: ResumingWorker(central, jnp.zeros((), central.dtype)),
        resume=lambda worker, read: worker.rest + worker.pull * read,
        timing=Timing(policy=policy, message_numbers=1),
        coordinatewise=True,
    )


def _no_loss(central: Array) -> Array:
    """Return the loss of a replica that was never sent: the largest finite number."""
    return jnp.full((), jnp.finfo(central.dtype).max, central.dtype)


def _best(x: Array, losses: Any, visit: Visit, memories: Memories) -> Array:
    """Return the replica of least loss; ``x`` is the visiting worker's."""
    leader = jnp.argmin(losses).astype(visit.worker.dtype)
    return jnp.where(leader == visit.worker, x, memories.of(leader).replica)
