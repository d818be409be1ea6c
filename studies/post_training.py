"""Asynchronous RL post-training: queues and corrections by time, staleness and reward.

For each queue between the slots that generate samples and the learner: the time of an update, who is busy, how stale
samples are, and which samples are lost. A small policy is then trained on these very samples with each correction, at
the best of its learning rates. Prints a table of queues, a table of rewards and one sentence; writes these, the laws
of staleness and a timeline as tables, and figures.

With --recording FILE, a log of a real system as asyncsim check-lag reads it, its slots, lengths, groups, batches and
update times replace the options.
"""

import dataclasses
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd

from asyncsim.base.calls import called
from asyncsim.base.console import counted, number_text, over_seeds, tell
from asyncsim.base.errors import InputError, require_count
from asyncsim.base.files import plain, write_csv, write_json
from asyncsim.calibration.rollouts import calibrate_rollouts
from asyncsim.clusters.cluster import Cluster
from asyncsim.clusters.laws import Law, scaled
from asyncsim.clusters.rollouts import Rollouts, as_queue
from asyncsim.methods.policy_gradient import policy_gradient
from asyncsim.pages.page import on_a_page
from asyncsim.problems import POLICY_PROBLEMS
from asyncsim.replays.post_training import replay_members
from asyncsim.simulation.simulate import simulate
from asyncsim.study import results
from asyncsim.study.columns import Column, text_of
from asyncsim.study.finished import present
from asyncsim.study.ranking import Measure, at_the_edge, means, tuned
from asyncsim.study.sweep import check_values
from asyncsim.study.target import check_rates, time_to_target
from asyncsim.traces.samples import binding_limit, rollout_summary
from asyncsim.traces.trace import Trace

#: Files beside the summary of runs.
QUEUES, REWARDS, STALENESS, TIMELINE, UPDATES, CURVES, SPLIT = (
    f"{name}.csv" for name in ("queues", "rewards", "staleness", "timeline", "updates", "curves", "split")
)
_LIMITS = {"slots": "slots bind", "learner": "learner binds", "both": "both are always busy", "queue": "queue binds"}
#: Slots and seconds (mean lengths) that the timeline shows; the share of the run after which it begins.
_SLOTS_SHOWN, _LENGTHS_SHOWN, _TIMELINE_AT = 16, 6.0, 0.5
#: Of the end of a run, over which rewards by length are averaged.
_LATE = 0.2
#: Evaluations after the first one that meets the target at which it must still be met.
_HOLD = 1


@dataclass(frozen=True)
class Config:
    """Options of the study of post-training."""

    slots: int = 64
    """Samples that are generated at once; with --split those of one accelerator."""
    length: str = "lognormal(mean=1, cv=0.9)"
    """Law of the seconds that a sample takes."""
    train: str = "constant(0.4)"
    """Law of the seconds of an update on a batch; with --split those of one accelerator."""
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
    """Seconds to read a second's worth of a sample again after a new version; not with --updates start."""
    transfer: str = "constant(0)"
    """Law of the seconds from an update to the arrival of its version at the slots."""
    queues: tuple[str, ...] = ("pace(0)", "pace(1)", "pace(4)", "drop_oldest(1)", "discard(2)", "keep")
    """Queues to compare: pace(eta), drop_oldest(batches), discard(limit), keep."""
    failures: tuple[str, ...] = ()
    """What breaks: "crash(every=exponential(100), lasts=5, on=slots)"; pause and slow as well; on=slots or learners."""
    recording: Path | None = None
    """A log of rollouts, parquet or CSV, in the place of --slots, --length, --train, --group and --batch."""
    split: int = 0
    """Accelerators to divide between rollouts and training, in all ways, by time alone; 0: no such table."""

    corrections: tuple[str, ...] = ("none", "truncated(2)", "ppo(0.2)", "decoupled(0.2)")
    """Corrections for staleness: none, importance, truncated, cispo, icepop, ppo, decoupled, gspo, with arguments. None
    given: clocks alone."""
    baseline: Literal["group", "leave_one_out", "version_group", "none"] = "group"
    """What is subtracted from a reward."""
    inner_steps: int = 1
    """Steps of an update, each on an equal part of its batch."""
    optimizer: Literal["sgd", "adam"] = "sgd"
    """Optimizer of the learner."""
    problem: str = "token_bandit"
    """What is learnt: token_bandit or arithmetic, with arguments: "arithmetic(2, partial=True)"."""
    steps: int = 200
    """Updates of a run."""
    seeds: int = 3
    """Number of seeds: 0, 1, ... All queues and corrections have the same lengths and prompts."""
    tune: tuple[float, ...] = (0.1, 0.3, 1.0, 3.0)
    """Learning rates to try for every queue and correction, each of which counts at its best."""
    target: float | None = None
    """Expected reward that is to be reached. None: half way from the start to the best end of a run."""
    by_length: bool = False
    """Show the reward of each quartile of length: q1 the shortest samples."""
    out: Path | None = None
    """Folder for the results, new or empty. By default results/post_training, then results/post_training-2, ..."""

    def check(self) -> None:
        """Check the options that nothing else checks."""
        for name in ("steps", "seeds"):
            require_count(name, getattr(self, name))
        require_count("split", self.split, 0)
        if self.split == 1:
            raise InputError("split = 1: one accelerator cannot be divided; give 2 or more")
        check_values("queues", self.queues)
        if self.corrections:
            check_values("corrections", self.corrections)
        check_rates(self.tune)
        for queue in self.queues:
            as_queue(queue)
        for correction in self.corrections:
            policy_gradient(1.0, correction, self.baseline, self.inner_steps)
        groups = self.cluster(self.queues[0]).rollouts
        assert groups is not None
        if groups.batch // groups.group % self.inner_steps:
            raise InputError(f"inner_steps = {self.inner_steps}: does not divide the groups of a batch; give a divisor")

    def cluster(self, queue: str) -> Cluster:
        """Return the cluster with a queue."""
        own: dict[str, Any] = {"consume": self.consume, "submit": self.submit, "updates": self.updates, "queue": queue}
        own |= {"prefill": self.prefill, "transfer": self.transfer}
        if self.recording is not None:
            base = calibrate_rollouts(self.recording)
            assert base.rollouts is not None
            rollouts = dataclasses.replace(base.rollouts, **own)
            return Cluster(1, base.compute, rollouts=rollouts, failures=self.failures)
        rollouts = Rollouts(slots=self.slots, length=self.length, group=self.group, batch=self.batch, **own)
        return Cluster(1, self.train, rollouts=rollouts, failures=self.failures)


