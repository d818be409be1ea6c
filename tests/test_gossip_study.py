"""The study of gossip: its table is that of its runs, it goes on where it was, and it refuses what
it cannot use.
"""

import dataclasses

import pandas as pd
import pytest

from asyncsim import study, theory
from asyncsim.study.finished import figures, read
from asyncsim.study.target import Target

gossip = study.load("gossip")
SMALL = {
    "workers": 4,
    "steps": 20,
    "tune": (0.1, 0.4),
    "target": 0.3,
    "slow": 5.0,
    "problem": "digits(hidden=[8])",
}
RING = "batch_sgd(policy='barrier(collective=ring)')"
TOPOLOGIES = ("ring()", "one_peer_exponential()")


pytestmark = pytest.mark.usefixtures("unrendered_figures")


@pytest.mark.full
def test_it_runs_goes_on_and_draws(tmp_path, capsys):
    out = tmp_path / "gossip"
    config = gossip.Config(**SMALL, topology=TOPOLOGIES, methods=("sgp", "adpsgd", RING), out=out)
    _, summary = gossip.run(config)
    said = capsys.readouterr()
    assert (
        "adpsgd is left out" in said.err
        and "left out: adpsgd on one_peer_exponential(): " in said.out
    )
    assert "one seed cannot show the noise" in said.out
    assert "of 0.3 is reached and held at the next 2 evaluations" in said.out
    assert "the fastest on a topology, " in said.out
    assert " reaches a test accuracy of 0.3 in " in said.out and "(one seed" in said.out
    assert len(summary) == 4 * 2  # on a directed graph nobody meets in pairs
    finished = read(out, "gossip")
    table = finished.table(gossip.TABLE)
    found = list(table[["topology", "method"]].itertuples(index=False, name=None))
    assert found == [
        ("ring()", "sgp"),
        ("ring()", "adpsgd"),
        (TOPOLOGIES[1], "sgp"),
        ("all-reduce", "batch_sgd"),
    ]
    assert table["spectral_gap"].iloc[0] == pytest.approx(theory.spectral_gap("ring()", 4))
    for row in table.itertuples():
        rows = finished.rows(
            topology=row.topology, method=row.method, learning_rate=row.learning_rate
        )
        (run,) = (finished.run(name) for name in rows["run_folder"])
        assert row.time_to_target == pytest.approx(
            Target(0.3, "test_accuracy", 2).time(run.evaluations)
        )
        (trace,) = (finished.trace(name) for name in rows["trace_file"])
        assert [law.mean for law in trace.cluster.compute_laws] == [5, 1, 1, 1]
    files = {path: path.read_bytes() for path in (out / "gossip.png", out / gossip.TABLE)}
    for path in files:
        path.unlink()
    gossip.run(
        gossip.Config(**SMALL, topology=TOPOLOGIES, methods=("sgp", "adpsgd", RING), resume=out)
    )
    assert "read" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in files} == files


@pytest.mark.full
def test_data_alike_and_split(tmp_path, capsys):
    out = tmp_path / "gossip"
    options = {**SMALL, "tune": (0.4,), "methods": ("sgp", "downpour"), "topology": ("ring()",)}
    gossip.run(gossip.Config(**options, split=(0.1, "none"), out=out))
    said, progress = capsys.readouterr()
    assert "split none, " in progress and "split inf" not in progress
    assert "split 0.1: " in said and "split none: " in said
    finished = read(out, "gossip")
    table = finished.table(gossip.TABLE)
    assert table["split"].tolist() == [0.1, 0.1, float("inf"), float("inf")]
    for row in table.itertuples():
        (run,) = finished.runs(split=row.split, topology=row.topology, method=row.method)
        assert run.config["problem_config"].get("split", float("inf")) == row.split
        assert run.evaluations["test_accuracy"].iloc[-1] == row.test_accuracy
    assert (out / "gossip.png").exists()


