"""Robust aggregation under attack: which rule withstands how many Byzantine workers.

Every rule and plain batch_sgd run without an attack and under each attack, with each number of
Byzantine workers, at each learning rate. A rule's rate is chosen for its worst case over the
attacks. Prints the test accuracy in the worst case, and the weight of the Byzantine messages;
writes traces, runs, tables and a figure. Heterogeneous data: --problem "digits(split=0.1)".
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from asyncsim.base.calls import Call, read
from asyncsim.base.console import counted, note
from asyncsim.base.errors import InputError, require_count, require_fraction, require_positive
from asyncsim.byzantine.aggregation import Rule, parse_rule
from asyncsim.byzantine.attacks import Attack, parse_attack
from asyncsim.methods import Method, robust
from asyncsim.study.cell import Cell
from asyncsim.study.columns import text_of
from asyncsim.study.config import AttackLike, MethodLike, PolicyLike, RuleLike, StudyConfig
from asyncsim.study.entries import from_file
from asyncsim.study.finished import present
from asyncsim.study.finished import read as finished_of
from asyncsim.study.loading import own_file
from asyncsim.study.ranking import Measure, at_the_edge, tuned
from asyncsim.study.sweep import Result, check_values, run_cells, sweep

#: Files with the accuracies of all runs (means over the seeds), and each rule's worst cases at its
#: best rate.
ACCURACY, WORST = "accuracy.csv", "worst.csv"
#: Entry in the column of attacks for runs without an attack.
NO_ATTACK = "none"


@dataclass(frozen=True)
class Config(StudyConfig):
    """Options of the study of robustness."""

    workers: int = 15
    """Workers of the cluster."""
    steps: int = 60
    """Rounds: messages of each worker."""
    policy: PolicyLike = "barrier"
    """Policy that forms versions: barrier, barrier(count), first_of(count) or buffered(count)."""
    rules: tuple[RuleLike, ...] = (
        "median()",
        "trimmed_mean(f=f)",
        "krum(f=f)",
        "cge(f=f)",
        "nnm(trimmed_mean(f=f))",
    )
    """Rules of aggregation to compare; f stands for the number of Byzantine workers, at most the
    largest that the rule allows. Your own: "FILE.py:FUNCTION(f=f)"."""
    attacks: tuple[AttackLike, ...] = ("sign_flip(scale=10)", "alie", "inner_product", "label_flip")
    """Attacks, without the Byzantine workers; the end of --help lists them. Your own:
    FILE.py:FUNCTION."""
    byzantine: tuple[int, ...] | None = None
    """Numbers of Byzantine workers, the first ones of the cluster; by default 15 and 30 % of the
    workers.
    """
    tune: tuple[float, ...] = (0.1, 0.4)
    """Learning rates to try."""
    worker_momentum: float = 0.0
    """Momentum of the workers' messages, before the rule; from 0 to below 1."""
    server_momentum: float = 0.0
    """Momentum of the server, after the rule; from 0 to below 1."""
    methods: tuple[MethodLike, ...] = ("batch_sgd",)
    """Methods beside the rules."""
    seeds: int = 1
    """Number of seeds: 0, 1, ..."""

    def check(self) -> None:
        """Check the options; see `StudyOptions.check`."""
        super().check()
        for name in (
            "rules",
            "attacks",
            "tune",
            *(("byzantine",) if self.byzantine is not None else ()),
        ):
            check_values(name, getattr(self, name))
        for count in self.counts:
            require_count("byzantine", count)
        for rate in self.tune:
            require_positive("tune", rate)
        require_fraction("worker_momentum", self.worker_momentum)
        require_fraction("server_momentum", self.server_momentum)

    @property
    def counts(self) -> tuple[int, ...]:
        """The numbers of Byzantine workers."""
        if self.byzantine is not None:
            return self.byzantine
        return tuple(sorted({max(1, round(share * self.workers)) for share in (0.15, 0.3)}))


def run(config: Config) -> Result:
    """Run the study; see `asyncsim.study.sweep.run_cells`."""
    config.check()
    config.say_ignored(("learning_rate", "attack"), "beside --tune and --attacks")
    _require_attacks(config)
    with config.computing_device():
        cells = []
        rules, attacks = _rules(config), _attacks(config)
        for base in sweep(config, [{"learning_rate": rate} for rate in config.tune]):
            methods = base.methods
            for count in (0, *config.counts):
                robust_methods = [
                    _method(config, base, name, rule, count) for name, rule in rules.items()
                ]
                for name in attacks if count else (NO_ATTACK,):
                    cells.append(
                        base._replace(
                            name=f"byzantine-{count}_{name}_{base.name}",
                            values={"byzantine": count, "attack": name, **base.values},
                            config=base.config.at(attack=attacks[name](count) if count else None),
                            methods=[*methods, *robust_methods],
                        )
                    )
        conclude = functools.partial(_conclude, config)
        return run_cells("robustness", config, cells, conclude)


