"""Compiled functions without needless copies: what is only passed on stays where it is."""

import functools
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp


class Passing:
    """A compiled function that does not copy what it only passes on, and reuses the memory of what it replaces.

    Parameters
    ----------
    function : function
    replaced : mapping of int to int
        Places of arguments that are what the function returned before at some place. An array that it computes there
        belongs to nobody else, so the next call may use its memory; one that it passes on may have other owners. One
        that is given twice, as a call with other arguments returned it twice, is copied first.
    """

    def __init__(self, function: Callable[..., Any], replaced: Mapping[int, int]):
        self._function, self._replaced = function, replaced
        self._compiled: dict[Any, Any] = {}

    def __call__(self, *arguments: Any) -> Any:
        """Return what the function returns; it is compiled anew for each structure of its arguments."""
        leaves, structure = jax.tree.flatten(arguments)
        if structure not in self._compiled:
            self._compiled[structure] = self._compile(arguments)
        run, reused, sources, returned = self._compiled[structure]
        given = Counter(map(id, leaves))
        for place in reused:
            if given[id(leaves[place])] > 1:
                leaves[place] = jnp.array(leaves[place])
        there = [*leaves, *run(*leaves)]
        return jax.tree.unflatten(returned, [there[source] for source in sources])

    def _compile(self, arguments: tuple[Any, ...]) -> tuple[Any, list[int], list[int], Any]:
        """Return the compiled function of leaves, and whose memory it reuses.

        And where among these and its results each returned leaf is, and the tree of what is returned.
        """
        structure = jax.tree.structure(arguments)
        jaxpr, shapes = jax.make_jaxpr(self._function, return_shape=True)(*arguments)
        inputs, outputs = jaxpr.jaxpr.invars, jaxpr.jaxpr.outvars
        passed = {id(variable): place for place, variable in enumerate(inputs)}
        made: dict[int, int] = {}  # by variable the first leaf that it is returned as
        for leaf, variable in enumerate(outputs):
            if id(variable) not in passed:
                made.setdefault(id(variable), leaf)
        kept = {passed.get(id(variable)) for variable in outputs}
        given, returned = _numbered(arguments), _numbered(shapes)
        replaced: dict[int, int] = {}
        for one, before in self._replaced.items():
            leaves = zip(jax.tree.leaves(given[one]), jax.tree.leaves(returned[before]), strict=True)
            alone = ((place, leaf) for place, leaf in leaves if sum(outputs[leaf] is other for other in outputs) == 1)
            replaced |= {place: leaf for place, leaf in alone if id(outputs[leaf]) in made and place not in kept}
        reused = sorted(replaced)
        # Of results that are alike JAX gives the first the memory of the first argument that is donated. (It promises
        # no such order: on another one only speed depends, as XLA then copies what is still to be read.)
        in_place = [replaced[place] for place in reused]
        order = in_place + [leaf for leaf in made.values() if leaf not in in_place]

        @functools.partial(jax.jit, donate_argnums=reused)
        def run(*leaves: Any) -> list[Any]:
            results = jax.tree.leaves(self._function(*jax.tree.unflatten(structure, leaves)))
            return [results[leaf] for leaf in order]

        there = passed | {id(outputs[leaf]): len(inputs) + at for at, leaf in enumerate(order)}
        return run, reused, [there[id(variable)] for variable in outputs], jax.tree.structure(shapes)


def _numbered(tree: Any) -> Any:
    """Return the tree with its leaves' places among them."""
    leaves, structure = jax.tree.flatten(tree)
    return jax.tree.unflatten(structure, range(len(leaves)))
