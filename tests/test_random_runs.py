"""Random clusters, policies, methods and problems against a NumPy loop that shares no code with the package.

The loop follows the columns of the trace, keeps every version, and has the gradients and the rules written out.
"""

import dataclasses
import types

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_simulation import clusters

import asyncsim
from asyncsim import methods, problems

RATE = 0.05


def downpour(w, server, x, visit):
    return x + visit.update


def dynsgd(w, server, x, visit):
    return x + visit.update / (visit.tau + 1)


def agn(w, server, x, visit):
    return x + visit.update / visit.steps


def gem(w, server, x, visit):
    momentum = 0.9 * getattr(w, "momentum", 0) + visit.update
    moved = visit.form - getattr(w, "pulled", visit.first)
    pi = np.clip((abs(momentum) - abs(moved)) / abs(visit.update + 1e-12), 0, 5)
    w.momentum, w.pulled = momentum, visit.form
    return x + pi * visit.update


def dc_asgd(w, server, x, visit):
    return x + visit.update - RATE * 0.04 * (visit.update / RATE) ** 2 * (x - visit.read)


def aeasgd(w, server, x, visit):
    end = visit.start + visit.update
    elastic = 0.9 / visit.n * (end - visit.form)
    w.replica = end - elastic
    return x + elastic


def fedbuff(w, server, x, visit):
    server.buffer = [*getattr(server, "buffer", []), visit.update / np.sqrt(1 + visit.tau)]
    if visit.completes:
        x, server.buffer = x + 0.3 * np.mean(server.buffer, 0), []
    return x


#: The package's method and the rule; of those with a window of one there is no other.
RULES = {
    "downpour": (methods.downpour, downpour),
    "dynsgd": (methods.dynsgd, dynsgd),
    "agn": (methods.agn, agn),
    "gem": (methods.gem, gem),
    "dc_asgd": (methods.dc_asgd, dc_asgd),
    "aeasgd": (methods.aeasgd, aeasgd),
    "fedbuff": (lambda learning_rate: methods.fedbuff(learning_rate, 0.3, policy=None), fedbuff),
}


def quadratic(workers, numbers):
    curvature = numbers.uniform(0.1, 1.5, numbers.integers(1, 9))
    start = numbers.uniform(-2, 2, len(curvature))
    return problems.quadratic(curvature, start=start), start, lambda worker, x: curvature * x


def logistic(workers, numbers):
    """Each worker's minibatch is all of its shard, so that the order in which it is drawn does not matter."""
    problem = problems.logistic(workers, 6, heterogeneity=1.0, dimension=4, examples=6, regularisation=0.01)
    features, label = (np.asarray(problem.train[name], float) for name in ("features", "label"))

    def gradient(worker, x):
        a, y = features[worker::workers], label[worker::workers]
        return -(y / (1 + np.exp(y * (a @ x)))) @ a / len(y) + 0.01 * x

    return problem, np.zeros(4), gradient


PROBLEMS = {"quadratic": quadratic, "logistic": logistic}


def numpy_loop(trace, rule, start, gradient):
    """Return the central variable after the last commit."""
    frame = trace.frame[trace.frame["outcome"].isin(["applied", "buffered"])]
    workers, server = [types.SimpleNamespace() for _ in range(trace.workers)], types.SimpleNamespace()
    x, version, versions = start, 0, {0: start}
    # A pull of its own sees a whole version; within a visit the message meets what is there, buffered or not.
    pulls = trace.protocol == "read_then_write" and trace.source.separate_reads
    for row in frame.itertuples():
        w, read = workers[row.worker], versions[row.read_version]
        end = begin = getattr(w, "replica", start) if rule is aeasgd else read
        for _ in range(row.local_steps):
            end = end - RATE * gradient(row.worker, end)
        visit = types.SimpleNamespace(
            update=end - begin,
            start=begin,
            read=read,
            form=versions[row.push_version] if pulls else x,
            first=start,
            tau=row.staleness,
            steps=row.local_steps,
            n=trace.workers,
            completes=row.version > version,
        )
        x = rule(w, server, x, visit)
        version = row.version
        if visit.completes:
            versions[version] = x
    return x


@st.composite
def runs(draw):
    rule, cluster = draw(st.sampled_from(sorted(RULES))), draw(clusters(sizes=(1, 6)))
    counts, limits = st.integers(1, cluster.workers), st.integers(1, 4)
    policies = [
        st.just(asyncsim.asynchronous()),
        st.just(asyncsim.rounds()),
        st.builds(asyncsim.buffered, st.integers(1, 2 * cluster.workers)),
        st.builds(asyncsim.discard_stale, limits, counts),
    ]
    if cluster.protocol != "read_then_write":
        policies += [
            st.builds(asyncsim.bounded_staleness, st.integers(0, 3)),
            st.builds(asyncsim.first_of, counts),
            st.builds(asyncsim.barrier, st.none() | counts),
            st.builds(asyncsim.cancel_stale, limits, counts),
        ]
    cluster = dataclasses.replace(cluster, policy=draw(st.one_of(policies)))
    if rule == "dc_asgd":
        cluster = dataclasses.replace(cluster, window=1)
    return rule, draw(st.sampled_from(sorted(PROBLEMS))), cluster, draw(st.integers(20, 60)), draw(st.integers(0, 999))


@pytest.mark.full
@settings(max_examples=100, deadline=None, derandomize=True)
@given(run=runs())
def test_a_run_is_the_numpy_loop(run):
    rule, name, cluster, commits, seed = run
    make, formula = RULES[rule]
    problem, start, gradient = PROBLEMS[name](cluster.workers, np.random.default_rng(seed))
    trace = asyncsim.simulate(cluster, commits, seed)
    method = make(learning_rate=RATE)
    found = asyncsim.replay(trace, method, problem, seed, precision="float64", progress=False).params
    expected = numpy_loop(trace, formula, start, gradient)
    assert jax.tree.leaves(found)[0].dtype == np.float64
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-10 * max(1, abs(expected).max()))
