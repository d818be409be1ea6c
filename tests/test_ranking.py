"""Statistics of tables over seeds, on made-up summaries: spreads, orders, what is within the noise,
and edges.
"""

import numpy as np
import pandas as pd
import pytest
from scipy.stats import studentized_range, t

from asyncsim.base.console import table_text
from asyncsim.claims.claim import above, log_ratio
from asyncsim.study.ranking import (
    Measure,
    at_the_edge,
    grid,
    noise_of,
    ranked,
    ranked_parts,
    spread,
    tuned,
    verdict,
)

NAN, INF = np.nan, np.inf
TIME = Measure("time_to_target")
LOSS = Measure("train_loss")


def runs_of(method: str, rate: float, values: list[tuple[float, float]], length=100.0):
    """Make runs of a rate from their times and losses, seed by seed; a loss of NaN diverged."""
    runs = pd.DataFrame(values, columns=["time_to_target", "train_loss"])
    runs["status"] = np.where(runs["train_loss"].isna(), "diverged", "finished")
    runs["first_touch"] = runs["time_to_target"].clip(upper=5.0)
    labels = {"method": method, "learning_rate": rate, "simulated_seconds": length}
    return runs.assign(seed=range(len(runs)), **labels)


def summary(times: dict[str, list[float]], rate: float = 0.1, length: float = 100.0):
    """Runs of some methods, by their times to a target; NaN where one diverged."""

    def ended(time):
        return (INF, NAN) if np.isnan(time) else (time, min(time, 1e3) / 100)

    rows = [runs_of(method, rate, list(map(ended, row)), length) for method, row in times.items()]
    return pd.concat(rows, ignore_index=True)


def judged(found: pd.DataFrame, measure: Measure = TIME) -> pd.DataFrame:
    by = ("method", "learning_rate")
    return ranked(grid(found, by, (), measure).drop_duplicates("method"), found, by, measure)


def said(table: pd.DataFrame, measure: Measure = TIME) -> str:
    names = list(table["method"])
    long_words = [f"{name} on ring()" for name in names], measure, "method and topology"
    headline, *_ = verdict(table, *long_words, "a test accuracy of 0.95").split("\n")
    assert len(headline.split()) <= 15
    return verdict(table, names, measure)


def test_two_methods_are_a_paired_t_interval_of_the_ratio():
    first, second = np.array([10.0, 20.0, 15.0, 12.0]), np.array([13.0, 25.0, 20.0, 15.0])
    table = judged(summary({"slow": list(second), "fast": list(first)}))
    assert list(table["method"]) == ["fast", "slow"]
    logs = np.log(second / first)
    half = t.ppf(0.975, 3) * logs.std(ddof=1) / 2
    assert table[["low", "high"]].loc[1].tolist() == pytest.approx(
        [*np.exp([logs.mean() - half, logs.mean() + half])]
    )
    assert table["is_apart"][1]
    assert said(table) == "fast is the fastest method (95% confidence, 4 seeds)"
    spreads = [first.std(ddof=1), second.std(ddof=1)]
    assert table["time_to_target_sd"].tolist() == pytest.approx(spreads)
    assert spread(table, "time_to_target") == ["14.2 \u00b1 4.3", "18.2 \u00b1 5.4"]


def test_the_distance_of_evaluations_widens_an_interval_and_may_hide_an_order():
    found = summary({"slow": [13.0, 25.0, 20.0], "fast": [10.0, 20.0, 15.0]})
    narrow = judged(found).iloc[1]
    times = found["time_to_target"]
    bounds = {"time_to_target_low": 0.9 * times, "time_to_target_high": times}
    wide = judged(found.assign(**bounds)).iloc[1]
    assert wide["low"] == pytest.approx(0.9 * narrow["low"])
    assert wide["high"] == pytest.approx(narrow["high"] / 0.9)
    coarse = judged(found.assign(time_to_target_low=0.5 * times, time_to_target_high=times))
    assert said(coarse).endswith("slow (a smaller --evaluate-every needed)")


