"""The replay against the loop over events of `event_loop`: the same numbers, whatever the trace, method and problem."""

import functools
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pandas as pd
import pytest
from event_loop import RECORDED, EventLoop, deviation, forced_deviation

import asyncsim.plan
from asyncsim import Cluster, Exponential, Gamma, InputError, Trace, Uniform, methods, prescribed, problems, simulate
from asyncsim.methods import Applied, Method, Timing, gradient_steps
from asyncsim.methods.method import send_update
from asyncsim.wave_replay import Replay, replay

COMMITS = 2000
EVERY = 50  # commits between two forcings
FORCED = 1e-12  # relative, after EVERY commits in float64
UNFORCED = 1e-10  # relative, after COMMITS commits of a method that does not amplify round-off


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


PROTOCOLS = {
    "exchange": {},
    "read_then_write": {"protocol": "read_then_write"},
    "read_then_write, two visits": {"protocol": "read_then_write", "exclusive": False},
    "write_then_read": {"protocol": "write_then_read"},
    "prescribed": None,
}


@functools.cache
def make_trace(protocol="exchange", window=1, workers=7, commits=COMMITS, seed=0):
    """Visits that queue and travel, so that other commits slip in wherever the protocol lets them."""
    if protocol == "prescribed":
        # Staler than there are workers: jobs of one worker overlap.
        return prescribed(Uniform(0, 3 * workers), commits, workers, window, seed)
    cluster = Cluster(
        workers,
        compute=Gamma(1.0, cv=0.5),
        service=Exponential(0.05),
        latency=Exponential(0.1),
        window=window,
        **PROTOCOLS[protocol],
    )
    return simulate(cluster, commits, seed)


def tiny_mnist():
    """MNIST's network on twenty invented images."""
    rng = np.random.default_rng(0)
    arrays = {}
    for part, examples in (("train", 20), ("t10k", 6)):
        arrays[f"{part}-images-idx3-ubyte"] = rng.integers(0, 256, (examples, 28, 28), np.uint8)
        arrays[f"{part}-labels-idx1-ubyte"] = rng.integers(0, 10, examples, np.uint8)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(importlib.import_module("asyncsim.problems.mnist"), "load_mnist", lambda folder: arrays)
        return problems.mnist(batch_size=4)


PROBLEMS = {
    "quadratic": lambda: problems.quadratic(np.linspace(0.1, 1, 16), noise=0.1),
    "digits": lambda: problems.digits(batch_size=8, hidden=(16,)),
    "mnist": tiny_mnist,
}
METHODS = {
    "downpour": methods.downpour,
    "adaptive_staleness": methods.adaptive_staleness,
    "gem": methods.gem,
    "gem, paper": lambda: methods.gem(variant="paper"),
    "sgd": lambda: methods.sgd(learning_rate=0.01),
}


# One of each, so that what is compiled for them is compiled once.
@functools.cache
def make_problem(name):
    return PROBLEMS[name]()


@functools.cache
def make_method(name):
    return METHODS[name]()


def stopping(trace, method, problem):
    """A replay that can stop wherever the loop takes over."""
    stops = np.arange(EVERY, len(trace) + 1, EVERY)
    return Replay(trace, method, problem, precision="float64", stops=stops, diagnose_every=0)


def unforced_deviation(trace, method, problem):
    """The largest relative deviation of a whole replay from the loop."""
    replayed = Replay(trace, method, problem, precision="float64", diagnose_every=0)
    replayed.advance(len(trace))
    loop = EventLoop(trace, method, problem)
    expected, found = loop.run(0, len(trace)), replayed.result([]).commits
    central = np.asarray(replayed.state.central)[: loop.central.size]
    return max(deviation(central, loop.central), *(deviation(found[name], expected[name]) for name in RECORDED))


# Every trace, method and problem


@pytest.mark.parametrize(
    ("protocol", "window"),
    [
        *((protocol, 1) for protocol in PROTOCOLS),
        *((protocol, 3) for protocol in ("exchange", "write_then_read")),
        *(
            pytest.param(protocol, 3, marks=pytest.mark.full)
            for protocol in ("read_then_write", "read_then_write, two visits", "prescribed")
        ),
    ],
)
def test_downpour_is_the_loop_without_forcing(protocol, window):
    assert (
        unforced_deviation(make_trace(protocol, window), make_method("downpour"), make_problem("quadratic")) < UNFORCED
    )


