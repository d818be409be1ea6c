"""Attacks, and robust SGD under them."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from asyncsim import (
    Cluster,
    InputError,
    methods,
    problems,
    recorders,
    replay,
    replay_ensemble,
    simulate,
)
from asyncsim.byzantine.attacks import Attack, WeakAttackWarning, alie_z, parse_attack
from asyncsim.replays.replay import Replay

WORKERS = 8


@functools.cache
def trace(policy="barrier()", commits=160, workers=WORKERS, compute="gamma(mean=1, cv=0.3)"):
    return simulate(
        Cluster(workers=workers, compute=compute, service=0.01, policy=policy),
        commits=commits,
        seed=0,
    )


@functools.cache
def quadratic():
    return problems.quadratic(np.linspace(0.2, 1, 4), noise=0.3)


def central(run):
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(run.params)])


@pytest.mark.parametrize(
    ("n", "f", "z"),
    [
        *((50, 5, 0.0837), (50, 24, 1.4261), (51, 12, 0.3612), (25, 11, 1.0676), (10, 2, 0.0)),
    ],
)
def test_z_of_a_little_is_enough(n, f, z):
    assert round(alie_z(n, f), 4) == z
    assert bool(parse_attack(f"alie(workers={f})").weakness(n)) == (z == 0)


def test_an_attack_that_sends_the_mean_is_warned_of():
    method, problem = methods.robust("median()", 0.1), quadratic()
    with pytest.warns(
        WeakAttackWarning, match=r"attack = 'alie\(workers=2\)': with 2 of 8 workers z is 0"
    ):
        replay(trace(commits=16), method, problem, attack="alie(workers=2)")
    with pytest.warns(WeakAttackWarning, match="z is 0"):
        rates = [0.1, 0.2]
        given = dict(seeds=[0], learning_rate=rates, attack="alie(workers=3, z=0)", batched=True)
        replay_ensemble(trace(commits=16), methods.batch_sgd, problem, **given)
    assert not parse_attack("alie(workers=2, z=0.5)").weakness(WORKERS)


def test_attacks_by_hand():
    g = np.random.default_rng(0).normal(size=(6, 3))
    byzantine, honest = np.arange(6) < 2, np.arange(6) >= 2
    mean, std = g[2:].mean(0), g[2:].std(0)

    def made(text):
        with jax.enable_x64(True):
            return np.asarray(
                parse_attack(text).change(jnp.asarray(g), honest, byzantine, jax.random.key(0))
            )

    np.testing.assert_allclose(made("alie(workers=2, z=1.5)")[0], mean - 1.5 * std)
    np.testing.assert_allclose(
        made("alie(workers=2, z=1, knows=own)")[1], g[:2].mean(0) - g[:2].std(0), atol=1e-14
    )
    np.testing.assert_allclose(made("inner_product(workers=2, scale=0.5)")[1], -0.5 * mean)
    np.testing.assert_allclose(made("mimic(workers=2, target=4)")[0], g[4])
    np.testing.assert_allclose(made("mimic(workers=2)")[0], g[2])
    sent = made("min_max(workers=2)")[0]
    apart = [np.linalg.norm(a - b) for a in g[2:] for b in g[2:]]
    np.testing.assert_allclose(max(np.linalg.norm(sent - one) for one in g[2:]), max(apart))
    np.testing.assert_allclose(np.cross(sent - mean, std), 0, atol=1e-12)
    np.testing.assert_array_equal(made("min_max(workers=2)")[2:], g[2:])


def test_a_round_by_hand():
    """Robust SGD with its momenta, averages and an attack of one's own, in a loop over the
    rounds.
    """

    def reverse(workers, scale=3.0):
        def change(messages, honest, byzantine, key):
            mean = jnp.mean(messages, axis=0, where=honest[:, None])
            return jnp.where(byzantine[:, None], -scale * mean, messages)

        return Attack(workers, change=change, text=f"reverse(workers={workers})")

    problem = problems.quadratic(np.linspace(0.2, 1, 4))
    method = methods.robust(
        "cge(f=2, averaging=0.5)", 0.3, worker_momentum=0.5, server_momentum=0.25
    )
    run = replay(
        trace(),
        method,
        problem,
        attack=reverse(2),
        precision="float64",
        record=[recorders.chosen()],
    )
    with jax.enable_x64(True):
        theta = np.asarray(jax.tree.leaves(problem.init(jax.random.key(0)))[0], float)
    m, h, v = np.zeros((WORKERS, 4)), np.zeros((WORKERS, 4)), np.zeros(4)
    for _ in range(160 // WORKERS):
        m = 0.5 * m + np.linspace(0.2, 1, 4) * theta
        h = 0.5 * h + 0.5 * m
        g = h.copy()
        g[:2] = -3 * h[2:].mean(0)
        v = 0.25 * v + g[np.argsort(np.linalg.norm(g, axis=1), kind="stable")[: WORKERS - 2]].mean(
            0
        )
        theta = theta - 0.3 * v
    np.testing.assert_allclose(central(run), theta, rtol=1e-6)
    assert run.config["attack"] == "reverse(workers=2)"
    assert run.commits["byzantine_share"].max() == 0
    assert run.commits["byzantine_messages"].iloc[-1] == 0.25


def test_what_is_not_finite_is_counted():
    given = dict(attack="infinite(workers=[1, 5])", record=[recorders.chosen()])
    run = replay(trace(), methods.robust("median()", 0.2), quadratic(), **given)
    assert run.status == "finished"
    assert run.commits["not_finite"].iloc[-1] == 2
    assert (
        replay(trace(), methods.batch_sgd(0.2), quadratic(), attack="infinite(workers=1)").status
        == "diverged"
    )


@pytest.mark.parametrize(
    "method", [methods.clipped_gossip(0.1), methods.robust_gossip("median()", 0.1)]
)
def test_robust_gossip_leaves_out_messages_that_are_not_finite(method):
    cluster = Cluster(
        6, "gamma(mean=1, cv=0.3)", topology="complete()", policy=method.timing.policy
    )
    given = dict(attack="infinite(workers=1)", precision="float64")
    run = replay(simulate(cluster, 60, 0), method, quadratic(), **given)
    assert run.status == "finished"
    assert run.evaluations["train_loss"].iloc[-1] < run.evaluations["train_loss"].iloc[0]


@pytest.mark.parametrize("name", ["lsgd", "mem_sgd"])
def test_methods_can_be_attacked(name):
    """What Byzantine workers send changes the run, and what nobody changes does not."""
    method = methods.METHODS[name]()
    own = simulate(Cluster(workers=4, compute="gamma(mean=1, cv=0.3)"), commits=48, seed=0)
    honest = replay(own, method, quadratic(), precision="float64")

    def nothing(workers):
        return Attack(
            workers,
            corrupt=lambda message, key: message,
            change=lambda messages, *_: messages,
            text="nothing()",
        )

    attacked = replay(
        own, method, quadratic(), precision="float64", attack="sign_flip(workers=1, scale=0.5)"
    )
    assert np.abs(central(attacked) - central(honest)).max() > 1e-9
    try:
        same = replay(own, method, quadratic(), precision="float64", attack=nothing(1))
    except InputError as error:
        assert "vectors of parameters" in str(error)
        return
    np.testing.assert_allclose(central(same), central(honest), rtol=1e-9)


def test_labels_are_flipped_for_byzantine_workers_alone():
    """With all but one worker's data alike, the run is that of a problem whose labels are reversed
    for them.
    """
    plain = problems.digits(batch_size=8, hidden=(4,), split="even")
    label = plain.train["label"].copy()
    label[0::WORKERS] = 9 - label[0::WORKERS]
    flipped = dataclasses.replace(plain, train={**plain.train, "label": label})
    rounds, method = trace(commits=16), methods.robust("mean()", 0.3)
    runs = [
        replay(rounds, method, plain, attack="label_flip(workers=1)"),
        replay(rounds, method, flipped),
    ]
    np.testing.assert_array_equal(central(runs[0]), central(runs[1]))
    start = Replay(rounds, method, plain).evaluate()["train_loss"]
    assert runs[0].evaluations["train_loss"].iloc[0] == pytest.approx(start)
