"""Finished studies that are found again: the index, tags, the commands, exported tables and
citations.
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
import numpy as np
import pandas as pd
import pytest
from test_study import ROOT, TOY, python

import asyncsim
from asyncsim import InputError, Run, plots, study
from asyncsim.__main__ import main
from asyncsim.base.console import safe_output
from asyncsim.drawing import look
from asyncsim.methods import METHODS
from asyncsim.runs import known
from asyncsim.runs.citations import SOFTWARE, bibtex, references
from asyncsim.runs.export import tidy
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


# The index and its tags


def test_a_folder_says_when_where_and_how_long(there):
    made = json.loads((there / "compare" / "made.json").read_text())
    assert made["cores"] == os.cpu_count() and made["wall_time"] > 0 and made["device"]
    assert pd.Timestamp(made["date"]).tzinfo is not None
    (entry,) = [one for one in known.entries() if one.study == "compare"]
    assert (entry.cluster, entry.methods) == ("2 workers", "downpour, gem")
    report = (there / "compare" / "report.txt").read_text().splitlines()
    assert entry.verdict[:90] == report[-1].removeprefix("verdict: ")[:90] != ""


def test_tags_are_found_from_any_folder(there, place, command, monkeypatch):
    def run(line: str, code=0) -> tuple[str, str]:
        ended, *texts = command(*line.split())
        assert ended == code, texts
        return texts

    command("tag", "results/compare", "base", "--note", "two of a kind")
    run("tag results/compare early --run gem-seed0 --commit 7")
    run(f"tag ../{Path.cwd().name}/results/compare again")
    assert [entry.study for entry in known.entries()].count("compare") == 1
    run("tag --remove again")
    (place / "elsewhere").mkdir()
    monkeypatch.chdir(place / "elsewhere")
    out, err = run("warp early")
    assert out == f"{there / 'compare'}\n" and "runs/gem-seed0, commit 7" in err
    assert "base, early" in run("runs bas")[0]
    opened = asyncsim.runs.open("early")
    assert list(opened.place.rows(2)["commit"]) == [5, 6, 7, 8, 9] and opened.place.commit == 7
    assert set(opened.runs) == {"downpour-seed0", "gem-seed0"} and len(opened.traces["seed0"]) == 80
    assert asyncsim.runs.open("base").note == "two of a kind"
    assert list(asyncsim.runs.table()["study"]) == ["staleness", "compare"]
    run("tag --remove early")
    assert not (there / "compare" / "tags" / "early.json").exists()
    run("warp early", code=2)
    assert "no tag" in run("tag --remove compare", code=2)[1]


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_the_function_of_a_shell_changes_to_the_folder_and_completes(there, place):
    known.tag(there / "compare", "base")
    program = place / "asyncsim"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m asyncsim "$@"\n')
    program.chmod(0o755)
    script = (
        'eval "$(asyncsim warp --shell bash)"; warp base && pwd; warp nowhere || pwd;'
        " COMP_WORDS=(asyncsim tag b); COMP_CWORD=2; _asyncsim; echo ${COMPREPLY[@]}"
    )
    path = f"{place}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT)}
    options = {"env": environment, "capture_output": True, "text": True}
    result = subprocess.run(["bash", "-c", script], cwd=place, **options)
    assert result.stdout.split() == [str(there / "compare")] * 2 + ["base"]


def test_folders_that_move_are_found_or_reported(there, place, command):
    known.tag(there / "compare", "moving")
    (there / "compare").rename(there / "renamed")
    assert known.find("moving").folder == there / "renamed"
    (place / "far").mkdir()
    (there / "renamed").rename(place / "far" / "away")
    with pytest.raises(InputError, match="no tag and no folder of results"):
        known.find("moving")
    assert command("runs", "--root", str(place / "far"))[0] == 0
    assert known.find("moving").folder == place / "far" / "away"
    shutil.rmtree(place / "far")
    code, _, err = command("runs")
    assert code == 0 and "is gone; was it moved?" in err
    code, out, _ = command("runs", "--forget")
    assert code == 0 and "forgot 1 folder" in out
    assert [entry.study for entry in known.entries()] == ["staleness"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("tag results/compare a/b", "name = 'a/b': must be of letters"),
        ("tag results/compare -x", "arguments"),
        ("tag nowhere x", "no tag and no folder"),
        ("tag --remove takne", "did you mean 'taken'"),
        ("tag results/compare x --run gem-sed0", "did you mean 'gem-seed0'"),
        ("tag results/compare x --run gem-seed0 --commit 80", "has 80 commits"),
        ("tag results/compare x --commit 3", "of which run"),
        ("tag results/staleness Taken", "is taken by"),
        ("warp", "give a name"),
        ("warp --shell csh", "invalid choice: 'csh'"),
        ("warp takne", "did you mean 'taken'"),
        ("runs --root nowhere", "is no folder"),
        ("wrap taken", "did you mean 'warp'"),
        ("staleness --workers 3", "'staleness': did you mean 'study staleness'? unknown; choose"),
        ("figurs x", "did you mean 'figures'?"),
        ("--version x", "takes no argument 'x'"),
        ("export results/compare", "following arguments are required: --csv; asyncsim export"),
        ("export nothing --csv", "no tag and no folder of results"),
        ("export results/compare --csv --out=results", "out = 'results': exists already; give"),
        ("export results --csv", "no results of a study (no config.json that names one)"),
        ("figures nothing", "'nothing': neither a folder of results nor a paper; choose from gem,"),
        ("figures gam", "'gam': neither a folder of results nor a paper; did you mean 'gem'? choo"),
        ("figures results/compare --results r", "results = 'r': of a paper only; leave it out"),
        ("figures results/compare --only x", "only = 'x': unknown; choose from curves"),
        ("figures results/compare --width 0.2", "width = 0.2: must be from 1 to 20 inches"),
        ("figures results/compare --width wide", "--width: invalid float value: 'wide'"),
        ("figures results", "folder = 'results': no results of a study (no config.json that na"),
        ("figures gem --results results --only 8a", "nothing could be drawn"),
        ("figures gem --only enrgy", "did you mean 'energy'?"),
        ("cite gme", "'gme': neither a method nor a folder of results; did you mean 'gem'?"),
        ("cite .", "folder = '.': holds no results with methods; give a folder of results"),
    ],
)
def test_bad_input(line, message, there, command):
    known.tag(there / "compare", "taken")
    before = sorted(there.rglob("*"))
    code, _, err = command(*line.split())
    lines = err.splitlines()
    assert code == 2 and lines[-1].startswith("error: ") and message in lines[-1], err
    assert sorted(there.rglob("*")) == before and list(Path().iterdir()) == [Path("results")]


def test_a_name_of_two_folders_is_refused(there, place, monkeypatch):
    """The folder below the working folder is preferred, also to one that is known by its name."""
    known.tag(there / "compare", "one")
    shutil.copytree(there / "compare", there / "copied")
    with pytest.raises(InputError, match="2 folders have it"):
        known.find("one")
    shutil.rmtree(there / "copied")
    shutil.copytree(there, place / "elsewhere" / "results")
    for root in (there, place / "elsewhere"):
        known.add_root(root)
    monkeypatch.chdir(place)
    with pytest.raises(InputError, match="2 folders have it"):
        known.find("compare")
    for folder in (there.parent, there):
        monkeypatch.chdir(folder)
        assert known.find("compare").folder == there / "compare"


def test_a_closed_pipe_ends_a_command_silently(there):
    reader, writer = os.pipe()
    os.close(reader)
    ended = python("-m", "asyncsim", "runs", stdout=writer)
    os.close(writer)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_a_terminal_of_ascii_gets_the_report(monkeypatch):
    terminal = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", terminal)
    with safe_output():
        print("1 \u00b1 2, n\u00b2, \u03bb")
    terminal.flush()
    assert terminal.buffer.getvalue() == b"1 +- 2, n^2, ?\n"


def test_the_runs_of_a_tuned_study_are_found(told, command):
    """They lie below a folder of their rate; the page moves those of each method's best."""
    tuned = (*TOY, "--steps=30", "--workers=4", "--tune", "0.01", "0.2", "--animate")
    assert told("compare", *tuned, "--methods", "downpour", "gem", "--out=first")[0] == 0
    opened, name = asyncsim.runs.open("first"), "learning_rate-0.2/gem-seed0"
    assert name in opened.runs and len(opened.traces) == 1
    assert command("tag", "first", "place", "--run", name, "--commit", "3")[0] == 0
    assert asyncsim.runs.open("place").place.rows(1)["commit"].tolist() == [2, 3, 4]
    page = Path("first", "report.html").read_text()
    titles = re.findall(r'"title": "((?:gem|downpour)[^"]*)"', page)
    assert titles and all("rate 0.2" in title for title in titles)


