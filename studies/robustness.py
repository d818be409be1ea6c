"""Robust aggregation under attack: which rule withstands how many Byzantine workers.

Every rule and plain batch_sgd run without an attack and under each attack, with each number of
Byzantine workers, at each learning rate. A rule's rate is chosen for its worst case over the
attacks. Prints the test accuracy in the worst case, and the weight of the Byzantine messages;
writes traces, runs, tables and figures. Heterogeneous data: --problem "digits(split=0.1)".
"""

import re
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pandas as pd

from asyncsim.base.errors import InputError, require_count, require_fraction
from asyncsim.byzantine.aggregation import Rule, parse_rule
from asyncsim.byzantine.attacks import parse_attack
from asyncsim.methods import Method, robust
from asyncsim.problems import Problem
from asyncsim.problems.problem import measures
from asyncsim.replays.run import Run
from asyncsim.study.cell import Cell, CellRun
from asyncsim.study.comparison import Comparison
from asyncsim.study.config import RuleLike, StudyConfig, check_values
from asyncsim.study.entries import from_file
from asyncsim.study.loading import own_file
from asyncsim.study.ranking import Measure
from asyncsim.study.sweep import ComparisonConfig, preset
from asyncsim.traces.trace import Trace

#: The attack without Byzantine workers.
NONE = "none"
#: The f of a rule that stands for the number of Byzantine workers.
_NUMBER = re.compile(r"(?<!\w)f(?=\s*[,)])")


@dataclass(frozen=True)
class Options(ComparisonConfig):
    """Options of the study of robustness."""

    several: ClassVar = ComparisonConfig.several | {"byzantine"}

    rules: tuple[RuleLike, ...] = (
        "median()",
        "trimmed_mean(f=f)",
        "krum(f=f)",
        "cge(f=f)",
        "nnm(trimmed_mean(f=f))",
    )
    """Rules of aggregation to compare; f stands for the number of Byzantine workers, at most the
    largest that the rule allows. Your own: "FILE.py:FUNCTION(f=f)"."""
    byzantine: int | tuple[int, ...] | None = None
    """Numbers of Byzantine workers, the first ones of the cluster. By default 15 and 30 % of the
    workers. Runs without an attack are added.
    """
    worker_momentum: float = 0.0
    """Momentum of the workers' messages, before the rule; from 0 to below 1."""
    server_momentum: float = 0.0
    """Momentum of the server, after the rule; from 0 to below 1."""

    @property
    def varied(self) -> dict[str, tuple[Any, ...]]:
        """The options with several values."""
        shares = {max(1, round(share * self.workers)) for share in (0.15, 0.3)}
        counts = tuple(sorted(shares)) if self.byzantine is None else self.byzantine
        several = {"byzantine": counts, "attack": self.attack or NONE}
        return super().varied | {
            name: value if isinstance(value, tuple) else (value,) for name, value in several.items()
        }

    def points(self) -> list[dict[str, Any]]:
        """Return the values of each cell: each attack by each number, and no attack."""
        points = super().points()
        plain = [{**point, "byzantine": 0, "attack": NONE} for point in points]
        return [point for i, point in enumerate(plain) if point not in plain[:i]] + points

    def at(self, *, byzantine: int = 0, attack: str = NONE, **values: Any) -> StudyConfig:
        """Return the options of a cell, whose attack has its workers."""
        text = None if attack == NONE or not byzantine else _with_workers(attack, byzantine)
        return super().at(attack=text, **values)

    def check(self) -> None:
        """Check the options; see `StudyConfig.check`."""
        check_values("rules", self.rules)
        for count in self.varied["byzantine"]:
            require_count("byzantine", count)
        require_fraction("worker_momentum", self.worker_momentum)
        require_fraction("server_momentum", self.server_momentum)
        super().check()


def _with_workers(attack: str, count: int) -> str:
    """Add the number of Byzantine workers to an attack's text."""
    name, _, arguments = attack.partition("(")
    if "workers" in arguments:
        raise InputError(
            f"attack = {attack!r}: its workers follow from --byzantine; leave them out"
        )
    rest = arguments.removesuffix(")")
    return f"{name}(workers={count}{rest and f', {rest}'})"


Config, SCALES = preset(
    Options,
    small={
        "workers": 15,
        "steps": 60,
        "policy": "barrier",
        "methods": ("batch_sgd",),
        "attack": ("sign_flip(scale=10)", "alie", "inner_product", "label_flip"),
        "tune": (0.1, 0.4),
        "seeds": 1,
        "evaluate_every": None,
    },
)


def with_rules(config: Options, cells: list[Cell]) -> list[Cell]:
    """Add a method for each rule, with the name of the rule."""
    weaknesses = []
    for cell in cells:
        if (attack := parse_attack(cell.config.attack)) is not None:
            attack.byzantine(cell.cluster.workers)  # raises for workers that there are not
            weaknesses.append(attack.weakness(cell.cluster.workers))
    if weaknesses and all(weaknesses):
        raise InputError(f"attack = {config.attack}: {weaknesses[0]}, or another attack")
    return [
        cell._replace(
            methods=[*cell.methods, *(_method(config, cell, rule) for rule in config.rules)]
        )
        for cell in cells
    ]


def _method(config: Options, cell: Cell, entry: Any) -> Method:
    """Build the method of a rule at a cell's rate for its number of Byzantine workers."""
    text = entry if isinstance(entry, str) else entry.text

    def rule(f: int) -> Rule | str:
        return from_file("rules", _NUMBER.sub(str(f), text), Rule)

    policy, workers = cell.cluster.policy, cell.cluster.workers
    largest = parse_rule(rule(0)).largest(policy.per_version(workers))
    method = robust(
        rule(max(0, min(cell.values["byzantine"], largest))),
        cell.config.learning_rate,
        config.worker_momentum,
        config.server_momentum,
        policy,
    )
    return method._replace(name=own_file(text)[1])


def outcome(job: CellRun, run: Run, trace: Trace) -> dict[str, Any]:
    """Return the accuracy, 0 of a diverged run; the weight of a Byzantine message relative to an
    equal share; and whether the attack has no effect.
    """
    last, commits = run.evaluations["test_accuracy"].iloc[-1], run.commits
    weight = np.nan
    if job.cell.values["byzantine"] and "byzantine_share" in commits:
        weight = commits["byzantine_share"].mean() / commits["byzantine_messages"].mean()
    attack = parse_attack(job.cell.config.attack)
    return {
        "accuracy": 0.0 if run.diverged_at is not None else float(last),
        "byzantine_weight": weight,
        "is_weak": attack is not None and bool(attack.weakness(trace.workers)),
    }


def counting(summary: pd.DataFrame) -> pd.DataFrame:
    """Count diverged runs, as worst cases, and leave attacks without an effect out."""
    return summary[~summary["is_weak"].astype(bool)].assign(status="finished")


def accuracy(config: Options, problem: Problem) -> Measure:
    """Compare by the accuracy in the worst case."""
    if "test_accuracy" not in measures(problem):
        raise InputError(
            "problem: has no test accuracy to compare rules by; choose digits or mnist"
        )
    return Measure("accuracy", "most")


run = Comparison(
    "robustness",
    measure=accuracy,
    columns=("byzantine_weight",),
    of_run=outcome,
    prepare=with_rules,
    cases=("attack",),
    counting=counting,
).run
