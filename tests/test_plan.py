"""The study plan: its cells against times computed by hand, what contradicts itself, the front, the
answer, replays.
"""

import dataclasses
import math

import numpy as np
import pandas as pd
import pytest

from asyncsim import Cluster, InputError, simulate, study, theory
from asyncsim.study.finished import figures, read
from asyncsim.study.planning import Horizon, known_cost, measure
from asyncsim.study.ranking import paired_interval

plan = study.load("plan")

NETWORK = {"bandwidth": 1e8, "message_bytes": 5e7}  # half a second each way


def cost(cluster, amount, simulated, seed=0, unit="gradients"):
    """Measure a cluster with messages of 50 MB until some gradients, versions or seconds."""
    return measure(cluster, (5e7, 5e7), Horizon(unit, amount), simulated, seed)


def planned(**options):
    """Run the study, of one seed unless the options say otherwise; return its results and its plan
    by the rows' names.
    """
    folder, _ = plan.run(plan.Config(**{"seeds": 1} | options))
    results = read(folder, "plan")
    return results, results.table(plan.PLAN).set_index("name")


# Cells


def test_three_cells_by_hand():
    """A rotation without a queue, a shared link that is never idle, and rounds with a ring
    all-reduce.
    """
    ring = {**NETWORK, "policy": "barrier(collective=ring)"}
    alone = cost(Cluster(32, 1.0, latency=0.04, **NETWORK), 32_000, 3200)
    assert alone["seconds"] == pytest.approx(32_000 / 32 * (1 + 2 * (0.04 + 0.5)), rel=0.01)
    assert alone["extrapolated"] and alone["staleness_mean"] == pytest.approx(31)
    shares = (alone["computing"], alone["sending"])
    assert shares == pytest.approx((1 / 2.08, 1.08 / 2.08))
    shared = cost(Cluster(32, 1.0, latency=0.04, shared_bandwidth=True, **NETWORK), 32_000, 3200)
    # One message of half a second after the other.
    assert shared["seconds"] == pytest.approx(32_000 * 0.5, rel=0.01)
    random = cost(Cluster(32, "exponential(1)", **ring), 32_000, 10**6)
    round_time = sum(1 / k for k in range(1, 33)) + 2 * 31 / 32 * 0.5
    assert random["seconds"] == pytest.approx(1000 * round_time, rel=0.02)  # of 1,000 rounds
    assert not random["extrapolated"]
    assert (random["versions"], random["staleness_q99"]) == (1000, 0)
    sent = random["bytes_per_second"] * random["seconds"]
    assert sent == pytest.approx(1000 * 2 * 31 * 5e7, rel=0.01)
    steady = cost(Cluster(32, 1.0, **ring), 32_000, 640)
    assert steady["seconds"] == pytest.approx(1000 * (1 + 2 * 31 / 32 * 0.5), rel=1e-9)


def test_horizons_agree_and_finite_ones_are_counted():
    cluster = Cluster(4, "gamma(1, 0.3)", service=0.05, window=3)
    trace = simulate(cluster, 400, seed=2)
    times = trace.frame["commit_time"].to_numpy()
    gradients = cost(cluster, 300, 400, 2)
    counts = (gradients["seconds"], gradients["gradients"], gradients["versions"])
    assert counts == (times[99], 300, 100)
    versions = cost(cluster, 77, 400, 2, "versions")
    assert versions["seconds"] == times[76] and not versions["extrapolated"]
    seconds = cost(cluster, 50.0, 10_000, 2, "seconds")
    counted = np.searchsorted(times, 50.0, side="right")
    assert (seconds["seconds"], seconds["versions"]) == (50, counted)
    further = cost(cluster, 5000.0, 400, 2, "seconds")
    bound = theory.throughput_theory(cluster)
    assert further["extrapolated"] and bound.name == "saturation bound"
    assert 0.97 < further["versions"] / (5000 * bound.commits) < 1
    for name in ("computing", "waiting"):
        assert seconds[name] == pytest.approx(trace.summary()[f"{name}_share"], abs=0.02)
    lossy = Cluster(8, "exponential(1)", policy="discard_stale(3)")
    known, shares = simulate(lossy, 500, seed=0).summary(), cost(lossy, 500, 500, 0, "versions")
    assert shares["in_vain"] == pytest.approx(known["lost_time_share"], abs=0.03)
    assert shares["goodput"] == pytest.approx(1 - shares["in_vain"])


