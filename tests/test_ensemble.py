"""Ensembles: what is replayed together is what single replays give."""

import jax
import numpy as np
import optax
import pytest
from cases import make_problem, make_trace, stateful_problem
from event_loop import deviation

from asyncsim import (
    Cluster,
    InputError,
    methods,
    problems,
    recorders,
    replay,
    replay_ensemble,
    simulate,
)
from asyncsim.methods import Method

#: Relative, over a run short enough that GEM has not amplified round-off.
TOLERANCE = 1e-9


def assert_same(found, expected):
    assert found.config == expected.config and found.diverged_at == expected.diverged_at
    for table in ("commits", "evaluations", "diagnostics"):
        ours, single = getattr(found, table), getattr(expected, table)
        assert list(ours.columns) == list(single.columns) and len(ours) == len(single)
        numbers = single.select_dtypes("number").columns
        np.testing.assert_allclose(ours[numbers], single[numbers], rtol=TOLERANCE, atol=TOLERANCE)
    ours, single = (jax.tree.leaves(run.params) for run in (found, expected))
    assert max(map(deviation, ours, single)) < TOLERANCE


def both(trace, factory, problem, **options):
    record = [recorders.energy(tensors=5), recorders.diagnostics()]
    options |= {"precision": "float64", "record": record, "progress": False}
    return [
        replay_ensemble(trace, factory, problem, batched=batched, **options)
        for batched in (True, False)
    ]


CASES = [
    (
        "quadratic",
        "exchange",
        methods.gem,
        {"learning_rate": [0.05, 0.1], "kappa": [1.0, 2.0], "pi_max": None},
    ),
    ("quadratic", "prescribed", methods.downpour, {"learning_rate": np.array([0.01, 0.02])}),
    ("digits", "write_then_read", methods.gem, {"momentum": (0.5, 0.9)}),
    (
        "quadratic",
        "exchange",
        methods.lsgd,
        {"learning_rate": [0.05, 0.1], "pull": [0.1, 0.5], "groups": 2},
    ),
    (
        "quadratic",
        "exchange",
        methods.damping,
        {"optimizer": optax.sgd(1e-2, 0.9), "strength": [0.3, 0.6]},
    ),
]


@pytest.mark.parametrize(
    ("problem", "protocol", "factory", "values"),
    [
        pytest.param(*case, marks=[] if number == 1 else pytest.mark.full)
        for number, case in enumerate(CASES)
    ],
)
def test_members_are_single_replays(problem, protocol, factory, values):
    trace = make_trace(protocol, commits=120)
    for found, expected in zip(
        *both(trace, factory, make_problem(problem), seeds=[0, 3], **values), strict=True
    ):
        assert_same(found, expected)


@pytest.mark.full
def test_order_and_configuration():
    runs, singles = both(
        make_trace(commits=60),
        methods.gem,
        make_problem("quadratic"),
        seeds=(2, 0),
        learning_rate=[0.1, 0.2],
        kappa=3.0,
    )
    have = [(run.config["seed"], run.config["hyperparameters"]["learning_rate"]) for run in runs]
    assert have == [(2, 0.1), (2, 0.2), (0, 0.1), (0, 0.2)]
    assert {run.config["hyperparameters"]["kappa"] for run in runs} == {3.0}
    options = {
        "precision": "float64",
        "record": [recorders.energy(tensors=5), recorders.diagnostics()],
    }
    one = replay(
        make_trace(commits=60),
        methods.gem(0.2, kappa=3.0),
        make_problem("quadratic"),
        seed=2,
        **options,
    )
    assert_same(runs[1], one)
    assert_same(singles[1], one)


@pytest.mark.full
def test_a_local_optimizer_and_a_problem_with_state(lenient):
    trace = make_trace(window=3, commits=120)

    @methods.declared
    def adam(rate=0.01):
        return Method(optax.adam(rate))

    for found, expected in zip(
        *both(trace, adam, stateful_problem(), seeds=[0, 1], rate=[0.01, 0.02]), strict=True
    ):
        assert_same(found, expected)


@pytest.mark.full
def test_members_that_diverge_end_and_the_others_go_on():
    trace = make_trace(commits=400)
    for runs in both(trace, methods.downpour, make_problem("quadratic"), learning_rate=[1e6, 0.01]):
        assert runs[0].diverged_at is not None and len(runs[0].commits) == runs[0].diverged_at + 1
        assert runs[1].status == "finished" and len(runs[1].commits) == 400
    trace = make_trace(commits=100)
    runs = replay_ensemble(
        trace, methods.downpour, make_problem("quadratic"), learning_rate=[1e8, 1e9], batched=True
    )
    assert all(run.diverged_at is not None for run in runs)


def halved(learning_rate=0.1, fast=True):
    return methods.downpour(learning_rate=learning_rate if fast else learning_rate / 2)


def test_methods_that_differ_in_numbers_alone_are_a_batch():
    trace, problem = make_trace("exchange", commits=60), make_problem("quadratic")
    for batched in (True, False):
        fast, slow = replay_ensemble(trace, halved, problem, batched=batched, fast=[True, False])
        norms = [run.commits["update_norm"].iloc[0] for run in (fast, slow)]
        np.testing.assert_allclose(norms[0], 2 * norms[1], rtol=1e-6)
    with pytest.raises(InputError, match=r"pi_max.*batched=False"):
        replay_ensemble(trace, methods.gem, problem, batched=True, pi_max=[None, 5.0])


@pytest.mark.full
def test_counts_and_choices_of_a_method_are_run_one_by_one():
    """By default they are no batch, though the problem is small; asked for, that is refused."""
    trace, problem = simulate(Cluster(3, 1.0), 9), problems.quadratic([1.0])
    for factory, differing in (
        (methods.delayed_nesterov, {"period": [2, 3]}),
        (methods.lsgd, {"step_pull": [0.0, 0.1]}),
        (methods.adag, {"form": ["scaled", "squared"]}),
    ):
        ((name, values),) = differing.items()
        runs = replay_ensemble(trace, factory, problem, progress=False, **differing)
        for run, value in zip(runs, values, strict=True):
            alone = replay(trace, factory(**{name: value}), problem, progress=False)
            assert run.config["hyperparameters"][name] == value
            assert run.commits["loss"].tolist() == alone.commits["loss"].tolist()
        with pytest.raises(InputError, match=rf"{name}.*batched=False"):
            replay_ensemble(trace, factory, problem, batched=True, **differing)
