"""Commits that are dispatched a few at a time: the same numbers as the loop over events, and no copies."""

import threading
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import (
    EVERY,
    FORCED,
    make_method,
    make_problem,
    make_trace,
)
from event_loop import forced_deviation

import asyncsim.replays.dispatched
import asyncsim.replays.programs
import asyncsim.replays.running
import asyncsim.replays.side_by_side
import asyncsim.replays.tuning
from asyncsim import barrier, methods, problems, recorders, replay
from asyncsim.base.errors import InputError
from asyncsim.methods import Applied
from asyncsim.replays.dispatched import Apart, Dispatched
from asyncsim.replays.groups import Chunk
from asyncsim.replays.replay import Replay
from asyncsim.replays.side_by_side import Passing, SideBySide, keep, trim

STEPS = 300


pytestmark = pytest.mark.usefixtures("float64")


@pytest.fixture(autouse=True)
def at_once(request, monkeypatch):
    """Dispatch the commits of small problems, too; two gradients at a time, unless a test says how many."""
    count = getattr(request, "param", 2)
    monkeypatch.setattr(asyncsim.replays.tuning, "_LONG_VECTOR", 0)
    monkeypatch.setattr(asyncsim.replays.tuning, "_FEW_PARAMETERS", 0)
    monkeypatch.setattr(asyncsim.replays.programs, "gradients_at_once", lambda: count)
    return count


def dispatched(trace, method, problem, looks_every=0):
    stops = np.arange(EVERY, len(trace) + 1, EVERY)
    record = [recorders.energy(), *([recorders.diagnostics(looks_every)] if looks_every else [])]
    running = Replay(trace, method, problem, precision="float64", stops=stops, record=record)
    assert isinstance(running.running._held, Apart)
    return running


@pytest.fixture
def alone(anew, monkeypatch):
    """Let each gradient have a program of its own, as where vectors are very long."""
    monkeypatch.setattr(asyncsim.replays.tuning, "VERY_LONG_VECTOR", 0)


def shared_reads(workers=6):
    """Workers that all go on from the version that a barrier made."""
    return make_trace(workers=workers, commits=STEPS, policy=barrier())


@pytest.fixture
def order(monkeypatch):
    """What is dispatched, in its order: the lengths of groups of gradients, and 0 for a commit."""
    done: list[int] = []
    dispatch, finish = Chunk.dispatch, Dispatched._finish

    def dispatched(chunk, *given):
        done.append(chunk.planned[0].end - chunk.planned[0].begin)
        dispatch(chunk, *given)

    def finished(running, now, chunk, commits, *given):
        done.extend([0] * len(commits))
        return finish(running, now, chunk, commits, *given)

    monkeypatch.setattr(Chunk, "dispatch", dispatched)
    monkeypatch.setattr(Dispatched, "_finish", finished)
    return done


def test_gradients_are_begun_ahead_also_of_workers_that_share_a_read(order):
    dispatched(shared_reads(workers=6), methods.easgd(), make_problem("quadratic")).advance(EVERY)
    assert order[:6] == [3, 3, 0, 0, 0, 0]  # the next need what the barrier makes of all six
    assert sum(order) == EVERY == order.count(0)


def test_gradients_are_begun_ahead_of_the_next_chunk(order):
    running = dispatched(make_trace(workers=7, commits=EVERY), make_method("gem"), make_problem("quadratic"), 2)
    ends = np.cumsum([len(starts) - 1 for starts, _ in running.running._plan.chunks(0, EVERY)])
    running.advance(EVERY)
    commits = np.flatnonzero(np.array(order) == 0)
    assert len(ends) > 2
    assert all(sum(order[: commits[end - 1]]) > end for end in ends[:-1])
    assert sum(order) == EVERY and max(order) == 3


@pytest.mark.parametrize(
    "rule", ["gem", *(pytest.param(rule, marks=pytest.mark.full) for rule in ("dana_zero", "aeasgd"))]
)
def test_gradients_that_are_each_alone(rule, alone, order):
    found = forced_deviation(dispatched(make_trace(commits=STEPS), make_method(rule), make_problem("quadratic")), EVERY)
    assert max(found.values()) < FORCED, found
    assert max(order) == 1


