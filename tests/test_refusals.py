"""Python calls that are refused, in `refusals.txt`: each raises an InputError, whose text matches
the line below it.

Where a line has several expressions with `` & `` between them, all have to match. Commands are in
`test_bad_input`.
"""

import dataclasses
import importlib
import re
from pathlib import Path

import jax.numpy as jnp
import optax.contrib
import pandas as pd
import pytest
import test_problems

import asyncsim
from asyncsim import Cluster, InputError, problems, simulate
from asyncsim.base import units
from asyncsim.byzantine import aggregation
from asyncsim.clusters import failures, laws, policy, topologies
from asyncsim.problems.cifar10 import cifar10_from_arrays
from asyncsim.problems.mnist import mnist_from_arrays
from asyncsim.replays.check import check_method
from asyncsim.study.config import StudyConfig

TEXT = Path(__file__).with_name("refusals.txt").read_text()
#: The module whose names a part of the list uses, the call, and the message.
CASES = [
    (*re.findall(r"\A# Names are those of (\w+)\.", part), *case)
    for part in re.split(r"\n\n(?=#)", TEXT)
    for case in re.findall(r"^(?![#\s])(.+)\n    (.+)$", part, re.MULTILINE)
]
#: The names of the other parts, and what their calls use: a trace, one of a barrier, and a problem.
NAMES = {
    name: value
    for module in (units, aggregation, policy, laws)
    for name, value in vars(module).items()
} | {name: getattr(asyncsim, name) for name in asyncsim.__all__}
NAMES |= {
    name: value for module in (problems, test_problems) for name, value in vars(module).items()
}
NAMES |= {
    "dataclasses": dataclasses,
    "jnp": jnp,
    "optax": optax,
    "pd": pd,
    "failures": failures,
    "topologies": topologies,
}
for function in (
    *(asyncsim.replay_ensemble, mnist_from_arrays, cifar10_from_arrays, StudyConfig),
    *(asyncsim.methods.add, asyncsim.methods.Applied, check_method),
):
    NAMES[function.__name__] = function
NAMES["TRACE"] = simulate(Cluster(3, 1.0), 60)
NAMES["ROUNDS"] = simulate(Cluster(8, "gamma(1, 0.3)", policy="barrier()"), 16)
NAMES["Timing"], NAMES["Applied"] = asyncsim.methods.Timing, asyncsim.methods.Applied
NAMES["PROBLEM"] = problems.quadratic([1.0, 0.5])


@pytest.mark.parametrize("case", CASES, ids=lambda case: case[-2])
def test_a_call_is_refused(case):
    *module, call, message = case
    names = NAMES | (vars(importlib.import_module(module[0])) if module else {})
    with pytest.raises(InputError) as error:
        eval(call, names)
    text = str(error.value)
    assert [part for part in message.split(" & ") if not re.search(part, text)] == [], text
