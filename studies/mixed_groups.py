"""Does it matter how stale samples are mixed? Staleness by batch, group, sample or token.

Samples have a stated staleness, of one mean and four laws, which is drawn for each batch, each
group, each sample or each token. A token bandit is trained on them with and without corrections,
each at the best of its learning rates. Prints the rewards, the ascent of the uncorrected updates
beside the law of mixed groups, and four contrasts, which were stated before the first run: see
`CONTRASTS`. Writes these tables and a figure.
"""

import dataclasses
import functools
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np
import pandas as pd
from scipy import stats

from asyncsim.base.console import counted, number_text, over_seeds
from asyncsim.base.errors import require_count
from asyncsim.base.streams import Streams
from asyncsim.clusters.cluster import Cluster
from asyncsim.clusters.laws import Uniform
from asyncsim.clusters.rollouts import Rollouts, pace
from asyncsim.methods import policy_gradient
from asyncsim.problems import PolicyProblem, token_bandit
from asyncsim.problems.token_bandit import Policies, enumerate_policies
from asyncsim.replays.post_training import plan_updates, replay_members
from asyncsim.replays.recorders import Recorder
from asyncsim.replays.run import Run
from asyncsim.simulation.simulate import simulate
from asyncsim.study import results
from asyncsim.study.columns import Columns, text_of
from asyncsim.study.config import JobOptions
from asyncsim.study.finished import present
from asyncsim.study.jobs import Result, Tables, executor_of, measurement, run_jobs
from asyncsim.study.ranking import CONFIDENCE, Measure, at_the_edge, means, spread, tuned
from asyncsim.study.target import check_rates
from asyncsim.traces.trace import Trace

LAWS = ("constant", "two_point", "geometric", "heavy")
MIXES = ("batch", "group", "sample", "token")
#: Corrections and baselines, by the names of the tables.
METHODS = {
    "none": ("none", "group"),
    "none, version_group": ("none", "version_group"),
    "truncated(2)": ("truncated(2)", "group"),
}
#: Differences of the final reward, first less second, each a law, a mix and a method; and the
#: prediction of their sign from the law of mixed groups
#: (`asyncsim.theory.rollouts.mixed_group_gradient`), written before the first run.
CONTRASTS = (
    (
        "mixing within groups harms",
        ("two_point", "sample", "none"),
        ("two_point", "batch", "none"),
        "below zero",
    ),
    (
        "a baseline per version repairs it",
        ("two_point", "sample", "none, version_group"),
        ("two_point", "sample", "none"),
        "above zero",
    ),
    (
        "truncated weights repair it",
        ("two_point", "sample", "truncated(2)"),
        ("two_point", "sample", "none"),
        "above zero",
    ),
    ("a tail alone harms", ("heavy", "batch", "none"), ("constant", "batch", "none"), "about zero"),
)
#: Columns of `ascents`.
ASCENTS = ("ascent", "ascent_law", "drift")
REWARDS, CONTRASTS_FILE = "rewards.csv", "contrasts.csv"
#: Of the heavy law: the share of samples that are stale at all.
_STALE_SHARE = 0.1


@dataclass(frozen=True)
class Config(JobOptions):
    """Options of the study of mixed groups."""

    staleness: int = 4
    """Mean staleness (versions)."""
    group: int = 8
    """Samples of one prompt."""
    batch: int = 32
    """Samples of an update."""
    steps: int = 200
    """Updates of a run."""
    seeds: int = 10
    """Number of seeds: 0, 1, ... All conditions have the same prompts."""
    tune: tuple[float, ...] = (0.1, 0.3, 1.0, 3.0)
    """Learning rates to try for every condition and method, each of which counts at its best."""
    states: int = 4
    """Prompts of the bandit."""

    def check(self) -> None:
        """Check the options."""
        super().check()
        for name in ("staleness", "steps", "seeds"):
            require_count(name, getattr(self, name))
        require_count("group", self.group, 2)
        check_rates(self.tune)
        token_bandit(states=self.states)
        self.cluster()

    def cluster(self) -> Cluster:
        """Return the cluster without staleness, whose samples get theirs afterwards."""
        rollouts = Rollouts(self.batch, Uniform(0.5, 1.5), self.group, self.batch, queue=pace(0))
        return Cluster(1, 0.1, rollouts=rollouts)


