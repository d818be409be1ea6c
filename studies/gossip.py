"""Without a server: gossip on topologies, against all-reduces and methods that have a server.

Methods without a server are run on each topology, methods behind a barrier with a collective by an
all-reduce, the rest on a cluster with a server, all with the same random numbers and each at the
best of the learning rates that are tried. Options split the
data by class, or make a worker or a link slow. Prints the simulated time and the gradients to a
target, and the distance of the replicas beside the topology's spectral gap; writes traces, runs,
two tables and a figure.
"""

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd

from asyncsim.base.console import each_note_once, note, number_text
from asyncsim.base.errors import InputError, require_positive
from asyncsim.base.files import field_values
from asyncsim.byzantine.attacks import parse_attack
from asyncsim.clusters.cluster import Cluster, as_compute
from asyncsim.clusters.cluster_text import attack_text
from asyncsim.clusters.laws import Constant, Law, scaled
from asyncsim.clusters.network import PerWorker, per_worker
from asyncsim.clusters.topologies import Topology, as_topology, slow_links
from asyncsim.methods import Method
from asyncsim.problems.problem import Problem, measures
from asyncsim.replays.attacked import require_attackable
from asyncsim.study.cell import Cell, meet
from asyncsim.study.columns import text_of
from asyncsim.study.config import MethodLike, StudyConfig, TopologyLike
from asyncsim.study.entries import from_file
from asyncsim.study.finished import present, read
from asyncsim.study.loading import own_file
from asyncsim.study.ranking import ONE_SEED, Measure, at_the_edge, means, tuned
from asyncsim.study.sweep import Result, check_values, run_cells, sweep
from asyncsim.study.target import Target, TargetOptions
from asyncsim.theory import spectral_gap

#: The table of each method on each topology at its best learning rate, beside the summary of all
#: runs.
TABLE = "gossip.csv"
#: The places of methods with a server and of those with an all-reduce, in the column of topologies.
SERVER, ALL_REDUCE = "server", "all-reduce"
#: Measures of the last evaluation that the table has, if the problem has them.
_MEASURES = ("test_accuracy", "test_loss", "train_loss")


@dataclass(frozen=True)
class Config(TargetOptions, StudyConfig):
    """Options of the study of gossip."""

    workers: int = 16
    """Workers of the clusters."""
    steps: int = 60
    """Commits per worker, on average; a trace has steps * workers commits."""
    seeds: int = 1
    """Number of seeds: 0, 1, ... One trace per seed for each timing."""
    methods: tuple[MethodLike, ...] = (
        "dpsgd",
        "sgp",
        "osgp",
        "adpsgd",
        "batch_sgd(policy='barrier(collective=ring)')",
        "downpour",
    )
    """Methods to compare: those without a server are run on each topology, the others once, with a
    server, or with the all-reduce of their policy, as batch_sgd here."""
    topology: tuple[TopologyLike, ...] = ("ring()", "one_peer_exponential()", "complete()")
    """Topologies: ring(), exponential(), one_peer_exponential(), complete(),
    random_regular(degree), base2(), or FILE.py:FUNCTION. Methods whose workers meet in pairs leave
    out directed ones."""
    split: tuple[float | Literal["none"], ...] = ("none",)
    """How heterogeneous the workers' data are: parameters of the Dirichlet distributions by which
    each worker's classes are mixed; 0.1 is much, 100 hardly. none: all workers draw from all data,
    unless the problem says otherwise."""
    slow: float = 1.0
    """Factor by which worker 0 takes longer for a local step: 5, say."""
    slow_link: float = 1.0
    """Factor by which messages take longer between worker 0 and its first neighbour, or the server;
    needs a latency or a bandwidth."""
    tune: tuple[float, ...] = (0.025, 0.1, 0.2, 0.4, 0.8)
    """Learning rates to try for every method; the table shows each method on each topology at its
    best one.
    """
    evaluate_every: int | None = 2
    """Worker steps between evaluations on all data, between which the time to the target is
    interpolated, linearly in the logarithm of the loss or the error."""

    def goal_on(self, problem: Problem) -> Target:
        """Return the target: by default a test accuracy, or a training loss if the problem has no
        accuracy.
        """
        return self.goal_of(
            "test_accuracy" if "test_accuracy" in measures(problem) else "train_loss"
        )

    def topologies(self) -> dict[str, Topology]:
        """Return the topologies by their names in tables; import the user's files."""
        topologies = [
            as_topology(from_file("topology", entry, Topology, self.workers))
            for entry in self.topology
        ]
        names = [repr(topology) for topology in topologies]
        if len({*names, SERVER, ALL_REDUCE}) <= len(names) + 1:
            raise InputError(
                f"topology = {', '.join(names)}: one comes twice, or is called {SERVER!r} or "
                f"{ALL_REDUCE!r}; give each once, and matrices other names: "
                "adjacency(matrix, label=...)"
            )
        return dict(zip(names, topologies, strict=True))

    def check(self) -> None:
        """Check the options; see `StudyOptions.check`."""
        for name in ("slow", "slow_link"):
            require_positive(name, getattr(self, name))
        super().check()
        self.check_target()
        check_values("topology", self.topology)
        check_values("split", self.split)
        check_values("split", [concentration or "none" for concentration in self.split])
        for concentration in self.split:
            if concentration not in ("none", None):
                require_positive("split", concentration)
        for entry in self.topology:
            # A file is imported later: the folder of a resumed study may name a stranger's.
            if not isinstance(entry, str) or not own_file(entry)[0]:
                self.at(topology=as_topology(entry)).check()

    def at(self, **values: Any) -> StudyConfig:
        """Return the options of one cell."""
        options = field_values(self, StudyConfig)
        options_of_cell = {
            "slow": self.slow,
            "slow_link": self.slow_link,
            **values,
        }
        place = options_of_cell.get("topology", SERVER)
        if isinstance(place, str):
            options_of_cell["topology"] = self.topologies().get(place, SERVER)
        if np.isinf(options_of_cell.get("split", np.inf)):
            options_of_cell["split"] = None
        return _ClusterConfig(**{**options, **options_of_cell})


