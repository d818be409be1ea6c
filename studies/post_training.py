"""Asynchronous RL post-training: queues and corrections by time, staleness and reward.

For each queue between the slots that generate samples and the learner: the time of an update, who
is busy, how stale samples are, and which samples are lost. A small policy is then trained on these
very samples with each correction, at the best of its learning rates. Prints a table of queues, a
ranking by the time to a reward and a verdict; writes these and the laws of staleness as tables, and
figures.

With --recording FILE, a log of a real system as asyncsim check-lag reads it, its slots, lengths,
groups, batches and update times replace the options.
"""

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import optax
import pandas as pd

from asyncsim.base.calls import called
from asyncsim.base.console import number_text, over_seeds
from asyncsim.base.errors import InputError, require_count, require_number
from asyncsim.calibration.rollouts import calibrate_rollouts
from asyncsim.clusters.cluster import Cluster
from asyncsim.clusters.laws import Law, as_law, scaled
from asyncsim.clusters.rollouts import Rollouts, as_queue
from asyncsim.methods.policy_gradient import PolicyGradient, policy_gradient
from asyncsim.problems import POLICY_PROBLEMS, PolicyProblem
from asyncsim.replays.post_training import replay_members
from asyncsim.simulation.simulate import simulate
from asyncsim.study import results
from asyncsim.study.columns import Column, Columns, titled
from asyncsim.study.config import JobOptions, check_values
from asyncsim.study.entries import entry_of, from_file
from asyncsim.study.finished import present, read
from asyncsim.study.jobs import Job, Result, Tables, executor_of, measurement, run_jobs
from asyncsim.study.loading import own_file
from asyncsim.study.ranking import (
    Measure,
    at_the_edge,
    grid,
    ranked,
    ranked_parts,
    spread,
    tuned,
    verdict,
)
from asyncsim.study.target import check_rates, time_to_target
from asyncsim.traces.samples import binding_limit
from asyncsim.traces.trace import Trace

#: Files beside the summary of runs: of the jobs, and of the conclusion.
CLOCKS, STALENESS, EVALUATIONS, SPLIT = (
    f"{name}.csv" for name in ("clocks", "staleness", "evaluations", "split")
)
QUEUES, REWARDS, CURVES = (f"{name}.csv" for name in ("queues", "rewards", "curves"))
_TIME = Measure("time_to_target")
#: The columns that name a run of each seed; rewards by the quartile of length.
_KEYS = ["queue", "correction", "learning_rate"]
_QUARTILES = [f"reward_q{part}" for part in range(1, 5)]
_LIMITS = {
    "slots": "slots bind",
    "learner": "learner binds",
    "both": "both are always busy",
    "queue": "queue binds",
}
#: The columns of the printed table of queues, and of the divisions of accelerators.
_OF_CLOCK = (
    Column("update_time", "s an update"),
    "learner_busy",
    "slots_busy",
    Column("staleness_mean", "staleness"),
    Column("staleness_max", "largest"),
    Column("staleness_tokens_mean", "by tokens"),
    Column("lost_share", "lost"),
    Column("length_started", "length (s)"),
    Column("length_trained", "trained (s)"),
    "limit",
)
_OF_SPLIT = ("queue", "generating", "training", *_OF_CLOCK[:4], "limit")
_LEGEND = (
    "staleness, largest: of samples, by the version at their start; by tokens: mean, by the "
    "version that wrote each token\nlost: share of finished or cancelled samples that were never "
    "trained; length, trained: means of started and of trained samples"
)
#: Of the end of a run, over which rewards by length are averaged.
_LATE = 0.2
#: Options that a recording replaces, that it lacks, and of the training alone.
_OF_RECORDING = ("slots", "length", "train", "group", "batch")
_OF_SLOTS = ("consume", "submit", "updates", "prefill", "transfer")
_OF_TRAINING = ("baseline", "inner_steps", "optimizer", "problem", "tune", "target", "by_length")
#: Evaluations after the first one that meets the target at which it must still be met.
_HOLD = 1
#: One object, so that runs share programs.
_ADAM = optax.adam(1.0)


