"""Without a server: gossip on topologies, against all-reduces and methods that have a server.

Methods without a server run on each topology, methods behind a barrier with a collective by an
all-reduce, the rest on a cluster with a server; all with the same random numbers, each at the best
of the learning rates. Prints the simulated time and the gradients to a target, and the distance of
the replicas beside the topology's spectral gap. For one slow worker of 16:
--compute "[gamma(5, 0.2)] + [gamma(1, 0.2)]*15".
"""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from asyncsim.base.console import each_note_once, note
from asyncsim.base.errors import InputError, require_positive
from asyncsim.byzantine.attacks import parse_attack
from asyncsim.clusters.cluster import Cluster
from asyncsim.clusters.laws import Constant, scaled
from asyncsim.clusters.network import PerWorker, per_worker
from asyncsim.clusters.topologies import as_topology, slow_links
from asyncsim.methods import Method
from asyncsim.problems.problem import Problem
from asyncsim.replays.attacked import require_attackable
from asyncsim.replays.run import Run
from asyncsim.study.cell import Cell, CellRun, meet
from asyncsim.study.comparison import Comparison, final_accuracy
from asyncsim.study.config import SERVER, StudyConfig, TopologyLike
from asyncsim.study.loading import own_file
from asyncsim.study.sweep import ComparisonConfig, preset
from asyncsim.study.target import Target
from asyncsim.theory import spectral_gap
from asyncsim.traces.trace import Trace

#: The topology of methods with an all-reduce.
ALL_REDUCE = "all-reduce"


@dataclass(frozen=True)
class Options(ComparisonConfig):
    """Options of the study of gossip."""

    slow_link: float = 1.0
    """Factor by which messages take longer between worker 0 and its first neighbour, or the server;
    needs a latency or a bandwidth."""

    @property
    def topologies(self) -> dict[str, TopologyLike]:
        """The topologies by their names in tables; a user's file has its text."""
        topologies = self.topology if isinstance(self.topology, tuple) else (self.topology,)
        names = [
            text if isinstance(text, str) and own_file(text)[0] else repr(as_topology(text))
            for text in topologies
        ]
        if len({*names, SERVER, ALL_REDUCE}) <= len(names) + 1:
            raise InputError(
                f"topology = {', '.join(names)}: one comes twice, or is called {SERVER!r} or "
                f"{ALL_REDUCE!r}; give each once, and matrices other names: "
                "adjacency(matrix, label=...)"
            )
        return dict(zip(names, topologies, strict=True))

    def points(self) -> list[dict[str, Any]]:
        """Return the values of each cell: each topology, an all-reduce and a server."""
        places = (*self.topologies, ALL_REDUCE, SERVER)
        points = [{"topology": "", **point} for point in super().points()]
        points = [{**point, "topology": place} for place in places for point in points]
        if isinstance(self.split, tuple):  # a number in every row
            points = [{**point, "split": point["split"] or np.inf} for point in points]
        return [point for i, point in enumerate(points) if point not in points[:i]]

    def at(self, *, topology: str = SERVER, **values: Any) -> StudyConfig:
        """Return the options of a cell; without a server there is no service."""
        if np.isinf(values.get("split") or 0):
            values["split"] = None
        place = self.topologies.get(topology, SERVER)
        service = self.service if place == SERVER else "constant(0)"
        return super().at(topology=place, **{"service": service, **values})

    def goal_on(self, problem: Problem) -> Target:
        """Return the target: a test accuracy, or a training loss if there is no accuracy."""
        return self.goal_of(final_accuracy(self, problem).name)

    def check(self) -> None:
        """Check the options; see `StudyConfig.check`."""
        require_positive("slow_link", self.slow_link)
        super().check()


Config, SCALES = preset(
    Options,
    small={
        "workers": 16,
        "steps": 60,
        "seeds": 1,
        "topology": ("ring()", "one_peer_exponential()", "complete()"),
        "methods": (
            *("dpsgd", "sgp", "osgp", "adpsgd"),
            "batch_sgd(policy='barrier(collective=ring)')",
            "downpour",
        ),
        "tune": (0.025, 0.1, 0.2, 0.4, 0.8),
        "evaluate_every": 2,
    },
)


@each_note_once()
def in_their_places(config: Options, cells: list[Cell]) -> list[Cell]:
    """Keep the methods of each place that can run there, with the slow link; notes name others."""
    cells = [
        cell._replace(cluster=_with_slow_link(cell.cluster, config.slow_link)) for cell in cells
    ]
    cells = [
        cell._replace(methods=[method for method in cell.methods if _belongs(cell, method)])
        for cell in cells
    ]
    if not any(cell.methods and cell.cluster.topology for cell in cells):
        raise InputError(
            f"methods = {', '.join(map(str, config.methods))}: none can be run on topology = "
            f"{', '.join(config.topologies)}; give dpsgd, sgp, osgp, adpsgd, clipped_gossip or "
            "robust_gossip, or run the study compare"
        )
    return cells


def _belongs(cell: Cell, method: Method) -> bool:
    """Return whether a method belongs to the place of a cell and can run there."""
    policy, place = method.timing.policy, cell.values["topology"]
    rival = SERVER if policy is None or policy.collective is None else ALL_REDUCE
    is_rival = place in (SERVER, ALL_REDUCE)
    if method.gossips == is_rival or (is_rival and place != rival):
        return False
    try:
        cluster = meet(cell.cluster, method.timing)
        if (attack := parse_attack(cell.config.attack)) is not None:
            attack.byzantine(cluster.workers)
            require_attackable(method, cell.problem, attack, cluster.workers)
    except InputError as error:
        note(f"{method.name} on {place} is left out: {error}")
        return False
    return True


def _with_slow_link(cluster: Cluster, factor: float) -> Cluster:
    """Return a cluster whose worker 0 has a slow link."""
    if factor == 1 or cluster.workers == 1:
        return cluster
    if cluster.topology is not None:
        topology = as_topology(cluster.topology)
        link = (0, topology.neighbours(cluster.workers)[0][0], factor)
        slowed = slow_links(topology, [link])
        return dataclasses.replace(cluster, topology=slowed)

    def slower(values: Any, scale: Callable[[Any], Any]) -> PerWorker:
        is_each = isinstance(values, PerWorker)
        first, *rest = values.values if is_each else (values,) * cluster.workers
        first = tuple(map(scale, first)) if isinstance(first, tuple) else scale(first)
        return per_worker([first, *rest])

    ways: dict[str, Any] = {}
    if cluster.latency != Constant(0.0):
        ways["latency"] = slower(cluster.latency, lambda law: scaled(law, factor))
    if cluster.bandwidth is not None:
        ways["bandwidth"] = slower(cluster.bandwidth, lambda rate: rate / factor)
    return dataclasses.replace(cluster, **ways)


def consensus(job: CellRun, run: Run, trace: Trace) -> Mapping[str, float]:
    """Return the mean squared distance of the replicas from their mean, averaged over the
    evaluations after the first, and the spectral gap; NaN with a server.
    """
    topology = job.cluster.topology
    if topology is None:
        return {"consensus_distance": np.nan, "spectral_gap": np.nan}
    distance = run.evaluations["consensus_distance"].iloc[1:].mean()
    return {"consensus_distance": distance, "spectral_gap": spectral_gap(topology, trace.workers)}


run = Comparison(
    "gossip",
    compared=("method", "topology"),
    columns=("consensus_distance", "spectral_gap"),
    of_run=consensus,
    prepare=in_their_places,
).run
