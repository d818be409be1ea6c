"""The command calibrate: a log becomes a cluster, its fit and a prediction; bad logs are named.

Predictions hold where the durations stay what they were, and fail, with the reason, where they do
not.
"""

import heapq
import json
import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from edits import without_cluster
from test_calibration import DYING, stretched

from asyncsim import Cluster, InputError, recorded, simulate
from asyncsim.__main__ import main
from asyncsim.calibration.log import read_visits
from asyncsim.calibration.prediction import LOST, extrapolate, predict

pytestmark = pytest.mark.usefixtures("quick_figures")
RUNS = 9


def record(workers, commits, seed, ways=(0.0,), every=np.inf):
    """Run a server of one queue and its workers, written with a heap and nothing else.

    Worker w computes for a lognormal time of median 1 s, workers with odd numbers half as long
    again; a service takes 0.04 s and an exponential time of mean 0.06 s. With several sites all
    compute alike, a service takes 0.02 s, and ``ways`` has the mean way of each in turn. Between
    two computations a worker is away for half a minute on average, after ``every`` seconds of work.
    """
    generator = np.random.default_rng(seed)
    several = len(ways) > 1
    crashes = generator.exponential(1, workers) * every

    def compute(worker):
        return float(generator.lognormal(0.0, 0.3)) * (1.5 if worker % 2 and not several else 1.0)

    def way(worker):
        return float(generator.gamma(4, ways[worker % len(ways)] / 4))

    arrivals = [(compute(worker) + way(worker), worker, 0.0) for worker in range(workers)]
    heapq.heapify(arrivals)
    free, log = 0.0, []
    while len(log) < commits:
        arrive, worker, start = heapq.heappop(arrivals)
        serve = max(arrive, free)
        free = serve + (0.02 if several else 0.04 + float(generator.exponential(0.06)))
        log.append((worker, start, arrive, serve, free))
        start = free + way(worker)
        if start > crashes[worker]:
            start += generator.exponential(30)
            crashes[worker] = start + generator.exponential(every)
        heapq.heappush(arrivals, (start + compute(worker) + way(worker), worker, start))
    names = ("worker", "start_time", "arrive_time", "serve_time", "commit_time")
    return pd.DataFrame(log, columns=names)


LOG = record(3, 100, seed=1)
TIMES = LOG.columns.drop("worker")


