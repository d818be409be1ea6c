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

import pytest

from asyncsim import InputError
from asyncsim.__main__ import main
from asyncsim.base.files import folder_name, write_sealed
from asyncsim.study.config import StudyConfig
from asyncsim.study.finished import Finished
from asyncsim.study.jobs import measurement
from asyncsim.study.sweep import run_cells, sweep

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


pytestmark = pytest.mark.usefixtures("quick_figures")


@pytest.fixture
def told(capsys):
    def run(*arguments: str) -> tuple[int, str]:
        try:
            code = main(arguments)
        except SystemExit as end:
            code = end.code
        return code, capsys.readouterr().err.replace("\nhint: ", "; ")

    return run


def strange(**config) -> None:
    """Write the folder of somebody else, with code in it that must not run."""
    for file in ("t/evil.py", "t/evil/__init__.py", "studies/evil.py"):
        Path(file).parent.mkdir(parents=True, exist_ok=True)
        Path(file).write_text(MINE)
    write_sealed(Path("t/config.json"), config)
    Path("t/summary.csv").write_text("method,seed,status\n")


@pytest.mark.parametrize("name", ["{}/t/evil", "../../../../../{}/t/evil", "evil", ["gem"]])
def test_drawing_imports_only_what_is_shipped(told, name):
    study_name = name.format(Path.cwd()) if isinstance(name, str) else name
    strange(study=study_name)
    code, err = told("figures", "t")
    assert (code, err.count("\n")) == (2, 1) and err.startswith("error: folder = 't': ")
    assert not Path("ran").exists()


TYPED = "files are run only if you type them"
ANOTHER = "another configuration"


