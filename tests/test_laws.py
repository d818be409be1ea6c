"""Laws, clusters and the call syntax of texts: what each states is what it does, and its text reads
back to itself.
"""

import json
import math

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy import stats

from asyncsim import Cluster, InputError
from asyncsim.base.calls import Call, bind, form_of, read, split
from asyncsim.clusters.laws import (
    Constant,
    Empirical,
    Exponential,
    Gamma,
    HalfNormal,
    LogNormal,
    Mixture,
    Pareto,
    Uniform,
    Weibull,
    parse,
    scaled,
)
from asyncsim.clusters.policy import as_policy
from asyncsim.clusters.workers import HeterogeneityWarning
from asyncsim.methods import METHODS
from asyncsim.problems import PROBLEMS
from asyncsim.study.entries import entry_of, swept

# Laws

SAMPLES = 200_000


def as_scipy(law):
    """Return SciPy's law: an independent source of moments, probabilities and densities."""
    match law:
        case Exponential(mean):
            return stats.expon(scale=mean)
        case Gamma(mean, cv):
            return stats.gamma(cv**-2, scale=mean * cv**2)
        case LogNormal(mean, cv):
            return stats.lognorm(math.sqrt(math.log1p(cv**2)), scale=mean / math.hypot(1, cv))
        case Uniform(low, high):
            return stats.uniform(low, high - low)
        case Weibull(mean, shape):
            return stats.weibull_min(shape, scale=mean / math.gamma(1 + 1 / shape))
        case Pareto(mean, shape):
            return stats.pareto(shape, scale=mean * (1 - 1 / shape))
        case HalfNormal(low, scale):
            return stats.halfnorm(low, scale)


WITH_REFERENCE = [
    Exponential(mean=0.3),
    Gamma(mean=2.0, cv=0.2),
    Gamma(mean=0.5, cv=1.5),
    LogNormal(mean=2.0, cv=0.5),
    Uniform(low=0.5, high=1.75),
    Weibull(mean=1.0, shape=0.7),
    Weibull(mean=3.0, shape=2.5),
    Pareto(mean=1.0, shape=5.0),
    HalfNormal(low=2.0, scale=0.5),
]
WITHOUT_REFERENCE = [
    Constant(0.25),
    Empirical([1.0, 1.0, 2.0, 7.5]),
    Mixture([Gamma(1.0, 0.2), Constant(10.0), Exponential(2.0)], [90, 1, 9]),
    Pareto(mean=1.0, shape=1.5),
    Pareto(mean=1.0, shape=2.0),
]

EVERY_LAW = WITH_REFERENCE + WITHOUT_REFERENCE


def draw(law, size=SAMPLES):
    return law.sample(np.random.default_rng(20), size)


@pytest.mark.parametrize("law", WITH_REFERENCE, ids=str)
def test_stated_moments_and_the_cdf_are_exact(law):
    reference = as_scipy(law)
    expected = reference.mean(), reference.std()
    assert (law.mean, law.std) == pytest.approx(expected, rel=1e-12)
    x = np.concatenate([[-1.0, 0.0], reference.ppf(np.linspace(0.001, 0.999, 50)), [np.inf]])
    np.testing.assert_allclose(law.cdf(x), reference.cdf(x), rtol=1e-10, atol=1e-14)


def test_mixture_states_the_moments_of_its_parts():
    law = Mixture([Exponential(2.0), Constant(10.0)], [3, 1])
    mean, square = 0.75 * 2 + 0.25 * 10, 0.75 * 2 * 2**2 + 0.25 * 10**2
    assert (law.mean, law.std) == pytest.approx((mean, math.sqrt(square - mean**2)), rel=1e-14)


@pytest.mark.parametrize("shape", [1.01, 2.0])
def test_pareto_without_variance_says_so(shape):
    assert Pareto(mean=2.0, shape=shape).mean == 2.0
    assert Pareto(mean=2.0, shape=shape).std == math.inf
    assert Mixture([Pareto(2.0, shape), Constant(1.0)], [1, 9]).std == math.inf


