"""Replay of traces with rollouts: real samples of old policies, and real updates on them.

An update takes the samples of its batch. Each token is written by the version that its slot had at
that token, and these versions wait in a ring until their last sample is trained. So generation and
update are one step of a compiled loop over updates, and no version is computed twice.

The random numbers of a sample depend on the run's seed and the sample's number alone: policies,
queues and rates are compared on the same prompts and draws.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
from jax.flatten_util import ravel_pytree

from asyncsim.base.errors import InputError, require_choice, require_count
from asyncsim.base.streams import Streams
from asyncsim.base.tracing import jax_settings
from asyncsim.clusters.laws import Constant
from asyncsim.clusters.rollouts import Rollouts
from asyncsim.methods.method import Visit
from asyncsim.methods.policy_gradient import PolicyGradient
from asyncsim.problems.policy import PolicyProblem
from asyncsim.replays.local import Constants
from asyncsim.replays.observing import columns, observe, require_recorders
from asyncsim.replays.pieces import in_turn
from asyncsim.replays.plan import purpose_key
from asyncsim.replays.recorders import Commit, Recorder
from asyncsim.replays.recording import Recording
from asyncsim.replays.run import Run
from asyncsim.replays.waves import allocate
from asyncsim.traces.trace import Trace

Array = jax.Array
#: Fresh samples that estimate the expected reward of a policy, where it is not known exactly.
_EVALUATION_SAMPLES = 1_000
#: Evaluations of a run, unless another number is asked for.
_EVALUATIONS = 20
PRECISIONS = ("float32", "float64")
#: Slots of a ring at least.
_FEWEST_SLOTS = 16
#: Columns of `Run.commits` that only these runs have.
OF_SAMPLES = ("reward", "weight", "age", "reward_q1", "reward_q2", "reward_q3", "reward_q4")


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
    commit, time, staleness
        The number of the update, its time (s) and the largest staleness of its samples.
    """

    sample: Any
    quantile: Any
    start: Any
    slot: Any
    write: Any
    commit: Any
    time: Any
    staleness: Any


class PolicyState(NamedTuple):
    """A replay between two updates."""

    params: Array  #: ``[parameters]``
    optimizer: Any
    ring: Any  #: versions that samples still need: the problem's tree, leaves with an axis of slots
    recorders: tuple[Any, ...]


def plan_updates(trace: Trace, problem: PolicyProblem, seed: int) -> tuple[Updates, int]:
    """Return the plan of a trace's updates, and the number of slots of the ring."""
    rollouts, tables = _rollouts(trace), trace.rollouts
    assert tables is not None
    samples = tables.samples
    trained = samples[samples["outcome"] == "trained"]
    trained = trained.sort_values(["version", "sample"], kind="stable")
    shape = len(trained) // rollouts.batch, rollouts.batch
    quantile = _quantiles(trained, rollouts.length, seed)
    tokens = np.asarray(jax.vmap(problem.length)(jnp.asarray(quantile)))
    versions = _token_versions(trained, tables.switches, tokens, problem.tokens)
    # Samples are in the order of their updates: each batch is a run of rows.
    update = np.repeat(np.arange(shape[0]), rollouts.batch)
    slot_of, slots = _ring(versions, update, shape[0])
    plan = Updates(
        sample=trained["sample"].to_numpy(np.int32).reshape(shape),
        quantile=quantile.reshape(shape),
        start=trained["read_version"].to_numpy(np.int32).reshape(shape),
        slot=slot_of[versions].astype(np.int32).reshape(*shape, -1),
        write=slot_of[1:].astype(np.int32),
        commit=np.arange(shape[0], dtype=np.int32),
        time=trace.accepted.frame["commit_time"].to_numpy(),
        staleness=trained["staleness"].to_numpy(np.int32).reshape(shape).max(1),
    )
    return plan, slots


def _rollouts(trace: Trace) -> Rollouts:
    assert trace.cluster is not None and trace.cluster.rollouts is not None
    return trace.cluster.rollouts


