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
from asyncsim.study import command, configure
from asyncsim.study.ranking import Measure

ROOT = study.shipped("studies").parent
CLAIMS = [(name, claim) for name in LISTS for claim in claims_of(name)]
COMMANDS = sorted(
    {
        text
        for _, claim in CLAIMS
        for tests in (claim.small, claim.paper)
        if not isinstance(tests, str)
        for text in tests
    }
)
VERDICTS = ("holds", "does not hold", "undecided", "depends: ", "not testable here: ")
pytestmark = pytest.mark.usefixtures("quick_figures")


def test_there_are_thirty_claims_or_more_and_each_can_be_judged():
    assert len(CLAIMS) >= 30
    assert all(count >= 3 for count in Counter(name for name, _ in CLAIMS).values())
    assert len({claim.claim for _, claim in CLAIMS}) == len(CLAIMS)
    for _, claim in CLAIMS:
        has_command = not (isinstance(claim.small, str) and isinstance(claim.paper, str))
        assert claim.source and has_command == (claim.judge is not None)


@pytest.mark.parametrize("text", COMMANDS)
def test_commands_of_claims_are_commands(text):
    name, *options = shlex.split(text)
    _, config = configure(name, options, check=True)
    assert getattr(config, "out", None) is None
    assert not (getattr(config, "rates", None) and config.changed("learning_rate"))


def test_verdicts_follow_from_findings():
    yes, no, unknown = (
        Finding(text, holds) for text, holds in zip("abc", (True, False, None), strict=True)
    )
    assert verdict([yes, yes]) == "holds"
    assert verdict([yes, no]) == verdict([yes, unknown]) == "holds in part"
    assert verdict([no, unknown]) == verdict([no]) == "does not hold"
    assert verdict([unknown]) == "undecided"
    assert measured([yes, no, unknown]) == "a; not so: b; undecided: c"


def test_above_is_a_t_interval():
    # Mean 2, standard deviation 1, three seeds: half a width of 4.303 / sqrt(3) = 2.484.
    values = [1.0, 2.0, 3.0]
    assert above("a", values, 2 - 2.49) == Finding("a", True)
    assert above("a", values, 2 + 2.49) == Finding("a", False)
    assert below("a", values, 2 + 2.49) == Finding("a", True)
    assert above("", values, 2 - 2.47).holds is None and above("", [1.0]).holds is None
    assert above("", [1.0, 1.0]).holds is True and above("", [0.0, 0.0]).holds is False
    assert above("", [math.inf, 1.0]).holds is True and above("", [math.inf, -1.0]).holds is None


def test_an_undecided_finding_says_how_many_seeds_would_decide():
    # Student's quantiles: 2.110 / sqrt(18) = 0.497 is below the mean of 0.5, 2.120 / sqrt(17) not.
    assert above("a", [1.0, 2.0, 3.0], 1.5).text == "a (3 seeds; about 18 would decide)"
    assert above("a", [1.0, 2.0, 3.0], 1.9).text == "a (3 seeds; more than 100 would decide)"


