"""The study of published claims: its commands, its rules and verdicts, and its page."""

import math
import shlex
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import NamedTuple

import numpy as np
import pandas as pd
import pytest

from asyncsim import study
from asyncsim.claims import LISTS, claims_of
from asyncsim.claims.claim import Bounds, Claim, Finding, above, below, measured, verdict
from asyncsim.claims.gem import compliance, generalizes, smaller_factors
from asyncsim.claims.lsgd import _AT_LEAST_AS_LOW, _SOONER
from asyncsim.runs.known import entries
from asyncsim.study import configure
from asyncsim.study.ranking import Measure

ROOT = study.shipped("studies").parent
CLAIMS = [(name, claim) for name in LISTS for claim in claims_of(name)]
COMMANDS = {
    text
    for _, claim in CLAIMS
    for tests in (claim.small, claim.paper)
    for text in (() if isinstance(tests, str) else tests)
}
VERDICTS = ("holds", "does not hold", "undecided", "depends: ", "not testable here: ")
pytestmark = pytest.mark.usefixtures("quick_figures")


def test_there_are_thirty_claims_or_more_and_each_can_be_judged():
    assert len(CLAIMS) >= 30
    assert all(count >= 3 for count in Counter(name for name, _ in CLAIMS).values())
    assert len({claim.claim for _, claim in CLAIMS}) == len(CLAIMS)
    for _, claim in CLAIMS:
        has_command = not (isinstance(claim.small, str) and isinstance(claim.paper, str))
        assert claim.source and has_command == (claim.judge is not None)


@pytest.mark.parametrize("text", sorted(COMMANDS))
def test_commands_of_claims_are_commands(text):
    name, *options = shlex.split(text)
    _, config = configure(name, options, check=True)
    assert getattr(config, "out", None) is None
    assert not (getattr(config, "rates", None) and config.changed("learning_rate"))


def test_verdicts_follow_from_findings():
    yes, no, unknown = Finding("a", True), Finding("b", False), Finding("c", None)
    for findings, words in (
        ([yes, yes], "holds"),
        ([yes, no], "holds in part"),
        ([yes, unknown], "holds in part"),
        ([no, unknown], "does not hold"),
        ([no], "does not hold"),
        ([unknown], "undecided"),
    ):
        assert verdict(findings) == words
    assert measured([yes, no, unknown]) == "a; not so: b; undecided: c"


@pytest.mark.parametrize(
    ("test", "values", "bound", "holds"),
    [
        # Mean 2, standard deviation 1, three seeds: half a width of 4.303 / sqrt(3) = 2.484.
        (above, [1.0, 2.0, 3.0], 2 - 2.49, True),
        (above, [1.0, 2.0, 3.0], 2 + 2.49, False),
        (below, [1.0, 2.0, 3.0], 2 + 2.49, True),
        (above, [1.0, 2.0, 3.0], 2 - 2.47, None),
        (above, [1.0], 0, None),
        (above, [1.0, 1.0], 0, True),
        (above, [0.0, 0.0], 0, False),
        (above, [math.inf, 1.0], 0, True),
        (above, [math.inf, -1.0], 0, None),
    ],
)
def test_above_is_a_t_interval(test, values, bound, holds):
    assert test("a", values, bound).holds is holds


def test_an_undecided_finding_says_how_many_seeds_would_decide():
    # Student's quantiles: 2.110 / sqrt(18) = 0.497 is below the mean of 0.5, 2.120 / sqrt(17) not.
    for bound, seeds in ((1.5, "about 18"), (1.9, "more than 100")):
        finding = above("a", [1.0, 2.0, 3.0], bound)
        assert finding.text == f"a (3 seeds; {seeds} would decide)"


def test_the_verdict_names_the_values_of_an_assumption():
    answers = (("a", True, 1), ("b", True, 1), ("c", None, 0), ("d", False, 3))
    findings = [Finding(text, holds, f"latency {value}") for text, holds, value in answers]
    words = "depends: holds with latency 1; undecided with latency 0; does not hold with latency 3"
    assert (verdict(findings), verdict(findings[:2])) == (words, "holds")
    assert measured(findings[2:]) == "latency 0: undecided: c; latency 3: not so: d"


