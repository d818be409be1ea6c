"""The catalogue: each method against a NumPy loop written from its paper, its sequential
counterpart, and the traps.
"""

import dataclasses
import functools
import inspect

import formulas
import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from cases import make_dynamic
from event_loop import deviation
from formulas import CURVATURE, MU, RATE, START
from jax.flatten_util import ravel_pytree

from asyncsim import (
    Cluster,
    Exponential,
    Gamma,
    InputError,
    methods,
    problems,
    simulate,
)
from asyncsim.methods import METHODS, gradient_steps
from asyncsim.replays.replay import Replay, replay
from asyncsim.study.config import StudyConfig

COMMITS, WORKERS = 200, 7
pytestmark = pytest.mark.usefixtures("float64")
#: What the clusters of the formulas have besides: rounds whose version is made by the last, visits
#: that read before they write, buckets with a message each, rounds of trials of which some are
#: cut, and versions a while after their third message, for which nobody waits.
TIMINGS = {
    "asynchronous": {},
    "buffered": {"policy": "buffered(3)"},
    "rounds": {"policy": "barrier()"},
    "reading": {"protocol": "read_then_write"},
    "lock_free": {"protocol": "write_then_read", "discipline": "lock_free"},
    "buckets": {"policy": "buckets(5)"},
    "trials": {"compute": Exponential(1.0), "policy": "trials(1.2)"},
    "quorum": {"policy": "buffered(3, grace=0.3)"},
}


@functools.cache
def trace_of(timing="asynchronous", workers=WORKERS, window=1, commits=COMMITS):
    if timing == "dynamic":
        return make_dynamic(workers, window, commits)
    times = {"compute": Gamma(1.0, 0.4), "service": Exponential(0.05), "window": window}
    return simulate(Cluster(workers, **times | TIMINGS[timing]), commits)


DIVERSE = gradient_steps(formulas.diverse)
#: Shapes of the tensors of the 16 parameters, by the case; one vector elsewhere.
SHAPES = {
    "ringmaster_lmo": [(3, 2), (2, 4), (2,)],
    "server_optimizer, muon": [(2, 5), (3, 2)],
}


def case(window=1, timing="asynchronous", formula=None, **options):
    return window, timing, formula, options


def server_optimizer(optimizer, step, adaptive=True):
    formula = formulas.server_optimizer(step, adaptive)
    return case(formula=formula, optimizer=optimizer, adaptive=adaptive)