def test_of_several_the_noise_is_pooled_or_of_the_pair_if_that_is_larger():
    rng = np.random.default_rng(0)
    logs = np.log([10.0, 11.0, 30.0])[:, None] + np.array([0.02, 0.02, 0.3])[
        :, None
    ] * rng.standard_normal((3, 4))
    table = judged(summary(dict(zip("abc", np.exp(logs).tolist(), strict=True))))
    noise = logs - logs.mean(axis=1, keepdims=True) - logs.mean(axis=0) + logs.mean()
    eigenvalues = np.linalg.eigvalsh(noise @ noise.T)
    degrees = 3 * eigenvalues.sum() ** 2 / (eigenvalues**2).sum()  # Greenhouse and Geisser's
    assert 3 < degrees < 3.1  # of six, as one row has nearly all of the noise
    factor = studentized_range.ppf(0.95, 3, degrees) / np.sqrt(2)
    for row in (1, 2):
        apart = logs[row] - logs[0]
        own = max(2 * (noise**2).sum() / 6, apart.var(ddof=1))
        assert np.log(table["low"][row]) == pytest.approx(
            apart.mean() - factor * np.sqrt(own / 4), rel=0.01
        )
    needed = int(table["needs_seeds"][1])
    assert needed > 4 and "~2" in set(ranked_parts(table, ["method"], TIME, [])[0][""])
    assert said(table) == (
        "undecided: a leads, within the noise (95% confidence, 4 seeds)\n"
        f"not distinguishable from a: b (about {needed} seeds needed)"
    )


def simulated(noise: list[float], means: list[float], seeds: int) -> np.ndarray:
    """Of 2,000 tables, the shares that separate equal rows, whose intervals against the best row
    all hold, and that separate the best row from all others; ranked as in `ranked`, without its
    data frames."""
    rng, rows, tables = np.random.default_rng(seeds), len(noise), 2_000
    shares = np.zeros(3)
    for _ in range(tables):
        values = rng.standard_normal(seeds) + np.array(noise)[:, None] * rng.standard_normal(
            (rows, seeds)
        )
        values += np.array(means)[:, None]
        order = np.argsort(values.mean(axis=1))
        values, truth = values[order], np.array(means)[order]
        differences = values[:, None] - values[None]
        gaps, true_gaps = differences.mean(axis=2), truth[:, None] - truth[None]
        width = noise_of(values, rows).half_width(differences.var(axis=2, ddof=1), seeds)
        compared = np.eye(rows, k=-1, dtype=bool)
        compared[1:, 0] = True
        separate = gaps > width
        holds = np.abs(gaps - true_gaps) <= width
        shares += (
            (separate & compared & (true_gaps <= 0)).any(),
            holds[1:, 0].all(),
            separate[1:, 0].all(),
        )
    return shares / tables


def test_equal_rows_are_seldom_separated_also_if_one_is_ten_times_as_noisy(seeds=3):
    for noise in ([1.0] * 5, [10.0, 1, 1, 1, 1]):
        assert simulated(noise, [0.0] * 5, seeds)[0] <= 0.06
    _, coverage, separated = simulated([10.0, 1, 1, 1, 1], [-500.0, 0, 0, 0, 0], seeds)
    assert coverage >= 0.94 and separated > 0.9


def test_two_seeds_allow_hardly_any_claim():
    times = np.array([[10.0, 11.0, 10.5], [21.0, 20.0, 20.5], [31.0, 35.0, 33.0]])
    for seeds in (2, 3):
        table = judged(summary(dict(zip("abc", times[:, :seeds].tolist(), strict=True))))
        assert bool(table["is_apart"].eq(True).any()) == (seeds == 3)
        assert said(table).startswith("undecided: a leads" if seeds == 2 else "a is the fastest")