@dataclass(frozen=True)
class Config(JobOptions):
    """Options of the study of post-training."""

    slots: int = 64
    """Samples that are generated at once; with --split those of the --accelerators."""
    length: str = "lognormal(mean=1, cv=0.9)"
    """Law of the seconds that a sample takes."""
    train: str = "constant(0.4)"
    """Law of the seconds of an update on a batch; with --split those of the --accelerators."""
    group: int = 8
    """Samples of one prompt."""
    batch: int = 32
    """Samples of an update."""
    submit: Literal["rollout", "group", "batch"] = "rollout"
    """What a free slot begins."""
    consume: Literal["finished", "started"] = "finished"
    """Order in which groups reach the learner."""
    updates: Literal["start", "in_flight", "abort_and_resume"] = "in_flight"
    """When a slot takes up a new version."""
    prefill: float = 0.0
    """Seconds to read a second's worth of a sample again after a new version; not with --updates
    start.
    """
    transfer: str = "constant(0)"
    """Law of the seconds from an update to the arrival of its version at the slots."""
    queues: tuple[str, ...] = (
        "pace(0)",
        "pace(1)",
        "pace(4)",
        "drop_oldest(1)",
        "discard(2)",
        "keep",
    )
    """Queues to compare: pace(eta), drop_oldest(batches), discard(limit), keep."""
    failures: tuple[str, ...] = ()
    """What breaks: "crash(every=exponential(100), lasts=5, on=slots)"; pause and slow as well;
    on=slots or learners.
    """
    recording: Path | None = None
    """A log of rollouts, parquet or CSV, in the place of --slots, --length, --train, --group and
    --batch.
    """
    more_slots: int = 0
    """Slots besides those of the --recording, or of --slots."""
    split: int = 0
    """Accelerators to divide between rollouts and training, in all ways, by time alone; 0: no such
    table.
    """
    accelerators: tuple[int, int] = (1, 1)
    """Accelerators for rollouts and for training that the --recording ran on, or that --slots and
    --train describe; --split starts from these."""

    corrections: tuple[str, ...] = ("none", "truncated(2)", "ppo(0.2)", "decoupled(0.2)")
    """Corrections for staleness: none, importance, truncated, cispo, icepop, ppo, decoupled, gspo,
    with arguments; your own weight of a token: FILE.py:FUNCTION. None given: clocks alone."""
    baseline: Literal["group", "leave_one_out", "version_group", "none"] = "group"
    """What is subtracted from a reward."""
    inner_steps: int = 1
    """Steps of an update, each on an equal part of its batch."""
    optimizer: Literal["sgd", "adam"] = "sgd"
    """Optimizer of the learner."""
    problem: str = "token_bandit"
    """What is learnt: token_bandit or arithmetic, with arguments: "arithmetic(2, partial=True)";
    your own PolicyProblem: FILE.py:FUNCTION."""
    steps: int = 200
    """Updates of a run."""
    seeds: int = 3
    """Number of seeds: 0, 1, ... All queues and corrections have the same lengths and prompts."""
    tune: tuple[float, ...] = (0.1, 0.3, 1.0, 3.0)
    """Learning rates to try for every queue and correction, each of which counts at its best."""
    target: float | None = None
    """Expected reward that is to be reached. None: half way from the start to the best end of a
    run.
    """
    by_length: bool = False
    """Show the reward of each quartile of length: q1 the shortest samples."""

    def check(self) -> None:
        """Check the options."""
        super().check()
        if self.recording is not None:
            if not self.recording.is_file():
                raise InputError(
                    f"recording = {str(self.recording)!r}: there is no such file; give a log, "
                    "parquet or CSV"
                )
            self.say_ignored(_OF_RECORDING, "beside --recording")
        if not self.corrections:
            self.say_ignored(_OF_TRAINING, "without --corrections")
        if not self.split:
            self.say_ignored(("accelerators",), "without --split")
        require_count("steps", self.steps)
        require_count("split", self.split, 0, 1000)
        require_count("more_slots", self.more_slots, minimum=0)
        if self.target is not None:
            require_number("target", self.target)
        for count in self.accelerators:
            require_count("accelerators", count)
        if self.split == 1:
            raise InputError("split = 1: one accelerator cannot be divided; give 2 or more")
        check_values("queues", self.queues)
        if self.corrections:
            check_values("corrections", self.corrections)
        check_rates(self.tune)
        for queue in self.queues:
            as_queue("queues", queue)
        for correction in self.corrections:
            self.method(correction)
        groups = self.cluster(self.queues[0]).rollouts
        assert groups is not None
        if groups.batch // groups.group % self.inner_steps:
            raise InputError(
                f"inner_steps = {self.inner_steps}: does not divide the groups of a batch; give a "
                "divisor"
            )

    def method(self, correction: str) -> PolicyGradient:
        """Return the method with a correction, at a learning rate of one."""
        optimizer = None if self.optimizer == "sgd" else _ADAM
        return policy_gradient(1.0, _weight(correction), self.baseline, self.inner_steps, optimizer)

    def cluster(self, queue: str) -> Cluster:
        """Return the cluster with a queue."""
        if self.recording is not None:
            cluster = calibrate_rollouts(self.recording)
        else:
            length = as_law("length", self.length)
            rollouts = Rollouts(self.slots, length, group=self.group, batch=self.batch)
            cluster = Cluster(1, self.train, rollouts=rollouts)
        assert cluster.rollouts is not None
        rollouts = dataclasses.replace(
            cluster.rollouts,
            **{name: getattr(self, name) for name in _OF_SLOTS},
            slots=cluster.rollouts.slots + self.more_slots,
            queue=queue,
        )
        return dataclasses.replace(cluster, rollouts=rollouts, failures=self.failures)


