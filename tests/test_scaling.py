"""The study of scaling: Intel's analysis by hand, the published points, and its figure."""

import math

import pytest

from asyncsim import study
from asyncsim.clusters.collectives import NETWORKS
from asyncsim.study.finished import figures, read

scaling = study.load("scaling")


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
    scaling.run(scaling.Config(nodes=(4, 16), latency=1e-4))
    left, right = figures("scaling").scaling(read("results/scaling", "scaling")).axes
    drawn = {line.get_label(): line.get_xydata().tolist() for line in left.lines}
    assert [64.0, 53 / 64] in drawn["VGG-A, published"] and len(
        drawn["hybrid, without overheads"]
    ) == 2
    named = {text.get_text() for text in left.texts}
    assert {"bandwidth", "latency of a ring", "slowest at the barrier"} < named and len(named) == 5
    assert right.get_yticklabels()[-1].get_text() == "fc3" and math.isfinite(right.get_xlim()[1])


@pytest.mark.parametrize("gigabits", [100, 400])
def test_the_scaling_of_a_transformer_by_hand(gigabits):
    """Llama 7B on 64 nodes: 6.74e9 values of 2 bytes, sent and received over one link."""
    config = scaling.Config(
        network="llama_7b",
        nodes=(64,),
        examples=1,
        flops="300 TFLOP/s",
        bandwidth=f"{gigabits} Gbit/s",
        value_bytes=2,
    )
    row = scaling.run(config).set_index("way").loc["data parallel"]
    tokens, width, blocks = 2048, 4096, 32
    products = 6_738_415_616 - 32_000 * width  # the table of embeddings is looked up
    forward = 2 * tokens * products + 4 * tokens**2 * width * blocks
    computing, communicating = 3 * forward / 300e12, 2 * 2 * 6_738_415_616 / (gigabits / 8 * 1e9)
    assert row["computing"] == pytest.approx(computing, rel=0.02)
    assert row["communicating"] == pytest.approx(communicating, rel=0.02)
    # All but the last messages hide behind the passes: what is longer than these is waited for.
    waited = max(0.0, communicating - computing)
    assert row["efficiency"] == pytest.approx(computing / (computing + waited), rel=0.02)


def test_own_layers(tmp_path):
    file = tmp_path / "layers.csv"
    file.write_text("layer,parameters,operations\nfirst,1e6,2e9\nlast,4e6,8e6\n")
    summary = scaling.run(scaling.Config(layers=file, nodes=(8,), flops=1e12, bandwidth="1 GB/s"))
    row = summary.set_index("way").loc["data parallel"]
    assert row["bytes"] == 2 * 4 * 5e6 and row["computing"] == pytest.approx(4 * 3 * 2.008e-3)
    results = read("results/scaling", "scaling")
    assert not (results.folder / scaling.PUBLISHED).exists()
    buckets = scaling.Config(layers=file, nodes=(8,), flops=1e12, bandwidth=1e9, bucket="25 MB")
    # The last layer's gradient is there after the forward pass and its own backward passes.
    computing = 3 * 2.008e9 * 4 / 1e12
    ready = computing / 3 + 2 * 8e6 * 4 / 1e12
    waited = ready + 32e-3 + 8e-3 - computing
    assert scaling.run(buckets)["bubble"].iloc[0] == pytest.approx(waited)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("layer,parameters\na,1\n", "lacks the column operations"),
        ("layer,parameters,operations\na,1,2\nb,x,3\n", "parameters in line 3 is 'x'"),
        ("layer,parameters,operations\na,0,2\n", "no layer has parameters"),
    ],
)
def test_layers_that_cannot_be_read(text, message, tmp_path, capsys):
    (tmp_path / "layers.csv").write_text(text)
    assert study.main(["scaling", "--layers", str(tmp_path / "layers.csv")]) == 2
    assert message in capsys.readouterr().err