def _rules(config: Config) -> dict[str, Callable[[int], Rule | str]]:
    """Return the rules by their names in tables, as functions of the number of Byzantine
    workers.
    """
    rules: dict[str, Callable[[int], Rule | str]] = {}
    for entry in config.rules:
        if isinstance(entry, str):
            rules[own_file(entry)[1]] = functools.partial(_rule_of_text, entry)
        elif isinstance(entry, Rule):
            rules[entry.text] = functools.partial(lambda rule, f: rule, entry)
        elif callable(entry):
            rules[f"{entry.__name__}(f=f)"] = functools.cache(entry)
        else:
            raise InputError(
                f"rules = {entry!r}: must be a text, a rule, or a function of f that returns a "
                "rule: aggregation.krum say"
            )
    return _named_apart("rules", rules, config.rules)


def _rule_of_text(text: str, f: int) -> Rule | str:
    """Return the rule of a user's file, or a shipped rule's text, by which rates share programs."""
    file, call = own_file(text)
    call = _substitute(call, "rules", lambda name: f if name == "f" else None)
    return from_file("rules", f"{file}:{call}" if file else call, Rule)


def _attacks(config: Config) -> dict[str, Callable[[int], Attack]]:
    """Return the attacks by their names in tables, as functions of the number of Byzantine
    workers.
    """
    attacks: dict[str, Callable[[int], Attack]] = {}
    entries: Sequence[Any] = config.attacks
    for entry in entries:
        if isinstance(entry, str):
            attacks[own_file(entry)[1]] = functools.partial(_attack_of_text, entry)
        elif callable(entry) and not isinstance(entry, Attack):
            attacks[entry.__name__] = functools.cache(entry)
        else:
            raise InputError(
                f"attacks = {getattr(entry, 'text', entry)!r}: must be a text, or a function of "
                "workers that returns an attack: attacks.alie say"
            )
    return _named_apart("attacks", attacks, config.attacks)


def _named_apart(option: str, table: dict[str, Any], entries: Sequence[Any]) -> dict[str, Any]:
    """Return a table; raise InputError if two entries have the same name in it."""
    if len(table) < len(entries):
        raise InputError(
            f"{option} = {', '.join(table)}: one comes twice; give each a name of its own"
        )
    return table


def _method(
    config: Config, base: Cell, name: str, rule: Callable[[int], Rule | str], count: int
) -> Method:
    """Build a rule's method at a rate for a number of Byzantine workers."""
    policy = base.cluster.policy
    largest = parse_rule(rule(0)).largest(policy.per_version(base.cluster.workers))
    method = robust(
        rule(max(0, min(count, largest))),
        base.config.learning_rate,
        config.worker_momentum,
        config.server_momentum,
        policy,
    )
    return method._replace(name=name)


def _substitute(text: str, option: str, value: Any) -> str:
    """Substitute names in a call's text by the values that a function returns for them."""
    call = read(text, "a call", "krum(f=f)")
    if not isinstance(call, Call):
        raise InputError(f"{option} = {text!r}: must be a call, krum(f=f) say")

    def filled(node: Any) -> Any:
        if not isinstance(node, Call):
            return node
        if not node.brackets and (replacement := value(node.name)) is not None:
            return replacement
        named = tuple((name, filled(argument)) for name, argument in node.named)
        return node._replace(positional=tuple(map(filled, node.positional)), named=named)

    return str(filled(call))


def _attack_of_text(text: str, count: int) -> Attack:
    """Build the attack of a text, a shipped one or the user's, by a number of workers."""
    file, call_text = own_file(text)
    call = read(call_text, "an attack", "alie")
    if not isinstance(call, Call):
        raise InputError(f"attacks = {text!r}: must be an attack without its workers, alie say")
    if "workers" in dict(call.named) or call.positional:
        raise InputError(f"attacks = {text!r}: its workers follow from --byzantine; leave them out")
    call_text = str(call._replace(named=(("workers", count), *call.named), brackets=True))
    attack = parse_attack(
        from_file("attacks", f"{file}:{call_text}" if file else call_text, Attack)
    )
    assert attack is not None
    return attack


def _require_attacks(config: Config) -> None:
    """Raise InputError if every attack is ineffective for some number of Byzantine workers."""
    for count in config.counts:
        attacks = [attack(count) for attack in _attacks(config).values()]
        for attack in attacks:
            attack.byzantine(config.workers)
        reasons = [attack.weakness(config.workers) for attack in attacks]
        if all(reasons):
            raise InputError(
                f"attacks = {', '.join(_attacks(config))}: {reasons[0]}, or another attack"
            )