@dataclass(frozen=True)
class _ClusterConfig(StudyConfig):
    """Options of one cluster."""

    topology: str | Topology = SERVER
    split: float | None = None
    slow: float = 1.0
    slow_link: float = 1.0

    def _cluster(self, message_bytes: float | None) -> Cluster:
        cluster = super()._cluster(message_bytes)
        if self.topology != SERVER:
            topology = as_topology(self.topology)
            if self.slow_link != 1 and self.workers > 1:
                link = (0, topology.neighbours(self.workers)[0][0], self.slow_link)
                topology = slow_links(topology, [link])
            # The service has a default that must not apply here; the server's other options are
            # refused by name.
            return dataclasses.replace(cluster, service=Constant(0.0), topology=topology)
        if self.slow_link == 1 or self.workers == 1:
            return cluster

        def first_slow(values: Any, slower: Callable[[Any], Any]) -> PerWorker:
            first, *rest = (
                values.values if isinstance(values, PerWorker) else (values,) * self.workers
            )
            return per_worker(
                [tuple(map(slower, first)) if isinstance(first, tuple) else slower(first), *rest]
            )

        slower: dict[str, Any] = {}
        if cluster.latency != Constant(0.0):
            slower["latency"] = first_slow(cluster.latency, lambda law: scaled(law, self.slow_link))
        if cluster.bandwidth is not None:
            slower["bandwidth"] = first_slow(cluster.bandwidth, lambda rate: rate / self.slow_link)
        return dataclasses.replace(cluster, **slower)

    def _law(self, option: str) -> Any:
        law = super()._law(option)
        if option != "compute" or self.slow == 1:
            return law
        laws = as_compute(law, self.workers)
        first, *rest = (laws,) * self.workers if isinstance(laws, Law) else laws
        return [scaled(first, self.slow), *rest]


def run(config: Config) -> Result:
    """Run the study; see `asyncsim.study.sweep.run_cells`.

    Raises
    ------
    InputError
        No method without a server, or a target measure that the problem lacks.
    """
    config.check()
    config.say_ignored(("learning_rate",), "beside --tune")
    with config.computing_device():
        cells, left_out = _cells(config)
        goal = config.goal_on(cells[0].problem)
        goal.check_of(cells[0].problem)
        goal.check()
        cells = [cell._replace(goal=goal) for cell in cells]
        return run_cells(
            "gossip", config, cells, functools.partial(_conclude, config, goal, left_out)
        )


