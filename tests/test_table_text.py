"""Numbers and tables as people read them."""

import numpy as np
import pandas as pd
import pytest

from asyncsim.base.console import number_text, table_text
from asyncsim.study.columns import Column, as_column, axis_of, text_of, with_titles


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (0.00454, "0.00454"),
        (1.0, "1.00"),
        (202.4, "202"),
        (99.97, "100"),
        (999.4, "999"),
        (999.6, "1,000"),
        (-12_345.6, "-12,346"),
        (1e7, "1.00e+07"),
        (2.5e-9, "2.50e-09"),
        (np.inf, "inf"),
    ],
)
def test_numbers(value, text):
    assert number_text(value) == text


def test_more_digits():
    assert number_text(202.44, digits=4) == "202.4"
    assert number_text(5_000.0, digits=4) == "5,000"
    assert number_text(999.96, digits=4) == "1,000"


def test_tables():
    text = table_text(
        pd.DataFrame({"method": ["gem", "sgd"], "loss": [0.5, np.nan], "commits": [3, 20_000]})
    )
    assert [line.split() for line in text.splitlines()] == [
        ["method", "loss", "commits"],
        ["gem", "0.500", "3"],
        ["sgd", "-", "20000"],
    ]


def test_on_a_narrow_terminal_the_last_columns_are_named_below(monkeypatch):
    table = pd.DataFrame({f"column {number}": [1.0] for number in range(12)})
    assert "also in" not in table_text(table, file="table.csv")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "40")
    lines = table_text(table, file="table.csv").splitlines()
    assert max(map(len, lines)) <= 40 and lines[0].split()[1::2] == ["0", "1", "2", "3"]
    assert (
        " ".join(lines[2:]).startswith("also in table.csv: column 4, column 5")
        and "column 11" in lines[-1]
    )


def test_columns_are_printed_with_their_titles_and_parts_with_their_whole():
    table = pd.DataFrame(
        {"method": ["gem"], "seeds": [3], "reached": [2], "learning_rate": [0.1], "own_name": [1.0]}
    )
    assert list(with_titles(table)) == [
        "method",
        "reached",
        "rate",
        "own name",
    ]  # seeds are in the reached ones
    shown = with_titles(table, ["reached", "not_there", Column("own_name", "mine"), "method"])
    assert shown.to_dict("list") == {"reached": ["2 of 3"], "mine": [1.0], "method": ["gem"]}
    assert with_titles(table.assign(**{"": "~1"}), ["", "method"]).to_dict("list") == {
        "": ["~1"],
        "method": ["gem"],
    }
    # Without the whole the part is a number.
    assert list(with_titles(table.drop(columns="seeds"), ["reached"])["reached"]) == [2]
    assert text_of(table, ["method", "learning_rate"]).split() == ["method", "rate", "gem", "0.100"]
    assert axis_of("time_to_target") == "simulated time to the target (s)"
    assert axis_of("own_name") == "own name" and as_column(Column("a", "b")).axis == "b"
