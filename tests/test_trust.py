"""What a folder of results from somebody else can do: be read, and never run anything."""

import dataclasses
import itertools
import json
import os
import re
import shutil
import signal
import sys
from pathlib import Path

import pandas as pd
import pytest

import asyncsim
from asyncsim import InputError
from asyncsim.__main__ import main
from asyncsim.base.errors import printable
from asyncsim.base.files import folder_name, write_sealed
from asyncsim.study.config import StudyConfig
from asyncsim.study.finished import Finished
from asyncsim.study.jobs import measurement
from asyncsim.study.sweep import run_cells, sweep

pytestmark = pytest.mark.usefixtures("quick_figures")

TOY = (
    *("staleness", "--workers=2", "--steps=2", "--seeds=1", "--problem=quadratic"),
    "--learning-rate=0.05",
)


MINE = """
from pathlib import Path
from asyncsim.methods import Applied, Method, gradient_steps

Path("ran").touch()

def f(learning_rate=0.01):
    def apply(server, central, message, memory, visit):
        return Applied(central + message, server, memory)

    return Method(gradient_steps(learning_rate), "f", apply=apply)
"""


def strange(**config) -> None:
    """Write the folder of somebody else, with code in it that must not run."""
    for file in ("t/evil.py", "t/evil/__init__.py", "studies/evil.py"):
        Path(file).parent.mkdir(parents=True, exist_ok=True)
        Path(file).write_text(MINE)
    write_sealed(Path("t/config.json"), config)
    Path("t/summary.csv").write_text("method,seed,status\n")


@pytest.mark.parametrize("name", ["{}/t/evil", "../../../../../{}/t/evil", "evil", ["gem"]])
def test_drawing_imports_only_what_is_shipped(command, name):
    strange(study=name.format(Path.cwd()) if isinstance(name, str) else name)
    code, _, err = command("figures", "t")
    assert (code, err.count("\n")) == (2, 1) and err.startswith("error: folder = 't': ")
    assert not Path("ran").exists()


TYPED = "files are run only if you type them"
ANOTHER = "another configuration"


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("staleness", "--methods t/evil.py:f", "names 't/evil.py:f', and files are run only if"),
        ("staleness", "--methods gem t/../t/evil.py:f", TYPED),
        ("staleness", "--problem=t/evil.py:f", "give that option again"),
        ("staleness", "--methods studies/evil.py:f", TYPED),
        ("staleness", "--attack=t/evil.py:f(workers=1)", TYPED),
        ("staleness", "--methods=robust(rule='\\x74/evil.py:f')", TYPED),
        ("gossip", "--topology=t/evil.py:f", TYPED),
        ("robustness", "--rules=t/evil.py:f(f=f)", TYPED),
        ("real", "--methods=t/evil.py:f", TYPED),
        ("staleness", "--executor ray --address evil:1", ANOTHER),
        ("staleness", "--address=evil:1 -h", ANOTHER),
        ("staleness", "--tyro-write-completion bash t/x", ANOTHER),
        ("staleness", "-- --out=t/more", ANOTHER),
    ],
)
def test_resuming_runs_nothing_that_only_the_folder_names(command, name, options, message):
    usual = TOY[1:] if name == "staleness" else ()
    strange(study=name, command=[*usual, *options.split()])
    code, _, err = command("study", name, "--resume", "t")
    assert code == 2 and message in err.splitlines()[-1], err
    assert not Path("ran").exists() and not Path("t/x").exists()


@pytest.mark.parametrize("file", ["t/evil.py", "link.py", "t/../t/evil.py", "t/link.py"])
def test_no_file_in_results_is_run(command, file):
    """Also if it is typed; ``t/link.py`` leads out of the results."""
    strange(study="staleness", command=TOY[1:])
    Path("link.py").symlink_to("t/evil.py")
    Path("mine.py").write_text(MINE)
    Path("t/link.py").symlink_to("../mine.py")
    path = list(sys.path)
    for option in ("--resume=t", "--out=o"):
        code, _, err = command("study", *TOY, option, f"--methods={file}:f(0.1)")
        assert code == 2 and f"{file} lies in the results" in err and sys.path == path
    assert not Path("ran").exists()