def run(config: Config) -> pd.DataFrame:
    """Run the study; return its summary, a row per queue, correction, rate and seed; with clocks alone per queue."""
    config.check()
    clusters = {queue: config.cluster(queue) for queue in config.queues}
    problem = called("problem", config.problem, POLICY_PROBLEMS)
    with results.new_folder(config.out, "post_training") as folder:
        options = {name: plain(value) for name, value in asdict(config).items() if name != "out"}
        write_json(folder / results.CONFIG, {"study": "post_training", **options, "cluster": _about(config, clusters)})
        traces = {
            (queue, seed): simulate(cluster, config.steps, seed)
            for queue, cluster in clusters.items()
            for seed in range(config.seeds)
        }
        queues = queue_table(traces)
        tables = {QUEUES: queues, STALENESS: staleness_table(traces)}
        tables |= timeline({queue: traces[queue, 0] for queue in config.queues[:3]})
        if config.split:
            tables[SPLIT] = split_table(config, clusters)
        summary, curves = queues, pd.DataFrame()
        if config.corrections:
            summary, curves = _train(config, traces, problem, folder)
            rewards = reward_table(config, summary)
            tables |= {REWARDS: rewards, CURVES: _best_curves(rewards, curves)}
        write_csv(folder / results.SUMMARY, summary)
        results.write_origin(folder)
        results.remember(folder)
        with on_a_page(folder):
            present(folder, tables, *_texts(config, clusters, tables))
    results.say_written(folder)
    return summary


def _about(config: Config, clusters: dict[str, Cluster]) -> str:
    cluster = clusters[config.queues[0]]
    assert cluster.rollouts is not None
    of = cluster.rollouts
    return (
        f"{of.slots} slots, lengths {of.length}, groups of {of.group}, batches of {of.batch}, "
        f"updates of {cluster.compute}, new versions {of.updates}"
    )


def queue_table(traces: dict[tuple[str, int], Trace]) -> pd.DataFrame:
    """Return a row per queue, means over the seeds: `rollout_summary`, and the limit that binds."""
    rows = []
    for (queue, seed), trace in traces.items():
        assert trace.rollouts is not None and trace.cluster is not None and trace.cluster.rollouts is not None
        measured = rollout_summary(trace.rollouts, trace.frame, trace.cluster.rollouts.slots)
        rows.append({"queue": queue, "seed": seed, **measured})
    table = pd.DataFrame(rows).drop(columns="seed").groupby("queue", sort=False)
    largest = table["staleness_max"].max()
    table = table.mean().assign(staleness_max=largest).reset_index()
    pairs = zip(table["slots_busy"], table["learner_busy"], strict=True)
    return table.assign(limit=[_LIMITS[binding_limit(*busy)] for busy in pairs])