class Runs(NamedTuple):
    """A finished study whose runs have tables made by hand."""

    summary: pd.DataFrame
    tables: Mapping[str, dict[str, pd.DataFrame]] = MappingProxyType({})
    config: Mapping = MappingProxyType({})

    def run(self, name: str):
        return type("Run", (), self.tables[name])


def rows_of(values: dict[tuple, list[float]], names: tuple[str, ...], column: str) -> pd.DataFrame:
    """Tabulate finished runs: a value of the column for each seed of each row."""
    rows = [
        (*row, seed, value) for row, numbers in values.items() for seed, value in enumerate(numbers)
    ]
    return pd.DataFrame(rows, columns=[*names, "seed", column]).assign(status="finished")


def test_comparisons_choose_rows_best_rates_and_bounds():
    losses = {
        ("gem(a)", 5, 0.1): [1.0, 1.1, 1.2],
        ("gem(a)", 5, 0.2): [2.0, 2.0, 2.0],
        ("sgd", 5, 0.1): [3.0, 3.3, 3.6],
        ("sgd", 5, 0.2): [2.0, 2.2, 2.4],
        ("sgd", 9, 0.1): [7.0, 7.0, 7.0],
        ("gem(a)", 9, 0.1): [3.5, 3.5, 3.5],
        ("sgd", 1, 0.1): [1.0, 1.0, 1.0],
    }
    finished = Runs(rows_of(losses, ("method", "workers", "learning_rate"), "loss"))
    several = Runs(finished.summary[finished.summary["workers"] > 1])
    sgd, gem = {"method": "sgd"}, {"method": "gem"}

    def judge(text, *rows, runs=finished, **options):
        return list(Bounds(text, "loss", *rows, **options).judge(runs))

    best = {"above": 1.9, "per": ("workers",), "best": Measure("loss")}
    # One worker has no run of GEM: its rows are named.
    with pytest.raises(LookupError, match="workers 1"):
        judge("{}", sgd, gem, **best)
    five, nine = judge("{of[workers]}: {}", sgd, gem, runs=several, **best)
    assert five == Finding("5: 2 (95 % interval 2 to 2), at least 1.9", True)
    assert nine.text.startswith("9: 2 ") and nine.holds
    most = {"workers": max}
    (difference,) = judge("{}", sgd | most, gem | most, below=0.0, ratio=False)
    assert difference.holds is False and difference.text.startswith("3.5 ")
    assert judge("{}", {"workers": min}, below=2.0) == [Finding("1, at most 2", True)]
    rate = sgd | {"learning_rate": 0.1}
    pairs = judge("{of[workers]} {to[workers]}{}", rate, rate, below=1.0, pairs="workers")
    assert [(pair.text[:3], pair.holds) for pair in pairs] == [("1 5", True), ("5 9", True)]


@pytest.mark.parametrize(
    ("source", "names", "column", "values"),
    [
        # Results in which the claim holds: the mean of each row.
        (
            "figures 1a, 1b, 1d",
            ("method", "workers"),
            "final_loss",
            {("gem", 2): 0.9, ("gem", 9): 0.5, ("downpour", 2): 0.5, ("downpour", 9): 0.9},
        ),
        (
            "figures 1b, 1c",
            ("method", "workers", "learning_rate"),
            "train_loss",
            {("gem", 2, 0.1): 0.2, ("downpour", 2, 0.1): 0.4, ("adaptive_staleness", 2, 0.1): 0.3},
        ),
        ("figure 4", ("workers",), "time_to_target", {(1,): 8.0, (2,): 4.0, (4,): 2.0}),
        ("figure 8", ("method.kappa",), "final_loss", {(1.0,): 0.5, (3.0,): 0.2, (4.0,): 2.0}),
        ("figure 7;", ("workers",), "final_loss", {(8,): 0.5, (16,): 0.2}),
        ("equations 12 and 19", ("method", "workers"), "energy_ratio", {("gem", 5): 0.8}),
    ],
)
def test_the_claims_of_gem_are_held_against_their_opposites(source, names, column, values):
    (claim, *_) = (
        claim
        for name, claim in CLAIMS
        if name == "gem" and source in claim.source and isinstance(claim.judge, tuple)
        if claim.judge[0].column == column
    )

    def verdict_of(numbers):
        # Seeds of a first look do not count.
        seeds = np.array([1.0, 1.0, 1.0, 1.01, 0.99])
        rows = {row: list(number * seeds) for row, number in numbers.items()}
        return verdict(claim.findings([Runs(rows_of(rows, names, column))]))

    assert verdict_of(values) == "holds"
    assert verdict_of({row: 1 / number for row, number in values.items()}) == "does not hold"