@pytest.mark.parametrize(
    ("name", "command", "said"),
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
def test_going_on_runs_nothing_that_only_the_folder_names(told, name, command, said):
    strange(study=name, command=[*TOY[1:], *command.split()] if name == "staleness" else [command])
    code, err = told("study", name, "--resume", "t")
    assert code == 2 and said in err.splitlines()[-1], err
    assert not Path("ran").exists() and not Path("t/x").exists()


@pytest.mark.parametrize("file", ["t/evil.py", "link.py", "t/../t/evil.py", "t/link.py"])
def test_no_file_in_results_is_run(told, file):
    """Also if it is typed; ``t/link.py`` leads out of the results."""
    strange(study="staleness", command=TOY[1:])
    Path("link.py").symlink_to("t/evil.py")
    Path("mine.py").write_text(MINE)
    Path("t/link.py").symlink_to("../mine.py")
    path = list(sys.path)
    for option in ("--resume=t", "--out=o"):
        code, err = told("study", "staleness", *TOY[1:], option, f"--methods={file}:f(0.1)")
        assert code == 2 and f"{file} lies in the results" in err and sys.path == path
    assert not Path("ran").exists()


def test_an_own_file_runs_again_as_it_was_where_it_is_typed(told):
    Path("mine.py").write_text(MINE)
    assert told("study", *TOY, "--methods=mine.py:f", "--out=t")[0] == 0
    config = json.loads(Path("t/config.json").read_text())
    assert list(config["files"]) == ["mine.py"]
    resume = ("study", "staleness", "--resume=t", "--methods=mine.py:f")
    assert told(*resume)[0] == 0
    code, err = told(*resume[:-1])
    assert code == 2 and "files are run only if you type them; give that option again" in err
    Path("mine.py").write_text(MINE + "# more\n")  # another comment counts, too
    code, err = told(*resume)
    assert code == 2 and "another configuration (files.mine.py = '" in err


def test_an_own_study_that_has_changed_is_refused(told):
    strange()
    text = (
        "from asyncsim.study.config import StudyConfig as Config\nfrom asyncsim.study.sweep import "
        "run_cells, sweep\n"
    )
    text += (
        "def run(config):\n    return run_cells('own', config, sweep(config, [{}]), lambda folder, "
        "summary: None)\n"
    )
    Path("studies/own.py").write_text(text)
    assert told("study", "own", *TOY[1:], "--methods=downpour", "--out=o")[0] == 0
    assert json.loads(Path("o/config.json").read_text())["files"].keys() == {"studies/own.py"}
    Path("studies/own.py").write_text(text + "# more\n")
    code, err = told("study", "own", "--resume=o")
    assert code == 2 and "another configuration (files.studies/own.py = '" in err


# Links


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
    (cell,) = sweep(
        StudyConfig(workers=2, steps=2, seeds=1, problem="quadratic", methods=("downpour",)), [{}]
    )
    cell = cell._replace(name="alie()#/../../../victim")
    Path("victim/downpour-seed0").mkdir(parents=True)
    Path("victim/downpour-seed0/run.json").write_text("mine")
    Path("victim/seed0.parquet").write_text("mine")
    before = state(Path("victim"))
    for where in ({"out": Path("s")}, {"resume": Path("s")}):
        run_cells(
            "toy", dataclasses.replace(cell.config, **where), [cell], lambda folder, summary: None
        )
    assert (
        sorted(path.name for path in Path().iterdir()) == ["s", "victim"]
        and state(Path("victim")) == before
    )
    assert (
        len(list(Path("s").glob("runs/*/*/run.json")))
        == len(list(Path("s").glob("traces/*/*.parquet")))
        == 1
    )


@pytest.mark.parametrize("kind", ["run", "trace", "table"])
@pytest.mark.parametrize("name", ["../other/runs/downpour-seed0", "/dev/stdin"])
def test_a_summary_names_files_inside_only(kind, name):
    finished = Finished(Path(), {"study": "staleness"}, None)
    with pytest.raises(InputError, match="which is not inside; mistrust it"):
        getattr(finished, kind)(name)


OPTIONS = (*TOY, "--methods", "downpour", "sgd")


@pytest.fixture(scope="module")
def results_with_a_tag(tmp_path_factory):
    """A finished study with a tag: all files that the project writes into a folder."""
    base = tmp_path_factory.mktemp("made")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(base)
        assert main(["study", *OPTIONS, "--out=s"]) == 0
        assert main(["tag", "s", "good"]) == 0
    return base


def places(folder: Path) -> list[str]:
    """All files and folders in a folder of results, those made on the way, and their former names
    on the way.
    """
    below = sorted(path.relative_to(folder) for path in folder.rglob("*"))
    assert {
        "config.json",
        "runs/sgd-seed0/run.json",
        "traces",
        "tags/good.json",
        "curves.pdf",
        "report.html",
    } <= {str(path) for path in below}
    partials = [path.with_name(f".{path.stem}.partial{path.suffix}") for path in below]
    return [
        str(path)
        for path in (
            *below,
            *partials,
            Path("aside"),
            Path("tags/new.json"),
        )
    ]


def whole(place: Path, victim: Path) -> None:
    """Move what is at a place outside, and link to it."""
    if place.exists():
        place.rename(victim)
    else:
        victim.write_text("mine")
    place.symlink_to(victim)


def damaged(place: Path, victim: Path) -> None:
    """Link to something outside that is damaged, so that a resumed study would replace it."""
    whole(place, victim)
    for path in [*victim.rglob("*"), victim]:
        if path.is_file() and path.name != "config.json":
            path.write_bytes(path.read_bytes()[:-9] + b"x")


def absent(place: Path, victim: Path) -> None:
    """Link to nothing."""
    shutil.rmtree(place) if place.is_dir() else place.unlink(missing_ok=True)
    place.symlink_to(victim)


def a_folder(place: Path, victim: Path) -> None:
    """Link to a folder with files of the names that the project uses."""
    absent(place, victim)
    for name in (
        "sgd-seed0/run.json",
        "run.json",
        "seed0.parquet",
        "good.json",
        "commits.parquet",
        "runs/sgd-seed0",
    ):
        (victim / name).parent.mkdir(parents=True, exist_ok=True)
        (victim / name).write_text("{}")


def fifo(place: Path, victim: Path) -> None:
    """Put a FIFO at the place: whoever opens it waits for ever."""
    shutil.rmtree(place) if place.is_dir() else place.unlink(missing_ok=True)
    os.mkfifo(place)


def state(folder: Path) -> dict[str, object]:
    """The bytes, the identities and the times of change of all files in a folder."""
    files = {path: os.lstat(path) for path in sorted(folder.rglob("*"))}
    return {
        str(path): (found.st_ino, found.st_mtime_ns, path.is_file() and path.read_bytes())
        for path, found in files.items()
    }


@pytest.mark.skipif(sys.platform == "win32", reason="links and FIFOs of POSIX")
@pytest.mark.parametrize("everywhere", [False, pytest.param(True, marks=pytest.mark.full)])
def test_no_link_in_a_folder_of_results_is_followed(
    results_with_a_tag, tmp_path, monkeypatch, told, everywhere
):
    """In each place of a folder a link, or a FIFO: whatever is done with the folder, no target
    changes, and no link to a folder, which would be followed.

    A waiting command ends after a minute.
    """
    monkeypatch.setattr("webbrowser.open", lambda address: True)
    commands = [
        ("study", "staleness", "--resume=s"),
        ("figures", "s"),
        ("tag", "s", "new"),
        ("tag", "--remove", "good"),
        ("tag", "--remove", "new"),
        ("show", "s"),
        ("runs",),
    ]
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    names = places(results_with_a_tag / "s")[::4]
    if not everywhere:
        few = ["config.json", "runs/sgd-seed0", "tags", "report.html", "aside"]
        few += [".curves.partial.pdf"]
        assert set(few) <= set(places(results_with_a_tag / "s"))
        names = few
    kinds_of_links = (whole, damaged, absent, a_folder, fifo) if everywhere else (damaged, fifo)
    for number, (name, put) in enumerate(zip(names, itertools.cycle(kinds_of_links), strict=False)):
        here = tmp_path / str(number)
        shutil.copytree(results_with_a_tag / "s", here / "s", copy_function=shutil.copy)
        (here / "victims").mkdir()
        monkeypatch.chdir(here)
        if name == "aside":  # to which a damaged run is moved
            Path("s/runs/sgd-seed0/params.npz").unlink()
        place = here / "s" / name
        put(place, here / "victims" / place.name)
        before = state(here / "victims")
        for command in commands:
            signal.alarm(60)
            code, err = told(*command)
            signal.alarm(0)
            assert code in (0, 2) and "Traceback" not in err, (name, command, err)
            assert state(here / "victims") == before, (name, command)
            leads = place.is_symlink() and place.is_dir()
            assert not leads or code == 2 or command[0] in ("tag", "runs"), (name, command)
        shutil.rmtree(here)


# The terminal


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["staleness", "--workers", "3"],
            "'staleness': did you mean 'study staleness'? unknown; choose",
        ),
        (["figurs", "x"], "did you mean 'figures'?"),
        (["--version", "x"], "takes no argument 'x'"),
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
            ([command, "x" * 5_000, *name], "xxx...': n")  # neither ..., or no ...
            for command, name in (
                ("figures", ()),
                ("cite", ()),
                ("export", ("--csv",)),
                ("tag", ("a",)),
            )
        ),
    ],
)
def test_each_mistake_is_one_line(told, arguments, message):
    Path("deep").mkdir()
    Path("deep/config.json").write_text("[" * 100_000 + "]" * 100_000)
    code, err = told(*arguments)
    assert (code, err.count("\n")) == (2, 1), err[:300]
    assert err.startswith("error: ") and message in err and len(err) < 1_500
    assert [path.name for path in Path().iterdir()] == ["deep"]


@pytest.mark.parametrize(("kind", "expected"), [("'Unknown'", 2), ("list[float]", 0)])
def test_a_field_that_cannot_be_an_option(told, kind, expected):
    Path("studies").mkdir()
    text = f"import dataclasses\n@dataclasses.dataclass\nclass Config:\n    a: {kind} = (1.0,)\n"
    Path("studies/own.py").write_text(text + "def run(config):\n    assert config.a is not None\n")
    code, err = told("study", "own")
    assert "Traceback" not in err and (code, err.count("\n")) == (expected, expected // 2), err
    assert not expected or "study = 'own': its Config cannot be made into options" in err