def combinations():
    """All of them; those that the default run has are not marked."""
    default = {
        *(("quadratic", "gem", protocol) for protocol in ("exchange", "write_then_read", "prescribed")),
        *(("quadratic", "gem, paper", protocol) for protocol in ("read_then_write", "read_then_write, two visits")),
        ("quadratic", "sgd", "exchange"),
        ("digits", "adaptive_staleness", "prescribed"),
        ("digits", "downpour", "write_then_read"),
        ("digits", "gem", "read_then_write, two visits"),
    }
    for problem in PROBLEMS:
        for method in METHODS:
            for protocol in PROTOCOLS:
                case = (problem, method, protocol)
                needed = {"gem, paper": "read_then_write", "sgd": "exchange"}.get(method, "")
                if protocol.startswith(needed):
                    yield pytest.param(*case, marks=[] if case in default else pytest.mark.full, id="-".join(case))


@pytest.mark.parametrize(("problem", "method", "protocol"), list(combinations()))
def test_replay_is_the_loop_teacher_forced(problem, method, protocol):
    trace = make_trace(protocol, workers=1 if method == "sgd" else 7)
    found = forced_deviation(stopping(trace, make_method(method), make_problem(problem)), EVERY)
    assert max(found.values()) < FORCED, found


# Sizes that only affect speed


@pytest.fixture
def sizes(monkeypatch):
    """Sets the sizes of the tuning."""
    usual = asyncsim.plan.tuning
    return lambda **given: monkeypatch.setattr(
        asyncsim.plan, "tuning", lambda *arguments: usual(*arguments)._replace(**given)
    )


@pytest.mark.parametrize("protocol", [pytest.param("exchange", marks=pytest.mark.full), "write_then_read"])
def test_the_size_of_pieces_changes_nothing(sizes, protocol):
    trace, method, problem = make_trace(protocol), make_method("downpour"), make_problem("quadratic")
    ends = []
    for pieces in ((1,), (3,), (1, 2, 4, 8)):
        sizes(piece_sizes=pieces)
        run = replay(trace, method, problem, precision="float64", progress=False)
        ends.append((run.params, run.commits[list(RECORDED)]))
    for params, commits in ends[1:]:
        assert deviation(params, ends[0][0]) < FORCED
        assert all(deviation(commits[name], ends[0][1][name]) < FORCED for name in RECORDED)


# Repeating


@pytest.mark.parametrize("precision", ["float32", "float64"])
def test_a_second_replay_gives_the_same_bytes(precision, tmp_path):
    trace, method, problem = make_trace(commits=700), make_method("gem"), make_problem("digits")
    for name in ("first", "second"):
        run = replay(trace, method, problem, seed=3, precision=precision, progress=False)
        run.save(tmp_path / name)
    assert {leaf.dtype for leaf in jax.tree.leaves(run.params)} == {np.dtype(precision)}
    assert run.config["precision"] == precision and run.commits["loss"].dtype == precision
    files = sorted(path.name for path in (tmp_path / "first").iterdir())
    assert files == ["commits.parquet", "diagnostics.parquet", "evaluations.parquet", "params.npz", "run.json"]
    for name in files:
        assert (tmp_path / "first" / name).read_bytes() == (tmp_path / "second" / name).read_bytes(), name


def test_the_seed_changes_start_batches_and_noise_only_of_the_problem():
    trace, method = make_trace(commits=700), make_method("gem")
    runs = [replay(trace, method, make_problem("digits"), seed=seed, progress=False) for seed in (0, 1)]
    assert runs[0].commits["staleness"].equals(runs[1].commits["staleness"])
    assert not np.any(runs[0].commits["loss"] == runs[1].commits["loss"])


class Counted:
    """A regression whose loss counts how often it is traced."""

    def __init__(self):
        rng = np.random.default_rng(0)
        self.traced = 0
        self.problem = problems.custom(lambda key: jnp.ones(3), self.loss, rng.normal(size=(40, 3)), batch_size=4)
        self.traced = 0

    def loss(self, params, batch, key):
        self.traced += 1
        return jnp.mean((batch @ params - 1) ** 2)


def test_compiled_once_for_all_seeds():
    counted, method = Counted(), methods.gem()
    first = replay(make_trace(commits=1500), method, counted.problem, seed=0, progress=False)
    assert np.isfinite(first.commits["loss"]).all() and counted.traced
    counted.traced = 0
    replay(make_trace(commits=1500), method, counted.problem, seed=1, progress=False)
    assert counted.traced == 0
    for seed in (1, 2):
        replay(make_trace(commits=1500, seed=seed), method, counted.problem, seed=1, progress=False)
        assert counted.traced == 0