@pytest.mark.parametrize(
    ("with_many", "smaller"), [([0.1, 0.3], 2), ([0.1, 0.5], 1), ([0.5, 0.5], 0)]
)
def test_factors_of_tensors_are_smaller_with_more_workers(with_many, smaller):
    rows = {"tensor": list("abab"), "workers": [5, 5, 20, 20], "pi_median": [0.4, 0.4, *with_many]}
    table = pd.DataFrame(rows)
    (finding,) = smaller_factors(SimpleNamespace(table=lambda name: table))
    assert finding.holds is (smaller == 2)
    assert finding.text.startswith(f"{smaller} of 2 tensors h")


def test_round_off_is_no_difference():
    finished = Runs(rows_of({("a",): [1e-30] * 3, ("b",): [2e-31] * 3}, ("method",), "loss"))
    rows = {"method": "a"}, {"method": "b"}
    (finding,) = Bounds("{}", "loss", *rows, above=1.0).judge(finished)
    assert finding.holds is not True and finding.text.startswith("1 ")


AT_MOST_1 = (Bounds("{}", "loss", {}, below=1.0),)


def test_seeds_of_a_first_look_do_not_count():
    finished = Runs(rows_of({("a",): [9.0, 9.0, 0.1, 0.2, 0.3]}, ("method",), "loss"))
    claim = Claim("", "", ("x",), AT_MOST_1, looked=2, later_seeds=True)
    for scale, holds in (("small", True), ("paper", None)):
        assert [finding.holds for finding in claim.findings([finished], scale)] == [holds]


def test_an_assumption_is_read_from_the_commands():
    commands = ("plan --latency 0 --x 1", "plan --x 1 --latency 3")
    claim = Claim("", "", commands, AT_MOST_1, assumption="latency")
    evidence = [Runs(rows_of({("a",): [loss] * 2}, ("method",), "loss")) for loss in (0.5, 2.0)]
    words = "depends: holds with latency 0; does not hold with latency 3"
    assert verdict(claim.findings(evidence)) == words


def ended(loss: float, ratio: float, method: str = "gem", rate: float = 0.1) -> tuple:
    return method, rate, "finished" if np.isfinite(loss) else "diverged", loss, ratio


PROXY = ended(1.0, 1.0, "sgd")
FAST_PROXY = ended(2.5, 1.0, "sgd", 0.4)


@pytest.mark.parametrize(
    ("runs", "sufficient", "converse"),
    [
        # Slow runs are stable; the beginning counts, and the proxy itself does not.
        ([PROXY, ended(2.2, 0.5), ended(0.1, 0.9), ended(2.4, 3.0)], True, True),
        ([PROXY, ended(2.4, 0.5), ended(0.1, 0.9), ended(2.4, 3.0)], False, True),
        ([PROXY, ended(2.2, 0.5), ended(0.1, 2.0), ended(np.nan, 3.0)], True, False),
        # Without an unstable run the condition excludes nothing.
        ([PROXY, ended(2.2, 0.5), ended(0.1, 2.0)], None, None),
        # Rates at which the proxy is unstable do not count.
        (
            [FAST_PROXY, ended(2.4, 0.5, rate=0.4), ended(1.0, 0.5), ended(3.0, 2.0)],
            True,
            True,
        ),
    ],
)
def test_compliance_is_a_sufficient_condition(runs, sufficient, converse):
    names = ["method", "learning_rate", "status", "final_loss", "ratio"]
    summary = pd.DataFrame(runs, columns=names)
    summary["run_folder"] = [str(place) for place in range(len(runs))]
    # The ratio of the first ten steps counts.
    commits = pd.DataFrame({"worker_step": range(12), "proxy_energy": 1.0})
    tables = {
        row.run_folder: {"commits": commits.assign(central_energy=[row.ratio] * 10 + [100.0] * 2)}
        for row in summary.itertuples()
    }
    finished = Runs(summary.drop(columns="ratio"), tables)
    (stable,), (unstable,) = compliance(finished), compliance(finished, compliant=False)
    assert (stable.holds, unstable.holds) == (sufficient, converse)


