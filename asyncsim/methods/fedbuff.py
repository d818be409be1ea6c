"""FedBuff: the server buffers the clients' updates, and steps with the mean of a full buffer."""

import jax

from asyncsim.base.declared import Fraction, NonNegative, Positive
from asyncsim.methods.buffer import mean_message, outer_optimizer, outer_step
from asyncsim.methods.damping import StalenessLaw, staleness_weight
from asyncsim.methods.declared import Optimizer, PolicyLike, Rate, declared
from asyncsim.methods.method import LEARNING_RATE, Applied, Method, Timing, local_steps


@declared
def fedbuff(
    learning_rate: Rate = LEARNING_RATE,
    server_rate: Positive = 1.0,
    server_momentum: Fraction = 0.0,
    law: StalenessLaw = "polynomial",
    strength: Positive = 0.5,
    threshold: NonNegative = 4.0,
    optimizer: Optimizer | None = None,
    server_optimizer: Optimizer | None = None,
    policy: PolicyLike = "buffered(count=10)",
) -> Method:
    """Return buffered asynchronous federated averaging, the window of the trace being a client's
    local steps.

    ::

        sent    = law(staleness) * sum of the local steps
        central <- central + server_rate * mean of the version's messages      (once it is complete)

    Parameters
    ----------
    server_momentum : float
        Nesterov's on the server, in [0, 1).
    law, strength, threshold
        See `asyncsim.methods.damping`.
    server_optimizer : optax.GradientTransformation, optional
        The server's optimizer, instead of its rate and momentum; it sees the problem's
        tensors.
    policy : Policy or text, optional
        Its count is the size of the buffer.

    Notes
    -----
    The paper's buffer holds ten messages. Its clients send start minus end, a descent direction
    that is subtracted; here all messages are end minus start. The sum is divided by the number of
    messages, not by the sum of their weights; FLSim's program divides the weights by their average,
    and corrects the momentum for them.

    References
    ----------
    Nguyen et al. 2022, "Federated learning with buffered asynchronous aggregation", arXiv
    2106.06639.
    """
    outer = outer_optimizer(server_rate, server_momentum, server_optimizer, (1.0, 0.0))
    factor = staleness_weight(law, strength, threshold)

    def message(worker, update, start, central, visit):
        return jax.tree.map(lambda leaf: factor(visit, leaf) * leaf, update), worker, {}

    def combine(server, central, messages, visits):
        return Applied(*outer_step(outer, server, central, mean_message(messages, visits)))

    return Method(
        local_steps(learning_rate, optimizer),
        message=message,
        combine=combine,
        init_server=outer.init,
        space="vector" if server_optimizer is None else "tensors",
        timing=Timing(policy=policy),
        coordinatewise=server_optimizer is None,
    )
