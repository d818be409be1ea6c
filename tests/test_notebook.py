"""The notebook: saved without outputs, of the format that it says, and its cells run from top to
bottom.
"""

import json
import os
import re
import subprocess
import sys

import pytest

from asyncsim import study

NOTEBOOK = study.shipped("studies") / "energy_curves.ipynb"
ROOT = study.shipped("studies").parent
#: What makes the notebook small enough for a test.
SMALL = {"WORKERS": 4, "STEPS": 12}


def cells(kind: str) -> list[dict]:
    return [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == kind]


def test_it_is_saved_without_outputs():
    assert len(cells("code")) > 5
    assert [
        cell["id"]
        for cell in cells("code")
        if cell["outputs"] or cell["execution_count"] is not None
    ] == []


def test_it_is_valid():
    nbformat = pytest.importorskip("nbformat")
    nbformat.validate(nbformat.read(NOTEBOOK, as_version=4))


@pytest.mark.full
def test_its_cells_run(tmp_path):
    source = "\n".join("".join(cell["source"]) + "\n" for cell in cells("code"))
    for name, value in SMALL.items():
        source, count = re.subn(rf"^{name} = \d+", f"{name} = {value}", source, flags=re.MULTILINE)
        assert count == 1
    (tmp_path / "cells.py").write_text(source)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "MPLBACKEND": "agg"}
    options = {"capture_output": True, "text": True, "cwd": tmp_path, "env": environment}
    ended = subprocess.run([sys.executable, "-W", "error:::__main__", "cells.py"], **options)
    assert ended.returncode == 0, ended.stderr
    assert re.findall(r"^(GEM|DOWNPOUR|exact root) .* finished$", ended.stdout, re.MULTILINE) == [
        "GEM",
        "DOWNPOUR",
        "exact root",
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["cells.py"]
