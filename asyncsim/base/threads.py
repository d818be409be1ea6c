"""Caching and cancellation for concurrent runs."""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

_this = threading.local()


class Unwanted(BaseException):
    """Ends a thread whose result nobody waits for; no error, so only the thread's end catches it."""


def work_until(unwanted: threading.Event) -> None:
    """Let `require_wanted` end what this thread does once the event is set."""
    _this.unwanted = unwanted


def require_wanted() -> None:
    """Raise Unwanted if nobody waits for what this thread computes."""
    unwanted: threading.Event | None = getattr(_this, "unwanted", None)
    if unwanted is not None and unwanted.is_set():
        raise Unwanted


@contextlib.contextmanager
def one_core_each() -> Iterator[None]:
    """Let replays of this thread use one core each, as others may run beside them."""
    before, _this.one_core = has_one_core(), True
    try:
        yield
    finally:
        _this.one_core = before


def has_one_core() -> bool:
    """Return whether replays of this thread are to use one core each."""
    return getattr(_this, "one_core", False)


class Cached:
    """A cached function, as by `functools.lru_cache`, that runs in one thread at a time.

    Attributes
    ----------
    cache_clear : function
        Forgets what was made.
    """

    def __init__(self, function: Callable[..., Any], maxsize: int):
        functools.update_wrapper(self, function)
        self._lock, self._kept = threading.Lock(), functools.lru_cache(maxsize)(function)
        self.cache_clear = self._kept.cache_clear

    def __call__(self, *arguments: Any) -> Any:
        """Return what the function returns, made once for the same arguments."""
        with self._lock:
            return self._kept(*arguments)


def cached(maxsize: int) -> Callable[[Callable[..., Any]], Cached]:
    """Return a decorator that makes a function `Cached`."""
    return functools.partial(Cached, maxsize=maxsize)
