"""Replay of traces with rollouts: real samples of old policies, and real updates on them.

An update takes the samples of its batch. Each token is written by the version that its slot had at
that token, and these versions wait in a ring until their last sample is trained. So generation and
update are one step of a compiled loop over updates, and no version is computed twice.

The random numbers of a sample depend on the run's seed and the sample's number alone: policies,
queues and rates are compared on the same prompts and draws.
"""

import functools
from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
from jax.flatten_util import ravel_pytree

from asyncsim.base.errors import InputError, require_choice, require_count
from asyncsim.base.streams import Streams
from asyncsim.clusters.laws import Constant
from asyncsim.methods.policy_gradient import PolicyGradient
from asyncsim.problems.policy import PolicyProblem
from asyncsim.replays.plan import purpose_key
from asyncsim.replays.run import Run
from asyncsim.traces.trace import Trace

Array = jax.Array
#: Fresh samples that estimate the value of a policy, where it is not known exactly.
_EVALUATION_SAMPLES = 1_000
#: Evaluations of a run, unless another number is asked for.
_EVALUATIONS = 20
PRECISIONS = ("float32", "float64")


class Updates(NamedTuple):
    """The plan of all updates; leaves with a leading axis of updates.

    Attributes
    ----------
    sample : Int[Array, "updates batch"]
        The samples of each batch, group by group.
    quantile : Float[Array, "updates batch"]
    start : Int[Array, "updates batch"]
        The version that each sample started with.
    slot : Int[Array, "updates batch tokens"]
        The slot of the ring with the version of each token.
    write : Int[Array, "updates"]
        The slot that the new version goes to.
    """

    sample: Any
    quantile: Any
    start: Any
    slot: Any
    write: Any


class PolicyState(NamedTuple):
    """A replay between two updates."""

    params: Array  #: ``[parameters]``
    optimizer: Any
    ring: Array  #: versions that samples still need, ``[slots, parameters]``


def plan_updates(trace: Trace, problem: PolicyProblem, seed: int) -> tuple[Updates, int]:
    """Return the plan of a trace's updates, and the number of slots of the ring."""
    assert trace.cluster is not None and trace.cluster.rollouts is not None
    rollouts, tables = trace.cluster.rollouts, trace.rollouts
    assert tables is not None
    samples = tables.samples
    trained = samples[samples["outcome"] == "trained"]
    trained = trained.sort_values(["version", "sample"], kind="stable")
    shape = len(trained) // rollouts.batch, rollouts.batch
    quantile = _quantiles(trained, rollouts.length, seed)
    tokens = np.asarray(jax.vmap(problem.length)(jnp.asarray(quantile)))
    versions = _token_versions(trained, tables.switches, tokens, problem.tokens)
    update = np.repeat(np.arange(shape[0]), rollouts.batch)
    slot_of, write, slots = _ring(versions, update, shape[0])
    plan = Updates(
        sample=trained["sample"].to_numpy(np.int32).reshape(shape),
        quantile=quantile.reshape(shape),
        start=trained["read_version"].to_numpy(np.int32).reshape(shape),
        slot=slot_of[versions].astype(np.int32).reshape(*shape, -1),
        write=write.astype(np.int32),
    )
    return plan, slots


def _quantiles(trained: pd.DataFrame, law: Any, seed: int) -> np.ndarray:
    """Return the probability of a shorter sample; drawn uniformly where all are equally long."""
    if isinstance(law, Constant):
        streams = Streams(seed, "rollout quantile")
        draws = [streams.generator(sample).random() for sample in trained["sample"]]
        return np.array(draws)
    return np.clip(law.cdf(trained["length"].to_numpy()), 0.0, np.nextafter(1.0, 0.0))


def _token_versions(
    trained: pd.DataFrame, switches: pd.DataFrame, tokens: np.ndarray, most: int
) -> np.ndarray:
    """Return the version of each token, ``[samples, most]``: that of the slot at its begin."""
    versions = np.repeat(trained["read_version"].to_numpy()[:, None], most, 1)
    place = pd.Series(np.arange(len(trained)), trained.index)
    amid = switches[switches["row"].isin(trained.index)]
    begin = np.arange(most) / tokens[:, None]
    for row, share, version in amid.itertuples(index=False):
        at = place[row]
        versions[at, begin[at] >= share] = version
    return versions