def scored(summary: pd.DataFrame) -> pd.DataFrame:
    """Give diverged runs an accuracy of 0 and count them as finished, so that they are worst cases.

    The added column ``diverged`` marks them.
    """
    diverged = summary["status"] != "finished"
    accuracy = summary["test_accuracy"].where(~diverged, 0.0).fillna(0.0)
    return summary.assign(diverged=diverged, test_accuracy=accuracy, status="finished")


def worst_runs(runs: pd.DataFrame) -> pd.DataFrame:
    """Select the runs of each method and number of Byzantine workers under its worst attack, at the
    best rate.

    ``runs``: from `scored`. `asyncsim.study.ranking.tuned` chooses the rate.
    """
    return tuned(runs, ["method", "byzantine"], Measure("test_accuracy", "most"), cases=["attack"])


def accuracy_table(runs: pd.DataFrame) -> pd.DataFrame:
    """Average the accuracy over the seeds by method, attack, number of Byzantine workers and rate.

    ``runs``: from `scored`. Columns: ``method``, ``byzantine``, ``attack``, ``learning_rate``,
    ``seeds``, ``diverged`` and ``test_accuracy``.
    """
    groups = runs.groupby(["method", "byzantine", "attack", "learning_rate"], sort=False)
    return groups.agg(
        seeds=("seed", "nunique"),
        diverged=("diverged", "sum"),
        test_accuracy=("test_accuracy", "mean"),
    ).reset_index()


def _weights(folder: Path, runs: pd.DataFrame) -> list[float]:
    """Compute the weight of Byzantine messages relative to their share, for the runs of each worst
    case.
    """
    finished, weights = finished_of(folder, "robustness"), []
    for (_, byzantine), rows in runs.groupby(["method", "byzantine"], sort=False):
        commits = [finished.run(name).commits for name in rows["run_folder"]]
        attacked = [run for run in commits if "byzantine_share" in run and byzantine]
        shares = [
            run["byzantine_share"].mean() / run["byzantine_messages"].mean() for run in attacked
        ]
        weights.append(sum(shares) / len(shares) if shares else float("nan"))
    return weights


def _verdict(worst: pd.DataFrame) -> str:
    """Say which rules have the highest and the lowest accuracy with the most Byzantine workers."""
    rows = worst[worst["byzantine"] == worst["byzantine"].max()].sort_values("test_accuracy")
    best, last = rows.iloc[-1], rows.iloc[0]
    text = (
        f"with {best['byzantine']} Byzantine {best['method']} has the highest test accuracy in "
        f"its worst case, {best['test_accuracy']:.3f} under {best['attack']}"
    )
    if len(rows) == 1:
        return text
    return (
        f"{text}; {last['method']} the lowest, {last['test_accuracy']:.3f} under {last['attack']}"
    )


def _conclude(config: Config, folder: Path, summary: pd.DataFrame) -> None:
    if "test_accuracy" not in summary:
        raise InputError(
            "problem: has no test accuracy to compare rules by; choose digits or mnist"
        )

    runs = scored(summary)
    attacks = _attacks(config)
    weak = [
        name != NO_ATTACK and bool(attacks[name](count).weakness(config.workers))
        for name, count in zip(runs["attack"], runs["byzantine"], strict=True)
    ]
    at_worst = worst_runs(runs[~np.array(weak)])
    worst = accuracy_table(at_worst).assign(byzantine_weight=_weights(folder, at_worst))
    cases = worst.assign(
        case=[f"{row.test_accuracy:.3f} {row.attack}" for row in worst.itertuples()]
    )
    table = cases.pivot(index="method", columns="byzantine", values="case").reindex(
        worst["method"].unique()
    )
    table.columns = ["no attack", *(f"{count} Byzantine" for count in table.columns[1:])]
    table["no attack"] = [text.removesuffix(f" {NO_ATTACK}") for text in table["no attack"]]
    most_byzantine = worst[worst["byzantine"] == worst["byzantine"].max()].set_index("method")
    table = table.join(most_byzantine["byzantine_weight"])
    text = (
        f"{counted(config.workers, 'worker')}, {config.steps} rounds: test accuracy in the worst "
        "case over the "
        "attacks, each rule at its best rate\ntheir weight: weight of a Byzantine message relative "
        "to an equal share, "
        f"with the most Byzantine workers\n{text_of(table.reset_index())}"
    )
    present(folder, {ACCURACY: accuracy_table(runs), WORST: worst}, text, verdict=_verdict(worst))
    names = [f"{row.method} with {row.byzantine} Byzantine" for row in worst.itertuples()]
    if edge := at_the_edge(worst, config.tune, names):
        note(edge)
