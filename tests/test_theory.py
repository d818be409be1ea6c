"""The closed forms against published numbers, brute force and small simulations of their own."""

import itertools
import math

import formulas
import jax
import numpy as np
import pytest
from edits import with_versions
from hypothesis import given
from hypothesis import strategies as st

from asyncsim import methods, prescribed, problems, theory
from asyncsim.clusters.laws import (
    Constant,
    Empirical,
    Exponential,
    Gamma,
    LogNormal,
    Mixture,
    Pareto,
    Uniform,
)
from asyncsim.replays.replay import Replay

# Staleness


@pytest.mark.parametrize("workers", [1, 2, 20])
def test_geometric_staleness_is_a_law_with_its_moments(workers):
    staleness = np.arange(2000)  # (19/20)**2000 < 1e-44 is left out
    probability = theory.geometric_staleness(workers, staleness)
    mean = probability @ staleness
    assert probability.sum() == pytest.approx(1, rel=1e-12)
    assert mean == pytest.approx(workers - 1, abs=1e-12 * workers)
    assert probability @ (staleness - mean) ** 2 == pytest.approx(
        theory.geometric_staleness_variance(workers), rel=1e-9, abs=1e-12
    )
    assert theory.geometric_staleness(workers, -1) == 0


@pytest.mark.parametrize(
    ("compute", "published", "places"),
    [
        (lambda: theory.geometric_staleness(20, 10), 0.0299, 4),
        (lambda: [theory.first_staleness(20, k) for k in (1, 5, 15, 20)], [19, 3, 1 / 3, 0], 9),
        (lambda: theory.renewal_staleness_variance(Gamma(1, 0.5), 20) ** 0.5, 9.90, 2),
        # Throughput and population, of which there are as many as in the queue and in service.
        (lambda: theory.repairman(20, 1.0, 0.1)[:2], [9.98131, 10.01869], 5),
        (lambda: theory.barrier_time([Exponential(1 / rate) for rate in (1, 2, 3, 4)]), 1.236, 3),
        (lambda: theory.barrier_time(Exponential(1), 32, first=28), 1.975, 3),
        (lambda: theory.barrier_time(theory.sum_law(Exponential(1), 64), 16) / 64, 1.233, 3),
        (lambda: theory.implicit_momentum(10), 0.9, 12),
        (lambda: [theory.stable_step(n) for n in (1, 2, 10, 100)], [2, 1.281, 0.500, 0.147], 3),
        (lambda: [theory.stable_step(n, "mean") for n in (1, 2, 10, 100)], [2, 6, 38, 398], 12),
    ],
)
def test_published_numbers(compute, published, places):
    """To half a unit in the last printed digit."""
    np.testing.assert_allclose(compute(), published, atol=0.5 * 10.0**-places, rtol=0)


def simulate_renewals(durations):
    """Return the staleness of commits without a queue, from durations ``[workers, jobs]``.

    The order is known until the first worker's last commit. Computations are chosen by their start,
    in the last two thirds of that time (workers out of step by then) less its last twentieth: all
    of those are complete, where choosing by the end would leave out the long ones.
    """
    times = np.cumsum(durations, axis=1)
    order = np.argsort(times, axis=None, kind="stable")
    version = np.empty_like(order)
    version[order] = np.arange(order.size)
    staleness = np.diff(version.reshape(times.shape), axis=1) - 1
    end = times[:, -1].min()
    assert durations.max() < end / 20
    return staleness[(times[:, :-1] > end / 3) & (times[:, :-1] < end * 0.95)]


@pytest.mark.parametrize(
    "law",
    [
        LogNormal(1.0, 0.6),
        Mixture([Gamma(1, 0.2), Constant(5)], [9, 1]),
    ],
    ids=str,
)
def test_renewal_staleness_variance_against_a_simulation(law):
    """Independent replications give the standard error, whatever the correlation within one."""
    random = np.random.default_rng(5)
    workers, replications = 8, 60
    samples = (law.sample(random, (workers, 600)) for _ in range(replications))
    estimates = [np.mean((simulate_renewals(times) - (workers - 1)) ** 2) for times in samples]
    # A standard normal is beyond 5 sigma with probability 6e-7; the seed is fixed besides.
    tolerance = 5 * np.std(estimates, ddof=1) / math.sqrt(replications)
    assert np.mean(estimates) == pytest.approx(
        theory.renewal_staleness_variance(law, workers), abs=tolerance
    )


def test_renewal_staleness_variance_limits():
    geometric = theory.geometric_staleness_variance(20)
    assert theory.renewal_staleness_variance(Exponential(0.1), 20) == pytest.approx(
        geometric, rel=1e-6
    )
    assert theory.renewal_staleness_variance(Constant(1), 20) == 0
    assert theory.renewal_staleness_variance(Gamma(1, 2), 1) == 0
    assert theory.renewal_staleness_variance(Pareto(1, 1.5), 20) == math.inf
    small, large = (
        theory.renewal_staleness_variance(LogNormal(mean, 0.5), 9) for mean in (1e-3, 1e3)
    )
    assert small == pytest.approx(large, rel=1e-9)


