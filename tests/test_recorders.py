"""Recorders: energies add up and are what their formulas say; a user's own; and none changes
anything else.
"""

import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import make_problem, make_trace
from hypothesis import given
from hypothesis import strategies as st

from asyncsim import InputError, methods, problems, recorders, replay
from asyncsim.methods import Method, gradient_steps
from asyncsim.replays import tuning
from asyncsim.replays.recording import QUANTILES, diagnostic_rows
from asyncsim.replays.replay import Replay

#: Relative: two programs compute the same differences of two vectors of size one, of which a
#: hundredth is left.
SAME = 1e-12
ENERGIES = ("central_energy", "proxy_energy")


def diagnosed(method, problem, trace, every=2, tensors=2, momentum=0.9, **options):
    record = [recorders.energy(momentum, tensors), recorders.diagnostics(every)]
    return replay(
        trace,
        method,
        problem,
        **{"precision": "float64", "record": record, "progress": False} | options,
    )


def deviation(run, quantity) -> float:
    """The largest relative difference between the sum over the tensors and what is recorded of each
    commit.
    """
    rows = run.diagnostics[run.diagnostics["quantity"] == quantity]
    assert rows["quantile"].isna().all() and len(rows) >= 5
    sums = rows.groupby("commit")["value"].sum()
    recorded = run.commits.set_index("commit")[quantity][sums.index]
    assert (recorded > 0).all()
    return float(np.max(np.abs(sums / recorded - 1)))


@pytest.fixture
def long(monkeypatch):
    """Dispatch the commits of small problems, too."""
    monkeypatch.setattr(tuning, "_FEW_PARAMETERS", 0)
    monkeypatch.setattr(tuning, "_LONG_VECTOR", 0)


@pytest.mark.parametrize(
    ("problem", "method", "protocol"),
    [
        ("quadratic", "gem", "read_then_write, two visits"),
        # The local steps of such a worker start from its replica, not from what it read.
        ("quadratic", "aeasgd", "exchange"),
        pytest.param("quadratic", "downpour", "prescribed", marks=pytest.mark.full),
        pytest.param("digits", "gem", "exchange", marks=pytest.mark.full),
    ],
)
def test_tensors_add_up_to_each_commit(problem, method, protocol, long):
    run = diagnosed(
        methods.METHODS[method](), make_problem(problem), make_trace(protocol, commits=150)
    )
    assert run.diagnostics["commit"].unique().tolist() == list(range(0, 150, 15))
    tensors = run.diagnostics.query("quantity == 'central_energy'")["tensor"].nunique()
    assert tensors == {"quadratic": 1, "digits": 4}[problem]
    assert max(deviation(run, quantity) for quantity in ENERGIES) < SAME


class Replica(NamedTuple):
    replica: jax.Array


def test_a_start_that_is_the_workers_state_is_there_after_its_commit(long):
    """Commits of long vectors reuse the memory of the rows that they replace."""

    def message(worker, update, start, central, visit):
        return update, Replica(worker.replica + update), {"moved": start + worker.replica}

    method = Method(
        gradient_steps(0.05),
        "replicas",
        message=message,
        init_worker=lambda central: Replica(central),
        resume=lambda worker, read: worker.replica,
    )
    record = [recorders.diagnostics(2)]
    run = replay(
        make_trace(commits=60), method, make_problem("quadratic"), record=record, progress=False
    )
    moved = run.diagnostics.query(
        "quantity == 'moved' and commit == 0 and quantile == 0.5 and tensor == ''"
    )["value"]
    start = make_problem("quadratic").init(jax.random.key(0))
    assert moved.iloc[0] == pytest.approx(2 * float(np.median(jax.tree.leaves(start)[0])), rel=1e-6)


RATE, MU, CAP = 0.1, 0.7, 2.0
CURVATURE, START = np.linspace(0.2, 1, 16), np.linspace(-1.1, 2, 16)


def loop(trace, scaled):
    """GEM (if scaled) or DOWNPOUR on a quadratic, commit by commit: energies, pi and signs of
    each.
    """
    versions, momentum, pulled, theta, found = {0: START}, {}, {}, START, []
    for row in trace.frame.itertuples():
        read = versions[row.read_version]
        u = -RATE * CURVATURE * read
        m = momentum[row.worker] = MU * momentum.get(row.worker, 0 * u) + u
        since = pulled.get(row.worker, START) if scaled else read
        d = theta - since
        pi = (abs(m) - abs(d)) / abs(u + 1e-12) if scaled else 0 * u + 1
        pulled[row.worker] = theta
        theta = versions[row.version] = theta + (np.clip(pi, 0, CAP) if scaled else 1) * u
        found.append(((theta - since) ** 2 / 2, m**2 / 2, pi, d * u < 0))
    return found


