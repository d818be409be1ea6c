"""IA2SGD: asynchronous SGD with a table of every worker's last gradient, for heterogeneous data."""

from typing import NamedTuple

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


class GradientTable(NamedTuple):
    """The sum of the workers' last gradients, shape ``[parameters]``, and their number.

    As the server's memory of one worker: its last gradient, and 1; both zero before its first.
    """

    total: Array
    number: Array


@declared
def ia2sgd(learning_rate: Rate = LEARNING_RATE) -> Method:
    """Return incremental aggregated asynchronous SGD.

    Each gradient replaces its worker's previous one ``g_i`` in a table of ``n`` rows. From the
    arrival after the first full table on, every arrival steps with the table's mean::

        central <- central - learning_rate / n * sum over i of g_i

    Notes
    -----
    The paper's preprint calls the method DuDe-ASGD, its submission to a conference IA2SGD; it was
    not read. The rule is the program's (IAASGD in vectozavr/ringmaster-lmo), which makes no step
    with the arrival that fills the table. The table holds steps, ``-learning_rate * gradient``,
    instead of gradients. Its sum is updated with every gradient and never restarts, as in the
    program. A slow worker's row may become as stale as its computation is long; `ringleader`
    bounds this.

    On a trace with failures a full table has a row for each worker that the server does not know to
    be away; rows of absent workers remain.

    References
    ----------
    Wang, Sun, Wai and Zhang 2024, "Dual-delayed asynchronous SGD for arbitrarily heterogeneous
    data", arXiv 2405.16966; the rule as in the program of Maranjyan and Richtarik 2025,
    "Ringleader ASGD", arXiv 2509.22860.
    """

    def apply(server, central, message, memory, visit):
        is_full = server.number >= count_living(visit)
        table = GradientTable(
            server.total + (message - memory.total), server.number + 1 - memory.number
        )
        step = table.total / table.number.astype(central.dtype)
        return Applied(
            jnp.where(is_full, central + step, central), table, GradientTable(message, jnp.int32(1))
        )

    def init(central):
        return GradientTable(jnp.zeros_like(central), jnp.int32(0))

    return Method(
        gradient_steps(learning_rate),
        apply=apply,
        init_server=init,
        init_memory=init,
        timing=Timing(window=1),
        coordinatewise=True,
    )
