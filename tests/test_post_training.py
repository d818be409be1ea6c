"""Post-training: replays of rollouts against a plain loop, and its study."""

import dataclasses
import itertools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest
from edits import log_of
from test_rollouts import learner

import asyncsim
from asyncsim import InputError, recorders, replay, study
from asyncsim.base.streams import Streams
from asyncsim.calibration.rollouts import calibrate_rollouts
from asyncsim.methods.policy_gradient import policy_gradient
from asyncsim.problems.arithmetic import arithmetic
from asyncsim.problems.token_bandit import token_bandit
from asyncsim.replays.plan import purpose_key
from asyncsim.replays.recorders import Recorder

post_training = study.load("post_training")
SMALL = {"slots": 8, "batch": 8, "group": 2, "steps": 20, "seeds": 2, "tune": (0.3, 1.0)}
SLOTS = {"slots": 6, "length": "exponential(1)", "group": 2}


# Replays


@pytest.mark.parametrize("normalize", [None, "token", "constant"])
def test_gspo_follows_the_gradient_of_its_equation_5(normalize):
    rng, clip = np.random.default_rng(0), 0.1
    method = policy_gradient(correction="gspo(0.1)", normalize=normalize)
    with jax.enable_x64(True):
        old, advantage = jnp.asarray(rng.normal(size=(200, 3))), jnp.asarray(rng.normal(size=200))
        new, length = (
            old + 0.3 * rng.normal(size=old.shape),
            jnp.asarray(rng.choice([1.0, 2.0, 3.0], 200)),
        )
        present = jnp.arange(3.0) < length[:, None]

        def objective(logp):
            s = jnp.exp(jnp.where(present, logp - old, 0).sum(1) / length)
            terms = jnp.minimum(s * advantage, jnp.clip(s, 1 - clip, 1 + clip) * advantage)
            if normalize is not None:  # the same sums over tokens, otherwise divided
                terms *= length / (length.mean() if normalize == "token" else 1)
            return terms.mean()

        def loss(logp):
            logp, behaviour = (jnp.where(present, values, 0) for values in (logp, old))
            return method.loss(logp, behaviour, None, advantage, present)[0]

        expected, gradient = jax.grad(objective)(new), -jax.grad(loss)(new)
    assert np.abs(expected).max() > 1e-3
    np.testing.assert_allclose(gradient, expected, rtol=0, atol=1e-12)


def ratio(logp, behaviour, *_):
    return np.exp(logp - behaviour)


def clipped(ratio, advantage, clip):
    """The weight of PPO's smaller term: none where the ratio is clipped against the advantage."""
    return np.where(np.where(advantage > 0, ratio <= 1 + clip, ratio >= 1 - clip), ratio, 0.0)


def decoupled(logp, behaviour, proximal, advantage):
    age = np.minimum(ratio(proximal, behaviour), 1.1)
    return age * clipped(ratio(logp, proximal), advantage, 0.05)


#: Of each correction the weights of a sample's tokens, from log-probabilities under the current
#: policy, the behaviour and the proximal policy, and the advantage.
WEIGHTS = {
    "none": lambda logp, *_: np.ones(len(logp)),
    "importance": ratio,
    "importance(sequence)": lambda *sample: np.full(len(sample[0]), np.prod(ratio(*sample))),
    "truncated(1.1)": lambda *sample: np.minimum(ratio(*sample), 1.1),
    "cispo": lambda *sample: np.clip(ratio(*sample), 0.0, 1.28),
    "icepop(0.9, 1.2)": lambda *sample: ratio(*sample) * (abs(ratio(*sample) - 1.05) <= 0.15),
    "ppo(0.05)": lambda *sample: clipped(ratio(*sample), sample[3], 0.05),
    "decoupled(0.05, 1.1)": decoupled,
    "gspo(0.02)": lambda logp, behaviour, _, advantage: clipped(
        np.full(len(logp), np.exp(np.mean(logp - behaviour))), advantage, 0.02
    ),
}
BASELINES = {
    "none": lambda rewards, versions, member: 0.0,
    "group": lambda rewards, versions, member: rewards.mean(),
    "leave_one_out": lambda rewards, versions, member: np.delete(rewards, member).mean(),
    "version_group": lambda rewards, versions, member: rewards[versions == versions[member]].mean(),
}


