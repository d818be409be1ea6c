"""Traces, methods and problems that the replay is tested on."""

import functools
import importlib
from importlib.util import find_spec

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from asyncsim import (
    Cluster,
    Exponential,
    Gamma,
    Uniform,
    asynchronous,
    prescribed,
    problems,
    proportional_windows,
    simulate,
)
from asyncsim.methods import Applied, Method, completing, gradient_steps, present
from asyncsim.problems.cifar10 import cifar10_from_arrays
from asyncsim.replays import tuning

needs_ray = pytest.mark.skipif(
    find_spec("ray") is None, reason='needs Ray: pip install "asyncsim[ray]"'
)
COMMITS = 2000
#: Pieces as an accelerator's, whose commits are all unrolled; twice as many take four times as long
#: to compile.
ACCELERATED = tuning._ACCELERATOR._replace(piece_sizes=(1, 4, 8), piece_overhead=2.0, unrolled=8)
PROTOCOLS = {
    "exchange": {},
    "read_then_write": {"protocol": "read_then_write"},
    "read_then_write, two visits": {"protocol": "read_then_write", "exclusive": False},
    "write_then_read": {"protocol": "write_then_read"},
    "prescribed": None,
}
#: The default policy of the traces here.
ASYNCHRONOUS = asynchronous()


@functools.cache
def make_trace(
    protocol="exchange", window=1, workers=7, commits=COMMITS, seed=0, policy=ASYNCHRONOUS
):
    """Visits that queue and travel, so that other commits slip in wherever the protocol lets
    them.
    """
    if protocol == "prescribed":
        # Staler than there are workers: jobs of one worker overlap.
        return prescribed(Uniform(0, 3 * workers), commits, workers, window, seed)
    cluster = Cluster(
        workers,
        compute=Gamma(1.0, cv=0.5),
        service=Exponential(0.05),
        latency=Exponential(0.1),
        window=window,
        policy=policy,
        **PROTOCOLS[protocol],
    )
    return simulate(cluster, commits, seed)


@functools.cache
def make_dynamic(workers=4, window=5, commits=300):
    """Windows in proportion to the workers' speeds, which are of the authors' toy."""
    laws = [Gamma((0.58, 0.75, 1.51, 3.33)[i % 4], 0.3) for i in range(workers)]
    windows = proportional_windows(laws, window)
    return simulate(
        Cluster(workers, laws if workers > 1 else laws[0], Exponential(0.05), window=windows),
        commits,
    )


def tiny_mnist(batch_size=4, **options):
    """MNIST's network on twenty invented images."""
    rng = np.random.default_rng(0)
    arrays = {}
    for part, examples in (("train", 20), ("t10k", 6)):
        arrays[f"{part}-images-idx3-ubyte"] = rng.integers(0, 256, (examples, 28, 28), np.uint8)
        arrays[f"{part}-labels-idx1-ubyte"] = rng.integers(0, 10, examples, np.uint8)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            importlib.import_module("asyncsim.problems.mnist"), "load_mnist", lambda folder: arrays
        )
        return problems.mnist(batch_size, **options)


def tiny_cifar10(network, batch_size=2):
    """A network for CIFAR-10 on ten invented images."""
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (10, 3, 32, 32), np.uint8)
    train = {"image": images, "label": np.arange(10, dtype=np.int32)}
    test = {"image": images[:3], "label": np.arange(3, dtype=np.int32)}
    return cifar10_from_arrays(train, test, batch_size, network=network)


PROBLEMS = {
    "quadratic": lambda: problems.quadratic(np.linspace(0.1, 1, 16), noise=0.1),
    "digits": lambda: problems.digits(batch_size=8, hidden=(16,)),
    "mnist": tiny_mnist,
    "characters": lambda: problems.characters(4, context=8, width=8, heads=2),
    "cifar10, small": lambda: tiny_cifar10("small"),
}


# One of each, so that what is compiled for it is compiled once.
@functools.cache
def make_problem(name):
    return PROBLEMS[name]()


# Methods that use the rest of the interface, as a user writes them


