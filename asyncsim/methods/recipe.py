"""Recipes: a method's numbers become arguments of the compiled program instead of constants in it.

A method is made of pure functions closed over its hyper-parameters. `shares_programs` records the
call of a factory, so that a replay can rebuild the method from traced numbers. Methods that differ
only in a learning rate or a momentum then share one compiled program.
"""

import functools
import inspect
from collections.abc import Callable, Hashable, Mapping
from typing import Any, NamedTuple, TypeVar, cast

from asyncsim.base.calls import Call, bind
from asyncsim.base.errors import InputError
from asyncsim.methods.method import Method
from asyncsim.methods.named import NamedOptimizer, named_optimizer

Factory = TypeVar("Factory", bound=Callable[..., Method])


class Recipe(NamedTuple):
    """The call of a factory that made a method.

    Attributes
    ----------
    key : hashable
        Equal for methods that differ in their numbers alone.
    make : function
        From numbers, which may be traced, to the method.
    numbers : dict
        Floating-point numbers by name.
    product : Method
        The method; a method whose functions were replaced since has no recipe.
    """

    key: Hashable
    make: Callable[[Mapping[str, Any]], Method]
    numbers: dict[str, float]
    product: Method


def shares_programs(factory: Factory) -> Factory:
    """Let the methods that a factory makes share compiled programs where they differ in numbers
    alone.

    Floating-point arguments become arguments of the program if the factory uses them in arithmetic
    only. Counts, choices and numbers that Python compares remain constants.

    The made function raises InputError for a hyper-parameter that the factory lacks.

    Examples
    --------
    >>> from asyncsim.methods import Method, gradient_steps, shares_programs
    >>> @shares_programs
    ... def plain(learning_rate=0.05):
    ...     steps = gradient_steps(learning_rate)
    ...     return Method("plain", {"learning_rate": learning_rate}, optimizer=steps)
    """
    signature = inspect.signature(factory)
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    if any(parameter.kind not in by_name for parameter in signature.parameters.values()):
        raise InputError(
            f"{factory.__name__}: must name each of its parameters, without * and /, to share "
            "programs"
        )

    @functools.wraps(factory)
    def make(*args: Any, **kwargs: Any) -> Method:
        bind(Call(factory.__name__, args, tuple(kwargs.items())), factory, factory.__name__)
        method = factory(*args, **kwargs)._replace(recipe=None)
        arguments = signature.bind(*args, **kwargs)
        arguments.apply_defaults()
        return method._replace(recipe=_recipe(factory, arguments.arguments, method))

    return cast(Factory, make)


def recipe_of(method: Method) -> Recipe | None:
    """Return the recipe of a method; None if it has none or its functions were replaced since."""
    recipe = method.recipe
    if recipe is None:
        return None
    fields = [
        field for field in Method._fields if field not in ("name", "hyperparameters", "recipe")
    ]
    is_same = all(getattr(method, field) is getattr(recipe.product, field) for field in fields)
    return recipe if is_same else None


def recast(method: Method, key: tuple[Hashable, ...], change: Callable[[Method], Method]) -> Method:
    """Apply a change to a method and to its recipe; ``key`` identifies the change in programs."""
    changed, recipe = change(method)._replace(recipe=None), recipe_of(method)
    if recipe is None:
        return changed
    make = recipe.make
    return changed._replace(
        recipe=Recipe(
            (recipe.key, *key), lambda numbers: change(make(numbers)), recipe.numbers, changed
        )
    )


def _recipe(
    factory: Callable[..., Method], arguments: Mapping[str, Any], method: Method
) -> Recipe | None:
    """Build the recipe of a call; None if an argument has no hash."""
    numbers: dict[str, float] = {}
    constants: list[Hashable] = []

    def separate(name: str, value: Any) -> Callable[[Mapping[str, Any]], Any]:
        """Record an argument as a number or a constant; return its function of the numbers."""
        if isinstance(value, float):
            numbers[name] = value
            return lambda numbers: numbers[name]
        if isinstance(value, NamedOptimizer):
            settings = value.hyperparameters
            constants.append((name, settings["optimizer"]))
            rate = separate(f"{name}.learning_rate", settings["learning_rate"])
            return lambda numbers: named_optimizer(settings["optimizer"], rate(numbers))
        constants.append((name, type(value), value))
        return lambda numbers: value

    values = {name: separate(name, value) for name, value in arguments.items()}
    key = factory, tuple(constants), tuple(numbers)
    try:
        hash(key)
    except TypeError:
        return None

    def make(numbers: Mapping[str, Any]) -> Method:
        return factory(**{name: value(numbers) for name, value in values.items()})

    return Recipe(key, make, numbers, method)
