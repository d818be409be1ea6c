"""Rules of robust aggregation against references in NumPy, written from their papers; attacks, and
robust SGD under them.
"""

import dataclasses
import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

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
from asyncsim.byzantine.aggregation import parse_rule
from asyncsim.byzantine.attacks import Attack, WeakAttackWarning, alie_z, parse_attack
from asyncsim.replays.replay import Replay

RULE_TEXTS = [
    "mean()",
    "median()",
    "median(lower=True)",
    "trimmed_mean(f=2)",
    "geometric_median(iterations=3)",
    "geometric_median(iterations=8, smoothing=0.5)",
    "krum(f=2)",
    "krum(f=2, score=byzfl)",
    "multi_krum(f=2)",
    "multi_krum(f=2, m=3)",
    "bulyan(f=2)",
    "cge(f=2)",
    "cge(f=2, total=True)",
    "centred_clipping(radius=2.0, iterations=3)",
    "nnm(krum(f=2))",
    "nnm(trimmed_mean(f=2))",
    "nnm(median(), f=2)",
    "clipping(median(), radius=1.5)",
]


def reference(text, g):
    """The rule that a text names, of finite messages, in NumPy."""
    n = len(g)
    name, args = text.partition("(")[0], dict(re.findall(r"(\w+)=([\w.]+)", text))
    f = int(args.get("f", 0))

    def nearest(i, others, count):
        return sum(sorted(np.linalg.norm(g[i] - g[j]) ** 2 for j in others if j != i)[:count])

    if name == "mean":
        return g.mean(0)
    if name == "median":
        return np.sort(g, 0)[(n - 1) // 2] if args else np.median(g, 0)
    if name == "trimmed_mean":
        return np.sort(g, 0)[f : n - f].mean(0)
    if name == "geometric_median":
        z, nu = np.zeros_like(g[0]), float(args.get("smoothing", 0.1))
        for _ in range(int(args.get("iterations", 3))):
            w = [1 / max(nu, np.linalg.norm(z - one)) for one in g]
            z = sum(a * b for a, b in zip(w, g, strict=True)) / sum(w)
        return z
    if name in ("krum", "multi_krum"):
        less = 1 if "score" in args else 2
        scores = [nearest(i, range(n), n - f - less) for i in range(n)]
        m = 1 if name == "krum" else int(args.get("m", n - f - 2))
        return g[np.argsort(scores, kind="stable")[:m]].mean(0)
    if name == "bulyan":
        left, chosen = list(range(n)), []
        while len(chosen) < n - 2 * f:
            scores = [nearest(i, left, max(len(left) - f - 2, 1)) for i in left]
            chosen.append(left.pop(int(np.argmin(scores))))
        s = np.sort(g[chosen], 0)
        order = np.argsort(np.abs(s - np.median(s, 0)), axis=0, kind="stable")[: n - 4 * f]
        return np.take_along_axis(s, order, 0).mean(0)
    if name == "cge":
        kept = g[np.argsort(np.linalg.norm(g, axis=1), kind="stable")[: n - f]]
        return kept.sum(0) if "total" in args else kept.mean(0)
    if name == "centred_clipping":
        v = np.zeros_like(g[0])
        for _ in range(3):
            v = v + np.mean(
                [(one - v) * min(1, 2 / max(np.linalg.norm(one - v), 1e-30)) for one in g], 0
            )
        return v
    if name == "nnm":
        order = [
            sorted(range(n), key=lambda j: (j != i, np.linalg.norm(g[i] - g[j]), j))
            for i in range(n)
        ]
        mixed = np.array([g[sorted(one[: n - f])].mean(0) for one in order])
        return reference(text[len("nnm(") : -1].removesuffix(", f=2"), mixed)
    assert name == "clipping"
    return np.median([one * min(1, 1.5 / max(np.linalg.norm(one), 1e-30)) for one in g], 0)


def inputs():
    """Random messages, and some with colluding, far, equal or null ones."""
    for seed, n in itertools.product(range(3), (11, 12)):
        draw = np.random.default_rng(seed)
        honest = draw.normal(size=(n, 7)) + 1
        yield honest
        for bad in (1e6, 0.0, -10 * honest.mean(0), honest[4]):
            attacked = honest.copy()
            attacked[[1, 5]] = bad
            yield attacked


# The shape of all messages: each rule is compiled once, and once with a mask.
WIDTH, ROWS = 7, 16


@functools.cache
def compiled(text):
    rule = parse_rule(text)
    return jax.jit(lambda messages: rule(messages))


@functools.cache
def masked(text):
    rule = parse_rule(text)
    return jax.jit(lambda rows, present: rule.aggregate(rule.init(rows[0]), rows, present, ()))


@pytest.mark.parametrize("text", RULE_TEXTS)
def test_rules_are_those_of_their_papers(text):
    with jax.enable_x64(True):
        for g in inputs():
            expected = reference(text, g)
            np.testing.assert_allclose(
                compiled(text)(g), expected, rtol=1e-12, atol=1e-12 * max(1, abs(expected).max())
            )


#: One of each kind of score.
FEW = [text for text in RULE_TEXTS if "score=" not in text and "total" not in text]


@pytest.mark.parametrize("text", FEW)
def test_messages_that_are_not_there_do_not_count(text):
    with jax.enable_x64(True):
        for number, g in enumerate(inputs()):
            present = np.zeros(ROWS, bool)
            present[np.random.default_rng(number).permutation(ROWS)[: len(g)]] = True
            rows = np.full((ROWS, WIDTH), 7.0)
            rows[present] = g
            result, expected = masked(text)(rows, present), compiled(text)(g)
            np.testing.assert_allclose(
                result.vector, expected, rtol=1e-12, atol=1e-12 * max(1, abs(expected).max())
            )
            assert not result.share[~present].any()
            np.testing.assert_allclose(result.share.sum(), 1)


def test_less_than_half_of_few_messages_are_left_out():
    rows, present = np.zeros((ROWS, WIDTH)), np.arange(ROWS) < 4
    rows[:4] = np.arange(1, 5)[:, np.newaxis]
    with jax.enable_x64(True):
        share = masked("cge(f=2)")(rows, present).share
    np.testing.assert_allclose(share[:4], [1 / 3, 1 / 3, 1 / 3, 0])


#: What each rule promises of eleven messages, and whether one more breaks it for sure.
PROMISES = {
    "median()": 5,
    "trimmed_mean(f={f})": 5,
    "geometric_median()": 5,
    "geometric_median(iterations=3)": 5,
    "krum(f={f})": 4,
    "multi_krum(f={f})": 4,
    "bulyan(f={f})": 2,
    "cge(f={f})": 5,
    "centred_clipping(radius=1.0)": 5,
    "nnm(trimmed_mean(f={f}))": 5,
    "clipping(median())": 5,
}


@pytest.mark.parametrize("text", PROMISES)
def test_colluding_attackers_break_a_rule_beyond_its_promise(text):
    honest = np.random.default_rng(0).normal(size=(11, WIDTH))
    with jax.enable_x64(True):

        def under(f, made_for):
            g = honest.copy()
            g[:f] = 1e6
            return float(np.abs(compiled(text.format(f=made_for))(g)).max())

        most = PROMISES[text]
        assert parse_rule(text.format(f=most)).largest(11) == most
        assert all(under(f, most) < 20 for f in range(most + 1))
        if text.startswith(("median", "trimmed", "geometric_median()", "krum", "multi", "nnm")):
            # Six of eleven agree; of Krum's also where it is made for four.
            assert under(6, most) > 1e3


def test_what_is_not_finite_scores_worst():
    g = np.random.default_rng(0).normal(size=(11, WIDTH))
    for text in FEW[1:]:
        for bad in (np.nan, np.inf, -np.inf):
            spoilt = g.copy()
            spoilt[:2] = bad
            assert np.isfinite(compiled(text)(spoilt)).all(), text
    assert not np.isfinite(parse_rule("mean()")(spoilt)).any()


def test_equal_messages_tie_by_index():
    """Ten equal messages of a long vector, of which a Gram matrix would make ten different
    scores.
    """
    one = np.random.default_rng(0).normal(size=17_226).astype(np.float32)
    g = np.stack([one + 1, *[one] * 10, one - 1])
    result = parse_rule("multi_krum(f=2, m=3)").aggregate(
        (), jax.numpy.asarray(g), np.ones(12, bool), ()
    )
    np.testing.assert_array_equal(np.flatnonzero(result.share), [1, 2, 3])


def test_buckets_are_of_all_that_are_there():
    g = np.arange(8.0)[:, None] * np.ones(3)
    rule = parse_rule("bucketing(mean(), size=2)")
    np.testing.assert_allclose(rule(g, key=jax.random.key(0)), 3.5, rtol=1e-6)
    present = np.array([True] * 4 + [False] * 4)
    result = rule(g, present, jax.random.key(0))
    np.testing.assert_allclose(result, 1.5, rtol=1e-6)
    assert rule.largest(11) == 0
    assert parse_rule("bucketing(median(), size=2)").largest(11) == 2


#: What ByzFL 0.0.11 (aggregators and pre-aggregators, on NumPy arrays) makes of these messages,
#: where its form is the same: of `np.round(np.random.default_rng(7).normal(size=(11, 4)), 2)`, the
#: first times 50.
BYZFL = {
    "mean()": [-0.436363636363636, 1.07363636363636, -1.90454545454545, -4.08909090909091],
    "median()": [-0.05, -0.24, -1.23, -0.11],
    "trimmed_mean(f=2)": [-0.27, -0.307142857142857, -0.925714285714286, -0.175714285714286],
    "geometric_median(iterations=3)": [
        -0.360635456964702,
        -0.165641896009343,
        -0.858215415137797,
        -0.15111957440395,
    ],
    "krum(f=2, score=byzfl)": [0.11, 0.06, -1.23, 0.08],
    "multi_krum(f=2, m=9, score=byzfl)": [
        -0.424444444444444,
        -0.264444444444444,
        -0.945555555555555,
        0.0366666666667,
    ],
    "centred_clipping(radius=2.0)": [
        -0.388591892753199,
        -0.216880268856396,
        -0.617177746465201,
        -0.170569716844711,
    ],
    "nnm(trimmed_mean(f=2))": [
        -0.443015873015873,
        -0.275555555555556,
        -0.835714285714286,
        0.0280952380952381,
    ],
    "clipping(median(), radius=1.5)": [-0.0466396626341948, -0.158959376719543, -0.58, -0.11],
}


@pytest.mark.parametrize("text", BYZFL)
def test_rules_are_those_of_byzfl_where_its_form_is_the_same(text):
    messages = np.round(np.random.default_rng(7).normal(size=(11, 4)), 2)
    messages[0] *= 50
    with jax.enable_x64(True):
        np.testing.assert_allclose(compiled(text)(messages), BYZFL[text], rtol=0, atol=2e-13)


def distances_sum(point, messages):
    return np.linalg.norm(messages - np.asarray(point), axis=1).sum()


@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e4])
@pytest.mark.parametrize("number", [0, 4, 8])
def test_the_geometric_median_has_the_least_sum_of_distances(number, scale):
    """Gradients of any length; the least sum is that of 3,000 unsmoothed steps of Weiszfeld's
    algorithm.
    """
    g = list(inputs())[3 * number] * scale
    z = np.median(g, axis=0) + 1e-9 * scale
    for _ in range(3_000):
        w = 1 / np.maximum(np.linalg.norm(g - z, axis=1), 1e-12 * scale)
        z = w @ g / w.sum()
    with jax.enable_x64(True):
        result = compiled("geometric_median()")(g)
    assert distances_sum(result, g) <= distances_sum(z, g) * (1 + 1e-5)


