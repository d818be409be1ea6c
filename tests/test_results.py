"""A study's folder: who gets which, what an error leaves behind, and files that are whole or not
there.
"""

import errno
import json
import os
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from asyncsim import InputError
from asyncsim.base.files import read_table, write_csv, write_json, write_sealed, write_whole
from asyncsim.study import results


def everything() -> list[str]:
    return sorted(str(path) for path in Path().rglob("*"))


def finish(folder: Path) -> None:
    write_csv(folder / results.SUMMARY, pd.DataFrame({"a": [1]}))


def enter(out: str | None) -> None:
    with results.new_folder(out, "toy"):
        pytest.fail("never entered")


def test_default_folders_are_numbered_and_those_that_start_together_get_one_each():
    for expected in ("results/toy", "results/toy-2", "results/toy-3"):
        with results.new_folder(None, "toy") as folder:
            assert folder == Path(expected) and folder.is_dir()
            finish(folder)
    with results.new_folder(None, "toy") as first, results.new_folder(None, "toy") as second:
        assert (first, second) == (Path("results/toy-4"), Path("results/toy-5"))


@pytest.mark.parametrize("there", [False, True])
def test_given_folder_may_be_new_or_empty(there):
    if there:
        Path("mine").mkdir()
    with results.new_folder("mine", "toy") as folder:
        finish(folder)
    assert everything() == ["mine", "mine/summary.csv"]


def test_given_folder_that_holds_something_is_left_alone():
    Path("mine").mkdir()
    Path("mine/kept").write_text("kept")
    Path("file").write_text("kept")
    for out in ("mine", "file"):
        with pytest.raises(
            InputError, match=rf"out = '{out}': exists and is not an empty folder; give another"
        ):
            enter(out)
    assert everything() == ["file", "mine", "mine/kept"]


@pytest.mark.parametrize("out", ["file/inside", None])
def test_folder_below_a_file(out):
    Path("file").write_text("")
    Path("results").write_text("")
    with pytest.raises(
        InputError, match=r"cannot be written: Not a directory; give a folder that can"
    ):
        enter(out)
    assert everything() == ["file", "results"]


@pytest.mark.parametrize("error", [InputError("bad"), KeyboardInterrupt()])
def test_finished_results_are_kept_and_told(error):
    told = r"the finished results are in mine"
    with pytest.raises(type(error), match=told), results.new_folder("mine", "toy") as folder:
        finish(folder)
        raise error
    assert everything() == ["mine", "mine/summary.csv"]


def test_interruptions_of_what_can_be_resumed_say_how():
    with (
        pytest.raises(KeyboardInterrupt) as new,
        results.new_folder("my own", "toy", resumable=True) as folder,
    ):
        write_sealed(folder / "config.json", {"study": "toy"})
        finish(folder)
        raise KeyboardInterrupt
    go_on = "the finished results are in my own; resume with the same options and --resume 'my own'"
    assert str(new.value) == f"{go_on} instead of --out"
    with pytest.raises(KeyboardInterrupt) as old, results.old_folder("my own", {"study": "toy"}):
        raise KeyboardInterrupt
    assert str(old.value) == go_on
    write_sealed(Path("my own/config.json"), {"study": "toy", "command": []})
    with pytest.raises(KeyboardInterrupt) as typed, results.old_folder("my own", {"study": "toy"}):
        raise KeyboardInterrupt
    assert str(typed.value) == "the finished results are in my own; resume with --resume 'my own'"
    with pytest.raises(KeyboardInterrupt) as never, results.new_folder("mine", "toy") as folder:
        finish(folder)
        raise KeyboardInterrupt
    assert str(never.value) == "the finished results are in mine"


@pytest.mark.skipif(sys.platform == "win32", reason="locks of POSIX")
def test_nobody_else_writes_there_meanwhile():
    Path("mine").mkdir()
    told = "'mine': another process writes there; wait for its end, or give another folder"
    with results.new_folder("mine", "toy") as folder:
        for_long = {"study": "toy"}
        with pytest.raises(InputError, match=f"^out = {told}$"), results.new_folder("mine", "toy"):
            pytest.fail("was let in")
        write_sealed(folder / results.CONFIG, for_long)
        with (
            pytest.raises(InputError, match=f"^resume = {told}$"),
            results.old_folder("mine", for_long),
        ):
            pytest.fail("was let in")
    with results.old_folder("mine", for_long) as again:
        assert again == folder


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), KeyboardInterrupt()]
)
def test_an_error_leaves_the_file_as_it_was(error, monkeypatch):
    path = write_json(Path("a/one.json"), {"x": 1})

    def half(partial):
        partial.write_text("ha")
        raise error

    told = (
        r"'a/one.json': cannot be written: No space left on device"
        if isinstance(error, OSError)
        else None
    )
    with pytest.raises(InputError if told else KeyboardInterrupt, match=told):
        write_whole(path, half)
    assert json.loads(path.read_text()) == {"x": 1} and everything() == ["a", "a/one.json"]
    monkeypatch.setattr(os, "replace", lambda *_: half(Path("b")))  # at the last moment
    with pytest.raises(InputError if told else KeyboardInterrupt):
        finish(Path("a"))
    assert everything() == ["a", "a/one.json", "b"]


def test_file_below_a_file():
    Path("file").write_text("")
    with pytest.raises(InputError, match="cannot be written"):
        write_json(Path("file/one.json"), {})


def test_tables_come_back_as_they_were():
    numbers = np.random.default_rng(0).normal(size=5_000)
    numbers[:2] = 0.1 + 0.2, 1e-300
    table = pd.DataFrame(
        {
            "method": ["null", "NA"] * 2_500,
            "loss": numbers,
            "norm": np.where(numbers > 0, 1, np.nan),
        }
    )
    pd.testing.assert_frame_equal(
        read_table(write_csv(Path("table.csv"), table)), table, check_exact=True
    )
