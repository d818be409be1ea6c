"""Rollouts: clocks against conservation, closed forms and a calculation by hand; replays against a
plain loop.
"""

import dataclasses
import itertools
import math

import formulas
import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import asyncsim
from asyncsim import Cluster, InputError, Rollouts, recorders, replay, simulate
from asyncsim.clusters.failures import crash, pause, slow
from asyncsim.methods.policy_gradient import policy_gradient
from asyncsim.problems.arithmetic import arithmetic
from asyncsim.problems.token_bandit import token_bandit
from asyncsim.replays.plan import purpose_key
from asyncsim.replays.post_training import replay_members
from asyncsim.replays.recorders import Recorder
from asyncsim.theory import rollouts as theory
from asyncsim.traces.samples import law_of_staleness

QUEUES = (
    "pace(0)",
    "pace(1)",
    "pace(3)",
    "drop_oldest(1)",
    "drop_oldest(3)",
    "discard(4)",
    "keep()",
)


def learner(count, time=1.0, seed=0, failures=(), learners=1, **rollouts):
    cluster = Cluster(learners, time, rollouts=Rollouts(**rollouts), failures=failures)
    return simulate(cluster, count, seed, progress=False)


def mean_staleness(trace, weight="samples", warm_up=0.3):
    tables = trace.rollouts
    late = tables.samples["version"] >= warm_up * len(tables.updates)
    law = law_of_staleness(tables._replace(samples=tables.samples[late]), weight)
    return float((law.index * law).sum())


# Clocks.


@st.composite
def settings_of_rollouts(draw):
    group = draw(st.sampled_from((1, 2, 4)))
    updates = draw(st.sampled_from(("start", "in_flight", "abort_and_resume")))
    failures = [
        draw(st.sampled_from((None, crash("exponential(9)", 1.0, on="slots", together=False)))),
        draw(st.sampled_from((None, slow("exponential(5)", 2.0, 0.5, on="slots")))),
        draw(st.sampled_from((None, pause("exponential(7)", 1.0, on="slots")))),
        draw(st.sampled_from((None, crash("exponential(20)", 2.0, on="learners")))),
    ]
    return {
        "slots": draw(st.integers(1, 12)),
        "length": draw(st.sampled_from(("exponential(1)", "constant(1)", "lognormal(1, 1)"))),
        "group": group,
        "batch": group * draw(st.integers(1, 4)),
        "submit": draw(st.sampled_from(("rollout", "group", "batch"))),
        "consume": draw(st.sampled_from(("finished", "started"))),
        "queue": draw(st.sampled_from(QUEUES)),
        "updates": updates,
        "prefill": draw(st.sampled_from((0.0, 0.1))) if updates != "start" else 0.0,
        "transfer": draw(st.sampled_from((0.0, "exponential(0.3)"))),
        "failures": [failure for failure in failures if failure is not None],
        "learners": draw(st.integers(1, 3)),
        "time": draw(st.sampled_from((0.2, 2.0, "exponential(0.5)"))),
        "seed": draw(st.integers(0, 99)),
    }


@given(settings_of_rollouts())
@settings(max_examples=120, deadline=None, derandomize=True)
def test_ages_and_counts_of_samples_agree(setting):
    """Versions that passed while samples were open equal the open samples, summed over updates."""
    try:
        trace = learner(25, **setting)
    except InputError as error:
        assert "too stale" in str(error)
        return
    audit = trace.check()
    assert audit.holds
    assert audit.bound is None or setting["learners"] == 1
    samples = trace.samples
    trained = samples[samples["outcome"] == "trained"]
    assert (trained.groupby("version").size() == setting["batch"]).all()
    assert trained.groupby(["version", "group"]).size().eq(setting["group"]).all()
    assert (trained["end_time"] <= trained["ready_time"]).all()
    assert (trained["ready_time"] <= trained["take_time"]).all()
    busy = samples.sort_values(["slot", "start_time"])
    after = busy.groupby("slot")["start_time"].shift(-1)
    assert not (busy["end_time"] > after).any(), "a slot has one sample at a time"


