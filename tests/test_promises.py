"""What docs/trust.md promises: kills, damaged files, full disks and removed folders lose nothing in
silence; a folder is one study's, and its files are whole or not there.
"""

import contextlib
import errno
import functools
import json
import os
import random
import re
import shutil
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from asyncsim import Cluster, Gamma, InputError, Trace, simulate
from asyncsim.base.files import (
    field_values,
    read_table,
    write_csv,
    write_json,
    write_sealed,
    write_whole,
)
from asyncsim.drawing import look
from asyncsim.study import results
from asyncsim.study.config import StudyConfig
from asyncsim.study.executor import Local
from asyncsim.study.finished import present
from asyncsim.study.jobs import measurement, run_jobs
from asyncsim.study.sweep import run_cells, sweep
from asyncsim.traces.columns import Source

TINY = {
    "workers": 2,
    "steps": 4,
    "seeds": 1,
    "problem": "quadratic",
    "methods": ("downpour", "sgd"),
}


@functools.cache
def cells():
    return sweep(StudyConfig(**TINY), [{}])  # of which all is compiled once


def study(**where) -> None:
    """Run a study of two runs on two traces, with a table in the place of its figures."""
    config = StudyConfig(**TINY, **where)
    run_cells(
        "toy", config, cells(), lambda folder, rows: write_csv(folder / "means.csv", rows[["seed"]])
    )


def files(folder: str) -> dict[str, bytes]:
    """All files but that which says when and for how long a study ran, and those that were moved
    aside.
    """
    paths = (
        path for path in Path(folder).rglob("*") if path.is_file() and path.name != "made.json"
    )
    contents = {str(path.relative_to(folder)): path.read_bytes() for path in paths}
    return {name: content for name, content in contents.items() if not name.startswith("aside/")}


def everything() -> list[str]:
    return sorted(str(path) for path in Path().rglob("*"))


# Kills


class Killed(BaseException):
    """Ends everything, as SIGKILL does: nothing is written or removed any more."""


_left: list[int] = []


def _count(event: str, arguments: tuple) -> None:
    """End the process at the file operation at which what is left has come to nothing."""
    changes = ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "shutil.rmtree")
    if _left and (
        event in changes or (event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR))
    ):
        if _left[0] == 0:
            raise Killed
        _left[0] -= 1


@pytest.fixture(scope="module")
def kill():
    """Let what is called be killed at a file operation of this number; return whether it came to
    that.
    """
    sys.addaudithook(_count)  # for good

    def killed(number: int, function, **arguments) -> bool:
        _left[:] = [number]
        try:
            function(**arguments)
        except Killed:
            return True
        finally:
            _left.clear()
        return False

    return killed