@pytest.mark.parametrize("law", EVERY_LAW, ids=str)
def test_samples_follow_the_cdf(law):
    """Kolmogorov-Smirnov; the Dvoretzky-Kiefer-Wolfowitz bound fails once in 1e6, atoms or not."""
    samples = np.sort(draw(law))
    bound = math.sqrt(math.log(2 / 1e-6) / (2 * SAMPLES))
    at = np.searchsorted(samples, samples, side="right") / SAMPLES
    below = np.searchsorted(samples, samples, side="left") / SAMPLES
    assert np.max(np.abs(at - law.cdf(samples))) < bound
    assert np.max(np.abs(below - law.cdf(np.nextafter(samples, -1.0)))) < bound


@pytest.mark.parametrize("law", EVERY_LAW, ids=str)
def test_shapes_and_range(law):
    samples = draw(law, (3, 4))
    assert (samples.shape, samples.dtype) == ((3, 4), np.float64) and (samples >= 0).all()
    assert draw(law, 0).shape == (0,)
    assert law.cdf(np.ones((2, 3))).shape == (2, 3)
    assert np.ndim(law.cdf(1.0)) == 0
    assert law.cdf(-1.0) == 0.0
    # A mixture's shares add up to 1 but for rounding.
    assert law.cdf(np.inf) == pytest.approx(1.0, abs=1e-15)


seconds = st.floats(1e-6, 1e6)
simple_laws = st.one_of(
    st.builds(Constant, st.floats(0, 1e6)),
    st.builds(Exponential, seconds),
    st.builds(Gamma, seconds, st.floats(1e-3, 100)),
    st.builds(LogNormal, seconds, st.floats(1e-3, 100)),
    st.builds(lambda low, width: Uniform(low, low + width), seconds, seconds),
    st.builds(Weibull, seconds, st.floats(0.1, 100)),
    st.builds(Pareto, seconds, st.floats(1.001, 100)),
    st.builds(HalfNormal, seconds, seconds),
    st.builds(Empirical, st.lists(st.floats(0, 1e6), min_size=1, max_size=5)),
)
parts = st.lists(st.tuples(simple_laws, st.floats(1e-3, 1e3)), min_size=1, max_size=4)
any_law = simple_laws | parts.map(lambda pairs: Mixture(*zip(*pairs, strict=True)))


@given(any_law, st.lists(seconds, min_size=2, max_size=10))
def test_texts_of_laws_are_read_back_and_their_cdf_is_monotone(law, x):
    assert parse(str(law)) == parse(repr(law)) == law
    values = law.cdf(np.sort(x))
    assert (np.diff(values) >= -1e-15).all() and (values >= 0).all() and (values <= 1).all()


@pytest.mark.parametrize(
    ("text", "law"),
    [
        ("gamma(mean=1, cv=0.2)", Gamma(1, 0.2)),
        (" Gamma( 1, .2 ) ", Gamma(1, 0.2)),
        ("0.005", Constant(0.005)),
        ("mixture([1, exponential(2)], [9, 1])", Mixture([Constant(1), Exponential(2)], [9, 1])),
        ("empirical([0.5] * 2 + [1])", Empirical([0.5, 0.5, 1])),
        ("[gamma(1, 0.2)] * 2 + [constant(3)] * 1", [Gamma(1, 0.2), Gamma(1, 0.2), Constant(3)]),
        ("2 * [0.1]", [Constant(0.1), Constant(0.1)]),
    ],
)
def test_parse(text, law):
    assert parse(text) == law


@pytest.mark.parametrize("law", EVERY_LAW, ids=str)
def test_a_scaled_law_is_that_of_scaled_durations(law):
    shorter = scaled(law, 0.25)
    assert type(shorter) is type(law)
    np.testing.assert_allclose(draw(shorter, 1_000), 0.25 * draw(law, 1_000), rtol=1e-12)


def test_many_samples_are_not_all_shown():
    many = Empirical([0.5] * 1_000 + [2.5] * 1_000)
    assert repr(many) == "<Empirical: 2,000 samples from 0.5 to 2.5 s, mean 1.5 s>"


# Clusters


def test_a_law_per_worker_from_an_array():
    assert Cluster(2, np.array([1, 2.5])) == Cluster(2, [1.0, 2.5])
    assert Cluster(2, 1.0, latency=np.array([0.1, 0.2])) == Cluster(2, 1.0, latency=(0.1, 0.2))
    assert Cluster(2, np.array(2.0)) == Cluster(2, 2.0)