def noisy(rate=0.05, replies=False):
    """Everything that sees a visit draws: local steps, messages, the server, and its replies if it
    has any.
    """

    def noise(visit, place, like):
        drawn = jax.random.normal(jax.random.fold_in(visit.key, place), like.shape)
        return (0.01 * drawn).astype(like.dtype)

    def update(gradients, state, params=None, *, visit, **_):
        return jax.tree.map(lambda leaf: -rate * (leaf + noise(visit, 0, leaf)), gradients), state

    def message(worker, update, start, central, visit):
        return update + noise(visit, 1, update), worker, {}

    def apply(server, central, message, memory, visit):
        taken = jax.random.bernoulli(visit.key, 0.8)
        return Applied(jnp.where(taken, central + message, central), server, memory)

    def reply(server, central, memory, visit):
        return central + noise(visit, 2, central)

    steps = optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)
    options = {"reply": reply} if replies else {}
    return Method(
        steps, "noisy", {"rate": rate}, message=message, apply=apply, needs_key=True, **options
    )


def combining(rate=0.01):
    """Combine trees by their losses and a draw; averages of each worker's messages wait in their
    place.
    """

    def message(worker, update, start, central, visit):
        return {"update": update, "scale": jnp.ones((), update.dtype)}, worker, {}

    def receive(memory, message, visit):
        average = 0.5 * memory + message["update"]
        return message | {"update": average}, average

    def combine(server, central, messages, visits):
        weight = jnp.where(present(messages, visits), messages["scale"] / (1 + visits.loss**2), 0)
        step = weight @ messages["update"] / weight.sum()
        step = step / (1 + completing(visits).worker_step.astype(step.dtype))
        velocity = (
            0.5 * server + step + 0.01 * jax.random.normal(visits.key, step.shape, step.dtype)
        )
        return Applied(central + velocity, velocity)

    return Method(
        gradient_steps(rate),
        "combining",
        {"rate": rate},
        message=message,
        combine=combine,
        receive=receive,
        init_server=jnp.zeros_like,
        init_memory=jnp.zeros_like,
        needs_key=True,
    )


def pair_of_messages(rate=0.05):
    """The message is a tree, and the server divides one of its entries by the other."""

    def message(worker, update, start, central, visit):
        return {"update": update, "size": 1 + jnp.linalg.norm(update)}, worker, {}

    def apply(server, central, message, memory, visit):
        return Applied(central + message["update"] / message["size"], server, memory)

    return Method(gradient_steps(rate), "normalised", message=message, apply=apply)


def decaying(visit):
    """A schedule over everything that a visit knows."""
    slower = 1 + visit.worker_step / 100 + visit.commit / 1000 + visit.time / 50
    slower = slower + visit.place / 10 + visit.messages / 10
    return 0.1 * visit.local_steps / slower / (visit.staleness + 1)


# Own problems


def nested_problem():
    rng = np.random.default_rng(1)
    x = rng.normal(size=(50, 3))

    def init(key):
        return {"w": jax.random.normal(key, (3,)), "rest": (jnp.zeros(()), {"b": jnp.ones((2, 2))})}

    def loss(params, batch, key):
        scale = jnp.mean(params["rest"][1]["b"]) * (
            1 + 0.1 * jax.random.normal(key, (), params["w"].dtype)
        )
        return jnp.mean((scale * batch["x"] @ params["w"] + params["rest"][0] - batch["y"]) ** 2)

    return problems.custom(init, loss, {"x": x, "y": x @ [1.0, -2.0, 0.5]}, batch_size=8)


def stateful_problem():
    """Inputs are centred by a running mean, which is a state and not trained; batches are
    counted.
    """
    x = np.random.default_rng(2).normal(1, 1, size=(60, 3))

    def loss(params, state, batch, key):
        mean = 0.9 * state["mean"] + 0.1 * jnp.mean(batch, 0)
        value = jnp.mean((batch - mean) @ params) ** 2 + 0.1 * jnp.sum((params - 1) ** 2)
        return value, {"mean": mean, "seen": state["seen"] + 1}

    return problems.custom(
        lambda key: jnp.zeros(3),
        loss,
        x,
        batch_size=5,
        evaluate=lambda params, state, data: {
            "loss": jnp.sum(state["mean"]),
            "seen": state["seen"],
        },
        init_state=lambda: {"mean": jnp.zeros(3), "seen": jnp.int32(0)},
    )