def rate(log):
    times = log["commit_time"].to_numpy()[len(log) // 3 :]
    return (len(times) - 1) / (times[-1] - times[0])


def calibrated(folder):
    """Return the cluster and the predicted throughput that the command wrote."""
    cluster = Cluster.from_dict(json.loads(Path(folder, "cluster.json").read_text()))
    table = pd.read_csv(Path(folder, "prediction.csv")).set_index("quantity")
    return cluster, table.loc["throughput (commits/s)"]


def test_eight_workers_predict_sixteen(capsys):
    record(8, 800, seed=1).to_csv("log.csv", index=False)
    assert main(["calibrate", "log.csv", "--workers", "16", "--runs", "9"]) == 0
    printed = capsys.readouterr().out
    cluster, row = calibrated("log-calibrated")
    measured = np.mean([rate(record(16, 4_000, seed)) for seed in (2, 3, 4)])
    assert row["predicted"] == pytest.approx(measured, rel=0.1)
    assert 0.8 * measured < row["low"] < row["predicted"] < row["high"] < 1.2 * measured
    # Not trivial: the server is nearer its limit than twice the rate of eight would have it.
    assert measured < 0.9 * 2 * rate(record(8, 4_000, seed=5))
    assert "predicted for 16 workers, from 800 commits by 8" in printed
    assert max(map(len, printed.splitlines())) < 250
    assert cluster.workers == 16 and cluster.service.mean == pytest.approx(0.1, rel=0.1)
    assert {"fit.png", "fit.pdf"} <= {path.name for path in Path("log-calibrated").iterdir()}


@pytest.mark.parametrize(
    ("options", "groups"),
    [
        ([], ["workers 0, 3, 6, 9", "workers 1, 4, 7, 10", "workers 2, 5, 8, 11"]),
        (["--sites", "site", "--gaps-above", "2"], ["site a", "site b", "site c"]),
    ],
)
def test_sites_and_absences_are_no_law_of_the_way_down(options, groups, capsys):
    """As one law, ways and absences predict too much: runs begin with all present."""
    ways = (0.001, 0.05, 0.3)
    log = record(12, 6_000, 1, ways, every=100)
    log.assign(site=np.array(list("abc"))[log["worker"] % 3]).to_csv("log.csv", index=False)
    command = ["calibrate", "log.csv", "--workers", "48", "--runs", "2", "--law", "gamma"]
    assert main([*command, *options]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("assumed: the workers share nothing but the server")
    assert "gaps taken as absences; --gaps-above sets their limit" in printed
    cluster, row = calibrated("log-calibrated")
    for site, (group, mean, crash) in enumerate(zip(groups, ways, cluster.failures, strict=True)):
        assert f"latency down of {group}" in printed and f"time away of {group}" in printed
        assert crash.workers == tuple(range(site, 48, 3))
        assert crash.every.mean == pytest.approx(100, rel=0.5)
        assert crash.lasts.mean == pytest.approx(30, rel=0.5)
        down = cluster.latency.values[site][1]
        assert down.mean == pytest.approx(mean, rel=0.1, abs=0.003)
    measured = rate(record(48, 40_000, 2, ways, every=100))
    assert row["predicted"] == pytest.approx(measured, rel=0.1)


def test_what_the_fit_does_not_explain_is_said_first(capsys):
    """Uniform laws up to the longest durations have means that are too long."""
    record(3, 200, 1).to_csv("log.csv", index=False)
    assert main(["calibrate", "log.csv", "--runs", "2", "--law", "uniform"]) == 0
    first = capsys.readouterr().out.splitlines()[0]
    assert first.startswith("not explained: the recorded 2.")


@pytest.mark.parametrize(
    ("unit", "options", "noted"),
    [
        (1e3, [], True),
        (1e3, ["--unit", "s"], False),
        (1, [], False),
    ],
)
def test_seconds_that_do_not_look_like_seconds_are_noted(unit, options, noted, capsys):
    log = LOG.copy()
    log[TIMES] = (log[TIMES] * unit).round(0 if unit > 1 else 9)
    log.to_csv("log.csv", index=False)
    for folder in ("log-calibrated", "log-calibrated-2")[: 1 + noted]:
        assert main(["calibrate", "log.csv", "--runs", "2", "--law", "gamma", *options]) == 0
        assert Path(folder, "prediction.csv").exists()
    note = "note: times taken as seconds: half of the computations take"
    assert (note in capsys.readouterr().err) == noted


def test_units_and_saved_traces():
    seconds = recorded(LOG)
    LOG.assign(**LOG[TIMES] * 1e3).to_csv("ms.csv", index=False)
    in_ms = read_visits("ms.csv", unit="ms")
    np.testing.assert_allclose(in_ms.frame["commit_time"], seconds.frame["commit_time"], rtol=1e-12)
    seconds.save("trace.parquet")
    LOG.to_parquet("log.parquet")
    for path in ("trace.parquet", "log.parquet"):
        assert read_visits(path).frame.equals(seconds.frame)


@pytest.mark.parametrize("begin", [pd.Timestamp("2026-11-28 03:00"), pd.Timedelta(5, "s")])
def test_dates_and_intervals_are_no_seconds(begin):
    log = LOG.round(6)
    dates = log.assign(**{name: begin + pd.to_timedelta(log[name], unit="s") for name in TIMES})
    dates.to_parquet("log.parquet")
    dates.to_csv("log.csv", index=False)
    expected = recorded(log).frame["commit_time"]
    for trace in (read_visits("log.parquet"), read_visits("log.csv"), recorded(dates)):
        np.testing.assert_allclose(trace.frame["commit_time"], expected, atol=1e-9)
    dates.loc[4, "serve_time"] = pd.NaT
    dates.to_parquet("log.parquet")
    with pytest.raises(InputError, match="serve_time of row 4 is empty; it must be a finite"):
        read_visits("log.parquet")
    with pytest.raises(InputError, match="present: arrive_time holds seconds, and another time"):
        recorded(dates.drop(4), present={"worker": [1], "arrive_time": [2.0]})


def spoilt(row, column, value):
    log = LOG.astype(object)
    log.loc[row, column] = value
    return log


@pytest.mark.parametrize(
    ("log", "options", "message"),
    [
        (
            LOG.drop(columns=["serve_time", "start_time"]),
            [],
            "path = 'log.csv': misses start_time, serve_time; record worker, start_time",
        ),
        (LOG.iloc[:0], [], "path = 'log.csv': has no rows; log each commit"),
        (
            spoilt(7, "arrive_time", "3 ms"),
            [],
            "arrive_time of row 7 (line 9) is 3 ms; it must be a finite num",
        ),
        (
            spoilt(4, "worker", 1.5),
            [],
            "worker of row 4 (line 6) is 1.5; it must be a whole number from 0",
        ),
        (
            spoilt(9, "serve_time", 0.5),
            [],
            "serve_time of row 9 (line 11) is 0.5; it must not be before arrive_time",
        ),
        (
            LOG.assign(start_time=lambda log: log["start_time"] / 1000),
            [],
            "must not be before its read was served: a worker has one computation in flight",
        ),
        (
            LOG * [1, 1e9, 1e9, 1e9, 1e9],
            [],
            "s after start_time, as in half of the rows, with unit = 's'; give the unit of the",
        ),
        (LOG, ["--sites", "site"], "sites = 'site': unknown; choose from worker"),
        (
            LOG.assign(site=range(100)),
            ["--sites", "site"],
            "must be the same in all rows of its worker",
        ),
        (LOG, ["--gaps-above", "0"], "gaps_above = 0.0: must be above zero"),
        (LOG, ["--unit", "h"], "unit = 'h': unknown; choose from s, ms, us, ns"),
        (LOG, ["--law", "gama"], "law = 'gama': unknown; did you mean 'gamma'?"),
        (LOG, ["--out", "."], "out = '.': exists already; give another"),
        (LOG, ["--out", "log.csv/x"], "'log.csv/x': cannot be written: File exists"),
        (LOG, ["--workers", "9999999999999"], "a cluster of so many needs at least"),
        (LOG, ["--out", ".", "--runs", "1"], "runs = 1: must be at least 2; --runs"),
        (record(3, 8, 1), [], "has 5 ways down, from a commit_time to its worker's next start_t"),
    ],
)
def test_a_bad_log_or_option_is_named(log, options, message, capsys):
    log.to_csv("log.csv", index=False)
    assert main(["calibrate", "log.csv", *options]) == 2
    error = capsys.readouterr().err.replace("\nhint: ", "; ")
    assert message in error and "Traceback" not in error
    assert [path.name for path in Path().iterdir()] == ["log.csv"]


# Predictions


TRACE = without_cluster(simulate(Cluster(4, "gamma(0.05, 0.2)", "gamma(0.004, 0.3)"), 600, seed=1))


def twice(compute="gamma(0.05, 0.2)", **options):
    return without_cluster(simulate(Cluster(8, compute, "gamma(0.004, 0.3)", **options), 600, 2))


def row(prediction, quantity):
    return prediction.table.set_index("quantity").loc[quantity]


def test_the_later_half_of_a_simulated_recording(tmp_path):
    halves = predict(TRACE, seed=0, runs=RUNS)
    assert halves.holds
    assert list(halves.table) == ["quantity", "predicted", "low", "high", "measured", "within"]
    throughput = row(halves, "throughput (commits/s)")
    assert throughput["measured"] == pytest.approx(TRACE.summary(300)["throughput"])
    assert throughput["predicted"] == pytest.approx(4 / 0.055, rel=0.05)
    rates = [run.values["throughput"] for run in halves.runs]
    assert throughput[["low", "high"]].tolist() == np.quantile(rates, [0.025, 0.975]).tolist()
    assert row(halves, "staleness, mean")["predicted"] == pytest.approx(3, abs=0.02)
    assert 0 < row(halves, "staleness, distance")["measured"] < 0.15
    assert halves.reasons == ()
    assert "the later half of 600 commits by 4 workers, from the earlier half: holds" in halves.text
    drawn = halves.draw(tmp_path / "prediction")
    assert [path.name for path in drawn] == ["prediction.png", "prediction.pdf"]


def test_the_same_seed_predicts_the_same():
    first, again, other = (predict(TRACE, seed=seed, runs=2).table for seed in (0, 0, 1))
    assert again.equals(first) and not other.equals(first)


def test_deaths_are_predicted():
    prediction = predict(simulate(DYING, 1_000, seed=1), runs=RUNS, per_worker=False)
    lost = row(prediction, LOST)
    assert prediction.holds and lost["within"] and 0 < lost["low"] < lost["measured"]


def test_a_later_half_that_is_slower_is_called_out():
    prediction = predict(stretched(TRACE, 1.5, 300), seed=0, runs=RUNS)
    assert not prediction.holds
    throughput = row(prediction, "throughput (commits/s)")
    assert throughput["predicted"] / throughput["measured"] == pytest.approx(1.5, rel=0.1)
    for what in ("compute", "service"):
        text = rf"{what} times in the later half are 1\.[3-7]\d \S \d\.\d\d times as long"
        assert any(re.fullmatch(text, reason) for reason in prediction.reasons), prediction.reasons
    assert "fails" in prediction.text


def test_twice_the_workers():
    prediction = extrapolate(TRACE, twice(), seed=0, runs=RUNS)
    assert prediction.holds and prediction.reasons == () and prediction.cluster.workers == 8
    assert row(prediction, "staleness, mean")["predicted"] == pytest.approx(7, abs=0.05)


def test_workers_that_contend_are_called_out():
    prediction = extrapolate(TRACE, twice(compute="gamma(0.09, 0.2)"), seed=0, runs=RUNS)
    assert not prediction.holds
    text = "compute times with 8 workers are 1.8.*the workers contend for their processors"
    assert any(re.fullmatch(text, reason) for reason in prediction.reasons)