def test_an_unfinished_study_says_so_everywhere(there, command):
    """Also one that was killed, whose list still names the runs that are in its folder."""
    folder = there / "compare"

    def drawn() -> list[bytes]:
        assert command("figures", str(folder))[0] == 0
        names = ("curves.png", "curves.pdf", "report.html")
        return [(folder / name).read_bytes() for name in names]

    finished, config = drawn(), json.loads((folder / "config.json").read_text())
    config.pop("sha256")
    absent = ["runs/gem-seed0", *(f"runs/gem-seed{seed}" for seed in range(1, 107))]
    results.write_config(folder, config, absent, 108)
    curves, _, page = drawn()
    assert "  unfinished: 2 of 108 runs; " in command("runs")[1] and curves != finished[0]
    for part in ('"title": "compare: quadratic', '"name": "summary.csv', '"name": "comparison.csv'):
        assert f"{part} (unfinished: 2 of 108 runs)" in page.decode()
    for incomplete, runs, options, text in (
        # More runs would have been chosen by these.
        ([], 108, {"interrupted": True}, "unfinished: 108 of more than 108 runs"),
        (["../compare", "/"], 1, {}, "unfinished: 2 runs missing"),
        ([], 108, {}, ""),
    ):
        results.write_config(folder, config, incomplete, runs, **options)
        assert results.unfinished(folder) == text
    assert drawn() == finished
    assert not any(word in b"".join(finished[:2]) for word in (b"CreationDate", b"Software"))


