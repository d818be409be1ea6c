"""Compiled functions that are started from several threads, so that a CPU computes them side by side."""

import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax


class SideBySide:
    """A compiled function whose calls do not wait for one another.

    What one thread starts on a device, XLA computes in that order, one after the other; what several start, side by
    side, once its inputs are there. So calls are started from threads, in turn.

    Parameters
    ----------
    function : function
        To be compiled.
    calls : int
        At most so many are computed side by side. With 1 there is no thread.
    """

    def __init__(self, function: Callable[..., Any], calls: int):
        self._function, self._calls = jax.jit(function), calls
        self._compiled: dict[Any, Callable[..., Any]] = {}

    def compiled_for(self, *arguments: Any) -> Callable[..., Any]:
        """Return the function compiled for arguments of these kinds, to be given to `start`.

        Threads do not share what JAX is told in a context: they run what was compiled in this one. Callbacks of the
        function see whether 64 bits are enabled here.
        """
        leaves, structure = jax.tree.flatten(arguments)
        kind = structure, tuple((leaf.shape, leaf.dtype) for leaf in leaves)
        if kind not in self._compiled:
            self._compiled[kind] = _in_precision(self._function.lower(*arguments).compile())
        return self._compiled[kind]

    def start(self, turn: int, compiled: Callable[..., Any], *arguments: Any) -> Callable[[], Any]:
        """Start a call; return a function that returns its results, arrays that may still be computed."""
        if self._calls == 1:
            results = compiled(*arguments)
            return lambda: results
        return _threads(self._calls)[turn % self._calls].submit(compiled, *arguments).result


def _in_precision(compiled: Callable[..., Any]) -> Callable[..., Any]:
    config: Any = jax.config
    x64 = config.jax_enable_x64

    def call(*arguments: Any) -> Any:
        with jax.enable_x64(x64):
            return compiled(*arguments)

    return call


@functools.cache
def _threads(count: int) -> list[ThreadPoolExecutor]:
    """Return executors of one thread each, shared by all: idle ones cost nothing."""
    return [ThreadPoolExecutor(1, thread_name_prefix=f"asyncsim-gradients-{i}") for i in range(count)]