def plain_loop(trace, method, problem, weights, seed):
    """Replay a trace on the token bandit sample by sample and token by token, in NumPy."""
    config, rollouts, tables = problem.config, trace.cluster.rollouts, trace.rollouts
    states, actions, count = config["states"], config["actions"], config["tokens"]
    draws = Streams(0, "token bandit").generator(0, 0)
    table = draws.standard_normal((states, count, actions + 1, actions, config["features"]))
    rewards_table = draws.standard_normal((states, *(actions,) * count))
    key = purpose_key(seed, "samples")
    versions = [np.zeros(config["features"])]

    def log_probabilities(theta, state, before, position):
        logits = table[state, position, before] @ theta
        return logits - np.log(np.exp(logits - logits.max()).sum()) - logits.max()

    def write(row, sample):
        """Return the state, the tokens and their log-probabilities when they were written."""
        _, token_key = jax.random.split(jax.random.fold_in(key, sample["sample"]))
        state = min(int(rollouts.length.cdf(sample["length"]) * states), states - 1)
        switches = tables.switches[tables.switches["row"] == row]
        tokens, behaviour = [], []
        for position in range(count):
            passed = switches.loc[switches["share"] <= position / count, "version"]
            theta = versions[[sample["read_version"], *passed][-1]]
            logp = log_probabilities(theta, state, [actions, *tokens][-1], position)
            place = jax.random.fold_in(token_key, position)
            noise = np.asarray(jax.random.gumbel(place, (actions,), "float64"))
            tokens.append(int(np.argmax(logp + noise)))
            behaviour.append(logp[tokens[-1]])
        return state, tokens, np.array(behaviour)

    def score(theta, state, tokens):
        logp, gradients = [], []
        for position, (before, token) in enumerate(zip([actions, *tokens], tokens, strict=False)):
            logs = log_probabilities(theta, state, before, position)
            features = table[state, position, before]
            logp.append(logs[token])
            gradients.append(features[token] - np.exp(logs) @ features)
        return np.array(logp), np.array(gradients)

    trained = tables.samples[tables.samples["outcome"] == "trained"].sort_values("sample")
    for update in range(len(trace)):
        theta, samples = versions[-1], trained[trained["version"] == update]
        batch = [write(row, sample) for row, sample in samples.iterrows()]
        rewards = [rewards_table[(state, *tokens)] for state, tokens, _ in batch]
        rewards = np.reshape(rewards, (-1, rollouts.group))
        read = samples["read_version"].to_numpy().reshape(rewards.shape)
        baseline = BASELINES[method.baseline]
        advantage = [
            reward - baseline(rewards[group], read[group], member)
            for (group, member), reward in np.ndenumerate(rewards)
        ]
        proximal = [score(theta, state, tokens)[0] for state, tokens, _ in batch]
        for part in np.array_split(np.arange(len(batch)), method.inner_steps):
            gradient = 0.0
            for i in part:
                state, tokens, behaviour = batch[i]
                logp, gradients = score(theta, state, tokens)
                weight = weights(logp, behaviour, proximal[i], advantage[i])
                length = count if method.normalize == "sequence" else 1
                gradient += (weight * advantage[i]) @ gradients / len(part) / length
            theta = theta + method.learning_rate * gradient
        versions.append(theta)
    return versions[-1]


@pytest.mark.parametrize(
    ("correction", "baseline", "updates", "queue"),
    [
        ("none", "group", "start", "pace(3)"),
        ("importance", "leave_one_out", "in_flight", "drop_oldest(1)"),
        ("importance(sequence)", "none", "start", "keep()"),
        ("truncated(1.1)", "version_group", "start", "pace(3)"),
        ("cispo", "group", "abort_and_resume", "pace(2)"),
        ("icepop(0.9, 1.2)", "group", "in_flight", "pace(3)"),
        ("ppo(0.05)", "group", "in_flight", "discard(6)"),
        ("decoupled(0.05, 1.1)", "group", "in_flight", "discard(6)"),
        ("gspo(0.02)", "leave_one_out", "start", "pace(3)"),
    ],
)
def test_replay_equals_a_plain_loop(correction, baseline, updates, queue):
    setting = {"slots": 12, "length": "exponential(1)", "group": 2, "batch": 4}
    trace = learner(8, 0.3, queue=queue, updates=updates, **setting)
    method, problem = policy_gradient(0.5, correction, baseline, inner_steps=2), token_bandit()
    with jax.enable_x64(True):
        run = replay(trace, method, problem, 1, precision="float64")
        expected = plain_loop(trace, method, problem, WEIGHTS[correction], 1)
    np.testing.assert_allclose(run.params["theta"], expected, rtol=0, atol=1e-10)


def test_arithmetic_rewards_right_sums_only():
    problem = arithmetic(2)
    numbers = jnp.array([[7, 1, -1], [5, 2, -1]])  # 17 + 25 = 42
    assert problem.reward(jnp.array([2, 4, 0]), numbers) == 1
    assert problem.reward(jnp.array([2, 3, 0]), numbers) == 0
    short = jnp.array([[7, -1, -1], [5, -1, -1]])  # 7 + 5 = 12, two tokens
    assert problem.reward(jnp.array([2, 1, 9]), short) == 1


