"""The study of gossip: methods run in their places, links and data are as asked, and attacks reach
methods without a server.
"""

import dataclasses

import numpy as np
import pandas as pd
import pytest

from asyncsim import study, theory
from asyncsim.base.errors import InputError
from asyncsim.study.finished import Finished, figures, read
from asyncsim.study.sweep import sweep

gossip = study.load("gossip")
SMALL = {
    "workers": 4,
    "steps": 20,
    "seeds": 1,
    "tune": (0.1,),
    "target": 0.3,
    "problem": "digits(hidden=[8])",
}
RING = "batch_sgd(policy='barrier(collective=ring)')"
ONE_PEER = "one_peer_exponential()"

pytestmark = pytest.mark.usefixtures("quick_figures")


def placed(config):
    """Return the cells of a config with the methods that run there."""
    return gossip.in_their_places(config, sweep(config, config.points()))


@pytest.mark.full
def test_replicas_are_as_far_apart_as_their_runs_say(tmp_path, capsys):
    out = tmp_path / "gossip"
    options = {**SMALL, "topology": ("ring()", ONE_PEER), "methods": ("sgp", "adpsgd", RING)}
    slow = "[gamma(5, 0.2)] + [gamma(1, 0.2)]*3"
    _, summary = gossip.run(gossip.Config(**options, compute=slow, split=(0.1, None), out=out))
    printed = capsys.readouterr()
    assert f"adpsgd on {ONE_PEER} is left out: " in printed.err
    assert "verdict: split 0.1: " in printed.out and "verdict: split none: " in printed.out
    results = read(out, "gossip")
    places = summary.loc[np.isinf(summary["split"]), ["topology", "method"]].to_numpy().tolist()
    assert places == [
        ["ring()", "sgp"],
        ["ring()", "adpsgd"],
        [ONE_PEER, "sgp"],
        ["all-reduce", "batch_sgd"],
    ]
    for row in results.summary.itertuples():
        run, trace = results.run(row.run_folder), results.trace(row.trace_file)
        assert [law.mean for law in trace.cluster.compute_laws] == [5, 1, 1, 1]
        assert run.config["problem_config"].get("split", np.inf) == row.split
        if row.topology == "all-reduce":
            assert np.isnan([row.consensus_distance, row.spectral_gap]).all()
        else:
            distances = run.evaluations["consensus_distance"]
            assert row.consensus_distance == pytest.approx(distances[1:].mean())
            assert row.spectral_gap == theory.spectral_gap(row.topology, 4)
    assert {path.stem for path in out.glob("*.png")} >= {"curves", "consensus"}


def test_an_all_reduce_is_a_collective(capsys):
    """It is the rival by default; the server's barrier has its own row, and a random latency leaves
    the all-reduce out.
    """
    options = {**SMALL, "topology": "ring()", "methods": ("sgp", RING, "averaging", "downpour")}
    config = gossip.Config(**options, latency="0.5")
    clusters = {
        (cell.values["topology"], method.name): cell.cluster_of(method)[0]
        for cell in placed(config)
        for method in cell.methods
    }
    assert [*clusters] == [
        ("ring()", "sgp"),
        ("all-reduce", "batch_sgd"),
        ("server", "averaging"),
        ("server", "downpour"),
    ]
    assert clusters["all-reduce", "batch_sgd"].collective_time == 2 * 3 * 0.5
    assert "left out" not in capsys.readouterr().err
    assert "barrier(collective=ring)" in str(gossip.Config().methods)
    placed(dataclasses.replace(config, latency="exponential(0.5)"))
    left_out = "batch_sgd on all-reduce is left out: latency = exponential(mean=0.5)"
    assert left_out in capsys.readouterr().err


def test_a_slow_link_is_one_of_worker_0():
    """To its first neighbour, as a topology has it; to the server, of the latency and the
    bandwidth.
    """
    options = {**SMALL, "methods": ("sgp", "downpour"), "workers": 3, "topology": "ring()"}
    network = {"latency": "0.5", "bandwidth": 8.0, "message_bytes": 2.0}
    ring, server = (
        cell.cluster
        for cell in placed(gossip.Config(**options, **network, slow_link=4.0))
        if cell.methods
    )
    assert str(ring.topology) == "slow_links(topology=ring(), links=[[0, 1, 4]])"
    assert server.ways[0].means == (2.0, 0.5, 0.5) and server.ways[0].transfer == (1.0, 0.25, 0.25)
    alike, *_ = placed(gossip.Config(**options, latency="0.5"))
    assert str(alike.cluster.topology) == "ring()"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"split": (0.1, 0.2), "problem": "quadratic"}, "split = 0.1: problem = 'quadratic' says"),
        ({"split": 0.1, "problem": "digits(split=0.2)"}, r"split = 0.1: problem = 'digits\(split"),
        ({"methods": ("downpour",)}, "downpour: none can be run on topology = ring()"),
    ],
)
def test_data_and_methods_that_do_not_suit_are_refused(options, message):
    config = gossip.Config(**{**SMALL, "topology": ("ring()",), "methods": ("sgp",), **options})
    with pytest.raises(InputError, match=message):
        placed(config)


def test_methods_without_a_server_are_attacked(tmp_path, capsys):
    options = {**SMALL, "steps": 2, "topology": "ring()"}
    robust = "robust_gossip(rule=trimmed_mean(f=2))"
    options["methods"] = ("sgp", "adpsgd", "clipped_gossip(f=2)", robust)
    out = tmp_path / "gossip"
    _, summary = gossip.run(gossip.Config(**options, attack="alie(workers=1, z=1)", out=out))
    assert summary["method"].tolist() == ["sgp", "clipped_gossip", "robust_gossip"]
    printed = capsys.readouterr()
    assert "attack alie(workers=1, z=1)" in printed.out
    assert "adpsgd on ring() is left out: " in printed.err
    title = figures("comparison").curves(read(out, "gossip")).get_suptitle().replace("\n", " ")
    assert "attack alie(workers=1, z=1)" in title
    # On the ring a worker has two messages.
    assert "robust_gossip: f=1 used: 3 replicas on ring()" in printed.err
    assert "clipped_gossip: f = 2 and 2 messages on ring(): none counts" in printed.err


def test_the_figure_of_the_distances_has_a_point_for_each_method_and_topology(tmp_path):
    table = pd.DataFrame(
        {
            "topology": ["ring()", "complete()", "server"],
            "method": ["sgp", "sgp", "downpour"],
            "seeds": 2,
            "spectral_gap": [0.25, 1.0, np.nan],
            "consensus_distance": [0.5, 0.125, np.nan],
            "consensus_distance_sd": 0.01,
        }
    )
    for name in ("comparison", "tuning"):
        table.to_csv(tmp_path / f"{name}.csv", index=False)
    config = {"study": "gossip", "problem": "digits", "measure": "time_to_target"}
    config |= {"compared": ["method", "topology"], "cells": [{"topology": "ring()"}]}
    finished = Finished(tmp_path, config, table)
    figure = figures("gossip").consensus(finished)
    points = [line.get_xydata().tolist() for line in figure.axes[0].lines]
    assert points == [[[0.25, 0.5], [1.0, 0.125]]]
    assert "is lowest for sgp at spectral gap 1 (0.125)" in figure.get_label()
