"""Fingerprints of functions and data: the same where they do the same, also in another process."""

import functools
import os
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from asyncsim import methods, problems
from asyncsim.study.fingerprint import fingerprint

_BOUND = 2.0
_FACTOR = np.arange(3.0)


def made(scale, power=2):
    def function(x):
        return helper(x) * scale**power + _FACTOR.sum()

    return function


def helper(x):
    return min(x, _BOUND)


def documented(x):
    """Say something."""
    return x + 1


def documented_otherwise(x):
    """Say something else, at length."""
    return x + 1  # and here


class Layer:
    def __init__(self, width):
        self.width = width

    def loss(self, x):
        return x * self.width


def never_set(x):
    if x is never_set:
        y = 1
    return lambda: y


_U, _W = np.zeros(3), np.ones(3)


def three(source):
    """The functions f, g and h of a file, which has its constants once."""
    scope = {}
    exec(compile(source, "own.py", "exec"), scope)
    return [scope[name] for name in "fgh"]


def of_file(g, h):
    return three(f"f = lambda x: x * 2.0\ng = lambda x: x * {g}\nh = lambda x: x * {h}")


def of_module(source, file="helping.py"):
    """A function that uses another file, of which this is the source."""
    module = types.ModuleType("helping")
    module.__file__ = file
    exec(source, vars(module))
    return eval("lambda x: (lambda y: helping.scale(y))(x)", {"helping": module})


ALIKE = {
    "what a file has besides": (of_module("scale = lambda x: 2 * x"), of_module("scale = lambda x: 2 * x; more = 1")),
    "libraries": tuple(of_module(f"scale = {i}", "/usr/lib/python3/site-packages/helping.py") for i in (1, 2)),
    "an array once or twice": ((_U, _U), (_U, _U.copy())),
    "empty cells": (never_set(1), never_set(1)),
    "no module": (eval("lambda x: x", {}), eval("lambda x: x", {})),
    "made twice": (made(3), made(3)),
    "docstrings and comments": (documented, documented_otherwise),
    "arrays of either kind": (np.arange(3, dtype=np.int32), np.arange(3, dtype=np.int32)),
    "methods": (methods.gem(), methods.gem()),
    "problems": (problems.digits(), problems.digits()),
    "sets": ({"a", "b", "c"}, {"c", "b", "a"}),
    "keys": (jax.random.key(0), jax.random.key(0)),
}
DIFFERENT = {
    "another file": (of_module("scale = lambda x: 2 * x"), of_module("scale = lambda x: 3 * x")),
    "numbers of another file": tuple(of_module(f"more = {i}\nscale = lambda x: more * x") for i in (1, 2)),
    "constants of a file": (of_file(3.0, 2.0), of_file(3.0, 3.0)),
    "which of two arrays": ({"a": _U, "b": _W, "c": _U}, {"a": _U, "b": _W, "c": _W}),
    "bound methods": (Layer(1).loss, Layer(2).loss),
    "nested lists": ([[1], 2], [[1, 2]]),
    "kinds of arguments": (lambda *a: a, lambda a: a),
    "closures": (made(3), made(4)),
    "defaults": (lambda x, y=1: x, lambda x, y=2: x),
    "constants": (lambda x: x + 1, lambda x: x + 2),
    "what is called": (lambda x: jnp.sin(x), lambda x: jnp.cos(x)),
    "inner functions": (lambda x: (lambda y: y + 1)(x), lambda x: (lambda y: y + 2)(x)),
    "partial": (functools.partial(helper, 1), functools.partial(helper, 2)),
    "compiled": (jax.jit(lambda x: x + 1), jax.jit(lambda x: x + 2)),
    "values": (np.arange(3), np.arange(3) + 1),
    "types": (np.zeros(3, np.float32), np.zeros(3)),
    "shapes": (np.zeros((2, 3)), np.zeros((3, 2))),
    "numbers and texts": (1, "1"),
    "keys": (jax.random.key(0), jax.random.key(1)),
    "hyper-parameters": (methods.gem(kappa=1.0), methods.gem(kappa=2.0)),
    "optimizers": (methods.downpour(learning_rate=0.1), methods.downpour(learning_rate=0.2)),
    "problems": (problems.digits(batch_size=8), problems.digits(batch_size=16)),
}


@pytest.mark.parametrize("case", ALIKE)
def test_what_is_alike(case):
    one, other = ALIKE[case]
    assert fingerprint(one) == fingerprint(other)


@pytest.mark.parametrize("case", DIFFERENT)
def test_what_differs(case):
    one, other = DIFFERENT[case]
    assert fingerprint(one) != fingerprint(other)


@pytest.mark.parametrize(("name", "value"), [("_BOUND", 3.0), ("_FACTOR", np.ones(3)), ("helper", lambda x: x)])
def test_what_a_function_names_of_its_own_file_counts(monkeypatch, name, value):
    before = fingerprint(made(3))
    monkeypatch.setitem(globals(), name, value)
    assert fingerprint(made(3)) != before


def test_functions_that_call_themselves_end():
    def forever(x):
        return forever(x)

    assert fingerprint(forever) == fingerprint(forever)


@pytest.mark.full
def test_all_that_is_shipped_is_told_apart_in_every_process():
    code = (
        "from asyncsim import methods, problems; from asyncsim.study.fingerprint import fingerprint; "
        "print(*(fingerprint(make()) for make in methods.METHODS.values()), fingerprint(problems.digits()))"
    )
    own = [fingerprint(make()) for make in methods.METHODS.values()] + [fingerprint(problems.digits())]
    assert len(set(own)) == len(own)
    process = [sys.executable, "-c", code]
    told = subprocess.run(
        process, env={**os.environ, "PYTHONHASHSEED": "7"}, capture_output=True, text=True, check=True
    )
    assert told.stdout.split() == own