def test_bounds_of_queues_are_those_of_one_learner():
    """Others make versions between a learner's check of its batch and its update."""
    rollouts = {"slots": 8, "length": "exponential(1)", "queue": "discard(0)"}
    lone, two = (learner(200, learners=count, **rollouts) for count in (1, 2))
    assert lone.check().bound == lone.samples.query("outcome == 'trained'")["staleness"].max() == 0
    assert two.samples.query("outcome == 'trained'")["staleness"].max() > 0 and two.check().holds


def test_slots_that_never_finish_a_sample_end_the_run(monkeypatch):
    monkeypatch.setattr("asyncsim.simulation.rollouts.FRUITLESS", 100)
    monkeypatch.setattr("asyncsim.simulation.rollouts.FRUITLESS_OF_A_WORKER", 0)
    with pytest.raises(InputError, match=r"crash.* no sample was finished in 101 attempts; give"):
        learner(1, slots=1, length=1.0, failures=[crash(0.5, 0.1, on="slots")])


def test_rows_by_hand():
    """Two slots, samples of 1 s, batches of two, updates of 0.5 s: one version per second."""
    trace = learner(3, 0.5, slots=2, length=1.0, batch=2, queue="keep()")
    rows = trace.samples[["slot", "start_time", "take_time", "read_version", "version"]].head(6)
    assert rows.to_numpy().tolist() == [
        [0, 0, 1, 0, 0],
        [1, 0, 1, 0, 0],
        [0, 1, 2, 0, 1],
        [1, 1, 2, 0, 1],
        [0, 2, 3, 1, 2],
        [1, 2, 3, 1, 2],
    ]
    assert trace.frame["commit_time"].tolist() == [1.5, 2.5, 3.5]


@pytest.mark.parametrize("consume", ["finished", "started"])
@pytest.mark.parametrize("eta", [0, 4])
def test_pacing_keeps_the_mean_staleness_at_eta(eta, consume):
    queue = f"pace({eta})"
    trace = learner(
        200,
        0.01,
        slots=400,
        length="lognormal(1, 1)",
        group=4,
        batch=16,
        queue=queue,
        consume=consume,
    )
    assert mean_staleness(trace) == pytest.approx(eta, abs=0.03)
    assert consume == "finished" or trace.samples["staleness"].max() == eta


@pytest.mark.parametrize("number", range(6))
def test_closed_forms(number):
    draws = np.random.default_rng(number)
    batch, slots = int(draws.choice((32, 64))), int(draws.integers(64, 160))
    rho = draws.uniform(0.4, 0.9) if number % 2 else draws.uniform(1.3, 2.5)
    setting = {
        "slots": slots,
        "length": f"gamma(mean=1, cv={draws.uniform(0.3, 1):.3f})",
        "group": 1 if number >= 3 else int(draws.choice((2, 8))),
        "batch": batch,
        "queue": "keep()" if rho < 1 else f"drop_oldest({draws.integers(1, 4)})",
        "updates": "in_flight" if number >= 3 else "start",
    }
    time, weight = rho * batch / slots, "tokens" if number >= 3 else "samples"
    expected = theory.mean_staleness(Rollouts(**setting), time, weight)
    trace = learner(1_500, time, **setting)
    assert mean_staleness(trace, weight) == pytest.approx(expected, rel=0.02)
    if number >= 3:
        switches = len(trace.rollouts.switches) / len(trace.samples)
        assert switches == pytest.approx(slots / (batch * max(1.0, rho)), rel=0.02)


