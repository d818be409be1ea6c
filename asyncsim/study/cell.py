"""What is compared: methods on a cluster, each with the timing that it needs."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from asyncsim.clusters.cluster import Cluster
from asyncsim.clusters.laws import Law
from asyncsim.methods import Method, Timing
from asyncsim.problems import Problem
from asyncsim.study.config import StudyConfig

if TYPE_CHECKING:
    import pandas as pd

_ROUND_OFF = 1e-12


class Cell(NamedTuple):
    """A cluster, and the methods and the problem that are run on it: one point of a study's grid.

    Attributes
    ----------
    name : str
        Of its folders inside ``traces`` and ``runs``; empty for a study of one cell.
    values : mapping
        What sets it apart from the others, as columns of the summary.
    config : StudyConfig
        With its seeds, its length and what is recorded.
    cluster : Cluster
    methods : list of Method
    problem : Problem
    """

    name: str
    values: Mapping[str, Any]
    config: StudyConfig
    cluster: Cluster
    methods: list[Method]
    problem: Problem

    @property
    def wanted(self) -> list[str]:
        """The folders of its runs, in the order of computing."""
        return [self.folder_of(method, seed) for seed in range(self.config.seeds) for method in self.methods]

    def own(self, method: Method) -> tuple[Cluster, int]:
        """Return the cluster that a method is run on, and the commits there, which have as many gradients for all."""
        cluster = meet(self.cluster, method.timing)
        return cluster, same_gradients(self.config.commits, self.cluster, cluster)

    def with_options(self, **options: Any) -> "Cell":
        """Return the cell with other values of some options, on the same cluster."""
        return self._replace(config=self.config.at(**options))

    def folder_of(self, method: Method, seed: int) -> str:
        """Return the folder of a run, inside that of the study."""
        return (Path("runs", self.name) / f"{method.name}-seed{seed}").as_posix()


def missing(cells: Sequence[Cell], summary: "pd.DataFrame") -> list[str]:
    """Return the folders of the runs that a study's summary lacks."""
    there = set(summary.get("run_folder", ()))  # no such column if all have failed
    return [name for cell in cells for name in cell.wanted if name not in there]


def timings(cluster: Cluster, methods: list[Method]) -> dict[Cluster, list[str]]:
    """Return the clusters that the methods are run on, each with the names of its methods.

    First the one with the most workers; of several, the one of the most methods, then of the first method.
    """
    found: dict[Cluster, list[str]] = {}
    for method in methods:
        found.setdefault(meet(cluster, method.timing), []).append(method.name)
    return dict(sorted(found.items(), key=lambda item: (item[0].workers, len(item[1])), reverse=True))


def meet(cluster: Cluster, timing: Timing) -> Cluster:
    """Return the cluster with what a method's timing needs, all else and all random numbers being equal."""
    needs: dict[str, Any] = {name: value for name, value in timing._asdict().items() if value is not None}
    if needs.get("workers", cluster.workers) != cluster.workers:
        laws, windows = cluster.compute, cluster.window
        needs["compute"] = laws if isinstance(laws, Law) else laws[: needs["workers"]]
        needs.setdefault("window", windows if isinstance(windows, int) else windows[: needs["workers"]])
    if needs.get("protocol", cluster.protocol) != cluster.protocol:
        needs["exclusive"] = True
        needs.setdefault("read_blocks", 1)
    size, held = needs.pop("message_size", None), cluster.message_bytes
    if size is not None and held is not None:
        down = held[1] if isinstance(held, tuple) else held
        needs["message_bytes"] = (size * down, down)
    return dataclasses.replace(cluster, **needs)


def same_gradients(commits: int, cluster: Cluster, other: Cluster) -> int:
    """Return in how many commits of another cluster there are as many gradients as in those of the first."""
    # What is to spare guards the floor against round-off: mean windows of unlike workers are quotients.
    return math.floor(commits * cluster.mean_window / other.mean_window * (1 + _ROUND_OFF))