# Queueing


@given(st.integers(1, 300), st.floats(1e-3, 1e3), st.floats(1e-3, 1e3))
def test_repairman_recursion_and_probabilities_agree(workers, think, service):
    state = theory.repairman(workers, think, service)
    # P_k is proportional to N! / (N - k)! (service / think)^k; logarithms, as these overflow.
    ratios = np.log((workers - np.arange(workers)) * service / think)
    log_weights = np.r_[0.0, np.cumsum(ratios)]
    weights = np.exp(log_weights - log_weights.max())
    probabilities = weights / weights.sum()
    assert state.utilisation == pytest.approx(1 - probabilities[0], rel=1e-9)
    assert state.in_system == pytest.approx(probabilities @ np.arange(workers + 1), rel=1e-9)
    assert state.throughput * (think + state.response) == pytest.approx(workers, rel=1e-9)  # Little
    assert state.throughput <= theory.saturation_bound(workers, think, service) * (1 + 1e-12)


def test_repairman_without_thinking_or_service():
    assert theory.repairman(5, 0, 0.5) == (2.0, 5.0, 2.5, 1.0)
    assert theory.repairman(5, 2.0, 0) == (2.5, 0.0, 0.0, 0.0)


# Barriers


@pytest.mark.parametrize("law", [Exponential(0.3), Uniform(3, 3.1), Pareto(1, 1.5)], ids=str)
@pytest.mark.parametrize(("workers", "first"), [(2, 1), (32, 28), (1000, 1000)])
def test_barrier_integral_agrees_with_closed_forms(law, workers, first):
    """A mixture of one law is that law, but has no closed form here."""
    closed = theory.barrier_time(law, workers, first)
    assert theory.barrier_time(Mixture([law], [1]), workers, first) == pytest.approx(
        closed, rel=1e-8
    )


@pytest.mark.parametrize("first", [1, 3])
def test_barrier_of_unlike_workers_against_enumeration(first):
    """Workers that each have two possible durations: every outcome listed."""
    pairs = [(1.0, 5.0), (2.0, 2.5), (0.5, 9.0), (1.0, 4.0)]
    outcomes = [sorted(outcome)[first - 1] for outcome in itertools.product(*pairs)]
    laws = [Empirical(pair) for pair in pairs]
    assert theory.barrier_time(laws, first=first) == pytest.approx(np.mean(outcomes), rel=1e-12)


@pytest.mark.parametrize("cv", [1e-2, 1e-6])
def test_barrier_of_narrow_laws_far_apart(cv):
    """All of ten are fast, or the barrier is the last of the slow: of these the mean of the maximum
    is known apart.
    """
    law, workers, slow = Mixture([Gamma(1, cv), Gamma(9, cv)], [9, 1]), 10, 0.1
    exact = (1 - slow) ** workers * theory.barrier_time(Gamma(1, cv), workers) + sum(
        math.comb(workers, k)
        * slow**k
        * (1 - slow) ** (workers - k)
        * theory.barrier_time(Gamma(9, cv), k)
        for k in range(1, workers + 1)
    )
    assert theory.barrier_time(law, workers) == pytest.approx(exact, rel=1e-9)


def test_sum_law():
    law = theory.sum_law(Gamma(0.5, 0.4), 16)
    assert (law.mean, law.std) == (pytest.approx(8), pytest.approx(4 * 0.2))
    assert theory.sum_law(Constant(0.5), 3) == Constant(1.5)
    assert theory.sum_law(Uniform(0, 1), 1) == Uniform(0, 1)


# Momentum


@pytest.mark.parametrize("window", [1, 4])
def test_implicit_momentum_path_against_all_orders(window, workers=3, commits=7):
    """Every order of writers is equally likely under exponential times."""
    paths = []
    for writers in itertools.product(range(workers), repeat=commits):
        path, reads = [1.0], [1.0] * workers
        for worker in writers:
            path.append(path[-1] + (1 - 0.3) ** window * reads[worker] - reads[worker])
            reads[worker] = path[-1]
        paths.append(path)
    path = theory.implicit_momentum_path(workers, theory.window_step(0.3, window), commits)
    np.testing.assert_allclose(path, np.mean(paths, axis=0), atol=1e-13)


def radius(matrix):
    return np.abs(np.linalg.eigvals(matrix)).max()


def visits(workers, step):
    """The map of each worker's commit, on the central variable and all reads."""
    for worker in range(1, workers + 1):
        visit = np.eye(workers + 1)
        visit[0, worker] = -step
        visit[worker] = visit[0]
        yield visit


