"""Asynchronous RL post-training: queues and corrections by time, staleness and reward.

For each queue between the slots that generate samples and the learner: the time of an update, who
is busy, how stale samples are, and which samples are lost. A small policy is then trained on these
very samples with each correction, at the best of its learning rates. Prints a table of queues, a
table of rewards and one sentence; writes these, the laws of staleness and a timeline as tables, and
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
from asyncsim.study.config import JobOptions
from asyncsim.study.entries import entry_of, from_file
from asyncsim.study.finished import present, read
from asyncsim.study.jobs import Job, Result, Tables, executor_of, measurement, run_jobs
from asyncsim.study.loading import own_file
from asyncsim.study.ranking import Measure, at_the_edge, grid, ranked, spread, tuned, verdict
from asyncsim.study.sweep import check_values
from asyncsim.study.target import check_rates, time_to_target
from asyncsim.traces.samples import binding_limit
from asyncsim.traces.trace import Trace

#: Files beside the summary of runs: of the jobs, and of the conclusion.
CLOCKS, STALENESS, TIMELINE, UPDATES, EVALUATIONS, SPLIT = (
    f"{name}.csv" for name in ("clocks", "staleness", "timeline", "updates", "evaluations", "split")
)
_TIME = Measure("time_to_target")
QUEUES, REWARDS, CURVES = (f"{name}.csv" for name in ("queues", "rewards", "curves"))
#: Numbers of a clock: of `Trace.summary`.
_NUMBERS = (
    "update_time",
    "learner_busy",
    "slots_busy",
    "staleness_mean",
    "staleness_max",
    "staleness_tokens_mean",
    "staleness_tokens_max",
    "samples_lost",
    "lost_share",
    "length_started",
    "length_trained",
)
_LIMITS = {
    "slots": "slots bind",
    "learner": "learner binds",
    "both": "both are always busy",
    "queue": "queue binds",
}
#: The columns of the printed table of queues.
_LEGEND = (
    "staleness, largest: of samples, by the version at their start; by tokens: mean, by the "
    "version that wrote each token\nlost: share of finished or cancelled samples that were never "
    "trained; length, trained: means of started and of trained samples"
)
#: Slots and seconds (mean lengths) that the timeline shows; the share of the run after which it
#: begins.
_SLOTS_SHOWN, _LENGTHS_SHOWN, _TIMELINE_AT = 16, 6.0, 0.5
#: Queues, the first, that have a timeline.
_TIMELINES = 3
#: Of the end of a run, over which rewards by length are averaged.
_LATE = 0.2
#: Options that a recording replaces, and those of the training alone.
_OF_RECORDING = ("slots", "length", "train", "group", "batch")
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
        if self.recording is not None and not Path(self.recording).is_file():
            raise InputError(
                f"recording = {str(self.recording)!r}: there is no such file; give a log, parquet "
                "or CSV"
            )
        unused: dict[str, tuple[str, ...]] = {}
        if self.recording is not None:
            unused["beside recording"] = _OF_RECORDING
        if not self.corrections:
            unused["without corrections"] = _OF_TRAINING
        for reason, names in unused.items():
            for name in filter(self.changed, names):
                value = getattr(self, name)
                raise InputError(f"{name} = {value}: has no effect {reason}; leave it out")
        require_count("steps", self.steps)
        require_count("split", self.split, 0, 1000)
        require_count("more_slots", self.more_slots, minimum=0)
        if self.target is not None:
            require_number("target", self.target)
        for count in self.accelerators:
            require_count("accelerators", count)
        if self.changed("accelerators") and not self.split:
            raise InputError(
                f"accelerators = {self.accelerators}: has no effect without split; give split, too"
            )
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
        own: dict[str, Any] = {
            "consume": self.consume,
            "submit": self.submit,
            "updates": self.updates,
            "queue": queue,
        }
        own |= {"prefill": self.prefill, "transfer": self.transfer}
        if self.recording is not None:
            base = calibrate_rollouts(self.recording)
            assert base.rollouts is not None
            slots = base.rollouts.slots + self.more_slots
            rollouts = dataclasses.replace(base.rollouts, slots=slots, **own)
            return Cluster(1, base.compute, rollouts=rollouts, failures=self.failures)
        rollouts = Rollouts(
            slots=self.slots + self.more_slots,
            length=as_law("length", self.length),
            group=self.group,
            batch=self.batch,
            **own,
        )
        return Cluster(1, self.train, rollouts=rollouts, failures=self.failures)


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
        _queue_job(config, queue, cluster, seed, problem)
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
    tables = {QUEUES: queue_table(finished.table(CLOCKS))}
    if config.corrections:
        evaluations = finished.table(EVALUATIONS)
        rewards = reward_table(with_targets(config, summary, evaluations))
        tables |= {REWARDS: rewards, CURVES: _best_curves(rewards, evaluations)}
    if (folder / SPLIT).exists():
        divided = finished.table(SPLIT).sort_values("update_time", kind="stable", ignore_index=True)
        tables[SPLIT] = divided
    rows = tables.get(REWARDS, tables[QUEUES])
    by = "time_to_target" if REWARDS in tables else "update_time"
    queue = rows.loc[rows[by].idxmin(), "queue"]
    trace = simulate(clusters[queue], config.steps, 0, progress=False)
    present(
        folder,
        tables,
        *_parts(config, clusters, tables),
        verdict=answer(tables),
        example=(f"{queue}, seed 0", trace),
    )


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


def _queue_job(
    config: Config, queue: str, cluster: Cluster, seed: int, problem: PolicyProblem
) -> Job:
    """Return the job of a queue's clock and of all runs on it."""
    return measurement(
        f"{queue}, seed {seed}",
        _measure,
        *(config, queue, cluster, seed, problem),
        labels={"queue": queue, "seed": seed},
    )