def test_equal_speeds_are_said_aloud_and_are_one_law():
    message = r"all 3 are .*changes nothing; give one law"
    with pytest.warns(HeterogeneityWarning, match=message) as caught:
        cluster = Cluster(3, [Gamma(1, 0.2)] * 3)
    assert caught[0].filename == __file__
    assert cluster == Cluster(3, Gamma(1, 0.2))


@pytest.mark.parametrize(
    ("network", "up", "down"),
    [
        ({}, 0.0, 0.0),
        ({"bandwidth": 8.0, "message_bytes": 4}, 0.5, 0.5),
        ({"bandwidth": 8.0, "message_bytes": [1, 4]}, 0.125, 0.5),
    ],
)
def test_transfers(network, up, down):
    cluster = Cluster(1, 1.0, **network)
    assert (cluster.transfer_up, cluster.transfer_down) == (up, down)
    assert Cluster.from_dict(json.loads(json.dumps(cluster.to_dict()))) == cluster


# Calls


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("2", 2),
        ("-0.5", -0.5),
        ("None", None),
        ("'a, b'", "a, b"),
        ("[1] * 2 + [x]", [1, 1, Call("x")]),
        ("f()", Call("f", brackets=True)),
        (
            "f(1, b=g(c=h))",
            Call("f", (1,), (("b", Call("g", (), (("c", Call("h")),), True)),), True),
        ),
    ],
)
def test_what_texts_stand_for(text, value):
    assert read(text, "a thing", "f(1)") == value
    if isinstance(value, Call):
        assert str(value) == text


@pytest.mark.parametrize(
    ("texts", "entries"),
    [
        ("a,b", ["a", "b"]),
        (("a, ", "b(c=[1, 2], d='x,y')", 3), ["a", "b(c=[1, 2], d='x,y')", 3]),
        ("a(b, c", ["a(b, c"]),
        (")a,b", [")a", "b"]),
        ("'a,b", ["'a,b"]),
        (" , ", []),
    ],
)
def test_texts_are_split_outside_of_brackets(texts, entries):
    assert split(texts) == entries


def test_forms_and_arguments():
    def function(a, b=2, *others, c=None, **more):
        pass

    assert form_of(function) == "function(a, b=2, c)"
    assert bind(Call("function", (1,), (("c", 3),)), function, "x") == {"a": 1, "c": 3}
    with pytest.raises(InputError, match=r"^x: a missing; write function\(a, b=2, c\)$"):
        bind(Call("function"), function, "x")
    with pytest.raises(InputError, match=r"^x: a is given twice"):
        bind(Call("function", (1,), (("a", 1),)), function, "x")


def test_entries_with_several_lists_are_all_combinations():
    entry = entry_of("methods", "gem(kappa=[1, 2], momentum=[0.5, 0.9], variant=paper)", METHODS)
    arguments = [dict(method.arguments) for method in swept(entry)]
    pairs = [(method["kappa"], method["momentum"]) for method in arguments]
    assert pairs == [(1, 0.5), (1, 0.9), (2, 0.5), (2, 0.9)]
    assert {method["variant"] for method in arguments} == {"paper"}


#: Pieces that texts of users are made of, and what breaks parsers.
WORDS = ["gem", "kappa", "digits", "x.py:f", "gamma", "first_of", "2", "1e9", "None", "**"]
PIECES = st.sampled_from([*"()[]{},=*+-.:'\" /\\\n\0", *WORDS])


@settings(max_examples=60)
@given(st.lists(PIECES, max_size=12).map("".join))
@example("-" * 5_000 + "1")
@example("gem(" * 500)
@example("[[" * 50 + "]]" * 50)
@example("gem(kappa=" + "9" * 5_000 + ")")
def test_texts_are_read_or_refused(text):
    for reader in (
        parse,
        as_policy,
        split,
        lambda text: entry_of("methods", text, METHODS),
        lambda text: entry_of("problem", text, PROBLEMS),
    ):
        try:
            reader(text)
        except InputError as error:
            assert 0 < len(str(error)) < 1_500