def test_the_verdict_names_the_values_of_an_assumption():
    findings = [
        Finding(text, holds, f"latency {value}")
        for text, holds, value in (("a", True, 1), ("b", True, 1), ("c", None, 0), ("d", False, 3))
    ]
    expected = (
        "depends: holds with latency 1; undecided with latency 0; does not hold with latency 3"
    )
    assert verdict(findings) == expected
    assert verdict(findings[:2]) == "holds"
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
    return pd.DataFrame(
        [
            {
                **dict(zip(names, row, strict=True)),
                "seed": seed,
                "status": "finished",
                column: value,
            }
            for row, numbers in values.items()
            for seed, value in enumerate(numbers)
        ]
    )


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
    comparison = Bounds(
        "{of[workers]}: {}",
        *("loss", {"method": "sgd"}, {"method": "gem"}),
        above=1.9,
        per=("workers",),
        best=Measure("loss"),
    )
    # One worker has no run of GEM: its rows are named.
    with pytest.raises(LookupError, match="workers 1"):
        list(comparison.judge(finished))
    several = Runs(finished.summary[finished.summary["workers"] > 1])
    five, nine = comparison.judge(several)
    assert five == Finding("5: 2 (95 % interval 2 to 2), at least 1.9", True)
    assert nine.text.startswith("9: 2 ") and nine.holds
    (difference,) = Bounds(
        "{}",
        "loss",
        {"method": "sgd", "workers": max},
        {"method": "gem", "workers": max},
        below=0.0,
        ratio=False,
    ).judge(finished)
    assert difference.holds is False and difference.text.startswith("3.5 ")
    (level,) = Bounds("{}", "loss", {"workers": min}, below=2.0).judge(finished)
    assert level == Finding("1, at most 2", True)
    low, high = Bounds(
        "{of[workers]} {to[workers]}{}",
        "loss",
        {"method": "sgd", "learning_rate": 0.1},
        {"method": "sgd", "learning_rate": 0.1},
        below=1.0,
        pairs="workers",
    ).judge(finished)
    assert low.text.startswith("1 5") and high.text.startswith("5 9") and low.holds and high.holds


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
    claims = [
        claim
        for name, claim in CLAIMS
        if name == "gem" and source in claim.source and isinstance(claim.judge, tuple)
    ]
    claim = next(claim for claim in claims if claim.judge[0].column == column)

    def verdict_of(numbers):
        # Seeds of a first look do not count.
        seeds = np.array([1.0, 1.0, 1.0, 1.01, 0.99])
        rows = {row: list(number * seeds) for row, number in numbers.items()}
        return verdict(claim.findings([Runs(rows_of(rows, names, column))]))

    assert verdict_of(values) == "holds"
    assert verdict_of({row: 1 / number for row, number in values.items()}) == "does not hold"


def test_factors_of_tensors_are_smaller_with_more_workers():
    def finding(with_many):
        rows = {"tensor": list("abab"), "workers": [5, 5, 20, 20]}
        table = pd.DataFrame(rows | {"pi_median": [0.4, 0.4, *with_many]})
        (answer,) = smaller_factors(SimpleNamespace(table=lambda name: table))
        return answer.holds, answer.text[:16]

    assert finding([0.1, 0.3]) == (True, "2 of 2 tensors h")
    assert finding([0.1, 0.5]) == (False, "1 of 2 tensors h")
    assert finding([0.5, 0.5]) == (False, "0 of 2 tensors h")


def test_round_off_is_no_difference():
    finished = Runs(rows_of({("a",): [1e-30] * 3, ("b",): [2e-31] * 3}, ("method",), "loss"))
    comparison = Bounds("{}", "loss", {"method": "a"}, {"method": "b"}, above=1.0)
    (finding,) = comparison.judge(finished)
    assert finding.holds is not True and finding.text.startswith("1 ")


def test_seeds_of_a_first_look_do_not_count():
    finished = Runs(rows_of({("a",): [9.0, 9.0, 0.1, 0.2, 0.3]}, ("method",), "loss"))
    claim = Claim(
        "", "", ("x",), (Bounds("{}", "loss", {}, below=1.0),), looked=2, later_seeds=True
    )
    assert [finding.holds for finding in claim.findings([finished])] == [True]
    assert [finding.holds for finding in claim.findings([finished], "paper")] == [None]


def test_an_assumption_is_read_from_the_commands():
    commands = ("plan --latency 0 --x 1", "plan --x 1 --latency 3")
    claim = Claim("", "", commands, (Bounds("{}", "loss", {}, below=1.0),), assumption="latency")
    evidence = [
        Runs(rows_of({("a",): [value, value]}, ("method",), "loss")) for value in (0.5, 2.0)
    ]
    assert verdict(claim.findings(evidence)) == (
        "depends: holds with latency 0; does not hold with latency 3"
    )


def energies(ratio: float) -> dict[str, pd.DataFrame]:
    steps = np.arange(12)
    late = np.where(steps < 10, ratio, 100.0)
    return {
        "commits": pd.DataFrame({"worker_step": steps, "central_energy": late, "proxy_energy": 1.0})
    }


def ended(loss: float, ratio: float, method: str = "gem", rate: float = 0.1) -> tuple:
    return method, rate, "finished" if np.isfinite(loss) else "diverged", loss, ratio


