"""The central variable without a server, against plain loops that add up replicas and messages;
with attacks, too.

The loops keep every message. At any row they add up each message by the share of it that nobody has
mixed yet.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from asyncsim import Cluster, methods, problems, replay, replay_ensemble, simulate
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
        "tracking",
        {"learning_rate": learning_rate},
        methods.gradient_steps(learning_rate),
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
        "heavy_ball",
        {},
        methods.gradient_steps(RATE),
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
        "momentum_too",
        {"learning_rate": learning_rate},
        methods.gradient_steps(learning_rate),
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
        sharded=True,
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
LABELS, FLIP = "label_flip(workers=[1, 4])", "sign_flip(workers=2, scale=0.5)"
ALIE, PRODUCT = "alie(workers=2, z=1.5)", "inner_product(workers=[3], scale=0.1)"
ATTACKS = {
    None: lambda vector: vector,
    FLIP: lambda vector: -0.5 * vector,
    LABELS: lambda vector: vector,
    "zero(workers=[3])": lambda vector: 0 * vector,
}
#: Attacks that know honest messages, from these.
KNOWING = {
    ALIE: lambda known: known.mean(0) - 1.5 * known.std(0),
    PRODUCT: lambda known: -0.1 * known.mean(0),
}
BYZANTINE = {
    None: [],
    FLIP: [0, 1],
    LABELS: [1, 4],
    "zero(workers=[3])": [3],
    ALIE: [0, 1],
    PRODUCT: [3],
}
#: A case of each kind of message, of each attack.
FEW = [("D-PSGD", None), ("SGP", LABELS), ("overlap SGP", "zero(workers=[3])"), ("AD-PSGD", FLIP)]
FEW += [("gradient tracking", FLIP), ("heavy ball", None), ("SGP, nobody waits", ALIE)]
FEW += [
    ("ClippedGossip", ALIE),
    ("ClippedGossip, a constant radius", None),
    ("BRIDGE", ALIE),
    ("AD-PSGD with momentum", PRODUCT),
]


FORMS = [(*case, "single") for case in FEW]
FORMS += [pytest.param(*case, "batch", marks=pytest.mark.full) for case in FEW]


def assert_close(found, expected):
    """To 1e-12, of the largest value where an attack has made the values large."""
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12 * max(1, np.abs(expected).max()))


class Loop:
    """A run row by row.

    ``central[rows]`` is the mean after so many rows, ``replicas[rows]`` are the workers' replicas,
    and ``points`` where each worker has computed its last gradient.
    """

    def __init__(self, name, trace, attack):
        self.kind = METHODS[name][0].name.replace("osgp", "sgp")
        self.has_momentum = self.kind == "momentum_too"
        self.kind = self.kind.replace("momentum_too", "adpsgd")
        self.byzantine = BYZANTINE[attack]
        self.change, self.form = ATTACKS.get(attack, lambda part: part), KNOWING.get(attack)
        self.radius = 0.3 if name == "ClippedGossip, a constant radius" else None
        self.targets = TARGETS.astype(float)
        if attack and attack.startswith("label_flip"):
            self.targets[self.byzantine] = TARGETS.max() - self.targets[self.byzantine]
        n = trace.workers
        self.honest = [i for i in range(n) if i not in self.byzantine]
        self.x, self.points = np.tile(START, (n, 1)), np.tile(START, (n, 1))
        self.w, self.y, self.g, self.m = np.ones(n), 0 * self.x, 0 * self.x, 0 * self.x
        self.frame, self.sent, self.true = trace.frame, [], []
        self.central, self.replicas = [START], [self.x.copy()]
        # Of each row's message the share that nobody has mixed yet, and of each worker's last
        # message.
        self.left, self.last, self.initial = [], {}, np.ones(n)
        for row in trace.frame.itertuples():
            self.step(row)
            self.central.append(self.mean(n))
            self.replicas.append(self.x / self.w[:, None] if self.kind == "sgp" else self.x.copy())

    def gradient(self, worker, at):
        return CURVATURE * (at - self.targets[worker])

    def mix(self, row, own, part):
        messages, shares = self.received(row, part), np.array(row.weights)
        if self.kind == "robust_gossip":
            return np.median([own, *messages], 0)
        if self.kind == "clipped_gossip":
            return own + self.clipped([message - own for message in messages], shares)
        return row.kept * own + sum(
            share * message for share, message in zip(shares, messages, strict=True)
        )

    def clipped(self, apart, shares):
        distances = np.array([np.linalg.norm(step) for step in apart])
        radius = self.radius
        if radius is None and len(apart):
            last = np.argmax(distances)
            near = np.arange(len(apart)) != last
            radius = np.sqrt(np.sum((shares * distances**2)[near]) / shares[last])
        return sum(
            (share * min(1, radius / distance if distance else 1) * step)
            for step, share, distance in zip(apart, shares, distances, strict=True)
        )

    def received(self, row, part):
        """Return a part of each message; those of Byzantine senders as they are formed for this
        receiver.
        """
        messages, senders = (
            [part(self.sent[r]) for r in row.sources],
            [self.frame["worker"][r] for r in row.sources],
        )
        known = {
            sender: message
            for sender, message in zip(senders, messages, strict=True)
            if sender in self.honest
        }
        if row.worker in self.honest:
            last = self.last.get(row.worker)
            known[row.worker] = part((START, 1.0, 0 * START) if last is None else self.true[last])
        if self.form is None or not known:
            return messages
        formed = self.form(np.array(list(known.values())))
        return [
            formed if sender in self.byzantine else own
            for sender, own in zip(senders, messages, strict=True)
        ]

    def shown(self, worker, states):
        """Return the state that a worker shows to the one that it meets."""
        if worker not in self.byzantine:
            return states[worker].copy()
        return self.change(states[worker]) if self.form is None else self.form(states[self.honest])

    def meet(self, i, j, states):
        shown_by_i, shown_by_j = self.shown(i, states), self.shown(j, states)
        states[i], states[j] = (states[i] + shown_by_j) / 2, (states[j] + shown_by_i) / 2

    def step(self, row):
        i = row.worker
        if self.kind == "adpsgd":
            step = -RATE * self.gradient(i, self.points[i])
            self.meet(i, row.partner, self.x)
            if self.has_momentum:
                self.meet(i, row.partner, self.m)
                step = self.m[i] = 0.9 * self.m[i] + step
            self.x[i] = self.points[i] = self.x[i] + step
            return
        for source, share in zip(row.sources, row.weights, strict=True):
            self.left[source] -= share
        if i in self.last:
            self.left[self.last[i]] -= row.kept
        else:
            self.initial[i] -= row.kept
        mixed = self.mix(row, self.x[i], lambda sent: sent[0])
        if self.kind == "sgp":
            self.w[i] = self.mix(row, self.w[i], lambda sent: sent[1])
        self.points[i] = {
            "dpsgd": self.x[i],
            "robust_gossip": self.x[i],
            "sgp": mixed / self.w[i],
        }.get(self.kind, mixed)
        gradient = self.gradient(i, self.points[i])
        if self.kind == "tracking":
            self.y[i] = self.mix(row, self.y[i], lambda sent: sent[2]) + gradient - self.g[i]
            self.g[i], self.x[i] = gradient, mixed - RATE * self.y[i]
        elif self.kind == "heavy_ball":
            self.m[i] = 0.9 * self.m[i] - RATE * gradient
            self.x[i] = mixed + self.m[i]
        else:
            self.x[i] = mixed - RATE * gradient
        self.last[i] = len(self.sent)
        self.left.append(1.0)
        parts = self.x[i].copy(), self.w[i], self.y[i].copy()
        change = self.change if i in self.byzantine else lambda part: part
        self.true.append(parts)
        # Only push-sum sends its weight.
        self.sent.append(
            (
                change(parts[0]),
                change(parts[1]) if self.kind == "sgp" else parts[1],
                change(parts[2]),
            )
        )

    def mean(self, n):
        if self.kind == "adpsgd":
            return self.x[self.honest].mean(0)
        total = sum((self.initial[i] * START for i in self.honest), 0 * START)
        weight = sum(self.initial[i] for i in self.honest)
        for row, (share, (x, w, _)) in enumerate(zip(self.left, self.true, strict=True)):
            if self.frame["worker"].iloc[row] in self.honest:
                total, weight = total + share * x, weight + share * (w if self.kind == "sgp" else 1)
        return total / (weight if self.byzantine else n)


pytestmark = pytest.mark.usefixtures("float64")


@pytest.mark.parametrize(("name", "attack", "form"), FORMS)
def test_the_central_variable_is_the_mean_of_replicas_and_messages(name, attack, form):
    method, *where = METHODS[name]
    trace = trace_of(*where)
    loop = Loop(name, trace, attack)
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
    loop = Loop(name, trace, attack)
    replicas = loop.points if loop.kind == "sgp" else loop.x
    options = {
        "precision": "float64",
        "attack": attack,
        "evaluate_replicas": True,
        "progress": False,
    }
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
    losses = [loss(x) for x in honest]
    for which, value in (("best", min(losses)), ("mean", np.mean(losses)), ("worst", max(losses))):
        assert last[f"train_loss_{which}"] == pytest.approx(value, rel=1e-9)


@pytest.mark.parametrize(
    ("name", "attack"),
    [
        ("SGP", FLIP),
        ("gradient tracking", None),
        ("SGP", ALIE),
        ("AD-PSGD", ALIE),
    ],
)
def test_members_of_an_ensemble_have_their_means(name, attack):
    make = {
        "SGP": methods.sgp,
        "gradient tracking": tracking,
        "AD-PSGD": methods.adpsgd,
    }[name]
    trace, loop = trace_of(*METHODS[name][1:]), Loop(name, trace_of(*METHODS[name][1:]), attack)
    options = {
        "learning_rate": [0.02, RATE],
        "precision": "float64",
        "attack": attack,
        "progress": False,
    }
    runs = replay_ensemble(trace, make, own_targets(), batched=True, **options)
    assert_close(runs[1].params["x"], loop.central[-1])


def test_on_several_devices_it_is_the_same(attack=ALIE):
    name = "SGP, nobody waits"
    trace = trace_of(*METHODS[name][1:])
    options = {
        "precision": "float64",
        "attack": attack,
        "devices": jax.devices()[:2],
        "progress": False,
    }
    run = replay(trace, METHODS[name][0], own_targets(), **options)
    assert_close(run.params["x"], Loop(name, trace, attack).central[-1])