def test_gradients_with_convolutions_of_xla_are_alone(order):
    def loss(params, batch, key):
        return jnp.sum(jax.lax.conv(batch["x"], params["w"], (1, 1), "VALID") ** 2)

    train = {"x": np.ones((8, 1, 5, 5), np.float32)}  # the run's precision is another
    problem = problems.custom(lambda key: {"w": jnp.ones((2, 1, 3, 3))}, loss, train=train, batch_size=2, name="own")
    dispatched(make_trace(commits=EVERY), make_method("downpour"), problem).advance(EVERY)
    assert max(order) == 1


def test_what_is_read_is_the_central_variable_and_no_copy():
    running = dispatched(make_trace(commits=EVERY), make_method("gem"), make_problem("quadratic"))
    running.advance(EVERY)
    held = running.running._held
    last = int(running.trace.frame["worker"].iloc[-1])
    assert held.read[last] is held.central
    # What a worker pulled before its commit is what the one before it left and read.
    before = int(running.trace.frame["worker"].iloc[-2])
    assert held.workers[last].method.pulled is held.read[before]


def test_what_nobody_holds_any_longer_is_gone_before_the_chunk_ends(monkeypatch):
    running = dispatched(make_trace(workers=7, commits=2 * EVERY), make_method("gem"), make_problem("quadratic"))
    running.advance(EVERY)
    read = [weakref.ref(version) for version in running.running._held.read]
    alive = []
    finish = Dispatched._finish

    def finish_and_look(*arguments):
        finished = finish(*arguments)
        alive.append(sum(version() is not None for version in read))
        return finished

    monkeypatch.setattr(Dispatched, "_finish", finish_and_look)
    running.advance(2 * EVERY)
    assert alive[-1] <= 2  # the central variable of the state given, and what the first commit started from


@pytest.mark.parametrize("looks_every", [0, 1])
def test_very_long_vectors_have_their_memory_given_back(alone, looks_every, monkeypatch):
    """Also where chunks are shorter than what lies between two trims, here ten commits."""
    trace, method, problem = make_trace(workers=7, commits=EVERY), make_method("gem"), make_problem("quadratic")
    trims = []
    monkeypatch.setattr(asyncsim.replays.tuning, "_ELEMENTS_TO_TRIM", 10 * problem.parameter_count)
    monkeypatch.setattr(asyncsim.replays.dispatched, "trim", lambda: trims.append(1))
    dispatched(trace, method, problem, looks_every).advance(EVERY)
    assert len(trims) == EVERY // 10


def test_very_long_vectors_of_few_commits_wait_at_a_time(alone, monkeypatch):
    trace, method, problem = make_trace(commits=EVERY), make_method("gem"), make_problem("quadratic")
    running, made = dispatched(trace, method, problem), []
    limit = Dispatched._limit_memory

    def limit_and_look(self, recorded):
        limit(self, recorded)
        made.extend(of_commit.is_ready() for of_commit in recorded[:-3])

    monkeypatch.setattr(Dispatched, "_limit_memory", limit_and_look)
    running.advance(EVERY)
    assert made and all(made)


def test_free_memory_of_long_vectors_is_kept(anew, monkeypatch):
    asked = []
    monkeypatch.setattr(asyncsim.replays.dispatched, "keep", lambda: asked.append(1))
    dispatched(make_trace(commits=EVERY), make_method("gem"), make_problem("quadratic"))
    assert asked == [1]


def test_free_memory_of_very_long_vectors_is_not(alone, monkeypatch):
    asked = []
    monkeypatch.setattr(asyncsim.replays.dispatched, "keep", lambda: asked.append(1))
    dispatched(make_trace(commits=EVERY), make_method("gem"), make_problem("quadratic"))
    assert not asked


def test_glibc_takes_what_it_is_told():
    set_option = asyncsim.replays.side_by_side._of_glibc("mallopt")
    if set_option is None:
        pytest.skip("another C library")
    assert [set_option(*option) for option in asyncsim.replays.side_by_side._KEEPING] == [1, 1]


