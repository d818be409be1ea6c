"""The study of scaling: Intel's analysis by hand, the published points, and its figure."""

import math

import pytest

from asyncsim import study
from asyncsim.clusters.collectives import NETWORKS
from asyncsim.study.finished import figures, read

pytestmark = pytest.mark.usefixtures("quick_figures")
scaling = study.load("scaling")


def scaled(**options):
    """Return the summary and the folder of a study of scaling."""
    summary = scaling.run(scaling.Config(**options))
    return summary.set_index(["way", "nodes"]), read("results/scaling", "scaling")


def test_layers_and_iterations_are_those_of_the_formulas(capsys):
    """Intel's analysis of a network, by hand."""
    summary, results = scaled(nodes=(1, 128), overlap=0.0)
    config, layers = scaling.Config(), results.table(scaling.LAYERS)
    whole, hybrid = (
        layers[(layers["nodes"] == 128) & (layers["way"] == way)].set_index("layer")
        for way in ("data parallel", "hybrid")
    )
    assert whole["computing"].sum() * config.flops == pytest.approx(183e9, rel=3e-3)
    dense = ["fc1", "fc2", "fc3"]
    assert whole.loc[dense, "bytes"].sum() == pytest.approx(989e6, rel=1e-3)
    assert tuple(hybrid.loc["fc1", ["groups", "bytes"]]) == (4, pytest.approx(51.4e6, rel=1e-3))
    assert (hybrid.drop(index=dense)["groups"] == 128).all()
    first = NETWORKS["vgg_a"][0]
    assert whole.loc["conv1", "bytes"] == pytest.approx(2 * 4 * first.parameters)
    # The network is busy for longer than the layers below fc3 compute.
    spent, hidden = whole["bytes"].sum() / config.bandwidth, whole["computing"].drop("fc3").sum()
    assert summary.loc[("data parallel", 128), "bubble"] == pytest.approx(spent - hidden)
    assert (summary.xs(1, level="nodes")["efficiency"] == 1).all()
    assert "speed-up" in capsys.readouterr().out
    left, right = figures("scaling").scaling(results).axes
    curves = {line.get_label(): line.get_xdata().tolist() for line in left.lines}
    assert 64.0 in curves["VGG-A, published"]
    assert len(curves["hybrid, without overheads"]) == 2
    named = {text.get_text() for text in left.texts}
    assert {"bandwidth", "latency of a ring", "slowest at the barrier"} < named and len(named) == 5
    assert right.get_yticklabels()[-1].get_text() == "fc3" and math.isfinite(right.get_xlim()[1])
    compute_bound, _ = scaled(nodes=(64,), bandwidth=1e15)
    assert compute_bound["efficiency"].to_list() == pytest.approx([1, 1], abs=1e-6)


def test_what_the_published_points_imply():
    speed_up = scaling.explanations().pivot(index="overhead", columns="nodes", values="speed_up")
    assert speed_up[64].to_list() == pytest.approx([53.0] * 5)
    constant = (64 / 53 - 1) / 63
    ring = 128 / (1 + 127 * constant)
    assert abs(ring - 90) < 0.3
    predicted = speed_up[128].to_dict()
    assert 100 < predicted.pop("slowest at the barrier: gamma of cv c") < 106
    for name, value in (
        ("bandwidth: constant", 128 * 53 / 64),
        ("latency of a ring: c (N - 1)", ring),
        ("latency of a tree: c log2 N", 128 / (1 + 7 / 6 * (64 / 53 - 1))),
    ):
        assert predicted[name] == pytest.approx(value)


@pytest.mark.parametrize("gigabits", [100, 400])
def test_the_scaling_of_a_transformer_by_hand(gigabits):
    """Llama 7B on 64 nodes: 6.74e9 values of 2 bytes, sent and received over one link."""
    options = {"network": "llama_7b", "nodes": (64,), "examples": 1, "value_bytes": 2}
    summary, _ = scaled(**options, flops="300 TFLOP/s", bandwidth=f"{gigabits} Gbit/s")
    row = summary.loc["data parallel", 64]
    tokens, width, blocks = 2048, 4096, 32
    products = 6_738_415_616 - 32_000 * width  # the table of embeddings is looked up
    forward = 2 * tokens * products + 4 * tokens**2 * width * blocks
    computing, communicating = 3 * forward / 300e12, 2 * 2 * 6_738_415_616 / (gigabits / 8 * 1e9)
    # All but the last messages hide behind the passes: what is longer than these is waited for.
    efficiency = computing / max(computing, communicating)
    expected = {"computing": computing, "communicating": communicating, "efficiency": efficiency}
    assert row[[*expected]].to_dict() == pytest.approx(expected, rel=0.02)


def test_own_layers(tmp_path):
    layers = tmp_path / "layers.csv"
    layers.write_text("layer,parameters,operations\nfirst,1e6,2e9\nlast,4e6,8e6\n")
    options = {"layers": layers, "nodes": (8,), "flops": 1e12}
    summary, results = scaled(**options, bandwidth="1 GB/s")
    row = summary.loc["data parallel", 8]
    assert row["bytes"] == 2 * 4 * 5e6 and row["computing"] == pytest.approx(4 * 3 * 2.008e-3)
    assert not (results.folder / scaling.PUBLISHED).exists()
    buckets, _ = scaled(**options, bandwidth=1e9, bucket="25 MB")
    # The last layer's gradient is there after the forward pass and its own backward passes.
    computing = 3 * 2.008e9 * 4 / 1e12
    ready = computing / 3 + 2 * 8e6 * 4 / 1e12
    assert buckets["bubble"].iloc[0] == pytest.approx(ready + 32e-3 + 8e-3 - computing)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("layer,parameters\na,1\n", "lacks the column operations"),
        ("layer,parameters,operations\na,1,2\nb,x,3\n", "parameters in line 3 is 'x'"),
        ("layer,parameters,operations\na,0,2\n", "no layer has parameters"),
    ],
)
def test_layers_that_cannot_be_read(text, message, tmp_path, told):
    (tmp_path / "layers.csv").write_text(text)
    code, _, err = told("scaling", "--layers", str(tmp_path / "layers.csv"))
    assert code == 2 and message in err[-1]
