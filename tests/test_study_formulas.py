"""What single studies compute, against their formulas and against numbers computed by hand."""

import dataclasses
import math
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pandas as pd
import pytest
from cases import tiny_mnist
from hypothesis import given
from hypothesis import strategies as st

from asyncsim import (
    InputError,
    Run,
    methods,
    prescribed,
    problems,
    replay,
    simulate,
    study,
    theory,
)
from asyncsim.clusters.laws import HalfNormal
from asyncsim.study import sweep
from asyncsim.study.finished import figures, read

pytestmark = pytest.mark.usefixtures("quick_figures")
delays, ensembles, momentum, stability, windows = (
    study.load(name) for name in ("delays", "ensembles", "momentum", "stability", "windows")
)


# Runs of single studies


def run_of(name, **options):
    """Run a study of one seed on a quadratic, unless the options say otherwise."""
    module = study.load(name)
    options = {"seeds": 1, "problem": "quadratic", "out": Path("mine")} | options
    summary = module.run(module.Config(**options)).summary
    return read("mine", name), summary


def test_rates_are_chosen_on_further_seeds_over_half_of_the_steps(capsys):
    methods = ("downpour", "sgd(learning_rate=0.02)")
    options = {"workers": 2, "steps": 8, "seeds": 2, "tune": (0.01, 0.1), "tune_seeds": 1}
    results, summary = run_of("staleness", methods=methods, **options)
    trials = results.table("trials.csv")
    assert set(trials["seed"]) == {100_000} and set(summary["seed"]) == {0, 1}
    best = trials[trials["method"] == "downpour"].set_index("learning_rate")["train_loss"].idxmin()
    rates = summary.set_index("method")["method.learning_rate"]
    assert set(rates["downpour"]) == {best} and set(rates.filter(like="sgd")) == {0.02}
    lengths = {len(results.trace(file)) for file in trials["trace_file"]}
    assert 2 * max(lengths) == len(results.trace(summary["trace_file"].iloc[0])) == 16
    assert "chosen on 1 further seed" in capsys.readouterr().out
    assert set(results.table("tuning.csv")["seeds"]) == {1}


def test_without_methods_policies_have_traces_alone():
    options = {"steps": 30, "seeds": 2, "policy": ("asynchronous", "barrier"), "window": (1, 3)}
    results, summary = run_of(
        "policies", workers=4, service=0.0, compute="exponential(1)", methods=(), **options
    )
    assert len(summary) == 2 * 2 * 2
    names = {path.name for path in results.folder.iterdir()}
    assert "time.png" in names and not {"runs", "comparison.csv", "curves.png"} & names
    table = results.table("clusters.csv").set_index(["policy", "window"])
    assert table.loc[("asynchronous", 3), "throughput"] == pytest.approx(4 / 3, rel=0.2)
    staleness = table["staleness_mean"]
    assert staleness["barrier"].max() == 0 < staleness["asynchronous"].min()


def test_disciplines_differ_in_who_is_served():
    """Four workers of demand 0.5/1.5 each: the queue is never empty for long, and the last rank
    waits behind all others.
    """
    options = {"steps": 10, "service": 0.5, "compute": "gamma(1, 0.2)", "methods": ()}
    names = ("fifo", "lowest_rank")
    results, _ = run_of("policies", workers=4, policy="asynchronous", discipline=names, **options)
    ranks = results.table("ranks.csv")
    assert list(ranks["worker"]) == [0, 1, 2, 3] * 2
    shares = ranks.pivot(index="worker", columns="discipline", values="share")
    assert shares.sum().tolist() == pytest.approx([1, 1])
    assert shares["fifo"].min() >= 0.2
    assert shares["lowest_rank"][3] < 0.2 < shares["lowest_rank"][0]


