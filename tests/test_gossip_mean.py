"""The central variable without a server, against plain loops that add up replicas and messages;
with attacks, too."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gossip_loop import ALIE, FLIP, LABELS, ZERO, Loop

from asyncsim import Cluster, methods, problems, replay, simulate
from asyncsim.replays.replay import Replay

CURVATURE, START, RATE, WORKERS = np.linspace(0.2, 1, 5), np.linspace(-1, 2, 5), 0.05, 6
#: Each worker has a target of its own, which the labels say.
TARGETS = np.arange(WORKERS)


class Tracker(NamedTuple):
    x: Any
    y: Any
    gradient: Any


class Tracked(NamedTuple):
    x: Any
    y: Any


class HeavyBall(NamedTuple):
    momentum: Any
    replica: Any


@methods.declared
def tracking(learning_rate=RATE):
    """Gradient tracking: replicas move along an average of gradients that is mixed, too."""

    def mix(worker, inbox, visit):
        return Tracker(
            visit.kept * worker.x + inbox.x, visit.kept * worker.y + inbox.y, worker.gradient
        )

    def message(worker, update, start, central, visit):
        rate = jnp.asarray(learning_rate, update.dtype)
        gradient = -update / rate
        y = worker.y + gradient - worker.gradient
        x = worker.x - rate * y
        return Tracked(x, y), Tracker(x, y, gradient), {}

    return methods.Method(
        methods.gradient_steps(learning_rate),
        "tracking",
        {"learning_rate": learning_rate},
        message=message,
        init_worker=lambda central: Tracker(
            central, jnp.zeros_like(central), jnp.zeros_like(central)
        ),
        resume=lambda worker, read: worker.x,
        mix=mix,
    )


def heavy_ball(**options):
    """Momentum on each worker, whose message is a dict that says nothing of the order of its
    entries.
    """

    def message(worker, update, start, central, visit):
        momentum = 0.9 * worker.momentum + update
        replica = worker.replica + momentum
        return {"momentum": momentum, "replica": replica}, HeavyBall(momentum, replica), {}

    return methods.Method(
        methods.gradient_steps(RATE),
        "heavy_ball",
        message=message,
        init_worker=lambda central: HeavyBall(jnp.zeros_like(central), central),
        resume=lambda worker, read: worker.replica,
        mix=lambda worker, inbox, visit: worker._replace(
            replica=visit.kept * worker.replica + inbox["replica"]
        ),
        **{"replica": lambda sent: sent["replica"], **options},
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
        {"learning_rate": learning_rate},
        message=message,
        init_worker=lambda central: {"momentum": jnp.zeros_like(central), "x": central},
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


@functools.cache
def trace_of(topology, policy, commits=70, seed=0):
    cluster = Cluster(
        WORKERS, "exponential(1)", topology=topology, policy=policy, latency="exponential(0.3)"
    )
    return simulate(cluster, commits, seed)


METHODS = {
    "D-PSGD": (methods.dpsgd(RATE), "ring()", "neighbours(mix=beside)"),
    "SGP": (methods.sgp(RATE), "one_peer_exponential()", "neighbours()"),
    "SGP, nobody waits": (methods.sgp(RATE, policy=None), "exponential()", "asynchronous()"),
    "overlap SGP": (methods.osgp(RATE), "exponential()", "overlap(1)"),
    "AD-PSGD": (methods.adpsgd(RATE), "complete()", "handshake()"),
    "AD-PSGD with momentum": (momentum_too(), "complete()", "handshake()"),
    "ClippedGossip": (methods.clipped_gossip(RATE), "exponential()", "neighbours()"),
    "ClippedGossip, a constant radius": (
        methods.clipped_gossip(RATE, radius=0.3),
        "ring()",
        "neighbours()",
    ),
    "BRIDGE": (methods.robust_gossip("median()", RATE), "ring()", "neighbours(mix=beside)"),
    "gradient tracking": (tracking(), "ring()", "neighbours()"),
    "heavy ball": (heavy_ball(), "ring()", "neighbours()"),
}
#: A case of each kind of message, of each attack.
FEW = [("D-PSGD", None), ("SGP", LABELS), ("overlap SGP", ZERO), ("AD-PSGD", LABELS)]
FEW += [("gradient tracking", FLIP), ("heavy ball", None), ("SGP, nobody waits", ALIE)]
FEW += [
    ("ClippedGossip", ALIE),
    ("ClippedGossip, a constant radius", None),
    ("BRIDGE", ALIE),
    ("AD-PSGD with momentum", None),
]


#: In one form in turn.
FORMS = [(*case, ("single", "batch")[place % 2]) for place, case in enumerate(FEW)]


def assert_close(found, expected):
    """To 1e-12, of the largest value where an attack has made the values large."""
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12 * max(1, np.abs(expected).max()))


def loop_of(name, attack):
    method, *where = METHODS[name]
    radius = 0.3 if name == "ClippedGossip, a constant radius" else None
    options = {"attack": attack, "targets": TARGETS, "radius": radius}
    return Loop(trace_of(*where), method, CURVATURE, START, RATE, **options)


pytestmark = pytest.mark.usefixtures("float64")


@pytest.mark.parametrize(("name", "attack", "form"), FORMS)
def test_the_central_variable_is_the_mean_of_replicas_and_messages(name, attack, form):
    method, *where = METHODS[name]
    trace = trace_of(*where)
    loop = loop_of(name, attack)
    stops = [1, 2, 5, 11, 24, 25, 49, len(trace)]
    running = Replay(
        trace,
        method,
        own_targets(),
        precision="float64",
        stops=np.array(stops),
        attack=attack,
        form=form,
    )
    for stop in stops:
        running.advance(stop)
        assert_close(running.state.central, loop.central[stop])
    steps = np.linalg.norm(np.diff(loop.central, axis=0), axis=1)
    assert_close(running.result().commits["update_norm"], steps)


@pytest.mark.parametrize(("name", "attack"), FEW[1:6])
def test_evaluations_are_of_that_mean_and_of_honest_replicas(name, attack):
    method, *where = METHODS[name]
    trace = trace_of(*where)
    loop = loop_of(name, attack)
    replicas = loop.points if loop.kind == "sgp" else loop.x
    options = {"precision": "float64", "attack": attack, "progress": False}
    run = replay(trace, method, own_targets(), **options)
    assert_close(run.params["x"], loop.central[-1])
    # Those of Byzantine workers too: what they send does not change their own.
    assert_close(run.replicas["x"], replicas)

    def loss(x):
        return np.mean([0.5 * np.sum(CURVATURE * (x - target) ** 2) for target in TARGETS])

    last, honest = run.evaluations.iloc[-1], replicas[loop.honest]
    assert last["train_loss"] == pytest.approx(loss(loop.central[-1]), rel=1e-9)
    distance = np.mean(np.sum((honest - loop.central[-1]) ** 2, 1))
    assert last["consensus_distance"] == pytest.approx(distance, rel=1e-9)
