"""Prescribed staleness: the stated values, clipped at the start, as an ordinary trace."""

import numpy as np
import pytest

from asyncsim.clusters.laws import Constant, Exponential, Gamma, Mixture
from asyncsim.traces.prescription import prescribed

# Beyond 5 standard errors with probability 6e-7; the seeds are fixed besides.
K_SIGMA = 5.0


def test_constant_delay_by_hand():
    frame = prescribed(staleness=2, commits=5, workers=2, window=3).frame
    expected = {
        "commit": [0, 1, 2, 3, 4],
        "worker": [0, 1, 0, 1, 0],
        "job": [0, 0, 1, 1, 2],
        "local_steps": [3, 3, 3, 3, 3],
        "read_version": [0, 0, 0, 1, 2],
        "read_time": [0.0, 0.0, 0.0, 0.5, 1.0],
        "start_time": [0.0, 0.0, 0.0, 0.5, 1.0],
        "push_version": [0, 1, 2, 3, 4],
        "commit_time": [0.5, 1.0, 1.5, 2.0, 2.5],
        "staleness": [0, 1, 2, 2, 2],
        "version": [1, 2, 3, 4, 5],
        "outcome": ["applied"] * 5,
    }
    for name, column in expected.items():
        assert frame[name].tolist() == column, name


@pytest.mark.parametrize("stated", [3.0, Constant(3), np.full(40, 3)])
def test_one_delay_in_many_forms(stated):
    expected = np.minimum(np.arange(40), 3)
    np.testing.assert_array_equal(
        prescribed(stated, commits=40, workers=4).frame["staleness"], expected
    )


def test_a_list_is_taken_as_it_is_and_clipped_to_the_commit_index():
    trace = prescribed([5, 0, 10**18, 1, 4], commits=5, workers=2)
    assert trace.frame["staleness"].tolist() == [0, 0, 2, 1, 4]


@pytest.mark.parametrize("law", [Gamma(9, 0.5), Mixture([Constant(2), Constant(20)], [0.5, 0.5])])
def test_a_law_is_rounded_to_the_nearest_whole_number(law):
    commits, skipped = 20_000, 500
    staleness = prescribed(law, commits, workers=10).frame["staleness"].to_numpy()[skipped:]
    draws = law.sample(np.random.default_rng(1), 400_000)
    rounded = np.rint(draws)
    standard_error = rounded.std() * np.sqrt(1 / len(staleness) + 1 / len(rounded))
    assert abs(staleness.mean() - rounded.mean()) < K_SIGMA * standard_error


def test_a_law_without_variance_does_not_overflow():
    staleness = (
        prescribed("pareto(mean=50, shape=1.05)", commits=3_000, workers=3)
        .frame["staleness"]
        .to_numpy()
    )
    assert (staleness >= 0).all()
    assert (staleness <= np.arange(3_000)).all()


def test_a_longer_trace_starts_like_a_shorter_one():
    law = Mixture([Gamma(2, 0.5), Exponential(20)], [0.5, 0.5])
    short, long = (prescribed(law, commits, workers=7, seed=3).frame for commits in (1_500, 4_000))
    assert short.equals(long.iloc[:1_500])


def test_draws_do_not_come_back():
    staleness = (
        prescribed("exponential(20)", commits=4_096, workers=7).frame["staleness"].to_numpy()
    )
    # Of 1024 pairs of independent draws from this law 1 in 40 are equal: far from half of them.
    for lag in (512, 1_024, 2_048):
        assert (staleness[1_024:2_048] == staleness[1_024 + lag : 2_048 + lag]).mean() < 0.5
