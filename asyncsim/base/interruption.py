"""Ctrl-C, and the end that a batch system asks for: where they would be lost or do harm they come a moment later."""

import contextlib
import signal
import sys
import threading
from collections.abc import Iterator
from importlib.machinery import ExtensionFileLoader
from types import FrameType
from typing import Any

#: JAX's callback in every garbage collection; Python prints and forgets what is raised in it.
_GC_CALLBACK = "_xla_gc_callback"
_AGAIN = 0.01  # seconds
#: What Python does with the signals.
_USUAL: dict[int, Any] = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
_coming: list[threading.Timer] = []


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Let Ctrl-C and SIGTERM raise KeyboardInterrupt inside, a moment later where it would be lost or do harm.

    Nothing changes in other threads than the main one, on Windows, or for a signal that does something else than Python
    lets it do.
    """
    can = threading.current_thread() is threading.main_thread() and sys.platform != "win32"
    before = {number: handler for number, handler in _USUAL.items() if can and signal.getsignal(number) is handler}
    for number in before:
        signal.signal(number, _interrupt)
    try:
        yield
    finally:
        if before:
            for again in _coming:
                again.cancel()
            _coming.clear()
        for number, handler in before.items():
            if signal.getsignal(number) is _interrupt:  # not another that was set inside
                signal.signal(number, handler)


@contextlib.contextmanager
def handlers_kept() -> Iterator[None]:
    """Keep what signals do through a call that sets handlers of its own."""
    before = {}
    if threading.current_thread() is threading.main_thread():
        before = {number: signal.getsignal(number) for number in _USUAL}
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is not None:  # one that is not Python's
                signal.signal(number, handler)


def ignore_from_now_on() -> None:
    """Let this process end in peace: Python and its libraries clean up, which a signal would break off."""
    for number in _USUAL:
        signal.signal(number, signal.SIG_IGN)


def _interrupt(number: int, frame: FrameType | None) -> None:
    while frame is not None:
        if _is_deaf(frame):
            if not _coming:  # however often it was pressed
                again = threading.Timer(_AGAIN, _come_again, (number,))
                again.daemon = True
                _coming.append(again)
                again.start()
            return
        frame = frame.f_back
    raise KeyboardInterrupt


def _is_deaf(frame: FrameType) -> bool:
    """Return whether an interrupt is lost in such a function, or does harm there."""
    # Python prints and forgets what is raised where an object is finalized.
    finalizes = frame.f_code.co_name in (_GC_CALLBACK, "__del__") or frame.f_globals.get("__name__") == "weakref"
    # Compiled modules that are being imported take an interrupt for an error, or crash.
    return finalizes or isinstance(frame.f_locals.get("self"), ExtensionFileLoader)


def _come_again(number: int) -> None:
    _coming.clear()  # before it comes, as it may have to wait once more
    main = threading.main_thread().ident
    assert main is not None  # it runs
    signal.pthread_kill(main, number)
