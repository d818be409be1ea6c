"""Caching and cancellation for concurrent runs."""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

_thread = threading.local()


class Cancellation(BaseException):
    """Ends a cancelled thread; not an Exception, so that only the thread's end catches it."""


def work_until(cancelled: threading.Event) -> None:
    """Let `require_wanted` end this thread's work once the event is set."""
    _thread.cancelled = cancelled


def require_wanted() -> None:
    """Raise Cancellation if this thread was cancelled."""
    cancelled: threading.Event | None = getattr(_thread, "cancelled", None)
    if cancelled is not None and cancelled.is_set():
        raise Cancellation


@contextlib.contextmanager
def one_core_each() -> Iterator[None]:
    """Let replays of this thread use one core each, because others may run beside them."""
    before, _thread.one_core = has_one_core(), True
    try:
        yield
    finally:
        _thread.one_core = before


def has_one_core() -> bool:
    """Return whether replays of this thread must use one core each."""
    return getattr(_thread, "one_core", False)


class Cached:
    """A cached function, as by `functools.lru_cache`, that runs in one thread at a time.

    Attributes
    ----------
    cache_clear : function
        Clears the cache.
    """

    def __init__(self, function: Callable[..., Any], maxsize: int):
        functools.update_wrapper(self, function)
        self._lock, self._cache = threading.Lock(), functools.lru_cache(maxsize)(function)
        self.cache_clear = self._cache.cache_clear

    def __call__(self, *arguments: Any) -> Any:
        """Call the function, once for the same arguments."""
        with self._lock:
            return self._cache(*arguments)


def cached(maxsize: int) -> Callable[[Callable[..., Any]], Cached]:
    """Return a decorator that makes a function `Cached`."""
    return functools.partial(Cached, maxsize=maxsize)
