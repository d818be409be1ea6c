"""The study of scaling: Intel's analysis by hand, the published points, and its figure."""

import math

import pytest

from asyncsim import study
from asyncsim.clusters.collectives import NETWORKS
from asyncsim.study.finished import figures, read

scaling = study.load("scaling")

pytestmark = pytest.mark.usefixtures("empty_folder")


def test_layers_and_iterations_are_those_of_the_formulas(capsys):
    config = scaling.Config(nodes=(1, 128), overlap=0.0)
    summary = scaling.run(config).set_index(["way", "nodes"])
    layers = read("results/scaling", "scaling").table(scaling.LAYERS)
    whole = layers[(layers["nodes"] == 128) & (layers["way"] == "data parallel")].set_index("layer")
    hybrid = layers[(layers["nodes"] == 128) & (layers["way"] == "hybrid")].set_index("layer")
    assert whole["computing"].sum() * config.flops == pytest.approx(183e9, rel=3e-3)
    dense = ["fc1", "fc2", "fc3"]
    assert whole.loc[dense, "bytes"].sum() == pytest.approx(989e6, rel=1e-3)
    assert hybrid.loc["fc1", "groups"] == 4 and hybrid.loc["fc1", "bytes"] == pytest.approx(
        51.4e6, rel=1e-3
    )
    assert (hybrid.drop(index=dense)["groups"] == 128).all()
    first = NETWORKS["vgg_a"][0]
    assert whole.loc["conv1", "bytes"] == pytest.approx(2 * 4 * first.parameters)
    # The network is busy for longer than the layers below fc3 compute.
    spent, hidden = whole["bytes"].sum() / config.bandwidth, whole["computing"].drop("fc3").sum()
    assert summary.loc[("data parallel", 128), "bubble"] == pytest.approx(spent - hidden)
    assert (summary.xs(1, level="nodes")["efficiency"] == 1).all()
    compute_bound = scaling.run(scaling.Config(nodes=(64,), bandwidth=1e15))
    assert compute_bound["efficiency"].to_list() == pytest.approx([1, 1], abs=1e-6)
    assert "speed-up" in capsys.readouterr().out


def test_what_the_published_points_imply():
    found = scaling.explanations().pivot(index="overhead", columns="nodes", values="speed_up")
    assert found[64].to_list() == pytest.approx([53.0] * 5)
    predicted = found[128]
    assert predicted["bandwidth: constant"] == pytest.approx(128 * 53 / 64)
    constant = (64 / 53 - 1) / 63
    assert predicted["latency of a ring: c (N - 1)"] == pytest.approx(128 / (1 + 127 * constant))
    assert abs(predicted["latency of a ring: c (N - 1)"] - 90) < 0.3
    assert predicted["latency of a tree: c log2 N"] == pytest.approx(
        128 / (1 + 7 / 6 * (64 / 53 - 1))
    )
    assert 100 < predicted["slowest at the barrier: gamma of cv c"] < 106


def test_the_figure_shows_what_is_computed_and_published():
    scaling.run(scaling.Config(network="resnet50", nodes=(4, 16), latency=1e-4))
    left, right = figures("scaling").scaling(read("results/scaling", "scaling")).axes
    drawn = {line.get_label(): line.get_xydata().tolist() for line in left.lines}
    assert [64.0, 53 / 64] in drawn["VGG-A, published"] and len(drawn["hybrid, computed"]) == 2
    assert right.get_yticklabels()[-1].get_text() == "fc" and math.isfinite(right.get_xlim()[1])
