"""Runs on disk: all of one or none, and the same back."""

import json
import math
import os
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest

from asyncsim import (
    Cluster,
    Gamma,
    InputError,
    Run,
    methods,
    prescribed,
    problems,
    replay,
    simulate,
)
from asyncsim.base.files import write_sealed
from asyncsim.replays.run import FORMAT

FILES = ["commits.parquet", "diagnostics.parquet", "evaluations.parquet", "params.npz", "run.json"]


def make_run(params=None, diverged_at=None, rows=3):
    commits = pd.DataFrame(
        {"commit": range(rows), "loss": np.linspace(1, 0.1, rows, dtype=np.float32)}
    )
    return Run(
        commits=commits,
        evaluations=pd.DataFrame({"commit": [0, rows], "train_loss": [1.0, math.pi]}),
        diagnostics=pd.DataFrame(columns=["commit", "quantity", "tensor", "quantile", "value"]),
        params=np.ones(3) if params is None else params,
        diverged_at=diverged_at,
        config={"method": "gem", "hyperparameters": {"kappa": 1.0, "pi_max": None}, "seed": 3},
    )


def same(a, b):
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return isinstance(b, np.ndarray) and a.dtype == b.dtype and np.array_equal(a, b, equal_nan=True)


TREES = {
    "array": np.arange(4.0),
    "scalar": np.float32(2),
    "float32": np.array([1, np.nan, np.inf], np.float32),
    "layers": [
        {"weight": np.ones((2, 3)), "bias": np.zeros(3)},
        {"weight": np.ones((3, 1)), "bias": np.zeros(1)},
    ],
    "nested": {"b": (np.ones(()), [np.zeros((0, 2))]), "a": {"c": np.arange(3, dtype=np.int32)}},
    "empty": {},
}


@pytest.mark.parametrize("name", TREES)
def test_what_is_saved_comes_back(tmp_path, name):
    run = make_run(TREES[name], diverged_at=2 if name == "float32" else None)
    assert run.save(tmp_path / "run") == tmp_path / "run"
    assert sorted(os.listdir(tmp_path / "run")) == FILES
    loaded = Run.load(str(tmp_path / "run"))
    for table in ("commits", "evaluations", "diagnostics"):
        pd.testing.assert_frame_equal(getattr(loaded, table), getattr(run, table))
    expected = np.asarray(TREES[name]) if name == "scalar" else TREES[name]
    assert same(expected, loaded.params)
    assert (loaded.config, loaded.diverged_at, loaded.status) == (
        run.config,
        run.diverged_at,
        run.status,
    )


def test_a_run_shows_itself_in_one_line():
    run = make_run(diverged_at=2)
    assert repr(run) == "<Run of gem: 3 commits, diverged at commit 2, seed 3>"
    run = make_run()
    run.config = {}
    assert repr(run) == "<Run: 3 commits, finished>"
    run.config = {"method": "gem", "problem": "digits", "seed": 0}
    assert repr(run) == "<Run of gem on digits: 3 commits, finished, seed 0>"


def test_saving_makes_the_folders_above_and_the_same_bytes(tmp_path):
    run = make_run(TREES["nested"])
    folders = [run.save(tmp_path / "deep" / "down" / "run"), run.save(tmp_path / "other")]
    for name in FILES:
        assert (folders[0] / name).read_bytes() == (folders[1] / name).read_bytes()


def test_runs_are_never_written_over(tmp_path):
    make_run().save(tmp_path / "run")
    before = {name: (tmp_path / "run" / name).read_bytes() for name in FILES}
    with pytest.raises(InputError, match=r"run.*exists already; give another"):
        make_run(rows=9).save(tmp_path / "run")
    assert before == {name: (tmp_path / "run" / name).read_bytes() for name in FILES}
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="exists already"):
        make_run().save(tmp_path / "file")


@pytest.mark.parametrize("broken", ["to_parquet", "savez", "write_text", "replace", "interrupted"])
def test_a_run_that_cannot_be_written_whole_leaves_nothing(tmp_path, monkeypatch, broken):
    def full(*args, **kwargs):
        raise (
            KeyboardInterrupt if broken == "interrupted" else OSError(28, "No space left on device")
        )

    owner = {"to_parquet": pd.DataFrame, "write_text": Path, "replace": os}.get(broken, np)
    with monkeypatch.context() as patch:
        patch.setattr(owner, "savez" if broken == "interrupted" else broken, full)
        with pytest.raises(
            (InputError, KeyboardInterrupt),
            match=r"^$|run.: cannot be written: No space left on device",
        ):
            make_run().save(tmp_path / "run")
    assert os.listdir(tmp_path) == [] or broken == "interrupted"
    make_run().save(tmp_path / "run")  # and the way is free
    assert os.listdir(tmp_path) == ["run"] and Run.load(tmp_path / "run").status == "finished"


def test_no_run_there(tmp_path):
    for path in (tmp_path / "nowhere", tmp_path):
        with pytest.raises(InputError, match=r"not a complete run.*Run\.save"):
            Run.load(path)
    (tmp_path / "file").write_text("{}")
    with pytest.raises(InputError, match="not a complete run"):
        Run.load(tmp_path / "file")


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", ["missing", "cut"])
def test_incomplete_runs(tmp_path, name, damage):
    path = make_run(TREES["nested"]).save(tmp_path / "run") / name
    contents = path.read_bytes()
    path.unlink()
    if damage != "missing":
        path.write_bytes(contents[: len(contents) // 2])
    with pytest.raises(InputError, match=r"run'.*(not a complete run|format)"):
        Run.load(tmp_path / "run")


@pytest.mark.parametrize("header", [[], {"format": None}, {"format": FORMAT}, "text"])
def test_headers_that_are_not_a_runs(tmp_path, header):
    (make_run().save(tmp_path / "run") / "run.json").write_text(json.dumps(header))
    with pytest.raises(InputError, match=r"run'"):
        Run.load(tmp_path / "run")


def test_another_format_says_so(tmp_path):
    path = make_run().save(tmp_path / "run") / "run.json"
    write_sealed(path, {**json.loads(path.read_text()), "format": FORMAT + 1})
    with pytest.raises(InputError, match=rf"of format {FORMAT + 1}, this asyncsim reads {FORMAT}"):
        Run.load(tmp_path / "run")


def test_numbers_of_numpy_are_saved_as_numbers(tmp_path):
    trace, problem = simulate(Cluster(2, Gamma(1.0, 0.2)), 6), problems.quadratic([1.0])
    run = replay(trace, methods.gem(np.float32(0.05)), problem, seed=np.int64(1), progress=False)
    run.save(tmp_path / "run")
    for config in (run.config, Run.load(tmp_path / "run").config):
        assert type(config["seed"]) is int
        assert config["hyperparameters"]["learning_rate"] == pytest.approx(0.05)


def test_a_problems_own_configuration_comes_back_as_lists_and_numbers(tmp_path):
    own = {"scales": np.arange(3), "rate": np.float32(0.5), "by": {1: (2, np.bool_(True))}}
    problem = problems.custom(lambda key: jnp.ones(2), lambda p, b, k: jnp.sum(p * p), config=own)
    run = replay(prescribed(0, 4, 2), methods.downpour(), problem, progress=False)
    run.save(tmp_path / "run")
    for config in (run.config, Run.load(tmp_path / "run").config):
        found = config["problem_config"]
        assert {name: found[name] for name in own} == {
            "scales": [0, 1, 2],
            "rate": 0.5,
            "by": {"1": [2, True]},
        }
