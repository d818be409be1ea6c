"""The methods: one algorithm, or one family, a file.

A factory takes hyper-parameters and returns a Method. It raises InputError for a hyper-parameter outside its range, and
for a learning rate beside an optimizer, which has its own.
"""

from collections.abc import Callable

from asyncsim.methods.adag import adag
from asyncsim.methods.adaptive_staleness import adaptive_staleness, dynsgd
from asyncsim.methods.agn import agn
from asyncsim.methods.async_local_sgd import async_local_sgd, delayed_nesterov
from asyncsim.methods.averaging import averaging
from asyncsim.methods.compression import mem_sgd, qsgd
from asyncsim.methods.damping import damping, delay_adaptive
from asyncsim.methods.dana import dana_slim, dana_zero
from asyncsim.methods.dc_asgd import dc_asgd
from asyncsim.methods.downpour import downpour, hogwild
from asyncsim.methods.elastic import aeasgd, eamsgd, easgd
from asyncsim.methods.fedasync import fedasync
from asyncsim.methods.fedbuff import fedbuff
from asyncsim.methods.gap_aware import gap_aware
from asyncsim.methods.gem import gem
from asyncsim.methods.leader import lgd, lsgd
from asyncsim.methods.method import Applied, Memories, Method, Timing, Visit, add, gradient_steps, send_update
from asyncsim.methods.named import named_optimizer
from asyncsim.methods.ringleader import ringleader
from asyncsim.methods.sgd import sgd
from asyncsim.methods.softsync import softsync
from asyncsim.methods.time_optimal import batch_sgd, rennala, ringmaster

#: What the command line knows, by name.
METHODS: dict[str, Callable[..., Method]] = {
    "adag": adag,
    "adaptive_staleness": adaptive_staleness,
    "aeasgd": aeasgd,
    "agn": agn,
    "async_local_sgd": async_local_sgd,
    "averaging": averaging,
    "batch_sgd": batch_sgd,
    "damping": damping,
    "dana_slim": dana_slim,
    "dana_zero": dana_zero,
    "dc_asgd": dc_asgd,
    "delay_adaptive": delay_adaptive,
    "delayed_nesterov": delayed_nesterov,
    "downpour": downpour,
    "dynsgd": dynsgd,
    "eamsgd": eamsgd,
    "easgd": easgd,
    "fedasync": fedasync,
    "fedbuff": fedbuff,
    "gap_aware": gap_aware,
    "gem": gem,
    "hogwild": hogwild,
    "lgd": lgd,
    "lsgd": lsgd,
    "mem_sgd": mem_sgd,
    "qsgd": qsgd,
    "rennala": rennala,
    "ringleader": ringleader,
    "ringmaster": ringmaster,
    "sgd": sgd,
    "softsync": softsync,
}

__all__ = [
    "METHODS",
    "Applied",
    "Memories",
    "Method",
    "Timing",
    "Visit",
    "adag",
    "adaptive_staleness",
    "add",
    "aeasgd",
    "agn",
    "async_local_sgd",
    "averaging",
    "batch_sgd",
    "damping",
    "dana_slim",
    "dana_zero",
    "dc_asgd",
    "delay_adaptive",
    "delayed_nesterov",
    "downpour",
    "dynsgd",
    "eamsgd",
    "easgd",
    "fedasync",
    "fedbuff",
    "gap_aware",
    "gem",
    "gradient_steps",
    "hogwild",
    "lgd",
    "lsgd",
    "mem_sgd",
    "named_optimizer",
    "qsgd",
    "rennala",
    "ringleader",
    "ringmaster",
    "send_update",
    "sgd",
    "softsync",
]