def run(config: Config) -> Result:
    """Run the study; see `asyncsim.study.jobs.run_jobs`.

    Its summary has a row per queue, correction, rate and seed; with clocks alone per queue and
    seed.
    """
    config.check()
    clusters = {queue: config.cluster(queue) for queue in config.queues}
    problem = from_file("problem", config.problem, PolicyProblem)
    if isinstance(problem, str):
        problem = called("problem", problem, POLICY_PROBLEMS)
    record = {**config.options_record(), "cluster": _about(config, clusters)}
    jobs = [
        measurement(
            f"{queue}, seed {seed}",
            *(_measure, config, queue, cluster, seed, problem),
            labels={"queue": queue, "seed": seed},
        )
        for seed in range(config.seeds)
        for queue, cluster in clusters.items()
    ]
    jobs += [
        _split_job(config, queue, cluster, generating)
        for queue, cluster in clusters.items()
        for generating in range(1, config.split)
    ]
    with config.computing_device():
        conclude = functools.partial(_conclude, config, clusters)
        return run_jobs("post_training", config, record, jobs, executor_of(config, ()), conclude)


def _conclude(
    config: Config, clusters: dict[str, Cluster], folder: Path, summary: pd.DataFrame
) -> None:
    finished = read(folder, "post_training")
    queues = queue_table(finished.table(CLOCKS))
    tables, quickest = {QUEUES: queues}, queues.loc[queues["update_time"].idxmin()]
    seeds = over_seeds(config.seeds, "means over")
    about = f"{_about(config, clusters)}; {seeds}, after the first fifth of the updates"
    parts: list[Any] = [about, titled(queues, ("queue", *_OF_CLOCK)), _LEGEND]
    verdicts = [clock_verdict(queues)]
    if (folder / SPLIT).exists():
        divided = _with_limits(finished.table(SPLIT).sort_values("update_time", kind="stable"))
        tables[SPLIT], (generating, training) = divided, config.accelerators
        best = divided.iloc[0]
        parts += [
            f"{config.split} accelerators divided, by time alone, from {generating} for rollouts "
            f"and {training} for training; the quickest first",
            titled(divided.head(10), _OF_SPLIT),
        ]
        verdicts.append(
            f"best division: {best['generating']} for rollouts and {best['training']} for "
            f"training with {best['queue']}, {number_text(best['update_time'])} s an update"
        )
    if config.corrections:
        evaluations = finished.table(EVALUATIONS)
        rewards = reward_table(with_targets(config, summary, evaluations))
        tables |= {REWARDS: rewards, CURVES: _best_curves(rewards, evaluations)}
        parts += _reward_parts(config, rewards)
        verdicts.append(reward_verdict(rewards))
        quickest = rewards.iloc[0]
    trace = simulate(clusters[quickest["queue"]], config.steps, 0, progress=False)
    example = (f"{quickest['queue']}, seed 0", trace)
    present(folder, tables, *parts, verdict=verdicts, example=example)