def test_seeds_that_do_not_reach_it_bound_the_time_from_below():
    times = {"late": [20.0, INF, 21.0], "never": [INF] * 3, "fast": [10.0, 11.0, 9.0]}
    table = judged(summary(times))
    rows = table[["method", "reached"]].itertuples(index=False, name=None)
    assert list(rows) == [("fast", 3), ("late", 2), ("never", 0)]
    late, never = table.iloc[1], table.iloc[2]
    assert np.isinf(late["time_to_target"]) and np.isnan(late["time_to_target_sd"])
    assert late["touched"] == 3
    assert never["is_apart"] and never["low"] > 5 and np.isinf(never["high"])
    assert spread(table, "time_to_target")[1] == "not reached"
    text = table_text(ranked_parts(table, ["method"], TIME, ["first_touch"])[0])
    assert "not reached" in text and "vs best" in text and " inf" not in text


@pytest.mark.parametrize(
    ("times", "start"),
    [
        ({"a": [1.0], "b": [9.0]}, "one seed: no order"),
        (
            {"a": [INF] * 3, "b": [INF, INF, 20.0]},
            "no method reached the target with every seed\ngive more --steps",
        ),
        ({"a": [1.0, NAN]}, "no best method: each diverged"),
        ({"a": [1.0, 2.0]}, "a is the only method"),
        (
            {"a": [0.0, 0.0], "b": [0.0, 0.0], "c": [0.0, 9.0]},
            "no best method: the start meets the target\n",
        ),
    ],
)
def test_without_an_order_the_verdict_says_why(times, start):
    assert said(judged(summary(times))).startswith(start)


def test_diverged_rows_are_not_compared():
    table = judged(
        summary({"a": [10.0, 11.0, 10.0], "b": [9.0, NAN, 9.0], "c": [20.0, 22.0, 20.0]})
    )
    rows = table[["method", "is_apart"]].itertuples(index=False, name=None)
    assert list(rows) == [("a", None), ("c", True), ("b", None)]
    assert said(table).endswith("\nnot compared: b")


@pytest.mark.parametrize("seeds", [1, 2])
def test_a_run_that_ended_before_it_held_the_target_is_not_beaten(seeds):
    found = pd.concat(
        [
            summary({"sgd": [42.0, 43.0][:seeds]}),
            summary({"gem": [np.inf] * seeds, "far": [np.inf] * seeds}, length=40.0),
        ]
    )
    found["first_touch"] = found["method"].map({"sgd": 42.0, "gem": 36.3, "far": np.inf})
    by = ("method", "learning_rate")
    table = ranked(grid(found, by, ("simulated_seconds",), TIME), found, by, TIME)
    assert said(table) == "no fastest method\ngem touched the target before sgd held it"
    # The bound of 40 s is below the best time, and says nothing.
    assert table["low"].iloc[1:].lt(1).all() == (seeds == 2)
    assert "over" not in table_text(ranked_parts(table, ["method"], TIME, [])[0])


@pytest.mark.parametrize("values", [(1e-30, 3e-30), (1.0, 1.0 + 1e-9), (0.0, 1e-30)])
def test_differences_of_round_off_have_no_leader(values):
    first, second = values
    found = summary({"a": [100 * first] * 3, "b": [100 * second] * 3, "c": [500.0, 510.0, 490.0]})
    table = judged(found, LOSS)
    assert table["is_apart"].tolist()[1:] == [False, True] and np.isinf(table["needs_seeds"][1])
    assert said(table, LOSS) == "no best method: some are equal up to round-off\nequal to a: b"
    ratio = log_ratio(pd.Series([second] * 3), pd.Series([first] * 3))
    assert not above("", ratio).holds and not ratio.any()


def test_the_most_is_best_by_differences():
    found = summary({"a": [90.0, 92.0, 91.0], "b": [80.0, 82.5, 81.0]})
    found["test_accuracy"] = found["time_to_target"] / 100
    table = judged(found, Measure("test_accuracy", "most"))
    assert list(table["method"]) == ["a", "b"] and not table["ratio"].any()
    assert 0.08 < table["low"][1] < 0.0983 < table["high"][1] < 0.12