STUDY = """
from asyncsim.study.config import StudyConfig as Config
from asyncsim.study.sweep import run_cells, sweep

def run(config):
    return run_cells("own", config, sweep(config, [{}]), lambda folder, summary: None)
"""


@pytest.mark.parametrize(
    ("name", "file", "text", "methods"),
    [
        ("staleness", "mine.py", MINE, "--methods=mine.py:f"),
        ("own", "studies/own.py", STUDY, "--methods=downpour"),
    ],
)
def test_a_users_file_runs_again_as_it_was(command, name, file, text, methods):
    """A method's file where it is typed; another comment counts, too."""
    Path("studies").mkdir()
    Path(file).write_text(text)
    assert command("study", name, *TOY[1:], methods, "--out=t")[0] == 0
    assert list(json.loads(Path("t/config.json").read_text())["files"]) == [file]
    resume = ("study", name, "--resume=t")
    assert command(*resume, methods)[0] == 0
    code, _, err = command(*resume)
    assert code == 0 if name == "own" else TYPED in err
    Path(file).write_text(text + "# more\n")
    code, _, err = command(*resume, methods)
    assert code == 2 and f"another configuration (files.{file} = '" in err


# Names of folders and files


@pytest.mark.parametrize(
    "text",
    ["byzantine-1_alie()#/../../victim_", "..", "/etc", "a\nb", "$(rm)", "a" * 5000, "é" * 200],
)
def test_names_of_folders_lead_nowhere(text):
    safe = folder_name(text)
    assert re.fullmatch(r"(?!\.)[^/\\$\n]+-[0-9a-f]{8}", safe) and folder_name(safe) == safe
    assert len(safe.encode()) <= 200 and folder_name(f"{text}.") != safe
    place = measurement(text, dict).place
    assert place == f"parts/{safe}.json" and place != measurement(f"{text}.", dict).place


@pytest.mark.parametrize(
    "name",
    [
        "workers-10_policy-bounded_staleness(3)",
        "failures-('crash(every=exponential(3600), lasts=exponential(120))',)",
        "compute-[gamma(mean=1, cv=0.2)]*4 + [constant(2)]",
        'krum(f=1, score="alie")-seed0',
    ],
)
def test_names_of_ordinary_folders_stay(name):
    assert folder_name(name) == name


def test_a_cell_called_as_a_path_writes_inside_and_removes_nothing():
    options = {"workers": 2, "steps": 2, "seeds": 1, "problem": "quadratic"}
    (cell,) = sweep(StudyConfig(methods=("downpour",), **options), [{}])
    cell = cell._replace(name="alie()#/../../../victim")
    for name in ("victim/downpour-seed0/run.json", "victim/seed0.parquet"):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text("mine")
    before = state(Path("victim"))
    for where in ({"out": Path("s")}, {"resume": Path("s")}):
        config = dataclasses.replace(cell.config, **where)
        run_cells("toy", config, [cell], lambda folder, summary: None)
    assert sorted(map(str, Path().iterdir())) == ["s", "victim"]
    assert state(Path("victim")) == before
    for files in ("runs/*/*/run.json", "traces/*/*.parquet"):
        assert len(list(Path("s").glob(files))) == 1


@pytest.mark.parametrize("kind", ["run", "trace", "table"])
@pytest.mark.parametrize("name", ["../other/runs/downpour-seed0", "/dev/stdin"])
def test_a_summary_names_files_inside_only(kind, name):
    finished = Finished(Path(), {"study": "staleness"}, None)
    with pytest.raises(InputError, match="which is not inside; mistrust it"):
        getattr(finished, kind)(name)


