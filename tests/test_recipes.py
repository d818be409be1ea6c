"""Methods that differ in numbers alone share a compiled program, and compute what they compute
alone.
"""

import inspect

import jax.numpy as jnp
import numpy as np
import pytest

from asyncsim import Cluster, attacks, methods, problems, replay, simulate
from asyncsim.base.errors import InputError
from asyncsim.methods import (
    METHODS,
    Applied,
    Method,
    declared,
    gradient_steps,
    named_optimizer,
)
from asyncsim.methods.declared import recipe_of
from asyncsim.replays.programs import IdentityKey, Keyed, _traced_numbers, on_vectors

#: Numbers on which the form of a method depends, so that each value has a program.
CONSTANTS = {
    "fedasync": {"rho"},
    "fedbuff": {"server_momentum"},
    "lsgd": {"step_pull"},
    "mem_sgd": {"fraction"},
    "parle": {"noise"},
    "robust": {"worker_momentum", "server_momentum"},
}
#: Arguments without a default.
NEEDED = {"limit": 3, "count": 2, "buckets": 2}


@pytest.fixture(scope="module")
def trace():
    return simulate(Cluster(workers=3, compute="gamma(1, 0.3)"), commits=30, seed=1)


def counting_problem():
    """A quadratic that counts how often its loss is traced."""
    traced = []

    def loss(params, batch, key):
        traced.append(1)
        return jnp.sum(params**2) + 0 * jnp.sum(batch)

    data = np.zeros((8, 1), np.float32)
    problem = problems.custom(lambda key: jnp.ones(3), loss, data, batch_size=1, name="counting")
    return problem, traced


def replayed(trace, method, problem, **options):
    return replay(trace, method, problem, evaluate_every=100, **options)


@pytest.mark.parametrize(
    "make, options",
    [
        (methods.downpour, {}),
        (lambda rate: methods.gem(learning_rate=rate, momentum=10 * rate), {}),
        (lambda rate: methods.agn(optimizer=named_optimizer("sgd", rate)), {}),
        (methods.downpour, {"attack": attacks.alie(workers=1, z=0.5)}),
    ],
)
def test_one_program_for_all_numbers_and_seeds(trace, make, options):
    problem, traced = counting_problem()
    replayed(trace, make(0.01), problem, **options)
    once = len(traced)
    other = simulate(trace.cluster, commits=30, seed=2)
    runs = [
        replayed(of_seed, make(rate), problem, seed=seed, **options)
        for rate in (0.02, 0.05)
        for seed, of_seed in enumerate((trace, other))
    ]
    # Whether a number may be traced is found out once, from shapes, and an evaluation is compiled
    # once.
    assert len(traced) == once
    assert len({run.commits["loss"].iloc[-1] for run in runs}) > 1


def test_a_method_whose_functions_are_replaced_computes_with_the_new_ones(trace):
    def halved(server, central, message, memory, visit):
        return Applied(central + 0.5 * message, server, memory)

    problem, _ = counting_problem()
    changed = methods.downpour(0.1)._replace(apply=halved)
    assert recipe_of(methods.downpour(0.1)) is not None and recipe_of(changed) is None
    alone = Method(gradient_steps(0.1), "halved", apply=halved)
    first, second = (
        replayed(trace, method, problem).commits["loss"] for method in (changed, alone)
    )
    assert first.equals(second) and not first.equals(
        replayed(trace, methods.downpour(0.1), problem).commits["loss"]
    )


def test_arguments_that_cannot_be_compared_have_a_program_of_their_own(trace):
    @declared
    def scaled(scales):
        return Method(gradient_steps(float(np.mean(scales))))

    problem, _ = counting_problem()
    method = scaled(np.array([0.1, 0.3]))
    assert recipe_of(method) is None
    assert (
        replayed(trace, method, problem)
        .commits["loss"]
        .equals(replayed(trace, methods.downpour(0.2), problem).commits["loss"])
    )
    with pytest.raises(InputError, match="must name each of its parameters"):
        declared(lambda *rates: methods.downpour(*rates))


@pytest.mark.parametrize("name", METHODS)
def test_numbers_of_every_method_are_arguments(name):
    factory = METHODS[name]
    needed = {
        argument: NEEDED.get(argument, 2)
        for argument, parameter in inspect.signature(factory).parameters.items()
        if parameter.default is inspect.Parameter.empty
    }
    # Ringmaster LMO needs matrices; fragments need as many parameters.
    of_matrices = name == "ringmaster_lmo"
    problem = problems.digits(hidden=(3,)) if of_matrices else problems.quadratic([0.1, 0.4, 1, 1])
    recipe = recipe_of(on_vectors(factory(**needed), problem, jnp.result_type(float)))
    traced = _traced_numbers(Keyed(recipe.key, recipe), IdentityKey(problem))
    assert "learning_rate" in traced
    assert set(recipe.numbers) - set(traced) == CONSTANTS.get(name, set())
