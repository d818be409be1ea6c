"""Elastic averaging: the limits of stability against the maps of a round, and those against
replays.
"""

import formulas
import jax
import numpy as np
import pytest
from edits import with_versions

from asyncsim import methods, prescribed, problems, theory
from asyncsim.replays.replay import Replay

STEPS = [0.1, 1.9]


def radius(matrix):
    return np.abs(np.linalg.eigvals(matrix)).max()


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("workers", [1, 7])
def test_the_asynchronous_limit_is_exact_for_odd_numbers_of_workers(workers, step):
    limit = theory.elastic_stable_alpha(step)
    assert radius(formulas.elastic_round_robin(workers, step, limit)) == pytest.approx(1, abs=1e-9)
    assert radius(formulas.elastic_round_robin(workers, step, 0.999 * limit)) < 1
    assert radius(formulas.elastic_round_robin(workers, step, 1.001 * limit)) > 1


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("workers", [2, 16])
def test_the_asynchronous_limit_is_safe_for_even_numbers_of_workers(workers, step):
    limit = theory.elastic_stable_alpha(step)
    assert radius(formulas.elastic_round_robin(workers, step, 0.999 * limit)) < 1
    # Two workers and a step of one: stable up to the square root of one half.
    assert radius(formulas.elastic_round_robin(2, 1.0, 0.5**0.5)) == pytest.approx(1, abs=1e-9)


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("workers", [1, 16])
def test_the_synchronous_limit_is_exact(workers, step):
    alpha = theory.elastic_stable_beta(workers, step) / workers
    assert radius(formulas.elastic_synchronous(workers, step, alpha)) == pytest.approx(1, abs=1e-9)
    assert radius(formulas.elastic_synchronous(workers, step, 0.999 * alpha)) < 1
    assert radius(formulas.elastic_synchronous(workers, step, 1.001 * alpha)) > 1


def in_turn(workers, rounds, together):
    """Workers that visit one after the other; ``together``: with one version a round."""
    commits = workers * rounds
    if not together:
        return prescribed(workers - 1, commits, workers)
    trace = prescribed(np.arange(commits) % workers, commits, workers)
    return with_versions(trace, np.arange(commits + 1) // workers)


@pytest.mark.parametrize("share", [0.97, 1.03])
@pytest.mark.parametrize("together", [False, True])
def test_replays_grow_and_shrink_as_the_maps_do(share, together):
    """After so many rounds the fastest direction is alone, and grows by the radius in each."""
    workers, step, rounds = 3, 0.5, 400
    if together:
        alpha = share * theory.elastic_stable_beta(workers, step) / workers
        method, matrix = (
            methods.easgd(step, alpha, policy=None),
            formulas.elastic_synchronous(workers, step, alpha),
        )
    else:
        alpha = share * theory.elastic_stable_alpha(step)
        method, matrix = (
            methods.aeasgd(step, alpha, order="remembered"),
            formulas.elastic_round_robin(workers, step, alpha),
        )
    trace = in_turn(workers, rounds, together)
    with jax.enable_x64(True):
        stops = np.array([rounds - 40, rounds]) * workers
        running = Replay(
            trace, method, problems.quadratic([1.0], start=1.0), precision="float64", stops=stops
        )
        found = []
        for stop in stops:
            running.advance(int(stop))
            found.append(abs(float(running.state.central[0])))
    assert (found[1] / found[0]) ** (1 / 40) == pytest.approx(radius(matrix), rel=1e-6)
    assert (radius(matrix) > 1) == (share > 1)
