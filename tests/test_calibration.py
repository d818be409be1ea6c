"""Calibration: the laws of a known cluster are found again from its trace, and what is none is
refused.
"""

import dataclasses

import numpy as np
import pytest
import scipy.stats
from edits import with_columns, without_cluster

from asyncsim import Cluster, InputError, calibrate, recorded, simulate
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
)
from asyncsim.traces.bookkeeping import COMMIT_RECORD

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


def assert_found(found, what, law):
    """The family and, within its standard error, the mean."""
    row = found.table.set_index("what").loc[what]
    part = next(part for part in found.parts if part.name == what)
    assert type(part.fit.law) is type(law), f"{what}: {part.fit.law}"
    assert abs(part.fit.law.mean - law.mean) <= ERRORS * np.nan_to_num(row["error"]) + 1e-9
    assert part.fit.law.std == pytest.approx(law.std, rel=0.15, abs=1e-9)


@pytest.mark.parametrize("law", LAWS, ids=str)
def test_laws_of_a_known_cluster(law):
    """Compute, service and the way down of the same family, at three scales."""
    family = type(law)
    scaled = [
        family(*(getattr(law, field.name) * factor for field in _scales(law)), *_shape(law))
        for factor in (1, 0.05)
    ]
    cluster = Cluster(4, compute=law, service=scaled[1], latency=(0.0, scaled[0]))
    found = examine(without_cluster(simulate(cluster, 3_000, seed=5)))
    for what, expected in (("compute", law), ("service", scaled[1]), ("latency down", scaled[0])):
        assert_found(found, what, expected)
    assert found.notes == ()
    assert (found.cluster.protocol, found.cluster.discipline, found.cluster.workers) == (
        "exchange",
        "fifo",
        4,
    )


def _scales(law):
    return [field for field in dataclasses.fields(law) if field.name in ("mean", "low", "high")]


def _shape(law):
    return [
        getattr(law, field.name)
        for field in dataclasses.fields(law)
        if field.name in ("cv", "shape")
    ]


def test_constants_are_exact_and_each_worker_has_its_own():
    cluster = Cluster(3, [2.0, 3.0, 5.0], service=0.25, latency=(0.0, 0.125))
    assert calibrate(without_cluster(simulate(cluster, 300))) == cluster


WRITE_FIRST = {"protocol": "write_then_read"}
SEPARATE = {"protocol": "read_then_write", "exclusive": False}
UNTIMED = {"send_time": np.nan}  # a trace that does not tell when messages set off


UP_AND_DOWN = ("gamma(1, 0.3)", 0.01, ("exponential(0.5)", 0.25))


@pytest.mark.parametrize(
    ("cluster", "without_columns"),
    [
        (Cluster(4, *UP_AND_DOWN), {}),
        (Cluster(4, *UP_AND_DOWN, **WRITE_FIRST), {}),
        (
            Cluster(
                8, "exponential(1)", "exponential(0.06)", discipline="lowest_rank", **WRITE_FIRST
            ),
            UNTIMED,
        ),
        (
            Cluster(
                5, "gamma(1, 0.3)", "exponential(0.02)", ("uniform(0.2, 0.3)", 0.1), **SEPARATE
            ),
            {},
        ),
        (
            Cluster(
                5, "gamma(1, 0.3)", "exponential(0.02)", ("uniform(0.2, 0.3)", 0.1), **SEPARATE
            ),
            UNTIMED,
        ),
    ],
)
def test_a_cluster_is_found_again(cluster, without_columns):
    trace = simulate(cluster, 2_000, seed=3)
    found = examine(without_cluster(with_columns(trace, **without_columns)))
    for what, law in (("latency up", cluster.latency_up), ("latency down", cluster.latency_down)):
        assert_found(found, what, law)
    assert_found(found, "service", cluster.service)
    assert (found.cluster.compute.mean, found.cluster.compute.std) == pytest.approx(
        (cluster.compute.mean, cluster.compute.std), rel=0.05
    )
    for name in ("protocol", "discipline", "exclusive", "bandwidth"):
        assert getattr(found.cluster, name) == getattr(cluster, name)
    visits = found.table.set_index("what").loc["service", "samples"]
    assert visits > 3_900 if trace.separate_reads else visits < 2_000  # reads are services, too


