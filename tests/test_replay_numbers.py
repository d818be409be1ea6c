"""A replay has the numbers of the plain loop over events: methods, kinds of traces, problems and
forms, drawn and in a table.

Strategies draw only what can be replayed, so that nothing is skipped: an `InputError` fails a test.
"""

import dataclasses
import functools
import inspect
from typing import Any, NamedTuple
from unittest import mock

import cases
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cases import combining, make_dynamic, make_problem, make_trace, noisy
from event_loop import SAME, LoopDiverged, deviations
from hypothesis import assume, given, reject, settings
from hypothesis import strategies as st
from jax.flatten_util import ravel_pytree
from test_shards import sharded
from world import SEEDS, clusters, gates

from asyncsim import (
    Cluster,
    Uniform,
    methods,
    pipeline,
    prescribed,
    problems,
    recorders,
    simulate,
)
from asyncsim.methods import Timing
from asyncsim.replays import pieces, programs, rows, tuning
from asyncsim.study.cell import meet

KINDS = ("server", "lock_free", "prescribed", "groups", "failures")
TIMES = {"compute": "gamma(mean=1, cv=0.5)", "service": 0.02, "latency": 0.05}
FAILURES = (
    "crash(exponential(6), exponential(3), detect=1)",
    "outage(exponential(8), 2, checkpoint_every=7, checkpoint_time=0.2)",
    "loss(0.1, 2, resend=False)",
)


def by_name(name):
    """A method of the package, under any policy if it takes one."""
    make = methods.METHODS[name]
    options = {"policy": None, "fragments": 3}  # one of the problems has three parameters
    taken = inspect.signature(make).parameters
    options = {option: value for option, value in options.items() if option in taken}
    return make(learning_rate=0.01, **options)  # windows are up to three, and reads are stale


RULES = {
    # Those without a server have traces of their own, see `test_gossip`; those that need several
    # workers are in `test_methods`.
    **{
        name: functools.partial(by_name, name)
        for name, make in methods.METHODS.items()
        if not (make().mix or make().meet) and name not in ("basgd", "kardam")
    },
    "gem, paper": lambda: methods.gem(variant="paper"),
    "lsgd, groups": lambda: methods.lsgd(groups=3, global_every=2),
    "a tree as message": cases.pair_of_messages,
    "local adam": lambda: methods.downpour(optimizer=optax.adam(1e-2)),
    "local momentum": lambda: methods.adaptive_staleness(optimizer=optax.sgd(0.02, 0.9)),
    "schedule": lambda: methods.gem(learning_rate=cases.decaying),
    "draws": noisy,
    "draws, and a reply": lambda: noisy(replies=True),
    "combining": combining,
}
#: A method of each mechanism, in the default run and in a full one; the numbers of every method are
#: those of its paper in `test_methods`.
DEFAULT = ("gem, paper", "dana_zero", "lsgd, groups", "ringleader", "fedbuff", "draws")
FULL = ("zeno_pp", "weight_prediction", "streaming_diloco", "entropy_sgd", "combining", "aeasgd")
FULL += ("a tree as message", "draws, and a reply", "local adam", "ringmaster_lmo", "lgd")
#: Methods whose replays go through crashes, outages and losses.
WITH_FAILURES = ("gem", "downpour", "aeasgd", "fedbuff", "ringleader", "lsgd, groups", "averaging")
WITH_FAILURES += ("dana_zero", "adag")


def apart(workers=7):
    """A quadratic whose workers start each at a place of its own, in both halves of each axis."""
    starts = np.random.default_rng(0).normal(0, 2, (workers, 16))
    return dataclasses.replace(
        make_problem("quadratic"), init_replica=lambda key, worker: starts[worker]
    )


def layers():
    return problems.digits(batch_size=4, hidden=(6, 5))


def tensors():
    """A matrix, a vector and a number, with noisy gradients."""

    def loss(params, batch, key):
        terms = [jnp.sum((leaf - 2) ** 2) for leaf in jax.tree.leaves(params)]
        noise = jax.random.normal(key, (4,)).astype(terms[0].dtype)
        return sum(terms) / 2 + 0.1 * jnp.sum(noise * params["b"][0])

    def init(key):
        return {"a": jnp.ones(()), "W": jax.random.normal(key, (2, 3)), "b": (jnp.ones(4),)}

    return problems.custom(init=init, loss=loss)