def staleness_table(traces: dict[tuple[str, int], Trace]) -> pd.DataFrame:
    """Return the law of the staleness of each queue by samples and by tokens, the mean over seeds."""
    laws = [
        trace.staleness(weight).rename_axis("staleness").reset_index().assign(queue=queue, weight=weight)
        for (queue, _), trace in traces.items()
        for weight in ("samples", "tokens")
    ]
    seeds = len({seed for _, seed in traces})
    table = pd.concat(laws).groupby(["queue", "weight", "staleness"], sort=False)["share"].sum() / seeds
    return table.reset_index().sort_values(["queue", "weight", "staleness"], kind="stable")


def timeline(traces: dict[str, Trace]) -> dict[str, pd.DataFrame]:
    """Return the samples of some slots and the updates in a few seconds amid each run."""
    samples, updates = [], []
    for queue, trace in traces.items():
        assert trace.cluster is not None and trace.cluster.rollouts is not None
        begin = float(trace.frame["commit_time"].iloc[int(_TIMELINE_AT * len(trace))])
        end = begin + _LENGTHS_SHOWN * trace.cluster.rollouts.length.mean
        table = trace.samples[trace.samples["slot"] < _SLOTS_SHOWN]
        table = table.assign(end_time=table["end_time"].fillna(end))
        table = table[(table["end_time"] > begin) & (table["start_time"] < end)]
        columns = ["slot", "start_time", "end_time", "staleness", "outcome"]
        samples.append(table[columns].assign(queue=queue, begin=begin, end=end))
        frame = trace.frame[(trace.frame["commit_time"] > begin) & (trace.frame["start_time"] < end)]
        updates.append(frame[["commit", "start_time", "send_time"]].assign(queue=queue, begin=begin, end=end))
    return {TIMELINE: pd.concat(samples), UPDATES: pd.concat(updates)}


def split_table(config: Config, clusters: dict[str, Cluster]) -> pd.DataFrame:
    """Return a row per queue and way to divide the accelerators, the quickest first."""
    rows = []
    for queue, cluster in clusters.items():
        assert cluster.rollouts is not None and isinstance(cluster.compute, Law)
        for generating in range(1, config.split):
            rollouts = dataclasses.replace(cluster.rollouts, slots=cluster.rollouts.slots * generating)
            compute = scaled(cluster.compute, 1 / (config.split - generating))
            divided = dataclasses.replace(cluster, compute=compute, rollouts=rollouts)
            traces = {(queue, 0): simulate(divided, config.steps, 0, progress=False)}
            row = queue_table(traces).iloc[0].to_dict()
            rows.append({"queue": queue, "generating": generating, "training": config.split - generating, **row})
    return pd.DataFrame(rows).sort_values("update_time", kind="stable", ignore_index=True)


