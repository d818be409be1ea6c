"""Leader SGD's theory against steps on quadratics and replays."""

import numpy as np
import pytest

from asyncsim import Cluster, methods, problems, replay, simulate, theory

H = np.array([0.5, 1.0, 4.0])


def loss(x):
    return (H * x**2).sum(-1) / 2


def test_a_step_decreases_the_loss_as_bounded(pull=0.1):
    rng = np.random.default_rng(0)
    rate, noise = 0.05, 0.3
    for _ in range(20):
        x, z = sorted(rng.normal(size=(2, 3)), key=loss, reverse=True)
        draws = noise / np.sqrt(3) * rng.normal(size=(20_000, 3))
        after = loss(x - rate * (H * x + draws) - pull * (x - z)).mean()
        bound = theory.leader_step_bound(loss(x), loss(z), rate, pull, H.min(), H.max(), noise)
        assert after <= bound + 1e-3
        plain = theory.leader_step_bound(loss(x), loss(z), rate, 0.0, H.min(), H.max(), noise)
        assert bound <= plain


def test_a_replay_ends_below_the_floor():
    noise, rate, pull, workers = 0.1, 0.05, 0.01, 4
    trace = simulate(Cluster(workers, "gamma(1, 0.2)"), 8000)
    problem = problems.quadratic(H, noise=noise)
    run = replay(trace, methods.lsgd(rate, pull), problem, evaluate_every=10, progress=False)
    late = run.evaluations["train_loss"].iloc[-100:].mean()
    # The loss of a minibatch is the loss plus <noise, x>, of a deviation below the noise here.
    floor = theory.leader_floor(rate, pull, workers, H.min(), H.max(), noise * 3**0.5, noise)
    sgd = theory.leader_floor(rate, 0.0, workers, H.min(), H.max(), noise * 3**0.5)
    assert 0 < late < floor and sgd < floor
    assert sgd == pytest.approx(rate * 8 * 3 * noise**2 / 2)


def test_half_of_the_better_points_turn_the_step_to_newtons():
    """Curvatures 1 and 20: shares from 0.58 to 0.9 around the ellipse, 0.74 in the mean."""
    angles = np.linspace(0.1, np.pi / 2 - 0.1, 9)
    points = np.stack([np.cos(angles), np.sin(angles)], 1)
    shares = [theory.newton_share([1.0, 20.0], x, 0.05) for x in points]
    assert min(shares) > 0.5 and 0.6 < np.mean(shares) < 0.9
