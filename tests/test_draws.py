"""Methods that draw: each visit has a key, of the run's seed, of its worker and step, and of
nothing else.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from asyncsim import (
    Cluster,
    methods,
    prescribed,
    problems,
    recorders,
    replay,
    simulate,
)
from asyncsim.methods import Method, gradient_steps
from asyncsim.methods.compression import quantized
from asyncsim.replays.plan import method_key, visit_key


def telling(**options):
    """DOWNPOUR that shows what it draws."""

    def message(worker, update, start, central, visit):
        return update, worker, {"drawn": jax.random.normal(visit.key, update.shape, update.dtype)}

    return Method(gradient_steps(0.05), "telling", message=message, needs_key=True, **options)


def drawn_by(workers, seed, **options):
    """What is drawn at each visit, its median, by worker and step."""
    trace = simulate(
        Cluster(workers=workers, compute="exponential(mean=1)"), 100 * workers, seed=seed
    )
    run = replay(
        trace,
        telling(**options),
        problems.quadratic(np.ones(5)),
        seed=seed,
        record=[recorders.diagnostics(1)],
        progress=False,
    )
    table = run.diagnostics.query("quantity == 'drawn' and quantile == 0.5 and tensor == ''")
    # A quadratic's only tensor has no name, and so the row of all has its twin.
    return table.groupby(["worker", "worker_step"])["value"].first()


def test_draws_hang_on_the_seed_the_worker_and_its_step_alone():
    few, more, other = drawn_by(2, 0), drawn_by(5, 0), drawn_by(2, 1)
    assert len(few) > 10 and few.is_unique
    both = few.index.intersection(more.index)
    assert len(both) > 5
    np.testing.assert_array_equal(few[both], more[both])
    assert not np.isin(other, few).any()
    # All workers' numbers differ, also those of the same step.
    assert more.is_unique


@pytest.mark.full
def test_each_local_step_draws_its_own():
    def update(gradients, state, params=None, *, visit, **_):
        return jax.tree.map(
            lambda leaf: jax.random.normal(visit.key, leaf.shape, leaf.dtype), gradients
        ), state

    steps = optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)
    walk = Method(steps, "walk", needs_key=True)
    for window in (1, 4):
        trace = prescribed(0, 50, 5, window)
        end = replay(
            trace, walk, problems.quadratic(np.full(400, 1e-6), start=0.0), progress=False
        ).params
        assert np.std(np.asarray(end)) == pytest.approx(np.sqrt(50 * window), rel=0.15)


@pytest.mark.parametrize(
    ("levels", "bucket", "size"),
    [
        (7, 64, 64),
        *(
            pytest.param(*case, marks=pytest.mark.full)
            for case in ((1, None, 300), (7, 100, 100), (3, 999, 300))
        ),
    ],
)
def test_quantized_messages_are_the_update_in_the_mean_and_within_their_bound(levels, bucket, size):
    vector = jax.random.normal(jax.random.key(1), (300,))
    places = (index.ravel() for index in np.indices((40, 50), np.int32))
    keys = jax.vmap(visit_key, (None, 0, 0))(method_key(0), *places)
    drawn = np.asarray(jax.vmap(lambda key: quantized(key, vector, levels, bucket))(keys))
    parts = np.array_split(np.asarray(vector), range(size, 300, size))
    norms = np.concatenate([np.full(len(part), np.linalg.norm(part)) for part in parts])
    on_levels = drawn * levels / norms
    np.testing.assert_allclose(on_levels, np.round(on_levels), atol=1e-4)
    # Of independent draws the mean would be this far away on average; it is not if those of visits
    # hang together.
    chance = levels * np.abs(vector) / norms % 1
    spread = norms / levels * np.sqrt(chance * (1 - chance) / len(drawn))
    assert 0.8 < np.sqrt(np.mean(((drawn.mean(0) - vector) / spread) ** 2)) < 1.2
    bound = 1 + min(size / levels**2, np.sqrt(size) / levels)
    assert 1 < (drawn**2).sum(1).mean() / (vector**2).sum() <= bound


def test_a_quantized_zero_is_zero_and_messages_have_their_bits():
    assert not np.asarray(quantized(method_key(0), jnp.zeros(10), 3, 4)).any()
    assert methods.qsgd(bucket=None).timing.message_size == 4 / 32
    assert methods.qsgd(levels=1, bucket=64).timing.message_size == 2.5 / 32
