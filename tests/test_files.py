"""Traces and runs on disk: whole or not at all, the same back, and refused where damaged."""

import json
import math
import os
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from asyncsim import (
    Cluster,
    Gamma,
    InputError,
    Rollouts,
    Run,
    Trace,
    Uniform,
    methods,
    prescribed,
    problems,
    replay,
    simulate,
)
from asyncsim.base.files import field_values, write_sealed
from asyncsim.replays import run
from asyncsim.traces import archive
from asyncsim.traces.columns import TABLES, Source

LAWS = [1, 2, 3, 4, Uniform(1, 2)]
ROLLOUTS = Rollouts(
    6, "empirical([0, 1])", group=2, batch=4, queue="drop_oldest(1)", updates="in_flight"
)
TRACES = {
    "separate reads": simulate(
        Cluster(5, LAWS, 0.3, (0.1, 0.2), protocol="write_then_read", window=2), 60, seed=1
    ),
    "more workers than commits": simulate(Cluster(50, Gamma(1, 0.2), service=1.0), 7),
    "prescribed": prescribed("exponential(5)", commits=50, workers=4, seed=2),
    "rollouts": simulate(
        Cluster(1, 0.3, rollouts=ROLLOUTS, failures="crash(exponential(3), 1, on=slots)"), 10
    ),
}
TRACE = TRACES["separate reads"]
FILES = ["commits.parquet", "diagnostics.parquet", "evaluations.parquet", "params.npz", "run.json"]
TREES = {
    "scalar": np.float32(2),
    "float32": np.array([1, np.nan, np.inf], np.float32),
    "nested": {"b": (np.ones(()), [np.zeros((0, 2))]), "a": {"c": np.arange(3, dtype=np.int32)}},
    "empty": {},
}


def make_run(params="nested", diverged_at=None, rows=3):
    loss = np.linspace(1, 0.1, rows, dtype=np.float32)
    return Run(
        commits=pd.DataFrame({"commit": range(rows), "loss": loss}),
        evaluations=pd.DataFrame({"commit": [0, rows], "train_loss": [1.0, math.pi]}),
        diagnostics=pd.DataFrame(columns=["commit", "quantity", "tensor", "quantile", "value"]),
        params=TREES[params],
        diverged_at=diverged_at,
        config={"method": "gem", "hyperparameters": {"kappa": 1.0, "pi_max": None}, "seed": 3},
    )


def contents(path):
    """Return the bytes of a file, or of each file of a folder."""
    files = [path] if path.is_file() else sorted(path.iterdir())
    return {file.name: file.read_bytes() for file in files}


# What comes back


NAMES = ("frame", "open_reads", "present")


@pytest.mark.parametrize("trace", TRACES.values(), ids=TRACES)
def test_a_trace_comes_back(trace, tmp_path):
    path = trace.save(tmp_path / "trace.parquet")
    loaded = Trace.load(path)
    assert path == tmp_path / "trace.parquet"
    assert np.array_equal(loaded.group_versions(), trace.group_versions())
    tables = [(getattr(entry, name) for entry in (loaded, trace)) for name in NAMES]
    if trace.rollouts is not None:
        tables += zip(loaded.rollouts, trace.rollouts, strict=True)
    for pair in tables:
        pd.testing.assert_frame_equal(*pair, check_exact=True)
    assert field_values(loaded, Source) == field_values(trace, Source)
    assert len({loaded, trace}) == 2  # a trace is compared by identity
    assert contents(loaded.save(tmp_path / "again" / "trace.parquet")) == contents(path)


def same(a, b):
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return isinstance(b, np.ndarray) and a.dtype == b.dtype and np.array_equal(a, b, equal_nan=True)


@pytest.mark.parametrize("name", TREES)
def test_a_run_comes_back(tmp_path, name):
    saved = make_run(name, diverged_at=2 if name == "float32" else None)
    assert saved.save(tmp_path / "run") == tmp_path / "run"
    assert sorted(os.listdir(tmp_path / "run")) == FILES
    loaded = Run.load(str(tmp_path / "run"))
    for table in ("commits", "evaluations", "diagnostics"):
        pd.testing.assert_frame_equal(getattr(loaded, table), getattr(saved, table))
    assert same(np.asarray(TREES[name]) if name == "scalar" else TREES[name], loaded.params)
    for attribute in ("config", "diverged_at", "status"):
        assert getattr(loaded, attribute) == getattr(saved, attribute)


