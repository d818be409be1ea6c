"""Every form of computing: the same numbers as the loop over events."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import (
    ACCELERATED,
    EVERY,
    FORCED,
    make_method,
    make_problem,
    make_trace,
)
from event_loop import forced_deviation

import asyncsim.replays.pieces as pieces
import asyncsim.replays.rows as rows
from asyncsim import (
    InputError,
    recorders,
)
from asyncsim.replays import programs, tuning
from asyncsim.replays.local import flatten
from asyncsim.replays.replay import Replay

STEPS = 300


@pytest.fixture(autouse=True)
def as_an_accelerator(monkeypatch):
    """Unroll batches as an accelerator's."""
    monkeypatch.setattr(tuning, "_CPU", ACCELERATED)


def computed(trace, method, problem, form, **options):
    stops = np.arange(EVERY, len(trace) + 1, EVERY)
    options = {"record": [recorders.energy()], "stops": stops} | options
    return Replay(trace, method, problem, precision="float64", form=form, **options)


@pytest.fixture
def anew():
    """Share no program with other tests, nor keep any."""
    programs._build.cache_clear()
    yield
    programs._build.cache_clear()


@pytest.mark.parametrize("method", ["gem", pytest.param("aeasgd", marks=pytest.mark.full)])
def test_rows_are_scattered_in_any_order(method, monkeypatch, anew):
    """Which an accelerator takes: no two may go to the same place, though one piece can use a slot
    again.
    """
    in_order = pieces.put_rows

    def reversed_put(tree, written, index, valid, single):
        turned = jax.tree.map(lambda leaf: leaf[::-1], written)
        return in_order(tree, turned, index[::-1], valid[::-1], single)

    for module in (pieces, rows):
        monkeypatch.setattr(module, "put_rows", reversed_put)
    monkeypatch.setattr(tuning, "_CPU", ACCELERATED._replace(unrolled=3))
    trace = make_trace("read_then_write, two visits", commits=STEPS)
    with jax.enable_x64(True):
        found = forced_deviation(
            computed(trace, make_method(method), make_problem("quadratic"), "batch"), EVERY
        )
    assert max(found.values()) < FORCED, found


def test_an_interrupted_replay_says_that_it_cannot_go_on(monkeypatch):
    with jax.enable_x64(True):
        running = computed(
            make_trace(commits=EVERY), make_method("gem"), make_problem("quadratic"), "single"
        )

        def interrupt(*arguments):
            raise KeyboardInterrupt

        monkeypatch.setattr(running, "_take", interrupt)
        with pytest.raises(KeyboardInterrupt):
            running.advance(EVERY)
        for use in (lambda: running.advance(EVERY), lambda: running.state, running.evaluate):
            with pytest.raises(
                InputError, match="interrupted amid its commits, and cannot go on; make a new one"
            ):
                use()


# Trees as vectors


def test_the_form_by_parameters_and_device(monkeypatch):
    problem, devices = make_problem("digits"), [SimpleNamespace(platform=p) for p in ("cpu", "gpu")]
    assert tuning.form_of(problem, devices[0]) == "batch"  # of 1,210 parameters
    monkeypatch.setattr(tuning, "_FEW_PARAMETERS", 100)
    assert [tuning.form_of(problem, device) for device in devices] == ["single", "batch"]


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="what XLA makes of it on a CPU")
def test_the_memory_that_parts_are_written_into_is_not_made_of_the_first_of_them():
    tree = {"bias": jnp.ones(1000), "weight": jnp.ones((999, 1001))}
    written = jax.jit(flatten(tree, in_parts=True).ravel).lower(tree).compile().as_text()
    assert " dynamic-update-slice(" in written
    assert " pad(" not in written and " copy(" not in written
