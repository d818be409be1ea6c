"""What deaths of workers cost: goodput by policy and loss by method, at several rates of death.

Clusters that differ in the deaths and in the policy have the same random numbers. Prints for each
the division of the workers' time into gradients that count and several losses, and the remaining
commits per second; and for each method the time to a target.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from asyncsim.base.errors import require_nonnegative
from asyncsim.clusters.failures import crash
from asyncsim.clusters.laws import as_law
from asyncsim.replays.run import Run
from asyncsim.study.cell import CellRun
from asyncsim.study.comparison import (
    Comparison,
    Further,
    Results,
    clusters_table,
    costs_of_clusters,
)
from asyncsim.study.config import LawLike, StudyConfig
from asyncsim.study.sweep import ComparisonConfig, preset
from asyncsim.traces.trace import Trace
from asyncsim.traces.trace_summary import kept_versions

#: By default, policies that suit the number of workers.
USUAL = "usual"


@dataclass(frozen=True)
class Options(ComparisonConfig):
    """Options of the study of failures."""

    several: ClassVar = ComparisonConfig.several | {"deaths"}

    deaths: float | tuple[float, ...] = (0.0, 20.0, 100.0)
    """Deaths of each worker per hour of presence, at exponential times; 0 for none."""
    lasts: LawLike = "exponential(30)"
    """Law of the time (s) until a dead worker is back, without its state."""
    detect: float = 5.0
    """Seconds until the server detects a death; until then others wait for the worker."""

    def points(self) -> list[dict[str, Any]]:
        """Return the values of each cell."""
        points = [
            {"policy": self.policy, "deaths": self.deaths, **rest} for rest in super().points()
        ]
        if self.policy != USUAL:
            return points
        usual = ("asynchronous", "bounded_staleness(3)", "barrier")
        return [
            {**point, "policy": policy}
            for point in points
            for policy in (*usual, f"first_of({max(1, point.get('workers', self.workers) // 2)})")
        ]

    def at(self, *, deaths: float | None = None, **values: Any) -> StudyConfig:
        """Return the options of a cell; its deaths are added to its failures."""
        deaths = require_nonnegative("deaths", self.deaths if deaths is None else deaths, "an hour")
        options = super().at(**values)
        failures = options.failures
        failures = (failures,) if isinstance(failures, str) else tuple(failures)
        if deaths:
            lasts = as_law("lasts", self.lasts)
            failures += (str(crash(f"exponential({3600 / deaths!r})", lasts, self.detect)),)
        return options.at(failures=failures)


Config, SCALES = preset(
    Options,
    small={
        "workers": 20,
        "policy": USUAL,
        "methods": ("downpour", "gem"),
        "target": 0.5,
        "hold": 0,
    },
    paper={"problem": "mnist", "steps": 938, "evaluate_every": 94},
)


def kept(job: CellRun, run: Run, trace: Trace) -> dict[str, float]:
    """Return the share of versions that no restored checkpoint has undone, and the deaths."""
    outages = trace.absences[trace.absences["worker"] < 0]
    restores = int((outages["to_row"] < len(trace)).sum())
    versions = int(trace.frame["version"].iloc[-1]) - restores
    share = kept_versions(trace) / versions if restores and versions else 1.0
    return {"kept": share, "died": int((trace.absences["kind"] == "crash").sum())}


def goodput(table: Results) -> Further:
    """Tabulate the costs of each cluster, with the part of the throughput that remains with
    deaths.
    """
    clusters = costs_of_clusters(table, lost=True, first=("kept", "died"))
    kept_throughput = clusters["throughput"] * clusters["kept"]
    others = [clusters[name] for name in table.keys if name not in ("deaths", "method")]
    fewest = kept_throughput.groupby(others or np.zeros(len(clusters))).transform("first")
    clusters.insert(4, "remaining", kept_throughput / fewest)
    tables, texts = clusters_table(table, clusters)
    died = clusters["died"].any()
    return tables, [*texts, "" if died else "no worker died in these runs: give more --steps"]


run = Comparison("failures", compared=("policy",), of_run=kept, further=goodput).run