def _ring(versions: np.ndarray, update: np.ndarray, updates: int) -> tuple[np.ndarray, np.ndarray, int]:
    """Return the slot of each version, the slot that each update writes to, and their number.

    A version keeps its slot from the update that made it to the last update that needs it. Slot 0
    takes the versions that no sample needs.
    """
    last = np.full(updates + 1, -1)
    np.maximum.at(last, versions.ravel(), np.repeat(update, versions.shape[1]))
    slot_of = np.zeros(updates + 1, np.int64)
    free: list[int] = []
    busy: list[tuple[int, int]] = []  # last use, slot
    slots = 1
    for version in range(updates + 1):
        while busy and busy[0][0] < version:  # version v is written at the end of update v - 1
            heappush(free, heappop(busy)[1])
        if last[version] < 0:
            continue
        if not free:
            heappush(free, slots)
            slots += 1
        slot_of[version] = heappop(free)
        heappush(busy, (last[version], slot_of[version]))
    return slot_of, slot_of[1:], slots


def build_update(
    method: PolicyGradient, problem: PolicyProblem, group: int, unravel: Callable[[Array], Any]
) -> Callable[..., tuple[PolicyState, dict[str, Array]]]:
    """Return the function that generates a batch, updates the policy and records the update."""

    def generate(ring: Array, key: Array, sample: Array, quantile: Array, slot: Array) -> tuple:
        prompt_key, token_key = jax.random.split(jax.random.fold_in(key, sample))
        prompt = problem.prompt(prompt_key, quantile)
        length = problem.length(quantile)
        tokens, behaviour = problem.sample(
            lambda position: unravel(ring[slot[position]]), token_key, prompt, length
        )
        return prompt, length, tokens, behaviour, problem.reward(tokens, prompt).astype(ring.dtype)

    def logp(params: Array, batch: tuple) -> Array:
        return jax.vmap(functools.partial(problem.logp, unravel(params)))(*batch)

    def update(
        state: PolicyState, planned: Updates, key: Array, rate: Array
    ) -> tuple[PolicyState, dict[str, Array]]:
        of_batch = planned.sample, planned.quantile, planned.slot
        prompt, length, tokens, behaviour, rewards = jax.vmap(
            functools.partial(generate, state.ring, key)
        )(*of_batch)
        grouped = rewards.reshape(-1, group), planned.start.reshape(-1, group)
        advantage = method.advantages(*grouped).reshape(-1)
        present = jnp.arange(problem.tokens, dtype=jnp.int32) < length[:, None]
        written = jnp.sum(present).astype(rewards.dtype)
        proximal = logp(state.params, (prompt, tokens, length))
        data = (prompt, tokens, length), behaviour, proximal, advantage, present

        def surrogate(params: Array, part: tuple) -> tuple[Array, Array]:
            batch, behaviour, proximal, advantage, present = part
            now = logp(params, batch)
            spread = jnp.broadcast_to(advantage[:, None], now.shape)
            given = jax.lax.stop_gradient(now), behaviour, proximal, spread, present
            weight = jnp.where(present, jax.vmap(method.correction.weight)(*given), 0.0)
            weight = jax.lax.stop_gradient(weight)
            return -jnp.mean(jnp.sum(weight * spread * now, 1)), jnp.sum(weight) / jnp.sum(present).astype(weight.dtype)

        def inner(carry: tuple, part: tuple) -> tuple:
            params, optimizer = carry
            gradient, weight = jax.grad(surrogate, has_aux=True)(params, part)
            step, optimizer = method.optimizer.update(gradient, optimizer, params)
            return (params + rate.astype(params.dtype) * step, optimizer), weight

        parts = jax.tree.map(
            lambda leaf: leaf.reshape(method.inner_steps, -1, *leaf.shape[1:]), data
        )
        (params, optimizer), weight = jax.lax.scan(inner, (state.params, state.optimizer), parts)
        ring = state.ring.at[planned.write].set(params)
        quartile = jnp.minimum((planned.quantile * 4).astype(jnp.int32), 3)
        counts = jnp.zeros(4, rewards.dtype).at[quartile].add(1.0)
        by_length = jnp.zeros(4, rewards.dtype).at[quartile].add(rewards) / counts
        recorded = {
            "reward": rewards.mean(),
            "update_norm": jnp.linalg.norm(params - state.params),
            "weight": weight.mean(),
            "age": jnp.sum(jnp.where(present, behaviour - proximal, 0.0)) / written,
            **{f"reward_q{number + 1}": by_length[number] for number in range(4)},
        }
        return PolicyState(params, optimizer, ring), recorded

    return update


