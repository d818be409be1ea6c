"""Methods checked before a replay: each message names the function, what it returned and what it should."""

import dataclasses

import jax
import jax.numpy as jnp
import optax
import pytest

import asyncsim
from asyncsim import InputError, methods, problems
from asyncsim.methods import METHODS, Applied, Timing, add, gradient_steps, send_update
from asyncsim.methods.check import check_fields, check_method

PROBLEM = problems.digits(hidden=(3,))
PARAMS = jax.eval_shape(PROBLEM.init, jax.random.key(0))
SIZE = PROBLEM.parameter_count
APPLY = r"damped\.apply\(server, central, message, memory, visit\)"
COMBINE = r"damped\.combine\(server, central, messages, visits\)"
MESSAGE = r"damped\.message\(worker, update, start, central, visit\)"


def damped(**fields):
    return methods.downpour()._replace(name="damped", **fields)


@pytest.mark.parametrize("name", METHODS)
def test_the_methods_pass(name):
    check_method(METHODS[name](), PARAMS)


def test_states_of_any_tree_pass(lenient):
    def message(worker, update, start, central, visit):
        return {"u": update, "when": visit.time}, [worker[0] + 1, None], {"size": jnp.abs(update) > 1}

    def apply(server, central, message, memory, visit):
        return Applied(central + message["u"], {"n": server["n"] + 1}, (memory[0] + message["u"],))

    method = damped(
        optimizer=optax.adam(1e-3),
        message=message,
        apply=apply,
        init_worker=lambda central: [0, None],
        init_server=lambda central: {"n": jnp.int32(0)},
        init_memory=lambda central: (jnp.zeros_like(central),),
        resume=lambda worker, read: read,
    )
    check_method(method, PARAMS)
    check_method(method, jax.tree.map(lambda leaf: jnp.zeros(leaf.shape), PARAMS))


def test_nothing_is_computed():
    def apply(server, central, message, memory, visit):
        assert isinstance(central, jax.core.Tracer)
        return add(server, central, message, memory, visit)

    check_method(damped(apply=apply), PARAMS)


def by_loss(gradients, state, params=None, *, visit, **others):
    return jax.tree.map(lambda g: -g * visit.loss, gradients), state