def test_the_best_rate_and_the_edge_of_the_rates():
    found = pd.concat(
        [
            summary({"a": [10.0, 11.0], "b": [30.0, 31.0]}, rate=0.1),
            summary({"a": [9.0, INF], "b": [20.0, 21.0]}, rate=0.2),
            summary({"a": [50.0, 51.0], "b": [NAN, 1.0]}, rate=0.3),
        ]
    )
    every = grid(found, ("method", "learning_rate"), ("train_loss",), TIME)
    table = every.drop_duplicates("method")
    best = table.set_index("method")["learning_rate"]
    assert len(every) == 6 and best.to_dict() == {"a": 0.1, "b": 0.2}

    def edge(rates, table=table, names=table["method"]):
        return at_the_edge(table, rates, names)

    least = "best at the least rate of --tune, 0.1: a"
    assert edge((0.3, 0.1, 0.2)) == f"{least}; a rate beyond it may be better"
    assert "at the largest rate of --tune, 0.2: b" in edge((0.2, 0.1))
    many = pd.DataFrame({"learning_rate": [0.1] * 7 + [0.2]})
    assert edge((0.1, 0.2), many, list("abcdefgh")) == (
        f"{least}, b, c, d, e, f and 1 more; at the largest rate of --tune, 0.2: h; a rate beyond "
        "it may be better"
    )
    assert edge((0.1,)) == edge(None) == ""


@pytest.mark.parametrize(
    ("measure", "better", "worse"),
    [
        # Fewest diverged seeds, even if fewer reach the target, or none.
        (TIME, [(INF, 2.0), (INF, 2.0)], [(1.0, 0.1), (INF, NAN)]),
        (LOSS, [(1.0, 9.0), (1.0, 9.0)], [(1.0, 0.1), (INF, NAN)]),
        (TIME, [(9.0, 0.1), (INF, NAN)], [(INF, NAN), (INF, NAN)]),
        # Then most seeds at the target, whatever their times and losses.
        (TIME, [(90.0, 3.0), (INF, 3.0)], [(INF, 0.1), (INF, 0.1)]),
        (TIME, [(90.0, 3.0), (90.0, 3.0)], [(1.0, 0.1), (INF, 0.1)]),
        # Then the mean time, and the final loss where it is the same or infinite.
        (TIME, [(4.0, 3.0), (5.0, 3.0)], [(2.0, 0.1), (8.0, 0.1)]),
        (TIME, [(4.0, 0.1), (6.0, 0.3)], [(6.0, 0.3), (4.0, 0.2)]),
        (TIME, [(9.0, 0.1), (INF, 0.2)], [(1.0, 0.2), (INF, 0.2)]),
        (TIME, [(INF, 0.1), (INF, 0.2)], [(INF, 0.2), (INF, 0.2)]),
        # A tie is the summary's first.
        (TIME, [(4.0, 0.1), (6.0, 0.3)], [(6.0, 0.3), (4.0, 0.1)]),
        (TIME, [(INF, NAN), (INF, NAN)], [(INF, NAN), (INF, NAN)]),
    ],
)
def test_the_rule_of_the_best_rate(measure, better, worse):
    for rates in ({0.1: better, 0.2: worse}, {0.2: worse, 0.1: better}):
        tie = sorted(map(str, better)) == sorted(map(str, worse))
        runs = pd.concat(runs_of("a", rate, values) for rate, values in rates.items())
        best = tuned(runs, ["method"], measure)
        assert best["learning_rate"].tolist() == [next(iter(rates)) if tie else 0.1] * 2
        assert best["seed"].tolist() == [0, 1] and set(best) == set(runs)
        # The same order as in the tables of all rates.
        assert (
            grid(runs, ("method", "learning_rate"), (), measure)["learning_rate"].iloc[0]
            == (best["learning_rate"].iloc[0])
        )


def test_pairs_are_of_the_seeds_that_all_have():
    found = summary({"a": [10.0, 11.0, 10.5], "b": [20.0, 22.5, 21.0]})
    table = judged(found.drop(index=found.index[-1]))
    assert table["paired_seeds"].tolist() == [2, 2] and table["seeds"].tolist() == [3, 2]
    assert "2 seeds" in said(table)
    assert judged(found, LOSS)["ratio"].all()