def test_memory_can_be_kept_and_trimmed_where_there_is_no_glibc(monkeypatch):
    monkeypatch.setattr(asyncsim.replays.side_by_side, "_of_glibc", lambda function: None)
    keep.__wrapped__()
    trim()


@pytest.mark.parametrize("where", [(Dispatched, "_finish"), (asyncsim.replays.running.Running, "_take")])
def test_an_interrupted_replay_says_that_it_cannot_go_on(where, monkeypatch):
    running = dispatched(make_trace(commits=EVERY), make_method("gem"), make_problem("quadratic"))

    def interrupt(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(*where, interrupt)
    with pytest.raises(KeyboardInterrupt):
        running.advance(EVERY)
    for use in (lambda: running.advance(EVERY), lambda: running.state, running.evaluate):
        with pytest.raises(InputError, match="interrupted amid its commits, and cannot go on; make a new one"):
            use()


def test_a_state_can_be_gone_on_from():
    trace, method, problem = make_trace(commits=2 * EVERY), make_method("aeasgd"), make_problem("quadratic")
    one, other = dispatched(trace, method, problem), dispatched(trace, method, problem)
    one.advance(EVERY)
    other.advance(EVERY)
    state = one.state
    moved = state._replace(central=state.central + 1)
    one.go_on_from(moved)
    other.go_on_from(moved)
    one.advance(2 * EVERY)
    other.advance(2 * EVERY)
    assert np.array_equal(one.state.central, other.state.central)
    assert np.array_equal(moved.central, state.central + 1)  # what was given is still there


@pytest.mark.parametrize("at_once", [1, 2], indirect=True)
def test_a_memory_that_is_the_servers_too():
    """A call of one commit returns it twice, one of several reuses a worker's memory."""

    def apply(server, central, message, memory, visit):
        momentum = 0.5 * server + message
        return Applied(central + momentum + 0.01 * (momentum - memory), momentum, momentum)

    zeros = {"init_server": jnp.zeros_like, "init_memory": jnp.zeros_like}
    method = methods.Method("own", {}, methods.gradient_steps(0.01), apply=apply, **zeros)
    found = forced_deviation(dispatched(make_trace(commits=STEPS), method, make_problem("quadratic")), EVERY)
    assert max(found.values()) < FORCED, found


@pytest.mark.full
def test_nothing_depends_on_how_many_commits_a_call_makes(anew, monkeypatch):
    """That hangs on threads, and on what is recorded."""
    trace, problem = make_trace(workers=20, commits=STEPS), problems.digits(hidden=(67,))  # a padded vector
    lengths, found = set(), []
    finish = Dispatched._finish

    def finished(running, now, chunk, commits, *given):
        lengths.add(len(commits))
        return finish(running, now, chunk, commits, *given)

    monkeypatch.setattr(Dispatched, "_finish", finished)
    for threads, every in ((1, 0), (2, 0), (2, 1), (3, 3)):
        monkeypatch.setattr(asyncsim.replays.programs, "gradients_at_once", lambda threads=threads: threads)
        record = [recorders.energy(), *([recorders.diagnostics(every)] if every else [])]
        run = replay(trace, methods.gem(), problem, record=record, progress=False)
        found.append(run.commits[["loss", "update_norm", "central_energy"]].to_numpy())
    assert len(lengths) > 2
    assert all(np.array_equal(found[0], other) for other in found[1:])


def test_groups_use_the_memory_of_those_before(monkeypatch):
    memory, anew = Dispatched._memory, []

    def counted(running, now, source):
        anew.append(not source.spare)
        return memory(running, now, source)

    monkeypatch.setattr(Dispatched, "_memory", counted)
    running = dispatched(make_trace(workers=7, commits=EVERY), make_method("gem"), make_problem("quadratic"), 2)
    running.advance(EVERY)
    assert len(anew) > 20 and sum(anew) < 10 and not any(anew[10:])


def test_groups_of_longer_vectors_are_shorter():
    lengths = [
        asyncsim.replays.tuning.gradients_a_group(count, False) for count in (16, 163_790, 500_000, 999_999, 1_000_000)
    ]
    assert lengths == [8, 8, 4, 2, 1]


def test_numbers_of_workers_share_what_is_compiled():
    method, problem = make_method("downpour"), make_problem("digits")
    for workers in (3, 5, 7):
        running = dispatched(make_trace(workers=workers, commits=2 * EVERY), method, problem)
        running.advance(EVERY)
        compiled = running.running._program.engine
        assert len(compiled._gradients._calls) == 1
        assert len(compiled._commit._compiled) <= 4  # for each number of commits in a call


def test_several_devices_are_left_to_the_kernel():
    trace, method, problem = make_trace(commits=EVERY), make_method("gem"), make_problem("quadratic")
    assert not isinstance(Replay(trace, method, problem, devices=jax.devices()[:2]).running._held, Apart)


def test_calls_are_computed_side_by_side():
    """Each waits for the other, which would not begin if they came one after the other."""
    meet = threading.Barrier(2)

    def function(x):
        return jax.pure_callback(lambda x: (meet.wait(20), x)[1], x, x)

    x = jnp.zeros(3)
    start = SideBySide(function, 2).start_for(x)
    results = [start(turn, x) for turn in range(2)]
    assert all(result().tolist() == [0, 0, 0] for result in results)


@pytest.mark.parametrize("at_once", [1, 2], indirect=True)
def test_threads_compute_in_the_precision_that_was_asked_for(at_once):
    def function(x):
        seen = jax.pure_callback(lambda: np.array(jax.config.jax_enable_x64), jax.ShapeDtypeStruct((), bool))
        return x + jnp.arange(3.0).astype(jnp.float32), jnp.arange(3.0).dtype == jnp.float64, seen

    calls = SideBySide(function, at_once)
    x = jnp.zeros(3, jnp.float32)
    for x64 in (True, False, True):
        with jax.enable_x64(x64):
            _, compiled, seen = calls.start_for(x)(1, x)()
        assert bool(compiled) is bool(seen) is x64
    assert len(calls._calls) == 2


@pytest.mark.parametrize("at_once", [1, 2], indirect=True)
def test_a_gradient_that_raises_ends_the_replay():
    def refuse(x):
        raise ValueError("no more examples")

    def loss(params, batch, key):
        return jax.pure_callback(refuse, jax.ShapeDtypeStruct((), params["x"].dtype), 0.0) + jnp.sum(params["x"])

    problem = problems.custom(lambda key: {"x": jnp.ones(4)}, loss, name="refusing")
    running = dispatched(make_trace(commits=EVERY), make_method("gem"), problem)
    with pytest.raises(Exception, match="no more examples"):
        running.advance(EVERY)


@pytest.mark.parametrize(("rule", "apart"), [("lsgd", False), ("ringleader", True)])
def test_methods_that_see_all_memories_are_left_to_the_kernel(rule, apart):
    running = Replay(make_trace(commits=EVERY), make_method(rule), make_problem("quadratic"), precision="float64")
    assert isinstance(running.running._held, Apart) is apart


def test_passing_on_and_reusing():
    def function(kept, replaced, read):
        return kept + read, {"same": kept, "new": replaced["new"] * 2}, kept + read

    call = Passing(function, replaced={1: 1})
    kept, read = jnp.arange(3.0), jnp.ones(3)
    state = {"same": jnp.zeros(3), "new": jnp.ones(3)}
    total, after, twice = call(kept, state, read)
    assert total.tolist() == [1, 2, 3] and after["new"].tolist() == [2, 2, 2]
    assert after["same"] is kept
    assert state["new"].is_deleted()
    assert not any(array.is_deleted() for array in (kept, read, state["same"]))  # they may have other owners
    assert twice.tolist() == total.tolist()


def test_what_takes_a_place_takes_its_memory():
    call = Passing(lambda first, second: (first + second, second * 2, first * 3), replaced={0: 2, 1: 1})
    first, second = jnp.arange(64.0), jnp.ones(64)
    places = [array.unsafe_buffer_pointer() for array in (first, second)]
    total, double, triple = call(first, second)
    assert [array.unsafe_buffer_pointer() for array in (triple, double)] == places
    assert total.tolist() == list(range(1, 65))
    assert double.tolist() == [2] * 64 and triple.tolist() == list(range(0, 192, 3))