def test_a_leader_rests_where_the_gradient_is_zero(told):
    options = "--workers 4 --window 1 --tune 0.01 --gradients 1500 --seeds 1 --x64 --out=mine"
    methods = ("lgd(pull=0.005)", "easgd(alpha=0.005)", "lsgd")
    arguments = [*options.split(), "--problem", "wells(tilt=0.3)", "--methods", *methods]
    assert told("leaders", *arguments)[0] == 0
    gradient = read("mine", "leaders").table("comparison.csv").set_index("method")["gradient"]
    assert gradient["lgd"] < 1e-8 and gradient["lsgd"] < 1e-6
    assert gradient["easgd"] == pytest.approx(0.486, abs=1e-3)


def test_methods_without_a_server_are_attacked(capsys):
    """On the ring a worker has two messages."""
    robust = "robust_gossip(rule=trimmed_mean(f=2))"
    options = {"workers": 4, "steps": 2, "tune": (0.1,), "target": 0.3, "topology": "ring()"}
    options["methods"] = ("sgp", "adpsgd", "clipped_gossip(f=2)", robust)
    results, summary = run_of("gossip", attack="alie(workers=1, z=1)", **options)
    assert summary["method"].tolist() == ["sgp", "clipped_gossip", "robust_gossip"]
    out, err = capsys.readouterr()
    title = figures("comparison").curves(results).get_suptitle().replace("\n", " ")
    assert "attack alie(workers=1, z=1)" in out and "attack alie(workers=1, z=1)" in title
    assert "adpsgd on ring() is left out: " in err
    assert "robust_gossip: f=1 used: 3 replicas on ring()" in err
    assert "clipped_gossip: f = 2 and 2 messages on ring(): none counts" in err


@pytest.mark.full
def test_limits_of_gradient_descent(monkeypatch):
    """One worker on a quadratic of curvature one: the loss shrinks with a rate below two and grows
    above it.
    """
    module = study.load("stability")
    monkeypatch.setattr(module, "_RATES", [1.0, 1.9, 2.1])
    monkeypatch.setattr(module, "_COUNTS", [1])
    options = {"workers": (1,), "learning_rate": 1, "methods": ("downpour",), "steps": 40}
    results, _ = run_of("stability", problem="quadratic(curvature=[1],noise=0)", **options)
    table = results.table("limits.csv").set_index("question").T
    assert table["learning_rate"][["largest_stable", "smallest_unstable"]].tolist() == [1.9, 2.1]
    assert table["workers"]["largest_stable"] == 1
    assert np.isnan(table["workers"]["smallest_unstable"])
    # The one number of workers; then the highest rate first.
    trials = results.table("limit_runs.csv")[["learning_rate", "stable"]]
    assert list(trials.itertuples(index=False, name=None)) == [
        (1.0, True),
        (2.1, False),
        (1.9, True),
    ]


@pytest.mark.full
def test_directions_of_averaged_updates_and_adags_factor(lenient):
    options = {"steps": 8, "epochs": None, "optimizer": None, "learning_rate": 0.05}
    options |= {"directions_every": 2, "diagnose_every": 4, "workers": (2,), "window": (1, 8)}
    problem = problems.digits(batch_size=32, hidden=())
    results, summary = run_of("windows", methods=("agn", "adag"), problem=problem, **options)
    grid = summary.set_index(["method", "window"])
    cosines = grid.loc["agn", list(study.load("windows").COSINES)]
    assert (cosines.loc[8] > cosines.loc[1]).all()
    run = results.run(summary["run_folder"].iloc[0])
    # The last step goes to the end itself.
    assert run.commits["target_cosine"].iloc[-4:].max() > 0.9


# Delays


def in_float64(trace, method, curvature):
    problem = problems.quadratic(curvature)
    return replay(trace, method, problem, precision="float64", progress=False)