@each_note_once()
def _cells(config: Config) -> tuple[list[Cell], list[str]]:
    """Build a cell for each place and rate with its possible methods.

    Second, notes on methods that are left out on a topology.
    """
    attack = parse_attack(config.attack)
    if attack is not None:
        attack.byzantine(config.workers)
    places = (*config.topologies(), ALL_REDUCE, SERVER)
    grid: list[dict[str, Any]] = [{"topology": place} for place in places]
    if set(config.split) - {"none", None}:
        # A number in every row: infinite for homogeneous data.
        values = [
            np.inf if concentration in ("none", None) else concentration
            for concentration in config.split
        ]
        grid = [{"split": value, **point} for value in values for point in grid]
    cells, left_out = [], {}
    for cell in sweep(
        config, [{**point, "learning_rate": rate} for point in grid for rate in config.tune]
    ):
        if "split" in cell.values and (cell.problem.split or np.inf) != cell.values["split"]:
            raise InputError(
                f"split = {', '.join(map(str, config.split))}: problem = "
                f"{str(config.problem)!r} says its own, "
                "or cannot be split by class; choose digits, mnist or cifar10, without split "
                "in brackets, or a problem of yours whose train has a label"
            )
        methods, place = [], cell.values["topology"]
        for method in cell.methods:
            if (place if place in (ALL_REDUCE, SERVER) else None) != _place(method):
                continue
            try:
                cluster = meet(cell.cluster, method.timing)
                if attack is not None:
                    require_attackable(method, cell.problem, attack, cluster.workers)
            except InputError as error:
                note(f"{method.name} is left out: {error}")
                left_out[f"{method.name} on {place}"] = str(error)
                continue
            methods.append(method)
        if methods:
            cells.append(cell._replace(methods=methods))
    if not cells or cells[0].cluster.topology is None:
        raise InputError(
            f"methods = {', '.join(map(str, config.methods))}: none can be run on topology = "
            f"{', '.join(config.topologies())}; give dpsgd, sgp, osgp, adpsgd, clipped_gossip or "
            "robust_gossip, or run the study compare"
        )
    return cells, [f"left out: {combination}: {why}" for combination, why in left_out.items()]


def _place(method: Method) -> str | None:
    """Return the place of a method: the server, an all-reduce, or None for the topologies."""
    policy = method.timing.policy
    if method.gossips:
        return None
    return SERVER if policy is None or policy.collective is None else ALL_REDUCE


def results_table(config: Config, goal: Target, folder: Path) -> pd.DataFrame:
    """Tabulate each split of the data, topology and method at its best learning rate, in the
    study's order.

    `asyncsim.study.ranking.tuned` chooses the rate. Columns: ``split`` if the study has splits
    (infinite: homogeneous), ``topology``, ``method``, ``learning_rate``, ``seeds``, ``diverged``,
    ``reached`` (seeds that met and held the target), ``time_to_target`` (s, simulated) and
    ``gradients_to_target`` (infinite if a seed did not), the measures at the last evaluation,
    ``simulated_seconds`` of the whole run,
    ``consensus_distance`` (mean squared distance of the replicas from their mean, averaged over the
    evaluations after the first) and ``spectral_gap``.
    """
    finished = read(folder, "gossip")
    gaps = {
        name: spectral_gap(topology, config.workers)
        for name, topology in config.topologies().items()
    }
    keys = [name for name in ("split", "topology", "method") if name in finished.summary]
    runs = tuned(finished.summary, keys, Measure("time_to_target"))
    evaluations = [finished.run(name).evaluations for name in runs["run_folder"]]
    runs["consensus_distance"] = [
        table["consensus_distance"].iloc[1:].mean() if "consensus_distance" in table else np.nan
        for table in evaluations
    ]
    columns = ["time_to_target", "gradients_to_target", *_MEASURES, goal.of]
    columns += ["simulated_seconds", "consensus_distance"]
    table = means(runs, [*keys, "learning_rate"], dict.fromkeys(columns))
    return table.assign(spectral_gap=table["topology"].map(gaps))