# Methods that use the rest of the interface, as a user writes them


def mean_of_four(rate=0.05):
    """The server collects four messages and applies their mean."""

    def apply(server, central, message, memory, visit):
        total, count = server[0] + message, server[1] + 1
        full = count == 4
        return Applied(jnp.where(full, central + total / 4, central), (jnp.where(full, 0, total), count % 4), memory)

    def init(central):
        return jnp.zeros_like(central), jnp.int32(0)

    return Method("mean of four", {"rate": rate}, gradient_steps(rate), apply=apply, init_server=init)


def delay_compensated(rate=0.05, strength=0.5):
    """DC-ASGD: for every worker, the server remembers what that worker last read."""

    def apply(server, central, message, memory, visit):
        gradient = -message / rate
        new = central - rate * (gradient + strength * gradient**2 * (central - memory))
        return Applied(new, server, new)

    return Method("dc-asgd", {"rate": rate}, gradient_steps(rate), apply=apply, init_memory=lambda central: central)


def momentum_each(rate=0.02, mu=0.8):
    """The server keeps a velocity for every worker, and the sum of them all."""

    def apply(server, central, message, memory, visit):
        velocity = mu * memory["v"] + message
        return Applied(central + velocity, server + velocity - memory["v"], {"v": velocity})

    zeros = jnp.zeros_like
    return Method(
        "momenta", {}, gradient_steps(rate), apply=apply, init_server=zeros, init_memory=lambda c: {"v": zeros(c)}
    )


def elastic(rate=0.05, alpha=0.2):
    """AEASGD: replicas live on, and are pulled towards the central variable as it is at the visit."""

    def message(replica, update, start, central, visit):
        difference = alpha * (start + update - central)
        return difference, start + update - difference, {}

    return Method(
        name="aeasgd",
        hyperparameters={"alpha": alpha},
        optimizer=gradient_steps(rate),
        message=message,
        init_worker=lambda central: central,
        resume=lambda replica, read: replica,
    )


def pair_of_messages(rate=0.05):
    """The message is a tree, and the server divides one of its entries by the other."""

    def message(worker, update, start, central, visit):
        return {"update": update, "size": 1 + jnp.linalg.norm(update)}, worker, {}

    def apply(server, central, message, memory, visit):
        return Applied(central + message["update"] / message["size"], server, memory)

    return Method("normalised", {}, gradient_steps(rate), message=message, apply=apply)


def decaying(visit):
    """A schedule over everything that a visit knows."""
    slower = 1 + visit.worker_step / 100 + visit.commit / 1000 + visit.time / 50
    return 0.1 * visit.local_steps / slower / (visit.staleness + 1)


@pytest.fixture
def lenient():
    """JAX as a user has it: optax and schedules mix types."""
    with jax.numpy_dtype_promotion("standard"):
        yield


OWN = {
    "server state": (mean_of_four, "exchange", 1),
    "server memory, backup": (delay_compensated, "exchange", 1),
    "server memory, velocity": (momentum_each, "write_then_read", 1),
    "message with the central variable, and resume": (elastic, "exchange", 3),
    "a tree as message": (pair_of_messages, "read_then_write", 1),
    "local adam": (lambda: methods.downpour(optimizer=optax.adam(1e-2)), "exchange", 3),
    "local momentum": (lambda: methods.adaptive_staleness(optimizer=optax.sgd(0.02, 0.9)), "prescribed", 1),
    "schedule": (lambda: methods.downpour(learning_rate=decaying), "exchange", 1),
    "schedule, gem": (lambda: methods.gem(learning_rate=decaying), "read_then_write, two visits", 1),
}


@pytest.mark.parametrize("case", OWN)
def test_own_methods_are_the_loop(case, lenient):
    make, protocol, window = OWN[case]
    commits = 600
    found = forced_deviation(
        stopping(make_trace(protocol, window, commits=commits), make(), make_problem("quadratic")), EVERY
    )
    assert max(found.values()) < FORCED, found


def test_own_methods_run_in_single_precision(lenient):
    for make in (mean_of_four, OWN["local adam"][0]):
        run = replay(make_trace(commits=100), make(), make_problem("quadratic"), progress=False)
        assert run.status == "finished" and run.params.dtype == np.float32


