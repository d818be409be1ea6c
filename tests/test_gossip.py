"""Methods without a server: the replay against plain NumPy loops, and what they reduce to."""

import functools

import jax
import numpy as np
import optax
import pytest
from gossip_loop import Loop
from jax.flatten_util import ravel_pytree

from asyncsim import (
    Cluster,
    InputError,
    methods,
    problems,
    recorders,
    replay,
    simulate,
)
from asyncsim.replays.programs import as_data
from asyncsim.replays.replay import Replay

CURVATURE, START, RATE = np.linspace(0.2, 1, 6), np.linspace(-1, 2, 6), 0.05


@functools.cache
def simulated(
    topology,
    policy,
    workers=9,
    commits=500,
    latency=0.3,
    compute="exponential(1)",
    seed=0,
    window=1,
):
    cluster = Cluster(
        workers, compute, topology=topology, policy=policy, latency=latency, window=window
    )
    return simulate(cluster, commits, seed)


def anywhere(make):
    return functools.partial(make, policy=None)


#: Method, topology, policy and what else a cluster has.
CASES = {
    "D-PSGD on a ring": (methods.dpsgd, "ring()", "neighbours(mix=beside)", {}),
    "D-PSGD, four neighbours": (
        methods.dpsgd,
        "random_regular(degree=4, seed=1)",
        "neighbours(mix=beside)",
        {},
    ),
    "SGP, one peer": (methods.sgp, "one_peer_exponential()", "neighbours()", {}),
    "SGP, Base-2": (methods.sgp, "base2()", "neighbours()", {"latency": 0}),
    "overlap SGP": (
        methods.osgp,
        "one_peer_exponential()",
        "overlap(1)",
        {"latency": "exponential(2)"},
    ),
    "overlap SGP, two steps": (
        anywhere(methods.sgp),
        "exponential()",
        "overlap(2)",
        {"latency": "exponential(2)"},
    ),
    "SGP, nobody waits": (
        anywhere(methods.sgp),
        "one_peer_exponential()",
        "asynchronous()",
        {"latency": 0},
    ),
    "AD-PSGD": (methods.adpsgd, "complete()", "handshake()", {}),
    "AD-PSGD on a ring": (methods.adpsgd, "ring()", "handshake()", {"latency": 0}),
}


def case_of(name, **options):
    make, topology, policy, own = CASES[name]
    return make(RATE), simulated(topology, policy, **own | options)


def replicas(running):
    workers = running.state.workers.method
    if running.method.name == "adpsgd":
        return workers
    return workers.replica if running.method.name == "dpsgd" else workers.biased + workers.update


pytestmark = pytest.mark.usefixtures("float64")


def replayed(method, trace, form=None, **options):
    problem, record = problems.quadratic(CURVATURE, start=START), [recorders.energy()]
    running = Replay(
        trace, method, problem, precision="float64", form=form, record=record, **options
    )
    running.advance(len(trace))
    return running


#: Each case in one form in turn.
FORMS = [(name, ("batch", "single")[place % 2]) for place, name in enumerate(CASES)]


@pytest.mark.parametrize(("name", "form"), FORMS)
def test_replays_are_plain_loops(name, form):
    method, trace = case_of(name)
    loop = Loop(trace, method, CURVATURE, START, RATE)
    running = replayed(method, trace, form)
    np.testing.assert_allclose(replicas(running), loop.x, rtol=0, atol=1e-12)
    if "sgp" in method.name.replace("dpsgd", "").replace("adpsgd", ""):
        np.testing.assert_allclose(running.state.workers.method.weight, loop.w, rtol=0, atol=1e-12)


def forced_loop(running, every, momentum):
    """Go through events as `loop` does, on a problem's data and with momentum; only gradients are
    not NumPy's.

    It takes over from a replay's workers every so many commits; messages are its own. Returns the
    largest deviations of the replicas at these stops, and of the losses.
    """
    problem, trace, method = (
        running.problem,
        running.trace,
        running.method.name.replace("osgp", "sgp"),
    )
    central, unravel = ravel_pytree(as_data(problem.init(jax.random.key(0)), np.float64))
    gradient = jax.jit(jax.value_and_grad(lambda x, batch: problem.loss(unravel(x), batch, None)))
    data = as_data(problem.train, central.dtype)
    batches, steps = problem.batch_indices(0, trace.workers), trace.window
    sent, losses, apart = [], [], 0.0
    for row in trace.frame.itertuples():
        if row.commit % every == 0:
            state = jax.tree.map(np.array, running.state)
            x, w, snapshot = np.array(replicas(running)), np.ones(trace.workers), state.read
            w = state.workers.method.weight if method == "sgp" else w
            traces = jax.tree.leaves(state.workers.learner.optimizer)
            m = (
                np.concatenate([leaf.reshape(trace.workers, -1) for leaf in traces], 1)
                if traces
                else 0 * x
            )
        i = row.worker
        came = [
            (share, *sent[source]) for source, share in zip(row.sources, row.weights, strict=True)
        ]
        mixed = row.kept * x[i] + sum((share * x for share, x, _ in came), 0 * x[i])
        w[i] = row.kept * w[i] + sum(share * w for share, _, w in came)
        start = {"dpsgd": x[i], "sgp": mixed / w[i]}[method] if method != "adpsgd" else snapshot[i]
        at, found = start.copy(), []
        for rows in batches.rows([i], [row.job], steps)[0]:
            value, g = gradient(at, jax.tree.map(lambda leaf, rows=rows: leaf[rows], data))
            m[i] = momentum * m[i] + np.asarray(g)
            at -= RATE * m[i]
            found.append(float(value))
        losses.append(np.mean(found))
        if method == "adpsgd":
            mixed = x[row.partner] = (x[i] + x[row.partner]) / 2
        x[i] = mixed + (at - start)
        if method == "adpsgd":
            snapshot[i] = x[i]
        sent.append((x[i].copy(), w[i]))
        if (row.commit + 1) % every == 0:
            running.advance(row.commit + 1)
            apart = max(apart, np.abs(replicas(running) - x).max())
    return apart, np.abs(running.result().commits["loss"] - losses).max()


