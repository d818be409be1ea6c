"""Robust gossip: workers without a server that limit the influence of each neighbour's message."""

import jax
import jax.numpy as jnp
import numpy as np

from asyncsim.base.console import counted, note
from asyncsim.base.declared import Count, Positive
from asyncsim.base.errors import InputError
from asyncsim.byzantine.aggregation import RuleLike, parse_rule
from asyncsim.clusters.topologies import Topology
from asyncsim.methods.declared import Optimizer, PolicyLike, Rate, declared
from asyncsim.methods.gossip import MixingWorker, dpsgd
from asyncsim.methods.method import LEARNING_RATE, Array, Method, Timing, local_steps


@declared
def clipped_gossip(
    learning_rate: Rate = LEARNING_RATE,
    f: Count = 1,
    radius: Positive | None = None,
    optimizer: Optimizer | None = None,
    policy: PolicyLike = "neighbours()",
) -> Method:
    """Return ClippedGossip: a worker moves towards each neighbour's replica by at most a radius.

    With ``W`` the topology's weights, ``tau`` the radius of worker ``i`` in this step and ``g`` the
    gradient at the mixed replica::

        x_i <- x_i + sum over j of W_ij (x_j - x_i) min(1, tau / |x_j - x_i|)
        x_i <- x_i - learning_rate * g(x_i)

    Parameters
    ----------
    learning_rate : float or schedule of the Visit
        Of the plain local steps.
    f : int
        Byzantine messages that a worker withstands in a step. The radius follows from it::

            tau^2 = sum over the nearest j of W_ij |x_j - x_i|^2 / sum over the f furthest j of W_ij

        where the nearest messages are all but the ``f`` furthest. Of at most ``f`` messages none
        counts.
    radius : float, optional
        A constant radius, in units of parameters, instead of this rule.
    optimizer : optax.GradientTransformation, optional
        The workers' local optimizer instead of plain steps.
    policy : Policy or text, optional
        When messages are taken up. None: whatever the trace has.

    Raises
    ------
    InputError
        For a learning rate or radius that is not above zero, an ``f`` below one, or a rate beside
        an optimizer.

    Notes
    -----
    The paper's radius divides by the weight of the Byzantine neighbours, which is known in theory
    alone; its practical rule keeps the nearest neighbours up to a total weight. Here ``f`` counts
    messages; with equal weights the two are the same. The paper's workers have momentum: give
    ``optimizer``. A message that is not finite does not count. Where messages are missing, as
    nobody waits, the weights need not sum to one: the rule moves a replica by differences, so it
    needs no other weights.

    References
    ----------
    He, Karimireddy and Jaggi 2022, "Byzantine-robust decentralized learning via ClippedGossip",
    arXiv 2202.01545, algorithm 1; the practical radius as in the program of Gaucher, Dieuleveut and
    Hendrikx (github.com/renaudgaucher/Byzantine-Robust-Gossip).
    """

    def mix(worker, inbox, visit):
        differences = inbox.messages - worker
        squares = jnp.sum(differences**2, axis=1)
        usable = (inbox.weights > 0) & jnp.isfinite(squares)
        weights = jnp.where(usable, inbox.weights.astype(differences.dtype), 0)
        squares, differences = (
            jnp.where(usable, squares, 0),
            jnp.where(usable[:, None], differences, 0),
        )
        limit = _squared_radius(weights, squares, usable, f) if radius is None else radius**2
        clipped = jnp.sqrt(
            jnp.where(squares > limit, limit / jnp.where(squares > 0, squares, 1), 1)
        )
        return worker + jnp.tensordot(weights * clipped, differences, 1)

    return Method(
        local_steps(learning_rate, optimizer),
        message=lambda worker, update, start, central, visit: (
            worker + update,
            worker + update,
            {},
        ),
        init_worker=lambda central: central,
        resume=lambda worker, read: worker,
        mix=mix,
        last=lambda worker: worker,
        sees_messages=True,
        timing=Timing(policy=policy),
    )


