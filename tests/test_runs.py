"""Finished studies that are found again: the index, tags, the commands, and what hostile folders
cannot do.
"""

import io
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import matplotlib.figure
import pandas as pd
import pytest
from test_study import ROOT, TOY

import asyncsim
from asyncsim import InputError, plots, study
from asyncsim.__main__ import main
from asyncsim.base.console import safe_output
from asyncsim.base.errors import printable
from asyncsim.base.files import write_sealed
from asyncsim.runs import known
from asyncsim.study import results


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """Two small studies in a folder of results."""
    base = tmp_path_factory.mktemp("made")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(base)
        patch.setenv("ASYNCSIM_INDEX", str(base / "index"))
        assert study.main(["compare", *TOY, "--steps=40", "--methods", "downpour", "gem"]) == 0
        assert study.main(["staleness", *TOY, "--workers=3"]) == 0
    return base / "results"


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    """A working folder and an index of the test's own."""
    monkeypatch.setenv("ASYNCSIM_INDEX", str(tmp_path / "index"))
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path


@pytest.fixture
def there(two, place):
    shutil.copytree(two, place / "work" / "results")
    return place / "work" / "results"


def test_a_folder_says_when_where_and_how_long(there):
    made = json.loads((there / "compare" / "made.json").read_text())
    assert made["cores"] == os.cpu_count() and made["wall_time"] > 0 and made["device"]
    assert pd.Timestamp(made["date"]).tzinfo is not None
    (entry,) = [one for one in known.entries() if one.study == "compare"]
    assert (entry.cluster, entry.methods) == ("2 workers", "downpour, gem")
    report = (there / "compare" / "report.txt").read_text().splitlines()
    assert entry.verdict[:90] == report[-1].removeprefix("verdict: ")[:90] != ""


def test_tags_are_found_from_any_folder(there, place, capsys, monkeypatch):
    assert main(["tag", "results/compare", "base", "--note", "two of a kind"]) == 0
    assert main(["tag", "results/compare", "early", "--run", "gem-seed0", "--commit", "7"]) == 0
    around = f"../{Path.cwd().name}/results/compare"
    assert main(["tag", around, "again"]) == 0
    assert len([entry for entry in known.entries() if entry.study == "compare"]) == 1
    assert main(["tag", "--remove", "again"]) == 0
    (place / "elsewhere").mkdir()
    monkeypatch.chdir(place / "elsewhere")
    capsys.readouterr()
    assert main(["warp", "early"]) == 0
    output = capsys.readouterr()
    assert output.out == f"{there / 'compare'}\n" and "runs/gem-seed0, commit 7" in output.err
    assert main(["runs", "bas"]) == 0
    assert "base, early" in capsys.readouterr().out
    opened = asyncsim.runs.open("early")
    assert list(opened.place.rows(2)["commit"]) == [5, 6, 7, 8, 9]
    assert set(opened.runs) == {"downpour-seed0", "gem-seed0"} and len(opened.traces["seed0"]) == 80
    assert asyncsim.runs.open("base").note == "two of a kind" and opened.place.commit == 7
    assert list(asyncsim.runs.table()["study"]) == ["staleness", "compare"]
    assert main(["tag", "--remove", "early"]) == 0
    assert not (there / "compare" / "tags" / "early.json").exists() and main(["warp", "early"]) == 2
    assert main(["tag", "--remove", "compare"]) == 2 and "no tag" in capsys.readouterr().err


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_the_function_of_a_shell_changes_to_the_folder_and_completes(there, place, tmp_path):
    known.tag(there / "compare", "base")
    command = tmp_path / "asyncsim"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m asyncsim "$@"\n')
    command.chmod(0o755)
    script = (
        'eval "$(asyncsim warp --shell bash)"; warp base && pwd; warp nowhere || pwd;'
        " COMP_WORDS=(asyncsim tag b); COMP_CWORD=2; _asyncsim; echo ${COMPREPLY[@]}"
    )
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    root = str(Path(asyncsim.__file__).parent.parent)
    result = subprocess.run(
        ["bash", "-c", script],
        env={**os.environ, "PATH": path, "PYTHONPATH": root},
        capture_output=True,
        text=True,
        cwd=place,
    )
    assert result.stdout.split() == [str(there / "compare")] * 2 + ["base"]