# Plots


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


def test_runs_and_traces_are_plotted(there):
    opened = asyncsim.runs.open("compare")
    runs = list(opened.runs.values())
    figure = plots.compare(runs, width=5)
    (axes,) = figure.axes
    assert axes.get_xlabel() == "simulated time (s)" and axes.get_ylabel() == "training loss"
    assert len(axes.get_lines()) == 2 and figure.get_figwidth() == 5
    assert plots.compare(runs).get_figwidth() == look.SINGLE
    assert isinstance(runs[0].plot(against="step"), matplotlib.figure.Figure)
    assert len(opened.traces["seed0"].plot().axes) == 2
    for options, message in (
        ({"labels": ["a"]}, "labels: 1"),
        ({"measure": "loss"}, "measure"),
        ({"against": "x"}, "aga"),
        ({"width": 0.5}, "width = 0.5: must be from 1 to 20 inches"),
        ({"width": -1}, "width = -1: must be above zero"),
    ):
        with pytest.raises(InputError, match=message):
            plots.compare(runs, **options)


# Exported tables


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """Export a small study."""
    folder = tmp_path_factory.mktemp("study")
    methods = ("gem(kappa=[1, 2], momentum=0.5)", "downpour")
    options = (*TOY, "--workers=3", "--steps=4", "--seeds=2", "--out=mine")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr("asyncsim.drawing.look._rendered", lambda figure, kind: b".")
        assert study.main(["staleness", *options, "--methods", *methods]) == 0
        assert main(["export", "mine", "--csv", "--out=out"]) == 0
    return folder


