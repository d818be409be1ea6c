"""The throughput study: what its baselines compute, its tables and its figure; never how fast anything is."""

import importlib.util
import json
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest

from asyncsim import Cluster, Constant, InputError, methods, problems, replay, simulate, study
from asyncsim.benchmark import answer as answers
from asyncsim.benchmark import bars, baselines, cases, gradients, machine, memory, replaying, tasks, turns
from asyncsim.drawing import look
from asyncsim.drawing.command import draw_folder
from asyncsim.files import write_json
from asyncsim.problems.mnist import mnist_from_arrays
from asyncsim.replays import tuning
from asyncsim.study import load_file, shipped

throughput = study.load("throughput")
figures = load_file("asyncsim.figures.throughput", shipped("figures") / "throughput.py")
Config = throughput.Config
needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs PyTorch")

KEY = jax.random.key(0)
USUAL_CNN = "usual loop, XLA's convolutions"
METHODS = {"downpour": methods.downpour(learning_rate=0.1), "gem": methods.gem(learning_rate=0.1)}


def images(examples: int, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    image = rng.standard_normal((examples, 28, 28), np.float32)
    return {"image": image, "label": rng.integers(0, 10, examples, np.int32)}


def mnist(network: str, dropout: float = 0.0):
    return mnist_from_arrays(images(24), images(6), batch_size=4, dropout=dropout, network=network)


#: Without randomness of their own, which PyTorch would draw otherwise.
PROBLEMS = {
    "quadratic": lambda: problems.quadratic(np.linspace(0.1, 1, 16)),
    "digits": lambda: problems.digits(batch_size=8, hidden=(16,)),
    "cnn": lambda: mnist("cnn"),
    "mlp": lambda: mnist("mlp"),
}


@pytest.fixture(autouse=True)
def small(tmp_path, monkeypatch):
    """Work in an empty folder, with turns of no length and a handful of images."""
    monkeypatch.chdir(tmp_path)
    tiny = cases.Scale(turn=1e-3, sweep=1e-4, visits=50, quick=True)
    monkeypatch.setattr(cases, "FULL", tiny._replace(quick=False))
    monkeypatch.setattr(cases, "QUICK", tiny)
    monkeypatch.setattr(tasks, "TRAIN_IMAGES", 640)
    monkeypatch.setattr(tasks, "TEST_IMAGES", 64)
    monkeypatch.setattr(replaying, "_SEEDS", 2)
    monkeypatch.setattr(cases, "_GROWTH", (2, 4, 8))
    measured = machine.machine
    monkeypatch.setattr(machine, "machine", lambda: measured(64, 2**16))


@pytest.fixture
def told(capsys):
    """Run the command line; return the exit code and the lines on standard output and standard error."""

    def run(*arguments: str) -> tuple[int, list[str], list[str]]:
        code = study.main(["throughput", *arguments])
        output = capsys.readouterr()
        return code, output.out.splitlines(), output.err.splitlines()

    return run


# What the baselines compute


@needs_torch
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("task", PROBLEMS)
def test_loops_in_jax_and_in_pytorch_compute_the_same(task, method):
    problem, cluster, commits = PROBLEMS[task](), Cluster(3, "gamma(1, 0.2)", service=0.0), 8
    from asyncsim.benchmark import pytorch

    central, losses, _ = baselines.UsualLoop(METHODS[method], problem).run(cluster, commits)
    theirs, their_losses = pytorch.TorchLoop(METHODS[method], problem).run(cluster, commits)
    # In float32; GEM divides by updates that may be as small as rounding, so a few elements may differ by the clip.
    np.testing.assert_allclose(their_losses, np.array(losses), rtol=2e-3 if method == "gem" else 1e-4)
    flat = np.concatenate([pytorch.from_torch(tensor).reshape(-1) for tensor in theirs])
    scale = np.abs(np.asarray(central)).max()
    agree = np.isclose(flat, np.asarray(central), rtol=0, atol=1e-4 * scale)
    assert agree.mean() > (0.99 if method == "gem" else 0.99999)


@pytest.mark.parametrize("method", METHODS)
def test_usual_loop_can_record_what_a_replay_does(method):
    # Two workers that never end at the same time: the loop's own random times are in no other order then.
    cluster, commits = Cluster(2, [Constant(1.0), Constant(1.37)], service=0.0), 20
    problem = PROBLEMS["quadratic"]()
    plain = baselines.UsualLoop(METHODS[method], problem).run(cluster, commits)
    central, losses, recorded = baselines.UsualLoop(METHODS[method], problem, records=True).run(cluster, commits)
    np.testing.assert_allclose(central, plain[0], rtol=1e-6)
    replayed = replay(simulate(cluster, commits), METHODS[method], problem, progress=False).commits
    update, moved, proxy = np.array(recorded).T
    np.testing.assert_allclose(losses, replayed["loss"], rtol=1e-5)
    np.testing.assert_allclose(np.sqrt(update), replayed["update_norm"], rtol=1e-5)
    np.testing.assert_allclose(moved / 2, replayed["central_energy"], rtol=1e-5)
    np.testing.assert_allclose(proxy / 2, replayed["proxy_energy"], rtol=1e-5)


@needs_torch
@pytest.mark.parametrize("task", PROBLEMS)
def test_pytorchs_gradients_alone_are_at_the_initial_parameters(task):
    problem = PROBLEMS[task]()
    from asyncsim.benchmark import pytorch

    losses = pytorch.TorchGradients(problem, workers=3).run(4)
    _, expected, _ = baselines.UsualLoop(METHODS["downpour"], problem).run(Cluster(3, 1.0, service=0.0), 1)
    assert losses.shape == (4,) and losses[0] == pytest.approx(float(expected[0]), rel=1e-4)


@pytest.mark.parametrize("way", gradients.WAYS)
@pytest.mark.parametrize(
    "task", ["quadratic", *[pytest.param(name, marks=pytest.mark.full) for name in ("digits", "cnn")]]
)
def test_gradients_alone_are_the_problems_gradients(task, way):
    problem = PROBLEMS[task]()
    alone = gradients.GradientsAlone(problem, workers=5)
    jobs, trees = alone.gradients(gradients.Batching(3, way))
    assert len(set(np.asarray(jobs.worker).tolist())) == 3
    params = problem.init(jax.random.key(0))
    params = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), params)
    for i in range(3):
        batch = jax.tree.map(lambda array, i=i: jnp.asarray(array)[jobs.rows[i]], problem.train)
        expected = jax.grad(problem.loss)(params, batch, KEY)
        for got, wanted in zip(jax.tree.leaves(trees), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(got[i], wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.full
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_usual_convolutions_give_the_problems_gradients(dropout):
    problem = mnist("cnn", dropout=dropout)
    params = problem.init(KEY)
    batch = jax.tree.map(lambda array: jnp.asarray(array)[:4], problem.train)
    losses = [problem.loss, baselines.with_usual_convolutions(problem).loss]
    (value, grads), (usual, wanted) = [jax.jit(jax.value_and_grad(loss))(params, batch, KEY) for loss in losses]
    assert float(usual) == pytest.approx(float(value), rel=1e-5)
    for one, other in zip(jax.tree.leaves(grads), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-5)


@pytest.mark.full
def test_gradients_alone_count_whole_pieces_and_compute_each():
    problem = PROBLEMS["digits"]()
    alone = gradients.GradientsAlone(problem, workers=5)
    batching = gradients.Batching(4, "map")
    assert [alone.amount(count, batching) for count in (1, 5, 6, 12)] == [4, 4, 8, 12]
    assert alone.amount(17, batching, at_once=2) == 16
    losses = [alone.run(count, batching) for count in (4, 8, 16)]
    assert alone.run(8, batching, at_once=2) == pytest.approx(losses[1], rel=1e-6)  # the same pieces, one a part
    jobs = alone.gradients(batching)[0]
    params = problem.init(jax.random.key(0))
    first = [
        float(problem.loss(params, jax.tree.map(lambda array, r=rows: jnp.asarray(array)[r], problem.train), KEY))
        for rows in np.asarray(jobs.rows)
    ]
    assert losses[0] == pytest.approx(sum(first), rel=1e-5)
    assert losses[0] < losses[1] < losses[2]


def test_sweep_tries_both_ways_and_keeps_the_quickest(monkeypatch):
    alone = gradients.GradientsAlone(PROBLEMS["quadratic"](), workers=8)
    rates = {(1, "map"): 3.0, (2, "map"): 1.0, (2, "vmap"): 4.0, (4, "vmap"): 9.0, (7, "vmap"): 8.0}
    monkeypatch.setattr(alone, "_rate", lambda batching, seconds: rates.get(tuple(batching), 0.5))
    monkeypatch.setattr(alone, "_programs", dict.fromkeys(rates) | {(2, "vmap, gathered rows"): None})
    swept = dict(alone.sweep(7.3, 0.1))
    # Those that fell behind are not tried with larger pieces.
    assert swept == rates | {(2, "vmap, gathered rows"): 0.5}
    assert alone.best == (4, "vmap")


@pytest.mark.parametrize(
    ("mean", "quick", "sizes"),
    [
        (1.0, False, [1]),
        (8.7, False, [1, 2, 4, 8]),
        (73.2, False, [1, 2, 4, 8, 16, 32, 64, 73]),
        (73.2, True, [1, 8, 64]),
    ],
)
def test_piece_sizes(mean, quick, sizes):
    assert gradients.piece_sizes(mean, quick) == sizes


def test_mean_wave_is_a_run_without_a_worker_twice():
    assert gradients.mean_wave(np.array([0, 1, 2, 0, 1, 1, 2, 0])) == 8 / 3
    round_robin = simulate(Cluster(4, 1.0, service=0.0), 40).frame["worker"].to_numpy()
    assert gradients.mean_wave(round_robin) == 4


@pytest.mark.parametrize(
    ("task", "operations"),
    [
        ("quadratic", 0),
        # Forward and weights' gradients, and inputs' gradients but for the first layer.
        ("digits", 2 * 8 * (2 * 64 * 16 + 3 * 16 * 10)),
        ("mlp", 2 * 4 * (2 * 784_000 + 3 * (2 * 2_000_000 + 10_000))),
        (
            "cnn",
            2 * 4 * (2 * 24 * 24 * 25 * 10 + 3 * 8 * 8 * 250 * 20 + 3 * (320 * 300 + 300 * 200 + 200 * 10)),
        ),
    ],
)
def test_operations_of_a_gradients_matrix_products(task, operations):
    assert machine.matrix_operations(PROBLEMS[task]()) == operations


def test_moving_rows_leaves_a_share_of_the_gradients_rate():
    case, problem = turns.Case("digits", 7, "gem"), problems.digits()
    (row,) = machine.commit_limit(case, METHODS["gem"], problem, 1e-3).to_dict("records")
    # Momentum and what was pulled, read and written, and what is read next, written.
    assert row["commit_mbytes"] == pytest.approx(5 * 4 * problem.parameter_count / 1e6)
    assert 0.99 < row["share_left"] < 1
    (row,) = machine.commit_limit(case, METHODS["gem"], problem, 1e9).to_dict("records")
    commits_per_second = 1e3 * row["gbytes_per_second"] / row["commit_mbytes"]
    assert row["share_left"] == pytest.approx(1 / (1 + 1e9 / commits_per_second))
    assert machine.commit_limit(case, METHODS["gem"], PROBLEMS["quadratic"](), 1e3).empty


# MNIST's second network


@pytest.mark.full
def test_mlp_has_the_thesis_layers_and_glorot_uniform_weights():
    problem = mnist("mlp")
    params = problem.init(KEY)
    shapes = [layer["weight"].shape for layer in params.values()]
    assert shapes == [(784, 1000), (1000, 2000), (2000, 1000), (1000, 10)]
    assert problem.parameter_count == 4_798_010 and problem.config["network"] == "mlp"
    for layer in params.values():
        bound = (6 / sum(layer["weight"].shape)) ** 0.5
        assert float(jnp.abs(layer["weight"]).max()) == pytest.approx(bound, rel=0.01) and not layer["bias"].any()


@pytest.mark.full
def test_mlp_against_a_plain_one():
    problem = mnist("mlp")
    params, batch = problem.init(KEY), jax.tree.map(jnp.asarray, problem.train)
    activity = batch["image"].reshape(24, -1)
    for name in ("dense1", "dense2", "dense3"):
        activity = jax.nn.relu(activity @ params[name]["weight"] + params[name]["bias"])
    scores = activity @ params["dense4"]["weight"] + params["dense4"]["bias"]
    expected = -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(scores), batch["label"][:, None], 1))
    assert float(problem.loss(params, batch, KEY)) == pytest.approx(float(expected), rel=1e-4)
    assert float(problem.evaluate(params, None, batch)["loss"]) == pytest.approx(float(expected), rel=1e-4)


