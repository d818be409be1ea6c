"""Local optimizers by their names in optax, for the command line."""

import functools
import inspect
import types
import warnings
from collections.abc import Callable
from typing import Any

import optax
import optax.contrib

from asyncsim.base.errors import InputError, require_choice
from asyncsim.methods.method import require_rate

#: lbfgs may be called without a learning rate and needs the value of the loss at each step;
#: noisy_sgd draws the same noise for all workers and seeds.
_UNFIT = ("lbfgs", "noisy_sgd")


class NamedOptimizer(optax.GradientTransformationExtraArgs):
    """An optax transformation that knows its name and learning rate."""

    #: ``optimizer``, the name, and ``learning_rate``: the methods list these among their
    #: hyper-parameters.
    hyperparameters: dict[str, Any]


def named_optimizer(name: str, learning_rate: float) -> NamedOptimizer:
    """Return an optimizer of optax with this learning rate and optax's defaults.

    ``name``: a function of optax whose other arguments have defaults, and whose steps need
    gradients and parameters alone: ``"adam"``, ``"rmsprop"``, ``"adagrad"``, ...

    Examples
    --------
    >>> from asyncsim import methods
    >>> dict(methods.agn(optimizer=methods.named_optimizer("adam", 1e-3)).hyperparameters)
    {'learning_rate': 0.001, 'optimizer': 'adam'}
    """
    choices = optimizers()
    if not isinstance(name, str) or name not in choices:
        require_choice("optimizer", name, choices)
    if callable(learning_rate):
        raise InputError(
            "learning_rate: is a schedule, which a named optimizer cannot follow; give a number"
        )
    require_rate("learning_rate", learning_rate)
    optimizer = NamedOptimizer(
        *optax.with_extra_args_support(choices[name](learning_rate=learning_rate))
    )
    optimizer.hyperparameters = {"learning_rate": learning_rate, "optimizer": name}
    return optimizer


def optimizers() -> dict[str, Callable[..., optax.GradientTransformation]]:
    """List the optimizers of optax that need a rate, and only gradients and parameters a step."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of deprecated names in optax
        functions = {
            name: getattr(optax, name)
            for name in dir(optax)
            if not name.startswith(("_", "scale_by_"))
        }
    functions["muon"] = optax.contrib.muon
    return {
        name: function
        for name, function in functions.items()
        if isinstance(function, types.FunctionType | functools.partial)
        and name not in _UNFIT
        and _needs_a_rate_alone(function)
    }


def _needs_a_rate_alone(function: Callable[..., Any]) -> bool:
    parameters = dict(inspect.signature(function).parameters)
    rate = parameters.pop("learning_rate", None)
    optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return rate is not None and all(
        parameter.default is not inspect.Parameter.empty or parameter.kind in optional
        for parameter in parameters.values()
    )