def _about(config: Config, clusters: dict[str, Cluster]) -> str:
    cluster = clusters[config.queues[0]]
    assert cluster.rollouts is not None
    of = cluster.rollouts
    return (
        f"{of.slots} slots, lengths {of.length}, groups of {of.group}, batches of {of.batch}, "
        f"updates of {cluster.compute}, new versions {of.updates}"
    )


def _weight(correction: str) -> Any:
    """Return the user's function that a correction names, or else its text.

    With arguments, ``FILE.py:FUNCTION(2)``, the function returns the weight.
    """
    if not own_file(correction)[0]:
        return correction
    entry = entry_of("corrections", correction, {}, "weight of a token")
    return entry.function if "(" not in correction else _called(entry.function, correction)


@functools.lru_cache(64)  # compiled programs are cached by the identity of the weight
def _called(function: Callable[..., Any], correction: str) -> Any:
    return function(**entry_of("corrections", correction, {}, "weight of a token").arguments)


def _measure(
    config: Config, queue: str, cluster: Cluster, seed: int, problem: PolicyProblem
) -> Tables:
    """Simulate a queue's clock, and train on its samples."""
    with config.computing_device():
        trace = simulate(cluster, config.steps, seed, progress=False)
        labels = {"queue": queue, "seed": seed}
        clock = pd.DataFrame([{**labels, **trace.summary()}])
        tables = {CLOCKS: clock, STALENESS: _staleness(trace).assign(**labels)}
        if config.corrections:
            tables |= _train(config, trace, queue, problem)
        else:
            tables[results.SUMMARY] = clock.assign(status="finished")
        return {name: table.to_dict("records") for name, table in tables.items()}


def queue_table(clocks: pd.DataFrame) -> pd.DataFrame:
    """Return a row per queue: means over the seeds, the largest staleness, and the limit that
    binds.
    """
    queues = clocks.drop(columns="seed").groupby("queue", sort=False)
    largest = {name: queues[name].max() for name in ("staleness_max", "staleness_tokens_max")}
    return _with_limits(queues.mean().assign(**largest).reset_index())


def _with_limits(clocks: pd.DataFrame) -> pd.DataFrame:
    pairs = zip(clocks["slots_busy"], clocks["learner_busy"], strict=True)
    return clocks.assign(limit=[_LIMITS[binding_limit(*busy)] for busy in pairs])


def _staleness(trace: Trace) -> pd.DataFrame:
    """Return the law of the staleness by samples and by tokens."""
    laws = [
        trace.staleness(weight).rename_axis("staleness").reset_index().assign(weight=weight)
        for weight in ("samples", "tokens")
    ]
    return pd.concat(laws)


def _split_job(config: Config, queue: str, cluster: Cluster, generating: int) -> Job:
    """Return the job of a clock with the accelerators divided in one way."""
    labels = {"queue": queue, "generating": generating, "training": config.split - generating}
    name = f"{queue}, {generating} of {config.split} accelerators generate"
    return measurement(name, _divided, config, cluster, labels, labels=labels, errors=SPLIT)


def _divided(config: Config, cluster: Cluster, labels: dict[str, Any]) -> Tables:
    assert cluster.rollouts is not None and isinstance(cluster.compute, Law)
    generating, training = config.accelerators
    slots = max(1, round(cluster.rollouts.slots * labels["generating"] / generating))
    rollouts = dataclasses.replace(cluster.rollouts, slots=slots)
    compute = scaled(cluster.compute, training / labels["training"])
    divided = dataclasses.replace(cluster, compute=compute, rollouts=rollouts)
    trace = simulate(divided, config.steps, 0, progress=False)
    return {SPLIT: [{**labels, **trace.summary()}]}


