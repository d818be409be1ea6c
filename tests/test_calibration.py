"""Calibration: the laws of a known cluster are found again from its trace, workers that die too."""

import dataclasses

import numpy as np
import pytest
import scipy.stats
from edits import with_columns, without_cluster
from test_laws import as_scipy

from asyncsim import Cluster, InputError, calibrate, failures, recorded, simulate
from asyncsim.calibration import CalibrationWarning, examine
from asyncsim.calibration.fitting import fit, uncensored
from asyncsim.clusters.laws import (
    Constant,
    Empirical,
    Exponential,
    Gamma,
    LogNormal,
    Mixture,
    Pareto,
    Uniform,
    Weibull,
    scaled,
)
from asyncsim.traces.bookkeeping import COMMIT_RECORD
from asyncsim.traces.durations import deaths, times_of

#: Standard errors that an estimate may be off: exceeded once in two thousand draws; seeds are
#: fixed.
ERRORS = 3.5
LAWS = [
    Exponential(0.7),
    Gamma(2.0, 0.3),
    LogNormal(0.5, 0.8),
    Uniform(0.2, 0.6),
    Weibull(1.0, 3.0),
    Pareto(1.0, 4.0),
]


def stretched(trace, factor, first):
    """Return a trace of which all times after a commit pass so many times more slowly."""
    since = trace.frame["commit_time"].iloc[first]
    tables = {name: getattr(trace, name).copy() for name in ("steps", "reads", "messages")}
    for table in tables.values():
        for name in table.columns[table.columns.str.endswith("time")]:
            later = since + factor * (table[name] - since)
            table[name] = table[name].where(table[name] <= since, later)
    return dataclasses.replace(without_cluster(trace), **tables)


def assert_fit(fit_of_cluster, quantity, law):
    """The family and, within its standard error, the mean."""
    error = fit_of_cluster.table.set_index("what").loc[quantity, "error"]
    (estimate,) = (part.fit.law for part in fit_of_cluster.parts if part.name == quantity)
    assert type(estimate) is type(law), f"{quantity}: {estimate}"
    assert abs(estimate.mean - law.mean) <= ERRORS * np.nan_to_num(error) + 1e-9
    assert estimate.std == pytest.approx(law.std, rel=0.15, abs=1e-9)


@pytest.mark.parametrize("law", LAWS, ids=str)
def test_laws_of_a_known_cluster(law):
    """Compute, service and the way down of the same family, at two scales."""
    cluster = Cluster(4, law, service=scaled(law, 0.05), latency=(0.0, law))
    known = examine(without_cluster(simulate(cluster, 3_000, seed=5)))
    assert_fit(known, "compute", law)
    assert_fit(known, "service", cluster.service)
    assert_fit(known, "latency down", law)
    assert known.notes == () and known.cluster.workers == 4
    assert (known.cluster.protocol, known.cluster.discipline) == ("exchange", "fifo")


def test_constants_are_exact_and_each_worker_has_its_own():
    cluster = Cluster(3, [2.0, 3.0, 5.0], service=0.25, latency=(0.0, 0.125))
    assert calibrate(without_cluster(simulate(cluster, 300))) == cluster


WRITE_FIRST = {"protocol": "write_then_read"}
SEPARATE = {"protocol": "read_then_write", "exclusive": False}
UNTIMED = {"send_time": np.nan}  # a trace that does not tell when messages set off
UP_AND_DOWN = ("gamma(1, 0.3)", 0.01, ("exponential(0.5)", 0.25))
SLOW_UP = ("gamma(1, 0.3)", "exponential(0.02)", ("uniform(0.2, 0.3)", 0.1))
RANKED = {"discipline": "lowest_rank", **WRITE_FIRST}


@pytest.mark.parametrize(
    ("cluster", "without_columns"),
    [
        (Cluster(4, *UP_AND_DOWN), {}),
        (Cluster(4, *UP_AND_DOWN, **WRITE_FIRST), {}),
        (Cluster(8, "exponential(1)", "exponential(0.06)", **RANKED), UNTIMED),
        (Cluster(5, *SLOW_UP, **SEPARATE), {}),
        (Cluster(5, *SLOW_UP, **SEPARATE), UNTIMED),
    ],
)
def test_a_cluster_is_found_again(cluster, without_columns):
    trace = simulate(cluster, 2_000, seed=3)
    known = examine(without_cluster(with_columns(trace, **without_columns)))
    assert_fit(known, "latency up", cluster.latency_up)
    assert_fit(known, "latency down", cluster.latency_down)
    assert_fit(known, "service", cluster.service)
    compute = known.cluster.compute
    assert compute.mean == pytest.approx(cluster.compute.mean, rel=0.05)
    assert compute.std == pytest.approx(cluster.compute.std, rel=0.05)
    for name in ("protocol", "discipline", "exclusive", "bandwidth"):
        assert getattr(known.cluster, name) == getattr(cluster, name)
    visits = known.table.set_index("what").loc["service", "samples"]
    assert visits > 3_900 if trace.separate_reads else visits < 2_000  # reads are services, too


