"""Compiled functions without needless copies: what is only passed on stays where it is."""

import functools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
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
        used_up = [place for one in self._used_up for place in jax.tree.leaves(given[one]) if place not in kept]
        order = _in_place(list(made.values()), replaced, used_up, jaxpr.in_avals, jaxpr.out_avals)

        reused = [*replaced, *used_up]

        @functools.partial(jax.jit, donate_argnums=reused)
        def run(*leaves: Any) -> list[Any]:
            results = jax.tree.leaves(self._function(*jax.tree.unflatten(structure, leaves)))
            return [results[leaf] for leaf in order]

        there = passed | {id(outputs[leaf]): len(inputs) + at for at, leaf in enumerate(order)}
        return run, reused, [there[id(variable)] for variable in outputs], jax.tree.structure(shapes)


def _in_place(
    made: list[int], replaced: Mapping[int, int], used_up: Sequence[int], given: Sequence[Any], returned: Sequence[Any]
) -> list[int]:
    """Return the places of the leaves to be made, in an order in which each gets the memory of what it replaces.

    ``replaced`` and ``used_up`` have places of arguments; ``given`` and ``returned`` are the kinds of all leaves. Of
    results that are alike JAX gives the first the memory of the first argument that is donated. (It promises no such
    order: on another one only speed depends, as XLA then copies what is still to be read.)
    """
    order, others = [], [leaf for leaf in made if leaf not in replaced.values()]
    for place in sorted([*replaced, *used_up]):
        alike = (
            leaf for leaf in others if returned[leaf].update(weak_type=False) == given[place].update(weak_type=False)
        )
        leaf = replaced.get(place, next(alike, None))
        if leaf is not None:
            order.append(leaf)
            others = [other for other in others if other != leaf]
    return order + others


def _numbered(tree: Any) -> Any:
    """Return the tree with its leaves' places among them."""
    leaves, structure = jax.tree.flatten(tree)
    return jax.tree.unflatten(structure, range(len(leaves)))