def test_killed_at_any_file_operation_it_is_resumed_to_the_same_bytes(kill, step=19):
    study(out="whole")
    number = 0
    while kill(number, study, out=Path("mine")):
        if not Path("mine/config.json").exists():
            assert not [path for path in Path().glob("mine/*") if "partial" not in path.name]
            with pytest.raises(InputError, match="no results of a study"):
                study(resume=Path("mine"))
        else:
            if number % 3 == 0:  # killed once more
                kill(number // 2, study, resume=Path("mine"))
            study(resume=Path("mine"))
            assert files("mine") == files("whole"), number
        shutil.rmtree("mine", ignore_errors=True)
        number += step
    assert number > 20


def local():
    return contextlib.nullcontext(Local())


def test_measurements_that_are_interrupted_are_concluded_resumed_and_joined_by_more(capsys):
    stop, concluded = [1], []

    def measured(seed):
        if seed in stop:
            raise KeyboardInterrupt
        return {results.SUMMARY: [{"seed": seed, "third": seed / 3}]}

    def conclude(folder, rows):
        concluded.append(len(rows))
        present(folder, {}, "of the seeds")

    def run(**options):
        config = StudyConfig(**(TINY | options))
        jobs = [measurement(f"seed {seed}", measured, seed) for seed in range(config.seeds)]
        record = config.record(cells()[0].methods, cells()[0].problem)
        run_jobs("toy", config, record, jobs, local(), conclude)

    with pytest.raises(KeyboardInterrupt, match="the finished results are in mine"):
        run(seeds=2, out=Path("mine"))
    page = Path("mine/report.html")
    assert "unfinished: 1 of 2 runs" in Path("mine/report.txt").read_text()
    # The first line of the page.
    assert '"verdict": "unfinished: 1 of 2 runs"' in page.read_text()
    stop.clear()
    run(seeds=3, resume=Path("mine"))
    run(seeds=3, out=Path("whole"))
    assert concluded == [1, 3, 3] and files("mine") == files("whole")
    assert "unfinished" not in page.read_text()
    assert "unfinished: 1 of 2 runs; tables and figures are of these" in capsys.readouterr().out


# Damaged files


def equal_traces(path: Path, content: bytes) -> bool:
    """Whether a file holds the trace that ``content`` is."""
    intact = path.with_name("intact.parquet")
    intact.write_bytes(content)
    traces = [Trace.load(file) for file in (path, intact)]
    intact.unlink()
    return traces[0].frame.equals(traces[1].frame) and field_values(
        traces[0], Source
    ) == field_values(traces[1], Source)


def test_a_flipped_byte_is_computed_again_or_refused_and_always_said(capsys, flips=8):
    study(out="whole")
    whole = files("whole")
    places = [(name, place) for name, content in whole.items() for place in range(len(content))]
    for name, place in random.Random(0).sample(places, flips):
        content = bytearray(whole[name])
        content[place] ^= random.Random(place).randrange(1, 256)
        Path("whole", name).write_bytes(content)
        capsys.readouterr()
        try:
            study(resume=Path("whole"))
        except InputError as error:
            assert name == "config.json" and "\n" not in str(error), (name, place, error)
            Path("whole", name).write_bytes(whole[name])
        else:
            said = "again" in capsys.readouterr().err
            # Parquet's own notes hold bytes that change no value; all else is made of runs and
            # traces in any case.
            harmless = name.startswith("traces") and equal_traces(Path("whole", name), whole[name])
            assert said or harmless or not name.startswith("runs"), (name, place)
            if harmless and not said:
                Path("whole", name).write_bytes(whole[name])
        assert files("whole") == whole, (name, place)


def noted(folder: Path) -> None:
    """Put notes into a folder that exists, or a new one."""
    folder.mkdir(exist_ok=True)
    (folder / "notes.txt").write_text("mine")


def damaged(folder: Path) -> None:
    """Put notes into the folder of a run, and remove a file of it."""
    noted(folder)
    (folder / "params.npz").unlink()


@pytest.mark.parametrize(
    ("name", "anew", "make"),
    [
        ("runs/sgd-seed0", False, damaged),
        ("traces/seed0.parquet", True, lambda path: path.write_text("mine")),
        ("traces/seed0.parquet", True, noted),
    ],
)
def test_files_of_the_user_are_moved_aside_and_never_removed(capsys, name, anew, make):
    study(out="mine")
    whole = files("mine")
    for number in ("", "-2"):
        path = Path("mine", name)
        if anew:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        make(path)
        study(resume=Path("mine"))
        aside = Path("mine/aside", name + number)
        assert f"moved to {aside}, and " in capsys.readouterr().err
        assert (aside / "notes.txt" if aside.is_dir() else aside).read_text() == "mine"
        assert files("mine") == whole


def test_half_written_files_of_a_killed_process_are_removed_and_no_others():
    study(out="mine")
    partial = [
        "mine/runs/.a.0123abcd.partial/run.json",
        "mine/traces/.b.0123abcd.partial.parquet",
        "mine/x/.c.00000000.partial/d/e",
    ]
    others = ["mine/.notes.partial.txt", "mine/aside/notes", "mine/runs/.a.partial"]
    for name in partial + others:
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text("mine")
    study(resume=Path("mine"))
    left = [name for name in everything() if "partial" in name or "aside/" in name]
    assert left == others and all(Path(name).read_text() == "mine" for name in others)


# Folders


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


@pytest.mark.parametrize("exists", [False, True])
def test_given_folder_may_be_new_or_empty(exists):
    if exists:
        Path("mine").mkdir()
    with results.new_folder("mine", "toy") as folder:
        finish(folder)
    assert everything() == ["mine", "mine/summary.csv"]


@pytest.mark.parametrize(
    ("out", "message"),
    [
        ("mine", "^out = 'mine': exists and is not an empty folder; give another"),
        ("results", "^out = 'results': exists and is not an empty folder; give another"),
        ("results/inside", "cannot be written: Not a directory; give a folder that can"),
        (None, "cannot be written: Not a directory; give a folder that can"),
    ],
)
def test_a_place_with_something_in_it_is_left_alone(out, message):
    Path("mine").mkdir()
    Path("mine/kept").write_text("kept")
    Path("results").write_text("kept")
    with pytest.raises(InputError, match=message):
        enter(out)
    with pytest.raises(InputError, match="cannot be written"):
        write_json(Path("results/one.json"), {})
    assert everything() == ["mine", "mine/kept", "results"]


@pytest.mark.parametrize("error", [InputError("bad"), KeyboardInterrupt()])
def test_finished_results_are_kept_and_files_of_the_user_in_any_case(error):
    message = r"the finished results are in mine"
    with pytest.raises(type(error), match=message), results.new_folder("mine", "toy") as folder:
        finish(folder)
        raise error
    with pytest.raises(type(error)), results.new_folder("a/mine", "toy") as folder:
        write_json(folder / "config.json", {})
        simulate(Cluster(2, Gamma(1.0, 0.2)), 6).save(folder / "traces" / "x" / "seed0.parquet")
        for name in ("notes.txt", "traces/theirs"):
            Path(folder, name).write_text("my own")
        raise error
    users = ["a", "a/mine", "a/mine/notes.txt", "a/mine/traces", "a/mine/traces/theirs"]
    assert everything() == [*users, "mine", "mine/summary.csv"]


def test_interruptions_of_what_can_be_resumed_say_how():
    def interrupted(folder, config=None) -> str:
        with pytest.raises(KeyboardInterrupt) as error, folder as place:
            if config is not None:
                write_sealed(place / "config.json", config)
            finish(place)
            raise KeyboardInterrupt
        return str(error.value)

    go_on = "the finished results are in my own; resume with the same options and --resume 'my own'"
    new = results.new_folder("my own", "toy", resumable=True)
    assert interrupted(new, {"study": "toy"}) == f"{go_on} instead of --out"
    assert interrupted(results.old_folder("my own", {"study": "toy"})) == go_on
    write_sealed(Path("my own/config.json"), {"study": "toy", "command": []})
    typed = "the finished results are in my own; resume with --resume 'my own'"
    assert interrupted(results.old_folder("my own", {"study": "toy"})) == typed
    never = interrupted(results.new_folder("mine", "toy"))
    assert never == "the finished results are in mine"


@pytest.mark.skipif(sys.platform == "win32", reason="locks of POSIX")
def test_nobody_else_writes_there_meanwhile():
    message = "'mine': another process writes there; wait for its end, or give another folder"
    Path("mine").mkdir()
    with results.new_folder("mine", "toy") as folder:
        with pytest.raises(InputError, match=f"^out = {message}$"):
            enter("mine")
        write_sealed(folder / results.CONFIG, {"study": "toy"})
        old = results.old_folder("mine", {"study": "toy"})
        with pytest.raises(InputError, match=f"^resume = {message}$"), old:
            pytest.fail("was let in")
    with results.old_folder("mine", {"study": "toy"}) as again:
        assert again == folder


def test_a_folder_that_was_removed_gets_nothing_more():
    def measured():
        shutil.rmtree("x")
        return {results.SUMMARY: [{"seed": 0}]}

    config = StudyConfig(**TINY, out=Path("x"))
    jobs = [measurement("seed 0", measured)]
    with pytest.raises(InputError, match="x': was removed while this ran; nothing more is written"):
        run_jobs("toy", config, {}, jobs, local(), lambda *_: None)
    assert not Path("x").exists()


@pytest.mark.parametrize("name", ["timeline", "aside"])
def test_a_file_of_the_user_in_the_place_of_a_folder(name):
    """``timeline`` is moved aside with all that is in it; nothing can be moved into a file."""
    trace = simulate(Cluster(2, Gamma(1.0, 0.2)), 6)
    write_json(Path("s/config.json"), {"study": "toy"})
    Path("s", name).write_text("mine")
    if name == "timeline":
        present(Path("s"), {}, example=("seed 0", trace))
        assert Path("s/aside/timeline").read_text() == "mine"
        assert Trace.load("s/timeline/seed 0.parquet").workers == 2
    else:
        Path("s/timeline").mkdir()
        with pytest.raises(InputError, match="cannot be moved to s/aside/timeline"):
            present(Path("s"), {}, example=("seed 0", trace))


# Disks


@pytest.mark.parametrize(
    ("error", "raised", "message"),
    [
        (
            OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
            InputError,
            "'a/one.json': cannot be written: No space left on device",
        ),
        (KeyboardInterrupt(), KeyboardInterrupt, None),
    ],
)
def test_an_error_leaves_the_file_as_it_was(error, raised, message, monkeypatch):
    path = write_json(Path("a/one.json"), {"x": 1})

    def half(partial):
        partial.write_text("ha")
        raise error

    with pytest.raises(raised, match=message):
        write_whole(path, half)
    assert json.loads(path.read_text()) == {"x": 1} and everything() == ["a", "a/one.json"]
    monkeypatch.setattr(os, "replace", lambda *_: half(Path("b")))  # at the last moment
    with pytest.raises(raised):
        finish(Path("a"))
    assert everything() == ["a", "a/one.json", "b"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a disk that is always full")
def test_a_disk_that_fills_inside_a_figure(monkeypatch):
    figure, _ = look.new_figure(3, 2)
    look.save(figure, "whole")
    open_ = Path.open

    def full(path, *arguments, **options):
        return open_(Path("/dev/full") if path.suffix == ".pdf" else path, *arguments, **options)

    monkeypatch.setattr(Path, "open", full)
    monkeypatch.setattr(
        "builtins.open", lambda path, *arguments, **options: full(Path(path), *arguments, **options)
    )
    with pytest.raises(InputError, match=r"'mine.pdf': cannot be written: No space left on device"):
        look.save(figure, "mine")
    assert sorted(path.name for path in Path().iterdir()) == ["mine.png", "whole.pdf", "whole.png"]


def test_what_is_finished_is_on_disk_before_it_is_named(monkeypatch):
    """Every file of a run, and the folders that name them, before the summary that does; files
    before their names.
    """
    synced, order = os.fsync, []

    def fsync(descriptor):
        name = Path(os.readlink(f"/proc/self/fd/{descriptor}")).name
        order.append(re.sub(r"\.[0-9a-f]{8}\.partial", ".partial", name))
        synced(descriptor)

    if not Path("/proc/self/fd").exists():
        pytest.skip("needs to know the name of an open file")
    monkeypatch.setattr(os, "fsync", fsync)
    study(out="mine")
    first = order[: order.index(".summary.partial.csv")]
    assert {"run.json", "params.npz", "commits.parquet", ".downpour-seed0.partial", "runs"} <= set(
        first
    )
    assert {".seed0.partial.parquet", "traces", "mine"} <= set(first)
    after = first[first.index(".downpour-seed0.partial") :]
    assert "run.json" not in after and "runs" in after


def test_tables_come_back_as_they_were():
    numbers = np.random.default_rng(0).normal(size=5_000)
    numbers[:2] = 0.1 + 0.2, 1e-300
    table = pd.DataFrame({"method": ["null", "NA"] * 2_500, "loss": numbers})
    table["norm"] = np.where(numbers > 0, 1, np.nan)
    written = read_table(write_csv(Path("table.csv"), table))
    pd.testing.assert_frame_equal(written, table, check_exact=True)
