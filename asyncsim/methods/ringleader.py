"""Ringleader ASGD: a table with a mean gradient of every worker, for heterogeneous data."""

from typing import Literal, NamedTuple

import jax.numpy as jnp

from asyncsim.methods.declared import Rate, declared
from asyncsim.methods.method import (
    LEARNING_RATE,
    Applied,
    Array,
    Method,
    Timing,
    count_living,
    gradient_steps,
)


class Table(NamedTuple):
    """One worker's gradients for one round: their sum, shape ``[parameters]``, and number."""

    total: Array
    number: Array

    def mean(self) -> Array:
        """Return the mean, zero if there are none."""
        return self.total / jnp.maximum(self.number, 1)


class RingleaderMemory(NamedTuple):
    """The server's memory of a worker."""

    current: Table  #: the worker's row in the table of ``round``, then in the next one
    following: Table
    round: Array  #: the round of the worker's last visit
    stepped: Array  #: whether its gradient made a step in that round
    point: Array | tuple[()]  #: the parameters of its next gradients; ``()`` with the newest


class RingleaderServer(NamedTuple):
    """The server's state, shared by all workers."""

    total: Array  #: sum over the workers of their means, in the table and in the next one
    following: Array
    filled: Array  #: workers with a gradient, in the table and in the next one
    following_filled: Array
    steps: Array  #: steps in this round; zero while the table is being filled
    round: Array


@declared
def ringleader(
    learning_rate: Rate = LEARNING_RATE, restart: Literal["step", "newest"] = "step"
) -> Method:
    """Return Ringleader ASGD.

    The server fills a table with the sum ``G_i`` and the number ``b_i`` of each worker's gradients.
    Once every worker has an entry, the completing gradient makes a step, and then one gradient of
    each other worker, ``n`` in all::

        central <- central - learning_rate / n * sum over i of G_i / b_i

    Gradients of workers that have already stepped in a round enter the table of the next round.

    ``restart``: where a worker computes its next gradient. ``"step"``, the paper: at the central
    variable after its own last step, until its next one. ``"newest"``, the authors' program: at the
    central variable after each of its visits.

    Notes
    -----
    Workers never wait, so that the trace is plain asynchronous. Most visits move the central
    variable by a step of all workers' means, some not at all; the trace's staleness counts visits.
    The sums hold steps, ``-learning_rate * gradient``, instead of gradients. The tables' rows are
    the server's memory of each worker, turned over at the worker's first visit in a round; their
    sums are updated with every gradient and restart with every round. The paper's algorithm is
    known second-hand: its notation has one delay for all gradients of a worker in the table, so a
    worker stays at its point between steps. The program (RingleaderASGD in
    vectozavr/ringmaster-lmo) was read; in both, the step of the completing gradient is the first of
    the round's ``n``.

    On a trace with failures ``n`` excludes the workers that the server knows to be away. A
    returning worker starts from the newest version, and its rows of the table remain.

    References
    ----------
    Maranjyan and Richtarik 2025, "Ringleader ASGD", arXiv 2509.22860.
    """
    keeps_point = restart == "step"

    def apply(server, central, message, memory, visit):
        fresh = memory.round == server.round
        current, following = (
            _choose(fresh, row, next_row) for row, next_row in _turned_over(memory)
        )
        stepped = fresh & memory.stepped
        # To the table of this round, or of the next once the worker has stepped.
        new_current, new_following = (
            _add(current, message, ~stepped),
            _add(following, message, stepped),
        )
        total = server.total + (new_current.mean() - current.mean())
        ahead = server.following + (new_following.mean() - following.mean())
        filled = server.filled + _entered(current, new_current)
        ahead_filled = server.following_filled + _entered(following, new_following)
        n = count_living(visit).astype(filled.dtype)
        does_step = ~stepped & ((server.steps > 0) | (filled >= n))
        steps = server.steps + does_step.astype(server.steps.dtype)
        # The table may contain rows of absent workers, or miss rows of workers that joined since.
        central = jnp.where(does_step, central + total / filled.astype(central.dtype), central)
        over = (steps > 0) & (steps >= n)
        after = RingleaderServer(
            total=jnp.where(over, ahead, total),
            following=jnp.where(over, 0, ahead),
            filled=jnp.where(over, ahead_filled, filled),
            following_filled=jnp.where(over, 0, ahead_filled),
            steps=jnp.where(over, 0, steps),
            round=server.round + over.astype(jnp.int32),
        )
        point = jnp.where(does_step, central, memory.point) if keeps_point else ()
        rows = RingleaderMemory(
            new_current, new_following, server.round, stepped | does_step, point
        )
        return Applied(central, after, rows)

    def init_server(central):
        zeros, zero = jnp.zeros_like(central), jnp.int32(0)
        return RingleaderServer(zeros, zeros, zero, zero, zero, zero)

    def init_memory(central):
        table = _empty(central)
        return RingleaderMemory(
            table, table, jnp.int32(0), jnp.bool_(False), central if keeps_point else ()
        )

    return Method(
        gradient_steps(learning_rate),
        apply=apply,
        init_server=init_server,
        init_memory=init_memory,
        reply=(lambda server, central, memory, visit: memory.point) if keeps_point else None,
        timing=Timing(protocol="exchange" if keeps_point else None, window=1),
        coordinatewise=True,
    )


def _empty(central: Array) -> Table:
    return Table(jnp.zeros_like(central), jnp.zeros((), central.dtype))


def _turned_over(memory: RingleaderMemory) -> tuple[tuple[Table, Table], ...]:
    """Return the pairs of a row and its replacement at the worker's first visit in a round."""
    return (memory.current, memory.following), (memory.following, _empty(memory.current.total))


def _choose(condition: Array, first: Table, second: Table) -> Table:
    return Table(*(jnp.where(condition, a, b) for a, b in zip(first, second, strict=True)))


def _add(table: Table, message: Array, condition: Array) -> Table:
    return _choose(condition, Table(table.total + message, table.number + 1), table)


def _entered(before: Table, after: Table) -> Array:
    """Return 1 if the message was the worker's first in the table, else 0."""
    return ((before.number == 0) & (after.number > 0)).astype(jnp.int32)
