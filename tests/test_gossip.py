"""Methods without a server: a matrix of methods, topologies, attacks and failures against plain
loops; and the limits of the methods.
"""

import dataclasses
import functools
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from gossip_loop import ALIE, FLIP, LABELS, PRODUCT, ZERO, Loop
from jax.flatten_util import ravel_pytree

import asyncsim
from asyncsim import Cluster, InputError, failures, methods, problems, replay, simulate, topologies
from asyncsim.pages.film import film, frame_times
from asyncsim.replays.replay import Replay

pytestmark = pytest.mark.usefixtures("float64", "lenient")
CURVATURE, START, RATE, WORKERS = np.linspace(0.2, 1, 5), np.linspace(-1, 2, 5), 0.05, 7
#: Each worker has a target, which the labels say.
TARGETS = np.arange(WORKERS)


@methods.declared
def tracking(learning_rate=RATE):
    """Gradient tracking: replicas move along an average of gradients that is mixed, too. A message
    is a dict that says nothing of the order of its entries.
    """

    def mix(worker, inbox, visit):
        return {**worker, **{name: visit.kept * worker[name] + inbox[name] for name in inbox}}

    def message(worker, update, start, central, visit):
        rate = jnp.asarray(learning_rate, update.dtype)
        gradient = -update / rate
        direction = worker["direction"] + gradient - worker["gradient"]
        sent = {"direction": direction, "x": worker["x"] - rate * direction}
        return sent, {**sent, "gradient": gradient}, {}

    def init_worker(central):
        return {"x": central, **dict.fromkeys(("direction", "gradient"), 0 * central)}

    return methods.Method(
        methods.gradient_steps(learning_rate),
        "tracking",
        {"learning_rate": learning_rate},
        message=message,
        init_worker=init_worker,
        resume=lambda worker, read: worker["x"],
        replica=lambda sent: sent["x"],
        mix=mix,
    )


def momentum_too(learning_rate=RATE):
    """AD-PSGD whose workers average their momentum, too; the state is a dict."""

    def meet(own, other, visit):
        mean = jax.tree.map(lambda a, b: (a + b) / 2, own, other)
        return mean, mean

    def message(worker, update, start, central, visit):
        momentum = 0.9 * worker["momentum"] + update
        x = worker["x"] + momentum
        return x, {"momentum": momentum, "x": x}, {}

    return methods.Method(
        methods.gradient_steps(learning_rate),
        "momentum_too",
        message=message,
        init_worker=lambda central: {"momentum": 0 * central, "x": central},
        meet=meet,
        replica=lambda state: state["x"],
    )


def own_targets():
    """A quadratic whose optimum is another one for each worker."""

    def loss(params, batch, key):
        away = params["x"] - batch["label"].astype(params["x"].dtype)[:, None]
        return 0.5 * jnp.mean(jnp.sum(CURVATURE * away**2, 1))

    return problems.custom(
        lambda key: {"x": jnp.asarray(START)},
        loss,
        train={"label": TARGETS.astype(np.int32)},
        batch_size=1,
        split="even",
        name="own_targets",
    )


def apart():
    """The same problem, whose workers start at the rows of ``STARTS``."""
    return dataclasses.replace(own_targets(), init_replica=lambda key, k: {"x": STARTS[k]})


STARTS = np.random.default_rng(1).normal(0, 2, (WORKERS, 5))
NONE: Mapping[str, Any] = MappingProxyType({})


class Case(NamedTuple):
    """A method, its cluster and attack; what else the cluster and the loop are told."""

    make: Any
    topology: str
    policy: str
    attack: str | None = None
    cluster: Mapping[str, Any] = NONE
    loop: Mapping[str, Any] = NONE


def any_policy(make, **options):
    return functools.partial(make, policy=None, **options)


def with_momentum(make):
    return lambda rate: make(optimizer=optax.sgd(rate, 0.9))