def _train(
    config: Config, trace: Trace, queue: str, problem: PolicyProblem
) -> dict[str, pd.DataFrame]:
    """Return a row per run on a trace, and the evaluations of all runs."""
    rows, curves, seed = [], [], trace.seed
    for correction in config.corrections:
        method = config.method(correction)
        runs = replay_members(trace, method, problem, [seed] * len(config.tune), config.tune)
        for rate, run in zip(config.tune, runs, strict=True):
            labels = {"queue": queue, "correction": correction, "learning_rate": rate, "seed": seed}
            late = run.commits.iloc[int((1 - _LATE) * len(run.commits)) :]
            rows.append(
                {
                    **labels,
                    "status": run.status,
                    "reward": run.evaluations["reward"].iloc[-1],
                    "final_loss": run.commits["loss"].iloc[-1],
                    "simulated_seconds": run.commits["commit_time"].iloc[-1],
                    **late[["weight", *_QUARTILES]].mean(),
                }
            )
            curves.append(run.evaluations[["commit", "commit_time", "reward"]].assign(**labels))
    return {results.SUMMARY: pd.DataFrame(rows), EVALUATIONS: pd.concat(curves)}


def with_targets(config: Config, summary: pd.DataFrame, evaluations: pd.DataFrame) -> pd.DataFrame:
    """Add the target of the reward, and the time to it, to the rows of runs."""
    start = evaluations.loc[evaluations["commit"] == 0, "reward"].mean()
    best = np.fmax(start, summary.loc[summary["status"] == "finished", "reward"].max())
    target = config.target if config.target is not None else (start + best) / 2
    keys = [*_KEYS, "seed"]
    runs = dict(list(evaluations.groupby(keys, sort=False)))
    of_rows = [runs[values] for values in summary[keys].itertuples(index=False, name=None)]
    times = {
        name: [
            time_to_target(run["commit_time"], -run["reward"], -target, hold)
            if target > start
            else np.inf
            for run in of_rows
        ]
        for name, hold in (("time_to_target", _HOLD), ("first_touch", 0))
    }
    return summary.assign(**times, target=target)


def reward_table(summary: pd.DataFrame) -> pd.DataFrame:
    """Rank the queues and corrections by their time to the target, each at its best rate for the
    final reward; means over the seeds.
    """
    best = tuned(summary, _KEYS[:2], Measure("reward", "most"))
    rows = grid(best, _KEYS, ["reward", "weight", *_QUARTILES], _TIME)
    return ranked(rows, best, _KEYS, _TIME).assign(target=summary["target"].iloc[0])


def _best_curves(rewards: pd.DataFrame, curves: pd.DataFrame) -> pd.DataFrame:
    band = rewards[_KEYS].merge(curves, on=_KEYS).groupby([*_KEYS, "commit"], sort=False)
    return band.agg(
        commit_time=("commit_time", "mean"),
        reward=("reward", "mean"),
        low=("reward", "min"),
        high=("reward", "max"),
    ).reset_index()


def _reward_parts(config: Config, rewards: pd.DataFrame) -> list[str | pd.DataFrame]:
    """Return the ranking of the corrections, and the best rates at an edge."""
    origin = "half way from the start to the best final reward"
    origin = origin if config.target is None else "--target"
    shown = rewards.assign(reward=spread(rewards, "reward"))
    columns: Columns = ["reward"]
    legend = ""
    if config.by_length:
        columns += [Column(name, name.removeprefix("reward_")) for name in _QUARTILES]
        legend = f"q1 to q4: reward by quartile of length, in the last {_LATE:.0%}; q1 the shortest"
    return [
        f"{config.problem}: time to a reward of {number_text(rewards['target'].iloc[0])} "
        f"({origin}) and reward at the end, each correction at its best rate",
        *ranked_parts(shown, _KEYS, _TIME, columns),
        legend,
        at_the_edge(rewards, config.tune, _names(rewards)),
    ]


def clock_verdict(queues: pd.DataFrame) -> str:
    """Say which queue has the quickest update; in a second line, which limit binds where."""
    limits = [
        f"{', '.join(part['queue'])}: {limit}"
        for limit, part in queues.groupby("limit", sort=False)
    ]
    quickest = queues.loc[queues["update_time"].idxmin()]
    seconds = number_text(quickest["update_time"])
    return f"quickest update: {quickest['queue']}, {seconds} s\n{'; '.join(limits)}"


def reward_verdict(rewards: pd.DataFrame) -> str:
    """Say which setting is the first at the target."""
    goal = f"a reward of {number_text(rewards['target'].iloc[0])}"
    return verdict(rewards, _names(rewards), _TIME, "setting", goal)


def _names(rewards: pd.DataFrame) -> list[str]:
    return [f"{row.queue} with {row.correction}" for row in rewards.itertuples()]
