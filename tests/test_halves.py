"""Replays by two threads, each with half of every vector: the same numbers as the loop over events and the kernel."""

from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cases import (
    EVERY,
    FORCED,
    PROTOCOLS,
    counting,
    decaying,
    make_method,
    make_problem,
    make_trace,
    mean_of_four,
    pair_of_messages,
    stateful_problem,
)
from event_loop import forced_deviation

import asyncsim.replays.halves
import asyncsim.replays.programs
from asyncsim import Cluster, Constant, Exponential, Gamma, barrier, methods, problems, replay, simulate
from asyncsim.errors import InputError
from asyncsim.methods import Applied, Method, gradient_steps
from asyncsim.replays import tuning
from asyncsim.replays.halves import THREADS, Halved, halves_of
from asyncsim.replays.replay import Replay
from asyncsim.replays.replay_state import ReplayState
from asyncsim.replays.waves import mean_wave
from asyncsim.replays.ways import pieces_at_once
from asyncsim.study.cell import meet
from asyncsim.study.executor import Local
from asyncsim.threads import one_core_each

STEPS = 300


@pytest.fixture(autouse=True)
def halved(monkeypatch):
    """Replay small problems in halves, too, and whatever the waves are, as if there were two cores."""
    monkeypatch.setattr(tuning, "_FEW_PARAMETERS", 1)
    monkeypatch.setattr(tuning, "_LONG_WAVE", 0)
    monkeypatch.setattr(tuning, "cores", lambda: 2)


@pytest.fixture
def room(monkeypatch):
    """Let groups be short, sharing no program with other tests."""
    asyncsim.replays.programs._build.cache_clear()
    monkeypatch.setattr(asyncsim.replays.halves, "GRADIENTS_A_HALF", 2)
    yield
    asyncsim.replays.programs._build.cache_clear()


def in_halves(trace, method, problem, diagnose_every=0):
    stops = np.arange(EVERY, len(trace) + 1, EVERY)
    running = Replay(trace, method, problem, precision="float64", stops=stops, diagnose_every=diagnose_every)
    assert isinstance(running.running._held, Halved)
    return running


def deviation_of(trace, method, problem):
    with jax.enable_x64(True):
        return max(forced_deviation(in_halves(trace, method, problem), EVERY).values())


def both_ways(monkeypatch, trace, method, problem, **options):
    """The run in halves, and by the kernel."""
    assert held_by(trace, method, problem) is Halved
    runs = [replay(trace, method, problem, progress=False, **options)]
    monkeypatch.setattr(tuning, "_LONG_WAVE", np.inf)
    return [*runs, replay(trace, method, problem, progress=False, **options)]


def louder(rate=0.05):
    """A method that sees losses."""

    def apply(server, central, message, memory, visit):
        return Applied(central + message / (1 + visit.loss), server, memory)

    options = {"optimizer": gradient_steps(rate), "apply": apply, "sees_loss": True, "elementwise": True}
    return Method("louder", {"rate": rate}, message=shown, **options)


def masked(parameters):
    """A method that holds a vector as long as the problem's."""
    mask = np.arange(parameters) % 7 > 2

    def apply(server, central, message, memory, visit):
        return Applied(jnp.where(mask, central + message, central), server, memory)

    return Method("masked", {}, gradient_steps(0.05), apply=apply, elementwise=True)


def shown(worker, update, start, central, visit):
    return update, worker, {"share": update * visit.loss}


RULES = {
    "downpour": methods.downpour,
    "gem": methods.gem,
    "adaptive_staleness": methods.adaptive_staleness,
    "dc_asgd": methods.dc_asgd,
    "softsync": lambda: methods.softsync(policy=None),
    "schedule": lambda: methods.downpour(learning_rate=decaying),
    # The server keeps a sum, which is a vector, and a count, which is none.
    "mean of four": lambda: mean_of_four()._replace(elementwise=True),
    "louder": louder,
}


def combinations():
    default = {("gem", "read_then_write, two visits")}
    cases = {("gem", protocol) for protocol in PROTOCOLS} | {("downpour", protocol) for protocol in PROTOCOLS}
    for case in sorted(cases | {(rule, "exchange") for rule in RULES}):
        yield pytest.param(*case, marks=[] if case in default else pytest.mark.full, id="-".join(case))


@pytest.mark.parametrize(("rule", "protocol"), list(combinations()))
def test_halves_are_the_loop_teacher_forced(rule, protocol, lenient):
    assert deviation_of(make_trace(protocol, commits=STEPS), RULES[rule](), make_problem("quadratic")) < FORCED