def test_share_of_samples_that_discarding_keeps():
    setting = {"slots": 32, "length": "gamma(1, 0.7)", "batch": 16, "queue": "discard(2)"}
    trace = learner(4_000, 0.3, **setting)
    outcomes = trace.samples["outcome"].value_counts()
    share = outcomes["trained"] / (outcomes["trained"] + outcomes["discarded"])
    assert share == pytest.approx(theory.kept_share(Rollouts(**setting), 0.3), rel=0.02)


def test_a_longer_trace_begins_like_a_shorter_one_and_failures_change_no_length():
    setting = {"slots": 6, "length": "exponential(1)", "group": 2, "batch": 4, "queue": "pace(2)"}
    short, long = learner(10, **setting), learner(20, **setting)
    begun = short.samples["start_time"] < short.frame["commit_time"].iloc[-1]
    columns = ["sample", "slot", "start_time", "read_version", "length"]
    pd.testing.assert_frame_equal(
        short.samples.loc[begun, columns], long.samples.loc[: begun.sum() - 1, columns]
    )
    failing = learner(10, failures=[crash("exponential(3)", 1.0, on="slots")], **setting)
    lengths = [trace.samples.groupby("sample")["length"].first() for trace in (short, failing)]
    both = min(map(len, lengths))
    assert lengths[0][:both].tolist() == lengths[1][:both].tolist()
    assert (failing.samples["outcome"] == "cancelled").any()


def test_a_trace_with_samples_survives_its_file(tmp_path):
    setting = {
        "slots": 6,
        "length": "empirical([0, 1])",
        "group": 2,
        "batch": 4,
        "queue": "drop_oldest(1)",
    }
    failures = [crash("exponential(3)", 1.0, on="slots")]
    trace = learner(10, 0.3, updates="in_flight", failures=failures, **setting)
    assert trace.samples["length"].min() == 0 and len(trace.rollouts.switches)
    again = asyncsim.Trace.load(trace.save(tmp_path / "trace.parquet"))
    for name, table in trace.rollouts._asdict().items():
        pd.testing.assert_frame_equal(table, getattr(again.rollouts, name))
    assert again.check() == trace.check() and again.cluster == trace.cluster
    method, problem = policy_gradient(0.5), token_bandit()
    runs = [replay(entry, method, problem).params["theta"].tobytes() for entry in (trace, again)]
    assert runs[0] == runs[1]


# Replays.


def trained_apart(trace):
    """Return the trace of synchronous training, built without queue, gate or clock of slots."""
    rollouts, updates = trace.cluster.rollouts, len(trace)
    number = np.arange(updates * rollouts.batch)
    version = number // rollouts.batch
    lengths = trace.samples.sort_values("sample")["length"].to_numpy()[: len(number)]
    samples = pd.DataFrame(
        {
            "sample": number,
            "group": number // rollouts.group,
            "length": lengths,
            "read_version": version,
            "version": version,
            "staleness": 0,
            "outcome": "trained",
        }
    )
    return dataclasses.replace(trace, rollouts=trace.rollouts._replace(samples=samples))


def test_pace_zero_is_synchronous_training_byte_for_byte():
    trace = learner(12, slots=6, length="exponential(1)", group=2, batch=8, queue="pace(0)")
    method, problem = policy_gradient(0.5, "ppo", inner_steps=2), token_bandit()
    runs = [replay(which, method, problem, 3) for which in (trace, trained_apart(trace))]
    assert runs[0].params["theta"].tobytes() == runs[1].params["theta"].tobytes()
    assert runs[0].commits["reward"].equals(runs[1].commits["reward"])


def test_corrections_agree_where_nothing_is_stale():
    trace = learner(5, slots=6, length="exponential(1)", group=4, batch=8, queue="pace(0)")
    params = [
        replay(
            trace,
            policy_gradient(0.5, name, normalize="constant"),
            token_bandit(),
            precision="float64",
        ).params
        for name in ("none", "importance", "decoupled(0.2, 2)", "gspo")
    ]
    for other in params[1:]:
        np.testing.assert_allclose(other["theta"], params[0]["theta"], rtol=0, atol=1e-12)