FAILING = {
    "failures": (
        failures.crash("exponential(6)", "exponential(2)", detect=1.0),
        failures.loss(0.1, timeout=0.7, resend=False),
        failures.join(5.0, workers=6),
    ),
    "latency": 0.2,
}
MOMENTUM = {"cluster": {"window": 2, "latency": 0}, "loop": {"momentum": 0.9}}
ROUNDS = "neighbours(mix=beside)"
CASES = {
    "D-PSGD": Case(methods.dpsgd, "ring()", ROUNDS),
    "SGP": Case(methods.sgp, "one_peer_exponential()", "neighbours()", LABELS),
    "SGP, nobody waits": Case(any_policy(methods.sgp), "exponential()", "asynchronous()", ALIE),
    "overlap SGP": Case(methods.osgp, "exponential()", "overlap(1)", ZERO),
    "overlap SGP, two steps": Case(any_policy(methods.sgp), "exponential()", "overlap(2)"),
    "AD-PSGD": Case(methods.adpsgd, "complete()", "handshake()", LABELS),
    "AD-PSGD, momentum": Case(momentum_too, "complete()", "handshake()"),
    "ClippedGossip": Case(methods.clipped_gossip, "exponential()", "neighbours()", ALIE),
    "ClippedGossip, radius": Case(
        functools.partial(methods.clipped_gossip, radius=0.3),
        *("ring()", "neighbours()"),
        loop={"radius": 0.3},
    ),
    "BRIDGE": Case(functools.partial(methods.robust_gossip, "median()"), "ring()", ROUNDS, PRODUCT),
    "gradient tracking": Case(tracking, "ring()", "neighbours()", FLIP),
    "overlap SGP, two local steps with momentum": Case(
        with_momentum(methods.osgp), "exponential()", "overlap(1)", **MOMENTUM
    ),
    "AD-PSGD, two local steps with momentum": Case(
        with_momentum(methods.adpsgd), "ring()", "handshake()", **MOMENTUM
    ),
    "D-PSGD, apart": Case(methods.dpsgd, "ring()", ROUNDS, loop={"start": STARTS}),
    "AD-PSGD, apart": Case(methods.adpsgd, "complete()", "handshake()", loop={"start": STARTS}),
    "D-PSGD, failing": Case(methods.dpsgd, "ring()", ROUNDS, FLIP, FAILING),
    "SGP, failing": Case(methods.sgp, "one_peer_exponential()", "neighbours()", ZERO, FAILING),
    "overlap SGP, failing": Case(methods.osgp, "exponential()", "overlap(1)", ALIE, FAILING),
    "AD-PSGD, failing": Case(methods.adpsgd, "complete()", "handshake()", None, FAILING),
}


@functools.cache
def trace_of(name, commits=100, **options):
    case = CASES[name]
    times = {"compute": "exponential(1)", "latency": "exponential(0.3)"}
    cluster = {"topology": case.topology, "policy": case.policy, **times, **case.cluster}
    return simulate(Cluster(**{"workers": WORKERS, **cluster, **options}), commits)


def assert_close(values, expected):
    """To 1e-12, of the largest value where an attack has made the values large."""
    scale = max(1, np.abs(expected).max())
    np.testing.assert_allclose(values, expected, rtol=0, atol=1e-12 * scale)


def loss(x):
    return np.mean([0.5 * np.sum(CURVATURE * (x - target) ** 2) for target in TARGETS])


#: Each case in one form in turn.
FORMS = [(name, ("batch", "single")[place % 2]) for place, name in enumerate(CASES)]


@pytest.mark.parametrize(("name", "form"), FORMS)
def test_replays_are_plain_loops(name, form):
    """The central variable is the mean of honest, living replicas and of the messages between
    them.
    """
    case, trace = CASES[name], trace_of(name)
    method, problem = case.make(RATE), apart() if "start" in case.loop else own_targets()
    arguments = {"start": START, "targets": TARGETS, "attack": case.attack, **case.loop}
    loop = Loop(trace, method, CURVATURE, rate=RATE, **arguments)
    commits = len(loop.central) - 1
    stops = np.unique([0, 1, 2, 5, *range(11, commits, 13), commits])
    options = {"precision": "float64", "form": form, "attack": case.attack}
    running = Replay(trace, method, problem, stops=stops, **options)
    for stop in stops.tolist():
        running.advance(stop)
        assert_close(running.state.central, loop.central[stop])
    last, run = running.evaluate(), running.result()
    if case.cluster is not FAILING:
        moved = np.linalg.norm(np.diff(loop.central, axis=0), axis=1)
        assert_close(run.commits["update_norm"], moved)
    # Of Byzantine workers, too: the messages that they send do not change their replicas.
    replicas = loop.points if loop.kind == "sgp" else loop.x
    assert_close(run.replicas["x"][loop.living], replicas[loop.living])
    assert loop.living.all() or case.cluster is FAILING
    counted = replicas[loop.living & loop.honest]
    assert last["train_loss"] == pytest.approx(loss(loop.central[-1]), rel=1e-9)
    distance = np.mean(np.sum((counted - loop.central[-1]) ** 2, 1))
    assert last["consensus_distance"] == pytest.approx(distance, rel=1e-9)