ENTROPY = {"learning_rate": formulas.diverse, "gamma": 2.0, "scoping": 0.1, "noise": 0.1}
#: Window, timing and options of each method, by its name and what is special; the formula is that
#: of the name, if no other is given.
RULES = {
    **{
        name: case()
        for name in (
            *("downpour", "adaptive_staleness", "adag", "damping", "softsync", "ringmaster"),
            *("ringleader", "malenia", "rescaled_asgd", "delay_adaptive", "gem", "sgd"),
            *("dana_zero", "weight_prediction", "async_nesterov", "dana_slim", "zeno_pp", "ia2sgd"),
        )
    },
    **{name: case(timing="rounds") for name in ("batch_sgd", "robust", "easgd")},
    "gap_aware": case(learning_rate=formulas.diverse),
    "agn": case(4),
    "hogwild": case(timing="lock_free"),
    "fedasync, dynamic": case(6, "dynamic", rho=0.5),
    "delayed_nesterov, dynamic": case(6, "dynamic"),
    "adag, original": case(form="original"),
    "adag, squared": case(3, form="squared", gamma=0.1),
    # Trap 1: dist-keras' Experimental; residual / window, factor 1 / ((1 / learning_rate) (center -
    # stale)^2 + 1).
    "adag, averaged": case(4, gamma=0.01, averaged=True),
    "dynsgd": case(3),
    "qsgd": case(levels=3, bucket=5),
    "qsgd, window": case(3, bucket=None),
    "mem_sgd": case(fraction=0.2),
    "mem_sgd, without": case(fraction=0.5, memory=False),
    "damping, rank": case(law="rank"),
    "softsync, averaged": case(timing="buffered"),
    "softsync, unmodulated": case(timing="buffered", modulated=False),
    "rennala": case(timing="buffered"),
    "ringleader, newest": case(restart="newest"),
    "malenia, batch": case(count=14),
    "server_optimizer": server_optimizer(
        optax.adamw(0.02, 0.9, 0.99, 1e-4, weight_decay=0.1),
        formulas.adamw(0.02, 0.9, 0.99, 1e-4, 0.1),
    ),
    "server_optimizer, lion": server_optimizer(
        optax.lion(0.01, weight_decay=0.1), formulas.lion(0.01, 0.9, 0.99, 0.1), adaptive=False
    ),
    "server_optimizer, muon": server_optimizer(
        optax.contrib.muon(0.02), formulas.muon(0.02, SHAPES["server_optimizer, muon"])
    ),
    "ringmaster_lmo": case(formula=formulas.ringmaster_lmo(SHAPES["ringmaster_lmo"])),
    "delay_adaptive, koloskova": case(rule="koloskova", smoothness=1.5),
    "delay_adaptive, drop": case(rule="drop"),
    "aeasgd": case(4),
    "aeasgd, remembered": case(order="remembered", alpha=0.3),
    "eamsgd": case(3),
    "easgd, window": case(3, "rounds", beta=0.5),
    "gem, paper": case(timing="reading", variant="paper"),
    "lsgd, one leader": case(3, pull=0.3, optimizer=DIVERSE),
    "lsgd": case(2, groups=3, pull=0.2, global_pull=0.4, global_every=3, optimizer=DIVERSE),
    # Trap 6: the authors' program pulls at every step, too.
    "lsgd, step_pull": case(groups=2, step_pull=0.1, global_every=2, optimizer=DIVERSE),
    "lgd": case(3, "rounds", optimizer=DIVERSE),
    "dc_asgd": case(compensation=0.5),
    "dc_asgd, adaptive": case(compensation=2.0, adaptive=True),
    "async_nesterov, heavy ball": case(look_ahead=False),
    "averaging": case(3, "rounds"),
    "fedasync, proximal": case(4, rho=0.7),
    "fedbuff": case(3, "buffered"),
    "fedbuff, DiLoCo": case(3, "rounds", server_rate=0.7, server_momentum=0.5, law="constant"),
    "diloco": case(3, "rounds"),
    "diloco, heavy ball": case(2, "rounds", server_momentum=0.5, outer="heavy_ball"),
    "streaming_diloco": case(3, "rounds"),
    "streaming_diloco, late": case(
        *(2, "rounds"),
        fragments=5,
        overlap=3,
        blend=0.25,
        server_rate=0.5,
        server_momentum=0.8,
    ),
    "streaming_diloco, eager": case(3, "rounds", overlap=2, eager=True),
    "streaming_diloco, whole": case(3, "rounds", fragments=1, overlap=0, blend=0.0),
    "decoupled_diloco": case(timing="quorum"),
    "decoupled_diloco, tensors": case(
        *(2, "quorum"),
        fragments=3,
        overlap=1,
        blend=0.25,
        server_rate=0.5,
        server_momentum=0.8,
        tensors=[1, 4, 6, 2, 3],
    ),
    "decoupled_diloco, mean": case(timing="quorum", fragments=16, blend=0.0, average="mean"),
    "mindflayer": case(timing="trials", success=0.7),
    "mindflayer, mean": case(timing="trials", success=[0.7] * 7, rule="mean"),
    "async_local_sgd, polynomial": case(2, server_rate=0.1, server_momentum=0.5, law="polynomial"),
    "delayed_nesterov, spread": case(period=4, spread=0.2, server_momentum=0.7, law="inverse"),
    "parle": case(4, "rounds", **ENTROPY, rho=3.0, momentum=0.6, outer_rate=0.9),
    # With one worker and without rho it is Entropy-SGD.
    "parle, alone": case(**ENTROPY, rho=None),
    "entropy_sgd": case(4, **ENTROPY),
    "kardam": case(optimizer=DIVERSE),
    "kardam, exponential": case(3, f=2, law="exponential", strength=0.3, optimizer=DIVERSE),
    "basgd": case(timing="buckets", count=5),
    "basgd, mean": case(timing="buckets", count=5, rule="mean()"),
    "zeno_pp, strict": case(trusted=2, rho=0.045, epsilon=0.1),
}


def quadratic(name=""):
    """The quadratic of the formulas: of one vector, or of the tensors of a case."""
    if name not in SHAPES:
        return problems.quadratic(CURVATURE, start=START)
    shapes = SHAPES[name]
    cuts = np.cumsum([int(np.prod(shape)) for shape in shapes])[:-1]

    def tensors(vector):
        return [
            jnp.asarray(part).reshape(shape)
            for part, shape in zip(np.split(vector, cuts), shapes, strict=True)
        ]

    def loss(params, batch, key):
        terms = jax.tree.map(lambda c, x: jnp.sum(c * x**2) / 2, tensors(CURVATURE), params)
        return sum(terms)

    return problems.custom(init=lambda key: tensors(START), loss=loss)