@pytest.mark.parametrize(
    ("make", "name"), [(lambda: TRACE, "trace.parquet"), (make_run, "run")], ids=["trace", "run"]
)
def test_saving_gives_the_same_bytes_below_new_folders_and_replaces_nothing(tmp_path, make, name):
    path = make().save(tmp_path / name)
    before = contents(path)
    assert contents(make().save(tmp_path / "deep" / "down" / name)) == before
    (tmp_path / "file").write_text("")
    for taken in (path, tmp_path, tmp_path / "file"):
        with pytest.raises(InputError, match=r"path = .*: exists already; give another"):
            make().save(taken)
    assert contents(path) == before


def test_a_traces_file_is_ordinary_parquet_with_units_inside(tmp_path):
    path = TRACE.save(tmp_path / "trace.parquet")
    columns = pd.read_parquet(path)
    assert list(columns) == [f"{table}.{column}" for table in TABLES for column in TABLES[table]]
    assert columns["steps.commit_time"][0].tolist() == TRACE.steps["commit_time"].tolist()
    header = json.loads(pq.read_schema(path).metadata[b"asyncsim"])
    assert header["units"]["steps.commit_time"] == "s"
    assert header["source"]["seed"] == 1
    assert Cluster.from_dict(header["source"]["cluster"]) == TRACE.cluster
    assert {"asyncsim", "numpy", "simpy"} <= set(header["source"]["versions"])


def test_a_run_shows_itself_in_one_line():
    assert repr(make_run(diverged_at=2)) == "<Run of gem: 3 commits, diverged at commit 2, seed 3>"
    shown = make_run()
    shown.config = {}
    assert repr(shown) == "<Run: 3 commits, finished>"
    shown.config = {"method": "gem", "problem": "digits", "seed": 0}
    assert repr(shown) == "<Run of gem on digits: 3 commits, finished, seed 0>"


def test_configurations_are_saved_as_lists_and_plain_numbers(tmp_path):
    config = {"scales": np.arange(3), "rate": np.float32(0.5), "by": {1: (2, np.bool_(True))}}
    problem = problems.custom(
        lambda key: jnp.ones(2), lambda p, b, k: jnp.sum(p * p), config=config
    )
    method = methods.gem(np.float32(0.05))
    replayed = replay(prescribed(0, 4, 2), method, problem, seed=np.int64(1), progress=False)
    replayed.save(tmp_path / "run")
    for config in (replayed.config, Run.load(tmp_path / "run").config):
        assert type(config["seed"]) is int
        assert config["hyperparameters"]["learning_rate"] == pytest.approx(0.05)
        expected = {"scales": [0, 1, 2], "rate": 0.5, "by": {"1": [2, True]}}
        assert expected.items() <= config["problem_config"].items()


# Files that are damaged, missing or cannot be written


@pytest.mark.parametrize(
    ("owner", "function", "error"),
    [
        (pd.DataFrame, "to_parquet", OSError(28, "No space left on device")),
        (np, "savez", OSError(28, "No space left on device")),
        (Path, "write_text", OSError(28, "No space left on device")),
        (os, "replace", OSError(28, "No space left on device")),
        (np, "savez", KeyboardInterrupt()),
    ],
)
def test_a_run_that_cannot_be_written_whole_leaves_nothing(
    tmp_path, monkeypatch, owner, function, error
):
    def fail(*args, **kwargs):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(owner, function, fail)
        with pytest.raises((InputError, KeyboardInterrupt)) as raised:
            make_run().save(tmp_path / "run")
    if isinstance(error, OSError):
        assert "run': cannot be written: No space left on device" in str(raised.value)
        assert os.listdir(tmp_path) == []
    make_run().save(tmp_path / "run")  # and the way is free
    assert os.listdir(tmp_path) == ["run"] and Run.load(tmp_path / "run").status == "finished"


@pytest.mark.parametrize("name", FILES)
def test_runs_with_a_missing_or_short_file_are_refused(tmp_path, name):
    path = make_run().save(tmp_path / "run") / name
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(InputError, match=r"run'.*(not a complete run|format)"):
        Run.load(tmp_path / "run")
    path.unlink()
    with pytest.raises(InputError, match=r"run': not a complete run"):
        Run.load(tmp_path / "run")