@pytest.mark.parametrize(
    ("method", "rate", "mu", "nesterov", "window"),
    [
        # The effective rate of an outer optimizer is the server's over one minus the momentum.
        (delays.outer(0.6, 0.8, "nesterov", 0.3), 0.3, 0.8, True, 2),
        (delays.outer(0.6, 0.8, "heavy_ball", 0.3), 0.3, 0.8, False, 2),
        (delays.heavy_ball(0.2, -0.5), 0.2, -0.5, False, 1),
    ],
)
def test_momentum_on_the_server_is_its_formula(method, rate, mu, nesterov, window):
    curvature, scale = np.array([1.0, 0.2]), 0.6 * (1 - mu) if window > 1 else 1
    trace = prescribed(3, 40, 4, window=window)
    path, m = [np.ones(2)], 0.0
    for version in trace.frame["read_version"]:
        change = path[version] * ((1 - rate * curvature) ** window - 1)
        m = mu * m + change
        path.append(path[-1] + scale * (mu * m + change if nesterov else m))
    run = in_float64(trace, method, curvature)
    np.testing.assert_allclose(run.params, path[-1], rtol=1e-10)


@pytest.mark.full
@pytest.mark.parametrize(("delay", "rule"), [(1, "heavy_ball"), (4, "nesterov")])
def test_the_largest_stable_rate_is_that_of_theory(delay, rule):
    """Two per cent below it a quadratic's loss shrinks, two per cent above it grows."""
    trace = prescribed(delay, 2000, delay + 1)
    root = theory.momentum_stable_rate(0.9, delay, rule)
    for factor in (0.98, 1.02):
        losses = in_float64(trace, delays.outer(factor * root, 0.9, rule, 1.0), [1.0]).commits[
            "loss"
        ]
        assert (losses[1000:].max() > losses[:1000].max()) == (factor > 1)


@pytest.mark.parametrize("adaptive", [True, False])
def test_the_adaptive_optimizer_is_the_methods(adaptive):
    trace, make = prescribed([*range(10)], 10, 2), delays.OPTIMIZERS["adamw_90"][1]
    both = (
        delays.tried(0.3, float(adaptive), "adamw_90"),
        methods.server_optimizer(optimizer=make(0.3), adaptive=adaptive),
    )
    params = [in_float64(trace, method, [1.0, 0.1]).params for method in both]
    np.testing.assert_allclose(*params, rtol=1e-12)


def test_profiles_have_one_mean():
    for stages, staleness in ((2, 3), (4, 6), (5, 4)):
        for profile in delays.profiles(stages, staleness).values():
            assert np.mean(profile) == staleness


# Momentum


def synthetic(seeds, generator, noise=0.05):
    """Paths whose mean has momentum 0.8 and step 0.05, each with its own noise."""
    mean = [1.0, 0.9]
    for _ in range(38):
        mean.append(mean[-1] + 0.8 * (mean[-1] - mean[-2]) - 0.05 * mean[-1])
    return np.array(mean) + noise * generator.normal(size=(seeds, len(mean)))


def test_estimate_has_no_bias_and_a_true_error():
    """Of few and noisy paths, where least squares on the mean path finds far less momentum."""
    generator, repeats = np.random.default_rng(0), 400
    estimates = [momentum.estimate_momentum(synthetic(30, generator)) for _ in range(repeats)]
    (mu, mu_error, step, step_error), spread = np.mean(estimates, 0), np.std(estimates, 0)
    # Four standard errors of the mean of the repetitions; a ratio of estimators has a bias of its
    # own of lower order.
    assert abs(mu - 0.8) < (4 / repeats**0.5 + 0.1) * spread[0]
    assert abs(step - 0.05) < (4 / repeats**0.5 + 0.1) * spread[2]
    # The jackknife counts the square of the noise twice, so that its error is the spread or
    # somewhat more.
    assert 0.95 < mu_error / spread[0] < 1.7 and 0.95 < step_error / spread[2] < 1.7

    def naive(paths):
        path = paths.mean(0)
        move = np.diff(path)
        return np.linalg.lstsq(np.stack([move[:-1], -path[1:-1]], -1), move[1:], rcond=None)[0][0]

    biased = np.mean([naive(synthetic(30, generator)) for _ in range(repeats)])
    assert abs(biased - 0.8) > 3 * abs(mu - 0.8)


