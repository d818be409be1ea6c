"""Drawn traces, methods and problems, replayed in every form: the numbers of the slow replay,
`event_loop`.

Strategies draw only what can be replayed, so that nothing is skipped: an `InputError` fails a test.
"""

import dataclasses
import functools
import inspect
from typing import Any, NamedTuple
from unittest import mock

import event_loop
import jax
import numpy as np
import optax
import pytest
import sharded_loop
from cases import (
    ACCELERATED,
    EVERY,
    FORCED,
    METHODS,
    OWN,
    combining,
    counting,
    damped_buffer,
    make_problem,
    make_trace,
    nested_problem,
    stateful_problem,
    stopping,
)
from event_loop import LoopDiverged, forced_deviation
from hypothesis import assume, given, reject, settings
from hypothesis import strategies as st
from sharded_loop import deviations
from test_shards import sharded
from world import SEEDS, clusters, gates

import asyncsim.replays.programs
from asyncsim import (
    Cluster,
    Uniform,
    attacks,
    failures,
    methods,
    prescribed,
    problems,
    recorders,
    simulate,
)
from asyncsim.methods import Timing
from asyncsim.replays import tuning
from asyncsim.replays.replay import Replay
from asyncsim.study.cell import meet

FORMS = ("single", "batch")
KINDS = ("server", "lock_free", "prescribed", "failures")
BROKEN = [
    failures.crash("exponential(12)", "exponential(4)", detect=1.0),
    failures.outage("exponential(15)", 2.0, checkpoint_every=7, checkpoint_time=0.2),
    failures.loss(0.1, timeout=2.0, resend=False),
]


def by_name(name):
    """A method of the package, under any policy if it takes one."""
    make = methods.METHODS[name]
    options = {"policy": None, "fragments": 3}  # one of the problems has three parameters
    taken = inspect.signature(make).parameters
    options = {option: value for option, value in options.items() if option in taken}
    return make(learning_rate=0.01, **options)  # windows are up to three, and reads are stale


RULES = {
    # Those without a server have traces of their own, see `test_gossip`; those that need several
    # workers are in `test_catalogue`.
    **{
        name: functools.partial(by_name, name)
        for name, make in methods.METHODS.items()
        if not (make().mix or make().meet) and name not in ("basgd", "kardam")
    },
    "gem, paper": METHODS["gem, paper"],
    "lsgd, groups": METHODS["lsgd"],
    **{name: make for name, (make, *_) in OWN.items()},
    "a number of each worker": counting,
    "a buffer": damped_buffer,
    "combining": combining,
}
#: A method of each mechanism, in the default run and in a full one; the numbers of every method are
#: those of its paper in `test_catalogue`.
DEFAULT = ("gem, paper", "dana_zero", "aeasgd", "lsgd, groups")
DEFAULT += ("ringleader", "fedbuff", "draws", "lgd")
FULL = ("zeno_pp", "weight_prediction", "streaming_diloco", "entropy_sgd", "combining")
FULL += ("a tree as message", "draws, and a reply before the commit", "server memory, velocity")
FULL += ("local adam", "ringmaster_lmo")
#: Methods whose replays go through crashes, outages and losses.
WITH_FAILURES = (
    "gem",
    "downpour",
    "aeasgd",
    "fedbuff",
    "ringleader",
    "lsgd, groups",
    "averaging",
    "dana_zero",
    "adag",
)
#: Made for a number of workers, as each may have an objective of its own.
TASKS = {
    "least_squares": lambda workers: problems.least_squares(
        workers, 5, heterogeneity=1.0, dimension=6, examples=20
    ),
    "logistic": lambda workers: problems.logistic(
        workers, 5, heterogeneity=1.0, dimension=6, examples=20
    ),
    "quadratic": lambda workers: make_problem("quadratic"),
    "digits": lambda workers: problems.digits(batch_size=4, hidden=()),
    "stateful": lambda workers: stateful_problem(),
    "nested": lambda workers: nested_problem(),
}


class Combination(NamedTuple):
    form: str
    rule: str
    task: str
    trace: Any
    looks: bool


