"""The study plan: its cells against times computed by hand, what contradicts itself, the front, the
answer, replays.
"""

import dataclasses
import math

import numpy as np
import pandas as pd
import pytest

from asyncsim import Cluster, InputError, Trace, simulate, study, theory
from asyncsim.study.finished import figures, read
from asyncsim.study.planning import (
    Horizon,
    known_cost,
    measure,
)
from asyncsim.study.ranking import paired_interval

plan = study.load("plan")

SIZE = (5e7, 5e7)
NETWORK = {"bandwidth": 1e8, "message_bytes": 5e7}  # half a second each way


def close(found, seconds, rel=0.01):
    assert found["seconds"] == pytest.approx(seconds, rel=rel)


def test_three_cells_by_hand():
    """A rotation without a queue, a shared link that is never idle, and rounds with a ring
    all-reduce.
    """
    horizon = Horizon("gradients", 32_000)
    alone = measure(Cluster(32, 1.0, latency=0.04, **NETWORK), SIZE, horizon, 3200, 0)
    close(alone, 32_000 / 32 * (1 + 2 * (0.04 + 0.5)))
    assert alone["extrapolated"] and alone["staleness_mean"] == pytest.approx(31)
    assert alone["computing"] == pytest.approx(1 / 2.08) and alone["sending"] == pytest.approx(
        1.08 / 2.08
    )
    shared = measure(
        Cluster(32, 1.0, latency=0.04, shared_bandwidth=True, **NETWORK), SIZE, horizon, 3200, 0
    )
    close(shared, 32_000 * 0.5)  # one message of half a second after the other
    ring = measure(
        Cluster(32, "exponential(1)", **NETWORK, policy="barrier(collective=ring)"),
        SIZE,
        horizon,
        10**6,
        0,
    )
    close(
        ring, 1000 * (sum(1 / k for k in range(1, 33)) + 2 * 31 / 32 * 0.5), rel=0.02
    )  # of 1,000 rounds
    assert not ring["extrapolated"] and ring["versions"] == 1000 and ring["staleness_q99"] == 0
    assert ring["bytes_per_second"] * ring["seconds"] == pytest.approx(
        1000 * 2 * 31 * 5e7, rel=0.01
    )
    steady = measure(
        Cluster(32, 1.0, **NETWORK, policy="barrier(collective=ring)"), SIZE, horizon, 640, 0
    )
    close(steady, 1000 * (1 + 2 * 31 / 32 * 0.5), rel=1e-9)


def test_horizons_agree_and_finite_ones_are_counted():
    cluster = Cluster(4, "gamma(1, 0.3)", service=0.05, window=3)
    trace = simulate(cluster, 400, seed=2)
    times = trace.frame["commit_time"].to_numpy()
    found = measure(cluster, SIZE, Horizon("gradients", 300), 400, 2)
    assert (found["seconds"], found["gradients"], found["versions"]) == (times[99], 300, 100)
    found = measure(cluster, SIZE, Horizon("versions", 77), 400, 2)
    assert found["seconds"] == times[76] and not found["extrapolated"]
    found = measure(cluster, SIZE, Horizon("seconds", 50.0), 10_000, 2)
    assert found["seconds"] == 50 and found["versions"] == np.searchsorted(
        times, 50.0, side="right"
    )
    further = measure(cluster, SIZE, Horizon("seconds", 5000.0), 400, 2)
    assert further["extrapolated"]
    bound = theory.throughput_theory(cluster)
    assert (
        bound.name == "saturation bound" and 0.97 < further["versions"] / (5000 * bound.commits) < 1
    )
    summary = trace.summary()
    for name in ("computing", "waiting"):
        assert found[name] == pytest.approx(summary[f"{name}_share"], abs=0.02)
    lossy = measure(
        Cluster(8, "exponential(1)", policy="discard_stale(3)"),
        SIZE,
        Horizon("versions", 500),
        500,
        0,
    )
    known = simulate(Cluster(8, "exponential(1)", policy="discard_stale(3)"), 500, seed=0).summary()
    assert lossy["in_vain"] == pytest.approx(known["lost_time_share"], abs=0.03)
    assert lossy["goodput"] == pytest.approx(1 - lossy["in_vain"])