def test_reads_that_wait_at_the_server_are_waiting_and_not_sending():
    cluster = Cluster(8, "gamma(1, 0.4)", 0.1, protocol="read_then_write", exclusive=False)
    shares = cost(cluster, 400, 400)
    assert shares["sending"] == 0 < 0.2 < shares["waiting"]


def test_combinations_contradict_themselves(capsys):
    config = plan.Config(
        workers=6,
        policy=("asynchronous", "barrier", "barrier(4)"),
        collective=("none", "ring", "halving_doubling"),
        compression=("none", "0.25"),
        model_parameters=1e6,
        message_type="bfloat16",
        bandwidth=1e6,
    )
    candidates = plan.make_candidates(config)
    err = capsys.readouterr().err
    assert len(candidates) == 8  # three policies by two compressions, and two all-reduces
    assert "combinations left out: collective: an all-reduce needs a barrier" in err
    assert "count = 4: an all-reduce has" in err
    small = [row for row in candidates if row.labels["compression"] == "0.25"]
    assert {row.message_bytes for row in small} == {(5e5, 2e6)}
    assert small[0].cluster.message_bytes == (5e5, 2e6)
    lone = dataclasses.replace(config, policy=("asynchronous",), collective=("ring",))
    with pytest.raises(InputError, match="no combination is possible: collective"):
        plan.make_candidates(lone)
    methods = ("mem_sgd(fraction=0.01)", "qsgd(levels=7)")
    sizes = dataclasses.replace(config, collective=("none",), compression=methods)
    uploads = [row.message_bytes[0] for row in plan.make_candidates(sizes)[:2]]
    assert uploads == pytest.approx([6e4, 4e6 * 4.0625 / 32])


def test_a_simulation_shorter_than_the_absences_starts_in_the_long_run():
    cluster = Cluster(16, "gamma(1, 0.3)", failures=["crash(exponential(600), exponential(200))"])
    costs = [cost(cluster, 4e5, 600, seed) for seed in range(6)]
    mean, low, high = paired_interval(each["seconds"] for each in costs)
    # Without the absent workers of the start the six are a fifth too fast.
    assert low < cost(cluster, 4e5, 40_000)["seconds"] < high and high - low < 0.1 * mean
    assert all(each["away"] == pytest.approx(0.25) for each in costs)


def test_failures_are_time_that_does_not_count():
    crashes = ["crash(every=exponential(200), lasts=exponential(20), detect=1)"]
    cluster = Cluster(8, "gamma(1, 0.3)", failures=crashes)
    shares = cost(cluster, 1e6, 8000)
    assert shares["away"] == pytest.approx(20 / 220, abs=0.02) and shares["absences"] > 20
    assert shares["goodput"] == pytest.approx(shares["computing"] - shares["in_vain"])
    assert shares["computing"] + shares["away"] == pytest.approx(1, abs=0.01)
    assert shares["seconds"] == pytest.approx(1e6 / 8 / shares["goodput"], rel=0.02)
    known = known_cost(cluster, Horizon("gradients", 1e6))
    assert (known.exact, known.theory) == (False, pytest.approx(1e6 / 8))
    assert known.theory_name.endswith("without failures")
    lost = Cluster(4, 1.0, failures=["outage(every=exponential(50), lasts=1, checkpoint_every=40)"])
    undone = cost(lost, 2000.0, 10**6, unit="seconds")
    assert undone["gradients"] == undone["versions"] < 4 * 2000 * 0.95
    assert undone["gradients"] / (4 * 2000) == pytest.approx(undone["goodput"], rel=0.03)


# The answer


