"""Compiled functions on a CPU: computed side by side, without needless copies; and the memory that they leave."""

import ctypes
import functools
import os
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp

from asyncsim.base.tracing import jax_settings

#: Starts a call from a thread; returns a function that returns the results, arrays that may still be computed.
Start = Callable[..., Callable[[], Any]]


class SideBySide:
    """A compiled function whose calls do not wait for one another.

    What one thread starts on a device, XLA computes in that order, one after the other; what several start, side by
    side, once its inputs are there. So calls are started from threads.

    Parameters
    ----------
    function : function
        To be compiled.
    at_once : int
        At most so many are computed side by side. With 1 there is no thread.
    used_up : tuple of int
        Places of arguments whose memory the results may have.
    """

    def __init__(self, function: Callable[..., Any], at_once: int, used_up: tuple[int, ...] = ()):
        self._function, self._at_once = jax.jit(function, donate_argnums=used_up), at_once
        self._calls: dict[Any, Callable[..., Any]] = {}

    def call_for(self, *arguments: Any) -> Callable[..., Any]:
        """Return the compiled function for arguments of these kinds; any thread may call it.

        Threads do not share what JAX is told in a context, so that they run what was compiled in this one; callbacks
        of the function see whether 64 bits are enabled in it.
        """
        config: Any = jax.config
        told = config.jax_enable_x64, config.jax_numpy_dtype_promotion, *jax_settings().values()
        leaves, structure = jax.tree.flatten(arguments)
        kind = told, structure, tuple((leaf.shape, leaf.dtype) for leaf in leaves)
        if kind not in self._calls:
            compiled = self._function.lower(*arguments).compile()
            self._calls[kind] = _with_64_bits(config.jax_enable_x64, compiled)
        return self._calls[kind]

    def start_for(self, *arguments: Any) -> Start:
        """Return what starts calls of `call_for`: a function of the thread's number and the arguments."""
        call = self.call_for(*arguments)
        return lambda thread, *given: begin(self._at_once, thread, call, *given)


def begin(threads: int, thread: int, call: Callable[..., Any], *arguments: Any) -> Callable[[], Any]:
    """Call a function in one of so many threads; with 1 there is none. Returns what waits for the result."""
    if threads == 1:
        results = call(*arguments)
        return lambda: results
    return _threads(threads)[thread].submit(call, *arguments).result


def _with_64_bits(enabled: bool, compiled: Callable[..., Any]) -> Callable[..., Any]:
    def call(*arguments: Any) -> Any:
        with jax.enable_x64(enabled):
            return compiled(*arguments)

    return call


def cores() -> int:
    """Return how many cores this process may use, which is how many threads XLA has there."""
    if os.environ.get("NPROC", "").isdigit():
        return max(1, int(os.environ["NPROC"]))
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@functools.cache
def _threads(count: int) -> list[ThreadPoolExecutor]:
    """Return executors of one thread each, as one of several might start all calls from the same; shared by all."""
    return [ThreadPoolExecutor(1, thread_name_prefix=f"asyncsim-gradients-{i}") for i in range(count)]


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


#: What glibc's mallopt is told, a parameter and bytes each: allocations larger than the first (M_MMAP_THRESHOLD, 32 MiB
#: is the most it takes) go back to the system when they are freed, and so does what is free at the end of an arena but
#: for the second (M_TOP_PAD; half of a thread's heap, which would never go back with all of it).
_KEEPING = ((-3, 32 * 2**20), (-2, 32 * 2**20))


@functools.cache
def keep() -> None:
    """Keep free memory for what is allocated next, some 32 MiB for each arena, to the end of the process; with glibc.

    By default glibc gives back what a gradient's intermediate results took after each gradient, and the system clears
    it page by page before the next: 20 to 180 pages for each commit of MNIST's network, 3 to 8 % of the rate.
    """
    set_option = _of_glibc("mallopt")
    if set_option is not None:
        for option in _KEEPING:
            set_option(*option)


def trim() -> None:
    """Give free memory back to the system, if the C library is glibc; others do so themselves, or cannot be told.

    JAX's arrays begin at multiples of 64 bytes, and glibc does not fit such an array into what one of the same size
    has left. A replay of the thesis' perceptron by GEM with 100 workers held 7.7 GiB after 300 commits without this and
    5.1 with it; it costs 2 to 9 % of the rate.
    """
    give_back = _of_glibc("malloc_trim")
    if give_back is not None:
        give_back(0)


@functools.cache
def _of_glibc(function: str) -> Callable[..., int] | None:
    return getattr(ctypes.CDLL(None), function, None) if sys.platform == "linux" else None
