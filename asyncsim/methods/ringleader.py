"""Ringleader ASGD: a table with a mean gradient of every worker, for workers whose data differ."""

from typing import NamedTuple

import jax.numpy as jnp

from asyncsim.methods.method import (
    LEARNING_RATE,
    Applied,
    Array,
    Method,
    Schedule,
    Timing,
    count_living,
    gradient_steps,
    require_rate,
)
from asyncsim.methods.recipe import shares_programs


class Table(NamedTuple):
    """One worker's gradients for one round: their sum, shape ``[parameters]``, and number."""

    total: Array
    number: Array

    def mean(self) -> Array:
        """Return the mean, zero if there are none."""
        return self.total / jnp.maximum(self.number, 1)


class RingleaderMemory(NamedTuple):
    """What the server keeps for a worker."""

    now: Table  #: its rows of the two tables: for ``round``, and for the one after
    following: Table
    round: Array  #: the round in which the worker came last
    stepped: Array  #: whether its gradient made a step in that round
    point: Array  #: where it computes its gradients, shape ``[parameters]``


class RingleaderServer(NamedTuple):
    """What the server keeps of all workers together."""

    total: Array  #: sums over the workers of the means in the two tables, shape ``[parameters]``
    following: Array
    filled: Array  #: workers with a gradient in the two tables
    following_filled: Array
    made: Array  #: steps made in this round; none while the table is still being filled
    round: Array


@shares_programs
def ringleader(learning_rate: float | Schedule = LEARNING_RATE) -> Method:
    """Return Ringleader ASGD.

    The server fills a table with the sum ``G_i`` and the number ``b_i`` of each worker's gradients. Once every worker
    is in it, the gradient that completes it and then one of each other worker makes a step, ``n`` in all::

        central <- central - learning_rate / n * sum over i of G_i / b_i

    and a worker goes on from the central variable after its own step only; all its gradients until its next step are
    computed there. What comes from workers that have made theirs goes into the table of the next round.

    Notes
    -----
    Workers never wait, so that the timing is that of plain asynchronous visits, most of which move the central variable
    by a step of all workers' means, and some not at all; the trace's staleness counts visits. The sums hold steps,
    ``-learning_rate * gradient``, in the place of gradients. The tables' rows are the server's memory of each worker,
    turned over at the worker's first visit in a round; their sums are kept up with every gradient, and begun anew with
    every round. The algorithm is known second-hand; that a worker stays at its point in between follows from the
    paper's notation, one delay for all gradients of a worker in the table.

    ``n`` are the workers that the server counts: of a trace with failures those that it does not know to be away. A
    worker that comes back begins at the newest version, and its rows of the table stay.

    References
    ----------
    Maranjyan and Richtarik 2025, "Ringleader ASGD", arXiv 2509.22860.
    """
    require_rate("learning_rate", learning_rate)

    def apply(server, central, message, memory, visit):
        fresh = memory.round == server.round
        now, following = (_choose(fresh, kept, turned) for kept, turned in _turned_over(memory))
        stepped = fresh & memory.stepped
        # To the table of this round, or of the next once the worker has made its step.
        of_now, of_following = (_add(table, message, here) for table, here in ((now, ~stepped), (following, stepped)))
        total = server.total + (of_now.mean() - now.mean())
        ahead = server.following + (of_following.mean() - following.mean())
        filled = server.filled + _entered(now, of_now)
        ahead_filled = server.following_filled + _entered(following, of_following)
        n = count_living(visit).astype(filled.dtype)
        steps = ~stepped & ((server.made > 0) | (filled >= n))
        made = server.made + steps.astype(server.made.dtype)
        # The table may have rows of workers that are away, or miss some of workers that came since.
        central = jnp.where(steps, central + total / filled.astype(central.dtype), central)
        over = (made > 0) & (made >= n)
        after = RingleaderServer(
            total=jnp.where(over, ahead, total),
            following=jnp.where(over, 0, ahead),
            filled=jnp.where(over, ahead_filled, filled),
            following_filled=jnp.where(over, 0, ahead_filled),
            made=jnp.where(over, 0, made),
            round=server.round + over.astype(jnp.int32),
        )
        point = jnp.where(steps, central, memory.point)
        return Applied(central, after, RingleaderMemory(of_now, of_following, server.round, stepped | steps, point))

    def init_server(central):
        zeros, none = jnp.zeros_like(central), jnp.int32(0)
        return RingleaderServer(zeros, zeros, none, none, none, none)

    def init_memory(central):
        table = _empty(central)
        return RingleaderMemory(table, table, jnp.int32(0), jnp.bool_(False), central)

    return Method(
        name="ringleader",
        hyperparameters={"learning_rate": learning_rate},
        optimizer=gradient_steps(learning_rate),
        apply=apply,
        init_server=init_server,
        init_memory=init_memory,
        reply=lambda server, central, memory, visit: memory.point,
        timing=Timing(protocol="exchange", window=1),
    )


def _empty(central: Array) -> Table:
    return Table(jnp.zeros_like(central), jnp.zeros((), central.dtype))


def _turned_over(memory: RingleaderMemory) -> tuple[tuple[Table, Table], ...]:
    """Return the two rows, each with what it is at the worker's first visit in a round."""
    return (memory.now, memory.following), (memory.following, _empty(memory.point))


def _choose(condition: Array, one: Table, other: Table) -> Table:
    return Table(*(jnp.where(condition, a, b) for a, b in zip(one, other, strict=True)))


def _add(table: Table, message: Array, here: Array) -> Table:
    return _choose(here, Table(table.total + message, table.number + 1), table)


def _entered(before: Table, after: Table) -> Array:
    """Return one if a worker has come into a table, else zero."""
    return ((before.number == 0) & (after.number > 0)).astype(jnp.int32)
