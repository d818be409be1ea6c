"""Notes: told each time, or once inside of what has many parts."""

import sys

from asyncsim.base.console import each_note_once, note, on_a_terminal


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