@pytest.mark.parametrize("normalize", [None, "token", "constant"])
def test_gspo_is_its_equation_5_by_enumeration(normalize):
    """Sums over all groups of two that the old policy may write, of sequences of 1 to 3 tokens."""
    texts = [text for n in (1, 2, 3) for text in itertools.product(range(2), repeat=n)]
    tokens = np.array([text + (0,) * (3 - len(text)) for text in texts])
    present = jnp.arange(3) < jnp.array([[len(text)] for text in texts])
    clip, method = 0.1, policy_gradient(correction="gspo(0.1)", normalize=normalize)

    def logps(theta):  # of each token of each text; a text's length has a probability of its own
        return jnp.where(present, jax.nn.log_softmax(theta)[jnp.arange(3), tokens], 0.0)

    with jax.enable_x64(True):
        draws = np.random.default_rng(0)
        old = jnp.asarray(draws.normal(size=(3, 2)))
        new, rewards = old + 0.3 * draws.normal(size=(3, 2)), draws.normal(size=len(texts))
        pairs = np.array(list(itertools.product(range(len(texts)), repeat=2)))
        chance = np.exp(np.asarray(logps(old)).sum(1)) / 3
        chance = chance[pairs].prod(1)
        spread = rewards[pairs] - rewards[pairs].mean(1, keepdims=True)
        length = present.sum(1).astype(float)

        def objective(theta):  # equation 5
            s = jnp.exp((logps(theta) - logps(old)).sum(1) / length)[pairs]
            terms = jnp.minimum(s * spread, jnp.clip(s, 1 - clip, 1 + clip) * spread)
            if normalize is not None:  # the same sums over tokens, otherwise divided
                terms = terms * length[pairs]
            if normalize == "token":
                terms = terms / length[pairs].mean(1, keepdims=True)
            return chance @ terms.mean(1)

        def ascent(theta):
            def loss(pair, advantage):
                behaviour = logps(old)[pair]
                return method.loss(logps(theta)[pair], behaviour, None, advantage, present[pair])[0]

            return -chance @ jax.vmap(loss)(pairs, spread)

        expected, gradient = jax.grad(objective)(new), jax.grad(ascent)(new)
    assert np.abs(expected).max() > 0.01
    np.testing.assert_allclose(gradient, expected, rtol=0, atol=1e-12)