def can_be(kind, method):
    """Whether a method can be replayed on such a trace, and in this form."""
    light = {"message_size", "message_share"}  # which take any trace
    needs = {name for name, value in vars(method.timing).items() if value is not None} - light
    replies = not method.reply or method.same_reply
    if kind == "lock_free":
        return replies and ("discipline" in needs or not needs)
    if kind == "prescribed":
        return replies and not needs
    return True


@st.composite
def traces(draw, kind, form, rule, seed):
    method, commits = RULES[rule](), draw(st.integers(160, 200))
    if kind == "prescribed":  # staler than there are workers: jobs of one worker overlap
        workers = draw(st.integers(2, 9))
        return prescribed(
            Uniform(0, 3 * workers), commits, workers, draw(st.integers(1, 3)), seed % 1000
        )
    cluster = draw(clusters(sizes=(2, 9), locked=kind == "failures"))
    if kind == "lock_free":
        cluster = meet(cluster, Timing(protocol="write_then_read", discipline="lock_free"))
    if kind == "failures":
        times = {
            "compute": "gamma(mean=1, cv=0.5)",
            "service": 0.02,
            "latency": 0.05,
            "failures": BROKEN,
        }
        visits = {"protocol": cluster.protocol, "exclusive": cluster.exclusive}
        cluster = Cluster(5, window=draw(st.integers(1, 3)), **times, **visits)
    cluster = meet(cluster, method.timing)
    if method.reply:  # which comes only with reads that belong to a commit
        if cluster.separate_reads or kind == "failures":
            cluster = meet(cluster, Timing(protocol="exchange"))
    elif not method.timing.policy:
        policy = draw(gates(cluster.workers, cluster.protocol, between=True))
        # A server that is down cannot complete a version between two messages.
        assume(kind != "failures" or not policy.completes_between_messages)
        cluster = dataclasses.replace(cluster, policy=policy)
    return simulate(cluster, commits, seed)


@st.composite
def combinations(draw, forms=tuple(FORMS), kinds=KINDS, rules=tuple(RULES)):
    # Hypothesis begins with the simplest of all, the same in every test: its time is better spent.
    seed = draw(SEEDS)
    assume(seed)
    rule = draw(st.sampled_from(rules))
    possible = [
        (form, kind)
        for form in forms
        for kind in kinds
        if can_be(kind, RULES[rule]()) and (kind != "failures" or rule in WITH_FAILURES)
    ]
    assume(possible)
    form, kind = draw(st.sampled_from(possible))
    trace = draw(traces(kind, form, rule, seed))
    tasks = ["digits"] if rule == "ringmaster_lmo" else sorted(TASKS)  # its steps are of matrices
    return Combination(form, rule, draw(st.sampled_from(tasks)), trace, draw(st.booleans()))


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
    sharded_loop._LOCAL.clear()


def assert_the_loop(combination):
    """Replay a combination in its form: the method is made anew, so that nothing is compiled for it
    yet.
    """
    trace, form = combination.trace, combination.form
    commits = len(trace.accepted)
    stops = np.r_[EVERY:commits:EVERY, commits]
    # A method that waits for a version does not move without one, and no deviation is relative to
    # nothing.
    assume(np.diff(np.r_[0, trace.accepted.frame["version"].to_numpy()[stops - 1]]).all())
    looks = [recorders.diagnostics(2)] if combination.looks else []
    options = {
        "record": [recorders.energy(tensors=2 * combination.looks), *looks],
        "precision": "float64",
    }
    options |= {"stops": stops, "form": form}
    # Batches are unrolled as an accelerator's.
    with mock.patch.object(tuning, "_CPU", ACCELERATED), np.errstate(invalid="raise"):
        running = Replay(
            trace, RULES[combination.rule](), TASKS[combination.task](trace.workers), **options
        )
        layout = running._plan.layout(running.method)
        assert (
            layout.form == form or layout.piece_size == 1
        )  # a lone worker's commits cannot be batched
        try:
            found = forced_deviation(running, EVERY)
        except LoopDiverged:
            reject()
    assert max(found.values()) < FORCED, found