def test_reads_that_wait_at_the_server_are_waiting_and_not_sending():
    cluster = Cluster(8, "gamma(1, 0.4)", 0.1, protocol="read_then_write", exclusive=False)
    shares = measure(cluster, SIZE, Horizon("gradients", 400), 400, 0)
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
    found = plan.make_candidates(config)
    told = capsys.readouterr().err
    assert len(found) == 8  # three policies by two compressions, and two all-reduces
    assert "combinations left out: collective: an all-reduce needs a barrier" in told
    assert "count = 4: an all-reduce has" in told
    small = [one for one in found if one.labels["compression"] == "0.25"]
    assert {one.message_bytes for one in small} == {(5e5, 2e6)}
    assert small[0].cluster.message_bytes == (5e5, 2e6)
    with pytest.raises(InputError, match="no combination is possible: collective"):
        plan.make_candidates(
            dataclasses.replace(config, policy=("asynchronous",), collective=("ring",))
        )
    sizes = dataclasses.replace(
        config, collective=("none",), compression=("mem_sgd(fraction=0.01)", "qsgd(levels=7)")
    )
    assert [one.message_bytes[0] for one in plan.make_candidates(sizes)[:2]] == pytest.approx(
        [6e4, 4e6 * 4.0625 / 32]
    )


def test_two_sites_by_hand(capsys):
    """By default a server's workers share the links that an all-reduce has: one of the server, one
    between two sites.

    Two workers near the server, eight far from it; a step takes 1 s, a message 1 ms within a site
    and 2 s between them.
    """
    config = plan.Config(
        workers=10,
        sites=(2, 8),
        compute="1",
        service="0",
        bandwidth=1e9,
        far_bandwidth=5e5,
        message_bytes=1e6,
        policy=("asynchronous", "barrier"),
        collective=("none", "two_level"),
        gradients=2e5,
        simulate=1000,
        seeds=1,
    )

    def rates(config):
        folder, _ = plan.run(config)
        table = read(folder, "plan").table(plan.PLAN).set_index("name")
        return table["gradients_per_second"].to_dict()

    # Two rings of a whole message, one within a site (two halves of 7/8) and one of two leaders,
    # then three broadcasts.
    all_reduce = 10 / (1 + (2 * 7 / 8 + 3) * 1e-3 + 2.0)
    shared = rates(config)
    assert shared == {
        "asynchronous": pytest.approx(2 / 1.002 + 1 / 2.0, rel=0.01),  # the far link is never idle
        "barrier": pytest.approx(
            10 / (8 * 2.0 + 1 + 2.0), rel=0.01
        ),  # the last of eight reads, computes and sends
        "barrier, two_level": pytest.approx(all_reduce, rel=1e-6),
    }
    printed = capsys.readouterr().out
    links = (
        "links: the server has one, and each other site one to it; workers share them, as an "
        "all-reduce does"
    )
    assert (
        printed.count(links) == 2
        and f"\n{links}\n" in printed
        and "Fastest: barrier, two_level," in printed
    )
    assert (
        "assumed, apart from the choices: 10 workers, compute 1 s, bandwidth 1e+09 (bytes/s), "
        "messages of 1e+06 bytes" in printed
    )
    assert "an all-reduce has no server, and no service" in printed
    private = rates(dataclasses.replace(config, shared_bandwidth=False))
    assert private == {
        "asynchronous": pytest.approx(2 / 1.002 + 8 / 5.0, rel=0.01),
        "barrier": pytest.approx(10 / 5.0, rel=0.01),
        "barrier, two_level": pytest.approx(all_reduce, rel=1e-6),
    }
    links = (
        "links: each worker has a separate one to the server, together more than in an all-reduce"
    )
    assert capsys.readouterr().out.count(links) == 2