@pytest.mark.parametrize("study", ["compare", "of my own"])
def test_a_page_in_a_folder_is_never_opened(study, there, place, monkeypatch):
    folder, shown = there / "compare", []
    (folder / "report.html").write_text("<script>window.evil = 1</script>")
    config = json.loads((folder / "config.json").read_text()) | {"study": study}
    (folder / "config.json").write_text(json.dumps(config))
    before = {path: path.stat().st_mtime_ns for path in [folder, *folder.rglob("*")]}
    monkeypatch.setattr("webbrowser.open", lambda address: shown.append(address) or True)
    assert main(["show", "results/compare"]) == 0 and main(["warp", "compare", "--open"]) == 0
    page = Path(shown[1].removeprefix("file://"))
    assert shown[0] == shown[1] and page.is_relative_to(place / "index")
    text = page.read_text()
    assert "evil" not in text and "downpour" in text
    assert before == {path: path.stat().st_mtime_ns for path in [folder, *folder.rglob("*")]}
    (folder / "report.html").unlink()
    os.mkfifo(folder / "report.html")
    assert main(["show"]) == 0 and "<a " not in Path(shown[2].removeprefix("file://")).read_text()


def test_no_text_of_a_stranger_controls_the_terminal(there, capsys):
    config = json.loads((there / "compare" / "config.json").read_text())
    evil = {**config, "study": "\x1b[2Jcompare", "\x1b]0;title\x07": 1, "\u202ename": 2}
    shutil.copytree(there / "compare", there / "evil")
    commands = (
        (["figures", "results/evil"], 2),
        (["study", "compare", *TOY, "--resume", "results/evil"], 2),
    )
    write_sealed(there / "evil" / "config.json", evil)
    config = json.loads((there / "compare" / "config.json").read_text())
    write_sealed(
        there / "compare" / "config.json", {**config, "\x1b]0;title\x07": 3, "\u202ename": 4}
    )
    for arguments, code in commands:
        assert main(arguments) == code
        output = "".join(capsys.readouterr())
        assert output and all(letter.isprintable() or letter == "\n" for letter in output), output
    assert str(InputError("\x1b[31mred\n\u202e\udc80")) == "?[31mred\n??"
    assert printable("seed\u00a00\x1b") == "seed\u00a00?"  # as titles have it


def test_a_link_in_a_folder_is_named_and_not_called_damage(there, capsys, name="summary.csv"):
    shutil.copytree(there / "compare", there / "linked")
    (there / "linked" / name).unlink()
    (there / "linked" / name).symlink_to(there / "compare" / name)
    assert main(["figures", "results/linked"]) == 2
    error = capsys.readouterr().err
    assert f"{name}': is a link" in error and "damaged" not in error and error.count("\n") == 2


def test_damaged_results_end_in_one_line(there, capsys):
    summary = there / "staleness" / "summary.csv"
    pd.read_csv(summary).assign(note="x" * 200_000).to_csv(summary, index=False)
    assert main(["figures", "results/staleness"]) == 0  # the page lacks that table only
    summary.write_text("method,seed\n")
    assert main(["figures", "results/staleness"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 2


def test_a_terminal_of_ascii_gets_the_report(monkeypatch):
    terminal = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", terminal)
    with safe_output():
        print("1 \u00b1 2, n\u00b2, \u03bb")
    terminal.flush()
    assert terminal.buffer.getvalue() == b"1 +- 2, n^2, ?\n"


def test_folders_that_move_are_found_or_said(there, place, capsys):
    known.tag(there / "compare", "moving")
    (there / "compare").rename(there / "renamed")
    assert known.find("moving").folder == there / "renamed"
    (place / "far").mkdir()
    (there / "renamed").rename(place / "far" / "away")
    with pytest.raises(InputError, match="no tag and no folder of results"):
        known.find("moving")
    assert main(["runs", "--root", str(place / "far")]) == 0
    assert known.find("moving").folder == place / "far" / "away"
    shutil.rmtree(place / "far")
    assert main(["runs"]) == 0 and "is gone; was it moved?" in capsys.readouterr().err
    assert main(["runs", "--forget"]) == 0 and "forgot 1 folder" in capsys.readouterr().out
    assert [one.study for one in known.entries()] == ["staleness"]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("tag", "results/compare", "a/b"), "name = 'a/b': must be of letters"),
        (("tag", "results/compare", "-x"), "arguments"),
        (("tag", "nowhere", "x"), "no tag and no folder"),
        (("tag", "--remove", "takne"), "did you mean 'taken'"),
        (("warp",), "give a name"),
        (("warp", "--shell", "csh"), "invalid choice: 'csh'"),
        (("tag", "results/compare", "x", "--run", "gem-sed0"), "did you mean 'gem-seed0'"),
        (("tag", "results/compare", "x", "--run", "gem-seed0", "--commit", "80"), "has 80 commits"),
        (("tag", "results/compare", "x", "--commit", "3"), "of which run"),
        (("tag", "results/staleness", "Taken"), "is taken by"),
        (("warp", "takne"), "did you mean 'taken'"),
        (("runs", "--root", "nowhere"), "is no folder"),
        (("wrap", "taken"), "did you mean 'warp'"),
    ],
)
def test_bad_input(arguments, told, there, capsys):
    known.tag(there / "compare", "taken")
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and told in error and error.count("\n") == 2
    assert error.splitlines()[1].startswith("hint: ")
    assert not (there / "compare" / "tags" / "x.json").exists()