def test_unknown_network_names_the_choices():
    with pytest.raises(InputError, match=r"network = 'resnet': unknown; .*choose from cnn, mlp"):
        problems.mnist(network="resnet")


# Turns and tables


@pytest.mark.parametrize("count", [1, 2, 5, 6, 7])
def test_every_contender_follows_others_from_turn_to_turn(count):
    orders = [turns.order(count, turn) for turn in range(count)]
    assert all(sorted(order) == list(range(count)) for order in orders)
    for contender in range(count):
        before = [order[order.index(contender) - 1] for order in orders if order.index(contender)]
        most = max((before.count(one) for one in before), default=0)
        assert most <= (1 if count % 2 == 0 else 2)


def test_calibration_finds_the_amount_that_takes_so_long(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(turns.time, "perf_counter", lambda: clock[0])

    def run(amount):
        clock[0] += 1e-3 * amount

    assert turns.calibrate(run, 0.5) == 500
    assert turns.calibrate(lambda amount: turns.Took(amount, 2e-3 * amount, 9.0), 0.5) == 250


def hand_made_turns(rates: dict[str, list[float]], task="cnn", workers=100, method="gem") -> pd.DataFrame:
    rows = [
        (task, workers, method, turn, name, 10, 10 / rate, rate, 0.0)
        for name, of_turns in rates.items()
        for turn, rate in enumerate(of_turns)
    ]
    return pd.DataFrame(rows, columns=list(turns.TURN_COLUMNS))


@pytest.mark.parametrize("at_once", [1, 2])
def test_ratios_are_of_the_same_turn(at_once):
    other = f"gradients alone, {at_once} at a time"
    table = hand_made_turns({"replay": [9.0, 20.0, 10.0], "gradients alone": [10.0, 20.0, 40.0], other: [20.0] * 3})
    found = turns.ratios(table).set_index("ratio")[["median", "min", "max"]]
    assert list(found.loc["replay / gradients alone"]) == [0.9, 0.25, 1.0]
    assert list(found.loc[f"{other} / gradients alone"]) == [1.0, 0.5, 2.0]
    assert list(found.loc[f"replay / {other}"]) == [0.5, 0.45, 1.0]
    assert len(found) == 3


def test_bars_say_by_how_much_they_are_missed():
    ratios = turns.ratios(
        hand_made_turns({"replay": [81.0], "gradients alone": [100.0], "usual loop": [50.0], USUAL_CNN: [27.0]})
    )
    parts = [hand_made_turns({"replay": [rate]}, workers=workers) for workers, rate in ((10, 130.0), (1000, 100.0))]
    used = pd.DataFrame({"task": ["mlp", "cnn"], "workers": [100, 1000], "method": "gem"})
    used = used.assign(memory_ratio=[1.5, 1.0], peak_bytes=[1, 4 * 2**30])
    table = bars.bars(ratios, turns.summarise(pd.concat(parts)), used, "cpu").set_index("measure")
    assert list(table.columns) == list(bars.COLUMNS[1:])
    assert table["verdict"].to_dict() == {
        "cnn: replay / gradients alone": "missed by 10%",
        f"cnn: replay / {USUAL_CNN}": "met",
        "cnn: time per commit, 1000 / 10 workers": "met",
        "mlp: peak memory / workers' state": "missed by 20%",
        "cnn: peak memory (GiB)": "met",
    }
    summary = turns.summarise(hand_made_turns({"replay": [18_760.0]}))
    table = bars.bars(ratios, summary, None, "gpu").set_index("measure")
    assert table["verdict"].to_dict() == {
        "cnn: replay / gradients alone": "met",
        "cnn: 93,800 commits at the replay's rate (s)": "met",
    }


@pytest.mark.parametrize(
    ("rates", "verdict"), [([89.0, 91.0, 92.0], "met; turns from 0.89 to 0.92"), ([95.0] * 3, "met")]
)
def test_bars_say_where_turns_do_not_agree(rates, verdict):
    measured = hand_made_turns({"replay": rates, "gradients alone": [100.0] * 3, "usual loop": [50.0] * 3})
    table = bars.bars(turns.ratios(measured), turns.summarise(measured), None, "cpu").set_index("measure")
    assert table.loc["cnn: replay / gradients alone", "verdict"] == verdict


def test_bars_are_explained_above_their_table(capsys, monkeypatch, tmp_path):
    def measured(task, methods, config, tables):
        rates = {"replay": [70.0], "gradients alone": [100.0], "usual loop": [50.0]}
        made = hand_made_turns(rates).assign(task="digits")
        tables.add("machine", pd.DataFrame({"backend": ["cpu"]}))
        tables.add("ratios", turns.ratios(made))
        throughput._keep(made, tables)

    monkeypatch.setattr(throughput, "_measure_replay", measured)
    throughput.run(Config(tasks=("digits",), out=tmp_path / "mine"))
    lines = capsys.readouterr().out.splitlines()
    explained = bars.EXPLANATION.splitlines()
    start = lines.index("bars") + 1
    assert lines[start : start + len(explained)] == explained and len(explained) <= 4
    assert lines[start + len(explained)].split() == list(bars.COLUMNS)
    assert all(f'"{word}"' in bars.EXPLANATION for word in ("met", "limit", "without_overlap"))
    assert max(map(len, explained)) <= 120


def test_bars_say_what_gradients_and_commits_reach_one_after_the_other():
    rates = {"replay": [70.0], "gradients alone": [100.0], "commits alone": [300.0], "usual loop": [50.0]}
    ratios = turns.ratios(hand_made_turns(rates).assign(task="digits", workers=100))
    table = bars.bars(ratios, turns.summarise(hand_made_turns(rates)), None, "cpu").set_index("measure")
    in_turn = 1 / (1 / 100 + 1 / 300)
    columns = ["limit", "without_overlap"]
    assert list(table.loc["digits: replay / gradients alone", columns]) == pytest.approx([1.0, in_turn / 100])
    assert list(table.loc["digits: replay / usual loop", columns]) == pytest.approx([2.0, in_turn / 50])
    assert table.loc["digits: replay / usual loop", "verdict"] == "missed by 36%, past the limit"
    assert table.loc["digits: replay / gradients alone", "verdict"] == "met"


def test_times_are_microseconds_a_commit():
    rates = {"replay": [50.0, 20.0, 25.0], "gradients alone": [100.0] * 3, "commits alone": [200.0] * 3}
    (row,) = turns.times(turns.summarise(hand_made_turns(rates))).to_dict("records")
    assert (row["gradients_us"], row["commits_us"], row["replay_us"]) == (1e4, 5e3, 4e4)
    assert math.isnan(row["with_simulation_us"])


def test_methods_without_a_usual_loop_have_a_bar_of_their_own():
    rates = {"replay": [60.0], "gradients alone": [100.0]}
    usual = turns.ratios(hand_made_turns({**rates, "usual loop": [20.0]}).assign(task="digits", workers=100))
    other = turns.ratios(hand_made_turns(rates).assign(task="digits", workers=100, method="softsync"))
    found = bars._ratio_rows(pd.concat([usual, other]), on_cpu=True)
    assert [row[2:] for row in found] == [
        ("gem", 0.6, ">= 0.68", 1.0, pytest.approx(math.nan, nan_ok=True), "missed by 12%"),
        ("softsync", 0.6, ">= 0.5", 1.0, pytest.approx(math.nan, nan_ok=True), "met"),
        ("gem", 3.0, ">= 2.2", 5.0, pytest.approx(math.nan, nan_ok=True), "met"),
    ]


@pytest.mark.parametrize(
    ("method", "vectors"), [(methods.downpour(), 2), (methods.gem(), 3)], ids=["read and proxy", "read and GEM's two"]
)
def test_expected_memory(method, vectors):
    problem = PROBLEMS["digits"]()
    assert memory.expected_bytes(method, problem, 7) == 7 * vectors * 4 * problem.parameter_count


# The study


@pytest.mark.parametrize("task", ["quadratic", "digits", pytest.param("cnn", marks=pytest.mark.full)])
def test_gradients_that_cost_nothing_are_constant(task):
    problem = PROBLEMS[task]()
    alone = baselines.without_gradients(problem)
    assert machine.matrix_operations(alone) == 0
    run = replay(simulate(Cluster(3, compute=1.0), 30), METHODS["downpour"], alone, evaluate_every=30)
    norm = 0.1 * 1e-6 * math.sqrt(problem.parameter_count)
    np.testing.assert_allclose(run.commits["update_norm"], norm, rtol=1e-5)
    assert (run.commits["loss"] == 0).all()


@pytest.mark.full
def test_concurrent_replays_are_as_many_as_a_study_computes_and_of_other_seeds(monkeypatch):
    monkeypatch.setattr(tuning, "replays_at_once", lambda problem, workers: 3)
    threads, seeds = [], []

    class Asked(replaying.Local):
        def __init__(self, at_once):
            threads.append(at_once)
            super().__init__(at_once)

    class Seeded(replaying.Replay):
        def __init__(self, trace, method, problem, seed=0, **given):
            seeds.append(seed)
            super().__init__(trace, method, problem, seed, **given)

    bench = cases.Bench("digits", PROBLEMS["digits"](), 2, cases.FULL)
    bench.sweep()
    one = replaying.Replaying(bench.workers, METHODS["gem"], bench.problem, 20)
    monkeypatch.setattr(replaying, "Local", Asked)
    monkeypatch.setattr(replaying, "Replay", Seeded)
    took = one.run_concurrently(one.commits)
    assert (threads, seeds) == ([3], [0, 1, 2])
    assert took.amount == 3 * 20 and took.seconds > 0
    monkeypatch.setattr(replaying, "_advance", lambda replay, commits: 1 // (commits != one.commits))
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        one.run_concurrently(one.commits)


@pytest.mark.full
def test_what_only_says_where_a_replay_s_time_goes_is_beside_the_usual_loops(monkeypatch):
    monkeypatch.setattr(tuning, "replays_at_once", lambda problem, workers: 4)
    monkeypatch.setattr(cases, "has_torch", lambda: False)
    bench = cases.Bench("digits", PROBLEMS["digits"](), 2, cases.FULL)
    bench.sweep()
    names = {usual: {one.name for one in bench.contenders(METHODS["gem"], usual)[1]} for usual in (False, True)}
    more = {"commits alone", "concurrent replays", "gradients alone, 4 at a time", "usual loop"}
    assert names[True] - names[False] == {*more, "usual loop, same records"}


def ensemble_of(bench):
    return replaying.Ensemble(bench.cluster, METHODS["gem"], bench.problem, bench.commits)


@pytest.mark.full
def test_ensemble_is_timed_over_all_its_seeds():
    bench = cases.Bench("quadratic", PROBLEMS["quadratic"](), 2, cases.FULL)
    bench.sweep()
    ensemble = ensemble_of(bench)
    took = ensemble.run(ensemble.commits)
    assert took.amount == ensemble.commits and took.seconds > 0
    assert ensemble.commits % ensemble.seeds == 0


def test_ensemble_has_commits_to_time_where_the_machine_is_slow():
    bench = cases.Bench("quadratic", PROBLEMS["quadratic"](), 2, cases.FULL)
    bench.limit = 1e-6
    assert bench.commits == 1
    assert ensemble_of(bench).commits > 0


@pytest.mark.full
def test_study_of_a_replay_writes_what_can_be_read(told, monkeypatch):
    # Which compiles at every call.
    monkeypatch.setattr(replaying.Ensemble, "run", lambda self, commits: turns.Took(commits, 1e-3, 0.0))
    arguments = ("--tasks=quadratic", "--workers", "2", "3", "--methods=gem", "--repeats=2", "--out=mine")
    code, out, err = told(*arguments)
    assert code == 0, err
    assert out[-1].startswith("wrote mine: config.json, machine.csv, sweep.csv, turns.csv, costs.csv, roofline.csv, ")
    tables = {path.stem: pd.read_csv(path) for path in Path("mine").glob("*.csv")}
    rows = tables["turns"]
    assert list(rows.columns) == list(turns.TURN_COLUMNS)
    assert (rows["per_second"] == rows["amount"] / rows["seconds"]).all() and (rows["setup_seconds"] >= 0).all()
    assert set(rows.groupby(["workers", "method"]).size()) == {2 * rows["contender"].nunique()}
    contenders = {"replay", "replay and simulation", "gradients alone", "ensemble of 2"}
    contenders |= {"usual loop", "usual loop, same records"}
    assert contenders <= set(rows["contender"])
    swept = tables["sweep"][tables["sweep"]["best"]]
    assert list(swept[~swept["way"].str.startswith("PyTorch")]["workers"]) == [2, 3]
    assert set(tables["costs"].columns) >= {"compile_seconds", "trace_seconds", "planning_seconds", "setup_seconds"}
    assert "commit_limits" not in tables  # too small for the memory to matter
    assert {"matmul_gflops", "copy_gbytes"} <= set(tables["machine"].columns)
    assert list(tables["growth"]["most"]) == [3]
    assert "replay / usual loop" in set(tables["ratios"]["ratio"])
    config = json.loads(Path("mine/config.json").read_text())
    assert (config["study"], config["workers"], config["repeats"]) == ("throughput", [2, 3], 2)
    assert any("quadratic, 3 workers, gem: turn 2 of 2" in line for line in err)


@pytest.mark.full
@pytest.mark.parametrize("task", ["digits", "cnn"])
def test_study_of_networks(told, task):
    code, _, err = told(f"--tasks={task}", "--workers=2", "--methods=gem", "--repeats=1", "--quick", "--out=mine")
    assert code == 0, err
    summary = pd.read_csv("mine/summary.csv")
    assert set(summary["task"]) == {task} and (summary["per_second"] > 0).all()


@pytest.mark.full
def test_methods_with_a_timing_of_their_own_are_held_against_their_limit(told):
    names = ["averaging", "softsync", "ringmaster", "hogwild", "lsgd"]
    code, out, err = told("--tasks=digits", "--workers=3", f"--methods={','.join(names)}", "--quick", "--out=mine")
    assert code == 0, err
    ratios = pd.read_csv("mine/ratios.csv")
    assert figures._SHARE in set(ratios["ratio"]) and not ratios["ratio"].str.contains("usual").any()
    assert list(dict.fromkeys(ratios["method"])) == names
    assert out[-1].endswith("summary.csv, methods.png, methods.pdf")


def test_study_of_simulation(told):
    code, out, err = told("--workers", "2", "3", "--repeats=1", "--tasks=trace,growth", "--out=mine")
    assert code == 0, err
    summary = pd.read_csv("mine/summary.csv")
    assert list(summary["contender"]) == ["simulate", "usual SimPy model"] * 2 + ["simulate"] * 3
    assert list(summary["workers"]) == [2, 2, 3, 3, 2, 4, 8]
    names = "config.json, turns.csv, ratios.csv, summary.csv, throughput.png, throughput.pdf"
    assert out[-1] == f"wrote mine: {names}"


def test_quick_takes_the_most_workers(told):
    code, _, err = told("--workers", "2", "3", "--repeats=5", "--tasks=trace", "--quick", "--out=mine")
    assert code == 0, err
    rows = pd.read_csv("mine/turns.csv")
    assert set(rows["workers"]) == {3} and set(rows["turn"]) == {0, 1}


@pytest.mark.full
def test_memory_is_measured_in_a_process_of_its_own(tmp_path):
    table = memory.measure(turns.Case("quadratic", 2, "gem"), 4, None)
    row = table.iloc[0]
    assert 0 < row["replay_bytes"] < row["peak_bytes"] and row["expected_bytes"] == 2 * 3 * 16 * 4
    assert row["memory_ratio"] == row["replay_bytes"] / row["expected_bytes"]


def test_interrupted_study_keeps_finished_cases(told, monkeypatch):
    measure, calls = turns.measure, []

    def stopping(*arguments):
        calls.append(arguments)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return measure(*arguments)

    monkeypatch.setattr(turns, "measure", stopping)
    code, _, err = told("--workers", "2", "3", "--repeats=1", "--tasks=trace", "--out=mine")
    assert (code, err[-1]) == (study.INTERRUPTED, "interrupted: what was finished is in mine")
    assert set(pd.read_csv("mine/summary.csv")["workers"]) == {2}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tasks=mnist"], "tasks = 'mnist': unknown; "),
        (["--tasks"], "tasks: none given; choose from trace, growth, quadratic, digits, cnn, mlp"),
        (["--tasks=trace,trace"], "tasks = trace, trace: one comes twice; give each once"),
        (["--methods=sgd"], "methods = 'sgd': unknown; "),
        (["--methods"], "methods: none given; choose from downpour, gem, all"),
        (["--workers", "0"], "workers = 0: must be at least 1"),
        (["--workers"], "workers: none given; give at least one number"),
        (["--workers", "3", "3"], "workers = 3, 3: one comes twice; give each once"),
        (["--repeats=0"], "repeats = 0: must be at least 1"),
        (["--tasks=mlp", "--workers=1000"], "workers = 1000: mlp is measured with at most 100; give fewer"),
    ],
)
def test_bad_input_is_told_and_nothing_is_left(told, tmp_path, arguments, message):
    code, out, err = told(*arguments, "--out=mine")
    assert (code, out, len(err)) == (2, [], 1)
    assert err[0].startswith(f"error: {message}") and list(tmp_path.iterdir()) == []