@pytest.mark.parametrize("workers", [1, 5])
def test_the_mean_square_is_stable_up_to_its_step(workers):
    """The spectral radius of the map of all second moments, 64 by 64 for seven workers, is one at
    the limit.
    """
    limit = theory.stable_step(workers, "mean_square")
    for step, stable in ((0.98 * limit, True), (1.02 * limit, False)):
        moments = sum(np.kron(visit, visit) for visit in visits(workers, step)) / workers
        assert (radius(moments) < 1) == stable


@pytest.mark.parametrize(("workers", "limit"), [(2, 1.52), (10, 0.61)])
def test_a_run_is_stable_up_to_the_documented_step(workers, limit):
    """The growth of one long run, matrix by matrix, changes its sign within 4 %."""
    for step, stable in ((0.96 * limit, True), (1.04 * limit, False)):
        draw = np.random.default_rng(workers)
        state, growth = draw.normal(size=workers + 1), 0.0
        for count, worker in enumerate(draw.integers(1, workers + 1, size=100_000)):
            state[0] -= step * state[worker]
            state[worker] = state[0]
            if count % 100 == 0:
                scale = np.abs(state).max()
                growth, state = growth + math.log(scale), state / scale
        assert (growth < 0) == stable


@pytest.mark.parametrize("rule", ["nesterov", "heavy_ball"])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_momentum_leaves_the_unit_circle_at_its_rate_and_not_before(momentum, rule):
    """On the circle the characteristic polynomial determines the rate: the least real one is the
    limit.
    """
    z = np.exp(1j * np.linspace(0, np.pi, 200_001)[1:])
    pull = (1 + momentum) * z - momentum if rule == "nesterov" else z
    for delay in (0, 1, 3, 8, 30):
        rate = -(z - 1) * (z - momentum) * z**delay / pull / (1 - momentum)
        crossings = np.flatnonzero(np.diff(np.sign(rate.imag)))
        candidates = rate.real[np.append(crossings, -1)]
        least = candidates[candidates > 0].min()
        limit = theory.momentum_stable_rate(momentum, delay, rule)
        assert limit == pytest.approx(least, rel=2e-3)


# Elastic averaging


STEPS = [0.1, 1.9]


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize(("workers", "together"), [(1, False), (7, False), (1, True), (16, True)])
def test_the_elastic_limit_is_exact(workers, step, together):
    """With one version a round, and with visits one after the other for odd numbers of workers."""
    if together:
        matrix, limit = (
            formulas.elastic_synchronous,
            theory.elastic_stable_beta(workers, step) / workers,
        )
    else:
        matrix, limit = formulas.elastic_round_robin, theory.elastic_stable_alpha(step)
    assert radius(matrix(workers, step, limit)) == pytest.approx(1, abs=1e-9)
    assert radius(matrix(workers, step, 0.999 * limit)) < 1
    assert radius(matrix(workers, step, 1.001 * limit)) > 1


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("workers", [2, 16])
def test_the_asynchronous_limit_is_safe_for_even_numbers_of_workers(workers, step):
    limit = theory.elastic_stable_alpha(step)
    assert radius(formulas.elastic_round_robin(workers, step, 0.999 * limit)) < 1
    # Two workers and a step of one: stable up to the square root of one half.
    assert radius(formulas.elastic_round_robin(2, 1.0, 0.5**0.5)) == pytest.approx(1, abs=1e-9)


@pytest.mark.parametrize("share", [0.97, 1.03])
@pytest.mark.parametrize("together", [False, True])
def test_replays_grow_and_shrink_as_the_maps_do(share, together, workers=3, step=0.5, rounds=400):
    """After so many rounds the fastest direction is alone, and grows by the radius in each."""
    commits = workers * rounds
    if together:
        alpha = share * theory.elastic_stable_beta(workers, step) / workers
        method = methods.easgd(step, alpha, policy=None)
        matrix = formulas.elastic_synchronous(workers, step, alpha)
        trace = prescribed(np.arange(commits) % workers, commits, workers)
        trace = with_versions(trace, np.arange(commits + 1) // workers)
    else:
        alpha = share * theory.elastic_stable_alpha(step)
        method = methods.aeasgd(step, alpha, order="remembered")
        matrix = formulas.elastic_round_robin(workers, step, alpha)
        trace = prescribed(workers - 1, commits, workers)
    problem, stops = problems.quadratic([1.0], start=1.0), np.array([rounds - 40, rounds]) * workers
    with jax.enable_x64(True):
        running = Replay(trace, method, problem, precision="float64", stops=stops)
        distances = []
        for stop in stops.tolist():
            running.advance(stop)
            distances.append(abs(float(running.state.central[0])))
    assert (distances[1] / distances[0]) ** (1 / 40) == pytest.approx(radius(matrix), rel=1e-6)
    assert (radius(matrix) > 1) == (share > 1)
