"""Theory against replays: what closed forms say of the numbers, not only of the times."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from event_loop import EventLoop

from asyncsim import Cluster, Exponential, Gamma, methods, problems, recorders, simulate, theory
from asyncsim.replays.replay import replay

WORKERS, STEP, COMMITS = 10, 0.2, 60
SEEDS = 150
#: So many standard errors: the largest of 60 correlated normal deviations is beyond 5 in fewer than 1 in 25,000 runs.
ERRORS = 5


pytestmark = pytest.mark.usefixtures("float64")


def revealing_quadratic():
    """``x**2 / 2``, whose recorded loss is the ``x`` that the worker read."""

    def loss(x, batch, key):
        value = jnp.sum(x * x) / 2
        return value + jax.lax.stop_gradient(jnp.sum(x) - value)

    return problems.custom(lambda key: jnp.ones(1), loss)


def central_path(seed, method, problem):
    """The central variable after 0, 1, ... commits: with exchanges every version is read by its committer."""
    # So many more commits that every worker has come again, and all reads of interest are consumed.
    trace = simulate(Cluster(WORKERS, Exponential(1.0)), COMMITS + 200, seed)
    run = replay(trace, method, problem, precision="float64", evaluate_every=1000, progress=False)
    version = trace.frame["read_version"].to_numpy()
    path = np.full(len(trace) + 1, np.nan)
    path[version] = run.commits["loss"]
    return path[: COMMITS + 1]


@pytest.mark.full
def test_mean_path_has_implicit_momentum():
    method, problem = methods.downpour(learning_rate=STEP), revealing_quadratic()
    paths = np.array([central_path(seed, method, problem) for seed in range(SEEDS)])
    assert np.isfinite(paths).all()
    expected = theory.implicit_momentum_path(WORKERS, STEP, COMMITS)
    # All workers start from the same version, so the first commit is the same in every run.
    np.testing.assert_allclose(paths[:, :2], np.broadcast_to(expected[:2], (SEEDS, 2)), rtol=1e-14)
    error = paths[:, 2:].std(0, ddof=1) / SEEDS**0.5
    assert np.max(np.abs(paths[:, 2:].mean(0) - expected[2:]) / error) < ERRORS
    # The errors are small enough to tell the path from one of another momentum.
    other = theory.implicit_momentum_path(WORKERS + 4, STEP, COMMITS)
    assert np.max(np.abs(paths[:, 2:].mean(0) - other[2:]) / error) > 2 * ERRORS


@pytest.mark.parametrize("protocol", ["exchange", "read_then_write"])
def test_energies_are_what_their_definitions_say(protocol):
    rate, mu = 0.1, 0.7
    curvature, start = np.linspace(0.2, 1, 6), np.linspace(1, 2, 6)
    trace = simulate(Cluster(5, Gamma(1.0, 0.5), service=Exponential(0.1), protocol=protocol), 200)
    problem, method = problems.quadratic(curvature, start=start), methods.downpour(rate)
    run = replay(trace, method, problem, precision="float64", record=[recorders.energy(mu)], progress=False)
    loop = EventLoop(trace, method, problem)
    loop.run(0, 200)
    momentum = dict.fromkeys(range(5), np.zeros(6))
    for row in trace.frame.itertuples():
        read, before, after = (
            np.asarray(loop.versions[version]) for version in (row.read_version, row.version - 1, row.version)
        )
        momentum[row.worker] = mu * momentum[row.worker] - rate * curvature * read
        found = run.commits.iloc[row.commit]
        assert found["loss"] == pytest.approx(np.sum(curvature * read**2) / 2, rel=1e-12)
        assert found["update_norm"] == pytest.approx(np.linalg.norm(after - before), rel=1e-10)
        assert found["central_energy"] == pytest.approx(np.sum((after - read) ** 2) / 2, rel=1e-10)
        assert found["proxy_energy"] == pytest.approx(np.sum(momentum[row.worker] ** 2) / 2, rel=1e-12)


def test_gems_energies_are_its_own():
    """GEM measures from what it pulled, before its own commit, and its proxy is its own momentum."""
    trace = simulate(Cluster(5, Gamma(1.0, 0.5), service=Exponential(0.1)), 200)
    problem, method = problems.quadratic(np.linspace(0.2, 1, 6), start=np.linspace(1, 2, 6)), methods.gem(0.1, 0.7)
    run = replay(trace, method, problem, precision="float64", record=[recorders.energy(0.1)], progress=False)
    # The loop's versions are the replay's up to round-off, which GEM amplifies little over so few commits.
    loop = EventLoop(trace, method, problem)
    pulled = dict.fromkeys(range(5), loop.central)
    for commit in range(200):
        before, worker = loop.central, trace.frame["worker"].iloc[commit]
        loop.run(commit, commit + 1)
        found = run.commits.iloc[commit]
        energy = np.sum(np.asarray(loop.workers[worker].method.momentum) ** 2) / 2
        assert found["proxy_energy"] == pytest.approx(energy, rel=1e-6)
        assert found["central_energy"] == pytest.approx(
            np.sum(np.asarray(loop.central - pulled[worker]) ** 2) / 2, rel=1e-6
        )
        pulled[worker] = before


def test_one_gem_worker_spends_the_energy_of_its_proxy():
    """Eq. 13, compliance: where the server's move and the update have one sign, the two energies are equal."""
    trace = simulate(Cluster(1, Exponential(1.0), protocol="read_then_write"), 40)
    problem = problems.quadratic([0.01], start=[100.0])  # the gradient never changes its sign
    run = replay(
        trace,
        methods.gem(0.05, 0.9, pi_max=None),
        problem,
        precision="float64",
        record=[recorders.energy()],
        progress=False,
    )
    np.testing.assert_allclose(run.commits["central_energy"], run.commits["proxy_energy"], rtol=1e-10)