# Attacks

WORKERS = 8


@functools.cache
def trace(policy="barrier()", commits=160, workers=WORKERS, compute="gamma(mean=1, cv=0.3)"):
    return simulate(
        Cluster(workers=workers, compute=compute, service=0.01, policy=policy),
        commits=commits,
        seed=0,
    )


@functools.cache
def quadratic():
    return problems.quadratic(np.linspace(0.2, 1, 4), noise=0.3)


def central(run):
    return ravel_pytree(run.params)[0]


@pytest.mark.parametrize(
    ("n", "f", "z"),
    [(50, 5, 0.0837), (50, 24, 1.4261), (51, 12, 0.3612), (25, 11, 1.0676), (10, 2, 0.0)],
)
def test_z_of_a_little_is_enough(n, f, z):
    assert round(alie_z(n, f), 4) == z
    assert bool(parse_attack(f"alie(workers={f})").weakness(n)) == (z == 0)


def test_an_attack_that_sends_the_mean_is_warned_of():
    method, problem = methods.robust("median()", 0.1), quadratic()
    with pytest.warns(
        WeakAttackWarning, match=r"attack = 'alie\(workers=2\)': with 2 of 8 workers z is 0"
    ):
        replay(trace(commits=16), method, problem, attack="alie(workers=2)")
    with pytest.warns(WeakAttackWarning, match="z is 0"):
        rates = [0.1, 0.2]
        given = dict(seeds=[0], learning_rate=rates, attack="alie(workers=3, z=0)", batched=True)
        replay_ensemble(trace(commits=16), methods.batch_sgd, problem, **given)
    assert not parse_attack("alie(workers=2, z=0.5)").weakness(WORKERS)