#: Commits of a case whose path amplifies round-off: tenfold every 20 commits here, because small
#: singular values are multiplied by a thousand. With seven workers weight prediction diverges
#: later.
COMMITS_OF = {"weight_prediction": 50, "ringmaster_lmo": 100, "gem": 100, "gem, paper": 50}


def assert_path(method, rule, trace, problem):
    """Follow a formula: by the length of each step, and to the end."""
    expected = formulas.run(rule, trace)
    running = Replay(trace, method, problem, precision="float64")
    largest = np.abs(expected).max()
    assert largest < 1e3
    running.advance(len(running.trace))
    run = running.result()
    np.testing.assert_allclose(ravel_pytree(run.params)[0], expected[-1], 0, 1e-10 * largest)
    moved = np.linalg.norm(np.diff(expected, axis=0), axis=1)
    np.testing.assert_allclose(run.commits["update_norm"], moved, 0, 1e-10 * largest)


def free(make):
    """The factory of a method that takes whatever timing a trace has."""
    return (
        functools.partial(make, policy=None)
        if "policy" in inspect.signature(make).parameters
        else make
    )


def unless(default, *case):
    return pytest.param(*case, marks=[] if default else pytest.mark.full)


#: In the default run: one of each kind of memory, of timing and of local rule.
DEFAULT = {"aeasgd", "agn", "dana_zero", "dc_asgd", "fedasync, proximal", "fedbuff", "gem", "parle"}
DEFAULT |= {"gem, paper", "hogwild", "lsgd", "qsgd", "ringleader", "ringmaster_lmo", "mindflayer"}
DEFAULT |= {"delayed_nesterov, dynamic", "decoupled_diloco", "streaming_diloco, eager"}
DEFAULT |= {"basgd", "kardam", "zeno_pp", "entropy_sgd", "dana_slim", "gap_aware"}


@pytest.mark.parametrize("name", [unless(name in DEFAULT, name) for name in RULES])
def test_methods_are_their_papers_formulas(name):
    (window, timing, formula, options), (name_of, *_) = RULES[name], name.split(",")
    workers = 1 if name in ("sgd", "entropy_sgd", "parle, alone") else WORKERS
    trace = trace_of(timing, workers, window, COMMITS_OF.get(name, COMMITS))
    method = free(METHODS[name_of])(**{"learning_rate": RATE} | options)
    rule = formula or formulas.rule_of(name_of, window=window, **method.hyperparameters)
    assert_path(method, rule, trace, quadratic(name))


@pytest.mark.parametrize(
    "name",
    [
        name
        for name in METHODS
        if free(METHODS[name]) is not METHODS[name]
        and METHODS[name]().timing.policy.name != "neighbours"
    ],
)
def test_methods_that_need_a_policy_refuse_others(name):
    method = METHODS[name]()
    with pytest.raises(InputError, match=f"method = {name!r}: needs a trace with policy = "):
        replay(trace_of(), method, quadratic(name))
    assert METHODS[name](policy=method.timing.policy).hyperparameters == method.hyperparameters


# Reductions: with one worker nothing is stale


def one_worker(method, problem, window=1, precision="float64"):
    trace = trace_of(workers=1, window=window)
    return replay(trace, method, problem, precision=precision, progress=False)


#: Methods whose message is the update itself, or the update times or over an exact one.
PLAIN = {
    *("adag", "agn", "averaging", "adaptive_staleness", "downpour", "batch_sgd", "damping"),
    *("dc_asgd", "delay_adaptive", "dynsgd", "fedbuff", "rennala", "rescaled_asgd", "malenia"),
    *("ringleader", "ringmaster", "softsync", "entropy_sgd", "parle"),
}
#: Options with which these are.
LIMITS = {"gamma": None, "noise": 0.0, "momentum": 0.0, "decay": 0.0}
LIMITS = {"entropy_sgd": LIMITS, "parle": {**LIMITS, "rho": None}}


@pytest.mark.full
def test_one_worker_is_sequential_sgd_bit_for_bit(optimized):
    problem = problems.quadratic(CURVATURE, noise=0.1, start=START)

    def bytes_of(method):
        run = one_worker(method, problem, 1, "float32")
        return run.commits["loss"].to_numpy().tobytes(), ravel_pytree(run.params)[0].tobytes()

    expected = bytes_of(methods.sgd(momentum=0.0))
    for name in sorted(PLAIN):
        assert bytes_of(free(METHODS[name])(**LIMITS.get(name, {}))) == expected, name
    adaptive = methods.dc_asgd(adaptive=True)
    assert bytes_of(adaptive) == expected


