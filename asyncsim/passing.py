"""Compiled functions without needless copies: what is only passed on stays where it is."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax


class Passing:
    """A compiled function that does not copy what it only passes on, and reuses the memory of what it replaces.

    Parameters
    ----------
    function : function
    replaced : mapping of int to int
        Places of arguments that are what the function returned before at some place. An array that it computes there
        belongs to nobody else, so the next call may use its memory; one that it passes on may have other owners.
    used_up : tuple of int
        Places of arguments that belong to nobody else.
    """

    def __init__(self, function: Callable[..., Any], replaced: Mapping[int, int], used_up: tuple[int, ...]):
        self._function, self._replaced, self._used_up = function, replaced, used_up
        self._compiled: dict[Any, Any] = {}

    def __call__(self, *arguments: Any) -> Any:
        """Return what the function returns; it is compiled anew for each structure of its arguments."""
        leaves, structure = jax.tree.flatten(arguments)
        if structure not in self._compiled:
            self._compiled[structure] = self._compile(arguments)
        run, sources, returned = self._compiled[structure]
        there = [*leaves, *run(*leaves)]
        return jax.tree.unflatten(returned, [there[source] for source in sources])

    def _compile(self, arguments: tuple[Any, ...]) -> tuple[Any, list[int], Any]:
        """Return the compiled function of leaves, and where among these and its results each returned leaf is."""
        structure = jax.tree.structure(arguments)
        jaxpr, shapes = jax.make_jaxpr(self._function, return_shape=True)(*arguments)
        place_of = {id(variable): place for place, variable in enumerate(jaxpr.jaxpr.invars)}
        count = len(place_of)
        made: list[int] = []
        for leaf, variable in enumerate(jaxpr.jaxpr.outvars):
            if id(variable) not in place_of:  # the first of those that are the same
                place_of[id(variable)] = count + len(made)
                made.append(leaf)
        sources = [place_of[id(variable)] for variable in jaxpr.jaxpr.outvars]
        given, returned = _numbered(arguments), _numbered(shapes)
        reused = [place for one in self._used_up for place in jax.tree.leaves(given[one]) if place not in sources]
        alone = [source >= count and sources.count(source) == 1 for source in sources]
        for one, before in self._replaced.items():
            places = zip(jax.tree.leaves(given[one]), jax.tree.leaves(returned[before]), strict=True)
            reused += [place for place, output in places if alone[output] and place not in sources]

        @functools.partial(jax.jit, donate_argnums=tuple(reused))
        def run(*leaves: Any) -> list[Any]:
            results = jax.tree.leaves(self._function(*jax.tree.unflatten(structure, leaves)))
            return [results[i] for i in made]

        return run, sources, jax.tree.structure(shapes)


def _numbered(tree: Any) -> Any:
    """Return the tree with its leaves' places among them."""
    leaves, structure = jax.tree.flatten(tree)
    return jax.tree.unflatten(structure, range(len(leaves)))
