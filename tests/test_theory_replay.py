"""Theory against replays: what closed forms say of the numbers, not only of the times."""

import numpy as np
import pytest

from asyncsim import Cluster, Exponential, methods, problems, recorders, simulate, study, theory
from asyncsim.replays.replay import replay

WORKERS, STEP, COMMITS = 10, 0.2, 60
SEEDS = 100
#: So many standard errors: the largest of 60 correlated normal deviations is beyond 5 in fewer than
#: 1 in 25,000 runs.
ERRORS = 5


pytestmark = pytest.mark.usefixtures("float64")


def central_path(seed, method, problem):
    """The central variable after 0, 1, ... commits: with exchanges every version is read by its
    committer.
    """
    # So many more commits that every worker has come again, and all reads of interest are consumed.
    trace = simulate(Cluster(WORKERS, Exponential(1.0)), COMMITS + 200, seed)
    run = replay(trace, method, problem, precision="float64", evaluate_every=1000, progress=False)
    version = trace.frame["read_version"].to_numpy()
    path = np.full(len(trace) + 1, np.nan)
    path[version] = run.commits["loss"]
    return path[: COMMITS + 1]


@pytest.mark.full
def test_mean_path_has_implicit_momentum():
    method, problem = (
        methods.downpour(learning_rate=STEP),
        study.load("momentum").revealing_quadratic(),
    )
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


def test_one_gem_worker_spends_the_energy_of_its_proxy():
    """Eq. 13, compliance: where the server's move and the update have one sign, the two energies
    are equal.
    """
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
    np.testing.assert_allclose(
        run.commits["central_energy"], run.commits["proxy_energy"], rtol=1e-10
    )
