"""Ctrl-C and SIGTERM come again where they would be lost or do harm."""

import signal
import sys
import threading
import weakref
from importlib.machinery import ExtensionFileLoader

import pytest

from asyncsim.base.interruption import (
    handlers_kept,
    ignore_from_now_on,
    interruptible,
)

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")


def _xla_gc_callback(*arguments):
    signal.raise_signal(signal.SIGINT)


def importing():
    self = ExtensionFileLoader("compiled", "compiled.so")
    signal.raise_signal(signal.SIGINT)
    return self


def forgetting():
    kept = {1}
    weakref.finalize(kept, signal.raise_signal, signal.SIGINT)
    del kept


class Finalized:
    def __del__(self):
        signal.raise_signal(signal.SIGINT)


def long_deaf():
    def _xla_gc_callback():
        signal.raise_signal(signal.SIGINT)
        threading.Event().wait(0.2)  # it comes meanwhile, and has to come once more

    _xla_gc_callback()


@pytest.mark.parametrize("deaf", [_xla_gc_callback, importing, forgetting, Finalized, long_deaf])
def test_where_it_would_be_lost_it_comes_again(default, deaf):
    with pytest.raises(KeyboardInterrupt), interruptible():
        deaf()
        threading.Event().wait(60)
        pytest.fail("was not heard")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_elsewhere_it_ends_the_work_also_from_a_batch_system(default, number):
    usual = signal.getsignal(number)
    with pytest.raises(KeyboardInterrupt), interruptible():
        signal.raise_signal(number)
        pytest.fail("was not heard")
    assert signal.getsignal(number) is usual


def test_pressed_often_it_comes_once(default):
    came = []
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with interruptible():
        for _ in range(3):
            _xla_gc_callback()
        for _ in range(2):
            try:
                threading.Event().wait(0.2)
            except KeyboardInterrupt:
                came.append(1)
    assert came == [1]


def test_a_handler_that_was_set_inside_stays(default):
    def own(number, frame):
        pass

    with interruptible():
        signal.signal(signal.SIGINT, own)
    assert signal.getsignal(signal.SIGINT) is own


@pytest.fixture
def default():
    usual = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
    before = {number: signal.signal(number, handler) for number, handler in usual.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_who_sets_handlers_of_its_own_takes_none_away(default):
    with interruptible():
        before = signal.getsignal(signal.SIGTERM)
        with handlers_kept():
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        assert signal.getsignal(signal.SIGTERM) is before is not signal.SIG_IGN


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_after_an_interruption_does_no_harm(default, number):
    ignore_from_now_on()
    signal.raise_signal(number)
    assert signal.getsignal(number) is signal.SIG_IGN