def test_what_is_left_out_is_said_aloud(capsys, monkeypatch):
    config = Config(tasks=("mlp",), workers=(10, 1000), data_dir=None)
    assert throughput._workers(config, "mlp") == [10]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    throughput._check(Config(tasks=("digits",), data_dir="data"))
    assert capsys.readouterr().err.splitlines() == [
        "note: mlp is measured with at most 100 workers: with more its state is too large",
        "note: --data-dir changes nothing for these tasks",
        "note: PyTorch is not installed: its rows are left out",
    ]


# The figure


def ten_rows() -> pd.DataFrame:
    names = ["gradients alone", "gradients alone, PyTorch", "replay", "usual loop", "gradients alone, 1 at a time"]
    rows = [
        ("digits", workers, "gem", name, 10, rate * workers, 0.9 * rate * workers, 1.2 * rate * workers)
        for workers in (10, 100)
        for rate, name in zip((8, 4, 6, 2, 9), names, strict=True)
    ]
    columns = ["task", "workers", "method", "contender", "amount", "per_second", "per_second_min", "per_second_max"]
    return pd.DataFrame(rows, columns=columns)


def write(folder, rows):
    rows.to_csv(folder / "summary.csv", index=False)
    write_json(folder / "config.json", {"study": "throughput"})


