"""Topologies, rules of aggregation and attacks from a user's file, as for methods and problems."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from asyncsim import Cluster, InputError, Trace, aggregation, simulate, study, topologies
from asyncsim.clusters.cluster_text import describe
from asyncsim.clusters.topologies import Topology, as_topology
from asyncsim.study.entries import from_file
from asyncsim.study.loading import files_of
from asyncsim.study.sweep import sweep

MINE = """
import dataclasses
import jax.numpy as jnp
import numpy as np
from asyncsim import aggregation, attacks, problems, topologies

def line(workers):
    return topologies.adjacency(np.eye(workers, k=1) + np.eye(workers, k=-1))

def trim(f):
    return aggregation.trimmed_mean(f=f)._replace(text=f"trim(f={f})")

def reverse(workers, scale=3.0):
    def change(messages, honest, byzantine, key):
        mean = jnp.mean(messages, axis=0, where=honest[:, None])
        return jnp.where(byzantine[:, None], -scale * mean, messages)
    return attacks.Attack(workers, change=change, text=f"reverse(workers={workers})")

def number():
    return 3

def labelled(batch_size=4):
    data = {"x": np.arange(24, dtype=np.float32), "label": np.arange(24) % 3}
    return problems.custom(
        lambda key: jnp.ones(1),
        lambda p, batch, key: jnp.mean((batch["x"] - p[0]) ** 2),
        data,
        batch_size=batch_size,
    )

def stated(split=None):
    return dataclasses.replace(labelled(), split=split)
"""

pytestmark = pytest.mark.usefixtures("quick_figures")


@pytest.fixture(autouse=True)
def mine(own_folders):
    Path("mine.py").write_text(MINE)


def test_a_named_matrix_has_its_name_in_titles_and_its_entries_in_files(tmp_path):
    grid = topologies.adjacency(np.ones((9, 9)), label="my grid")
    slow = topologies.slow_links(grid, [[0, 1, 5]])
    assert (repr(grid), repr(slow)) == ("my grid", "slow_links(my grid, [[0, 1, 5]])")
    assert as_topology(str(grid)) == grid and as_topology(str(slow)) == slow
    cluster = Cluster(workers=9, compute=1.0, topology=grid)
    assert describe(cluster).endswith("no server, my grid")
    trace = simulate(cluster, commits=9)
    trace.save(tmp_path / "trace.parquet")
    assert Trace.load(tmp_path / "trace.parquet").cluster == cluster
    with pytest.raises(InputError, match="name = 'a/b': names folders and files; leave out"):
        topologies.adjacency(np.ones((2, 2)), label="a/b")


def test_a_topology_of_a_file_knows_the_workers_and_is_named_after_its_function():
    line = from_file("topology", "mine.py:line", Topology, 4)
    assert repr(line) == "line" and line.neighbours(4) == [[1], [0, 2], [1, 3], [2]]
    assert from_file("topology", "mine.py:line", Topology, 4) is line
    assert from_file("topology", "ring()", Topology, 4) == "ring()"


def test_gossip_on_a_topology_of_a_file(tmp_path):
    out = tmp_path / "out"
    options = ["--workers=4", "--steps=2", "--methods=dpsgd", "--tune=0.1", "--problem=quadratic"]
    places = ["--topology", "mine.py:line", "ring()", f"--out={out}"]
    assert study.main(["gossip", *options, *places]) == 0
    table = pd.read_csv(out / "summary.csv").drop_duplicates("topology")
    assert table["topology"].tolist() == ["mine.py:line", "ring()"]
    line = topologies.adjacency(np.eye(4, k=1) + np.eye(4, k=-1)).matrices(4)[0]
    gap = 1 - sorted(abs(np.linalg.eigvals(line)))[-2]
    assert table["spectral_gap"][0] == pytest.approx(gap)


@pytest.mark.parametrize(
    ("attack", "text"),
    [
        ("mine.py:reverse(scale=5)", "mine.py:reverse(workers=2, scale=5)"),
        ("zero", "zero(workers=2)"),
        ("none", None),
    ],
)
def test_attacks_of_robustness_get_their_workers(attack, text):
    config = study.load("robustness").Config(attack=attack)
    assert config.at(byzantine=2, attack=attack).attack == text
    assert config.at(byzantine=0, attack=attack).attack is None


def test_rules_get_the_number_of_byzantine_workers():
    robustness = study.load("robustness")
    config = robustness.Config(
        rules=("mine.py:trim(f=f)", "nnm(krum(f=f), f=f)", aggregation.mean()), workers=7
    )
    (cell,) = [
        cell
        for cell in robustness.with_rules(config, sweep(config, config.points()[-1:]))
        if cell.values["byzantine"] == 2
    ]
    assert [method.name for method in cell.methods] == [
        *("batch_sgd", "trim(f=f)", "nnm(krum(f=f), f=f)", "mean()"),
    ]
    texts = [method.hyperparameters["rule"] for method in cell.methods[1:]]
    assert texts == ["trim(f=2)", "nnm(krum(f=2), f=2)", "mean()"]


def test_a_file_inside_an_argument_has_its_hash():
    for text in (
        "robust(rule='mine.py:trim(f=2)')",
        "gem, robust(rule=['mine.py:trim(f=2)', 'krum(f=1)'])",
        "mine.py:own(rule='krum(f=1)')",
    ):
        assert list(files_of({"methods": (text,)})) == ["mine.py"], text


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("gossip --topology mine.py:lime", "mine.py has no function lime; did you mean 'line'?"),
        ("gossip --topology mine.py:number", "returned 3; must return a Topology, as topologies."),
        ("gossip --topology no.py:line", "topology = 'no.py:line': there is no file no.py; give"),
        ("gossip --topology mine.py:line(3)", "a graph of 3 workers, and there are 16; give as"),
        ("robustness --rules mine.py:trim", "rules = 'mine.py:trim': f missing; write trim(f)"),
        ("robustness --rules mine.py:number", "returned 3; must return a Rule, as aggregation."),
        ("robustness --attack mine.py:number", "parameter = 'workers': unknown"),
        ("robustness --attack mine.py:reverse(workers=3)", "its workers follow from --byzantine"),
        ("staleness --attack mine.py:reverse", "attack = 'mine.py:reverse': workers missing"),
        ("staleness --attack mine.py:number", "returned 3; must return an Attack, as attacks."),
        ("compare --methods robust(rule='mine.py:trip')", "rule = 'mine.py:trip': mine.py has no"),
    ],
)
def test_a_wrong_file_or_function_is_named(command, message, capsys):
    assert study.main([*command.split(), "--problem=quadratic", "--out=out"]) == 2
    error = capsys.readouterr().err.replace("\nhint: ", "; ")
    assert message in error and "Traceback" not in error and not Path("out").exists()
