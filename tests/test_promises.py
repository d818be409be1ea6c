"""What docs/trust.md promises: kills, damaged files, full disks and removed folders lose nothing in
silence.
"""

import contextlib
import functools
import os
import random
import re
import shutil
import sys
from pathlib import Path

import pytest

from asyncsim import Cluster, Gamma, InputError, Trace, simulate
from asyncsim.base.files import field_values, write_csv, write_json
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


def test_measurements_that_are_interrupted_are_concluded_resumed_and_joined_by_more(capsys):
    stop, concluded = [1], []

    def measured(seed):
        if seed in stop:
            raise KeyboardInterrupt
        return {results.SUMMARY: [{"seed": seed, "third": seed / 3}]}

    def run(**options):
        config = StudyConfig(**(TINY | options))
        jobs = [measurement(f"seed {seed}", measured, seed) for seed in range(config.seeds)]
        record = config.record(cells()[0].methods, cells()[0].problem)
        here = contextlib.nullcontext(Local())
        run_jobs("toy", config, record, jobs, here, conclude)

    def conclude(folder, rows):
        concluded.append(len(rows))
        present(folder, {}, "of the seeds")

    with pytest.raises(KeyboardInterrupt, match="the finished results are in mine"):
        run(seeds=2, out=Path("mine"))
    for name in ("report.html", "report.txt"):
        assert "unfinished: 1 of 2 runs" in Path("mine", name).read_text()
    # The first line of the page.
    assert '"verdict": "unfinished: 1 of 2 runs"' in Path("mine/report.html").read_text()
    stop.clear()
    run(seeds=3, resume=Path("mine"))
    run(seeds=3, out=Path("whole"))
    assert concluded == [1, 3, 3] and files("mine") == files("whole")
    assert "unfinished" not in Path("mine/report.html").read_text()
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
    for name in (
        "runs/.a.0123abcd.partial/run.json",
        "traces/.b.0123abcd.partial.parquet",
        "x/.c.00000000.partial/d/e",
    ):
        Path("mine", name).parent.mkdir(parents=True, exist_ok=True)
        Path("mine", name).write_text("half")
    others = ["aside/notes", ".notes.partial.txt", "runs/.a.partial"]
    for name in others:
        Path("mine", name).parent.mkdir(exist_ok=True)
        Path("mine", name).write_text("mine")
    study(resume=Path("mine"))
    hidden = [path for path in Path("mine").rglob("*") if "partial" in path.name]
    assert sorted(map(str, hidden)) == ["mine/.notes.partial.txt", "mine/runs/.a.partial"]
    assert all(Path("mine", name).read_text() == "mine" for name in others)


# Folders


@pytest.mark.parametrize("error", [KeyboardInterrupt(), InputError("bad")])
def test_without_a_result_only_what_was_written_is_removed(error):
    trace = simulate(Cluster(2, Gamma(1.0, 0.2)), 6)
    with pytest.raises(type(error)), results.new_folder("a/mine", "toy") as folder:
        write_json(folder / "config.json", {})
        trace.save(folder / "traces" / "x" / "seed0.parquet")
        Path(folder, "notes.txt").write_text("my own")
        Path(folder, "traces", "theirs").write_text("my own")
        raise error
    assert sorted(map(str, Path().rglob("*"))) == [
        "a",
        "a/mine",
        "a/mine/notes.txt",
        "a/mine/traces",
        "a/mine/traces/theirs",
    ]


def test_a_folder_that_was_removed_gets_nothing_more():
    def measured():
        shutil.rmtree("x")
        return {results.SUMMARY: [{"seed": 0}]}

    config = StudyConfig(**TINY, out=Path("x"))
    jobs = [measurement("seed 0", measured)]
    with pytest.raises(InputError, match="x': was removed while this ran; nothing more is written"):
        run_jobs("toy", config, {}, jobs, contextlib.nullcontext(Local()), lambda *_: None)
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