PROXY = ended(1.0, 1.0, "sgd")


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
            [
                ended(2.5, 1.0, "sgd", 0.4),
                ended(2.4, 0.5, rate=0.4),
                ended(1.0, 0.5),
                ended(3.0, 2.0),
            ],
            True,
            True,
        ),
    ],
)
def test_compliance_is_a_sufficient_condition(runs, sufficient, converse):
    names = ["method", "learning_rate", "status", "final_loss", "ratio"]
    summary = pd.DataFrame(runs, columns=names)
    summary["run_folder"] = [str(place) for place in range(len(runs))]
    tables = {str(place): energies(row[-1]) for place, row in enumerate(runs)}
    finished = Runs(summary.drop(columns="ratio"), tables)
    (stable,), (unstable,) = compliance(finished), compliance(finished, compliant=False)
    assert (stable.holds, unstable.holds) == (sufficient, converse)


def test_generalization_compares_the_best_rates_at_equal_gradients_and_equal_time():
    rows, tables = [], {}
    for method, loss, seconds in (
        ("gem(a)", 0.2, 10.0),
        ("gem(b)", 0.4, 10.0),
        ("sgd(a)", 0.1, 40.0),
    ):
        for seed in range(3):
            name = f"{method}-{seed}"
            end = loss * (1 + 0.01 * seed)
            rows.append(
                {
                    "method": method,
                    "seed": seed,
                    "status": "finished",
                    "test_loss": end,
                    "test_accuracy": 1 - end,
                    "simulated_seconds": seconds,
                    "run_folder": name,
                }
            )
            evaluations = {"commit_time": [0.0, seconds], "test_loss": [2.0, end]}
            tables[name] = {"evaluations": pd.DataFrame(evaluations)}
    equal_gradients, error, equal_time = generalizes(Runs(pd.DataFrame(rows), tables))
    assert equal_gradients.holds is False and "is 0.5 (" in equal_gradients.text
    assert error.holds is False and "-10" in error.text
    # At 10 of its 40 s SGD has a test loss of 2 - 1.9 / 4.
    assert equal_time.holds is True and "7.5" in equal_time.text


def test_leaders_are_compared_each_at_the_best_rate_for_the_measure():
    rows = []
    for method, rate, end, loss in (
        ("lsgd", 0.1, 10.0, 0.3),
        ("lsgd", 0.2, 20.0, 0.1),
        ("aeasgd", 0.1, 30.0, 0.2),
        ("aeasgd", 0.2, 15.0, 0.4),
    ):
        for seed in range(3):
            seconds = end * (1 + 0.01 * seed)
            rows.append(
                {
                    "workers": 4,
                    "window": 1,
                    "method": method,
                    "learning_rate": rate,
                    "seed": seed,
                    "status": "finished",
                    "train_loss": loss * (1 + 0.01 * seed),
                    "time_to_target": seconds / 2,
                    "first_touch": seconds / 2,
                }
            )
    finished = Runs(pd.DataFrame(rows))
    (faster,), (lower,) = _SOONER.judge(finished), _AT_LEAST_AS_LOW.judge(finished)
    assert faster.holds is True and "is 1.5 (" in faster.text
    assert lower.holds is True and "at 2 (" in lower.text


def test_the_published_scale_without_its_data_is_refused_in_one_line(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("ASYNCSIM_DATA", str(tmp_path))
    assert command.main(["claims", "gem", "--scale", "paper", "--out", "out"]) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error")]
    assert len(lines) == 1 and "mnist" in lines[0] and not (tmp_path / "out").exists()


def test_claims_are_tested_judged_and_resumed(capsys):
    assert command.main(["claims", "scaling"]) == 0
    printed = capsys.readouterr().out
    table = pd.read_csv("results/claims/claims.csv", keep_default_na=False)
    assert table["claim"].tolist() == [claim.claim for claim in claims_of("scaling")]
    assert set(table["list"]) == {"scaling"} and all(table["verdict"] + table["measured"] != "")
    assert all(claim in printed.replace("\n", " ") for claim in table["claim"])
    tested = table[table["command"] != ""]
    assert len(tested) and tested["command"].str.startswith("asyncsim study scaling").all()
    # The claims' evidence has no entry of its own.
    assert [entry.study for entry in entries()] == ["claims"]
    before = Path("results/claims/claims.md").read_text()
    assert command.main(["claims", "--resume", "results/claims"]) == 0
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