# Links and damaged files


@pytest.fixture(scope="module")
def results_with_a_tag(tmp_path_factory):
    """A finished study with a tag: all files that the project writes into a folder."""
    base = tmp_path_factory.mktemp("made")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(base)
        assert main(["study", *TOY, "--methods", "downpour", "sgd", "--out=s"]) == 0
        assert main(["tag", "s", "good"]) == 0
    return base


@pytest.fixture
def folder(results_with_a_tag):
    """A copy of the study in the working folder."""
    return shutil.copytree(results_with_a_tag / "s", Path("results/s"), copy_function=shutil.copy)


#: A few places of a folder of results, one of each sort.
PLACES = ["config.json", "runs/sgd-seed0", "tags", "report.html", "aside", ".curves.partial.pdf"]


def places(folder: Path) -> list[str]:
    """All files and folders in a folder of results, and the names of partial files."""
    below = sorted(path.relative_to(folder) for path in folder.rglob("*"))
    partials = [path.with_name(f".{path.stem}.partial{path.suffix}") for path in below]
    return [*map(str, below + partials), "aside", "tags/new.json"]


def put(kind: str, place: Path, victim: Path) -> None:
    """Put at a place a link to its content outside, whole or so damaged that a resumed study would
    replace it, to nothing, or to a folder with names of the project; or a FIFO, whose reader waits
    for ever.
    """
    if kind in ("whole", "damaged") and place.exists():
        place.rename(victim)
    elif kind in ("whole", "damaged"):
        victim.write_text("mine")
    elif place.exists():
        shutil.rmtree(place) if place.is_dir() else place.unlink()
    if kind == "fifo":
        os.mkfifo(place)
        return
    place.symlink_to(victim)
    if kind == "damaged":
        for path in [*victim.rglob("*"), victim]:
            if path.is_file() and path.name != "config.json":
                path.write_bytes(path.read_bytes()[:-9] + b"x")
    if kind == "folder":
        names = "sgd-seed0/run.json run.json seed0.parquet good.json commits.parquet runs/sgd-seed0"
        for name in names.split():
            (victim / name).parent.mkdir(parents=True, exist_ok=True)
            (victim / name).write_text("{}")


def state(folder: Path) -> dict[str, object]:
    """The bytes, the identities and the times of change of all files in a folder."""
    files = {path: os.lstat(path) for path in sorted(folder.rglob("*"))}
    return {
        str(path): (entry.st_ino, entry.st_mtime_ns, path.is_file() and path.read_bytes())
        for path, entry in files.items()
    }


@pytest.mark.skipif(sys.platform == "win32", reason="links and FIFOs of POSIX")
@pytest.mark.parametrize("everywhere", [False, pytest.param(True, marks=pytest.mark.full)])
def test_no_link_in_a_folder_of_results_is_followed(
    results_with_a_tag, tmp_path, monkeypatch, command, everywhere
):
    """In each place of a folder a link, or a FIFO: whatever is done with the folder, no target
    changes, and no link to a folder, which would be followed.

    A waiting command ends after a minute.
    """
    monkeypatch.setattr("webbrowser.open", lambda address: True)
    commands = (
        "study staleness --resume=s",
        "figures s",
        "tag s new",
        "tag --remove good",
        "tag --remove new",
        "show s",
        "runs",
    )
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    every = places(results_with_a_tag / "s")
    assert set(PLACES) <= set(every)
    kinds = ("whole", "damaged", "absent", "folder", "fifo") if everywhere else ("damaged", "fifo")
    names = every[::4] if everywhere else PLACES
    for number, (name, kind) in enumerate(zip(names, itertools.cycle(kinds), strict=False)):
        here = tmp_path / str(number)
        shutil.copytree(results_with_a_tag / "s", here / "s", copy_function=shutil.copy)
        (here / "victims").mkdir()
        monkeypatch.chdir(here)
        if name == "aside":  # to which a damaged run is moved
            Path("s/runs/sgd-seed0/params.npz").unlink()
        place = here / "s" / name
        put(kind, place, here / "victims" / place.name)
        before = state(here / "victims")
        for line in commands:
            signal.alarm(60)
            code, _, err = command(*line.split())
            signal.alarm(0)
            assert code in (0, 2) and "Traceback" not in err, (name, line, err)
            assert state(here / "victims") == before, (name, line)
            leads = place.is_symlink() and place.is_dir()
            assert not leads or code == 2 or line.split()[0] in ("tag", "runs"), (name, line)
        shutil.rmtree(here)