def nesterov():
    """Sequential SGD with Nesterov momentum: optax's own, whose parameters are the look-ahead."""
    return methods.downpour(optimizer=optax.sgd(RATE, MU, nesterov=True))


@pytest.mark.parametrize(
    ("method", "counterpart", "window"),
    [
        unless(False, methods.gap_aware, methods.sgd, 1),
        unless(False, functools.partial(methods.lsgd, groups=2), methods.downpour, 3),
        unless(False, methods.lgd, methods.downpour, 3),
        (methods.dana_zero, nesterov, 1),
        unless(False, functools.partial(methods.fedasync, mixing=1.0), methods.downpour, 3),
        unless(False, functools.partial(methods.delayed_nesterov, server_rate=1.0), nesterov, 1),
    ],
)
def test_one_worker_is_its_sequential_counterpart(method, counterpart, window, lenient):
    problem = quadratic()
    found, expected = (one_worker(one, problem, window) for one in (free(method)(), counterpart()))
    assert deviation(found.commits["loss"], expected.commits["loss"]) < 1e-12


@pytest.mark.parametrize(
    ("law", "options", "scales"),
    [
        ("constant", {}, [1, 1, 1, 1]),
        ("inverse", {}, [1, 1 / 2, 1 / 6, 1 / 8]),
        ("exponential", {"strength": 0.3}, np.exp([0, -0.3, -1.5, -2.1])),
        ("hinge", {"strength": 2.0, "threshold": 5.0}, [1, 1, 1, 1 / 5]),
        ("ratio", {"strength": 3.0}, [1, 3 / 4, 3 / 8, 3 / 10]),
    ],
)
def test_laws_of_damping(law, options, scales):
    method = methods.damping(law=law, **options)
    for tau, scale in zip((0, 1, 5, 7), scales, strict=True):
        visit = methods.Visit(*np.array([tau, 0, 0, 0, 0, 1], np.int32))
        applied = method.apply((), np.zeros(1), np.ones(1), (), visit)
        np.testing.assert_allclose(applied.central, scale, rtol=1e-12)


def test_sizes_of_messages():
    assert methods.mem_sgd().timing.message_size == 0.02
    assert methods.mem_sgd(fraction=0.7).timing.message_size == 1
    # A value in the type of the parameters, and a place of 32 bits.
    timing = methods.mem_sgd(fraction=0.1).timing
    sizes = [timing.size_of_message(bits) * bits / 8 for bits in (64, 32, 16, 8)]
    np.testing.assert_allclose(sizes, [1.2, 0.8, 0.6, 0.5])
    # Quantized messages have the same bits whatever the parameters have, and at most those of all
    # parameters.
    timing = methods.qsgd(bucket=None).timing
    assert [timing.size_of_message(bits) for bits in (64, 32, 16, 4)] == [4 / 64, 4 / 32, 4 / 16, 1]
    assert methods.qsgd(levels=1, bucket=64).timing.message_size == 2.5 / 32


# The factories


@pytest.mark.parametrize(
    "name", [name for name in METHODS if "optimizer" in inspect.signature(METHODS[name]).parameters]
)
def test_a_rate_beside_an_optimizer_is_refused(name):
    with pytest.raises(
        InputError, match=r"learning_rate = 0\.1: the optimizer has its own learning rate"
    ):
        METHODS[name](learning_rate=0.1, optimizer=optax.adam(1e-3))
    method = METHODS[name](optimizer=optax.adam(1e-3))
    assert (
        method.hyperparameters["optimizer"] == "optax"
        and "learning_rate" not in method.hyperparameters
    )


@pytest.mark.parametrize("name", METHODS)
def test_options_of_the_command_line_change_no_default(name):
    """An option of a study that a factory takes by name has the same default there: nothing changes
    unasked.

    The policy is the cluster's; methods that need one have their own.
    """
    options = {
        field.name: field.default
        for field in dataclasses.fields(StudyConfig)
        if field.name != "policy"
    }
    shared = {
        name: p.default
        for name, p in inspect.signature(METHODS[name]).parameters.items()
        if name in options
    }
    assert shared == {name: options[name] for name in shared}
    assert set(shared) <= {
        "learning_rate",
        "momentum",
        "kappa",
        "pi_max",
        "variant",
        "optimizer",
        "alpha",
    }
