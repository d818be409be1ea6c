"""Does it matter how stale samples are mixed? The same staleness by batch, group, sample or token.

Samples have a stated staleness, of one mean and four laws, which is drawn for each batch, each group, each sample or
each token. A token bandit is trained on them with and without corrections, each at the best of its learning rates.
Prints the rewards and four contrasts, which were stated before the first run: see `CONTRASTS`.
"""

import dataclasses
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats

from asyncsim.base.console import number_text, over_seeds, tell
from asyncsim.base.errors import require_count
from asyncsim.base.files import plain, write_csv, write_json
from asyncsim.base.streams import Streams
from asyncsim.clusters.cluster import Cluster
from asyncsim.clusters.rollouts import Rollouts
from asyncsim.methods import PolicyGradient, policy_gradient
from asyncsim.pages.page import on_a_page
from asyncsim.problems import PolicyProblem, token_bandit
from asyncsim.replays.post_training import replay_members
from asyncsim.simulation.simulate import simulate
from asyncsim.study import results
from asyncsim.study.columns import Column, text_of
from asyncsim.study.finished import present
from asyncsim.study.ranking import Measure, at_the_edge, means, tuned
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
#: Differences of the final reward, first less second, each a law, a mix and a method; and the prediction of their sign
#: from the law of mixed groups (`asyncsim.theory.rollouts.mixed_group_gradient`), written before the first run.
CONTRASTS = (
    ("mixing within groups harms", ("two_point", "sample", "none"), ("two_point", "batch", "none"), "below zero"),
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
REWARDS, CONTRASTS_FILE = "rewards.csv", "contrasts.csv"
_CONFIDENCE = 0.95
#: Of the heavy law: the share of samples that are stale at all.
_STALE_SHARE = 0.1


@dataclass(frozen=True)
class Config:
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
    out: Path | None = None
    """Folder for the results, new or empty. By default results/mixed_groups, then results/mixed_groups-2, ..."""


def run(config: Config) -> pd.DataFrame:
    """Run the study; return its summary, a row per condition, method, rate and seed."""
    for name in ("staleness", "steps", "seeds"):
        require_count(name, getattr(config, name))
    check_rates(config.tune)
    rollouts = Rollouts(config.batch, "uniform(0.5, 1.5)", config.group, config.batch, queue="pace(0)")
    fresh = simulate(Cluster(1, 0.1, rollouts=rollouts), config.steps, 0, progress=False)
    problem = token_bandit(states=config.states)
    methods = {name: policy_gradient(1.0, *arguments) for name, arguments in METHODS.items()}
    with results.new_folder(config.out, "mixed_groups") as folder:
        options = {name: plain(value) for name, value in asdict(config).items() if name != "out"}
        write_json(folder / results.CONFIG, {"study": "mixed_groups", **options})
        rows = []
        for law in LAWS:
            for mix in MIXES if law != "constant" else MIXES[:1]:
                trace = with_staleness(fresh, law, mix, config.staleness)
                rows += _train(config, trace, {"law": law, "mix": mix}, methods, problem)
                tell(f"{law} by {mix}")
        summary = pd.DataFrame(rows)
        write_csv(folder / results.SUMMARY, summary)
        results.write_origin(folder)
        results.remember(folder)
        best = tuned(summary, ["law", "mix", "method"], Measure("reward", "most"))
        keys = ["law", "mix", "method", "learning_rate"]
        columns = ["reward", "staleness", "mixed_pairs"]
        rewards = means(best, keys, columns, spreads=True)
        contrasts = contrast_table(best)
        with on_a_page(folder):
            tables = {REWARDS: rewards, CONTRASTS_FILE: contrasts}
            present(folder, tables, *_texts(config, rewards, contrasts))
    results.say_written(folder)
    return summary


def with_staleness(fresh: Trace, law: str, mix: str, mean: int) -> Trace:
    """Return a trace without staleness as if its samples had one of a law, drawn for each batch, group, ...

    Versions before the first update are version 0. The random numbers depend on the law and the mix alone.
    """
    tables, bandit = fresh.rollouts, token_bandit()
    assert tables is not None
    samples = tables.samples[tables.samples["outcome"] == "trained"].reset_index(drop=True)
    version = samples["version"].to_numpy()
    units = {"batch": version, "group": samples["group"].to_numpy(), "sample": samples["sample"].to_numpy()}
    draws = Streams(0, f"staleness {law} by {mix}").generator(0)
    if mix == "token":
        drawn = draw_staleness(law, mean, draws, (len(samples), bandit.tokens))
    else:
        drawn = draw_staleness(law, mean, draws, int(units[mix].max()) + 1)[units[mix]][:, None]
    versions = np.maximum(version[:, None] - drawn, 0)
    samples = samples.assign(read_version=versions[:, 0], staleness=version - versions[:, 0])
    row, token = np.nonzero(np.ones_like(versions[:, 1:]))
    switches = pd.DataFrame({"row": row, "share": (token + 1) / bandit.tokens, "version": versions[:, 1:].reshape(-1)})
    return dataclasses.replace(fresh, rollouts=tables._replace(samples=samples, switches=switches))


def draw_staleness(law: str, mean: int, draws: np.random.Generator, shape: int | tuple[int, ...]) -> np.ndarray:
    """Draw a staleness of a law with this mean for each entry of an array."""
    if law == "constant":
        return np.full(shape, mean)
    if law == "two_point":
        return 2 * mean * draws.integers(0, 2, shape)
    if law == "geometric":
        return draws.geometric(1 / (1 + mean), shape) - 1
    return np.round(mean / _STALE_SHARE).astype(int) * (draws.random(shape) < _STALE_SHARE)


def _train(
    config: Config, trace: Trace, labels: dict[str, str], methods: dict[str, PolicyGradient], problem: PolicyProblem
) -> list[dict[str, Any]]:
    """Return a row per method, rate and seed of a condition."""
    samples = trace.samples
    groups = samples.groupby("group")["read_version"]
    alike = samples.groupby(["group", "read_version"]).size().pow(2).groupby("group").sum()
    mixed = float((1 - alike / groups.size() ** 2).mean())
    members = [(seed, rate) for rate in config.tune for seed in range(config.seeds)]
    seeds, rates = zip(*members, strict=True)
    rows = []
    for name, method in methods.items():
        for (seed, rate), run in zip(members, replay_members(trace, method, problem, seeds, rates), strict=True):
            rows.append(
                {
                    **labels,
                    "method": name,
                    "learning_rate": rate,
                    "seed": seed,
                    "status": run.status,
                    "reward": run.evaluations["reward"].iloc[-1],
                    "final_loss": run.commits["loss"].iloc[-1],
                    "staleness": float(samples["staleness"].mean()),
                    "mixed_pairs": mixed,
                }
            )
    return rows


def contrast_table(best: pd.DataFrame) -> pd.DataFrame:
    """Return a row per contrast: the mean difference over seeds with its confidence interval.

    Each side is at its best rate, which the same runs chose: a bias towards both.
    """
    rewards = best.set_index(["law", "mix", "method", "seed"])["reward"].sort_index()
    rows = []
    for name, first, second, expected in CONTRASTS:
        gap = (rewards[first] - rewards[second]).to_numpy()
        width = np.nan
        if len(gap) > 1:
            width = stats.t.ppf((1 + _CONFIDENCE) / 2, len(gap) - 1) * gap.std(ddof=1) / np.sqrt(len(gap))
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


def _texts(config: Config, rewards: pd.DataFrame, contrasts: pd.DataFrame) -> list[str]:
    seeds = over_seeds(config.seeds, "means over")
    spread = zip(rewards["reward"], rewards["reward_sd"], strict=True)
    shown = rewards.assign(reward=[f"{number_text(mean)} ± {number_text(sd, 2)}" for mean, sd in spread])
    columns: list[str | Column] = ["law", "mix", "method", "learning_rate", "reward", "staleness", "mixed_pairs"]
    texts = [
        f"token bandit, groups of {config.group}, batches of {config.batch}, {config.steps} updates; {seeds}",
        text_of(shown, columns, REWARDS),
        "mixed pairs: the probability that two draws from a group are by different versions",
        "",
        f"contrasts, {_CONFIDENCE:.0%} intervals over seeds",
        text_of(contrasts, ["contrast", "expected", "difference", "low", "high"], CONTRASTS_FILE),
    ]
    names = [f"{row.law} by {row.mix}, {row.method}" for row in rewards.itertuples()]
    if edge := at_the_edge(rewards, config.tune, names):
        texts.append(edge)
    return texts