def replay_samples(
    trace: Trace,
    method: PolicyGradient,
    problem: PolicyProblem,
    seed: int = 0,
    *,
    precision: str = "float32",
    evaluations: int | None = None,
) -> Run:
    """Replay a trace with rollouts: generate the trained samples, and update the policy on them.

    Parameters
    ----------
    trace : Trace
        Of a cluster with ``rollouts`` and one learner.
    method : PolicyGradient
    problem : PolicyProblem
    seed : int
        Of the initial parameters, the prompts and the samples.
    precision : {"float32", "float64"}
    evaluations : int, optional
        Evaluations of the policy, besides the one at the start; 20 by default.

    Returns
    -------
    Run
        ``commits`` has a row per update: the mean ``reward`` of its batch, and of the quartiles of
        length (``reward_q1`` the shortest); the mean ``weight`` of a token; ``age``, the mean of
        log behaviour less log policy. ``evaluations`` has the ``value``: the expected reward.

    Raises
    ------
    InputError
        A trace without samples, or with several learners; a batch whose groups are no multiple of
        the inner steps.
    """
    return replay_members(trace, method, problem, [seed], None, precision, evaluations)[0]


def replay_members(
    trace: Trace,
    method: PolicyGradient,
    problem: PolicyProblem,
    seeds: list[int],
    rates: list[float] | None = None,
    precision: str = "float32",
    evaluations: int | None = None,
) -> list[Run]:
    """Replay one trace for several seeds and learning rates at once, in one compiled program.

    ``rates`` has one learning rate per seed; by default all have the method's.
    """
    require_rollouts(trace, method)
    for seed in seeds:
        require_count("seed", seed, 0)
    with jax.enable_x64(require_choice("precision", precision, PRECISIONS) == "float64"):
        dtype = jnp.dtype(precision)
        cluster = trace.cluster
        assert cluster is not None and cluster.rollouts is not None
        plan, slots = plan_updates(trace, problem, trace.seed)
        plan = plan._replace(quantile=plan.quantile.astype(dtype))
        count = len(plan.write)
        stops = np.unique(np.linspace(0, count, 1 + min(evaluations or _EVALUATIONS, count)).astype(int))
        keys = jnp.stack([purpose_key(seed, "samples") for seed in seeds])
        tree = problem.init(purpose_key(seeds[0], "initial parameters"))
        tree = jax.tree.map(lambda leaf: jnp.asarray(leaf, dtype), tree)
        unravel = ravel_pytree(tree)[1]
        update = build_update(method, problem, cluster.rollouts.group, unravel)

        def begin(seed_key: Array) -> PolicyState:
            initial = jax.tree.map(lambda leaf: jnp.asarray(leaf, dtype), problem.init(seed_key))
            params = ravel_pytree(initial)[0]
            ring = jnp.broadcast_to(params, (slots, *params.shape))
            return PolicyState(params, method.optimizer.init(params), jnp.array(ring))

        def advance(state: PolicyState, key: Array, rate: Array, part: Updates) -> tuple:
            return jax.lax.scan(
                lambda state, planned: update(state, planned, key, rate), state, part
            )

        advance_all = jax.jit(jax.vmap(advance, in_axes=(0, 0, 0, None)), donate_argnums=0)
        value = build_value(problem, unravel)
        states = jax.jit(jax.vmap(begin))(
            jnp.stack([purpose_key(seed, "initial parameters") for seed in seeds])
        )
        rate = jnp.asarray(rates or [method.learning_rate] * len(seeds), dtype)
        evaluate = jax.jit(jax.vmap(value))
        values, recorded = [np.asarray(evaluate(states.params, keys))], []
        for first, last in zip(stops[:-1], stops[1:], strict=True):
            part = jax.tree.map(lambda leaf: leaf[first:last], plan)
            states, numbers = advance_all(states, keys, rate, part)
            recorded.append(jax.tree.map(np.asarray, numbers))
            values.append(np.asarray(evaluate(states.params, keys)))
        return [
            _run(
                trace,
                method._replace(learning_rate=float(rate[member])),
                problem,
                seeds[member],
                precision,
                stops,
                [value[member] for value in values],
                {name: np.concatenate([part[name][member] for part in recorded]) for name in recorded[0]},
                jax.tree.map(np.asarray, unravel(states.params[member])),
            )
            for member in range(len(seeds))
        ]