@pytest.mark.parametrize(
    "rule", [*DEFAULT, *(pytest.param(rule, marks=pytest.mark.full) for rule in FULL)]
)
@settings(max_examples=1)
@given(data=st.data())
def test_each_method_is_the_slow_replay(rule, data):
    assert_the_loop(data.draw(combinations(rules=[rule])))


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=1)
@given(data=st.data())
def test_each_kind_of_trace_is_the_slow_replay(kind, data):
    assert_the_loop(data.draw(combinations(kinds=[kind])))


@pytest.mark.full
@pytest.mark.parametrize(
    ("form", "kind"),
    [
        (form, kind)
        for i, form in enumerate(FORMS)
        for j, kind in enumerate(KINDS)
        if (i + j // 2) % 2
    ],
)
@settings(max_examples=1)
@given(data=st.data())
def test_each_form_is_the_slow_replay(form, kind, data):
    assert_the_loop(data.draw(combinations([form], [kind])))


PARTED = {"service": "exponential(0.1)", "latency": "exponential(0.2)", "servers": 4}


def make_parted(timing=None, **changes):
    """A trace of messages whose parts are committed at different times."""
    cluster = Cluster(5, "gamma(1, 0.5)", **{**PARTED, **changes})
    return simulate(cluster if timing is None else meet(cluster, timing), 40)


GROUPS = {"servers": ("0.weight", "0.bias,1")}  # the first has runs on both sides of another
LOCAL_MOMENTUM = functools.partial(methods.downpour, optimizer=optax.sgd(0.05, momentum=0.9))
#: Several servers: changes of the cluster, the method, the problem, the attack and the form.
SHARDED = {
    "an exchange": ({}, methods.gem, "quadratic", None, "batch"),
    "one by one": ({"policy": "discard_stale(2)"}, methods.downpour, "digits", None, "single"),
    "two visits": (
        {"protocol": "read_then_write", "exclusive": False},
        *(methods.gem, "quadratic", None, "single"),
    ),
    "a read before": ({"protocol": "read_then_write"}, methods.aeasgd, "quadratic", None, "batch"),
    "a barrier": ({"policy": "barrier()"}, methods.robust, "quadratic", None, "batch"),
    "rounds": (
        {"protocol": "write_then_read", "policy": "rounds()"},
        *(methods.malenia, "quadratic", None, "batch"),
    ),
    "replies": ({}, methods.async_nesterov, "quadratic", None, "batch"),
    "groups of tensors": (GROUPS, LOCAL_MOMENTUM, "digits", None, "batch"),
    "an attack": ({}, methods.downpour, "quadratic", attacks.alie(1, z=1.5), "batch"),
}


@pytest.mark.parametrize(
    "name",
    [
        name if i < 2 else pytest.param(name, marks=pytest.mark.full)
        for i, name in enumerate(SHARDED)
    ],
)
def test_several_servers_are_the_loop_over_parts(name):
    changes, make, problem, attack, form = SHARDED[name]
    method = make()
    trace = make_parted(method.timing, **changes)
    found = deviations(trace, method, make_problem(problem), attack, form)
    assert max(found) < FORCED, found


@pytest.mark.full
@settings(max_examples=2)
@given(cluster=sharded(), form=st.sampled_from(FORMS), seed=SEEDS, data=st.data())
def test_drawn_servers_are_the_loop_over_parts(cluster, form, seed, data):
    makes = methods.gem, methods.aeasgd, lambda: methods.softsync(policy=None)
    method = data.draw(st.sampled_from(makes))()
    found = deviations(simulate(cluster, 30, seed), method, make_problem("quadratic"), None, form)
    assert max(found) < FORCED, found


@pytest.mark.full
@pytest.mark.parametrize("name", ["mnist", "characters"])
def test_networks_are_the_slow_replay(name):
    """The problems that `TASKS` does not have. With large steps, convolutions diverge."""
    trace = make_trace("exchange", commits=2 * EVERY)
    found = forced_deviation(
        stopping(trace, methods.downpour(learning_rate=0.001), make_problem(name)), EVERY
    )
    assert max(found.values()) < FORCED, found