def _measure(
    config: Config, queue: str, cluster: Cluster, seed: int, problem: PolicyProblem
) -> Tables:
    """Simulate a queue's clock, and train on its samples."""
    with config.computing_device():
        trace = simulate(cluster, config.steps, seed, progress=False)
        labels = {"queue": queue, "seed": seed}
        clock = pd.DataFrame([{**labels, **_clock_numbers(trace)}])
        tables = {CLOCKS: clock, STALENESS: _staleness(trace).assign(**labels)}
        if seed == 0 and queue in config.queues[:_TIMELINES]:
            tables |= timeline(queue, trace)
        if config.corrections:
            tables |= _train(config, trace, queue, problem)
        else:
            tables[results.SUMMARY] = clock.assign(status="finished")
        return {name: table.to_dict("records") for name, table in tables.items()}


def _clock_numbers(trace: Trace) -> dict[str, float]:
    """Return the numbers of a clock, and the limit that binds."""
    numbers = trace.summary()
    return {name: numbers[name] for name in _NUMBERS}


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


def timeline(queue: str, trace: Trace) -> dict[str, pd.DataFrame]:
    """Return the samples of some slots and the updates in a few seconds amid a run."""
    assert trace.cluster is not None and trace.cluster.rollouts is not None
    begin = float(trace.frame["commit_time"].iloc[int(_TIMELINE_AT * len(trace))])
    end = begin + _LENGTHS_SHOWN * trace.cluster.rollouts.length.mean
    slots = trace.cluster.rollouts.slots
    samples = trace.samples[trace.samples["slot"] < _SLOTS_SHOWN]
    samples = samples.assign(end_time=samples["end_time"].fillna(end))
    samples = samples[(samples["end_time"] > begin) & (samples["start_time"] < end)]
    updates = trace.frame[(trace.frame["commit_time"] >= begin) & (trace.frame["start_time"] < end)]
    shown = {
        TIMELINE: samples[["slot", "start_time", "end_time", "staleness", "outcome"]].assign(
            slots=slots
        ),
        UPDATES: updates[["commit", "start_time", "send_time"]],
    }
    return {name: table.assign(queue=queue, begin=begin, end=end) for name, table in shown.items()}


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
    trace = simulate(
        dataclasses.replace(cluster, compute=compute, rollouts=rollouts),
        config.steps,
        0,
        progress=False,
    )
    return {
        SPLIT: _with_limits(pd.DataFrame([{**labels, **_clock_numbers(trace)}])).to_dict("records")
    }


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
                    **late[["weight", *(f"reward_q{part}" for part in range(1, 5))]].mean(),
                }
            )
            curves.append(run.evaluations[["commit", "commit_time", "reward"]].assign(**labels))
    return {results.SUMMARY: pd.DataFrame(rows), EVALUATIONS: pd.concat(curves)}


def with_targets(config: Config, summary: pd.DataFrame, evaluations: pd.DataFrame) -> pd.DataFrame:
    """Add the target of the reward, and the time to it, to the rows of runs."""
    start = evaluations.loc[evaluations["commit"] == 0, "reward"].mean()
    best = np.fmax(start, summary.loc[summary["status"] == "finished", "reward"].max())
    target = config.target if config.target is not None else (start + best) / 2
    keys = ["queue", "correction", "learning_rate", "seed"]
    runs = evaluations.groupby(keys, sort=False)
    times = {
        name: [
            time_to_target(run["commit_time"], -run["reward"], -target, hold)
            if target > start
            else np.inf
            for run in (
                runs.get_group(values)
                for values in summary[keys].itertuples(index=False, name=None)
            )
        ]
        for name, hold in (("time_to_target", _HOLD), ("first_touch", 0))
    }
    return summary.assign(**times, target=target)