def require_rollouts(trace: Trace, method: PolicyGradient) -> None:
    """Raise InputError unless a policy gradient can be replayed on a trace."""
    if trace.rollouts is None or trace.cluster is None or trace.cluster.rollouts is None:
        raise InputError(
            f"method = {method.name!r}: needs samples; simulate a cluster with "
            "rollouts=asyncsim.Rollouts(slots=..., length=..., batch=...)"
        )
    if trace.workers > 1:
        raise InputError(
            f"workers = {trace.workers}: a replay with rollouts has one learner; give workers=1"
        )
    rollouts = trace.cluster.rollouts
    if rollouts.batch // rollouts.group % method.inner_steps:
        raise InputError(
            f"inner_steps = {method.inner_steps}: does not divide the {rollouts.batch // rollouts.group} "
            "groups of a batch; give a divisor"
        )


def build_value(problem: PolicyProblem, unravel: Callable[[Array], Any]) -> Callable[..., Array]:
    """Return the function that evaluates a policy: exactly, or by fresh samples."""

    def value(params: Array, key: Array) -> Array:
        tree = unravel(params)
        if problem.value is not None:
            return problem.value(tree)

        def reward(number: Array) -> Array:
            drawn = jax.random.split(jax.random.fold_in(jax.random.fold_in(key, 2**31), number), 3)
            quantile = jax.random.uniform(drawn[0], dtype=params.dtype)
            prompt = problem.prompt(drawn[1], quantile)
            tokens, _ = problem.sample(lambda _: tree, drawn[2], prompt, problem.length(quantile))
            return problem.reward(tokens, prompt)

        return jax.vmap(reward)(jnp.arange(_EVALUATION_SAMPLES, dtype=jnp.int32)).mean()

    return value


def _run(
    trace: Trace,
    method: PolicyGradient,
    problem: PolicyProblem,
    seed: int,
    precision: str,
    stops: np.ndarray,
    values: list[Any],
    recorded: dict[str, np.ndarray],
    params: Any,
) -> Run:
    """Return the run of a replay; it ends at the first update that is not finite."""
    frame = trace.accepted.frame
    commits = frame[["commit", "commit_time", "worker"]].assign(worker_step=trace.worker_step)
    samples = trace.samples[trace.samples["outcome"] == "trained"]
    staleness = samples.groupby("version")["staleness"].mean()
    commits = commits.assign(staleness=staleness.to_numpy(), **recorded)
    broken = np.flatnonzero(~np.isfinite(recorded["update_norm"]))
    diverged = int(broken[0]) if len(broken) else None
    if diverged is not None:
        commits = commits.iloc[: diverged + 1]
    times = np.r_[0.0, frame["commit_time"].to_numpy()][stops]
    evaluations = pd.DataFrame(
        {"commit": stops, "commit_time": times, "worker_step": stops, "value": np.array(values)}
    )
    if diverged is not None:
        evaluations = evaluations[evaluations["commit"] <= diverged]
    config = {
        "seed": seed,
        "precision": precision,
        "method": {"name": method.name, **method.hyperparameters},
        "problem": {"name": problem.name, **problem.config},
        "cluster": trace.cluster and trace.cluster.to_dict(),
    }
    return Run(commits, evaluations, pd.DataFrame(), params, diverged, config)