@pytest.mark.parametrize("window", [1, 3])
def test_paths_are_those_of_the_formula(window):
    """Each commit moves by what the worker's plain local steps make of what it read."""
    options = {"workers": (3,), "seeds": 3, "steps": 4, "window": window}
    config = momentum.Config(**options, problem=momentum.revealing_quadratic())
    (cell,) = sweep.sweep(config, [{"workers": 3, "learning_rate": 0.2}])
    paths, _ = momentum.central_paths(cell, methods.downpour(0.2), steps=4)
    assert paths.shape == (3, 13)
    for seed, path in enumerate(paths):
        trace, expected = simulate(cell.cluster, 4 * 3 + 20 * 3, seed), [1.0]
        for version in trace.frame["read_version"][:12]:
            expected.append(expected[-1] - (1 - 0.8**window) * expected[version])
        np.testing.assert_allclose(path, expected, rtol=1e-12)


# The GEM paper


@given(
    st.lists(st.integers(0, 1000), unique=True, min_size=1, max_size=40).map(sorted),
    st.integers(-1, 1001),
)
def test_bisection_finds_a_known_limit(values, limit):
    shared = {"methods": [SimpleNamespace(name="gem")], "config": SimpleNamespace(seeds=1)}
    cells = tuple(SimpleNamespace(values={"workers": n}, **shared) for n in values)

    def trial(cell, seed):
        return {"stable": cell.values["workers"] <= limit, **cell.values}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stability, "_run_trial", trial)
        tables = stability.limits_of(stability.Search("workers", 0.1, cells))
    (row,), trials = (tables[name] for name in stability.TABLES)
    stable, unstable = [v for v in values if v <= limit], [v for v in values if v > limit]
    assert row["largest_stable"] == (stable[-1] if stable else None)
    assert row["smallest_unstable"] == (unstable[0] if stable and unstable else None)
    workers = [trial["workers"] for trial in trials]
    bound = math.ceil(math.log2(len(values))) + 1 if unstable else 1
    assert len(workers) == len(set(workers)) <= bound


def test_first_and_last_loss():
    """Two workers of five steps: their first steps are commits 0 and 2, and a tenth of the commits
    is one.
    """
    step, loss = [0, 1, 0, 1, 2, 2, 3, 3, 4, 4], [5.0, 9, 3, 9, 9, 9, 9, 9, 9, 2]
    run = SimpleNamespace(commits=pd.DataFrame({"worker_step": step, "loss": loss}))
    assert stability.first_and_last(run, 10) == (4.0, 2.0)


def test_epochs_are_passes_through_the_data():
    """30 passes through 1,437 examples in minibatches of 32, ten at a time: 134.7 steps."""
    config = study.load("generalization").Config
    cell = SimpleNamespace(
        problem=SimpleNamespace(name="digits", batch_size=32, examples=1437),
        cluster=SimpleNamespace(workers=10, windows=(1,) * 10),
        config=config().at(steps=1),
        with_options=lambda **options: options,
    )
    assert config(epochs=30).with_length(cell) == {"steps": 135, "evaluate_every": 4}


def test_the_deviation_of_known_curves_is_that_of_their_bins(monkeypatch, told):
    """A curve ten times the published one; fewer than half of the bins are no curve."""
    forensics = study.load("forensics")
    published = SimpleNamespace(
        BIN_STEPS=20,
        TASK=SimpleNamespace(is_posed_by=lambda name, config: name == "digits"),
        binned=lambda figure, name: pd.Series([1.0, 0.5, 0.25] if "n=2" in name else [1.0] * 7),
        log_deviation=forensics._published().log_deviation,
    )
    monkeypatch.setattr(forensics, "_published", lambda: published)
    commits = pd.DataFrame({"commit": range(120), "commit_time": np.arange(120.0), "worker": 0})
    commits["loss"] = 10 * np.repeat([1.0, 0.5, 0.25], 40)
    run = Run(commits, pd.DataFrame(), pd.DataFrame(), {})

    def deviation(workers):
        cell = SimpleNamespace(cluster=SimpleNamespace(workers=workers))
        job = SimpleNamespace(cell=cell, method=SimpleNamespace(name="gem"))
        return forensics.deviation(job, run, None)

    assert deviation(2) == {"deviation": pytest.approx(1.0, rel=1e-12), "bins": 3}
    assert np.isnan(deviation(4)["deviation"])
    # Other methods have no published curves.
    code, _, err = told("forensics", "--problem=digits", "--steps=2", "--methods=sgd")
    message = "methods = 'sgd': unknown; choose from gem, downpour, adaptive_staleness"
    assert code == 2 and message in err[-1]


