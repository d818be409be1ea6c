"""Methods that say elementwise and are not are refused before their vectors are divided."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import make_problem, make_trace

from asyncsim import replay
from asyncsim.errors import InputError
from asyncsim.methods import METHODS, Applied, Method, gradient_steps
from asyncsim.replays.parts_check import require_elementwise

pytestmark = pytest.mark.usefixtures("lenient")

DEFAULT = {"downpour", "gem", "lsgd", "dana_zero"}


def clipped(worker, update, start, central, visit):
    return update / jnp.maximum(1, jnp.linalg.norm(update)), worker, {}


def averaged(server, central, message, memory, visit):
    return Applied(central + message / message.size, server, memory)


def noisy(server, central, message, memory, visit):
    return Applied(central + message + jax.random.normal(jax.random.key(0), message.shape), server, memory)


def counted(server, central, message, memory, visit):
    return Applied(central + message, server + jnp.sum(message > 0), memory)


def masked(server, central, message, memory, visit):
    return Applied(central + message * (np.arange(64) % 2), server, memory)


def bounded(worker, update, start, central, visit):
    return update * jnp.minimum(1, 100 / jnp.linalg.norm(update)), worker, {}


def at_times(server, central, message, memory, visit):
    return Applied(central + jnp.where(visit.completes, message, message / message.size), server, memory)


def make(**functions):
    return Method("own", {}, gradient_steps(0.05), elementwise=True, **functions)


WRONG = {
    "norm": (make(message=clipped), r"own\.elementwise = True: message computes something else"),
    "length": (make(apply=averaged), "apply computes something else"),
    "draws": (make(apply=noisy), "apply computes something else"),
    "a sum in the state": (make(apply=counted, init_server=lambda central: jnp.int32(0)), "apply computes"),
    "a bound far away": (make(message=bounded), "message computes something else"),
    "at some visits": (make(apply=at_times), "apply computes something else"),
    "a large count": (make(apply=counted, init_server=lambda central: jnp.int32(100_000)), "apply computes"),
    "a small share": (
        make(message=lambda w, u, s, c, v: (u * (1 - 1e-3 * jnp.tanh(u @ u)), w, {})),
        "message computes",
    ),
    "a reply": (make(reply=lambda s, c, m, v: c - c.mean()), "reply computes"),
    "a proxy": (make(proxy=lambda w: w / w.size, init_worker=lambda c: c), "proxy computes"),
    "a length of its own": (make(apply=masked), "fails with vectors of another length"),
    "a norm at the start": (make(init_memory=lambda central: central @ central), "init_memory computes"),
    "an origin": (make(origin=lambda worker, read: read - read.mean()), "origin computes"),
}


@pytest.mark.parametrize("case", WRONG)
def test_methods_that_are_not_elementwise(case):
    method, message = WRONG[case]
    with pytest.raises(InputError, match=message):
        require_elementwise(method)


#: All but one that draws, and one that looks for the largest elements: these are never divided.
ELEMENTWISE = [name for name in METHODS if name not in ("qsgd", "mem_sgd")]


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in DEFAULT else pytest.mark.full) for n in ELEMENTWISE])
def test_methods_of_the_package_that_are(name):
    method = METHODS[name]()
    assert method.elementwise
    require_elementwise(method)


def test_methods_that_may_be_divided_say_so():
    assert [name for name, make in METHODS.items() if make().elementwise] == ELEMENTWISE


def test_numbers_and_keys_in_the_state_are_no_vectors():
    def apply(server, central, message, memory, visit):
        count, key = server
        return Applied(central + message / (1 + count), (count + 1, key), memory)

    require_elementwise(make(apply=apply, init_server=lambda central: (jnp.int32(0), jax.random.key(0))))


def test_diagnostics_may_be_anything():
    require_elementwise(make(message=lambda w, u, s, c, v: (u, w, {"share": u / jnp.linalg.norm(u)})))


def test_states_of_another_structure():
    method = make(init_worker=lambda central: tuple(jnp.zeros(4) for _ in range(0, central.size, 4)))
    with pytest.raises(InputError, match="init_worker computes something else"):
        require_elementwise(method)


def test_memories_of_three_workers():
    def apply(server, central, message, memory, visit, memories):
        return Applied(central + jnp.sum(jnp.arange(3.0)[:, None] * memories.rows, 0), server, message)

    method = make(apply=apply, init_memory=lambda central: central, sees_memories=True)
    require_elementwise(method)


def test_a_state_of_few_digits():
    def apply(server, central, message, memory, visit):
        return Applied(central + message, (server + message).astype(jnp.bfloat16), memory)

    require_elementwise(make(apply=apply, init_server=lambda central: central.astype(jnp.bfloat16)))


def test_a_replay_by_two_devices_is_refused_and_one_by_a_single_one_is_not():
    def replay_by(count):
        trace, problem = make_trace(commits=40), make_problem("quadratic")
        return replay(trace, make(message=clipped), problem, devices=jax.devices()[:count], progress=False)

    with pytest.raises(InputError, match="make the method with elementwise=False"):
        replay_by(2)
    assert replay_by(1).status == "finished"