def verdict(table: pd.DataFrame, goal: Target) -> str:
    """Compare the fastest method on a topology with all-reduces and methods that have a server, the
    fastest first.

    Methods that missed the target with some seed follow, with their duration if it was shorter.
    """
    is_rival = table["topology"].isin([SERVER, ALL_REDUCE])
    serverless = table[~is_rival & (table["reached"] == table["seeds"])]
    # With equal numbers of gradients, methods end at different times.
    longest = table["simulated_seconds"].max()
    missed = [
        f"{row.method} on {row.topology}"
        + (
            f" in its {number_text(row.simulated_seconds)} s"
            if row.simulated_seconds < longest
            else ""
        )
        for row in table[table["reached"] < table["seeds"]].itertuples()
    ]
    lacking = f"; not reached with every seed: {', '.join(missed)}" if missed else ""
    if serverless.empty:
        return f"no method on a topology reached {goal} with every seed{lacking}"
    fastest = serverless.loc[[serverless["time_to_target"].idxmin()]]
    rivals = table[is_rival & (table["reached"] == table["seeds"])]
    compared = pd.concat([fastest, rivals]).sort_values("time_to_target", kind="stable")
    clauses: list[str] = []
    first = compared.iloc[0]
    for _, row in compared.iterrows():
        place = row["topology"].removesuffix("()").replace("_", " ")
        where = {SERVER: "on the server", ALL_REDUCE: "by all-reduce", "ring": "on the ring"}
        subject = f"{row['method']} {where.get(place, f'on the {place} graph')}"
        if row["topology"] not in (SERVER, ALL_REDUCE):
            subject = f"the fastest on a topology, {subject},"
        time, gradients = row["time_to_target"], row["gradients_to_target"]
        work = gradients / first["gradients_to_target"]
        clauses.append(
            f"{subject} takes {number_text(time / first['time_to_target'])} times as long and "
            f"{number_text(max(work, 1 / work))} times {'the' if work >= 1 else 'fewer'} gradients"
            if clauses
            else f"{subject} reaches {goal} in {number_text(time)} s and {gradients:,.0f} gradients"
        )
    settings = ["one seed"] if table["seeds"].max() == 1 else []
    if table["learning_rate"].nunique() == 1:
        settings.append(f"rate {table['learning_rate'].iloc[0]:g}")
    setting = f" ({', '.join(settings)})" if settings else ""
    return f"{'; '.join(clauses)}{lacking}{setting}"


def _conclude(
    config: Config, goal: Target, left_out: list[str], folder: Path, summary: pd.DataFrame
) -> None:
    table = results_table(config, goal, folder)
    printed = table.copy()
    if "split" in table:
        printed["split"] = [
            "none" if np.isinf(concentration) else f"{concentration:g}"
            for concentration in table["split"]
        ]
        splits = {of: table[printed["split"] == of] for of in printed["split"].unique()}
        verdict_text = "; ".join(
            f"split {of}: {verdict(part, goal)}" for of, part in splits.items()
        )
    else:
        verdict_text = verdict(table, goal)
    slow = f", worker 0 {config.slow:g} times as slow" if config.slow != 1 else ""
    slow += (
        f", a link of worker 0 {config.slow_link:g} times as slow" if config.slow_link != 1 else ""
    )
    setting = ", ".join([f"{config.workers} workers{slow}", *attack_text(config.attack)])
    lines = [
        f"{setting}; time and gradients until {goal.criterion()}; consensus distance: mean "
        "squared distance of the replicas from their mean; gap: spectral gap of the topology",
        text_of(printed, [name for name in printed if name not in ("seeds", "diverged")]),
        *left_out,
    ]
    if table["seeds"].max() == 1:
        lines.append(ONE_SEED)
    present(folder, {TABLE: table}, *lines, verdict=verdict_text)
    names = [f"{row.method} on {row.topology}" for row in table.itertuples()]
    if edge := at_the_edge(table, config.tune, names):
        note(edge)
