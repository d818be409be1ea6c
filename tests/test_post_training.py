"""The study of post-training, its recording and its command: small runs against the quantities that
they state.
"""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from edits import log_of

import asyncsim.__main__ as command
from asyncsim import Cluster, InputError, Rollouts, simulate, study
from asyncsim.calibration.rollouts import calibrate_rollouts
from asyncsim.traces.samples import binding_limit

post_training = study.load("post_training")
SMALL = {"slots": 8, "batch": 8, "group": 2, "steps": 20, "seeds": 2, "tune": (0.3, 1.0)}


OWN = """
import jax
import jax.numpy as jnp
from asyncsim.problems import PolicyProblem

def half(logp, behaviour, proximal, advantage, present):
    return 0.5 * jnp.ones_like(logp)

def scaled(by):
    return lambda logp, *rest: by * jnp.ones_like(logp)

def scalar(logp, *rest):
    return jnp.sum(logp)

def one_argument(logp):
    return logp

def copy(symbols):
    return PolicyProblem(
        name="copy",
        init=lambda key: jax.random.normal(key, (symbols, symbols)),
        prompt=lambda key, quantile: jax.random.randint(key, (), 0, symbols),
        logits=lambda weights, prompt, tokens, position: weights[prompt],
        reward=lambda tokens, prompt: jnp.mean(tokens == prompt),
        length=lambda quantile: jnp.int32(3),
        tokens=3,
        vocabulary=symbols,
    )
"""


def test_clocks_alone_and_a_recording(tmp_path):
    rollouts = Rollouts(6, "gamma(2, 0.5)", group=2, batch=4, queue="pace(2)")
    trace = simulate(Cluster(1, "gamma(0.3, 0.2)", rollouts=rollouts), 400, progress=False)
    log = log_of(trace)
    log["version"] = log["version"].where(log.pop("outcome") == "trained")
    log.to_parquet(tmp_path / "log.parquet")
    cluster = calibrate_rollouts(tmp_path / "log.parquet")
    assert (cluster.rollouts.slots, cluster.rollouts.group, cluster.rollouts.batch) == (6, 2, 4)
    assert cluster.rollouts.length.mean == pytest.approx(2.0, rel=0.05)
    assert cluster.compute.mean == pytest.approx(0.3, rel=0.02)
    config = post_training.Config(
        recording=tmp_path / "log.parquet",
        queues=("pace(2)",),
        corrections=(),
        out=tmp_path / "results",
    )
    measured = post_training.run(config).summary.iloc[0]
    original = trace.summary()
    for name in ("update_time", "learner_busy", "slots_busy", "staleness_mean"):
        assert measured[name] == pytest.approx(original[name], rel=0.05), name
    assert not (tmp_path / "results" / "rewards.png").exists()
    more = dataclasses.replace(config, more_slots=3)
    assert more.cluster("keep").rollouts.slots == 9
    with pytest.raises(InputError, match="has no column slot; log these as well"):
        log.drop(columns="slot").to_parquet(tmp_path / "other.parquet")
        calibrate_rollouts(tmp_path / "other.parquet")


def test_samples_that_crashes_cut_short_are_censored(tmp_path):
    """Counted as whole ones, they give mean lengths up to a tenth too short."""
    rollouts = Rollouts(8, "lognormal(1, 0.9)", group=2, batch=8, queue="pace(1)")
    crashes = ("crash(every=exponential(4), lasts=1, on=slots)",)
    cluster = Cluster(1, 0.3, rollouts=rollouts, failures=crashes)
    trace = simulate(cluster, 100, progress=False)
    log_of(trace).to_parquet(tmp_path / "log.parquet")
    fitted = calibrate_rollouts(tmp_path / "log.parquet")
    samples = trace.samples.dropna(subset="end_time")
    whole = samples.drop_duplicates("sample", keep="last")
    assert fitted.rollouts.length.mean == pytest.approx(whole["length"].mean(), rel=0.03)
    (crash,) = fitted.failures
    assert crash.on == "slots" and crash.every.mean == pytest.approx(4, rel=0.1)


def test_samples_that_are_open_at_the_end_are_censored(tmp_path):
    """An exponential law's mean is the time of all samples over the number of those that ended."""
    rollouts = Rollouts(16, "exponential(4)", batch=8, queue="keep()")
    trace = simulate(Cluster(1, 0.3, rollouts=rollouts), 24, progress=False)
    log = log_of(trace).drop(columns="group")
    log.to_parquet(tmp_path / "log.parquet")
    last = max(log[name].max() for name in ("end_time", "take_time", "train_time"))
    seconds = log["end_time"].fillna(last) - log["start_time"]
    has_ended = log["end_time"].notna()
    assert 0.05 < 1 - has_ended.mean() < 0.5
    length = calibrate_rollouts(tmp_path / "log.parquet", law="exponential").rollouts.length
    assert length.mean == pytest.approx(seconds.sum() / has_ended.sum(), rel=1e-6)