def run(config: Config) -> Result:
    """Run the study; see `asyncsim.study.jobs.run_jobs`. Its summary has a row per condition,
    method, rate and seed.
    """
    config.check()
    # One object each for all jobs, which share compiled programs.
    problem = token_bandit(states=config.states)
    path = _path(problem.config["features"])
    jobs = [
        measurement(
            f"{law} by {mix}, seed {seed}",
            _train,
            *(config, problem, path, law, mix, seed),
            labels={"law": law, "mix": mix, "seed": seed},
        )
        for seed in range(config.seeds)
        for law in LAWS
        for mix in (MIXES if law != "constant" else MIXES[:1])
    ]

    def conclude(folder: Path, summary: pd.DataFrame) -> None:
        best = tuned(summary, ["law", "mix", "method"], Measure("reward", "most"))
        keys = ["law", "mix", "method", "learning_rate"]
        columns = ["reward", *ASCENTS, "staleness", "mixed_pairs"]
        rewards, contrasts = means(best, keys, columns, spreads=True), contrast_table(best)
        present(
            folder,
            {REWARDS: rewards, CONTRASTS_FILE: contrasts},
            *_texts(config, rewards, contrasts),
            verdict=_verdict(contrasts),
        )

    with config.computing_device():
        return run_jobs(
            "mixed_groups",
            config,
            config.options_record("mixed_groups"),
            jobs,
            executor_of(config, ()),
            conclude,
        )


def token_versions(fresh: Trace, law: str, mix: str, mean: int) -> np.ndarray:
    """Draw the version of each token, ``[samples, tokens]``, with a staleness for each batch,
    group, ...

    Versions before the first update are version 0. The random numbers depend on the law and the mix
    alone.
    """
    samples, tokens = fresh.samples[fresh.samples["outcome"] == "trained"], token_bandit().tokens
    version = samples["version"].to_numpy()
    units = {
        "batch": version,
        "group": samples["group"].to_numpy(),
        "sample": samples["sample"].to_numpy(),
    }
    draws = Streams(0, f"staleness {law} by {mix}").generator(0)
    if mix == "token":
        drawn = draw_staleness(law, mean, draws, (len(samples), tokens))
    else:
        drawn = draw_staleness(law, mean, draws, int(units[mix].max()) + 1)[units[mix]][:, None]
    return np.maximum(version[:, None] - np.broadcast_to(drawn, (len(samples), tokens)), 0)


def with_versions(fresh: Trace, versions: np.ndarray) -> Trace:
    """Return a trace without staleness as if its tokens had been written by these versions.

    All samples of a group get the length of its first one, and so the same prompt.
    """
    tables = fresh.rollouts
    assert tables is not None
    samples = tables.samples[tables.samples["outcome"] == "trained"].reset_index(drop=True)
    length = samples.groupby("group")["length"].transform("first")
    staleness = samples["version"] - versions[:, 0]
    samples = samples.assign(length=length, read_version=versions[:, 0], staleness=staleness)
    row, token = np.nonzero(np.ones_like(versions[:, 1:]))
    switches = pd.DataFrame(
        {"row": row, "share": (token + 1) / versions.shape[1], "version": versions[:, 1:].ravel()}
    )
    return dataclasses.replace(fresh, rollouts=tables._replace(samples=samples, switches=switches))


def draw_staleness(
    law: str, mean: int, draws: np.random.Generator, shape: int | tuple[int, ...]
) -> np.ndarray:
    """Draw a staleness of a law with this mean for each entry of an array."""
    if law == "constant":
        return np.full(shape, mean)
    if law == "two_point":
        return 2 * mean * draws.integers(0, 2, shape)
    if law == "geometric":
        return draws.geometric(1 / (1 + mean), shape) - 1
    return np.round(mean / _STALE_SHARE).astype(int) * (draws.random(shape) < _STALE_SHARE)