def _quantiles(trained: pd.DataFrame, law: Any, seed: int) -> np.ndarray:
    """Return the probability of a shorter sample; drawn uniformly where all are equally long."""
    if isinstance(law, Constant):
        # Equal lengths have no quantile; a draw by sample keeps prompts of every difficulty.
        streams = Streams(seed, "rollout quantile")
        draws = [streams.generator(sample).random() for sample in trained["sample"]]
        return np.array(draws)
    # A quantile of exactly 1 would be beyond the last class of prompts.
    return np.clip(law.cdf(trained["length"].to_numpy()), 0.0, np.nextafter(1.0, 0.0))


def _token_versions(
    trained: pd.DataFrame, switches: pd.DataFrame, tokens: np.ndarray, longest: int
) -> np.ndarray:
    """Return the version of each token, ``[samples, longest]``: the slot's at its begin."""
    versions = np.repeat(trained["read_version"].to_numpy()[:, None], longest, 1)
    place = pd.Series(np.arange(len(trained)), trained.index)
    amid = switches[switches["row"].isin(trained.index)]
    if amid.empty:
        return versions
    sample = place[amid["row"]].to_numpy()
    order = np.lexsort((amid["share"], sample))
    # The last switch before a token, of its own sample: a sample has the keys from twice its number
    # on, as shares are below 2.
    keys = (2 * sample + amid["share"].to_numpy())[order]
    row = np.arange(len(trained))[:, None]
    tokens_at = 2 * row + np.arange(longest) / tokens[:, None]
    last = np.searchsorted(keys, np.minimum(tokens_at, 2 * row + 1), "right") - 1
    belongs = (last >= 0) & (sample[order][last] == row)
    return np.where(belongs, amid["version"].to_numpy()[order][last], versions)


def _ring(versions: np.ndarray, update: np.ndarray, updates: int) -> tuple[np.ndarray, int]:
    """Return the slot of each version, and the number of slots.

    A version keeps its slot from the update that made it to the last update that needs it. Slot 0
    takes the versions that no sample needs.
    """
    last = np.full(updates + 1, -1)
    np.maximum.at(last, versions.ravel(), np.repeat(update, versions.shape[1]))
    needed = np.flatnonzero(last >= 0)
    slot_of = np.zeros(updates + 1, np.int64)
    slots, count = allocate(needed, last[needed])
    slot_of[needed] = 1 + slots
    return slot_of, 1 + count