def test_one_law_for_all_or_one_each():
    laws = ["gamma(1, 0.3)"] * 3 + ["gamma(1.5, 0.3)"]
    trace, alike = (simulate(Cluster(4, compute, 0.01), 800) for compute in (laws, laws[0]))
    means = [law.mean for law in calibrate(trace).compute_laws]
    assert means == pytest.approx([1, 1, 1, 1.5], rel=0.1)
    assert isinstance(calibrate(trace, per_worker=False).compute, LogNormal | Gamma | Weibull)
    assert isinstance(calibrate(alike).compute, Gamma)
    assert isinstance(calibrate(alike, law="empirical").compute, Empirical)
    for each in (calibrate(trace, law="empirical"), calibrate(alike, per_worker=True)):
        assert len(set(each.compute_laws)) == 4


def test_requests_to_read_carry_no_parameters():
    """Messages with parameters take longer than those without: that is no part of the latency of
    both.
    """
    form = {**SEPARATE, "bandwidth": 100.0, "message_bytes": (10.0, 30.0)}
    constant = simulate(Cluster(4, 1.0, 0.01, **form), 800)
    assert calibrate(constant).latency == Constant(0.0)
    rates = [
        trace.summary()["throughput"] for trace in (constant, simulate(calibrate(constant), 800))
    ]
    assert rates[0] == pytest.approx(rates[1], rel=1e-9)
    cluster = Cluster(4, "gamma(1, 0.3)", 0.01, ("exponential(0.1)", "gamma(0.3, 0.5)"), **form)
    known = examine(simulate(cluster, 3_000, seed=0))
    assert_fit(known, "latency up", cluster.latency_up)
    assert_fit(known, "latency down", cluster.latency_down)
    both = cluster.transfer_up + cluster.transfer_down
    assert 2 * known.cluster.transfer_up == pytest.approx(both, rel=0.1)


def test_a_known_way_up_is_taken_out():
    trace = simulate(Cluster(4, "gamma(1, 0.3)", 0.01, (0.5, 0.25)), 2_000, seed=0)
    silent = without_cluster(with_columns(trace, send_time=np.nan))
    assert calibrate(silent).compute.mean == pytest.approx(1.5, rel=0.02)
    known = calibrate(silent, latency_up=0.5)
    assert calibrate(trace, latency_up=0.5) == known
    assert type(known.compute) is Gamma
    assert (known.compute.mean, known.compute.cv) == pytest.approx((1.0, 0.3), rel=0.05)
    assert known.latency_up == Constant(0.5)
    assert known.latency_down.mean == pytest.approx(0.25)


def test_the_law_of_a_local_step():
    known = calibrate(simulate(Cluster(4, "gamma(1, 0.5)", 0.1, window=4), 2_000, seed=0))
    assert known.window == 4
    assert (known.compute.mean, known.compute.cv) == pytest.approx((1.0, 0.5), rel=0.05)


@pytest.mark.parametrize(
    ("discipline", "other"),
    [("fifo", "lowest_rank"), ("lowest_rank", "random"), ("random", "fifo")],
)
def test_the_discipline_is_seen_in_the_order_of_service(discipline, other):
    cluster = Cluster(8, "gamma(1, 0.3)", 0.15, discipline=discipline)
    trace = without_cluster(simulate(cluster, 500, seed=0))
    assert calibrate(trace, per_worker=False).discipline == discipline
    message = rf"discipline = '{other}': the order of service says '{discipline}': of \d+ "
    with pytest.raises(InputError, match=message):
        calibrate(trace, per_worker=False, discipline=other)


def test_a_recorded_trace_calibrates_as_the_simulated_one():
    trace = simulate(Cluster(4, "gamma(1, 0.3)", "exponential(0.1)", 0.05), 500, seed=0)
    assert calibrate(recorded(trace.frame[list(COMMIT_RECORD)])) == calibrate(trace)


# Fits


