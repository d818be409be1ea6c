"""The methods: one algorithm, or one family, a file.

A factory takes hyper-parameters and returns a Method. It raises InputError for a hyper-parameter
outside its range, and for a learning rate beside an optimizer, which has its own. Each factory
explains its parameters, except those that many methods share:

``learning_rate``
    Of the worker's plain local steps: a number above zero, or a schedule, which is a function of
    the `Visit`.
``optimizer``
    A local optimizer of optax instead of plain steps. Its state stays with the worker; a read does
    not reset it.
``momentum``, ``server_momentum``
    In [0, 1).
``law``, ``strength``, ``threshold``
    How a message's weight falls with its staleness: see `damping`.
``policy``
    The server policy that the method needs, as a policy or as text; None accepts any trace.
"""

from collections.abc import Callable

from asyncsim.methods.adag import adag
from asyncsim.methods.adaptive_staleness import adaptive_staleness, dynsgd
from asyncsim.methods.agn import agn
from asyncsim.methods.async_local_sgd import async_local_sgd, delayed_nesterov
from asyncsim.methods.averaging import averaging
from asyncsim.methods.basgd import basgd
from asyncsim.methods.byzantine import kardam, zeno_pp
from asyncsim.methods.compression import mem_sgd, qsgd
from asyncsim.methods.damping import damping, delay_adaptive
from asyncsim.methods.dana import dana_slim, dana_zero
from asyncsim.methods.dc_asgd import dc_asgd
from asyncsim.methods.declared import declared
from asyncsim.methods.decoupled_diloco import decoupled_diloco
from asyncsim.methods.diloco import diloco
from asyncsim.methods.downpour import downpour, hogwild
from asyncsim.methods.elastic import aeasgd, eamsgd, easgd
from asyncsim.methods.entropy import entropy_sgd, parle
from asyncsim.methods.fedasync import fedasync
from asyncsim.methods.fedbuff import fedbuff
from asyncsim.methods.gap_aware import gap_aware
from asyncsim.methods.gem import gem
from asyncsim.methods.gossip import adpsgd, dpsgd, osgp, sgp
from asyncsim.methods.ia2sgd import ia2sgd
from asyncsim.methods.leader import lgd, lsgd
from asyncsim.methods.malenia import malenia
from asyncsim.methods.method import (
    Applied,
    Memories,
    Method,
    Timing,
    Visit,
    add,
    completing,
    gradient_steps,
    present,
    send_update,
)
from asyncsim.methods.mindflayer import mindflayer
from asyncsim.methods.named import named_optimizer
from asyncsim.methods.pipelines import async_nesterov, weight_prediction
from asyncsim.methods.policy_gradient import (
    CORRECTIONS,
    Correction,
    PolicyGradient,
    policy_gradient,
)
from asyncsim.methods.rescaled_asgd import rescaled_asgd
from asyncsim.methods.ringleader import ringleader
from asyncsim.methods.ringmaster_lmo import lmo_steps, ringmaster_lmo
from asyncsim.methods.robust import robust
from asyncsim.methods.robust_gossip import clipped_gossip, robust_gossip
from asyncsim.methods.server_optimizer import server_optimizer
from asyncsim.methods.sgd import sgd
from asyncsim.methods.softsync import softsync
from asyncsim.methods.streaming_diloco import streaming_diloco
from asyncsim.methods.time_optimal import batch_sgd, rennala, ringmaster

#: The table of methods: the command line, its help, the styles of figures and the contract tests
#: follow from it.
METHODS: dict[str, Callable[..., Method]] = {
    factory.__name__: factory
    for factory in (
        adag,
        adaptive_staleness,
        adpsgd,
        aeasgd,
        agn,
        async_local_sgd,
        async_nesterov,
        averaging,
        basgd,
        batch_sgd,
        clipped_gossip,
        damping,
        dana_slim,
        dana_zero,
        dc_asgd,
        decoupled_diloco,
        delay_adaptive,
        delayed_nesterov,
        diloco,
        downpour,
        dpsgd,
        dynsgd,
        eamsgd,
        easgd,
        entropy_sgd,
        fedasync,
        fedbuff,
        gap_aware,
        gem,
        hogwild,
        ia2sgd,
        kardam,
        lgd,
        lsgd,
        malenia,
        mem_sgd,
        mindflayer,
        osgp,
        parle,
        qsgd,
        rennala,
        rescaled_asgd,
        ringleader,
        ringmaster,
        ringmaster_lmo,
        robust,
        robust_gossip,
        server_optimizer,
        sgd,
        sgp,
        softsync,
        streaming_diloco,
        weight_prediction,
        zeno_pp,
    )
}

__all__ = [
    "CORRECTIONS",
    "METHODS",
    "Applied",
    "Correction",
    "Memories",
    "Method",
    "PolicyGradient",
    "Timing",
    "Visit",
    "add",
    "completing",
    "declared",
    "gradient_steps",
    "lmo_steps",
    "named_optimizer",
    "policy_gradient",
    "present",
    "send_update",
    *METHODS,
]