def plain_loop(trace, method, settings_, seed):
    """Replay a trace on the token bandit sample by sample and token by token, in NumPy."""
    states, actions, count = settings_["states"], settings_["actions"], settings_["tokens"]
    draws = asyncsim.base.streams.Streams(0, "token bandit").generator(0, 0)
    table = draws.standard_normal((states, count, actions + 1, actions, settings_["features"]))
    rewards_table = draws.standard_normal((states, *(actions,) * count))
    key = purpose_key(seed, "samples")
    rollouts, tables = trace.cluster.rollouts, trace.rollouts
    versions = [np.zeros(settings_["features"])]

    def log_probabilities(theta, state, before, position):
        logits = table[state, position, before] @ theta
        return logits - np.log(np.exp(logits - logits.max()).sum()) - logits.max()

    for update in range(len(trace)):
        theta = versions[-1]
        rows = tables.samples[
            (tables.samples["outcome"] == "trained") & (tables.samples["version"] == update)
        ].sort_values("sample")
        batch = []
        for row, sample in rows.iterrows():
            _, token_key = jax.random.split(jax.random.fold_in(key, sample["sample"]))
            state = min(int(rollouts.length.cdf(sample["length"]) * states), states - 1)
            tokens, behaviour, before = [], [], actions
            for position in range(count):
                amid = tables.switches[tables.switches["row"] == row]
                amid = amid[amid["share"] <= position / count]
                version = amid["version"].iloc[-1] if len(amid) else sample["read_version"]
                logp = log_probabilities(versions[version], state, before, position)
                noise = jax.random.gumbel(
                    jax.random.fold_in(token_key, position), (actions,), "float64"
                )
                token = int(np.argmax(logp + np.asarray(noise)))
                tokens.append(token)
                behaviour.append(logp[token])
                before = token
            batch.append(
                (
                    state,
                    tokens,
                    np.array(behaviour),
                    rewards_table[(state, *tokens)],
                    sample["read_version"],
                )
            )
        rewards = np.array([entry[3] for entry in batch]).reshape(-1, rollouts.group)
        read = np.array([entry[4] for entry in batch]).reshape(-1, rollouts.group)
        advantage = np.zeros_like(rewards)
        for group in range(len(rewards)):
            for member in range(rollouts.group):
                others = {
                    "none": [],
                    "group": rewards[group],
                    "leave_one_out": np.delete(rewards[group], member),
                    "version_group": rewards[group][read[group] == read[group][member]],
                }[method.baseline]
                advantage[group, member] = rewards[group, member] - (
                    np.mean(others) if len(others) else 0.0
                )
        advantage = advantage.ravel()

        def score(theta, state, tokens):
            logp, gradients, before = [], [], actions
            for position, token in enumerate(tokens):
                logs = log_probabilities(theta, state, before, position)
                features = table[state, position, before]
                logp.append(logs[token])
                gradients.append(features[token] - np.exp(logs) @ features)
                before = token
            return np.array(logp), np.array(gradients)

        proximal = [score(theta, state, tokens)[0] for state, tokens, *_ in batch]
        for part in np.array_split(np.arange(len(batch)), method.inner_steps):
            gradient = 0.0
            for i in part:
                state, tokens, behaviour, *_ = batch[i]
                logp, gradients = score(theta, state, tokens)
                spread = np.full(count, advantage[i])
                weight = np.asarray(
                    method.correction.weight(
                        logp, behaviour, proximal[i], spread, np.ones(count, bool)
                    )
                )
                length = count if method.normalize == "sequence" else 1
                gradient = gradient + (weight * spread) @ gradients / len(part) / length
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
        ("decoupled(0.05, 1.1)", "group", "in_flight", "discard(6)"),
        ("gspo(0.02)", "leave_one_out", "start", "pace(3)"),
    ],
)
def test_replay_equals_a_plain_loop(correction, baseline, updates, queue):
    trace = learner(
        8, 0.3, slots=12, length="exponential(1)", group=2, batch=4, queue=queue, updates=updates
    )
    method = policy_gradient(0.5, correction, baseline, inner_steps=2)
    problem = token_bandit()
    with jax.enable_x64(True):
        run = replay(trace, method, problem, 1, precision="float64")
        expected = plain_loop(trace, method, problem.config, 1)
    np.testing.assert_allclose(run.params["theta"], expected, rtol=0, atol=1e-10)


def test_members_are_lone_replays():
    trace = learner(6, slots=6, length="exponential(1)", group=2, batch=4, queue="pace(2)")
    method, problem = policy_gradient(0.5), token_bandit()
    together = replay_members(trace, method, problem, [0, 1], [0.5, 0.1])
    for seed, rate, run in zip([0, 1], [0.5, 0.1], together, strict=True):
        alone = replay(trace, method._replace(learning_rate=rate), problem, seed)
        np.testing.assert_allclose(run.params["theta"], alone.params["theta"], atol=1e-6)


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

    def reward(number):
        state = number % 2
        tokens, _ = problem.sample(
            lambda _: params, jax.random.fold_in(key, number), state, jnp.asarray(2, jnp.int32)
        )
        return problem.reward(tokens, state)

    rewards = np.asarray(jax.vmap(reward)(jnp.arange(20_000, dtype=jnp.int32)))
    error = rewards.std() / np.sqrt(len(rewards))
    assert abs(rewards.mean() - problem.value(params)) < 4 * error


