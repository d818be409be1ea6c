"""Compiled functions that are started from several threads, so that a CPU computes them side by side."""

import functools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax

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
        self._starts: dict[Any, Start] = {}

    def start_for(self, *arguments: Any) -> Start:
        """Return what starts calls with arguments of these kinds: a function of the thread's number and the arguments.

        Threads do not share what JAX is told in a context, so that they run what was compiled in this one; callbacks
        of the function see whether 64 bits are enabled in it.
        """
        config: Any = jax.config
        told = config.jax_enable_x64, config.jax_default_matmul_precision, config.jax_numpy_dtype_promotion
        leaves, structure = jax.tree.flatten(arguments)
        kind = told, structure, tuple((leaf.shape, leaf.dtype) for leaf in leaves)
        if kind not in self._starts:
            compiled = self._function.lower(*arguments).compile()
            self._starts[kind] = self._build_start(compiled, config.jax_enable_x64)
        return self._starts[kind]

    def _build_start(self, compiled: Callable[..., Any], x64: bool) -> Start:
        def call(*arguments: Any) -> Any:
            with jax.enable_x64(x64):
                return compiled(*arguments)

        def start(thread: int, *arguments: Any) -> Callable[[], Any]:
            if self._at_once == 1:
                results = call(*arguments)
                return lambda: results
            return _threads(self._at_once)[thread].submit(call, *arguments).result

        return start


def cores() -> int:
    """Return how many cores this process may use, which is how many threads XLA has there."""
    if os.environ.get("NPROC", "").isdigit():
        return max(1, int(os.environ["NPROC"]))
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@functools.cache
def _threads(count: int) -> list[ThreadPoolExecutor]:
    """Return executors of one thread each, as one of several might start all calls from the same; shared by all."""
    return [ThreadPoolExecutor(1, thread_name_prefix=f"asyncsim-gradients-{i}") for i in range(count)]