def reward_table(summary: pd.DataFrame) -> pd.DataFrame:
    """Return a row per queue and correction at its best rate for the final reward, the quickest to
    the target first; means over the seeds.
    """
    keys = ["queue", "correction"]
    best = tuned(summary, keys, Measure("reward", "most"))
    columns = [
        "reward",
        "time_to_target",
        "weight",
        "target",
        *(f"reward_q{part}" for part in range(1, 5)),
    ]
    by = [*keys, "learning_rate"]
    return ranked(grid(best, by, columns, _TIME), best, by, _TIME)


def _best_curves(rewards: pd.DataFrame, curves: pd.DataFrame) -> pd.DataFrame:
    keys = ["queue", "correction", "learning_rate"]
    best = rewards[keys].merge(curves, on=keys)
    band = best.groupby([*keys, "commit"], sort=False)
    return band.agg(
        commit_time=("commit_time", "mean"),
        reward=("reward", "mean"),
        low=("reward", "min"),
        high=("reward", "max"),
    ).reset_index()


def _parts(
    config: Config, clusters: dict[str, Cluster], tables: dict[str, pd.DataFrame]
) -> list[str | pd.DataFrame]:
    queues = tables[QUEUES]
    seeds = over_seeds(config.seeds, "means over")
    about = f"{_about(config, clusters)}; {seeds}, after the first fifth of the updates"
    shown: Columns = [
        "queue",
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
    ]
    parts: list[str | pd.DataFrame] = [about, titled(queues, shown), _LEGEND]
    if config.seeds == 1:
        parts.append("one seed cannot show the noise; give --seeds 3 or more")
    if SPLIT in tables:
        generating, training = config.accelerators
        parts += [
            f"{config.split} accelerators divided, by time alone, from {generating} for rollouts "
            f"and {training} for training; the quickest first"
        ]
        own = [
            "queue",
            "generating",
            "training",
            shown[1],
            "learner_busy",
            "slots_busy",
            shown[4],
            "limit",
        ]
        parts.append(titled(tables[SPLIT].head(10), own))
    if REWARDS in tables:
        rewards = tables[REWARDS]
        target = number_text(rewards["target"].iloc[0])
        origin = "half way from the start to the best final reward"
        origin = origin if config.target is None else "--target"
        caption = f"{config.problem}: reward at the end, each correction at its best rate"
        if not rewards["target"].isna().any():
            caption += f"; time to a reward of {target} ({origin})"
        parts.append(caption)
        shown_rewards = rewards.assign(reward=spread(rewards, "reward"))
        columns: Columns = [
            "queue",
            "correction",
            "learning_rate",
            "reward",
            "time_to_target",
            "diverged",
        ]
        if config.by_length:
            columns += [Column(f"reward_q{part}", f"q{part}") for part in range(1, 5)]
        parts.append(titled(shown_rewards, columns))
        if config.by_length:
            parts.append(
                f"q1 to q4: mean reward of the quartiles of length in the last {_LATE:.0%}, q1 the "
                "shortest"
            )
        named = [f"{row.queue} with {row.correction}" for row in rewards.itertuples()]
        if edge := at_the_edge(rewards, config.tune, named):
            parts.append(edge)
    return parts


def answer(tables: dict[str, pd.DataFrame]) -> str:
    """Return one sentence: which limit binds where, and which setting is the quickest."""
    queues = tables[QUEUES]
    limits = "; ".join(
        f"{', '.join(part['queue'])}: {limit}"
        for limit, part in queues.groupby("limit", sort=False)
    )
    quickest = queues.loc[queues["update_time"].idxmin()]
    text = (
        f"{limits}. Quickest update: {quickest['queue']}, {number_text(quickest['update_time'])} s"
    )
    if SPLIT in tables:
        best = tables[SPLIT].iloc[0]
        text += (
            f"; best division: {best['generating']} for rollouts and {best['training']} for "
            f"training with {best['queue']}, {number_text(best['update_time'])} s an update"
        )
    if REWARDS in tables:
        rewards = tables[REWARDS]
        target = number_text(rewards["target"].iloc[0])
        if rewards["target"].isna().any():
            return f"{text}; every run diverged: give lower rates to --tune."
        first = rewards.iloc[0]
        if not np.isfinite(first["time_to_target"]):
            return f"{text}; no setting rises to a reward of {target} with every seed."
        names = [f"{row.queue} with {row.correction}" for row in rewards.itertuples()]
        text += (
            f"; quickest to a reward of {target}: {names[0]} at a rate of "
            f"{first['learning_rate']:g}, after {number_text(first['time_to_target'])} s"
        )
        goal = f"a reward of {target}"
        return f"{text}.\n{verdict(rewards, names, _TIME, 'setting', goal)}"
    return f"{text}."