def test_a_replay_evaluates_and_records_as_others_do():
    trace = learner(6, slots=6, length="exponential(1)", group=2, batch=4, queue="pace(2)")

    def observe(last, commit):
        return commit.step, [jnp.vdot(last, commit.step)]

    product = Recorder(("product",), observe, lambda method, central: 0 * central, shared=True)
    method, problem = policy_gradient(0.5), token_bandit()
    run = replay(trace, method, problem, evaluate_every=2, record=[product, recorders.energy()])
    assert run.evaluations["commit"].tolist() == [0, 2, 4, 6]
    assert run.evaluations["reward"].iloc[0] == pytest.approx(
        float(problem.value(problem.init(None))), rel=1e-5
    )
    assert run.commits["product"].iloc[0] == 0 and (run.commits["product"].iloc[1:] != 0).any()
    np.testing.assert_allclose(
        run.commits["central_energy"], run.commits["update_norm"] ** 2 / 2, rtol=1e-4
    )
    assert (
        run.commits["staleness"].iloc[-1] == trace.samples.query("version == 5")["staleness"].mean()
    )
    again = asyncsim.replay_ensemble(
        trace, policy_gradient, problem, seeds=[0, 1], learning_rate=[0.5, 0.1]
    )
    assert [one.config["hyperparameters"]["learning_rate"] for one in again] == [0.5, 0.1] * 2
    assert (
        again[0].params["theta"].tobytes()
        == replay(trace, method, problem).params["theta"].tobytes()
    )


def one_prompt(members):
    """Return the terms of the law of mixed groups, and all that a group may write, of one prompt
    and three actions.
    """
    problem = token_bandit(states=1, actions=3, features=3, tokens=1)
    prompt, length = jnp.array(0, jnp.int32), jnp.array(1, jnp.int32)
    actions = jnp.arange(3, dtype=jnp.int32)[:, None]

    def logs(theta):
        return jax.vmap(lambda action: problem.logp({"theta": theta}, prompt, action, length)[0])(
            actions
        )

    old, new = jnp.array([0.4, -0.3, 0.2]), jnp.array([-0.5, 0.6, 0.3])
    rewards = np.asarray(jax.vmap(lambda action: problem.reward(action, prompt))(actions), float)
    score = np.asarray(jax.jacobian(logs)(new))
    before, now = np.exp(np.asarray(logs(old))), np.exp(np.asarray(logs(new)))
    terms = {
        "gradient": (now * rewards) @ score,
        "covariance": (before * (rewards - before @ rewards)) @ score,
        "reward_gap": (before - now) @ rewards,
        "old_score": before @ score,
    }
    method = policy_gradient(baseline="group")

    def gradient(written):
        advantage = method.advantages(jnp.asarray(rewards[written]), jnp.zeros(written.shape, int))
        return np.einsum("gm,gmp->gp", np.asarray(advantage), score[written]) / members

    return terms, before, now, gradient


@pytest.mark.parametrize(("old", "exact"), [(1, False), (2, True), (3, True)])
def test_the_gradient_of_mixed_groups_by_enumeration(old, exact):
    """Sums over who is old and over all that is written equal the law."""
    members, share = 3, old / 3
    with jax.enable_x64(True):
        terms, before, now, gradient = one_prompt(members)
        written = np.array(list(itertools.product(range(3), repeat=members)))
        found = 0.0
        for is_old in itertools.product((0, 1), repeat=members):
            count = sum(is_old)
            chance = share**count * (1 - share) ** (members - count)
            if exact:
                chance = float(count == old) / math.comb(members, old)
            policies = np.where(np.array(is_old)[:, None], before, now)
            found = found + chance * np.prod(policies[np.arange(members), written], 1) @ gradient(
                written
            )
        law = formulas.mixed_group_gradient(members, share, **terms, exact=exact)
        np.testing.assert_allclose(found, law, rtol=0, atol=1e-10)