@pytest.mark.parametrize("scaled", [True, False], ids=["gem", "downpour"])
def test_ratio_and_shares_are_what_their_formulas_say(scaled):
    method = methods.gem(RATE, MU, pi_max=CAP) if scaled else methods.downpour(RATE)
    trace = make_trace(commits=150, workers=5)
    run = diagnosed(method, problems.quadratic(CURVATURE, start=START), trace, momentum=MU)
    every, shares = loop(trace, scaled), []
    for commit, rows in run.diagnostics.groupby("commit"):
        central, proxy, pi, opposite = every[commit]
        rows = rows.set_index("quantity")
        # GEM amplifies the round-off of 150 commits on a quadratic little.
        ratio = rows.loc["weight_energy_ratio"]
        assert ratio["quantile"].tolist() == [0.05, 0.25, 0.5, 0.75, 0.95, 0.5]
        np.testing.assert_allclose(
            ratio["value"], np.quantile(central / proxy, ratio["quantile"]), rtol=1e-6
        )
        np.testing.assert_allclose(rows.loc["central_energy", "value"], central.sum(), rtol=1e-6)
        np.testing.assert_allclose(rows.loc["proxy_energy", "value"], proxy.sum(), rtol=1e-6)
        assert rows.loc["opposite_sign", "value"] == opposite.mean()
        if scaled:
            shares.append(
                rows.loc[["clipped_low", "clipped_high", "opposite_sign"], "value"].tolist()
            )
            assert shares[-1] == [np.mean(pi < 0), np.mean(pi > CAP), opposite.mean()]
    assert not scaled or (np.max(shares, 0) > 0).all()  # each of them happens


def test_weights_whose_proxy_has_no_energy_are_left_out():
    central, proxy = np.array([1.0, 2.0, 3.0]), np.array([0.0, 4.0, 1.0])
    rows = diagnostic_rows(7, {"central_energy": [central], "proxy_energy": [proxy]}, [".w"])
    found = {
        (quantity, quantile): value for _, quantity, _, quantile, value in rows if quantile == 0.5
    }
    assert found == {("weight_energy_ratio", 0.5): np.median([0.5, 3.0])}
    nothing = diagnostic_rows(7, {"central_energy": [central], "proxy_energy": [0 * proxy]}, [".w"])
    assert np.isnan(
        [value for _, quantity, *_, value in nothing if quantity == "weight_energy_ratio"]
    ).all()


def cosine():
    """The cosine between consecutive steps of the central variable, as the documentation has it."""

    def observe(last, commit):
        lengths = jnp.linalg.norm(last) * jnp.linalg.norm(commit.step)
        return commit.step, [jnp.vdot(last, commit.step) / jnp.maximum(lengths, 1e-30)]

    return recorders.Recorder(
        ("cosine",), observe, init=lambda method, central: 0 * central, shared=True
    )


def distance():
    """How far each worker's start is from the one before, and at which commit it was."""

    def observe(last, commit):
        return commit.start, [jnp.linalg.norm(commit.start - last), commit.visit.commit]

    return recorders.Recorder(("moved", "at"), observe, init=lambda method, central: central)


@pytest.mark.parametrize("form", ["batch", pytest.param("single", marks=pytest.mark.full)])
def test_a_users_own_in_every_form(form, float64):
    trace, record = make_trace(commits=120), [cosine(), recorders.energy(), distance()]
    task = problems.quadratic(CURVATURE, start=START)
    options = {"precision": "float64", "record": record, "form": form}
    running = Replay(trace, methods.downpour(RATE), task, **options)
    running.advance(len(trace))
    commits = running.result().commits
    assert list(commits.columns[6:]) == ["update_norm", *ENERGIES, "moved", "at", "cosine"]
    assert commits["at"].tolist() == list(range(120))
    versions = [START]
    for read in trace.frame["read_version"]:
        versions.append(versions[-1] - RATE * CURVATURE * versions[read])
    expected = [0, *(cosine_of(a, b) for a, b in itertools.pairwise(np.diff(versions, axis=0)))]
    np.testing.assert_allclose(commits["cosine"], expected, atol=1e-9)