#: Made for a number of workers, as each may have an objective of its own.
TASKS = {
    "logistic": lambda workers: problems.logistic(
        workers, 5, heterogeneity=1.0, dimension=6, examples=20
    ),
    "quadratic": lambda workers: make_problem("quadratic"),
    "digits": lambda workers: problems.digits(batch_size=4, hidden=()),
    "stateful": lambda workers: cases.stateful_problem(),
    "nested": lambda workers: cases.nested_problem(),
    "apart": apart,
}


class Combination(NamedTuple):
    form: str
    rule: str
    task: str
    trace: Any


def can_be(kind, rule):
    """Whether a method can be replayed on such a trace."""
    method = RULES[rule]()
    light = {"message_size", "message_share"}  # which take any trace
    needs = {name for name, value in vars(method.timing).items() if value is not None} - light
    replies = not method.reply or method.same_reply
    if kind == "failures":
        return rule in WITH_FAILURES
    if kind == "lock_free":
        return replies and ("discipline" in needs or not needs)
    return kind == "server" or (replies and not needs)


@st.composite
def traces(draw, kind, method, seed):
    commits, workers = draw(st.integers(60, 160)), draw(st.integers(2, 9))
    if kind == "prescribed":  # staler than there are workers: jobs of one worker overlap
        window = draw(st.integers(1, 3))
        return prescribed(Uniform(0, 3 * workers), commits, workers, window, seed % 1000)
    if kind == "groups":
        ages = draw(st.sampled_from([Uniform(0, 9), 0, 12]))
        return prescribed({"0,2": ages, "1": Uniform(0, 9)}, commits, workers, seed=seed % 1000)
    cluster = draw(clusters(sizes=(2, 9), locked=kind == "failures"))
    if kind == "lock_free":
        cluster = meet(cluster, Timing(protocol="write_then_read", discipline="lock_free"))
    if kind == "failures":
        visits = {"protocol": cluster.protocol, "exclusive": cluster.exclusive}
        window = draw(st.integers(1, 3))
        cluster = Cluster(5, window=window, failures=FAILURES, **TIMES, **visits)
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
def combinations(draw, kinds=KINDS, rules=tuple(RULES)):
    # Hypothesis begins with the simplest of all, the same in every test: its time is better spent.
    seed = draw(SEEDS)
    assume(seed)
    rule = draw(st.sampled_from(rules))
    possible = [kind for kind in kinds if can_be(kind, rule)]
    assume(possible)
    kind, form = draw(st.sampled_from(possible)), draw(st.sampled_from(["single", "batch"]))
    trace = draw(traces(kind, RULES[rule](), seed))
    tasks = ["digits"] if rule == "ringmaster_lmo" else sorted(TASKS)  # its steps are of matrices
    task = "layers" if kind == "groups" else draw(st.sampled_from(tasks))
    return Combination(form, rule, task, trace)


@pytest.fixture(autouse=True)
def anew(float64, lenient, monkeypatch):
    """Share no program with other tests, nor keep any: there are too many. Batches are unrolled as
    an accelerator's.
    """
    monkeypatch.setattr(tuning, "_CPU", cases.ACCELERATED)
    programs._build.cache_clear()
    yield
    programs._build.cache_clear()


def assert_the_loop(combination):
    trace, form, rule = combination.trace, combination.form, RULES[combination.rule]()
    # A method that waits for a version does not move without one, and no deviation is relative to
    # nothing.
    assume(trace.accepted.frame["version"].iloc[-1])
    task = layers() if combination.task == "layers" else TASKS[combination.task](trace.workers)
    try:
        with np.errstate(invalid="raise"):
            found = deviations(trace, rule, task, form=form, stops=[11, 50])
    except LoopDiverged:
        reject()
    assert max(found.values()) < SAME, found


@pytest.mark.parametrize(
    "rule", [*DEFAULT, *(pytest.param(rule, marks=pytest.mark.full) for rule in FULL)]
)
@settings(max_examples=1)
@given(data=st.data())
def test_each_method_is_the_loop(rule, data):
    assert_the_loop(data.draw(combinations(rules=[rule])))


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=1)
@given(data=st.data())
def test_each_kind_of_trace_is_the_loop(kind, data):
    assert_the_loop(data.draw(combinations(kinds=[kind])))


@pytest.mark.full
@settings(max_examples=6)
@given(combination=combinations())
def test_combinations_are_the_loop(combination):
    assert_the_loop(combination)


