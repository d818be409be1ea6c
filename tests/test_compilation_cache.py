"""The cache of compiled programs: the second start of a study does not compile again."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
STUDY = [
    "staleness",
    "--workers",
    "2",
    "--steps",
    "4",
    "--seeds",
    "1",
    "--problem",
    "quadratic",
    "--methods",
    "gem",
    "--learning-rate",
    "0.05",
]


@pytest.fixture
def start(tmp_path):
    """Start the study in an empty folder as a process with a home of its own; return its compiled
    programs.
    """

    def run(out: str, *options: str) -> set[str]:
        home = {
            "XDG_CACHE_HOME": str(tmp_path / "cache"),
            "PYTHONPATH": str(ROOT),
            "MPLBACKEND": "agg",
        }
        inherited = {
            name: value for name, value in os.environ.items() if not name.startswith("JAX_")
        }
        command = [sys.executable, "-m", "asyncsim.study", *STUDY, "--out", out, *options]
        ended = subprocess.run(
            command, cwd=tmp_path, env=inherited | home, capture_output=True, text=True, check=False
        )
        assert ended.returncode == 0, ended.stderr
        return {path.name for path in (tmp_path / "cache").rglob("*-cache")}

    return run


@pytest.mark.full
def test_the_second_start_compiles_nothing_and_gives_the_same(start, tmp_path):
    compiled = start("first")
    assert any("advance" in name for name in compiled)
    assert start("second") == compiled
    for name in ("summary.csv", "runs/gem-seed0/commits.parquet"):
        assert (tmp_path / "first" / name).read_bytes() == (tmp_path / "second" / name).read_bytes()


@pytest.mark.full
def test_turned_off(start):
    assert start("off", "--no-compilation-cache") == set()