def test_one_law_for_all_or_one_each():
    slow = Cluster(4, ["gamma(1, 0.3)"] * 3 + ["gamma(1.5, 0.3)"], 0.01)
    trace = simulate(slow, 800, seed=0)
    found = calibrate(trace)
    assert [law.mean for law in found.compute_laws] == pytest.approx([1, 1, 1, 1.5], rel=0.1)
    assert isinstance(calibrate(trace, per_worker=False).compute, LogNormal | Gamma | Weibull)
    assert len(set(calibrate(trace, law="empirical").compute_laws)) == 4
    alike = simulate(Cluster(4, "gamma(1, 0.3)", 0.01), 800, seed=0)
    assert isinstance(calibrate(alike).compute, Gamma)
    assert isinstance(calibrate(alike, law="empirical").compute, Empirical)
    assert len(set(calibrate(alike, per_worker=True).compute_laws)) == 4


def test_requests_to_read_carry_no_parameters():
    """Messages with parameters take longer than those without: that is no part of the latency of
    both.
    """
    form = {**SEPARATE, "bandwidth": 100.0, "message_bytes": (10.0, 30.0)}
    constant = simulate(Cluster(4, 1.0, service=0.01, **form), 800)
    assert calibrate(constant).latency == Constant(0.0)
    again = simulate(calibrate(constant), 800)
    assert again.summary()["throughput"] == pytest.approx(
        constant.summary()["throughput"], rel=1e-9
    )
    cluster = Cluster(4, "gamma(1, 0.3)", 0.01, ("exponential(0.1)", "gamma(0.3, 0.5)"), **form)
    found = examine(simulate(cluster, 3_000, seed=0))
    assert_found(found, "latency up", cluster.latency_up)
    assert_found(found, "latency down", cluster.latency_down)
    assert 2 * found.cluster.transfer_up == pytest.approx(
        cluster.transfer_up + cluster.transfer_down, rel=0.1
    )


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
    found = calibrate(simulate(Cluster(4, "gamma(1, 0.5)", 0.1, window=4), 2_000, seed=0))
    assert found.window == 4
    assert (found.compute.mean, found.compute.cv) == pytest.approx((1.0, 0.5), rel=0.05)


@pytest.mark.parametrize("discipline", ["fifo", "lowest_rank", "random"])
def test_the_discipline_is_seen_in_the_order_of_service(discipline):
    trace = without_cluster(
        simulate(Cluster(8, "gamma(1, 0.3)", 0.15, discipline=discipline), 500, seed=0)
    )
    assert calibrate(trace, per_worker=False).discipline == discipline
    other = {"fifo": "lowest_rank", "lowest_rank": "random", "random": "fifo"}[discipline]
    with pytest.raises(
        InputError,
        match=rf"discipline = '{other}': the order of service says '{discipline}': of \d+ ",
    ):
        calibrate(trace, per_worker=False, discipline=other)


def test_a_recorded_trace_calibrates_as_the_simulated_one():
    trace = simulate(Cluster(4, "gamma(1, 0.3)", "exponential(0.1)", 0.05), 500, seed=0)
    assert (
        calibrate(recorded(trace.frame[list(COMMIT_RECORD)]))
        == calibrate(trace)
        == calibrate(trace)
    )


@pytest.mark.parametrize("cut", [np.inf, 2.5])
@pytest.mark.parametrize("law", LAWS, ids=lambda law: type(law).__name__)
def test_likelihoods_are_the_largest(law, cut):
    """All durations are whole, or a third is cut short: scipy's likelihood of the estimate exceeds
    that of its neighbours.
    """
    generator, name = np.random.default_rng(0), type(law).__name__.lower()
    whole, limits = law.sample(generator, 4_000), generator.exponential(law.mean, 4_000)
    durations, censored = np.minimum(whole, cut * limits), cut * limits < whole
    found = fit(durations, name, censored=censored)
    if np.isinf(cut):
        distance = scipy.stats.kstest(durations, _scipy_law(found.law).cdf).statistic
        assert found.distance == pytest.approx(distance, abs=1e-3)
    assert found.law.mean == pytest.approx(law.mean, rel=0.04)
    assert found.law.std == pytest.approx(law.std, rel=0.12)

    def likelihood(candidate):
        log_density = _scipy_law(candidate).logpdf(durations[~censored])
        return log_density.sum() + _scipy_law(candidate).logsf(durations[censored]).sum()

    assert found.log_likelihood == pytest.approx(likelihood(found.law), rel=1e-9)
    # A uniform law ends at the longest duration, also at one that was cut short.
    for field in () if name == "uniform" else dataclasses.fields(found.law):
        for factor in (0.995, 1.005):
            neighbour = dataclasses.replace(
                found.law, **{field.name: factor * getattr(found.law, field.name)}
            )
            assert likelihood(neighbour) < found.log_likelihood