def test_what_is_not_elementwise_is_refused(lenient):
    def apply(server, central, message, memory, visit):
        return Applied(central + message / jnp.linalg.norm(message), server, memory)

    method = Method("unit", {}, gradient_steps(0.05), apply=apply, elementwise=True)
    with pytest.raises(InputError, match=r"unit\.elementwise = True: apply computes something else from two halves"):
        replay(make_trace(commits=STEPS), method, make_problem("quadratic"))
    with one_core_each():
        assert replay(make_trace(commits=STEPS), method, make_problem("quadratic")).status == "finished"


@pytest.mark.full
def test_numbers_of_as_many_workers_as_parameters():
    assert deviation_of(make_trace(workers=16, commits=STEPS), counting(), make_problem("quadratic")) < FORCED


@pytest.mark.full
@pytest.mark.parametrize("problem", ["digits", "logistic", "characters"])
def test_problems_of_several_tensors(problem):
    assert deviation_of(make_trace(commits=STEPS), make_method("gem"), make_problem(problem)) < FORCED


@pytest.mark.full
@pytest.mark.parametrize("window", [3, [1, 2, 4, 1, 2, 4]])
def test_windows(window):
    cluster = Cluster(6, Gamma(1.0, cv=0.5), Exponential(0.05), window=window)
    assert deviation_of(simulate(cluster, STEPS, 0), make_method("gem"), make_problem("quadratic")) < FORCED


@pytest.mark.full
def test_groups_that_outgrow_the_room(room):
    assert deviation_of(make_trace(workers=9, commits=STEPS), make_method("gem"), make_problem("digits")) < FORCED


@pytest.mark.full
def test_shared_reads(room):
    trace = make_trace(workers=6, commits=STEPS, policy=barrier())
    assert deviation_of(trace, make_method("downpour"), make_problem("quadratic")) < FORCED


@pytest.mark.parametrize("rule", ["gem", pytest.param("adaptive_staleness", marks=pytest.mark.full)])
@pytest.mark.parametrize("hidden", [(128, 64), pytest.param((256,), marks=pytest.mark.full)])
@pytest.mark.full
def test_the_kernel_computes_the_same_bit_for_bit(monkeypatch, rule, hidden):
    """All but norms, which are sums of two."""
    cluster = Cluster(40, Gamma(1.0, cv=0.2), Constant(0.005))
    problem = problems.digits(hidden=hidden)
    halves, whole = both_ways(monkeypatch, simulate(cluster, 1_000, 0), RULES[rule](), problem, diagnose_energy=True)
    assert jax.tree.all(jax.tree.map(np.array_equal, halves.params, whole.params))
    assert halves.commits["loss"].equals(whole.commits["loss"])
    assert halves.evaluations.equals(whole.evaluations)
    assert halves.diagnostics.equals(whole.diagnostics) and len(whole.diagnostics)
    for norm in ("update_norm", "central_energy", "proxy_energy"):
        np.testing.assert_allclose(halves.commits[norm], whole.commits[norm], rtol=3e-6)  # 17,226 sums in float32


@pytest.mark.full
@pytest.mark.parametrize("name", methods.METHODS)
def test_every_method_that_takes_halves_computes_the_same(monkeypatch, name, lenient):
    method, problem = methods.METHODS[name](), make_problem("quadratic")
    trace = simulate(meet(Cluster(12, Gamma(1.0, cv=0.2)), method.timing), STEPS, 0)
    if held_by(trace, method, problem) is not Halved:
        pytest.skip("norms, replicas or workers' optimizers are of whole vectors")
    halves, whole = both_ways(monkeypatch, trace, method, problem, precision="float64")
    for one, other in zip(jax.tree.leaves(halves.params), jax.tree.leaves(whole.params), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-12)


@pytest.mark.full
def test_two_at_a_time_and_another_device_make_no_difference(lenient):
    given_ = make_trace(commits=STEPS), make_method("downpour"), make_problem("digits")
    alone = replay(*given_)
    with ThreadPoolExecutor(2) as threads:
        runs = [one.result() for one in [threads.submit(replay, *given_) for _ in range(2)]]
    elsewhere = jax.devices()[1:2]
    assert held_by(*given_, devices=elsewhere) is Halved
    for run in [*runs, replay(*given_, devices=elsewhere)]:
        assert run.commits.equals(alone.commits)
        assert jax.tree.all(jax.tree.map(np.array_equal, run.params, alone.params))


