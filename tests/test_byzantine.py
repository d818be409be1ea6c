"""Kardam, BASGD and Zeno++ under attack, and what they refuse."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from asyncsim import Cluster, asynchronous, methods, problems, replay, simulate
from asyncsim.methods import Visit

WORKERS, BYZANTINE, COMMITS = 20, 3, 3000

#: What a Byzantine worker sends in the place of its update. The disturbance is as long beside the
#: gradient, a hundred times, as that of the BASGD paper with the 270,000 parameters of its network:
#: 0.2 |g| for each parameter.
ATTACKS = {
    "none": lambda update, key: update,
    "negative": lambda update, key: -10 * update,
    "disturbed": lambda update, key: (
        update + 0.8 * jnp.linalg.norm(update) * jax.random.normal(key, update.shape, update.dtype)
    ),
    "constant": lambda update, key: jnp.full_like(update, 0.03),
}


def attacked(method, attack):
    def message(worker, update, start, central, visit):
        sent = ATTACKS[attack](update, jax.random.fold_in(visit.key, 1))
        return method.message(
            worker, jnp.where(visit.worker < BYZANTINE, sent, update), start, central, visit
        )

    return method._replace(message=message, needs_key=True)


@functools.cache
def trace_under(policy, last="gamma(1, 0.4)"):
    laws = ["gamma(1, 0.4)"] * (WORKERS - 1) + [last]
    return simulate(Cluster(WORKERS, laws if len({*laws}) > 1 else last, policy=policy), COMMITS)


@functools.cache
def digits():
    return problems.digits()


def run_of(method, attack, **cluster):
    trace = trace_under(method.timing.policy or asynchronous(), **cluster)
    return replay(trace, attacked(method, attack), digits(), progress=False)


def accuracy(run):
    return float(run.evaluations["test_accuracy"].iloc[-1])


@pytest.mark.full
def test_attacks_break_asynchronous_sgd_and_not_basgd():
    """The table of the BASGD paper: 30 workers of their own paces, of whom the three quickest are
    Byzantine.

    Each method at the best of a few rates without an attack; one seed.
    """
    paces = np.sort(1 + np.abs(np.random.default_rng(0).normal(size=30)))
    laws = [f"gamma({pace:.3f}, 0.1)" for pace in paces]

    def accuracies(method, attacks):
        trace = simulate(
            Cluster(30, laws, policy=method.timing.policy or asynchronous()), 4500, seed=2
        )
        runs = [
            replay(trace, attacked(method, attack), digits(), seed=2, progress=False)
            for attack in attacks
        ]
        return [accuracy(run) for run in runs]

    clean, negative = accuracies(methods.downpour(0.02), ("none", "negative"))
    assert clean > 0.94 and negative < 0.3
    clean, negative, disturbed = accuracies(
        methods.basgd(0.4, count=10), ("none", "negative", "disturbed")
    )
    assert clean > 0.94 and min(negative, disturbed) > clean - 0.04


@pytest.mark.full
def test_kardam_drops_what_changes_fast_and_takes_what_never_changes():
    """At a low rate, at which the few bad updates that pass, most of them the first, do not
    matter.
    """
    method = methods.kardam(0.1, f=BYZANTINE)
    run = run_of(method, "disturbed")
    dropped = run.commits["update_norm"] == 0
    bad = run.commits["worker"] < BYZANTINE
    assert accuracy(run) > 0.94 and dropped[bad].mean() > 0.95 and dropped[~bad].mean() < 0.05
    run = run_of(method, "constant")
    dropped = run.commits["update_norm"] == 0
    assert accuracy(run) < 0.5 and dropped[run.commits["worker"] < BYZANTINE].mean() < 0.05


@pytest.mark.full
def test_zeno_pp_drops_what_points_uphill():
    """With a trusted worker that is five times as fast as the others."""
    method = methods.zeno_pp(0.02, rho=0.004)
    clean, run = (run_of(method, attack, last="gamma(0.2, 0.4)") for attack in ("none", "negative"))
    assert accuracy(run) > accuracy(clean) - 0.03 and accuracy(clean) > 0.94
    still, worker = run.commits["update_norm"] == 0, run.commits["worker"]
    assert still[worker == WORKERS - 1].all()
    honest = (worker >= BYZANTINE) & (worker < WORKERS - 1)
    assert still[worker < BYZANTINE].mean() > 0.8 > 0.65 > still[honest].mean()


def test_basgd_with_one_bucket_and_the_mean_is_asynchronous_sgd():
    trace, problem = (
        simulate(Cluster(4, "exponential(1)", policy="buckets(1)"), 200),
        problems.quadratic([1.0, 0.1]),
    )
    runs = [
        replay(trace, one, problem, progress=False)
        for one in (methods.basgd(0.1, 1, "mean()"), methods.downpour(0.1))
    ]
    np.testing.assert_allclose(*(run.params for run in runs), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(("difference", "applied"), [(0.0, True), (4.0, True), (1e6, False)])
def test_kardam_takes_updates_that_differ_by_round_off_as_equal(dtype, difference, applied):
    """Two updates at one point, some units of round-off apart."""
    with jax.enable_x64(dtype == "float64"):
        central = jnp.asarray([1.0, -2.0, 0.5], dtype)
        method = methods.kardam(0.1, f=1)
        memory = method.init_memory(central)._replace(update=-0.1 * central)
        update = memory.update * (1 + difference * float(jnp.finfo(dtype).eps))
        zero = jnp.int32(0)
        visit = Visit(
            staleness=zero,
            worker=zero,
            worker_step=zero + 1,
            commit=zero,
            time=zero,
            local_steps=zero + 1,
        )

        class Coefficients:
            def of_all(self, name):
                return jnp.asarray([-1.0, 1.0, 1.0, 1.0], dtype)

        after = method.apply(
            method.init_server(central), central, update, memory, visit, Coefficients()
        )
    np.testing.assert_allclose(after.central, central + update if applied else central, rtol=1e-6)
    assert float(after.memory.lipschitz) == (0 if applied else float(jnp.finfo(dtype).max))