@pytest.mark.full
@settings(max_examples=2)
@given(cluster=sharded(), form=st.sampled_from(["single", "batch"]), seed=SEEDS, data=st.data())
def test_drawn_servers_are_the_loop(cluster, form, seed, data):
    makes = methods.gem, methods.aeasgd, lambda: methods.softsync(policy=None)
    trace, method = simulate(cluster, 30, seed), data.draw(st.sampled_from(makes))()
    found = deviations(trace, method, make_problem("quadratic"), form=form)
    assert max(found.values()) < SAME, found


def in_tensors(method, problem):
    """The method whose server sees trees of parameters, and its own vectors inside."""
    params, tree = ravel_pytree(problem.init(jax.random.key(0)))
    structure = jax.tree.structure(tree(params))

    def is_tree(value):
        return jax.tree.structure(value) == structure

    def vector(value):
        return jax.tree.map(
            lambda part: ravel_pytree(part)[0] if is_tree(part) else part, value, is_leaf=is_tree
        )

    def apply(server, central, message, *others):
        applied = method.apply(server, vector(central), vector(message), *others)
        return applied._replace(central=tree(applied.central))

    def combine(server, central, messages, visits):
        applied = method.combine(server, vector(central), jax.vmap(vector)(messages), visits)
        return applied._replace(central=tree(applied.central))

    def reply(server, central, *rest):
        return tree(method.reply(server, vector(central), *rest))

    return method._replace(
        space="tensors",
        recipe=None,
        init_server=lambda central: method.init_server(vector(central)),
        reply=method.reply and reply,
        **({"combine": combine} if method.combine else {"apply": apply}),
    )


def many(timing=None, **options):
    """A trace of messages whose parts are committed at different times by four servers."""
    times = {"service": "exponential(0.1)", "latency": "exponential(0.2)", "servers": 4}
    cluster = Cluster(5, "gamma(1, 0.5)", **{**times, **options})
    return simulate(cluster if timing is None else meet(cluster, timing), 40)


def of_tensors(make, trace, **options):
    method, problem = make(), tensors()
    return trace, in_tensors(method, problem), problem, {"expected": method, **options}


def several(make, problem="quadratic", form="batch", attack=None, **options):
    method = make()
    trace = many(method.timing, **options)
    return trace, method, make_problem(problem), {"form": form, "attack": attack}


