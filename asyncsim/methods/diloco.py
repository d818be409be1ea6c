"""DiLoCo: workers train from the same parameters, and the server steps with an outer momentum."""

from typing import Literal

import optax

from asyncsim.base.declared import Fraction, Positive
from asyncsim.methods.declared import Optimizer, PolicyLike, Rate, declared
from asyncsim.methods.fedbuff import fedbuff
from asyncsim.methods.method import LEARNING_RATE, Method


@declared
def diloco(
    learning_rate: Rate = LEARNING_RATE,
    server_rate: Positive = 0.7,
    server_momentum: Fraction = 0.9,
    outer: Literal["nesterov", "heavy_ball"] = "nesterov",
    optimizer: Optimizer | None = None,
    policy: PolicyLike = "barrier()",
) -> Method:
    """Return DiLoCo; the trace's window is the local steps of a round.

    With ``D`` the mean of the workers' sums of local steps from the central variable::

        m       <- server_momentum m + D
        central <- central + server_rate (server_momentum m + D)        ("nesterov")
        central <- central + server_rate m                              ("heavy_ball")

    Parameters
    ----------
    outer : {"nesterov", "heavy_ball"}
        The outer momentum. "nesterov": the paper, exogym, and the baseline of NoLoCo. "heavy_ball":
        gensyn's program, under the same name.
    optimizer : optax.GradientTransformation, optional
        The workers' inner optimizer, AdamW in the paper; its state stays with the worker.

    Notes
    -----
    `asyncsim.methods.fedbuff` without weights, with the policy of `asyncsim.methods.averaging`;
    `asyncsim.methods.async_local_sgd` steps at each arrival. The paper has 500 local steps.

    References
    ----------
    Douillard et al. 2023, "DiLoCo: distributed low-communication training of language models",
    arXiv 2311.08105.
    """
    method = fedbuff(
        learning_rate,
        server_rate,
        server_momentum,
        law="constant",
        optimizer=optimizer,
        policy=policy,
    )
    if outer == "nesterov":
        return method
    ball = optax.sgd(server_rate, server_momentum)
    heavy = fedbuff(optimizer=optimizer, law="constant", server_optimizer=ball)
    return method._replace(combine=heavy.combine, init_server=heavy.init_server)