@pytest.mark.parametrize("cut", [np.inf, 2.5])
@pytest.mark.parametrize("law", LAWS, ids=lambda law: type(law).__name__)
def test_likelihoods_are_the_largest(law, cut):
    """All durations are whole, or a third is cut short: scipy's likelihood of the estimate exceeds
    that of its neighbours.
    """
    generator, name = np.random.default_rng(0), type(law).__name__.lower()
    whole, limits = law.sample(generator, 4_000), cut * generator.exponential(law.mean, 4_000)
    durations, censored = np.minimum(whole, limits), limits < whole
    estimate = fit(durations, name, censored=censored)
    if np.isinf(cut):
        distance = scipy.stats.kstest(durations, as_scipy(estimate.law).cdf).statistic
        assert estimate.distance == pytest.approx(distance, abs=1e-3)
    assert estimate.law.mean == pytest.approx(law.mean, rel=0.04)
    assert estimate.law.std == pytest.approx(law.std, rel=0.12)

    def likelihood(candidate):
        reference = as_scipy(candidate)
        density, survival = (
            reference.logpdf(durations[~censored]),
            reference.logsf(durations[censored]),
        )
        return density.sum() + survival.sum()

    assert estimate.log_likelihood == pytest.approx(likelihood(estimate.law), rel=1e-9)
    # A uniform law ends at the longest duration, also at one that was cut short.
    for field in () if name == "uniform" else dataclasses.fields(estimate.law):
        for factor in (0.995, 1.005):
            changed = {field.name: factor * getattr(estimate.law, field.name)}
            neighbour = dataclasses.replace(estimate.law, **changed)
            assert likelihood(neighbour) < estimate.log_likelihood


def test_censored_durations_are_estimated_by_kaplan_and_meier():
    """By hand: of 1, 2+, 3, 4 the steps are 1/4, then 3/4 of 1/2."""
    by_hand = uncensored(np.array([3.0, 1.0, 4.0, 2.0]), np.array([False, False, False, True]))
    assert by_hand.tolist() == [1.0, 3.0, 4.0]
    generator = np.random.default_rng(1)
    limits = generator.exponential(2.0, 3_000)
    whole = Mixture([0.5, 2.0], [1, 1]).sample(generator, 3_000)
    whole *= generator.uniform(0.95, 1.05, 3_000)
    law = fit(np.minimum(whole, limits), censored=limits < whole).law
    assert isinstance(law, Empirical) and law.mean == pytest.approx(1.25, rel=0.05)


def test_sums_of_steps_that_were_cut_short():
    sums = Exponential(0.5).sample(np.random.default_rng(0), (6_000, 3)).sum(axis=1)
    limits = np.random.default_rng(1).exponential(3.0, 6_000)
    for family in ("exponential", "gamma"):
        law = fit(np.minimum(sums, limits), family, steps=3, censored=limits < sums).law
        assert law.mean == pytest.approx(0.5, rel=0.03) and law.std == pytest.approx(0.5, rel=0.05)


# Notes and refusals


def test_what_a_cluster_does_not_know_is_told():
    trace = simulate(Cluster(4, "gamma(1, 0.3)", 0.01), 1_000, seed=0)
    slower = stretched(trace, 1.6, 500)
    with pytest.warns(CalibrationWarning) as warned:
        calibrate(slower)
    told = [str(warning.message) for warning in warned]
    assert told[0].startswith("trace: compute times drift: in the later half they are 1.")
    assert "successive compute times are correlated" in told[1]
    assert list(examine(slower).notes) == [text.removeprefix("trace: ") for text in told]


def test_waits_at_a_free_server_are_service():
    """Each service is taken up late, though the server is free: that is service as well."""
    frame = simulate(Cluster(4, "gamma(1, 0.3)", 0.2), 400, seed=0).frame
    late = frame.assign(serve_time=frame["serve_time"] + 0.1)
    assert calibrate(recorded(late[list(COMMIT_RECORD)])).service.mean == pytest.approx(0.2)


GOOD = simulate(Cluster(3, "gamma(1, 0.3)", "exponential(0.2)", window=2), 200, seed=0)


def shifted(name, row, by):
    values = GOOD.frame[name].copy()
    values[row] += by
    return without_cluster(with_columns(GOOD, **{name: values}))