def test_value_of_the_bandit_is_the_mean_reward():
    problem = token_bandit(states=2, actions=3, tokens=2)
    params = {"theta": jnp.linspace(-1, 1, 8)}
    key = jax.random.key(0)

    @jax.jit
    @jax.vmap
    def reward(number):
        state = number % 2
        tokens, _ = problem.sample(
            lambda _: params, jax.random.fold_in(key, number), state, jnp.asarray(2, jnp.int32)
        )
        return problem.reward(tokens, state)

    rewards = np.asarray(reward(jnp.arange(20_000, dtype=jnp.int32)))
    error = rewards.std() / np.sqrt(len(rewards))
    assert abs(rewards.mean() - problem.value(params)) < 4 * error


def test_a_replay_evaluates_and_records_as_others_do():
    trace = learner(6, batch=4, queue="pace(2)", **SLOTS)

    def observe(last, commit):
        return commit.step, [jnp.vdot(last, commit.step)]

    product = Recorder(("product",), observe, lambda method, central: 0 * central, shared=True)
    method, problem = policy_gradient(0.5), token_bandit()
    run = replay(trace, method, problem, evaluate_every=2, record=[product, recorders.energy()])
    assert run.evaluations["commit"].tolist() == [0, 2, 4, 6]
    start = float(problem.value(problem.init(None)))
    assert run.evaluations["reward"].iloc[0] == pytest.approx(start, rel=1e-5)
    commits = run.commits
    assert commits["product"].iloc[0] == 0 and (commits["product"].iloc[1:] != 0).any()
    energy = commits["update_norm"] ** 2 / 2
    np.testing.assert_allclose(commits["central_energy"], energy, rtol=1e-4)
    last = trace.samples.query("version == 5")["staleness"].mean()
    assert commits["staleness"].iloc[-1] == last


def test_members_are_lone_replays():
    trace, problem = learner(6, batch=4, queue="pace(2)", **SLOTS), token_bandit()
    rates, options = [0.5, 0.1], {"seeds": [0, 1]}
    members = asyncsim.replay_ensemble(
        trace, policy_gradient, problem, learning_rate=rates, **options
    )
    for run, (seed, rate) in zip(members, itertools.product([0, 1], rates), strict=True):
        assert run.config["hyperparameters"]["learning_rate"] == rate
        alone = replay(trace, policy_gradient(rate), problem, seed)
        assert run.params["theta"].tobytes() == alone.params["theta"].tobytes()


# The study


OWN = """
import jax
import jax.numpy as jnp
from asyncsim.problems import PolicyProblem

def half(logp, behaviour, proximal, advantage, present):
    return 0.5 * jnp.ones_like(logp)

def scaled(by):
    return lambda logp, *rest: by * jnp.ones_like(logp)

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
    setting = {"slots": 6, "length": "gamma(2, 0.5)", "group": 2, "batch": 4}
    trace = learner(400, "gamma(0.3, 0.2)", queue="pace(2)", **setting)
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
    options = {"length": "exponential(1)", "split": 3, "corrections": (), "steps": 20}
    for slots, train, accelerators in ((4, "0.5", (1, 1)), (8, "0.25", (2, 2))):
        config = post_training.Config(
            slots=slots, train=train, accelerators=accelerators, **options
        )
        job = post_training._split_job(config, "keep", config.cluster("keep"), 2)
        rows.append(job.function(*job.arguments))
    assert rows[0] == rows[1]


def test_the_quickest_correction_has_an_interval():
    runs = pd.DataFrame({"correction": ["none"] * 3 + ["truncated(2)"] * 3, "seed": [0, 1, 2] * 2})
    runs["time_to_target"] = runs["seed"] + np.repeat([30.0, 10.0], 3)
    runs = runs.assign(first_touch=runs["time_to_target"], simulated_seconds=50.0, target=0.6)
    runs = runs.assign(queue="keep()", learning_rate=0.1, status="finished", reward=0.9)
    rewards = post_training.reward_table(runs.assign(final_loss=0.1))
    assert list(rewards["correction"]) == ["truncated(2)", "none"]
    assert post_training.reward_verdict(rewards) == (
        "keep() with truncated(2) is the fastest setting (95% confidence, 3 seeds)"
    )


def test_a_users_file_has_corrections_and_a_problem():
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
    with pytest.raises(InputError, match="has no function none_there"):
        dataclasses.replace(config, corrections=("own.py:none_there",)).check()