def seeds_of(rows: list[tuple], columns: list[str], noisy: list[str]) -> pd.DataFrame:
    """Tabulate three runs of each row; their noisy columns are 1 % apart."""
    runs = pd.DataFrame(rows, columns=columns).merge(pd.DataFrame({"seed": range(3)}), "cross")
    runs[noisy] *= 1 + 0.01 * runs[["seed"]].to_numpy()
    return runs.assign(status="finished")


def test_generalization_compares_the_best_rates_at_equal_gradients_and_equal_time():
    rows = [("gem(a)", 0.2, 10.0), ("gem(b)", 0.4, 10.0), ("sgd(a)", 0.1, 40.0)]
    runs = seeds_of(rows, ["method", "test_loss", "simulated_seconds"], ["test_loss"])
    runs["test_accuracy"], runs["run_folder"] = 1 - runs["test_loss"], runs.index.astype(str)
    tables = {}
    for row in runs.itertuples():
        curve = {"commit_time": [0.0, row.simulated_seconds], "test_loss": [2.0, row.test_loss]}
        tables[row.run_folder] = {"evaluations": pd.DataFrame(curve)}
    equal_gradients, error, equal_time = generalizes(Runs(runs, tables))
    assert equal_gradients.holds is False and "is 0.5 (" in equal_gradients.text
    assert error.holds is False and "-10" in error.text
    # At 10 of its 40 s SGD has a test loss of 2 - 1.9 / 4.
    assert equal_time.holds is True and "7.5" in equal_time.text


def test_leaders_are_compared_each_at_the_best_rate_for_the_measure():
    rows = [
        ("lsgd", 0.1, 5.0, 0.3),
        ("lsgd", 0.2, 10.0, 0.1),
        ("aeasgd", 0.1, 15.0, 0.2),
        ("aeasgd", 0.2, 7.5, 0.4),
    ]
    noisy = ["time_to_target", "train_loss"]
    runs = seeds_of(rows, ["method", "learning_rate", *noisy], noisy)
    finished = Runs(runs.assign(workers=4, window=1, first_touch=runs["time_to_target"]))
    (faster,), (lower,) = _SOONER.judge(finished), _AT_LEAST_AS_LOW.judge(finished)
    assert faster.holds is True and "is 1.5 (" in faster.text
    assert lower.holds is True and "at 2 (" in lower.text


def test_the_published_scale_without_its_data_is_refused_in_one_line(told, monkeypatch, tmp_path):
    monkeypatch.setenv("ASYNCSIM_DATA", str(tmp_path))
    code, _, err = told("claims", "gem", "--scale", "paper", "--out", "out")
    (line,) = [line for line in err if line.startswith("error")]
    assert code == 2 and "mnist" in line and not Path("out").exists()


def test_claims_are_tested_judged_and_resumed(told):
    code, out, _ = told("claims", "scaling")
    table = pd.read_csv("results/claims/claims.csv", keep_default_na=False)
    assert table["claim"].tolist() == [claim.claim for claim in claims_of("scaling")]
    assert set(table["list"]) == {"scaling"} and all(table["verdict"] + table["measured"] != "")
    assert code == 0 and all(claim in " ".join(out) for claim in table["claim"])
    tested = table[table["command"] != ""]
    assert len(tested) and tested["command"].str.startswith("asyncsim study scaling").all()
    # The claims' evidence has no entry of its own.
    assert [entry.study for entry in entries()] == ["claims"]
    before = Path("results/claims/claims.md").read_text()
    assert told("claims", "--resume", "results/claims")[0] == 0
    assert Path("results/claims/claims.md").read_text() == before


def test_the_documented_table_has_the_claims_and_commands_of_the_study():
    table = pd.read_csv(ROOT / "docs" / "claims.csv", keep_default_na=False)
    listed = [(name, claim) for name, claim in CLAIMS if name in set(table["list"])]
    assert len(table) >= 30
    asked = ("the source", "this project")
    assert list(
        zip(table["list"], table["claim"], table["source"], table["asked_by"], strict=True)
    ) == [(name, claim.claim, claim.source, asked[claim.ours]) for name, claim in listed]
    for row, (_, claim) in zip(table.itertuples(), listed, strict=True):
        tests = () if isinstance(claim.small, str) else claim.small
        assert row.command == " && ".join(f"asyncsim study {text}" for text in tests)
        assert row.verdict.startswith(VERDICTS)
        assert bool(row.measured) == bool(row.command)