def test_figure_is_drawn_from_ten_rows(tmp_path):
    write(tmp_path, ten_rows())
    assert draw_folder(tmp_path) == [tmp_path / "throughput.png", tmp_path / "throughput.pdf"]
    first = {path.name: path.read_bytes() for path in tmp_path.glob("throughput.*")}
    assert sorted(first) == ["throughput.pdf", "throughput.png"]
    figures.draw(tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.glob("throughput.*")} == first


def test_figure_shows_medians_ranges_and_limits():
    with look.style():
        figure = figures.throughput(ten_rows())
    (axes,) = figure.axes
    assert axes.get_yscale() == "log" and axes.get_title(loc="left") == "digits"
    assert [label.get_text() for label in axes.get_xticklabels()] == ["10", "100"]
    points = [float(line.get_ydata()[0]) for line in axes.lines]
    assert sorted(points) == [20, 60, 200, 600]  # the replay's and the loop's; the others are lines across
    assert len(axes.collections) == 2 * 3 + 4
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert labels[0] == "gradients alone" and "usual loop" in labels and len(labels) == 5


@pytest.mark.parametrize(("names", "shapes"), [(["gem"], False), (["gem", "downpour"], True)])
def test_figure_says_what_stands_side_by_side(names, shapes):
    with look.style():
        figure = figures.throughput(pd.concat([ten_rows().assign(method=name) for name in names]))
    told = figure.get_suptitle().replace("\n", " ")
    assert told.startswith("side by side at each number of workers: colours are what ran")
    assert ("shapes are methods" in told) is shapes
    assert told.endswith("bars: slowest to quickest turn")