def buffered(trace, every=4):
    """The same trace under a server that makes a new version only of every so many commits."""
    frame = trace.frame.copy()
    for name in ("read_version", "form_version", "version"):
        frame[name] //= every
    frame["staleness"] = frame["version"].shift(fill_value=0) - frame["read_version"]
    return Trace(frame, trace.source)


@pytest.mark.parametrize("protocol", ["exchange", "read_then_write, two visits"])
def test_server_buffers_are_the_loop(protocol):
    trace = buffered(make_trace(protocol, commits=600))
    found = forced_deviation(stopping(trace, mean_of_four(), make_problem("quadratic")), EVERY)
    assert max(found.values()) < FORCED, found


# Own problems


def nested_problem():
    rng = np.random.default_rng(1)
    x = rng.normal(size=(50, 3))

    def init(key):
        return {"w": jax.random.normal(key, (3,)), "rest": (jnp.zeros(()), {"b": jnp.ones((2, 2))})}

    def loss(params, batch, key):
        scale = jnp.mean(params["rest"][1]["b"]) * (1 + 0.1 * jax.random.normal(key, (), params["w"].dtype))
        return jnp.mean((scale * batch["x"] @ params["w"] + params["rest"][0] - batch["y"]) ** 2)

    return problems.custom(init, loss, {"x": x, "y": x @ [1.0, -2.0, 0.5]}, batch_size=8)


def stateful_problem():
    """Inputs are centred by a running mean, which is a state and not trained; batches are counted."""
    x = np.random.default_rng(2).normal(1, 1, size=(60, 3))

    def loss(params, state, batch, key):
        mean = 0.9 * state["mean"] + 0.1 * jnp.mean(batch, 0)
        value = jnp.mean((batch - mean) @ params) ** 2 + 0.1 * jnp.sum((params - 1) ** 2)
        return value, {"mean": mean, "seen": state["seen"] + 1}

    return problems.custom(
        lambda key: jnp.zeros(3),
        loss,
        x,
        batch_size=5,
        evaluate=lambda params, state, data: {"loss": jnp.sum(state["mean"]), "seen": state["seen"]},
        init_state=lambda: {"mean": jnp.zeros(3), "seen": jnp.int32(0)},
    )


@pytest.mark.parametrize(("make", "window"), [(nested_problem, 1), (stateful_problem, 3)])
def test_own_problems_are_the_loop(make, window):
    trace, method = make_trace(window=window, commits=400), make_method("gem")
    found = forced_deviation(stopping(trace, method, make()), EVERY)
    assert max(found.values()) < FORCED, found


def test_parameters_come_back_in_their_own_tree():
    problem, trace = nested_problem(), make_trace(commits=300)
    run = replay(trace, make_method("downpour"), problem, precision="float64", progress=False)
    loop = EventLoop(trace, make_method("downpour"), problem)
    loop.run(0, 300)
    expected = loop.unravel(loop.central)
    assert jax.tree.structure(run.params) == jax.tree.structure(expected)
    for found, wanted in zip(jax.tree.leaves(run.params), jax.tree.leaves(expected), strict=True):
        assert isinstance(found, np.ndarray)
        np.testing.assert_allclose(found, wanted, rtol=1e-10)


def test_evaluation_takes_the_mean_state_of_the_workers():
    problem, trace = stateful_problem(), make_trace(commits=300)
    run = replay(trace, make_method("downpour"), problem, precision="float64", progress=False)
    loop = EventLoop(trace, make_method("downpour"), problem)
    loop.run(0, 300)
    means = [worker.problem["mean"].sum() for worker in loop.workers.values()]
    assert run.evaluations["train_loss"].iloc[-1] == pytest.approx(np.mean(means), rel=1e-12)


# What is recorded


def test_evaluations_see_the_central_variable_after_that_many_commits():
    trace, method, problem = make_trace(commits=300), make_method("downpour"), make_problem("digits")
    run = replay(trace, method, problem, precision="float64", evaluate_every=11, progress=False)
    loop = EventLoop(trace, method, problem)
    loop.run(0, 300)
    assert run.evaluations["commit"].tolist() == [0, 77, 154, 231, 300]
    for row in run.evaluations.itertuples():
        params = loop.unravel(loop.versions[row.commit])
        test = problem.evaluate(params, None, jax.tree.map(jnp.asarray, float64_of(problem.test)))
        assert row.test_loss == pytest.approx(float(test["loss"]), rel=1e-12)
        assert row.test_accuracy == float(test["accuracy"])
        assert row.commit_time == (trace.frame["commit_time"].iloc[row.commit - 1] if row.commit else 0)
        assert row.gradients == row.commit and row.worker_step == row.commit / 7