def test_pictures_of_failing_gossip():
    trace = trace_of("D-PSGD, failing")
    run = replay(trace, methods.dpsgd(RATE), own_targets(), precision="float64")
    asyncsim.plots.overview(trace)
    drawn = film(run, trace, frame_times([trace], 20), "")
    assert drawn.offset is None and len(drawn.workers) == trace.workers


def test_the_fixed_point_of_dpsgd_on_a_quadratic(rate=0.5):
    """Per coordinate ``(I - W + rate H)^-1 rate H b``, with an optimum ``b`` of each worker."""
    (w,) = topologies.ring().matrices(WORKERS)
    trace = trace_of("D-PSGD", WORKERS * 400, compute="constant(1)", latency=0)
    run = replay(trace, methods.dpsgd(rate), own_targets(), precision="float64", progress=False)
    expected = [
        np.linalg.solve(np.eye(WORKERS) * (1 + rate * h) - w, rate * h * TARGETS) for h in CURVATURE
    ]
    np.testing.assert_allclose(run.replicas["x"], np.transpose(expected), rtol=0, atol=1e-12)


def test_push_on_the_complete_graph_is_synchronous_sgd_with_the_mean():
    """The sum of all gradients at one point, over the workers."""
    problem, n = problems.digits(batch_size=4, hidden=(8,)), 4
    times = {"workers": n, "compute": "constant(1)"}
    push = Cluster(**times, topology="complete()", policy="neighbours()")
    server = Cluster(**times, policy="barrier()")
    ends = [
        replay(simulate(cluster, n * 20), method, problem, precision="float64", progress=False)
        for cluster, method in ((push, methods.sgp(RATE)), (server, methods.batch_sgd(RATE)))
    ]
    for pair in zip(*(jax.tree.leaves(run.params) for run in ends), strict=True):
        np.testing.assert_allclose(*pair, rtol=0, atol=1e-12)


def test_one_worker_is_sgd():
    problem = problems.quadratic(CURVATURE, noise=0.3)

    def losses(trace, make):
        return replay(trace, make(RATE), problem, progress=False).commits["loss"].tolist()

    expected = losses(simulate(Cluster(1, "constant(1)"), 40), methods.downpour)
    for name in ("D-PSGD", "SGP", "AD-PSGD"):
        assert losses(trace_of(name, 40, workers=1), CASES[name].make) == expected


def test_states_of_workers_that_meet_name_their_replica():
    own = methods.adpsgd(RATE)._replace(
        init_worker=lambda central: {"m": central, "x": central},
        message=lambda worker, update, *_: (update, worker, {}),
        meet=lambda own, other, visit: (own, other),
    )
    with pytest.raises(
        InputError,
        match=r"the worker's state carries its replica, .* replica=lambda state",
    ):
        replay(trace_of("AD-PSGD"), own, problems.quadratic(CURVATURE))


@pytest.mark.parametrize(
    ("method", "name"),
    [
        (methods.dpsgd(), "AD-PSGD"),
        (methods.sgp(policy=None), "D-PSGD"),
    ],
)
def test_the_policy_that_an_error_names_is_python(method, name):
    with pytest.raises(InputError) as raised:
        replay(trace_of(name), method, problems.quadratic(CURVATURE))
    text = str(raised.value)
    policy = eval(
        text[text.index("policy=asyncsim.") + 7 :].split(")")[0] + ")", {"asyncsim": asyncsim}
    )
    beside = method.name == "dpsgd"
    assert policy == asyncsim.neighbours(mix="beside" if beside else "before")


def test_gradients_of_replicas_that_are_not_mixed_may_have_messages_beside():
    """Of a method of one's own whose functions are compiled, too."""
    trace, method = trace_of("D-PSGD", 40), methods.dpsgd(RATE)
    runs = [
        replay(trace, variant, own_targets(), precision="float64", progress=False)
        for variant in (method, method._replace(mix=jax.jit(method.mix)))
    ]
    np.testing.assert_array_equal(*(ravel_pytree(run.params)[0] for run in runs))
