"""The study of published claims: its commands, its rules and verdicts, and its page."""

import math
import shlex
from collections import Counter
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from asyncsim import study
from asyncsim.claims import LISTS, claims_of
from asyncsim.claims.claim import Finding, above, below, measured, verdict
from asyncsim.claims.gem import compliance_predicts, generalization
from asyncsim.claims.lsgd import as_low, sooner
from asyncsim.runs.known import entries
from asyncsim.study import command, configure

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
pytestmark = pytest.mark.usefixtures("unrendered_figures")


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


def test_verdicts_follow_from_findings():
    yes, no, unknown = (
        Finding(text, holds) for text, holds in zip("abc", (True, False, None), strict=True)
    )
    assert verdict([yes, yes]) == "holds"
    assert verdict([yes, no]) == verdict([yes, unknown]) == "holds in part"
    assert verdict([no, unknown]) == verdict([no]) == "does not hold"
    assert verdict([unknown]).startswith("not testable here: the noise")
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


class Runs:
    """A finished study whose runs have tables made by hand."""

    def __init__(self, summary: pd.DataFrame, tables: dict[str, dict[str, pd.DataFrame]]):
        self.summary, self._tables = summary, tables

    def run(self, name: str):
        return type("Run", (), self._tables[name])


def energies(ratio: float) -> dict[str, pd.DataFrame]:
    steps = np.arange(12)
    late = np.where(steps < 10, ratio, 100.0)
    return {
        "commits": pd.DataFrame(
            {"worker_step": steps, "loss": 2.0, "central_energy": late, "proxy_energy": 1.0}
        )
    }


def test_compliance_is_judged_by_the_energies_of_the_first_steps():
    summary = pd.DataFrame(
        {
            "run_folder": list("abcd"),
            "status": ["finished", "finished", "finished", "diverged"],
            "final_loss": [0.1, 0.9, 1.1, np.nan],
        }
    )
    perfect = {
        name: energies(ratio) for name, ratio in zip("abcd", (0.5, 0.9, 1.1, 3.0), strict=True)
    }
    assert verdict(compliance_predicts(Runs(summary, perfect))) == "holds"
    # The order is right, but equation 12's threshold is not.
    shifted = {
        name: energies(ratio) for name, ratio in zip("abcd", (1.5, 1.9, 2.1, 3.0), strict=True)
    }
    findings = compliance_predicts(Runs(summary, shifted))
    assert verdict(findings) == "holds in part"
    assert "higher energy ratio in 100% of the pairs" in findings[1].text


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
    equal_gradients, error, equal_time = generalization(Runs(pd.DataFrame(rows), tables))
    assert equal_gradients.holds is False and "0.50 times" in equal_gradients.text
    assert error.holds is False and "-10" in error.text
    # At 10 of its 40 s SGD has a test loss of 2 - 1.9 / 4.
    assert equal_time.holds is True and "7.5" in equal_time.text


def test_leaders_are_compared_each_at_the_best_rate_for_the_measure():
    rows, tables = [], {}
    # Error 0.1 at half the time of a run from error 0.2 to 0.
    for method, rate, end, loss in (
        ("lsgd", 0.1, 10.0, 0.3),
        ("lsgd", 0.2, 20.0, 0.1),
        ("aeasgd", 0.1, 30.0, 0.2),
        ("aeasgd", 0.2, 15.0, 0.4),
    ):
        for seed in range(3):
            name = f"{method}-{rate}-{seed}"
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
                    "run_folder": name,
                }
            )
            evaluations = {"commit_time": [0.0, seconds], "test_accuracy": [0.8, 1.0]}
            tables[name] = {"evaluations": pd.DataFrame(evaluations)}
    finished = Runs(pd.DataFrame(rows), tables)
    finished.config = {"target": 0.1}
    (faster,), (lower,) = sooner(finished), as_low(finished)
    assert faster.holds is True and "1.50 times" in faster.text
    assert lower.holds is True and "2.00 times" in lower.text


def test_an_unknown_list_is_refused_in_one_line(capsys):
    assert command.main(["claims", "gem", "gim"]) == 2
    error, hint = capsys.readouterr().err.splitlines()
    assert error.startswith("error: lists = 'gim': unknown") and "gem" in hint
    assert command.main(["claims", "gem", "gem"]) == 2
    assert "lists" in capsys.readouterr().err


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
    assert list(zip(table["list"], table["claim"], table["source"], strict=True)) == [
        (name, claim.claim, claim.source) for name, claim in listed
    ]
    for row, (_, claim) in zip(table.itertuples(), listed, strict=True):
        tests = () if isinstance(claim.small, str) else claim.small
        assert row.command == " && ".join(f"asyncsim study {text}" for text in tests)
        assert row.verdict.startswith(("holds", "does not hold", "not testable here: "))
        assert bool(row.measured) == bool(row.command)