def build_update(
    method: PolicyGradient,
    problem: PolicyProblem,
    group: int,
    unravel: Callable[[Array], Any],
    recorders: Sequence[Recorder] = (),
) -> Callable[..., tuple[PolicyState, Array]]:
    """Return the function that generates a batch, updates the policy and records the update.

    The update returns the new state and a number for each of ``columns(recorders)`` and
    `OF_SAMPLES`.
    """

    def generate(ring: Any, key: Array, sample: Array, quantile: Array, slot: Array) -> tuple:
        # By the sample's number, not by its place in a batch: queues train on the same draws.
        prompt_key, token_key = jax.random.split(jax.random.fold_in(key, sample))
        prompt = problem.prompt(prompt_key, quantile)
        length = problem.length(quantile)

        # Leaf by leaf: a gathered vector would be copied again.
        def version(position: Array) -> Any:
            return jax.tree.map(lambda leaf: leaf[slot[position]], ring)

        tokens, behaviour = problem.sample(version, token_key, prompt, length)
        return prompt, length, tokens, behaviour, problem.reward(tokens, prompt)

    def logp(params: Array, batch: tuple) -> Array:
        return jax.vmap(functools.partial(problem.logp, unravel(params)))(*batch)

    def update(
        state: PolicyState, planned: Updates, key: Array, rate: Array
    ) -> tuple[PolicyState, Array]:
        of_batch = planned.sample, planned.quantile, planned.slot
        prompt, length, tokens, behaviour, rewards = jax.vmap(
            functools.partial(generate, state.ring, key)
        )(*of_batch)
        rewards = rewards.astype(state.params.dtype)
        grouped = rewards.reshape(-1, group), planned.start.reshape(-1, group)
        advantage = method.advantages(*grouped).reshape(-1)
        present = jnp.arange(problem.tokens, dtype=jnp.int32) < length[:, None]
        token_count = jnp.sum(present).astype(rewards.dtype)
        proximal = None
        if method.inner_steps > 1:  # else the only step starts at the proximal policy
            proximal = logp(state.params, (prompt, tokens, length))
        data = (prompt, tokens, length), behaviour, proximal, advantage, present

        def surrogate(params: Array, part: tuple) -> tuple[Array, tuple[Array, Array]]:
            batch, behaviour, proximal, advantage, present = part
            current = logp(params, batch)
            loss, weight = method.loss(current, behaviour, proximal, advantage, present)
            proximal = jax.lax.stop_gradient(current) if proximal is None else proximal
            age = jnp.sum(jnp.where(present, behaviour - proximal, 0.0))
            return loss, (jnp.sum(weight) / jnp.sum(present).astype(weight.dtype), age)

        def inner(carry: tuple, part: tuple) -> tuple:
            params, optimizer = carry
            (loss, numbers), gradient = jax.value_and_grad(surrogate, has_aux=True)(params, part)
            step, optimizer = method.optimizer.update(gradient, optimizer, params)
            return (params + rate.astype(params.dtype) * step, optimizer), (loss, *numbers)

        # Inner steps take equal parts of the batch, in its order.
        parts = jax.tree.map(
            lambda leaf: leaf.reshape(method.inner_steps, -1, *leaf.shape[1:]), data
        )
        steps: Any = jax.lax.scan(inner, (state.params, state.optimizer), parts)
        (params, optimizer), (loss, weight, age) = steps
        ring = jax.tree.map(
            lambda leaf, new: jax.lax.dynamic_update_index_in_dim(leaf, new, planned.write, 0),
            state.ring,
            unravel(params),
        )
        commit = _commit(planned, loss.mean(), state.params, params, optimizer)
        observed, numbers = observe(recorders, state.recorders, commit)
        # An empty quartile gives 0 / 0: its mean reward is undefined.
        quartile = jnp.minimum((planned.quantile * 4).astype(jnp.int32), 3)
        counts = jnp.zeros(4, rewards.dtype).at[quartile].add(1.0)
        by_length = jnp.zeros(4, rewards.dtype).at[quartile].add(rewards) / counts
        of_samples = jnp.r_[rewards.mean(), weight.mean(), age.sum() / token_count, by_length]
        return PolicyState(params, optimizer, ring, observed), jnp.r_[numbers, of_samples]

    return update


def _commit(planned: Updates, loss: Array, before: Array, after: Array, optimizer: Any) -> Commit:
    """Return an update as recorders see it: the learner reads the newest version and sends its
    step.
    """
    one, zero, step = jnp.int32(1), jnp.int32(0), after - before
    visit = Visit(
        staleness=planned.staleness,
        worker=zero,
        worker_step=planned.commit,
        commit=planned.commit,
        time=planned.time,
        local_steps=one,
        completes=jnp.array(True),
        place=zero,
        messages=one,
        workers=one,
    )
    return Commit(
        visit=visit,
        loss=loss,
        read=before,
        start=before,
        update=step,
        message=step,
        diagnostics={},
        origin=before,
        before=before,
        central=after,
        step=step,
        worker=(),
        memory=(),
        server=optimizer,
        proxy=(),
    )


class Programs(NamedTuple):
    """The compiled functions of some members; each leading axis is the axis of the members."""

    begin: Callable[..., Any]
    advance: Callable[..., Any]
    evaluate: Callable[..., Any]
    unravel: Callable[[Array], Any]