@pytest.mark.parametrize(
    ("name", "momentum", "window"),
    [(name, 0.9, 2) for name in ("overlap SGP", "AD-PSGD")],
)
def test_on_digits_teacher_forced(name, momentum, window):
    """With plain local steps, and with two steps with momentum between communications."""
    make, topology, policy, own = CASES[name]
    method = make(optimizer=optax.sgd(RATE, momentum)) if momentum else make(RATE)
    trace = simulated(topology, policy, **{"workers": 5, **own}, commits=200, window=window)
    problem = problems.digits(batch_size=4, hidden=(8,), split=0.5)
    running = Replay(trace, method, problem, precision="float64", stops=np.arange(50, 201, 50))
    assert max(forced_loop(running, 50, momentum)) < 1e-12


def test_the_fixed_point_of_dpsgd_on_a_quadratic():
    """Per coordinate ``(I - W + rate H)^-1 rate H b``, with an optimum ``b`` of each worker's
    own.
    """
    from asyncsim import topologies

    n, rate, curvature = 5, 0.1, 0.7
    (w,) = topologies.ring().matrices(n)
    optimum = np.linspace(-1, 1, n)
    problem = problems.custom(
        lambda key: {"x": jax.numpy.zeros(1)},
        lambda params, batch, key: 0.5 * curvature * jax.numpy.sum((params["x"] - batch["b"]) ** 2),
        train={"b": optimum},
        batch_size=1,
        split="even",
        name="own_optima",
    )
    trace = simulated(
        "ring()",
        "neighbours(mix=beside)",
        workers=n,
        commits=n * 400,
        compute="constant(1)",
        latency=0,
    )
    running = Replay(trace, methods.dpsgd(rate), problem, precision="float64")
    running.advance(len(trace))
    expected = np.linalg.solve(
        np.eye(n) - w + rate * curvature * np.eye(n), rate * curvature * optimum
    )
    np.testing.assert_allclose(replicas(running)[:, 0], expected, rtol=0, atol=1e-12)


def test_push_on_the_complete_graph_is_synchronous_sgd_with_the_mean():
    """The sum of all gradients at one point, over the workers."""
    problem, n = problems.digits(batch_size=4, hidden=(8,)), 4
    trace = simulated(
        "complete()", "neighbours()", workers=n, commits=n * 20, compute="constant(1)", latency=0
    )
    server = simulate(Cluster(n, "constant(1)", policy="barrier()"), n * 20)
    ends = [
        replay(*given, problem, precision="float64", progress=False).params
        for given in ((trace, methods.sgp(RATE)), (server, methods.batch_sgd(RATE)))
    ]
    for one, other in zip(*map(jax.tree.leaves, ends), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-12)


def test_one_worker_is_sgd():
    problem = problems.quadratic(CURVATURE, noise=0.3)
    expected = replay(
        simulate(Cluster(1, "constant(1)"), 40), methods.downpour(RATE), problem, progress=False
    ).commits["loss"]
    for name in ("D-PSGD on a ring", "SGP, one peer", "AD-PSGD"):
        method, trace = case_of(name, workers=1, commits=40)
        assert (
            replay(trace, method, problem, progress=False).commits["loss"].tolist()
            == expected.tolist()
        )


def test_states_of_workers_that_meet_name_their_replica():
    own = methods.adpsgd(RATE)._replace(
        init_worker=lambda central: {"m": central, "x": central},
        message=lambda worker, update, *_: (update, worker, {}),
        meet=lambda own, other, visit: (own, other),
    )
    with pytest.raises(
        InputError,
        match=r"the worker's state carries its replica, .* replica=lambda state",
    ):
        replay(case_of("AD-PSGD")[1], own, problems.quadratic(CURVATURE))


@pytest.mark.parametrize(
    ("method", "name"),
    [
        (methods.dpsgd(), "AD-PSGD"),
        (methods.sgp(policy=None), "D-PSGD on a ring"),
    ],
)
def test_the_policy_that_an_error_names_is_python(method, name):
    import asyncsim

    with pytest.raises(InputError) as raised:
        replay(case_of(name)[1], method, problems.quadratic(CURVATURE))
    text = str(raised.value)
    policy = eval(
        text[text.index("policy=asyncsim.") + 7 :].split(")")[0] + ")", {"asyncsim": asyncsim}
    )
    beside = method.name == "dpsgd"
    assert policy == asyncsim.neighbours(mix="beside" if beside else "before")


def test_gradients_of_replicas_that_are_not_mixed_may_have_messages_beside():
    """Of a method of one's own whose functions are compiled, too."""
    method, trace = case_of("D-PSGD on a ring", commits=40)
    own = method._replace(mix=jax.jit(method.mix))
    problem, options = (
        problems.quadratic(CURVATURE, start=START),
        {"precision": "float64", "progress": False},
    )
    runs = [replay(trace, one, problem, **options) for one in (method, own)]
    np.testing.assert_array_equal(*(ravel_pytree(run.params)[0] for run in runs))