RUN = "runs/sgd-seed0/commits.parquet"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("summary.csv", None, "asyncsim study staleness"),
        ("summary.csv", "method,seed\n", "summary.csv"),
        ("summary.csv", "method,trace_file,run_folder\n", "no run was finished"),
        ("summary.csv", "junk\n", "summary.csv"),
        ("config.json", None, "config.json"),
        ("traces/seed0.parquet", None, "seed0.parquet"),
        (RUN, None, "commits.parquet"),
        (RUN, "junk", "commits.parquet"),
    ],
)
def test_damaged_results_end_in_one_line(folder, command, name, content, message):
    (folder / name).unlink()
    if content is not None:
        (folder / name).write_text(content)
    code, _, err = command("figures", "results/s")
    assert (code, err.count("\n")) == (2, 1), err
    assert err.startswith("error: ") and message in err


def test_a_link_is_named_and_not_called_damage(folder, command):
    (folder / "summary.csv").rename("summary.csv")
    (folder / "summary.csv").symlink_to(Path("summary.csv").absolute())
    code, _, err = command("figures", "results/s")
    assert code == 2 and "summary.csv': is a link" in err and "damaged" not in err


def test_a_table_too_large_for_the_page_is_left_out(folder, command):
    summary = folder / "summary.csv"
    pd.read_csv(summary).assign(note="x" * 200_000).to_csv(summary, index=False)
    assert command("figures", "results/s")[0] == 0


@pytest.mark.parametrize("name", ["staleness", "of my own"])
def test_a_page_in_a_folder_is_never_opened(name, folder, command, tmp_path, monkeypatch):
    pages = []
    monkeypatch.setattr("webbrowser.open", lambda address: pages.append(address) or True)

    def opened(*arguments) -> Path:
        assert command(*arguments)[0] == 0
        return Path(pages[-1].removeprefix("file://"))

    (folder / "report.html").write_text("<script>window.evil = 1</script>")
    config = json.loads((folder / "config.json").read_text()) | {"study": name}
    (folder / "config.json").write_text(json.dumps(config))
    before = state(Path("results"))
    page = opened("show", "results/s")
    assert page == opened("warp", "s", "--open") and not page.is_relative_to(tmp_path)
    assert "evil" not in page.read_text() and "downpour" in page.read_text()
    assert state(Path("results")) == before
    (folder / "report.html").unlink()
    os.mkfifo(folder / "report.html")
    assert "<a " not in opened("show").read_text()


# The terminal


def test_no_text_of_a_stranger_controls_the_terminal(folder, command):
    config = json.loads((folder / "config.json").read_text())
    strange = {"\x1b]0;title\x07": 1, "\u202ename": 2}
    for study, arguments in (
        ("\x1b[2Jcompare", ("figures", "results/s")),
        ("staleness", ("study", *TOY, "--resume", "results/s")),
    ):
        write_sealed(folder / "config.json", config | strange | {"study": study})
        code, out, err = command(*arguments)
        assert code == 2 and err and (out + err).replace("\n", "").isprintable()
    assert str(InputError("\x1b[31mred\n\u202e\udc80")) == "?[31mred\n??"
    assert printable("seed\u00a00\x1b") == "seed\u00a00?"  # as titles have it