@functools.lru_cache(maxsize=64)
def _programs(
    method: Any,
    problem: PolicyProblem,
    group: int,
    recorders: tuple[Recorder, ...],
    precision: str,
) -> Programs:
    """Return the functions that replay: one compilation for all rates, seeds and traces alike.

    The rate is an argument of the program; the method has the rate 1 and no settings.
    """
    dtype = jnp.dtype(precision)

    def initial(key: Array) -> Any:
        return jax.tree.map(lambda leaf: jnp.asarray(leaf, dtype), problem.init(key))

    unravel = ravel_pytree(initial(purpose_key(0, "initial parameters")))[1]
    update = build_update(method, problem, group, unravel, recorders)

    def begin(key: Array, slots: int) -> PolicyState:
        params = ravel_pytree(initial(key))[0]
        ring = jax.tree.map(lambda leaf: jnp.array([leaf] * slots), unravel(params))
        states = tuple(recorder.init(method, params) for recorder in recorders)
        return PolicyState(params, method.optimizer.init(params), ring, states)

    names = (*columns(recorders), *OF_SAMPLES)
    advance = in_turn(
        lambda numbers: (
            lambda state, data, key, planned: update(state, planned, key, numbers["rate"])
        ),
        lambda state, planned: jnp.zeros((len(planned.write), len(names)), state.params.dtype),
        jax.vmap,
        None,
    )
    return Programs(
        jax.jit(jax.vmap(begin, (0, None)), static_argnums=1),
        advance,
        jax.jit(jax.vmap(build_value(problem, unravel))),
        unravel,
    )


def replay_members(
    trace: Trace,
    method: PolicyGradient,
    problem: PolicyProblem,
    seeds: Sequence[int] = (0,),
    rates: Sequence[float] | None = None,
    precision: str = "float32",
    stops: np.ndarray | None = None,
    record: Sequence[Recorder] = (),
) -> list[Run]:
    """Replay a trace with rollouts for several seeds and learning rates, in one compiled program.

    Parameters
    ----------
    trace : Trace
        Of a cluster with ``rollouts`` and one learner.
    method : PolicyGradient
    problem : PolicyProblem
    seeds : sequence of int
        Of the initial parameters, the prompts and the samples, one for each run.
    rates : sequence of float, optional
        A learning rate for each run; by default the method's.
    precision : {"float32", "float64"}
    stops : int array, optional
        The updates after which the policy is evaluated; by default 20.
    record : sequence of Recorder
        Those that look at no single weights.

    Returns
    -------
    list of Run
        ``commits`` has a row per update: ``staleness``, the mean of its samples; ``loss``, the
        surrogate whose gradient is taken; the mean ``reward`` of its batch, and of the quartiles of
        length (``reward_q1`` the shortest); the mean ``weight`` of a token; ``age``, the mean of
        log behaviour less log policy. ``evaluations`` has ``reward``: the expected reward.

    Raises
    ------
    InputError
        See `require_rollouts`.
    """
    require_choice("precision", precision, PRECISIONS)
    recorders = require_rollouts(trace, method, problem, record)
    for seed in seeds:
        require_count("seed", seed, 0)
    with jax.enable_x64(precision == "float64"):
        dtype = jnp.dtype(precision)
        hashable: Any = ()
        rateless: Any = method._replace(hyperparameters=hashable, learning_rate=1.0)
        programs = _programs(rateless, problem, _rollouts(trace).group, recorders, precision)
        plan, slots = plan_updates(trace, problem, trace.seed)
        # Few sizes, so that traces share programs.
        slots = max(_FEWEST_SLOTS, 1 << (slots - 1).bit_length())
        plan = plan._replace(quantile=plan.quantile.astype(dtype), time=plan.time.astype(dtype))
        count = len(plan.write)
        if stops is None:
            stops = np.linspace(0, count, 1 + min(_EVALUATIONS, count)).astype(int)
        stops = np.unique(np.r_[0, stops, count])
        keys = jnp.stack([purpose_key(seed, "samples") for seed in seeds])
        states = programs.begin(
            jnp.stack([purpose_key(seed, "initial parameters") for seed in seeds]), slots
        )
        rates = [method.learning_rate] * len(seeds) if rates is None else list(rates)
        constants = Constants(keys, (), {"rate": jnp.asarray(rates, dtype)})
        names = (*columns(recorders), *OF_SAMPLES)
        recordings = [Recording(trace.accepted, (), names) for _ in seeds]
        _evaluate(programs, states, keys, recordings)
        room = 1 << (int(np.diff(stops).max()) - 1).bit_length()
        for first, last in itertools.pairwise(stops):
            padded = np.minimum(np.arange(first, first + room), count - 1)
            part = Updates(*(leaf[padded] for leaf in plan))
            states, numbers = programs.advance(states, (), constants, part, np.int32(last - first))
            for recording, rows in zip(recordings, np.asarray(numbers), strict=True):
                if recording.diverged_at is None:
                    recording.take(np.array([first, last]), rows[None, : last - first], ())
            _evaluate(programs, states, keys, recordings)
        config = {"precision": precision, "attack": None, **jax_settings()}
        runs = []
        for member, recording in enumerate(recordings):
            hyperparameters = {**method.hyperparameters, "learning_rate": rates[member]}
            rated: Any = method._replace(
                learning_rate=rates[member], hyperparameters=hyperparameters
            )
            params = jax.tree.map(np.asarray, programs.unravel(states.params[member]))
            learnt: Any = problem
            run = recording.run(rated, learnt, params, {"seed": seeds[member], **config})
            run.commits["staleness"] = _mean_staleness(trace)[: len(run.commits)]
            runs.append(run)
        return runs