def float64_of(tree):
    return jax.tree.map(lambda leaf: leaf.astype(np.float64) if leaf.dtype.kind == "f" else leaf, tree)


def test_commits_carry_the_trace():
    trace = make_trace(window=3, commits=200)
    run = replay(trace, make_method("downpour"), make_problem("quadratic"), progress=False)
    names = {"commit": "commit", "commit_time": "commit_time", "worker": "worker", "staleness": "staleness"}
    for ours, theirs in {**names, "worker_step": "job"}.items():
        pd.testing.assert_series_equal(run.commits[ours], trace.frame[theirs], check_names=False)
    assert run.evaluations["gradients"].iloc[-1] == 600
    assert run.config["method"] == "downpour" and run.config["commits"] == 200


def watched():
    """DOWNPOUR that shows its updates."""

    def message(worker, update, start, central, visit):
        return *send_update(worker, update, start, central, visit)[:2], {
            "size": jnp.abs(update),
            "positive": update > 0,
        }

    return Method("watched", {}, gradient_steps(0.05), message=message)


def test_diagnostics_summarise_what_the_method_shows():
    curvature = np.linspace(0.1, 1, 16)
    problem, method, trace = problems.quadratic(curvature), watched(), make_trace("write_then_read", commits=300)
    run = replay(trace, method, problem, precision="float64", diagnose_every=10, progress=False)
    loop = EventLoop(trace, method, problem)
    loop.run(0, 300)
    table = run.diagnostics
    assert sorted(table["commit"].unique()) == [0, 70, 140, 210, 280]
    for commit, rows in table.groupby("commit"):
        row = trace.frame.iloc[commit]
        update = -0.05 * curvature * np.asarray(loop.versions[row["read_version"]])
        assert (rows["worker"] == row["worker"]).all() and (rows["worker_step"] == row["job"]).all()
        share = rows[rows["quantity"] == "positive"]
        assert share["value"].tolist() == [np.mean(update > 0)]
        sizes = rows[rows["quantity"] == "size"]
        # The last is the median of the one tensor, which has no name.
        assert sizes["quantile"].tolist() == [0.05, 0.25, 0.5, 0.75, 0.95, 0.5]
        np.testing.assert_allclose(sizes["value"], np.quantile(np.abs(update), sizes["quantile"]), rtol=1e-10)


# Divergence


@pytest.mark.parametrize(("precision", "protocol"), [("float32", "exchange"), ("float64", "write_then_read")])
def test_a_run_ends_with_the_commit_that_diverges(precision, protocol):
    trace, problem, method = make_trace(protocol), problems.quadratic(np.ones(4)), methods.downpour(learning_rate=30.0)
    with jax.enable_x64(precision == "float64"), np.errstate(over="ignore", invalid="ignore"):
        loop = EventLoop(trace, method, problem, dtype=jnp.dtype(precision))
        expected = loop.run(0, len(trace))
    finite = np.logical_and.reduce([np.isfinite(expected[name]) for name in RECORDED])
    first = int(np.argmin(finite))
    assert 10 < first < len(trace) - 1
    run = replay(trace, method, problem, precision=precision, evaluate_every=2, progress=False)
    assert (run.status, run.diverged_at, len(run.commits)) == ("diverged", first, first + 1)
    last = run.commits.iloc[-1]
    assert not np.isfinite(last[list(RECORDED)].astype(float)).all()
    assert np.isfinite(run.commits.iloc[:-1][list(RECORDED)].to_numpy()).all()
    assert run.evaluations["commit"].max() <= first and np.isfinite(run.evaluations["train_loss"]).all()
    assert run.evaluations["commit"].tolist() == list(range(0, first + 1, 14))


def test_divergence_leaves_other_runs_alone():
    trace, problem = make_trace(commits=500), make_problem("quadratic")
    before = replay(trace, make_method("gem"), problem, progress=False)
    assert replay(trace, methods.downpour(learning_rate=1e6), problem, progress=False).status == "diverged"
    after = replay(trace, make_method("gem"), problem, progress=False)
    assert after.status == "finished" and after.diverged_at is None
    assert before.commits.equals(after.commits) and np.array_equal(before.params, after.params)