# The thesis


def test_temporal_efficiency_is_the_ratio_of_areas_until_the_first_ends():
    def evaluations(*points):
        return pd.DataFrame(points, columns=["commit_time", "train_accuracy"])

    # Rises to 0.9 at 2 s and stays until 4 s: areas of 0.9 and 1.8. The short one ends between two
    # evaluations of it, 0.45 at 1 s.
    steady, short = evaluations((0.0, 0.6), (10.0, 0.6)), evaluations((0.0, 1.0), (1.0, 1.0))
    rising = evaluations((0.0, 0.0), (2.0, 0.9), (4.0, 0.9))
    for first, second, ratio in (
        (rising, steady, (0.9 + 1.8) / (0.6 * 4)),
        (steady, rising, (0.6 * 4) / (0.9 + 1.8)),
        (rising, short, 0.45 / 2),
        (rising, rising[:1], np.nan),  # diverged before its first evaluation
    ):
        efficiency = windows.temporal_efficiency(first, second)
        assert efficiency == pytest.approx(ratio, rel=1e-12, nan_ok=True)


def test_the_perceptron_of_the_thesis_has_pixels_from_zero_to_one():
    scaled, standardised = (
        tiny_mnist(**options).train["image"].reshape(20, -1) for options in ({"network": "mlp"}, {})
    )
    assert (scaled.min(), scaled.max()) == (0, 1)
    np.testing.assert_allclose(standardised, (scaled - 0.1307) / 0.3081, rtol=1e-4, atol=1e-5)


# Clients and leaders


def test_client_times_are_those_of_the_paper():
    laws = study.load("ringleader").client_times(100)
    assert sorted(law.low for law in laws) == list(range(1, 101))
    assert [law.scale for law in laws] == pytest.approx(np.sqrt(np.arange(1, 101)))
    assert all(isinstance(law, HalfNormal) for law in laws)


def test_the_leader_has_the_least_of_the_last_losses():
    commits = pd.DataFrame({"worker": [1, 0, 1, 2, 1], "loss": [0.5, 0.7, 0.9, 0.8, 0.1]})
    assert study.load("leaders").leaders(commits, 4).tolist() == [1, 1, 0, 0, 1]


# Ensembles


@pytest.mark.full
def test_predictions_are_averaged_as_probabilities():
    problem = problems.digits(hidden=(4,))
    models = [jax.tree.map(np.asarray, problem.init(jax.random.key(seed))) for seed in (0, 1)]
    average = ensembles.averaged_predictions(problem, models, problem.test)
    scores = [np.asarray(problem.predict(params, problem.test), float) for params in models]
    mean = sum(np.exp(s) / np.exp(s).sum(1, keepdims=True) for s in scores) / 2
    label = problem.test["label"]
    loss = -np.log(mean[np.arange(len(label)), label]).mean()
    assert average["loss"] == pytest.approx(loss, rel=1e-5)
    assert average["accuracy"] == pytest.approx((mean.argmax(1) == label).mean())
    alone = ensembles.averaged_predictions(problem, models[:1], problem.test)
    evaluated = problem.evaluate(models[0], None, problem.test)
    for name in ("loss", "accuracy"):
        assert alone[name] == pytest.approx(float(evaluated[name]), rel=1e-5)


def test_a_problem_without_test_data_is_refused():
    untested = dataclasses.replace(problems.digits(), test=None)
    with pytest.raises(InputError, match="no test data"):
        ensembles.run(ensembles.Config(problem=untested))


def test_a_model_that_is_sure_and_wrong_has_a_finite_loss():
    problem = problems.digits()
    sure = jax.tree.map(lambda leaf: 1e3 * leaf, problem.init(jax.random.key(0)))
    assert np.isfinite(ensembles.averaged_predictions(problem, [sure], problem.test)["loss"])