def test_a_name_of_two_folders_is_refused(there):
    known.tag(there / "compare", "one")
    shutil.copytree(there / "compare", there / "copied")
    with pytest.raises(InputError, match="2 folders have it"):
        known.find("one")


def test_the_folder_below_the_working_folder_is_preferred(there, place, monkeypatch):
    shutil.copytree(there, place / "elsewhere" / "results")
    known.add_root(there)
    known.add_root(place / "elsewhere")
    monkeypatch.chdir(place)
    with pytest.raises(InputError, match="2 folders have it"):
        known.find("compare")
    for folder in (there.parent, there):  # also before a folder that is known by its name
        monkeypatch.chdir(folder)
        assert known.find("compare").folder == there / "compare"


def test_a_closed_pipe_ends_a_command_silently(there, command="runs"):
    reader, writer = os.pipe()
    os.close(reader)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    program = [sys.executable, "-m", "asyncsim", command]
    ended = subprocess.run(
        program, stdout=writer, stderr=subprocess.PIPE, text=True, env=environment
    )
    os.close(writer)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_hostile_folders_are_read_and_shown_without_harm(place, capsys):
    for number, text in enumerate(
        ["{", "[" * 100_000, "7", '{"study": 7}', '{"study": "\\u001b[31mred\\n<b>"}']
    ):
        folder = place / "work" / "results" / str(number)
        (folder / "tags").mkdir(parents=True)
        (folder / "config.json").write_text(text)
        (folder / "summary.csv").write_bytes(b'\xff\x00"\n' * 9)
        (folder / "made.json").write_text('{"date": 3, "id": [1]}')
        (folder / "tags" / "t.json").write_text(
            json.dumps({"note": 10**400, "run": 3, "commit": "x", "date": None})
        )
        (folder / "tags" / "$(rm).json").write_text("{}")
        (folder / "made.json").write_text(
            '{"date": "\\ud800", "id": "\\ud800"}' if number == 4 else "{"
        )
    odd = place / "work" / "results" / "\x1b[31mred\udcff"
    odd.mkdir()
    (odd / "config.json").write_text('{"study": "odd"}')
    assert main(["runs"]) == 0
    shown = capsys.readouterr().out
    assert "\x1b" not in shown and shown.count("results/") == 5 and "?[31mred" in shown
    with pytest.raises(InputError):
        asyncsim.runs.open("t")


def test_the_runs_of_a_tuned_study_are_found(place, capsys):
    """They lie below a folder of their rate; the page moves those of each method's best."""
    tuned = (*TOY, "--steps=30", "--workers=4", "--tune", "0.01", "0.2", "--animate")
    assert study.main(["compare", *tuned, "--methods", "downpour", "gem", "--out=first"]) == 0
    opened = asyncsim.runs.open("first")
    assert "learning_rate-0.2/gem-seed0" in opened.runs and len(opened.traces) == 1
    assert (
        main(["tag", "first", "place", "--run", "learning_rate-0.2/gem-seed0", "--commit", "3"])
        == 0
    )
    assert asyncsim.runs.open("place").place.rows(1)["commit"].tolist() == [2, 3, 4]
    titles = re.findall(
        r'"title": "((?:gem|downpour)[^"]*)"', Path("first", "report.html").read_text()
    )
    assert titles and all("rate 0.2" in title for title in titles)