def test_divergence_stops_a_replay_that_is_advanced_by_hand():
    trace, problem = make_trace(), problems.quadratic(np.ones(4))
    replayed = Replay(trace, methods.downpour(learning_rate=1e6), problem, precision="float64")
    replayed.advance(len(trace))
    assert replayed.diverged_at is not None and replayed.position == replayed.diverged_at + 1
    assert len(replayed.result([]).commits) == replayed.position


# Bad input


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("seed", -1),
        ("seed", 1.5),
        ("precision", "float16"),
        ("precision", "float"),
        ("evaluate_every", 0),
        ("evaluate_every", 2.5),
        ("diagnose_every", -1),
        ("diagnose_every", 0.5),
        ("proxy_momentum", 1.0),
        ("proxy_momentum", -0.1),
        ("proxy_momentum", "high"),
    ],
)
def test_arguments_that_cannot_be_used(argument, value):
    with pytest.raises(InputError, match=f"{argument} = {value!r}"):
        replay(make_trace(commits=20), make_method("downpour"), make_problem("quadratic"), **{argument: value})


@pytest.mark.parametrize(
    ("method", "remedy"),
    [
        (lambda: methods.gem(variant="paper"), "protocol='read_then_write'"),
        (methods.sgd, "workers=1"),
        (lambda: methods.downpour()._replace(timing=Timing(window=3)), "window=3"),
    ],
)
def test_a_method_that_needs_another_timing_says_so(method, remedy):
    with pytest.raises(InputError, match=rf"needs a trace.*Cluster\({remedy}\)"):
        replay(make_trace(commits=20), method(), make_problem("quadratic"))


def test_more_workers_than_the_data_can_feed():
    problem = problems.digits(batch_size=300, hidden=(), sharded=True)
    with pytest.raises(InputError, match="shards"):
        replay(make_trace(commits=20), make_method("downpour"), problem)


# What a replay refuses, and what it must not touch


def test_the_users_own_initial_arrays_stay_whole():
    start = jnp.ones(3)
    problem = problems.custom(lambda key: start, lambda x, batch, key: jnp.sum(x * x) / 2)
    for _ in range(2):
        replay(make_trace(commits=100), methods.downpour(), problem, precision="float64")
    assert jnp.all(start == 1)


def test_a_server_that_starts_from_the_central_variable():
    method = Method("average", {}, gradient_steps(0.05), init_server=lambda central: central)
    assert replay(make_trace(commits=100), method, make_problem("quadratic")).status == "finished"


def test_what_is_recorded_changes_no_result():
    trace = simulate(Cluster(3, Gamma(1.0, cv=0.5)), 300)
    often, seldom = (
        replay(trace, make_method("gem"), make_problem("digits"), diagnose_every=d, evaluate_every=e).commits["loss"]
        for d, e in ((1, 1), (7, 100))
    )
    assert np.array_equal(often, seldom)


def test_an_evaluation_that_is_not_finite_ends_the_run():
    run = replay(prescribed(0, 3, 1), methods.downpour(1e-28), problems.quadratic([1e30], start=1e10), evaluate_every=1)
    assert (run.status, np.isfinite(run.evaluations["train_loss"].iloc[-1])) in {
        ("finished", True),
        ("diverged", False),
    }


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"outcome": "discarded"}, "not applied"),
        ({"local_steps": 3}, "local_steps"),
    ],
)
def test_traces_that_a_replay_does_not_know(change, message):
    trace = make_trace(commits=50)
    changed = Trace(trace.frame.assign(**change), trace.source)
    with pytest.raises(InputError, match=message):
        replay(changed, methods.downpour(), make_problem("quadratic"))


@pytest.mark.parametrize("arguments", [("trace", methods.gem), ("cluster",), ("problem",)])
def test_the_wrong_kind_of_argument(arguments):
    right = {"trace": make_trace(commits=50), "method": methods.gem(), "problem": make_problem("quadratic")}
    wrong = {"trace": {"method": methods.gem}, "cluster": {"trace": "a path"}, "problem": {"problem": "digits"}}
    with pytest.raises(InputError, match="must be a"):
        replay(**(right | wrong[arguments[0]]))


def test_stops_are_those_it_was_made_with():
    with pytest.raises(InputError, match="stops"):
        Replay(make_trace(commits=50), methods.downpour(), make_problem("quadratic"), stops=[10, 50]).advance(11)
