"""The methods: one algorithm a file. A factory takes hyper-parameters and returns a Method."""

from collections.abc import Callable

from asyncsim.methods.adaptive_staleness import adaptive_staleness
from asyncsim.methods.downpour import downpour
from asyncsim.methods.gem import gem
from asyncsim.methods.method import Applied, Method, Timing, Visit, add, gradient_steps, send_update
from asyncsim.methods.sgd import sgd

#: What the command line knows, by name.
METHODS: dict[str, Callable[..., Method]] = {
    "adaptive_staleness": adaptive_staleness,
    "downpour": downpour,
    "gem": gem,
    "sgd": sgd,
}

__all__ = [
    "METHODS",
    "Applied",
    "Method",
    "Timing",
    "Visit",
    "adaptive_staleness",
    "add",
    "downpour",
    "gem",
    "gradient_steps",
    "send_update",
    "sgd",
]