GROUPS = ("0.weight", "0.bias,1")  # the first has runs on both sides of another
SPLIT = {"protocol": "read_then_write", "exclusive": False}
LOCAL_MOMENTUM = functools.partial(methods.downpour, optimizer=optax.sgd(0.05, momentum=0.9))
LOOKS = [recorders.energy(tensors=2), recorders.diagnostics(every=5)]
#: Traces, methods, problems and options of the replay. In a tree of parameters: one of each border.
TABLE = {
    "servers, an exchange": lambda: several(methods.gem),
    "servers, one by one": lambda: several(
        methods.downpour, "digits", "single", policy="discard_stale(2)"
    ),
    "servers, two visits": lambda: several(methods.gem, form="single", **SPLIT),
    "servers, a read before": lambda: several(methods.aeasgd, protocol="read_then_write"),
    "servers, a barrier": lambda: several(methods.robust, policy="barrier()"),
    "servers, rounds": lambda: several(
        methods.malenia, protocol="write_then_read", policy="rounds()"
    ),
    "servers, replies": lambda: several(methods.async_nesterov),
    "servers, groups of tensors": lambda: several(LOCAL_MOMENTUM, "digits", servers=GROUPS),
    "servers, an attack": lambda: several(methods.downpour, attack="alie(workers=1, z=1.5)"),
    "tensors": lambda: of_tensors(
        methods.downpour, make_trace(commits=80), attack="alie(2, z=1.5)"
    ),
    "tensors, diagnostics, origin and proxy": lambda: of_tensors(
        methods.gem, make_trace("read_then_write, two visits", commits=80), record=LOOKS
    ),
    "tensors, memory and reply": lambda: of_tensors(
        lambda: methods.dana_zero(0.01), make_trace(commits=80)
    ),
    "tensors, resume": lambda: of_tensors(methods.aeasgd, make_trace(window=3, commits=80)),
    "tensors, combine": lambda: of_tensors(
        lambda: methods.batch_sgd(policy="barrier(3)"),
        make_trace(policy="barrier(3)", commits=80),
        attack="inner_product(workers=2)",
    ),
    "tensors, combine and receive a tree": lambda: of_tensors(
        combining, make_trace(policy="barrier(3)", commits=80)
    ),
    "tensors, all memories": lambda: of_tensors(
        lambda: methods.zeno_pp(rho=0.004), make_trace(commits=80)
    ),
    "tensors, restarts": lambda: of_tensors(
        lambda: methods.gem(0.01), simulate(Cluster(5, **TIMES, failures=FAILURES[:1]), 80)
    ),
    "replicas apart": lambda: (
        *(make_trace(commits=80), methods.lsgd(groups=2, global_every=2, step_pull=0.1)),
        *(apart(), {}),
    ),
    "replicas apart, draws": lambda: (
        *(make_trace(commits=80), methods.parle(policy=None, noise=0.01), apart()),
        {"form": "single"},
    ),
    "replicas apart, which the method has not": lambda: (
        *(make_trace(commits=80), methods.dana_zero(), apart(), {}),
    ),
    "a pipeline": lambda: (pipeline(3, 80), methods.async_nesterov(0.02), layers(), {}),
    "groups and their delays": lambda: (
        prescribed({"0,2": Uniform(0, 9), "1": 12}, 80, workers=4),
        *(methods.weight_prediction(0.02), layers(), {"form": "single"}),
    ),
    "a death completes a version": lambda: (
        simulate(Cluster(5, **TIMES, failures=FAILURES, policy="barrier()"), 100),
        *(methods.batch_sgd(policy="barrier()"), make_problem("quadratic"), {}),
    ),
    "windows": lambda: (make_dynamic(5, 4, 80), methods.adag(), make_problem("digits"), {}),
    # With large steps, convolutions diverge.
    **{
        name: lambda name=name: (
            *(make_trace(commits=80), methods.downpour(learning_rate=0.001)),
            *(make_problem(name), {}),
        )
        for name in ("mnist", "characters")
    },
}
IN_DEFAULT = {"servers, an exchange", "servers, one by one", "tensors, memory and reply"}
IN_DEFAULT |= {"groups and their delays", "a pipeline"}
IN_DEFAULT |= {"tensors, diagnostics, origin and proxy", "tensors, combine and receive a tree"}
IN_DEFAULT |= {"replicas apart", "replicas apart, draws", "a death completes a version"}


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.full] * (n not in IN_DEFAULT)) for n in TABLE],
)
def test_a_replay_is_the_loop(name):
    *system, options = TABLE[name]()
    found = deviations(*system, **options)
    assert max(found.values()) < SAME, found


@pytest.mark.parametrize(
    "make", [methods.gem, pytest.param(methods.aeasgd, marks=pytest.mark.full)]
)
def test_rows_are_scattered_in_any_order(make, monkeypatch):
    """Which an accelerator takes: no two may go to the same place, though one piece can use a slot
    again.
    """
    in_order = pieces.put_rows

    def reversed_put(tree, written, index, valid, single):
        turned = jax.tree.map(lambda leaf: leaf[::-1], written)
        return in_order(tree, turned, index[::-1], valid[::-1], single)

    for module in (pieces, rows):
        monkeypatch.setattr(module, "put_rows", reversed_put)
    monkeypatch.setattr(tuning, "_CPU", cases.ACCELERATED._replace(unrolled=3))
    trace = make_trace("read_then_write, two visits", commits=150)
    found = deviations(trace, make(), make_problem("quadratic"), form="batch")
    assert max(found.values()) < SAME, found


ACCELERATORS = [device for device in jax.devices() if device.platform != "cpu"]


@pytest.mark.skipif(not ACCELERATORS, reason="JAX has no accelerator here")
@pytest.mark.parametrize("problem", ["quadratic", "digits", "mnist"])
@pytest.mark.parametrize("make", [methods.gem, methods.downpour, methods.aeasgd])
def test_an_accelerators_replay_is_the_loop(make, problem):
    """To the round-off between two orders of sums in float32."""
    with jax.default_device(ACCELERATORS[0]), mock.patch.object(tuning, "_CPU", tuning._CPU):
        found = deviations(
            make_trace(commits=50), make(), make_problem(problem), precision="float32"
        )
    assert max(found.values()) < 1e-4, found