def test_two_sites_by_hand(capsys):
    """By default a server's workers share the links that an all-reduce has: one of the server, one
    between two sites.

    Two workers near the server, eight far from it; a step takes 1 s, a message 1 ms within a site
    and 2 s between them.
    """
    options = {"workers": 10, "sites": (2, 8), "compute": "1", "service": "0"}
    options |= {"bandwidth": 1e9, "far_bandwidth": 5e5, "message_bytes": 1e6}
    options |= {"policy": ("asynchronous", "barrier"), "collective": ("none", "two_level")}
    # Two rings of a whole message, one within a site (two halves of 7/8) and one of two leaders,
    # then three broadcasts.
    all_reduce = 10 / (1 + (2 * 7 / 8 + 3) * 1e-3 + 2.0)

    def check_rates(asynchronous, barrier, **shared):
        _, table = planned(**options, gradients=2e5, simulate=1000, **shared)
        rates = table["gradients_per_second"].to_dict()
        assert rates.pop("barrier, two_level") == pytest.approx(all_reduce, rel=1e-6)
        expected = {"asynchronous": asynchronous, "barrier": barrier}
        assert rates == pytest.approx(expected, rel=0.01)
        return capsys.readouterr().out

    # The far link is never idle; the last of eight reads, computes and sends.
    out = check_rates(2 / 1.002 + 1 / 2.0, 10 / (8 * 2.0 + 1 + 2.0))
    links = (
        "links: the server has one, and each other site one to it; workers share them, as an "
        "all-reduce does"
    )
    assert out.count(links) == 2 and f"\n{links}\n" in out
    assert "Fastest: barrier, two_level," in out
    assert (
        "assumed, apart from the choices: 10 workers, compute 1 s, bandwidth 1e+09 (bytes/s), "
        "messages of 1e+06 bytes" in out
    )
    assert "an all-reduce has no server, and no service" in out
    out = check_rates(2 / 1.002 + 8 / 5.0, 10 / 5.0, shared_bandwidth=False)
    links = (
        "links: each worker has a separate one to the server, together more than in an all-reduce"
    )
    assert out.count(links) == 2


def test_the_plan_answers(capsys):
    results, table = planned(
        workers=4,
        compute="gamma(mean=1, cv=0.3)",
        service=0.0,
        policy=("asynchronous", "barrier", "bounded_staleness(1)"),
        shared_bandwidth=False,
        window=(1, 4),
        collective=("none", "ring"),
        model_parameters=1e6,
        bandwidth=1e7,
        gradients=4000,
        simulate=400,
        price=3.0,
        seeds=2,
    )
    out, runs, first = capsys.readouterr().out, results.summary, table.iloc[0]
    assert len(runs) == 2 * len(table) == 16
    assert (table["cost"].diff().dropna() >= 0).all() and first["behind"] == 1
    assert f"verdict: Fastest: {first.name}, 4,000 gradients in" in out
    assert out.count("Fastest") == 1
    assert first["money"] == pytest.approx(3 * 4 * first["seconds"] / 3600)
    assert first["policy"] == "asynchronous" and first["window"] == 4
    assert first["exact"] and first["theory"] == pytest.approx(4000 / 16 * (4 + 2 * 0.4))
    assert first["cost"] == pytest.approx(first["theory"], rel=0.02)
    seconds = runs[runs["policy"] == "asynchronous"].pivot(
        index="seed", columns="window", values="seconds"
    )
    single = table[(table["policy"] == "asynchronous") & (table["window"] == 1)]
    assert single["behind"].tolist() == pytest.approx([(seconds[1] / seconds[4]).mean()])
    assert {path.name for path in results.folder.glob("*.p*")} == {"plan.png", "plan.pdf"}
    left = figures("plan").plan(results).axes[0]
    (front,) = (line for line in left.lines if line.get_label() == "Pareto front")
    assert len(front.get_xdata()) == table["front"].sum() and first["front"]


def test_hours_and_recordings(capsys):
    trace = simulate(Cluster(4, "gamma(2, 0.2)", service=0.01, latency=0.1), 600, seed=3)
    trace.save("recorded.parquet")
    options = {"policy": ("asynchronous", "barrier"), "collective": ("none", "ring"), "hours": 1.0}
    _, table = planned(recording="recorded.parquet", **options)
    gradients = table.loc["asynchronous", "gradients"]
    assert gradients == pytest.approx(4 * 3600 / (2 + 0.2 + 0.01), rel=0.02)
    assert "gradients in 1 hours" in capsys.readouterr().out
    config = plan.Config(recording="recorded.parquet", **options, workers=16)
    assert {row.cluster.workers for row in plan.make_candidates(config)} == {16}