def test_tables_are_the_runs(exported):
    summary, commits, evaluations = (
        pd.read_csv(exported / "out" / f"{name}.csv")
        for name in ("summary", "commits", "evaluations")
    )
    assert summary["run"].tolist() == list(range(6)) and "method_kappa" in summary
    original = pd.read_csv(exported / "mine" / "summary.csv")
    assert summary["trace_throughput"].tolist() == original["trace.throughput"].tolist()
    for number, row in original.iterrows():
        run = Run.load(exported / "mine" / row["run_folder"])
        rows = commits[commits["run"] == number]
        np.testing.assert_allclose(rows["loss"], run.commits["loss"], rtol=1e-6)
        assert set(rows["seed"]) == {row["seed"]}
        times = evaluations.loc[evaluations["run"] == number, "commit_time"]
        np.testing.assert_array_equal(times, run.evaluations["commit_time"])


def test_no_cell_needs_a_quote(exported):
    for path in (exported / "out").iterdir():
        lines = path.read_text().splitlines()
        assert '"' not in "".join(lines) and len({line.count(",") for line in lines}) == 1
        assert lines[0].replace(",", "").replace("_", "").isalnum()
    table = tidy(pd.DataFrame({"a.b c": ["x, 5%", None], "n": [1.5, np.nan], "b": [True, False]}))
    assert table.to_csv(index=False) == "a_b_c,n,b\nx; 5 per cent ,1.5,1\n,nan,0\n"


# Citations


@pytest.mark.parametrize("method", METHODS)
def test_each_method_has_the_papers_of_its_docstring(method):
    entries = references()[method]
    sources = " ".join(METHODS[method].__doc__.partition("References")[2].split())
    assert entries or "no paper" in METHODS[method].__doc__
    for key, entry in entries.items():
        assert entry.count("{") == entry.count("}")
        year = re.search(r"year = \{(\d{4})\}", entry)[1]
        author = re.search(r"author = \{\{?([^{}]*?)(?:,| and|\}|$)", entry)[1]
        assert key.startswith(re.sub(r"\W", "", author.lower()) + year) and author in sources
        assert re.search(r"title = \{\{.{5,}\}\}", entry) and year in sources
    numbers = set(re.findall(r"eprint = {(.*)}", "".join(entries.values())))
    assert numbers == set(re.findall(r"arXiv (\d{4}\.\d{4,5})", sources))


def test_the_entries_of_methods(command):
    code, out, _ = command("cite", "gem", "lgd", "gem")
    assert code == 0
    assert (
        out
        == f"""% gem: hermans2018gradient
% lgd: teng2019leader

{SOFTWARE}

@misc{{hermans2018gradient,
  title = {{{{Gradient energy matching for distributed asynchronous gradient descent}}}},
  author = {{Hermans, Joeri R. and Louppe, Gilles}},
  year = {{2018}},
  eprint = {{1805.08469}},
  archivePrefix = {{arXiv}},
}}

@inproceedings{{teng2019leader,
  title = {{{{Leader stochastic gradient descent for distributed training of deep learning \
models}}}},
  author = {{Teng, Yunfei and Gao, Wenbo and Chalus, Fran{{\\c{{c}}}}ois and Choromanska, Anna and \
Goldfarb, Donald and Weller, Adrian}},
  booktitle = {{Advances in Neural Information Processing Systems}},
  year = {{2019}},
  eprint = {{1905.10395}},
  archivePrefix = {{arXiv}},
}}
"""
    )


def test_the_entries_of_a_folder_of_results(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"methods": ["gem(kappa=2)", "mine\n@evil"]}))
    text = bibtex([str(tmp_path)])
    assert "hermans2018gradient,\n" in text and "% mine?@evil: no paper is known" in text
    assert bibtex([]) == SOFTWARE and f"version = {{{asyncsim.__version__}}}" in SOFTWARE
    assert SOFTWARE in (ROOT / "README.md").read_text()
