"""Numbers and tables as people read them."""

import calendar
import re
import sys
import time

import jax
import numpy as np
import pandas as pd
import pytest
from tqdm import tqdm

from asyncsim.__main__ import main
from asyncsim.base.console import (
    Progress,
    each_note_once,
    in_texts,
    note,
    number_text,
    on_a_terminal,
    percent_text,
    safe_output,
    table_text,
    tell_error,
)
from asyncsim.study.columns import Column, as_column, axis_of, titled, with_titles
from asyncsim.study.jobs import expected_end


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


def test_percents_of_parts_are_neither_none_nor_all():
    shares = (0.0, 0.004, 0.5, 0.9949, 0.9951, 0.9999, 1.0, 1.02)
    texts = "0% 0.4% 50% 99% 99.5% 100% 100% 102%"
    assert " ".join(map(percent_text, shares)) == texts


@pytest.fixture
def terminal(monkeypatch, capsys):
    """Standard output and standard error are a terminal of 40 columns."""
    monkeypatch.setattr(type(sys.stdout), "isatty", lambda _: True)
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "")


def test_tables_have_the_columns_that_fit_a_width():
    table = pd.DataFrame({"": ["1", "~2"], "method": ["gem", "sgd"], "loss": [0.5, np.nan]})
    table = in_texts(table.assign(share=[np.inf, 0.25], seeds=[3, 2]))
    lines = ["", "    method   loss  share  seeds"]
    lines += [" 1  gem     0.500    inf      3", "~2  sgd         -  0.250      2"]
    assert table_text(table).splitlines() == lines[1:]
    assert table_text(table, 31) == table_text(table)
    *cut, further = table_text(table, 30).splitlines()
    assert cut == [line[:24] for line in lines[1:]]
    assert further == "further columns in the files: seeds"
    # The first column stands even where it does not fit.
    assert table_text(table[["method"]], 3).splitlines() == ["method", "gem", "sgd"]


@pytest.mark.parametrize(
    ("line", "lines"),
    [
        ("words " * 10, [("words " * 6).strip(), ("words " * 4).strip()]),
        ("  note: " + "words " * 6, ["  note: " + "words " * 4 + "words", "  words"]),
        (
            "a mean  1.00   " + "words " * 5,
            ["a mean  1.00   " + "words " * 3 + "words", " " * 15 + "words"],
        ),
        ("x" * 50, ["x" * 50]),
    ],
)
def test_lines_break_between_words_at_the_width_of_a_terminal(line, lines, terminal, capsys):
    with safe_output():
        print(line)
    note(line)
    out, err = capsys.readouterr()
    assert all(len(text) <= 40 or " " not in text for text in err.splitlines())
    assert [text.rstrip() for text in out.splitlines()] == [text.rstrip() for text in lines]


COLOURED = ["verdict: gem is the best", "error: rate = 0: must be above zero", "hint: give another"]


@pytest.mark.parametrize(
    ("name", "value", "lines"),
    [
        ("NO_COLOR", "", COLOURED),
        ("NO_COLOR", "1", []),
        ("TERM", "dumb", []),
        ("no terminal", "", []),
    ],
)
def test_only_verdicts_errors_and_hints_have_colours(
    terminal, monkeypatch, capsys, name, value, lines
):
    monkeypatch.setenv(name, value)
    if name == "no terminal":
        monkeypatch.setattr(type(sys.stdout), "isatty", lambda _: False)
    with safe_output():
        print("a table\nverdict: gem is the best\nan end")
    tell_error("rate = 0: must be above zero; give another")
    note("a note")
    printed = [line for line in "".join(capsys.readouterr()).splitlines() if "\033" in line]
    assert [re.sub("\033[^m]*m", "", line) for line in printed] == lines


def test_the_option_no_color_may_stand_anywhere(terminal, capsys):
    assert main(["study", "nowhere"]) == 2 and "\033[" in capsys.readouterr().err
    assert main(["study", "--no-color", "nowhere"]) == 2
    assert capsys.readouterr().err.startswith("error: ")


def test_progress_bars_say_that_jax_compiles(monkeypatch, capsys):
    bars = []
    monkeypatch.setattr(tqdm, "refresh", lambda bar, **_: bars.append(bar.postfix))
    with Progress(2, "runs", "run", is_shown=True) as bar:
        bar.say("end about 12:00")
        jax.jit(lambda x: x * 2 + 1)(1.0).block_until_ready()
        assert "end about 12:00, compiling" in bars and bars[-1] == "end about 12:00"
        bars.clear()
    jax.jit(lambda x: x * 3 + 1)(1.0).block_until_ready()
    assert bars == []  # the bar is closed
    with Progress(2, "runs", "run", is_shown=True) as bar, pytest.raises(ValueError, match="mine"):
        jax.jit(failing)(1.0)
    assert bars[-1] == ""  # no failed compilation stays


def failing(x):
    raise ValueError("mine")


def test_jobs_end_after_the_mean_time_of_those_that_have_ended(monkeypatch):
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    noon = calendar.timegm((2026, 3, 1, 12, 0, 0))
    monkeypatch.setattr(time, "time", lambda: noon)
    assert expected_end(noon - 600, 2, 8) == "end about 12:30"
    assert expected_end(noon - 7200, 1, 8) == "end about 02 Mar 02:00"
    monkeypatch.undo()
    time.tzset()


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
    texts = titled(table, ["method", "learning_rate"])
    assert texts.to_dict("list") == {"method": ["gem"], "rate": ["0.100"]}
    assert axis_of("time_to_target") == "simulated time to the target (s)"
    assert axis_of("own_name") == "own name" and as_column(Column("a", "b")).axis == "b"


def test_each_note_is_told_once_inside_and_again_after(capsys):
    with each_note_once():
        for text in ("one", "one", "other"):
            note(text)
        with each_note_once():
            note("one")
        note("other")
    note("one")
    assert capsys.readouterr().err.splitlines() == ["note: one", "note: other", "note: one"]


def test_without_standard_error_nobody_looks_at_it(monkeypatch):
    monkeypatch.setattr(sys, "stderr", None)
    assert not on_a_terminal()