def test_marks_of_tasks_without_a_method_have_no_methods_shape():
    rows = ten_rows()
    simulated = rows[rows["contender"] == "usual loop"].assign(task="trace", method="", contender="simulate")
    with look.style():
        figure = figures.throughput(pd.concat([simulated, rows, rows.assign(method="downpour")]))
    trace, digits = ({line.get_marker() for line in axes.lines} for axes in figure.axes)
    named = {line.get_label(): line.get_marker() for line in figure.legends[0].get_lines()}
    assert trace.isdisjoint(digits) and trace == {named["simulate"]} and digits == {named["GEM"], named["DOWNPOUR"]}


def test_figure_shows_concurrent_replays_unfilled_and_no_commits_alone(tmp_path):
    other = {"usual loop": "concurrent replays", "gradients alone, PyTorch": "commits alone"}
    rows = ten_rows().replace({"contender": other})
    write(tmp_path, rows)
    drawn = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(look, "save", lambda figure, path: drawn.append(figure) or [])
        figures.draw(tmp_path)
    labels = [text.get_text() for text in drawn[0].legends[0].get_texts()]
    assert "concurrent replays" in labels and "commits alone" not in labels
    faces = [line.get_markerfacecolor() for line in drawn[0].axes[0].lines]
    assert faces.count("white") == 2 and len(faces) == 4