@pytest.mark.parametrize(
    ("ends", "target", "answer"),
    [
        ((0.9, 0.3), None, "keep() with none is the only setting"),
        ((0.2, 0.1), None, "no setting reached a reward of 0.300 with every seed"),
        ((0.9, 0.3), 0.1, "no setting reached a reward of 0.100 with every seed"),
        ((np.nan, 0.1), None, "no setting reached a reward of 0.300 with every seed"),
        ((np.nan, np.nan), None, "no best setting: each diverged with some seed"),
    ],
)
def test_a_reward_that_does_not_rise_reaches_no_target(ends, target, answer):
    """The start has a reward of 0.3; a run that diverged has no other evaluation."""
    key = {"queue": "keep()", "correction": "none", "seed": 0}
    rows, curves = [], []
    for rate, end in zip((0.1, 1.0), ends, strict=True):
        status = "diverged" if np.isnan(end) else "finished"
        row = {**key, "learning_rate": rate, "status": status, "reward": end}
        rows.append({**row, "final_loss": -end, "simulated_seconds": 4.0})
        rewards = [0.3] if np.isnan(end) else [0.3, end, end, end, end]
        curve = {"commit": range(len(rewards)), "commit_time": range(len(rewards))}
        curves.append(pd.DataFrame({**curve, "reward": rewards, **key, "learning_rate": rate}))
    config = post_training.Config(target=target)
    runs = post_training.with_targets(config, pd.DataFrame(rows), pd.concat(curves))
    assert np.isfinite(runs["time_to_target"]).sum() == ("only" in answer)
    assert post_training.reward_verdict(post_training.reward_table(runs)).startswith(answer)


def test_a_division_starts_from_the_accelerators_of_the_log():
    rows = []
    for slots, train, accelerators in ((4, 0.5, (1, 1)), (8, 0.25, (2, 2))):
        config = post_training.Config(
            slots=slots,
            train=f"constant({train})",
            length="exponential(1)",
            split=3,
            accelerators=accelerators,
            corrections=(),
            steps=20,
        )
        job = post_training._split_job(config, "keep", config.cluster("keep"), 2)
        rows.append(job.function(*job.arguments))
    assert rows[0] == rows[1]


def test_the_quickest_correction_has_an_interval():
    rows = [
        {
            "queue": "keep()",
            "correction": correction,
            "learning_rate": 0.1,
            "seed": seed,
            "status": "finished",
            "reward": 0.9,
            "final_loss": 0.1,
            "time_to_target": time + seed,
            "first_touch": time + seed,
            "simulated_seconds": 50.0,
            "target": 0.6,
        }
        for correction, time in (("none", 30.0), ("truncated(2)", 10.0))
        for seed in range(3)
    ]
    rewards = post_training.reward_table(pd.DataFrame(rows))
    assert list(rewards["correction"]) == ["truncated(2)", "none"]
    assert post_training.reward_verdict(rewards) == (
        "keep() with truncated(2) is the fastest setting (95% confidence, 3 seeds)"
    )


def test_shares_by_hand():
    """Two slots and samples of 1 s, batches of two, updates of 0.5 s: a version per second."""
    rollouts = Rollouts(2, 1.0, batch=2, queue="keep()")
    trace = simulate(Cluster(1, 0.5, rollouts=rollouts), 10, progress=False)
    numbers = trace.summary()
    assert (
        numbers["update_time"] == 1.0
        and numbers["slots_busy"] == 1.0
        and numbers["learner_busy"] == 0.5
    )
    assert numbers["warm_up"] == 2
    assert (
        numbers["staleness_mean"] == numbers["staleness_tokens_mean"] == 1.0
        and numbers["samples_lost"] == 0
    )
    assert binding_limit(numbers["slots_busy"], numbers["learner_busy"]) == "slots"
    assert binding_limit(0.9, 1.0) == "learner" and binding_limit(0.5, 0.5) == "queue"


def test_a_users_file_has_corrections_and_a_problem(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("own.py").write_text(OWN)
    config = post_training.Config(
        **SMALL | {"steps": 5, "seeds": 1, "tune": (1.0,)},
        queues=("keep",),
        corrections=("own.py:half", "own.py:scaled(0.5)"),
        problem="own.py:copy(symbols=3)",
    )
    folder, summary = post_training.run(config)
    half, scaled = (rows for _, rows in summary.groupby("correction", sort=False))
    assert half["reward"].tolist() == scaled["reward"].tolist()
    assert json.loads((folder / "config.json").read_text())["files"].keys() == {"own.py"}
    for name, message in (
        ("scalar", "one weight for each token"),
        ("one_argument", "it is called as correction"),
        ("none_there", "has no function none_there"),
    ):
        with pytest.raises(InputError, match=message):
            dataclasses.replace(config, corrections=(f"own.py:{name}",)).check()


def test_commands(tmp_path, capsys):
    pd.DataFrame({"read_version": [0, 0, 0], "version": [0, 1, 2]}).to_csv(tmp_path / "log.csv")
    assert command.main(["check-lag", str(tmp_path / "log.csv"), "--bound", "1"]) == 1
    violation = "bound 1: violated by 1 of 3 samples, first by row 2 (line 4), which read 0"
    assert violation in capsys.readouterr().out
    assert command.main(["check-lag", str(tmp_path / "log.csv"), "--bound", "2"]) == 0
    assert command.main(["check-lag", str(tmp_path / "none.csv")]) == 2
    assert "no such file\nhint: give a log" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        command.main(["check-lag", "-h"])
    assert "before the update that uses it" in " ".join(capsys.readouterr().out.split())