def test_only_runs_that_differ_in_the_seed_are_a_line():
    """Other learning rates, clusters and lengths are lines of their own, which say what differs."""

    def run(seed=0, rate=0.1, compute="1", commits=8):
        trace = asyncsim.simulate(asyncsim.Cluster(2, compute), commits, seed=seed)
        method, problem = asyncsim.methods.downpour(rate), asyncsim.problems.quadratic([1.0])
        return asyncsim.replay(trace, method, problem, seed=seed, evaluate_every=2)

    def lines(*others, **options):
        figure = plots.compare([run(), *others], **options)
        labels = [line.get_label() for line in figure.axes[0].get_lines()]
        return labels, figure.get_suptitle()

    assert lines(run(1)) == (["DOWNPOUR"], "quadratic; mean and range of 2 seeds")
    assert lines(run(1, rate=0.2)) == (
        ["DOWNPOUR (learning rate=0.1)", "DOWNPOUR (learning rate=0.2)"],
        "quadratic; 1 seed",
    )
    assert lines(run(1, compute="uniform(1, 2)"), run(2), labels=["mine"] * 3, title="times") == (
        ["mine(compute=constant(value=1))", "mine(compute=uniform(low=1, high=2))"],
        "times; mean and range of 1 to 2 seeds",
    )
    labels, _ = lines(run(commits=12), run())
    assert labels == [f"DOWNPOUR (commits={text})" for text in ("8", "12", "8, run=2")]


def test_an_unfinished_study_says_so_everywhere(there, capsys):
    """Also one that was killed, whose list still names the runs that are in its folder."""
    folder = there / "compare"
    assert main(["figures", str(folder)]) == 0
    finished = {name: (folder / name).read_bytes() for name in ("curves.png", "report.html")}
    config = json.loads((folder / "config.json").read_text())
    config.pop("sha256")
    absent = [
        "runs/gem-seed0",
        *(f"runs/gem-seed{seed}" for seed in range(1, 107)),
        "../compare",
        "/",
    ]
    results.write_config(folder, config, absent[:-2], 108)
    assert main(["figures", str(folder)]) == 0 and main(["runs"]) == 0
    assert "  unfinished: 2 of 108 runs; " in capsys.readouterr().out
    page = (folder / "report.html").read_text()
    for place in (
        '"title": "compare: quadratic (',
        '"name": "summary.csv (',
        '"name": "comparison.csv (',
    ):
        assert f"{place}unfinished: 2 of 108 runs)" in page
    assert (folder / "curves.png").read_bytes() != finished["curves.png"]
    results.write_config(
        folder, config, [], 108, interrupted=True
    )  # more runs would have been chosen by these
    assert results.unfinished(folder) == "unfinished: 108 of more than 108 runs"
    results.write_config(folder, config, absent[-2:], 1)
    assert results.unfinished(folder) == "unfinished: 2 runs missing"
    results.write_config(folder, config, [], 108)
    assert results.unfinished(folder) == "" and main(["figures", str(folder)]) == 0
    assert {name: (folder / name).read_bytes() for name in finished} == finished


def test_runs_and_traces_are_plotted(there):
    opened = asyncsim.runs.open("compare")
    runs = list(opened.runs.values())
    figure = plots.compare(runs)
    (axes,) = figure.axes
    assert axes.get_xlabel() == "simulated time (s)" and axes.get_ylabel() == "training loss"
    assert len(axes.get_lines()) == 2
    assert isinstance(runs[0].plot(against="step"), matplotlib.figure.Figure)
    assert len(opened.traces["seed0"].plot().axes) == 2
    for wrong, told in (
        ({"labels": ["a"]}, "labels: 1"),
        ({"measure": "loss"}, "measure"),
        ({"against": "x"}, "aga"),
    ):
        with pytest.raises(InputError, match=told):
            plots.compare(runs, **wrong)


@pytest.mark.full
def test_several_processes_tag_at_once(there):
    """Nothing is lost."""
    wanted = [("tag", f"results/{name}", f"{name}-tag") for name in ("compare", "staleness")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    options = {"env": environment, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    started = [
        subprocess.Popen([sys.executable, "-m", "asyncsim", *one], **options) for one in wanted
    ]
    assert [process.wait() for process in started] == [0, 0]
    assert {tag.name for one in known.entries() for tag in one.tags} == {
        name for _, _, name in wanted
    }