def test_many_methods_are_drawn_by_their_share(tmp_path):
    names = list(methods.METHODS)[:6]
    rows = pd.concat([ten_rows().assign(method=name) for name in names])
    write(tmp_path, rows)
    shares = [("digits", workers, name, figures._SHARE, 0.6, 0.5, 0.7) for workers in (10, 100) for name in names]
    ratios = pd.DataFrame(shares, columns=["task", "workers", "method", "ratio", "median", "min", "max"])
    ratios.to_csv(tmp_path / "ratios.csv", index=False)
    assert [path.name for path in figures.draw(tmp_path)] == ["methods.png", "methods.pdf"]
    few = pd.concat([ten_rows().assign(method=name) for name in ("", *names[:4])])
    write(tmp_path, few)
    assert [path.name for path in figures.draw(tmp_path)] == ["throughput.png", "throughput.pdf"]
    figure = figures.methods(ratios)
    titles = [axes.get_title(loc="left") or axes.get_title() for axes in figure.axes]
    assert titles == ["digits, 10 workers", "digits, 100 workers"]
    assert len(figure.axes[0].get_yticklabels()) == 6


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "no results of the study throughput"),
        ("", "no results of the study throughput"),
        ("task,workers\ndigits,2\n", "its summary.csv lacks method, contender"),
        (",".join(figures._COLUMNS) + "\n", "no run was finished"),
    ],
)
def test_figure_without_results_says_what_to_do(tmp_path, text, message):
    folder = tmp_path / "results"
    if text is not None:
        folder.mkdir()
        (folder / "summary.csv").write_text(text)
        write_json(folder / "config.json", {"study": "throughput"})
    with pytest.raises(InputError, match=f"{message}.*; make some with: python -m asyncsim.study throughput"):
        figures.draw(folder)


def test_the_answer_is_a_line_for_each_case():
    case = {"task": "digits", "workers": 100, "method": "gem"}
    summary = pd.DataFrame(
        [{**case, "contender": "replay", "per_second": 20_459.4}, {**case, "contender": "usual loop"}]
    )
    ratios = pd.DataFrame(
        [
            {**case, "ratio": "replay / usual loop", "median": 2.345},
            {**case, "ratio": "replay / gradients alone", "median": 0.4},
            {**case, "ratio": "replay / usual loop, same records", "median": 7.0},
            {**case, "workers": 10, "ratio": "replay / usual loop, PyTorch", "median": 9.0},
        ]
    )
    assert answers.answer(ratios, summary) == (
        "  digits, 100 workers, gem: 20,459 commits/s; 2.35 times the usual loop; "
        "2.50 times as long as its gradients alone would take"
    )
