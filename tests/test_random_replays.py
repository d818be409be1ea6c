"""Replays of random clusters, methods and problems, in each form of computing: the numbers of the loop over events.

Strategies draw only what can be replayed, so that nothing is skipped: an `InputError` fails a test.
"""

import dataclasses
import functools
import inspect
import itertools
from typing import NamedTuple
from unittest import mock

import event_loop
import jax
import numpy as np
import pytest
from cases import EVERY, FORCED, METHODS, OWN, counting, damped_buffer, make_problem, stateful_problem
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from test_simulation import clusters, policies

import asyncsim.replays.programs
from asyncsim import (
    Cluster,
    methods,
    problems,
    recorders,
    simulate,
)
from asyncsim.methods import Timing
from asyncsim.replays import tuning
from asyncsim.replays.replay import Replay
from asyncsim.study.cell import meet

FORMS = ("single", "batch")


def by_name(name):
    """A method of the package, under any policy if it takes one."""
    make = methods.METHODS[name]
    options = {"policy": None} if "policy" in inspect.signature(make).parameters else {}
    return make(learning_rate=0.01, **options)  # windows are up to three, and reads are stale


RULES = {
    # Those without a server have traces of their own, see `test_gossip`; those that need several workers are in
    # `test_byzantine`.
    **{
        name: functools.partial(by_name, name)
        for name, make in methods.METHODS.items()
        if not (make().mix or make().meet) and name not in ("basgd", "kardam")
    },
    "gem, paper": METHODS["gem, paper"],
    **{name: make for name, (make, *_) in OWN.items()},
    "a number of each worker": counting,
    "a buffer": damped_buffer,
}
#: Made for a number of workers, as each may have an objective of its own.
PROBLEMS = {
    "least_squares": lambda workers: problems.least_squares(workers, 5, heterogeneity=1.0, dimension=6, examples=20),
    "logistic": lambda workers: problems.logistic(workers, 5, heterogeneity=1.0, dimension=6, examples=20),
    "quadratic": lambda workers: make_problem("quadratic"),
    "digits": lambda workers: problems.digits(batch_size=4, hidden=()),
    "stateful": lambda workers: stateful_problem(),
}


class Combination(NamedTuple):
    seed: int
    form: str
    rule: str
    problem: str
    cluster: Cluster
    commits: int
    looks: bool


@st.composite
def clusters_of(draw, method):
    """Clusters whose traces a method can be replayed on."""
    cluster = draw(clusters(sizes=(2, 9)))
    windows = st.lists(st.integers(1, 3), min_size=cluster.workers, max_size=cluster.workers)
    window, discipline = st.just(cluster.window) | windows, st.sampled_from([cluster.discipline, "lock_free"])
    cluster = dataclasses.replace(cluster, window=draw(window), discipline=draw(discipline))
    if draw(st.booleans()):
        torn = Timing(protocol="write_then_read", discipline="lock_free", read_blocks=draw(st.integers(2, 4)))
        cluster = meet(cluster, torn)
    cluster = meet(cluster, method.timing)
    if method.reply:  # which comes only with reads that belong to a commit
        return meet(cluster, Timing(protocol="exchange")) if cluster.separate_reads else cluster
    return cluster if method.timing.policy else dataclasses.replace(cluster, policy=draw(policies(cluster)))


@st.composite
def combinations(draw, forms, rules):
    # Hypothesis begins with the simplest of all, the same in every test: its time is better spent. Then it changes
    # what is drawn first.
    seed = draw(st.integers(0, 2**32))
    assume(seed)
    form, rule = draw(st.sampled_from(list(itertools.product(forms, rules))))
    problem = draw(st.sampled_from(list(PROBLEMS)))
    cluster = draw(clusters_of(RULES[rule]()))
    # The last part of a run has at least ten commits, as some methods move only now and then.
    return Combination(seed, form, rule, problem, cluster, draw(st.integers(160, 200)), draw(st.booleans()))


@pytest.fixture(autouse=True)
def float64(lenient):
    with jax.enable_x64(True):
        yield


@pytest.fixture(autouse=True)
def anew():
    """Share no program with other tests, nor keep any: there are too many."""
    asyncsim.replays.programs._build.cache_clear()
    yield
    asyncsim.replays.programs._build.cache_clear()
    event_loop._COMPILED.clear()


def assert_the_loop(combination):
    """Replay a combination in its form: the method is made anew, so that nothing is compiled for it yet."""
    seed, form, rule, problem, cluster, commits, looks = combination
    trace, stops = simulate(cluster, commits, seed), np.r_[EVERY:commits:EVERY, commits]
    # A method that waits for a version does not move without one, and no deviation is relative to nothing.
    assume(np.diff(np.r_[0, trace.accepted.frame["version"].to_numpy()[stops - 1]]).all())
    record = [recorders.energy(tensors=2 * looks), *([recorders.diagnostics(2)] if looks else [])]
    options = {"stops": stops, "record": record, "form": form, "precision": "float64"}
    with mock.patch.object(tuning, "_CPU", tuning._ACCELERATOR), np.errstate(invalid="raise"):
        running = Replay(trace, RULES[rule](), PROBLEMS[problem](cluster.workers), **options)
        found = event_loop.forced_deviation(running, EVERY)
    assert max(found.values()) < FORCED, found


@pytest.mark.full
@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=2, deadline=None, derandomize=True)
@given(data=st.data())
def test_each_form_is_the_loop(form, data):
    assert_the_loop(data.draw(combinations([form], RULES)))


@pytest.mark.full
@pytest.mark.parametrize("rule", RULES)
@settings(max_examples=1, deadline=None, derandomize=True)
@given(data=st.data())
def test_each_method_is_the_loop(rule, data):
    assert_the_loop(data.draw(combinations(FORMS, [rule])))