def note_few_replicas(method: Method, topology: Topology, workers: int) -> None:
    """Print which ``f`` a robust method uses on a topology with too few messages for it."""
    messages = min(
        int(np.bincount(edges.taker, minlength=workers).min()) for edges in topology.edges(workers)
    )
    if method.name.startswith("clipped_gossip"):
        f, radius = method.hyperparameters["f"], method.hyperparameters["radius"]
        if radius is None and f >= messages:
            note(
                f"{method.name}: f = {f} and {counted(messages, 'message')} on {topology}: none "
                "counts"
            )
    elif method.name.startswith("robust_gossip"):
        rule = parse_rule(method.hyperparameters["rule"])
        largest = max(0, int(rule.largest(messages + 1)))
        if rule.f is not None and rule.f > largest:
            note(
                f"{method.name}: f={largest} used: {counted(messages + 1, 'replica')} on {topology}"
            )


def _squared_radius(weights: Array, squares: Array, usable: Array, f: int) -> Array:
    """Return the square of the radius from the squared distances of the usable messages."""
    order = jnp.argsort(jnp.where(usable, -squares, jnp.inf))
    furthest = jnp.zeros_like(usable).at[order[:f]].set(True)
    divided = jnp.sum(jnp.where(furthest, weights, 0))
    inner = jnp.sum(jnp.where(furthest, 0, weights * squares))
    return jnp.where(divided > 0, inner / jnp.where(divided > 0, divided, 1), 0)


@declared
def robust_gossip(
    rule: RuleLike = "median()",
    learning_rate: Rate = LEARNING_RATE,
    optimizer: Optimizer | None = None,
    policy: PolicyLike = "neighbours(mix=beside)",
) -> Method:
    """Return BRIDGE: D-PSGD whose replicas are combined by a rule that withstands some wrong ones.

    With ``g`` the gradient at the replica that is not mixed yet::

        x_i <- rule(x_i and the x_j that worker i takes up) - learning_rate * g(x_i)

    Parameters
    ----------
    rule : Rule or str
        Of `asyncsim.aggregation`: ``"median()"``, ``"trimmed_mean(f=1)"``, ``"krum(f=2)"``.
    learning_rate : float or schedule of the Visit
        Of the plain local steps.
    optimizer : optax.GradientTransformation, optional
        The workers' local optimizer instead of plain steps.
    policy : Policy or text, optional
        When messages are taken up. None: whatever the trace has.

    Raises
    ------
    InputError
        For a learning rate that is not above zero, a rate beside an optimizer, or a rule that has a
        state.

    Notes
    -----
    With ``median()`` this is BRIDGE-M. With ``trimmed_mean(f)`` the worker's own replica may be
    trimmed as any other; BRIDGE-T always keeps it. The topology's weights are not used. A
    neighbourhood of too few messages for ``f`` is combined with the largest that it allows: two
    neighbours and the worker itself withstand one.

    References
    ----------
    Fang, Yang and Bajwa 2022, "BRIDGE: Byzantine-resilient decentralized gradient descent", arXiv
    1908.08098.
    """
    method = dpsgd(learning_rate, optimizer, policy)

    def mix(worker, inbox, visit):
        messages = jnp.concatenate([worker.replica[None], inbox.messages])
        present = jnp.concatenate([jnp.ones(1, bool), inbox.weights > 0])
        return MixingWorker(worker.replica, rule.combine((), messages, present, visit.key).vector)

    if rule.averaging or jax.tree.leaves(
        jax.eval_shape(rule.init, jax.ShapeDtypeStruct((1,), np.float32))
    ):
        raise InputError(
            f"rule = {rule.text!r}: remembers earlier messages; choose median() or trimmed_mean(f)"
        )
    return method._replace(
        mix=mix,
        sees_messages=True,
        needs_key=rule.needs_key,
    )