WRONG = {
    "shape": (
        {"apply": lambda s, c, m, k, v: Applied(c[:3], s, k)},
        rf"{APPLY} returned the central variable, float32\[3\]: must be a vector like .*, float32\[{SIZE}\]",
    ),
    "type": (
        {"apply": lambda s, c, m, k, v: Applied(c.astype(jnp.float16), s, k)},
        rf"{APPLY} returned the central variable, float16",
    ),
    "tuple": (
        {"apply": lambda s, c, m, k, v: (c + m, s, k)},
        rf"{APPLY} returned \(float32\[{SIZE}\], \(\), \(\)\): must return Applied\(central, server, memory\)",
    ),
    "nothing": ({"apply": lambda s, c, m, k, v: None}, rf"{APPLY} returned None: must return Applied"),
    "server not passed on": (
        {"apply": lambda s, c, m, k, v: Applied(c + m), "init_server": lambda c: {"n": 0}},
        rf"{APPLY} returned \(\) for the server's state, as init_server made it: must be \{{'n': int32\[\]\}}",
    ),
    "memory not passed on": (
        {"apply": lambda s, c, m, k, v: Applied(c + m, s), "init_memory": lambda c: c},
        rf"{APPLY} returned \(\) for the memory of the worker",
    ),
    "arguments": (
        {"apply": lambda server, central: Applied(central)},
        rf"{APPLY}: takes \(server, central\); it is called with 5 arguments, in this order",
    ),
    "its own error": (
        {"apply": lambda s, c, m, k, v: Applied(c + jnp.ones(3))},
        rf"{APPLY}: failed: TypeError: add got incompatible shapes [^;]*$",
    ),
    "a server without init_server": (
        {"apply": lambda s, c, m, k, v: Applied(c + 0.9 * s, s, k)},
        rf"{APPLY}: failed: TypeError: .*; server is \(\), as the method has no init_server",
    ),
    "a memory without init_memory": (
        {"apply": lambda s, c, m, k, v: Applied(c + k["sum"], s, k)},
        rf"{APPLY}: failed: TypeError: .*; memory is \(\), as the method has no init_memory",
    ),
    "a worker without init_worker": (
        {"message": lambda w, u, s, c, v: (w.sum(), w, {})},
        rf"{MESSAGE}: failed: AttributeError: .*; worker is \(\), as the method has no init_worker",
    ),
    "an error beside a worker without state": (
        {"message": lambda w, u, s, c, v: (u, (), {}), "apply": lambda s, c, m, k, v: Applied(c + jnp.ones(3))},
        rf"{APPLY}: failed: TypeError: add got incompatible shapes [^;]*$",
    ),
    "update alone": (
        {"message": lambda w, u, s, c, v: u},
        rf"{MESSAGE} returned float32\[{SIZE}\]: must return three things",
    ),
    "worker's state": (
        {"message": lambda w, u, s, c, v: (u, u, {})},
        rf"{MESSAGE} returned float32\[{SIZE}\] for the worker's state, as init_worker made it: must be \(\)",
    ),
    "no diagnostics": (
        {"message": lambda w, u, s, c, v: (u, w, None)},
        rf"{MESSAGE} returned None for the diagnostics: must be a dict",
    ),
    "scalar diagnostic": (
        {"message": lambda w, u, s, c, v: (u, w, {"size": u.sum()})},
        rf"{MESSAGE} returned float32\[\] for the diagnostic 'size': must be a vector of shape \[{SIZE}\]",
    ),
    "init": ({"init_server": lambda: ()}, r"damped\.init_server\(central\): takes \(\); it is called with 1 argument,"),
    "resume": ({"resume": lambda w, read: read[0]}, r"damped\.resume\(worker, read\) returned float32\[\]: must be a"),
    "reply": (
        {"reply": lambda s, c, m, v: (c, s)},
        r"damped\.reply\(server, central, memory, visit\) returned \(float32.*: must be a vector",
    ),
    "no reply": ({"reply": 3}, r"damped\.reply = 3: must be a function, reply\(server, central, memory, visit\)"),
    "proxy": ({"proxy": lambda w: w}, r"damped\.proxy\(worker\) returned \(\): must be a vector"),
    "origin": ({"origin": lambda w, read: None}, r"damped\.origin\(worker, read\) returned None: must be a vector"),
    "rate for an optimizer": (
        {"optimizer": 0.05},
        r"damped\.optimizer = 0\.05: must be an optax\.GradientTransformation; .*gradient_steps\(learning_rate\)",
    ),
    "optimizer without a state": (
        {"optimizer": optax.GradientTransformation(lambda p: (), lambda g, s, p=None: g)},
        r"damped\.optimizer\.update\(gradients, .*, start=params\) returned .*: must return the steps and",
    ),
    "an optimizer that looks at the loss": (
        {"optimizer": optax.GradientTransformationExtraArgs(lambda p: (), by_loss)},
        r"damped\.optimizer: looks at visit\.loss, which is known only after its steps; message and apply may look at",
    ),
    "looks ahead in another tree": (
        {"look_ahead": lambda state: jnp.zeros(2)},
        r"damped\.look_ahead\(optimizer_state\) returned .* for how far, of the tree of the parameters: must be ",
    ),
    "a condition on a value": (
        {"apply": lambda s, c, m, k, v: Applied(c + m if v.staleness > 3 else c, s, k)},
        rf"{APPLY}: failed: TracerBoolConversionError: .*; choose between values with jax.numpy.where",
    ),
    "not a function": ({"apply": 3}, r"damped\.apply = 3: must be a function, apply\(server, "),
    "not a switch": ({"sees_loss": 1}, r"damped\.sees_loss = 1: must be True or False"),
    "no memories": (
        {"apply": lambda s, c, m, k, v: Applied(c + m, s, k), "sees_memories": True},
        r"damped\.apply\(server, central, message, memory, visit, memories\): takes \(s, c, m, k, v\); it is",
    ),
    "combines to another shape": (
        {"combine": lambda s, c, m, v: Applied(m[:, :2].sum(0))},
        rf"{COMBINE} returned the central variable, float32\[2\]: must be a vector like the central variable",
    ),
    "combines to no Applied": (
        {"combine": lambda s, c, m, v: c + m.sum(0)},
        rf"{COMBINE} returned .*: must return Applied\(central, server, memory\)",
    ),
    "combines with a memory": (
        {"combine": lambda s, c, m, k, v: Applied(c)},
        rf"{COMBINE}: takes \(s, c, m, k, v\); it is called with 4 arguments, in this order",
    ),
    "combines and applies": (
        {"combine": lambda s, c, m, v: Applied(c), "apply": lambda s, c, m, k, v: Applied(c)},
        r"damped\.combine: is what the server does, in the place of apply, .*; leave the others out",
    ),
    "receives and does not combine": (
        {"receive": lambda k, m, v: (m, k)},
        r"damped\.receive: is for methods with combine, and there is none; leave it out",
    ),
    "receives a message alone": (
        {"receive": lambda k, m, v: m, "combine": lambda s, c, m, v: Applied(c)},
        r"damped\.receive\(memory, message, visit\) returned .*: must return the message that waits and",
    ),
    "a loss that is not told": (
        {"apply": lambda s, c, m, k, v: Applied(c + m * v.loss, s, k)},
        r"damped\.sees_loss = False: its functions look at visit\.loss, .* made with sees_loss=True; add that",
    ),
    "a loss that is not told, and another fault": (
        {"message": lambda w, u, s, c, v: (u[:2] * v.loss, w, {})},
        r"damped\.sees_loss = False: its functions look at visit\.loss",
    ),
    "a message of another shape": (
        {"message": lambda w, u, s, c, v: (u[:2], w, {}), "apply": add},
        rf"{MESSAGE} returned the message, float32\[2\]: must be a vector like the central variable, float32",
    ),
    "not a timing": ({"timing": None}, r"damped\.timing = None: must be an asyncsim\.methods\.Timing"),
    "no protocol": ({"timing": Timing(protocol="exchang")}, r"damped\.timing: protocol = .* did you mean 'exchange'"),
    "no discipline": ({"timing": Timing(discipline=1)}, r"damped\.timing: discipline = 1: unknown"),
    "no window": ({"timing": Timing(window="2")}, r"damped\.timing: window = '2': must be a whole number"),
    "no message": ({"timing": Timing(message_size=0)}, r"damped\.timing: message_size = 0: must be above zero"),
    "no workers": ({"timing": Timing(workers=0)}, r"damped\.timing: workers = 0: must be at least 1"),
    "hyperparameters": ({"hyperparameters": None}, r"damped\.hyperparameters = None: must be a dict"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_named(name):
    fields, message = WRONG[name]
    with pytest.raises(InputError, match=message):
        check_method(damped(**fields), PARAMS)


@pytest.mark.parametrize("text", ["barrier(8)", "neighbours(mix=before)", "cancel_stale(3)"])
def test_timing_takes_a_policys_text_as_a_cluster_does(text):
    timing = Timing(policy=text)
    assert timing == Timing(policy=asyncsim.clusters.policy.parse_policy(text)) and hash(timing) == hash(timing)
    assert dataclasses.replace(Timing(), policy=text) == timing
    check_method(damped(timing=timing), PARAMS)
    for policy in ("bariers(8)", asyncsim.buffered, 3):
        with pytest.raises(InputError, match="policy = "):
            Timing(policy=policy)


def test_a_method_with_a_policys_text_replays():
    trace = asyncsim.simulate(asyncsim.Cluster(4, 1.0, policy="barrier(2)"), 8)
    asyncsim.replay(trace, damped(timing=Timing(policy="barrier(count=2)")), PROBLEM)
    with pytest.raises(InputError, match=r"needs a trace with policy = barrier\(count=4\)"):
        asyncsim.replay(trace, damped(timing=Timing(policy="barrier(count=4)")), PROBLEM)


@pytest.mark.parametrize("kind", [jnp.bfloat16, jnp.int8])
def test_messages_of_another_type_may_be_added(kind, lenient):
    method = damped(message=lambda w, u, s, c, v: (u.astype(kind), w, {}), apply=add)
    assert check_method(method, PARAMS) == ()


@pytest.mark.parametrize("name", ["a/b", "a\\b", "", " ", ".hidden", "a\nb", "a:b", None, 3])
def test_a_name_is_that_of_a_folder(name):
    with pytest.raises(InputError, match=r"method: name = "):
        check_fields(methods.gem()._replace(name=name))


def test_names_with_spaces_are_fine():
    check_fields(methods.Method("gem, kappa = 2 (mine)", {}, gradient_steps(0.1), message=send_update))