def test_a_trace_too_large_for_the_memory_is_not_read(tmp_path, monkeypatch):
    path = TRACE.save(tmp_path / "trace.parquet")
    monkeypatch.setattr("os.sysconf", lambda name: 1)  # bytes of memory
    monkeypatch.setattr(pq.ParquetFile, "read", None)
    with pytest.raises(InputError, match=r"a trace of its length needs at least .* GiB of memory"):
        Trace.load(path)


def with_header(change):
    """Return a function that changes the header of a trace's file."""

    def rewrite(path):
        table = pq.read_table(path)
        header = json.loads(table.schema.metadata[b"asyncsim"])
        change(header)
        metadata = {b"asyncsim": json.dumps(header).encode()}
        pq.write_table(table.replace_schema_metadata(metadata), path)

    return rewrite


def other_table(metadata):
    """Return a function that writes parquet that is no trace."""
    table = pa.table({"x": [1, 2]}).replace_schema_metadata(metadata)
    return lambda path: pq.write_table(table, path)


NOT_A_TRACE = "not a trace; give a file that Trace.save wrote"
DAMAGED = "a damaged trace .*; copy it again, or make it again"
NEWER = rf"of format {archive.FORMAT + 1}, this asyncsim reads {archive.FORMAT}; use the version"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (Path.unlink, "no such file; give one that Trace.save wrote"),
        (other_table(None), NOT_A_TRACE),
        (other_table({b"asyncsim": b"{}"}), NOT_A_TRACE),
        (with_header(lambda header: header.update(format=archive.FORMAT + 1)), NEWER),
        (with_header(lambda header: header["source"].update(colour="red")), DAMAGED),
        (with_header(lambda header: header["source"]["cluster"].update(compute="fast")), DAMAGED),
        (with_header(lambda header: header["source"].update(seed=2)), DAMAGED),
        (with_header(lambda header: header["units"].update({"steps.commit_time": "ms"})), DAMAGED),
        (with_header(lambda header: header.update(sha256="0" * 64)), DAMAGED),
        (with_header(lambda header: [header.pop(name) for name in [*header][1:]]), DAMAGED),
    ],
)
def test_a_damaged_trace_is_refused(tmp_path, damage, message):
    path = TRACE.save(tmp_path / "trace.parquet")
    damage(path)
    with pytest.raises(InputError, match=rf"trace.parquet': .*{message}"):
        Trace.load(path)


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ([], ""),
        ("text", ""),
        ({"format": None}, ""),
        ({"format": run.FORMAT}, ""),
        ({"format": run.FORMAT + 1}, f"of format {run.FORMAT + 1}, this asyncsim reads"),
    ],
)
def test_a_run_with_another_header_is_refused(tmp_path, header, message):
    path = make_run().save(tmp_path / "run") / "run.json"
    if message:
        write_sealed(path, {**json.loads(path.read_text()), **header})
    else:
        path.write_text(json.dumps(header))
    with pytest.raises(InputError, match=rf"run'.*{message}"):
        Run.load(path.parent)


@pytest.mark.parametrize("place", ["nowhere", ".", "file"])
def test_places_without_a_run(tmp_path, place):
    (tmp_path / "file").write_text("{}")
    with pytest.raises(InputError, match=r"not a complete run.*Run\.save"):
        Run.load(tmp_path / place)


def test_no_damaged_trace_loads_other_values(tmp_path):
    """Bits are flipped, stretches replaced and ends cut, also in the part that describes the rest.

    Each is refused in one line; a few bits have no meaning.
    """
    path = TRACE.save(tmp_path / "trace.parquet")
    whole, generator = path.read_bytes(), np.random.default_rng(0)
    outcomes = []
    for place in generator.integers(len(whole) - 8, size=60).tolist():
        flipped = bytes([whole[place] ^ 1 << place % 8])
        for damage in (flipped + whole[place + 1 :], generator.bytes(8) + whole[place + 8 :], b""):
            path.write_bytes(whole[:place] + damage)
            try:
                again = Trace.load(path)
            except InputError as error:
                outcomes.append("\n" not in str(error))
            else:
                assert all(getattr(again, name).equals(getattr(TRACE, name)) for name in TABLES)
                assert field_values(again, Source) == field_values(TRACE, Source)
    assert all(outcomes) and len(outcomes) > 150