def _scipy_law(law):
    match law:
        case Exponential(mean):
            return scipy.stats.expon(scale=mean)
        case Gamma():
            return scipy.stats.gamma(law.shape, scale=law.mean / law.shape)
        case LogNormal():
            mean, std = law._log_mean_std
            return scipy.stats.lognorm(std, scale=np.exp(mean))
        case Uniform(low, high):
            return scipy.stats.uniform(low, high - low)
        case Weibull():
            return scipy.stats.weibull_min(law.shape, scale=law._scale)
        case Pareto():
            return scipy.stats.pareto(law.shape, scale=law.minimum)


def test_censored_durations_are_estimated_by_kaplan_and_meier():
    """By hand: of 1, 2+, 3, 4 the steps are 1/4, then 3/4 of 1/2."""
    by_hand = uncensored(np.array([3.0, 1.0, 4.0, 2.0]), np.array([False, False, False, True]))
    assert by_hand.tolist() == [1.0, 3.0, 4.0]
    generator = np.random.default_rng(1)
    limits = generator.exponential(2.0, 3_000)
    mixture = Mixture([0.5, 2.0], [1, 1])
    whole = mixture.sample(generator, 3_000) * generator.uniform(0.95, 1.05, 3_000)
    found = fit(np.minimum(whole, limits), censored=limits < whole)
    assert isinstance(found.law, Empirical) and found.law.mean == pytest.approx(1.25, rel=0.05)


def test_sums_of_steps_that_were_cut_short():
    sums = Exponential(0.5).sample(np.random.default_rng(0), (6_000, 3)).sum(axis=1)
    limits = np.random.default_rng(1).exponential(3.0, 6_000)
    for family in ("exponential", "gamma"):
        found = fit(np.minimum(sums, limits), family, steps=3, censored=limits < sums)
        assert found.law.mean == pytest.approx(0.5, rel=0.03)
        assert found.law.std == pytest.approx(0.5, rel=0.05)


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
    found = examine(recorded(late[list(COMMIT_RECORD)]))
    assert found.cluster.service.mean == pytest.approx(0.2)


GOOD = simulate(Cluster(3, "gamma(1, 0.3)", "exponential(0.2)", window=2), 200, seed=0)


def shifted(name, row, by):
    values = GOOD.frame[name].copy()
    values[row] += by
    return without_cluster(with_columns(GOOD, **{name: values}))


def test_a_server_of_several_threads_is_refused():
    """Every service of the second kind begins while another is under way."""
    threads = with_columns(GOOD, serve_time=GOOD.frame["arrive_time"])
    with pytest.raises(
        InputError, match=r"services begin before the one before has ended, .* serves one at a time"
    ):
        calibrate(without_cluster(threads))


def test_workers_that_die_and_never_come_back_are_refused():
    log = GOOD.frame[list(COMMIT_RECORD)].assign(outcome="applied")
    last = log["commit_time"].max() + 0.1
    lost = {"worker": 0, **dict.fromkeys(COMMIT_RECORD[1:], last)}
    log.loc[len(log)] = {**lost, "outcome": "cancelled"}
    reads = log.rename(columns={"arrive_time": "read_arrive_time", "serve_time": "read_serve_time"})
    trace = recorded(log, reads=reads.assign(read_time=reads["commit_time"]))
    with pytest.raises(
        InputError, match=r"trace: a worker died and none came back; end the trace before"
    ):
        calibrate(trace)