def test_a_number_that_is_undefined_ends_no_run():
    one = recorders.Recorder(("undefined",), lambda state, commit: (state, [commit.loss * jnp.nan]))
    run = replay(
        make_trace(commits=30), methods.downpour(), make_problem("quadratic"), record=[one]
    )
    assert (
        run.status == "finished"
        and run.commits["undefined"].isna().all()
        and len(run.commits) == 30
    )


@given(
    st.lists(st.lists(st.floats(-1e6, 1e6, width=32), max_size=9), min_size=1, max_size=4),
    st.booleans(),
)
def test_quantiles_are_those_of_numpy(tensors, has_nan):
    # The tolerance: round-off of an interpolation between values up to 1e6.
    values = [np.array(own, np.float32) for own in tensors]
    values[0] = np.append(values[0], np.float32(np.nan if has_nan else 1))
    names = [f".{index}" for index in range(len(values))]
    rows = diagnostic_rows(0, {"pi": values}, names)
    expected = np.quantile(np.concatenate(values).astype(float), QUANTILES).tolist()
    expected += [np.median(own.astype(float)) if len(own) else np.nan for own in values]
    assert [row[3] for row in rows] == [*QUANTILES, *[0.5] * len(values)]
    np.testing.assert_allclose([row[4] for row in rows], expected, rtol=1e-12, atol=1e-9)


@pytest.mark.parametrize("precision", ["float32", "float64"])
def test_a_run_that_diverges_is_diagnosed_to_its_end(precision):
    problem, method = problems.quadratic(np.ones(4)), methods.downpour(learning_rate=30.0)
    run = diagnosed(method, problem, make_trace(commits=2000), precision=precision, tensors=1)
    assert run.status == "diverged" and run.diagnostics["commit"].max() > 7


def cosine_of(a, b):
    return a @ b / np.linalg.norm(a) / np.linalg.norm(b)


@pytest.mark.parametrize("window", [1, 3])
def test_directions_are_those_of_a_loop(window, float64):
    """Two workers in turn on a quadratic with noise, whose steps the loop takes from the replay."""
    h, start, rate, every = np.array([0.2, 1.0, 3.0]), np.array([1.0, -2.0, 0.5]), 0.1, 2
    problem = problems.quadratic(h, start=start)
    target = np.array([0.3, 0.1, -0.2])
    trace = make_trace(window=window, workers=2, commits=20)
    record = [recorders.directions(problem, target, every)]
    run = replay(
        trace, methods.agn(rate), problem, precision="float64", record=record, progress=False
    )
    centrals, previous, counts, expected = [start], np.zeros(3), [0, 0], []
    for row in trace.frame.itertuples():
        x = read = centrals[row.read_version]
        for _ in range(window):
            x = x - rate * h * x
        step = (x - read) / window
        pairs = (step, -h * read), (step, previous), (step, target - centrals[-1])
        due = counts[row.worker] % every == 0
        expected.append([cosine_of(a, b) if due and b.any() else np.nan for a, b in pairs])
        counts[row.worker] += 1
        previous = step
        centrals.append(centrals[-1] + step)
    names = ["gradient_cosine", "previous_cosine", "target_cosine"]
    np.testing.assert_allclose(run.commits[names], expected, rtol=1e-9)
    if window == 1:
        np.testing.assert_allclose(run.commits["gradient_cosine"].dropna(), 1)


def test_one_gem_worker_spends_the_energy_of_its_proxy():
    """Eq. 13, compliance: where the server's move and the update have one sign, the two energies
    are equal.
    """
    trace = make_trace("read_then_write", workers=1, commits=40)
    problem = problems.quadratic([0.01], start=[100.0])  # the gradient never changes its sign
    commits = diagnosed(methods.gem(0.05, 0.9, pi_max=None), problem, trace).commits
    np.testing.assert_allclose(commits["central_energy"], commits["proxy_energy"], rtol=1e-10)


def test_a_target_of_another_shape_is_refused():
    with pytest.raises(InputError, match=r"target: parameters of shapes \(2,\)"):
        recorders.directions(problems.quadratic([1.0]), np.zeros(2))
