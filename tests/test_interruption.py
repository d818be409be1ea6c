"""Ctrl-C is heard wherever it comes."""

import gc
import signal
import sys
import threading
from importlib.machinery import ExtensionFileLoader

import jax
import pytest

from asyncsim.interruption import _DEAF, heard

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")


def test_jax_has_the_callback_that_is_named():
    assert jax.devices()
    assert _DEAF in [callback.__name__ for callback in gc.callbacks]


def _xla_gc_callback(*arguments):
    signal.raise_signal(signal.SIGINT)


def importing():
    self = ExtensionFileLoader("compiled", "compiled.so")
    signal.raise_signal(signal.SIGINT)
    return self


@pytest.mark.parametrize("deaf", [_xla_gc_callback, importing])
def test_where_it_would_be_lost_it_comes_again(default, deaf):
    with pytest.raises(KeyboardInterrupt), heard():
        deaf()
        threading.Event().wait(60)
        pytest.fail("was not heard")


def test_elsewhere_it_ends_what_goes_on(default):
    with pytest.raises(KeyboardInterrupt), heard():
        signal.raise_signal(signal.SIGINT)
        pytest.fail("was not heard")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_what_ctrl_c_does_otherwise_is_left(default):
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with heard():
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


@pytest.fixture
def default():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
