"""The signature of a factory declares its method, and the call is recorded.

A method is named after its factory, and the factory's arguments are its hyper-parameters. The
recorded call makes the method's numbers arguments of the compiled program instead of constants in
it: methods that differ only in a learning rate or a momentum share one program.
"""

from collections.abc import Callable, Hashable, Mapping
from typing import Annotated, Any, NamedTuple

import optax

from asyncsim.base.declared import Factory, declaring
from asyncsim.byzantine.aggregation import Rule
from asyncsim.clusters.laws import Law
from asyncsim.clusters.policy import Policy
from asyncsim.methods.method import Method, Visit, require_optimizer, require_policy, require_rate
from asyncsim.methods.named import NamedOptimizer, named_optimizer

Rate = Annotated[float | Callable[[Visit], Any], require_rate]
Optimizer = Annotated[optax.GradientTransformation, require_optimizer]
#: A policy, its text, or None for any; the factory gets it parsed.
PolicyLike = Annotated[Any, require_policy]


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


def declared(factory: Factory) -> Factory:
    """Name the methods of a factory, list and check its arguments, and record its calls.

    Floating-point arguments become arguments of compiled programs if the factory uses them in
    arithmetic only. Counts, choices and numbers that Python compares remain constants.

    Raises
    ------
    InputError
        From a call, for a hyper-parameter that the factory lacks or that is outside its range.

    Examples
    --------
    >>> from asyncsim.methods import Method, declared, gradient_steps
    >>> @declared
    ... def plain(learning_rate: float = 0.05):
    ...     return Method(gradient_steps(learning_rate))
    >>> plain(0.1)
    Method(plain: learning_rate=0.1)
    """
    return declaring(_build)(factory)


def _build(factory: Callable[..., Method], arguments: dict[str, Any]) -> Method:
    """Build a method with its name, hyper-parameters and recipe."""

    def make(values: Mapping[str, Any]) -> Method:
        method = factory(**values)
        return method._replace(name=factory.__name__, hyperparameters=_listed(values), recipe=None)

    method = make(arguments)
    return method._replace(recipe=_recipe(factory, arguments, method, make))


def _listed(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a factory as tables and files show them."""
    listed = {
        name: str(value) if isinstance(value, Policy | Rule | Law) else value
        for name, value in values.items()
    }
    if listed.pop("optimizer", None) is not None:
        del listed["learning_rate"]  # a NamedOptimizer lists its name and rate
        listed = getattr(values["optimizer"], "hyperparameters", {"optimizer": "optax"}) | listed
    if listed.pop("server_optimizer", None) is not None:
        del listed["server_rate"], listed["server_momentum"]
        listed["server_optimizer"] = "optax"
    return listed


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
    factory: Callable[..., Method],
    arguments: Mapping[str, Any],
    method: Method,
    make: Callable[[Mapping[str, Any]], Method],
) -> Recipe | None:
    """Record a call; None if an argument has no hash."""
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
    return Recipe(
        key,
        lambda numbers: make({name: value(numbers) for name, value in values.items()}),
        numbers,
        method,
    )
