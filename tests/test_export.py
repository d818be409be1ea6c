"""Tables and figures for papers: tidy CSV files, and figures of another width, font and text."""

import numpy as np
import pandas as pd
import pytest

from asyncsim import InputError, Run, plots
from asyncsim.__main__ import main
from asyncsim.drawing import look
from asyncsim.runs.export import tidy

METHODS = ("gem(kappa=[1, 2], momentum=0.5)", "downpour")
COMMAND = (
    *("study", "staleness", "--problem=quadratic", "--workers=3", "--steps=4", "--seeds=2"),
    "--learning-rate=0.05",
)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Export a small study."""
    folder = tmp_path_factory.mktemp("study")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr("asyncsim.drawing.look._rendered", lambda figure, kind: b".")
        assert main([*COMMAND, "--methods", *METHODS, "--out=mine"]) == 0
        assert main(["export", "mine", "--csv", "--out=out"]) == 0
    return folder


def test_tables_are_the_runs(finished):
    out, summary = finished / "out", pd.read_csv(finished / "out" / "summary.csv")
    assert {"summary.csv", "commits.csv", "evaluations.csv"} <= {
        path.name for path in out.iterdir()
    }
    assert summary["run"].tolist() == list(range(6)) and "method_kappa" in summary
    original = pd.read_csv(finished / "mine" / "summary.csv")
    assert summary["trace_throughput"].tolist() == original["trace.throughput"].tolist()
    commits, evaluations = (pd.read_csv(out / f"{name}.csv") for name in ("commits", "evaluations"))
    for number, row in original.iterrows():
        run = Run.load(finished / "mine" / row["run_folder"])
        rows = commits[commits["run"] == number]
        assert rows["loss"].tolist() == pytest.approx(run.commits["loss"].tolist(), rel=1e-6)
        assert set(rows["seed"]) == {row["seed"]}
        times = evaluations.loc[evaluations["run"] == number, "commit_time"]
        assert times.tolist() == run.evaluations["commit_time"].tolist()


def test_no_cell_needs_a_quote(finished):
    for path in (finished / "out").iterdir():
        lines = path.read_text().splitlines()
        assert '"' not in "".join(lines) and len({line.count(",") for line in lines}) == 1
        assert lines[0].replace(",", "").replace("_", "").isalnum()
    table = tidy(pd.DataFrame({"a.b c": ["x, 5%", None], "n": [1.5, np.nan], "b": [True, False]}))
    assert table.to_csv(index=False) == "a_b_c,n,b\nx; 5 per cent ,1.5,1\n,nan,0\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["mine"], "the following arguments are required: --csv; asyncsim export --help"),
        (["nothing", "--csv"], "no tag and no folder of results"),
        (["mine", "--csv", "--out=out"], "out = 'out': exists already; give another, or remove it"),
        (["out", "--csv"], "no results of a study (no config.json that names one)"),
    ],
)
def test_bad_input_of_export(finished, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(finished)
    before = sorted(finished.rglob("*"))
    assert main(["export", *arguments]) == 2
    assert message in capsys.readouterr().err.replace("\nhint: ", "; ")
    assert sorted(finished.rglob("*")) == before


def test_width_of_a_figure(finished):
    summary = pd.read_csv(finished / "mine" / "summary.csv")
    runs = [Run.load(finished / "mine" / name) for name in summary["run_folder"]]
    assert plots.compare(runs, width=5).get_figwidth() == 5
    assert plots.compare(runs).get_figwidth() == look.SINGLE
    for width, message in (
        (0.5, "width = 0.5: must be from 1 to 20 inches"),
        (-1, "width = -1: must be above zero"),
    ):
        with pytest.raises(InputError, match=message):
            plots.compare(runs, width=width)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--width", "0.2"], "width = 0.2: must be from 1 to 20 inches"),
        (["--width", "wide"], "argument --width: invalid float value: 'wide'"),
        (["--only", "x"], "only = 'x': unknown; choose from curves"),
    ],
)
def test_bad_options_of_figures(finished, monkeypatch, quick_figures, capsys, options, message):
    monkeypatch.chdir(finished)
    assert main(["figures", "mine", *options]) == 2
    assert message in capsys.readouterr().err.replace("\nhint: ", "; ")