def _train(
    config: Config, problem: PolicyProblem, path: Recorder, law: str, mix: str, seed: int
) -> Tables:
    """Return a row per method and rate of a condition and a seed."""
    with config.computing_device():
        fresh = simulate(config.cluster(), config.steps, 0, progress=False)
        versions = token_versions(fresh, law, mix, config.staleness)
        trace = with_versions(fresh, versions)
        samples, rates = trace.samples, config.tune
        groups = samples.groupby("group")["read_version"]
        alike = samples.groupby(["group", "read_version"]).size().pow(2).groupby("group").sum()
        rows = []
        for name, arguments in METHODS.items():
            runs = replay_members(
                trace,
                policy_gradient(1.0, *arguments),
                problem,
                [seed] * len(rates),
                rates,
                record=[path],
            )
            for rate, run in zip(rates, runs, strict=True):
                compares = name == "none" and run.status == "finished"
                rows.append(
                    {
                        "law": law,
                        "mix": mix,
                        "method": name,
                        "learning_rate": rate,
                        "seed": seed,
                        "status": run.status,
                        "reward": float(run.evaluations["reward"].iloc[-1]),
                        "final_loss": float(run.commits["loss"].iloc[-1]),
                        **dict.fromkeys(ASCENTS, np.nan),
                        **(ascents(run, rate, trace, versions, problem) if compares else {}),
                        "staleness": float(samples["staleness"].mean()),
                        "mixed_pairs": float((1 - alike / groups.size() ** 2).mean()),
                    }
                )
    return {results.SUMMARY: rows}


def _path(parameters: int) -> Recorder:
    """Return the recorder of the parameters before each update."""
    names = tuple(f"theta_{number}" for number in range(parameters))
    return Recorder(names, lambda state, commit: (state, list(commit.before)))


def ascents(
    run: Run, rate: float, trace: Trace, versions: np.ndarray, problem: PolicyProblem
) -> dict[str, float]:
    """Compare the uncorrected updates of a run with the law of mixed groups, by enumeration.

    Given who wrote each token, the mean update of a group of S samples is, with R the reward and s
    the score of the current policy, both under the law of sample i, J_i the mean reward and J their
    mean over the group::

        1/S sum_i ((S - 1)/S cov_i(R, s) + (J_i - J) E_i[s])

    The second part is the drift. With two policies the sum is
    `asyncsim.theory.rollouts.mixed_group_gradient`.

    Returns
    -------
    dict
        Components along the gradient of the expected reward, summed over updates, relative to its
        summed square: ``ascent`` of the updates, ``ascent_law`` of their means by the law,
        ``drift`` of the law's second part.
    """
    path = run.commits.filter(regex="^theta_").to_numpy()
    policies = enumerate_policies(path, problem)
    updates, _ = plan_updates(trace, problem, trace.seed)
    states = np.asarray(
        jax.vmap(jax.vmap(functools.partial(problem.prompt, jax.random.key(0))))(updates.quantile)
    )
    assert trace.cluster is not None and trace.cluster.rollouts is not None
    of_law, drift = expected_updates(
        policies, versions.reshape(*states.shape, -1), states, trace.cluster.rollouts.group
    )
    probability = np.exp(policies.logp.sum(-1))
    gradient = np.einsum("vsn,sn,vsnp->vp", probability, policies.reward, policies.score) / len(
        policies.reward
    )
    # The parameters after the last update are not recorded.
    steps, gradient = (path[1:] - path[:-1]) / rate, gradient[:-1]
    square = (gradient**2).sum()
    parts = {"ascent": steps, "ascent_law": of_law[:-1], "drift": drift[:-1]}
    return {name: float((part * gradient).sum() / square) for name, part in parts.items()}


