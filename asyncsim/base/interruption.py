"""Ctrl-C and SIGTERM: signals are delayed for a moment where they would be lost or do harm."""

import contextlib
import signal
import sys
import threading
from collections.abc import Iterator
from importlib.machinery import ExtensionFileLoader
from types import FrameType
from typing import Any

#: JAX's callback in every garbage collection; Python prints and drops exceptions in it.
_GC_CALLBACK = "_xla_gc_callback"
_RETRY = 0.01  # seconds
#: Python's default handlers.
_USUAL: dict[int, Any] = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
_pending: list[threading.Timer] = []


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Let Ctrl-C and SIGTERM raise KeyboardInterrupt in a block, later where it would do harm.

    Other threads than the main one, Windows, and signals with other handlers than Python's are left
    unchanged.
    """
    is_possible = threading.current_thread() is threading.main_thread() and sys.platform != "win32"
    before = {
        n: handler
        for n, handler in _USUAL.items()
        if is_possible and signal.getsignal(n) is handler
    }
    for number in before:
        signal.signal(number, _interrupt)
    try:
        yield
    finally:
        if before:
            for timer in _pending:
                timer.cancel()
            _pending.clear()
        for number, handler in before.items():
            if signal.getsignal(number) is _interrupt:  # unless the block set another
                signal.signal(number, handler)


@contextlib.contextmanager
def handlers_kept() -> Iterator[None]:
    """Restore the signal handlers after a call that sets others."""
    before = {}
    if threading.current_thread() is threading.main_thread():
        before = {number: signal.getsignal(number) for number in _USUAL}
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is not None:  # None: not set by Python
                signal.signal(number, handler)


def ignore_from_now_on() -> None:
    """Ignore signals from now on, so that Python and its libraries can clean up undisturbed."""
    for number in _USUAL:
        signal.signal(number, signal.SIG_IGN)


def _interrupt(number: int, frame: FrameType | None) -> None:
    while frame is not None:
        if _is_deaf(frame):
            if not _pending:  # a repeated signal needs no second timer
                timer = threading.Timer(_RETRY, _repeat, (number,))
                timer.daemon = True
                _pending.append(timer)
                timer.start()
            return
        frame = frame.f_back
    raise KeyboardInterrupt


def _is_deaf(frame: FrameType) -> bool:
    """Return whether an interrupt in such a function would be lost or do harm."""
    # Python prints and drops exceptions while an object is finalized.
    finalizes = (
        frame.f_code.co_name in (_GC_CALLBACK, "__del__")
        or frame.f_globals.get("__name__") == "weakref"
    )
    # An interrupt during the import of a compiled module becomes an error or a crash.
    return finalizes or isinstance(frame.f_locals.get("self"), ExtensionFileLoader)


def _repeat(number: int) -> None:
    _pending.clear()  # before the signal, which may be delayed once more
    main = threading.main_thread().ident
    assert main is not None  # the main thread runs
    signal.pthread_kill(main, number)