def test_the_plan_answers(capsys):
    config = plan.Config(
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
    folder, summary = plan.run(config)
    printed = capsys.readouterr().out
    table = read(folder, "plan").table(plan.PLAN)
    assert len(summary) == 2 * len(table) == 16
    assert (table["cost"].diff().dropna() >= 0).all() and table["behind"].iloc[0] == 1
    first = table.iloc[0]
    assert (
        f"verdict: Fastest: {first['name']}, 4,000 gradients in" in printed
        and printed.count("Fastest") == 1
    )
    assert first["money"] == pytest.approx(3 * 4 * first["seconds"] / 3600)
    row = table[(table["policy"] == "asynchronous") & (table["window"] == 4)].iloc[0]
    assert row["exact"] and row["theory"] == pytest.approx(4000 / 16 * (4 + 2 * 0.4))
    assert row["cost"] == pytest.approx(row["theory"], rel=0.02)
    paired = summary[summary["policy"] == "asynchronous"].pivot(
        index="seed", columns="window", values="seconds"
    )
    ratio = table[(table["policy"] == "asynchronous") & (table["window"] == 1)].iloc[0]["behind"]
    assert first["policy"] == "asynchronous" and ratio == pytest.approx(
        (paired[1] / paired[4]).mean()
    )
    assert {path.name for path in folder.glob("*.p*")} == {"plan.png", "plan.pdf"}
    left = figures("plan").plan(read(folder, "plan")).axes[0]
    front = next(line for line in left.lines if line.get_label() == "Pareto front")
    assert len(front.get_xdata()) == table["front"].sum() and table["front"].iloc[0]


def test_hours_and_recordings(capsys):
    trace = simulate(Cluster(4, "gamma(2, 0.2)", service=0.01, latency=0.1), 600, seed=3)
    trace.save("recorded.parquet")
    config = plan.Config(
        recording="recorded.parquet",
        policy=("asynchronous", "barrier"),
        collective=("none", "ring"),
        hours=1.0,
        seeds=1,
    )
    folder, _ = plan.run(config)
    table = read(folder, "plan").table(plan.PLAN).set_index("name")
    assert table.loc["asynchronous", "gradients"] == pytest.approx(
        4 * 3600 / (2 + 0.2 + 0.01), rel=0.02
    )
    assert "gradients in 1 hours" in capsys.readouterr().out
    larger = plan.make_candidates(dataclasses.replace(config, workers=16))
    assert all(one.cluster.workers == 16 for one in larger)
    assert Trace.load("recorded.parquet").workers == 4


def test_gossip_is_planned_beside_a_server(capsys):
    config = plan.Config(
        workers=4,
        compute="1",
        service="0.1",
        latency="0.5",
        topology=("server", "ring()"),
        policy=("asynchronous", "barrier", "handshake"),
        gradients=400,
        seeds=1,
        price=3600.0,  # a second of a worker costs one
        replay=4,
        steps=60,
        tune=(0.03,),
        problem="quadratic",
        target=0.05,
    )
    folder, _ = plan.run(config)
    table = read(folder, "plan").table(plan.PLAN).set_index("name")
    rates = table["gradients_per_second"]
    assert rates["server, asynchronous"] == pytest.approx(4 / 2.1, rel=0.02)
    assert rates["ring(), asynchronous"] == pytest.approx(4 / 1.0, rel=0.02)
    assert set(table.index) == {
        *("server, asynchronous", "server, barrier"),
        *("ring(), asynchronous", "ring(), handshake"),
    }
    np.testing.assert_allclose(table["money_to_target"], 4 * table["time_to_target"], rtol=1e-6)
    methods = read(folder, "plan").table(plan.REPLAYS).set_index("name")["method"]
    assert methods["ring(), asynchronous"] == "sgp" and methods["ring(), handshake"] == "adpsgd"
    cheapest = table["money_to_target"].idxmin()
    printed = capsys.readouterr().out
    assert f"verdict: cheapest replayed combination: {cheapest}, at a price of " in printed


def test_the_best_are_replayed(capsys):
    config = plan.Config(
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
        seeds=1,
        tune=(0.1, 0.3),
        problem="quadratic",
        target=0.05,
    )
    folder, summary = plan.run(config)
    finished = read(folder, "plan")
    runs, table = finished.table(plan.REPLAYS), finished.table(plan.PLAN)
    assert len(runs) == 2 * 2 and "run_folder" not in summary and len(summary) == 4
    replayed = table[table["time_to_target"].notna()]
    assert len(replayed) == 2
    for row in replayed.itertuples():
        own = runs[(runs["name"] == row.name) & (runs["learning_rate"] == row.learning_rate)]
        times = []  # held
        for run_folder, trace_file in own[["run_folder", "trace_file"]].to_numpy():
            evaluations = finished.run(run_folder).evaluations
            time, low, high = config.goal.bounded(evaluations, finished.trace(trace_file))
            assert low <= time <= high
            times.append(time)
        assert row.time_to_target == pytest.approx(np.mean(times)) and row.reached == sum(
            map(math.isfinite, times)
        )
    cluster = finished.trace(runs["trace_file"].iloc[0]).cluster
    assert cluster.message_bytes in (4e4, (2e4, 4e4))
    assert "of 2 replayed" in capsys.readouterr().out
    assert len(figures("plan").plan(finished).axes) == 2
    again, _ = plan.run(dataclasses.replace(config, resume=folder))
    pd.testing.assert_frame_equal(finished.table(plan.PLAN), read(again, "plan").table(plan.PLAN))


def test_a_simulation_shorter_than_the_absences_starts_in_the_long_run():
    cluster = Cluster(16, "gamma(1, 0.3)", failures=["crash(exponential(600), exponential(200))"])
    costs = [measure(cluster, SIZE, Horizon("gradients", 4e5), 600, seed) for seed in range(6)]
    long = measure(cluster, SIZE, Horizon("gradients", 4e5), 40_000, 0)
    mean, low, high = paired_interval(cost["seconds"] for cost in costs)
    # Without the absent workers of the start the six are a fifth too fast.
    assert low < long["seconds"] < high and high - low < 0.1 * mean
    assert all(cost["away"] == pytest.approx(0.25) for cost in costs)


def test_absent_workers_cost_nothing_unless_they_are_reserved():
    config = plan.Config(
        workers=4,
        failures=("crash(exponential(60), constant(20))",),
        gradients=4000,
        simulate=2000,
        price=3.0,
        policy=("asynchronous",),
        seeds=2,
    )
    candidates = plan.make_candidates(config)
    rows = plan.measure_all(candidates, config.horizon, config.simulate, 2, "rows")["rows"]
    money = {
        reserved: plan.plan_table(
            dataclasses.replace(config, reserved=reserved),
            candidates,
            pd.DataFrame(rows).assign(status="finished"),
        ).iloc[0]
        for reserved in (False, True)
    }
    assert money[True]["money"] == pytest.approx(3 * 4 * money[True]["seconds"] / 3600)
    assert money[False]["money"] == pytest.approx(money[True]["money"] * (1 - money[True]["away"]))
    assert money[True]["away"] > 0.1


def test_failures_are_time_that_does_not_count():
    cluster = Cluster(
        8,
        "gamma(1, 0.3)",
        failures=["crash(every=exponential(200), lasts=exponential(20), detect=1)"],
    )
    found = measure(cluster, SIZE, Horizon("gradients", 1e6), 8000, 0)
    assert found["away"] == pytest.approx(20 / 220, abs=0.02) and found["absences"] > 20
    assert found["goodput"] == pytest.approx(found["computing"] - found["in_vain"])
    assert found["computing"] + found["away"] == pytest.approx(1, abs=0.01)
    assert found["seconds"] == pytest.approx(1e6 / 8 / found["goodput"], rel=0.02)
    known = known_cost(cluster, Horizon("gradients", 1e6))
    assert (
        not known.exact
        and known.theory == pytest.approx(1e6 / 8)
        and known.theory_name.endswith("without failures")
    )
    lost = Cluster(4, 1.0, failures=["outage(every=exponential(50), lasts=1, checkpoint_every=40)"])
    undone = measure(lost, SIZE, Horizon("seconds", 2000.0), 10**6, 0)
    assert undone["gradients"] == undone["versions"] < 4 * 2000 * 0.95
    assert undone["gradients"] / (4 * 2000) == pytest.approx(undone["goodput"], rel=0.03)