@pytest.mark.full
def test_diagnostics_that_see_losses(monkeypatch):
    trace, problem = make_trace(commits=STEPS), make_problem("quadratic")
    halves, whole = both_ways(monkeypatch, trace, louder(), problem, precision="float64", diagnose_every=3)
    columns = ["commit", "quantity", "tensor", "quantile"]
    assert halves.diagnostics[columns].equals(whole.diagnostics[columns]) and len(whole.diagnostics)
    np.testing.assert_allclose(halves.diagnostics["value"], whole.diagnostics["value"], rtol=1e-9)


def test_a_second_replay_gives_the_same_bytes(tmp_path):
    assert held_by(make_trace(commits=STEPS), make_method("gem"), make_problem("digits")) is Halved
    for name in ("one", "two"):
        replay(make_trace(commits=STEPS), make_method("gem"), make_problem("digits")).save(tmp_path / name)
    first, second = ({path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in ("one", "two"))
    assert first == second and first


def test_a_run_ends_with_the_commit_that_diverges(monkeypatch):
    problem = problems.quadratic([1.0, 10.0, 3.0, 2.0], noise=0.1)
    halves, whole = both_ways(monkeypatch, make_trace(commits=STEPS), methods.downpour(learning_rate=5.0), problem)
    assert halves.diverged_at == whole.diverged_at is not None
    assert len(halves.commits) == halves.diverged_at + 1


@pytest.mark.parametrize("rule", ["gem", pytest.param("mean of four", marks=pytest.mark.full)])
def test_going_on_from_another_state(rule, lenient):
    with jax.enable_x64(True):
        trace, method, problem = make_trace(commits=2 * EVERY), RULES[rule](), make_problem("quadratic")
        one, other = in_halves(trace, method, problem), in_halves(trace, method, problem)
        one.advance(EVERY)
        other.advance(EVERY)
        state = one.state
        other.go_on_from(state)
        for running in (one, other):
            running.advance(2 * EVERY)
        assert np.array_equal(one.state.central, other.state.central)
        assert state.central.shape == (16,) and not state.central.is_deleted()


@pytest.mark.parametrize(
    ("sizes", "middle"),
    [
        ([128, 8192, 64, 8192, 10, 640], 8384),  # the border of tensors that is nearest to the middle
        ([256, 16384, 10, 2560], 9600),  # none is near: a tensor is cut
        ([5000, 5000], 4992),  # halves of the same length could not be told from other arrays
        ([3000], 1472),
    ],
)
def test_halves_of_vectors(sizes, middle):
    assert halves_of(sizes) == ((0, middle), (middle, sum(sizes)))


# Which replays are computed so


def held_by(trace, method, problem, **options):
    return type(Replay(trace, method, problem, **options).running._held)


def test_what_is_replayed_in_halves(monkeypatch, lenient):
    trace, problem = make_trace(commits=EVERY), make_problem("digits")
    assert held_by(trace, methods.gem(), problem) is Halved
    assert pieces_at_once(trace, methods.gem(), problem) == THREADS
    left = {
        "a replica goes on": (methods.aeasgd(), problem),
        "an optimizer of each worker": (methods.downpour(optimizer=optax.adam(1e-2)), problem),
        "a state of each worker": (methods.downpour(), stateful_problem()),
        "norms of whole vectors": (pair_of_messages(), problem),
        "a vector of its own": (masked(problem.parameter_count), problem),
    }
    for why, given_ in left.items():
        assert held_by(trace, *given_) is not Halved, why
    assert held_by(trace, methods.gem(), problem, devices=jax.devices()[:2]) is not Halved
    monkeypatch.setattr(tuning, "_LONG_WAVE", mean_wave(trace) + 1)
    assert held_by(trace, methods.gem(), problem) is not Halved


def test_one_core_is_not_shared_by_two_threads(monkeypatch):
    given_ = make_trace(commits=EVERY), methods.gem(), make_problem("digits")
    with one_core_each():
        assert held_by(*given_) is not Halved
    assert held_by(*given_) is Halved
    monkeypatch.setattr(tuning, "cores", lambda: 1)
    assert held_by(*given_) is not Halved


@pytest.mark.parametrize("at_once", [1, 2])
def test_runs_of_studies_have_one_core_each(at_once):
    given_ = make_trace(commits=EVERY), methods.gem(), make_problem("digits")
    assert [done.value for done in Local(at_once).map(held_by, [given_, given_])] == [ReplayState] * 2
