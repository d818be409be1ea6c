"""Local optimizers by their names in optax, for the command line."""

from collections.abc import Callable, Mapping
from typing import Any

import optax
import optax.contrib

from asyncsim.base.errors import InputError, require_choice
from asyncsim.methods.method import require_rate

#: The optimizers by their names on the command line.
OPTIMIZERS: Mapping[str, Callable[..., optax.GradientTransformation]] = {
    "adagrad": optax.adagrad,
    "adam": optax.adam,
    "adamw": optax.adamw,
    "lamb": optax.lamb,
    "lion": optax.lion,
    "muon": optax.contrib.muon,
    "nadam": optax.nadam,
    "nadamw": optax.nadamw,
    "rmsprop": optax.rmsprop,
    "sgd": optax.sgd,
}


class NamedOptimizer(optax.GradientTransformationExtraArgs):
    """An optax transformation that knows its name and learning rate."""

    #: ``optimizer``, the name, and ``learning_rate``: the methods list these among their
    #: hyper-parameters.
    hyperparameters: dict[str, Any]


def named_optimizer(name: str, learning_rate: float) -> NamedOptimizer:
    """Return an optimizer of optax with this learning rate and optax's defaults.

    ``name``: of `OPTIMIZERS`. Python takes any other optimizer of optax itself.

    Examples
    --------
    >>> from asyncsim import methods
    >>> dict(methods.agn(optimizer=methods.named_optimizer("adam", 1e-3)).hyperparameters)
    {'learning_rate': 0.001, 'optimizer': 'adam'}
    """
    require_choice("optimizer", name, OPTIMIZERS)
    if callable(learning_rate):
        raise InputError(
            "learning_rate: is a schedule, which a named optimizer cannot follow; give a number"
        )
    require_rate("learning_rate", learning_rate)
    optimizer = NamedOptimizer(
        *optax.with_extra_args_support(OPTIMIZERS[name](learning_rate=learning_rate))
    )
    optimizer.hyperparameters = {"learning_rate": learning_rate, "optimizer": name}
    return optimizer