def test_attacks_by_hand():
    g = np.random.default_rng(0).normal(size=(6, 3))
    byzantine, honest = np.arange(6) < 2, np.arange(6) >= 2
    mean, std = g[2:].mean(0), g[2:].std(0)

    def made(text):
        with jax.enable_x64(True):
            return np.asarray(
                parse_attack(text).change(jnp.asarray(g), honest, byzantine, jax.random.key(0))
            )

    np.testing.assert_allclose(made("alie(workers=2, z=1.5)")[0], mean - 1.5 * std)
    np.testing.assert_allclose(
        made("alie(workers=2, z=1, knows=own)")[1], g[:2].mean(0) - g[:2].std(0), atol=1e-14
    )
    np.testing.assert_allclose(made("inner_product(workers=2, scale=0.5)")[1], -0.5 * mean)
    np.testing.assert_allclose(made("mimic(workers=2, target=4)")[0], g[4])
    np.testing.assert_allclose(made("mimic(workers=2)")[0], g[2])
    sent = made("min_max(workers=2)")[0]
    apart = [np.linalg.norm(a - b) for a in g[2:] for b in g[2:]]
    np.testing.assert_allclose(max(np.linalg.norm(sent - one) for one in g[2:]), max(apart))
    np.testing.assert_allclose(np.cross(sent - mean, std), 0, atol=1e-12)
    np.testing.assert_array_equal(made("min_max(workers=2)")[2:], g[2:])