def _train(
    config: Config, traces: dict[tuple[str, int], Trace], problem: Any, folder: Path
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return a row per run, and the evaluations of all runs."""
    import optax

    optimizer = None if config.optimizer == "sgd" else optax.adam(1.0)
    rows, curves = [], []
    for number, ((queue, seed), trace) in enumerate(traces.items(), start=1):
        for correction in config.corrections:
            method = policy_gradient(1.0, correction, config.baseline, config.inner_steps, optimizer)
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
                        "simulated_seconds": float(run.commits["commit_time"].iloc[-1]),
                        "weight": float(late["weight"].mean()),
                        **{f"reward_q{part}": float(late[f"reward_q{part}"].mean()) for part in range(1, 5)},
                    }
                )
                curves.append(run.evaluations[["commit", "commit_time", "reward"]].assign(**labels))
        tell(f"[{number}/{len(traces)}] {queue}, seed {seed}")
    summary, evaluations = pd.DataFrame(rows), pd.concat(curves, ignore_index=True)
    start = evaluations.loc[evaluations["commit"] == 0, "reward"].mean()
    finished = summary.loc[summary["status"] == "finished", "reward"]
    target = config.target if config.target is not None else (start + finished.max()) / 2
    keys = ["queue", "correction", "learning_rate", "seed"]
    runs = evaluations.groupby(keys, sort=False)
    for name, hold in (("time_to_target", _HOLD), ("first_touch", 0)):
        times = {values: time_to_target(run["commit_time"], -run["reward"], -target, hold) for values, run in runs}
        summary[name] = [times[tuple(values)] for values in summary[keys].itertuples(index=False)]
    return summary.assign(target=target), evaluations


def reward_table(config: Config, summary: pd.DataFrame) -> pd.DataFrame:
    """Return a row per queue and correction at its best rate for the final reward; means over the seeds."""
    keys = ["queue", "correction"]
    best = tuned(summary, keys, Measure("reward", "most"))
    columns = ["reward", "time_to_target", "weight", "target", *(f"reward_q{part}" for part in range(1, 5))]
    return means(best, [*keys, "learning_rate"], columns, spreads=True)


def _best_curves(rewards: pd.DataFrame, curves: pd.DataFrame) -> pd.DataFrame:
    keys = ["queue", "correction", "learning_rate"]
    best = rewards[keys].merge(curves, on=keys)
    band = best.groupby([*keys, "commit"], sort=False)
    return band.agg(
        commit_time=("commit_time", "mean"), reward=("reward", "mean"), low=("reward", "min"), high=("reward", "max")
    ).reset_index()


def _texts(config: Config, clusters: dict[str, Cluster], tables: dict[str, pd.DataFrame]) -> list[str]:
    queues = tables[QUEUES]
    seeds = over_seeds(config.seeds, "means over")
    about = f"{_about(config, clusters)}; {seeds}, after the first fifth of the updates"
    shown: list[str | Column] = [
        "queue",
        Column("update_time", "s an update"),
        *("learner_busy", "slots_busy"),
        Column("staleness"),
        Column("staleness_max", "largest"),
        Column("staleness_tokens", "by tokens"),
        "lost",
        Column("length_started", "length started (s)"),
        Column("length_trained", "trained (s)"),
        "limit",
    ]
    texts = [about, text_of(queues, shown, QUEUES)]
    if SPLIT in tables:
        texts += ["", f"{config.split} accelerators divided, by time alone; the quickest first"]
        own = ["queue", "generating", "training", shown[1], "learner_busy", "slots_busy", "staleness", "limit"]
        texts.append(text_of(tables[SPLIT].head(10), own, SPLIT))
    if REWARDS in tables:
        rewards = tables[REWARDS]
        target = number_text(rewards["target"].iloc[0])
        what = "reward at the end, each correction at its best rate; time to a reward of"
        texts += ["", f"{config.problem}: {what} {target}"]
        spread = rewards.assign(reward=_with_spread(rewards))
        columns: list[str | Column] = ["queue", "correction", "learning_rate", "reward", "time_to_target", "diverged"]
        if config.by_length:
            columns += [Column(f"reward_q{part}", f"q{part}") for part in range(1, 5)]
        texts.append(text_of(spread, columns, REWARDS))
        if config.by_length:
            texts.append(f"q1 to q4: mean reward of the quartiles of length in the last {_LATE:.0%}, q1 the shortest")
    texts += ["", answer(config, tables)]
    if REWARDS in tables:
        named = [f"{row.queue} with {row.correction}" for row in tables[REWARDS].itertuples()]
        if edge := at_the_edge(tables[REWARDS], config.tune, named):
            texts.append(edge)
    return texts


def _with_spread(table: pd.DataFrame) -> list[str]:
    pairs = zip(table["reward"], table["reward_sd"], strict=True)
    return [number_text(mean) + (f" ± {number_text(sd, 2)}" if np.isfinite(sd) else "") for mean, sd in pairs]


def answer(config: Config, tables: dict[str, pd.DataFrame]) -> str:
    """Return one sentence: which limit binds where, and which setting is the quickest."""
    queues = tables[QUEUES]
    limits = "; ".join(f"{', '.join(part['queue'])}: {limit}" for limit, part in queues.groupby("limit", sort=False))
    quickest = queues.loc[queues["update_time"].idxmin()]
    text = f"{limits}. Quickest update: {quickest['queue']}, {number_text(quickest['update_time'])} s"
    if REWARDS in tables:
        rewards = tables[REWARDS]
        target = number_text(rewards["target"].iloc[0])
        met = rewards[np.isfinite(rewards["time_to_target"])]
        if met.empty:
            return f"{text}; no setting reaches a reward of {target} with every seed."
        first = met.loc[met["time_to_target"].idxmin()]
        text += (
            f"; quickest to a reward of {target}: {first['queue']} with {first['correction']} at a rate of "
            f"{first['learning_rate']:g}, after {number_text(first['time_to_target'])} s"
        )
        close = met[met["time_to_target"] <= 1.05 * first["time_to_target"]]
        if len(close) > 1:
            text += f" ({counted(len(close) - 1, 'other')} within 5 %)"
    return f"{text}."
