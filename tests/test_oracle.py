"""Every kind of trace, method, problem and policy, replayed and held against the loop over events of `event_loop`.

What cannot interact is not multiplied: every method meets every protocol, and every problem, policy and own method what
it could be wrong with. `test_random_replays` mixes all of it at random, in each form of computing.
"""

import jax
import numpy as np
import optax
import pytest
from cases import (
    EVERY,
    FORCED,
    GENTLE,
    HEAVY,
    METHODS,
    NEEDS,
    OWN,
    PROBLEMS,
    PROTOCOLS,
    damped_buffer,
    make_dynamic,
    make_method,
    make_problem,
    make_torn,
    make_trace,
    mean_of_four,
    nested_problem,
    stateful_problem,
    stopping,
)
from event_loop import RECORDED, EventLoop, deviation, forced_deviation

from asyncsim import (
    barrier,
    bounded_staleness,
    buckets,
    buffered,
    cancel_stale,
    discard_stale,
    first_of,
    methods,
    recorders,
    rounds,
)
from asyncsim.replays.replay import Replay

COMMITS = 400
POLICIES = [
    bounded_staleness(0),
    bounded_staleness(2),
    buffered(3),
    buffered(10),
    first_of(3),
    barrier(),
    barrier(4),
    discard_stale(2),
    discard_stale(1, 4),
    cancel_stale(2),
    cancel_stale(3, 2),
    rounds(),
    buckets(3),
]
SEPARATE = "read_then_write, two visits"


pytestmark = pytest.mark.usefixtures("float64")


def of_protocol(protocol, window=1, policy=None, workers=7, commits=COMMITS):
    options = {} if policy is None else {"policy": policy}
    return lambda: make_trace(protocol, window, workers, commits, **options)


def named(method, problem="quadratic"):
    """A method and a problem of the package, each made once."""
    return lambda: make_method(method), lambda: make_problem(problem)


def quadratic(make):
    return make, lambda: make_problem("quadratic")


def cases():
    """Name, trace, method and problem of each case."""
    for method in METHODS:
        for protocol in PROTOCOLS:
            if protocol.startswith(NEEDS.get(method, "")):
                yield (method, protocol), of_protocol(protocol, workers=1 if method == "sgd" else 7), *named(method)
    for problem in [name for name in PROBLEMS if name != "quadratic"]:
        for method, protocol in GENTLE:
            if problem in ("cifar10, resnet20", "cifar10, alexnet") and method == "gem":
                continue  # of the layers of the small network, and slow
            make, made = named(method, problem)
            make = GENTLE[method, protocol] if problem in HEAVY else make
            commits = COMMITS if problem == "digits" else 2 * EVERY
            yield (problem, method), of_protocol(protocol, commits=commits), make, made
    for name, (make, protocol, window) in OWN.items():
        yield (name,), of_protocol(protocol, window), *quadratic(make)
    yield ("nested problem",), of_protocol("exchange"), lambda: make_method("gem"), nested_problem
    yield ("stateful problem",), of_protocol("exchange", 3), lambda: make_method("gem"), stateful_problem

    for policy in POLICIES:
        for protocol in ("exchange", "write_then_read"):
            yield (str(policy), protocol), of_protocol(protocol, policy=policy), *quadratic(damped_buffer)
    for protocol in ("read_then_write", SEPARATE):
        for policy in (buffered(3), discard_stale(2), rounds()):
            yield (str(policy), protocol), of_protocol(protocol, policy=policy), *quadratic(damped_buffer)
    # Methods that know nothing of buffers and change the central variable at every message.
    yield ("buffered", "downpour"), of_protocol("exchange", policy=buffered(4)), *named("downpour", "digits")
    yield ("buffered", "gem"), of_protocol(SEPARATE, policy=buffered(4)), *named("gem")
    yield ("buffered", "mean of four"), of_protocol(SEPARATE, policy=buffered(4)), *quadratic(mean_of_four)
    yield ("discard_stale", "gem"), of_protocol("write_then_read", policy=discard_stale(2)), *named("gem", "digits")
    yield ("barrier", "gem"), of_protocol("exchange", policy=barrier(4)), *named("gem")
    for name in ("local adam", "message with the central variable, and resume"):
        make, _, window = OWN[name]
        yield ("cancel_stale", name), of_protocol("exchange", window, cancel_stale(3)), *quadratic(make)

    # Windows of the workers' own, and reads without locks, in blocks.
    yield ("windows", "gem"), make_dynamic, *named("gem")
    yield ("windows", "adam"), make_dynamic, adam, lambda: make_problem("digits")
    yield ("windows", "ringleader"), make_dynamic, anywhere, lambda: make_problem("digits")
    for method, problem in (("aeasgd", "quadratic"), ("gem", "digits"), ("downpour", "quadratic")):
        yield ("torn", method), lambda: make_torn(5), *named(method, problem)
    for policy in (buffered(6), bounded_staleness(2), discard_stale(2)):
        yield ("torn", str(policy)), lambda policy=policy: make_torn(8, policy), *quadratic(methods.hogwild)


def adam():
    return methods.downpour(optimizer=optax.adam(1e-2))


def anywhere():
    return make_method("ringleader")._replace(timing=methods.Timing())


#: One of each mechanism.
DEFAULT = {
    "gem, paper-read_then_write",
    "dana_zero-exchange",
    "digits-gem",
    "message with the central variable, and resume",
    "stateful problem",
    "cancel_stale(limit=2, count=1)-write_then_read",
}
CASES = {"-".join(name): case for name, *case in cases()}


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in DEFAULT else pytest.mark.full) for n in CASES])
def test_replay_is_the_loop_teacher_forced(name):
    mixes = name in OWN or "adam" in name  # optax and schedules mix types
    with jax.numpy_dtype_promotion("standard" if mixes else "strict"):
        trace, method, problem = (make() for make in CASES[name])
        found = forced_deviation(stopping(trace, method, problem), EVERY)
    assert max(found.values()) < FORCED, found


@pytest.mark.full
@pytest.mark.parametrize(
    ("protocol", "window"), [(SEPARATE, 1), *((name, 1 if name == "exchange" else 3) for name in PROTOCOLS)]
)
def test_downpour_is_the_loop_without_forcing(protocol, window):
    """A method that does not amplify round-off."""
    trace, method, problem = make_trace(protocol, window), make_method("downpour"), make_problem("quadratic")
    replayed, loop = (
        Replay(trace, method, problem, precision="float64", record=[recorders.energy()]),
        EventLoop(trace, method, problem),
    )
    replayed.advance(len(trace))
    expected, found = loop.run(0, len(trace)), replayed.result().commits
    central = np.asarray(replayed.state.central)
    assert max(deviation(central, loop.central), *(deviation(found[name], expected[name]) for name in RECORDED)) < 1e-10