def test_gossip_is_planned_beside_a_server(capsys):
    results, table = planned(
        workers=4,
        compute="1",
        service="0.1",
        latency="0.5",
        topology=("server", "ring()"),
        policy=("asynchronous", "barrier", "handshake"),
        gradients=400,
        price=3600.0,  # a second of a worker costs one
        replay=4,
        steps=60,
        tune=(0.03,),
        problem="quadratic",
        target=0.05,
    )
    rates = table["gradients_per_second"]
    assert set(rates.index) == {
        *("server, asynchronous", "server, barrier"),
        *("ring(), asynchronous", "ring(), handshake"),
    }
    assert rates["server, asynchronous"] == pytest.approx(4 / 2.1, rel=0.02)
    assert rates["ring(), asynchronous"] == pytest.approx(4 / 1.0, rel=0.02)
    np.testing.assert_allclose(table["money_to_target"], 4 * table["time_to_target"], rtol=1e-6)
    methods = results.table(plan.REPLAYS).set_index("name")["method"]
    assert methods["ring(), asynchronous"] == "sgp" and methods["ring(), handshake"] == "adpsgd"
    cheapest = table["money_to_target"].idxmin()
    printed = capsys.readouterr().out
    assert f"verdict: cheapest replayed combination: {cheapest}, at a price of " in printed


def test_the_best_are_replayed(capsys):
    options = dict(
        workers=4,
        compute="exponential(1)",
        service=0.0,
        policy=("asynchronous", "barrier"),
        compression=("none", "mem_sgd(fraction=0.25)"),
        bandwidth=1e5,
        model_parameters=1e4,
        gradients=2000,
        simulate=200,
        replay=2,
        steps=40,
        tune=(0.1, 0.3),
        problem="quadratic",
        target=0.05,
    )
    results, table = planned(**options)
    runs, goal = results.table(plan.REPLAYS), plan.Config(**options).goal
    assert len(runs) == 2 * 2 and "run_folder" not in results.summary and len(results.summary) == 4
    replayed = table[table["time_to_target"].notna()]
    assert len(replayed) == 2
    for name, row in replayed.iterrows():
        own = runs[(runs["name"] == name) & (runs["learning_rate"] == row["learning_rate"])]
        times = []
        for run in own.itertuples():
            evaluations = results.run(run.run_folder).evaluations
            time, low, high = goal.bounded(evaluations, results.trace(run.trace_file))
            assert low <= time <= high
            times.append(time)
        assert row["time_to_target"] == pytest.approx(np.mean(times))
        assert row["reached"] == sum(map(math.isfinite, times))
    cluster = results.trace(runs["trace_file"].iloc[0]).cluster
    assert cluster.message_bytes in (4e4, (2e4, 4e4))
    assert "of 2 replayed" in capsys.readouterr().out
    assert len(figures("plan").plan(results).axes) == 2
    _, again = planned(**options, resume=results.folder)
    pd.testing.assert_frame_equal(table, again)


def test_absent_workers_cost_nothing_unless_they_are_reserved():
    config = plan.Config(
        workers=4,
        failures=("crash(exponential(60), constant(20))",),
        gradients=4000,
        simulate=2000,
        price=3.0,
        policy=("asynchronous",),
    )
    candidates = plan.make_candidates(config)
    rows = plan.measure_all(candidates, config.horizon, config.simulate, 2, "rows")["rows"]
    runs = pd.DataFrame(rows).assign(status="finished")
    free, reserved = (
        plan.plan_table(dataclasses.replace(config, reserved=reserved), candidates, runs).iloc[0]
        for reserved in (False, True)
    )
    assert reserved["money"] == pytest.approx(3 * 4 * reserved["seconds"] / 3600)
    assert free["money"] == pytest.approx(reserved["money"] * (1 - reserved["away"]))
    assert reserved["away"] > 0.1