def test_the_verdict_begins_with_the_fastest_and_its_ratios_are_above_one():
    table = pd.DataFrame(
        {
            "topology": ["ring()", "one_peer_exponential()", "server"],
            "method": ["dpsgd", "sgp", "downpour"],
            "learning_rate": 0.1,
            "seeds": 1,
            "reached": 1,
            "time_to_target": [6.4, 7.2, 1.6],
            "gradients_to_target": [23.0, 22.0, 4.0],
            "simulated_seconds": 12.0,
        }
    )
    goal = Target(0.3)
    assert gossip.verdict(table, goal) == (
        "downpour on the server reaches a training loss of 0.3 in 1.60 s and 4 gradients; the "
        "fastest on a topology, dpsgd on the ring, takes 4.00 times as long and 5.75 times the "
        "gradients (one seed, rate 0.1)"
    )
    slow_server = table.assign(time_to_target=[9.0, 6.4, 12.8], learning_rate=[0.1, 0.1, 0.2])
    assert gossip.verdict(slow_server, goal) == (
        "the fastest on a topology, sgp on the one peer exponential graph, reaches a training "
        "loss of 0.3 in 6.40 s and 22 gradients; downpour on the server takes 2.00 times as long "
        "and 5.50 times fewer gradients (one seed)"
    )


def test_an_all_reduce_is_a_collective(capsys):
    """It is the rival by default; the server's barrier has its own row, and a random latency leaves
    the all-reduce out.
    """
    options = {**SMALL, "topology": ("ring()",), "tune": (0.1,)}
    config = gossip.Config(**options, methods=("sgp", RING, "averaging", "downpour"), latency="0.5")
    cells, left_out = gossip._cells(config)
    clusters = {
        (cell.values["topology"], method.name): cell.cluster_of(method)[0]
        for cell in cells
        for method in cell.methods
    }
    assert [*clusters] == [
        ("ring()", "sgp"),
        ("all-reduce", "batch_sgd"),
        ("server", "averaging"),
        ("server", "downpour"),
    ]
    assert clusters["all-reduce", "batch_sgd"].collective_time == 2 * 3 * 0.5 and not left_out
    assert "barrier(collective=ring)" in str(gossip.Config().methods)
    random = dataclasses.replace(config, latency="exponential(0.5)")
    _, (why,) = gossip._cells(random)
    assert why.startswith("left out: batch_sgd on all-reduce: latency = exponential(mean=0.5)")


def test_a_slow_link_is_one_of_worker_0():
    """To its first neighbour, as a topology has it; to the server, of the latency and the
    bandwidth.
    """
    config = gossip.Config(
        workers=3, slow_link=4.0, latency="0.5", bandwidth=8.0, message_bytes=2.0
    )
    assert (
        str(config.at(topology="ring()").make_cluster(2.0).topology)
        == "slow_links(topology=ring(), links=[[0, 1, 4]])"
    )
    server = config.at(topology=gossip.SERVER).make_cluster(2.0)
    assert server.ways[0].means == (2.0, 0.5, 0.5) and server.ways[0].transfer == (1.0, 0.25, 0.25)
    alike = gossip.Config(workers=3, latency="0.5")
    assert str(alike.at(topology="ring()").make_cluster(None).topology) == "ring()"


def test_methods_without_a_server_are_attacked(tmp_path, capsys):
    options = {**SMALL, "steps": 2, "tune": (0.1,), "topology": ("ring()",)}
    robust = "robust_gossip(rule=trimmed_mean(f=2))"
    options["methods"] = ("sgp", "adpsgd", "clipped_gossip(f=2)", robust)
    _, summary = gossip.run(
        gossip.Config(**options, attack="alie(workers=1, z=1)", out=tmp_path / "gossip")
    )
    assert summary["method"].tolist() == ["sgp", "clipped_gossip", "robust_gossip"]
    printed = capsys.readouterr()
    assert "4 workers, worker 0 5 times as slow, attack alie(workers=1, z=1); time" in printed.out
    figure = figures("gossip").gossip(read(tmp_path / "gossip", "gossip"))
    title = figure.get_suptitle().replace("\n", " ")
    assert figure.get_label().startswith("No method on a topology reached a test accuracy")
    assert "attack alie(workers=1, z=1)" in title and "all at learning rate 0.1" in title
    # On the ring a worker has two messages.
    assert "robust_gossip: f=1 used: 3 replicas on ring()" in printed.err
    assert "clipped_gossip: f = 2 and 2 messages on ring(): none counts" in printed.err
