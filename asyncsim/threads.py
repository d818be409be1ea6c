"""What threads need that compute runs side by side: to share what is made once, and to end when nobody waits."""

import functools
import threading
from collections.abc import Callable
from typing import Any

_this = threading.local()


class Unwanted(BaseException):
    """Nobody waits any more for what this thread computes. No error, so nothing but a thread's end catches it."""


def work_until(unwanted: threading.Event) -> None:
    """Let `require_wanted` end what this thread does once the event is set."""
    _this.unwanted = unwanted


def require_wanted() -> None:
    """Raise Unwanted if nobody waits for what this thread computes."""
    unwanted: threading.Event | None = getattr(_this, "unwanted", None)
    if unwanted is not None and unwanted.is_set():
        raise Unwanted


class Cached:
    """A function like that of `functools.lru_cache`: of threads that ask for the same, others wait for the first.

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