def test_a_round_by_hand():
    """Robust SGD with its momenta, averages and an attack of one's own, in a loop over the
    rounds.
    """

    def reverse(workers, scale=3.0):
        def change(messages, honest, byzantine, key):
            mean = jnp.mean(messages, axis=0, where=honest[:, None])
            return jnp.where(byzantine[:, None], -scale * mean, messages)

        return Attack(workers, change=change, text=f"reverse(workers={workers})")

    problem = problems.quadratic(np.linspace(0.2, 1, 4))
    method = methods.robust(
        "cge(f=2, averaging=0.5)", 0.3, worker_momentum=0.5, server_momentum=0.25
    )
    run = replay(
        trace(),
        method,
        problem,
        attack=reverse(2),
        precision="float64",
        record=[recorders.chosen()],
    )
    with jax.enable_x64(True):
        theta = np.asarray(ravel_pytree(problem.init(jax.random.key(0)))[0], float)
    m, h, v = np.zeros((WORKERS, 4)), np.zeros((WORKERS, 4)), np.zeros(4)
    for _ in range(160 // WORKERS):
        m = 0.5 * m + np.linspace(0.2, 1, 4) * theta
        h = 0.5 * h + 0.5 * m
        g = h.copy()
        g[:2] = -3 * h[2:].mean(0)
        v = 0.25 * v + g[np.argsort(np.linalg.norm(g, axis=1), kind="stable")[: WORKERS - 2]].mean(
            0
        )
        theta = theta - 0.3 * v
    np.testing.assert_allclose(central(run), theta, rtol=1e-6)
    assert run.config["attack"] == "reverse(workers=2)"
    assert run.commits["byzantine_share"].max() == 0
    assert run.commits["byzantine_messages"].iloc[-1] == 0.25


def test_what_is_not_finite_is_counted():
    given = dict(attack="infinite(workers=[1, 5])", record=[recorders.chosen()])
    run = replay(trace(), methods.robust("median()", 0.2), quadratic(), **given)
    assert run.status == "finished"
    assert run.commits["not_finite"].iloc[-1] == 2
    assert (
        replay(trace(), methods.batch_sgd(0.2), quadratic(), attack="infinite(workers=1)").status
        == "diverged"
    )


@pytest.mark.parametrize(
    "method", [methods.clipped_gossip(0.1), methods.robust_gossip("median()", 0.1)]
)
def test_robust_gossip_leaves_out_messages_that_are_not_finite(method):
    cluster = Cluster(
        6, "gamma(mean=1, cv=0.3)", topology="complete()", policy=method.timing.policy
    )
    given = dict(attack="infinite(workers=1)", precision="float64")
    run = replay(simulate(cluster, 60, 0), method, quadratic(), **given)
    assert run.status == "finished"
    assert run.evaluations["train_loss"].iloc[-1] < run.evaluations["train_loss"].iloc[0]


@pytest.mark.parametrize("name", ["lsgd", "mem_sgd"])
def test_methods_can_be_attacked(name):
    """What Byzantine workers send changes the run, and what nobody changes does not."""
    method = methods.METHODS[name]()
    own = simulate(Cluster(workers=4, compute="gamma(mean=1, cv=0.3)"), commits=48, seed=0)
    honest = replay(own, method, quadratic(), precision="float64")

    def nothing(workers):
        return Attack(
            workers,
            corrupt=lambda message, key: message,
            change=lambda messages, *_: messages,
            text="nothing()",
        )

    attacked = replay(
        own, method, quadratic(), precision="float64", attack="sign_flip(workers=1, scale=0.5)"
    )
    assert np.abs(central(attacked) - central(honest)).max() > 1e-9
    try:
        same = replay(own, method, quadratic(), precision="float64", attack=nothing(1))
    except InputError as error:
        assert "vectors of parameters" in str(error)
        return
    np.testing.assert_allclose(central(same), central(honest), rtol=1e-9)


def test_labels_are_flipped_for_byzantine_workers_alone():
    """With all but one worker's data alike, the run is that of a problem whose labels are reversed
    for them.
    """
    plain = problems.digits(batch_size=8, hidden=(4,), split="even")
    label = plain.train["label"].copy()
    label[0::WORKERS] = 9 - label[0::WORKERS]
    flipped = dataclasses.replace(plain, train={**plain.train, "label": label})
    rounds, method = trace(commits=16), methods.robust("mean()", 0.3)
    runs = [
        replay(rounds, method, plain, attack="label_flip(workers=1)"),
        replay(rounds, method, flipped),
    ]
    np.testing.assert_array_equal(central(runs[0]), central(runs[1]))
    start = Replay(rounds, method, plain).evaluate()["train_loss"]
    assert runs[0].evaluations["train_loss"].iloc[0] == pytest.approx(start)