def _evaluate(
    programs: Programs, states: Any, keys: Array, recordings: Sequence[Recording]
) -> None:
    """Record the expected rewards of the members that have not diverged."""
    for recording, value in zip(
        recordings, np.asarray(programs.evaluate(states.params, keys)), strict=True
    ):
        if recording.diverged_at is None:
            recording.evaluated({"reward": float(value)})


def _mean_staleness(trace: Trace) -> np.ndarray:
    """Return the mean staleness of the samples of each update."""
    samples = trace.samples[trace.samples["outcome"] == "trained"]
    return samples.groupby("version")["staleness"].mean().to_numpy()


def require_rollouts(trace: Trace, method: Any, problem: Any, record: Any) -> tuple[Recorder, ...]:
    """Return the recorders; raise InputError unless a policy gradient can be replayed on a
    trace.
    """
    if not isinstance(trace, Trace) or trace.rollouts is None:
        name = getattr(method, "name", None) if isinstance(method, PolicyGradient) else None
        subject = (
            f"method = {name!r}" if name else f"problem = {getattr(problem, 'name', problem)!r}"
        )
        raise InputError(
            f"{subject}: needs samples; simulate a cluster with "
            "rollouts=asyncsim.Rollouts(slots=..., length=..., batch=...)"
        )
    if not isinstance(method, PolicyGradient):
        raise InputError(
            f"method = {getattr(method, 'name', method)!r}: this trace has rollouts, whose samples "
            "need "
            "a policy gradient; give methods.policy_gradient()"
        )
    if not isinstance(problem, PolicyProblem):
        raise InputError(
            f"problem = {getattr(problem, 'name', problem)!r}: has no policy that writes samples; "
            "give "
            "problems.token_bandit(), problems.arithmetic() or a PolicyProblem"
        )
    if trace.workers > 1:
        raise InputError(
            f"workers = {trace.workers}: a replay with rollouts has one learner; give workers=1"
        )
    rollouts = _rollouts(trace)
    if rollouts.batch // rollouts.group % method.inner_steps:
        raise InputError(
            f"inner_steps = {method.inner_steps}: does not divide the "
            f"{rollouts.batch // rollouts.group} "
            "groups of a batch; give a divisor"
        )
    recorders = require_recorders(record)
    for recorder in recorders:
        if recorder.look is not None:
            raise InputError(
                "record: a replay with rollouts looks at no single weights; give recorders without "
                "look"
            )
        if clashes := set(recorder.columns) & set(OF_SAMPLES):
            raise InputError(f"record: {min(clashes)!r} is a column of every replay with rollouts")
    return recorders


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