def test_hostile_folders_are_read_and_shown_without_harm(command):
    tag = json.dumps({"note": 10**400, "run": 3, "commit": "x", "date": None})
    texts = ["{", "[" * 100_000, "7", '{"study": 7}', '{"study": "\\u001b[31mred\\n<b>"}']
    origins = ['{"date": 3, "id": [1]}'] * 2 + ["{"] * 2 + ['{"date": "\\ud800", "id": "\\ud800"}']
    for number, (text, origin) in enumerate(zip(texts, origins, strict=True)):
        files = {"config.json": text, "made.json": origin, "tags/t.json": tag}
        for name, content in {**files, "tags/$(rm).json": "{}"}.items():
            path = Path("results", str(number), name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content)
        Path("results", str(number), "summary.csv").write_bytes(b'\xff\x00"\n' * 9)
    odd = Path("results/\x1b[31mred\udcff")
    odd.mkdir()
    (odd / "config.json").write_text('{"study": "odd"}')
    code, out, _ = command("runs")
    assert code == 0 and "\x1b" not in out
    assert out.count("results/") == 5 and "?[31mred" in out
    with pytest.raises(InputError):
        asyncsim.runs.open("t")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["study", *TOY, "--window", "1000000000"],
            "window = 1000000000: must be at most 100,000; give fewer",
        ),
        (
            ["study", *TOY, "--problem", "characters(text='/dev/zero')"],
            "text = '/dev/zero': not a file",
        ),
        (
            ["study", *TOY, "--out", "a\udcff"],
            "--out: path = 'a\\udcff': its name is not UTF-8; give another",
        ),
        (["study", *TOY, "--out", "x" * 3_000], "xxx...': has 3000 bytes, at most 2000; give less"),
        (["study", *TOY, "--out", "x" * 300], "': cannot be written: File name too long"),
        (["study", *TOY, "--compute", f"gama({'x' * 9_000})"], "did you mean 'gamma(mean, cv)'?"),
        (
            ["study", *TOY, "--compute", f"gamma({','.join('1' * 9_000)})"],
            "9000 parameters given; write gamma(mean, cv)",
        ),
        (["study", *TOY, "--compute", f"[1]*{'9' * 4_000}"], "more than 1000000 entries"),
        (["study", *TOY, "--methods", "x" * 9_000], "unknown; choose from adag"),
        (["study", "staleness", "--resume", "deep"], "nested too deeply"),
        (["figures", "deep"], "its config.json is there but damaged"),
        *(
            ([name, "x" * 5_000, *options], "xxx...': n")  # neither ..., or no ...
            for name, options in (
                ("figures", ()),
                ("cite", ()),
                ("export", ("--csv",)),
                ("tag", ("a",)),
            )
        ),
    ],
)
def test_each_mistake_is_one_line(command, arguments, message):
    Path("deep").mkdir()
    Path("deep/config.json").write_text("[" * 100_000 + "]" * 100_000)
    code, _, err = command(*arguments)
    assert (code, err.count("\n")) == (2, 1), err[:300]
    assert err.startswith("error: ") and message in err and len(err) < 1_500
    assert [path.name for path in Path().iterdir()] == ["deep"]


@pytest.mark.parametrize(("kind", "expected"), [("'Unknown'", 2), ("list[float]", 0)])
def test_a_field_that_cannot_be_an_option(command, kind, expected):
    Path("studies").mkdir()
    text = f"import dataclasses\n@dataclasses.dataclass\nclass Config:\n    a: {kind} = (1.0,)\n"
    Path("studies/own.py").write_text(text + "def run(config):\n    assert config.a is not None\n")
    code, _, err = command("study", "own")
    assert "Traceback" not in err and (code, err.count("\n")) == (expected, expected // 2), err
    assert not expected or "study = 'own': its Config cannot be made into options" in err