def expected_updates(
    policies: Policies, versions: np.ndarray, states: np.ndarray, group: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the mean of each uncorrected update by the law of `ascents`, and the drift in it.

    Parameters
    ----------
    policies : Policies
        That each update starts from.
    versions : Int[ndarray, "updates batch tokens"]
    states : Int[ndarray, "updates batch"]
        The prompts.
    group : int
        Samples of one group, which follow each other.

    Returns
    -------
    tuple of Float[ndarray, "updates parameters"]
    """
    updates, batch, tokens = versions.shape
    logp = sum(policies.logp[versions[..., token], states, :, token] for token in range(tokens))
    probability, reward = np.exp(logp), policies.reward[states]
    score = policies.score[np.arange(updates)[:, None], states]
    mean_reward = (probability * reward).sum(-1)
    mean_score = np.einsum("ubn,ubnp->ubp", probability, score)
    covariance = np.einsum("ubn,ubn,ubnp->ubp", probability, reward - mean_reward[..., None], score)
    grouped = mean_reward.reshape(updates, -1, group)
    gap = (grouped - grouped.mean(-1, keepdims=True)).reshape(updates, batch, 1)
    drift = (gap * mean_score).mean(1)
    return (1 - 1 / group) * covariance.mean(1) + drift, drift


def contrast_table(best: pd.DataFrame) -> pd.DataFrame:
    """Return a row per contrast: the mean difference over seeds, and intervals that all hold
    together.

    The intervals are Student's, paired by seed, at a level that is corrected for their number
    (Bonferroni): together they hold with `asyncsim.study.ranking.CONFIDENCE`. Each side is at its
    best rate, which the same runs chose: a bias towards both. A contrast of which an interrupted
    study lacks a side, or with a diverged seed, has no interval.
    """
    rewards = best.assign(reward=best["reward"].where(best["status"] == "finished"))
    rewards = rewards.pivot(index="seed", columns=["law", "mix", "method"], values="reward")
    quantile = 1 - (1 - CONFIDENCE) / (2 * len(CONTRASTS))
    rows = []
    for name, first, second, expected in CONTRASTS:
        gap = (
            rewards.get(first, np.nan) - rewards.get(second, np.nan) + 0 * rewards.index
        ).to_numpy()
        gap = gap if np.isfinite(gap).all() else gap * np.nan
        width = np.nan
        if len(gap) > 1:
            width = stats.t.ppf(quantile, len(gap) - 1) * gap.std(ddof=1) / np.sqrt(len(gap))
        rows.append(
            {
                "contrast": name,
                "first": ", ".join(first),
                "second": ", ".join(second),
                "expected": expected,
                "difference": gap.mean(),
                "low": gap.mean() - width,
                "high": gap.mean() + width,
            }
        )
    return pd.DataFrame(rows)


def _verdict(contrasts: pd.DataFrame) -> str:
    """Say which contrasts of mixing differ from zero."""
    differ = contrasts[(contrasts["low"] > 0) | (contrasts["high"] < 0)]
    if differ.empty:
        return f"none of the {len(contrasts)} contrasts of reward differs from zero"
    texts = [f"{row.contrast} by {number_text(row.difference)}" for row in differ.itertuples()]
    return f"{len(differ)} of {counted(len(contrasts), 'contrast')} differ: {', '.join(texts)}"


def _texts(config: Config, rewards: pd.DataFrame, contrasts: pd.DataFrame) -> list[str]:
    seeds = over_seeds(config.seeds, "means over")
    uncorrected = rewards[rewards["method"] == "none"]
    columns: Columns = [
        "law",
        "mix",
        "method",
        "learning_rate",
        "reward",
        "staleness",
        "mixed_pairs",
    ]
    texts = [
        f"token bandit, groups of {config.group}, batches of {config.batch}, {config.steps} "
        f"updates; {seeds}",
        text_of(rewards.assign(reward=spread(rewards, "reward")), columns),
        "mixed pairs: the probability that two draws from a group are by different versions",
        "",
        "uncorrected updates along the gradient of the reward, relative to it: measured, and by "
        "the law of mixed "
        "groups; drift: the law's part that only mixed groups have",
        text_of(
            uncorrected.assign(ascent=spread(uncorrected, "ascent")),
            ["law", "mix", "learning_rate", *ASCENTS],
        ),
        "",
        f"contrasts; the {len(contrasts)} intervals, paired by seed, hold together with "
        f"{CONFIDENCE:.0%}",
        text_of(contrasts, ["contrast", "expected", "difference", "low", "high"]),
    ]
    names = [f"{row.law} by {row.mix}, {row.method}" for row in rewards.itertuples()]
    if edge := at_the_edge(rewards, config.tune, names):
        texts.append(edge)
    return texts
