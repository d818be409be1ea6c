"""The laws: what each states is what its samples do, and its text reads back to itself."""

import math
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from asyncsim.clusters.laws import (
    Constant,
    Empirical,
    Exponential,
    Gamma,
    HalfNormal,
    Law,
    LogNormal,
    Mixture,
    Pareto,
    Uniform,
    Weibull,
    parse,
    scaled,
)

SAMPLES = 200_000

# SciPy's parametrisations of the same laws: an independent source of means, deviations and
# kurtoses.
REFERENCES = [
    (Exponential(mean=0.3), stats.expon(scale=0.3)),
    (Gamma(mean=2.0, cv=0.2), stats.gamma(25, scale=2 / 25)),
    (Gamma(mean=0.5, cv=1.5), stats.gamma(1 / 2.25, scale=0.5 * 2.25)),
    (
        LogNormal(mean=2.0, cv=0.5),
        stats.lognorm(math.sqrt(math.log(1.25)), scale=2 / math.sqrt(1.25)),
    ),
    (Uniform(low=0.5, high=1.75), stats.uniform(0.5, 1.25)),
    (Weibull(mean=1.0, shape=0.7), stats.weibull_min(0.7, scale=1 / math.gamma(1 + 1 / 0.7))),
    (Weibull(mean=3.0, shape=2.5), stats.weibull_min(2.5, scale=3 / math.gamma(1 + 1 / 2.5))),
    (Pareto(mean=1.0, shape=5.0), stats.pareto(5, scale=0.8)),
    (HalfNormal(low=2.0, scale=0.5), stats.halfnorm(2.0, 0.5)),
]

WITHOUT_REFERENCE = [
    Constant(0.25),
    Empirical([1.0, 1.0, 2.0, 7.5]),
    Mixture([Gamma(1.0, 0.2), Constant(10.0), Exponential(2.0)], [90, 1, 9]),
    Pareto(mean=1.0, shape=1.5),
    Pareto(mean=1.0, shape=2.0),
]

EVERY_LAW = [law for law, _ in REFERENCES] + WITHOUT_REFERENCE


def draw(law: Law, size: int = SAMPLES) -> np.ndarray:
    return law.sample(np.random.default_rng(20), size)


@pytest.mark.parametrize(("law", "reference"), REFERENCES, ids=[str(law) for law, _ in REFERENCES])
def test_stated_moments_and_the_cdf_are_exact(law, reference):
    assert law.mean == pytest.approx(reference.mean(), rel=1e-12)
    assert law.std == pytest.approx(reference.std(), rel=1e-12)
    x = np.concatenate([[-1.0, 0.0], reference.ppf(np.linspace(0.001, 0.999, 50)), [np.inf]])
    np.testing.assert_allclose(law.cdf(x), reference.cdf(x), rtol=1e-10, atol=1e-14)


def test_mixture_states_the_moments_of_its_parts():
    law = Mixture([Exponential(2.0), Constant(10.0)], [3, 1])
    raw = [0.75 * math.factorial(k) * 2.0**k + 0.25 * 10.0**k for k in range(3)]  # E X**k
    mean, std = raw[1], math.sqrt(raw[2] - raw[1] ** 2)
    assert law.mean == pytest.approx(mean, rel=1e-14)
    assert law.std == pytest.approx(std, rel=1e-14)


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
    samples = law.sample(np.random.default_rng(0), (3, 4))
    assert (samples.shape, samples.dtype) == ((3, 4), np.float64)
    assert np.all(samples >= 0)
    assert law.sample(np.random.default_rng(0), 0).shape == (0,)
    assert law.cdf(np.ones((2, 3))).shape == (2, 3)
    assert np.ndim(law.cdf(1.0)) == 0
    assert law.cdf(-1.0) == 0.0
    assert law.cdf(np.inf) == pytest.approx(
        1.0, abs=1e-15
    )  # a mixture's shares add up to 1 but for rounding


seconds = st.floats(1e-6, 1e6)
simple_laws = st.one_of(
    st.builds(Constant, st.floats(0, 1e6)),
    st.builds(Exponential, seconds),
    st.builds(Gamma, seconds, st.floats(1e-3, 100)),
    st.builds(LogNormal, seconds, st.floats(1e-3, 100)),
    st.tuples(seconds, seconds)
    .filter(lambda pair: pair[0] < pair[1])
    .map(lambda pair: Uniform(*pair)),
    st.builds(Weibull, seconds, st.floats(0.1, 100)),
    st.builds(Pareto, seconds, st.floats(1.001, 100)),
    st.builds(HalfNormal, seconds, seconds),
    st.builds(Empirical, st.lists(st.floats(0, 1e6), min_size=1, max_size=5)),
)
parts = st.lists(st.tuples(simple_laws, st.floats(1e-3, 1e3)), min_size=1, max_size=4)
any_law = simple_laws | parts.map(lambda pairs: Mixture(*zip(*pairs, strict=True)))


@given(any_law)
def test_text_reads_back_to_an_equal_law(law):
    assert parse(str(law)) == law
    assert parse(repr(law)) == law


@given(any_law, st.lists(seconds, min_size=2, max_size=10))
def test_cdf_is_monotone_within_zero_and_one(law, x):
    values = law.cdf(np.sort(x))
    assert np.all(np.diff(values) >= -1e-15)
    assert np.all((values >= 0) & (values <= 1))


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


def test_laws_load_without_heavy_packages():
    code = (
        "import asyncsim.clusters.laws, sys; print({'jax', 'scipy', 'pandas', 'matplotlib'} & "
        "set(sys.modules))"
    )
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert loaded.stdout.strip() == "set()"