def test_workers_that_die_and_never_come_back_are_refused():
    log = GOOD.frame[list(COMMIT_RECORD)].assign(outcome="applied")
    last = log["commit_time"].max() + 0.1
    lost = {"worker": 0, **dict.fromkeys(COMMIT_RECORD[1:], last)}
    log.loc[len(log)] = {**lost, "outcome": "cancelled"}
    reads = log.rename(columns={"arrive_time": "read_arrive_time", "serve_time": "read_serve_time"})
    trace = recorded(log, reads=reads.assign(read_time=reads["commit_time"]))
    with pytest.raises(InputError, match="a worker died and none came back; end the trace before"):
        calibrate(trace)


# Workers that died and came back


def crashing(compute, every, lasts="exponential(1)", workers=4, **options):
    crash = failures.crash(every=f"exponential({every})", lasts=lasts)
    return Cluster(workers, compute, 0.01, failures=[crash], **options)


DYING = crashing("gamma(0.5, 0.3)", 10, "gamma(3, 0.3)")


def test_rows_tell_of_deaths_what_spells_do():
    trace = simulate(DYING, 1_000, seed=2)
    crashes = trace.spells[trace.spells["kind"] == "crash"]
    end = trace.frame["commit_time"].max()
    known, seen = (times_of(deaths(log), range(4), end) for log in (trace, without_cluster(trace)))
    absent = np.minimum(crashes["end"].fillna(np.inf), end) - crashes["begin"]
    assert known.between.sum() == pytest.approx(4 * end - absent.sum())
    lasted = (crashes["end"] - crashes["begin"])[crashes["end"] <= end]
    np.testing.assert_allclose(np.sort(known.away), np.sort(lasted))
    # Not those of workers whose message was at the server, and those of workers that are away at
    # the end.
    assert 0.9 * len(known.between) <= len(seen.between) <= len(known.between)
    assert seen.away.mean() == pytest.approx(known.away.mean(), rel=0.05)
    assert deaths(simulate(Cluster(2, 1.0), 20)).empty


@pytest.mark.parametrize("is_recorded", [True, False])
def test_deaths_are_calibrated(is_recorded):
    trace = simulate(DYING, 2_000, seed=1)
    trace = without_cluster(trace) if is_recorded else trace
    known = examine(trace, per_worker=False)
    (crash,) = known.cluster.failures
    count = int(known.table.set_index("what").loc["time to a death", "samples"])
    assert count > 60 and crash.every.mean == pytest.approx(10, rel=3 / count**0.5)
    assert crash.lasts.mean == pytest.approx(3, rel=3 * 0.3 / count**0.5)
    assert known.cluster.compute.mean == pytest.approx(0.5, rel=0.02)


@pytest.mark.parametrize(
    ("law", "is_recorded"), [("exponential(1)", True), ("lognormal(1, 0.5)", False)]
)
def test_cancelled_computations_are_censored(law, is_recorded):
    """Of the completed ones alone the mean is .66 (exponential) or .9, and the throughput 12 to 50
    % too high.
    """
    trace = simulate(crashing(law, 2, workers=8), 4_000, 0)
    cluster = calibrate(without_cluster(trace) if is_recorded else trace, per_worker=False)
    predicted = simulate(cluster, 4_000, 100).summary()["throughput"]
    assert cluster.compute.mean == pytest.approx(1, abs=0.04)
    assert predicted / trace.summary()["throughput"] == pytest.approx(1, abs=0.04)


@pytest.mark.parametrize("exclusive", [True, False])
def test_every_kind_of_visit_is_calibrated_under_crashes(exclusive):
    """A worker that dies between its two visits has completed its computation."""
    network = {"latency": "exponential(0.3)", "protocol": "read_then_write", "exclusive": exclusive}
    trace = simulate(crashing("gamma(1, 0.5)", 3, workers=6, **network), 4_000, seed=0)
    compute = calibrate(trace, per_worker=False).compute
    assert compute.mean == pytest.approx(1, rel=0.03)
    assert compute.std == pytest.approx(0.5, rel=0.05)


def test_windows_under_crashes_and_each_worker_by_itself():
    trace = simulate(crashing("gamma(0.5, 0.5)", 4, window=4), 3_000, seed=0)
    assert calibrate(trace, per_worker=False).compute.mean == pytest.approx(0.5, rel=0.03)
    trace = simulate(crashing(["gamma(1, 0.5)", "exponential(2)"], 4, workers=2), 4_000, seed=0)
    empirical = examine(trace, law="empirical")
    resampled = empirical.resampled(np.random.default_rng(0))
    for cluster, error in ((calibrate(trace), 0.06), (empirical.cluster, 0.1), (resampled, 0.1)):
        assert [law.mean for law in cluster.compute] == pytest.approx([1, 2], rel=error)
