"""Which topology, policy, window and collective a cluster should have, by time and by price.

Every combination of the choices is simulated, without a gradient, with the same random numbers:
time to a number of gradients or versions, or gradients within some hours; staleness, waiting,
traffic and cost. Contradictory combinations are left out, and with a horizon of versions also
combinations whose versions hold another number of gradients; notes list them. Prints the assumed
cluster, a table with the fastest first, and the answer; writes these and a figure
of staleness against time with the Pareto front. --replay 5 then trains the best few on a stand-in
problem whose messages have the real model's size, for the time to a loss or an accuracy.

A horizon beyond --simulate commits is extrapolated at the rate after the start-up. The table has
the value of the closed form if one is known.
"""

import contextlib
import dataclasses
import functools
import itertools
import math
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pandas as pd

from asyncsim.base.console import (
    LEAST_SHARE,
    counted,
    each_note_once,
    note,
    number_text,
    over_seeds,
)
from asyncsim.base.errors import (
    InputError,
    require_choice,
    require_count,
    require_nonnegative,
    require_positive,
)
from asyncsim.base.files import field_values
from asyncsim.base.units import BYTES, positive
from asyncsim.clusters.cluster import Cluster
from asyncsim.clusters.cluster_text import parts
from asyncsim.clusters.collectives import COLLECTIVES
from asyncsim.clusters.network import as_bandwidth, is_matrix
from asyncsim.clusters.policy import WITHOUT_SERVER, as_policy, asynchronous, barrier
from asyncsim.clusters.topologies import as_topology
from asyncsim.simulation.simulate import simulate
from asyncsim.study import results
from asyncsim.study.columns import Column, Columns, titled
from asyncsim.study.config import (
    SERVER,
    MethodLike,
    PolicyLike,
    StudyConfig,
    TopologyLike,
    check_values,
)
from asyncsim.study.executor import Executor, LocalProcesses
from asyncsim.study.finished import present
from asyncsim.study.jobs import Job, Result, executor_of, measurement, read_summary, run_jobs
from asyncsim.study.planning import FEWEST_ROUNDS, Candidate, Horizon, measure_all, pareto
from asyncsim.study.ranking import (
    ONE_SEED,
    Measure,
    at_the_edge,
    grid,
    paired_interval,
    ranked,
    verdict,
)
from asyncsim.study.target import TargetOptions, say_at_start
from asyncsim.traces.trace import Trace

#: The table of the combinations, and of the runs of the best few.
PLAN, REPLAYS = "plan.csv", "replays.csv"
#: Columns that identify a combination.
CHOICES = ("topology", "protocol", "policy", "window", "collective", "compression")
NONE = "none"
#: The measure of replays, and the columns that name one.
_TO_TARGET = Measure("time_to_target")
_REPLAYED = ["name", "method", "learning_rate"]
#: Bytes of a parameter in a message.
_WIDTHS = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "int8": 1}
#: Commits per job, and seconds of an hour.
_JOB, _HOUR = 100_000, 3600.0
#: Evaluations of a replay, and rounds of the timeline on the study's page.
_EVALUATIONS, _ROUNDS_SHOWN = 40, 200
#: Policies whose versions hold varying numbers of messages.
_UNEVEN = ("rounds", "buckets")
#: Relative tolerance of equal times, for instance of cells without noise.
_TOLERANCE = 1e-9
#: Smaller ratios of times are printed as 1.00.
_ALIKE = 1.005


@dataclass(frozen=True)
class Config(TargetOptions, StudyConfig):
    """Options of the study that plans."""

    workers: int = 32
    """Workers of the cluster."""
    recording: Path | None = None
    """A recorded or simulated trace to calibrate the cluster from; it replaces the options of
    workers, their times, the server and the network."""
    model_parameters: float | None = None
    """Number of parameters of the real model, and so of values in its messages, 25e6 say. none:
    --message-bytes, or the stand-in problem's."""
    message_type: Literal["float64", "float32", "bfloat16", "float16", "int8"] = "float32"
    """Type of the values of a message."""
    shared_bandwidth: bool = True
    """The workers share the server's link, and each other site's workers share one link to it, one
    message at a time, as in an all-reduce. --no-shared-bandwidth: each worker has a separate link
    to the server."""
    protocol: tuple[Literal["exchange", "read_then_write", "write_then_read"], ...] = ("exchange",)  # type: ignore[assignment]  # several, unlike in the base class
    """Protocols to try."""
    topology: tuple[TopologyLike, ...] = (SERVER,)
    """Topologies to try: server, and without one ring(), exponential(), one_peer_exponential(),
    complete(), random_regular(degree), base2()."""
    policy: tuple[PolicyLike, ...] = ("asynchronous", "bounded_staleness(3)", "barrier")  # type: ignore[assignment]  # as protocol
    """Policies to try; the end of --help lists them. Those without a server go with a topology."""
    window: tuple[int, ...] = (1,)  # type: ignore[assignment]  # as protocol
    """Local steps per communication to try."""
    collective: tuple[str, ...] = (NONE,)
    """All-reduces to try behind a barrier: none (a server), ring, tree, halving_doubling,
    shared_link, two_level.
    """
    compression: tuple[str, ...] = (NONE,)
    """Compressed messages to try on the way up: none; a share of their bytes, 0.25 say; or a method
    that compresses, "qsgd(levels=7)" or "mem_sgd(fraction=0.01)", whose size is counted for values
    of 32 bits."""
    versions: float | None = None
    """Horizon in versions. Only combinations whose versions hold the same number of gradients
    as the first's are then compared."""
    gradients: float | None = None
    """Horizon in gradients: local steps of all workers together. The default: 100,000."""
    hours: float | None = None
    """Horizon in hours of simulated time; combinations are compared by their gradients until
    then.
    """
    simulate: int = 20_000
    """Most commits that are simulated for a combination and a seed; a longer horizon is
    extrapolated.
    """
    price: float | None = None
    """Price of an hour of a worker that is present, in any currency."""
    reserved: bool = False
    """Count the hours of absent workers, too, as of reserved machines."""
    show: int = 20
    """Printed rows of the table; plan.csv has all."""

    replay: int = 0
    """Number of combinations to train: from the Pareto front of time and staleness, then the
    fastest.
    """
    steps: int = 200
    """Local steps of each worker in these runs, on average."""
    methods: tuple[MethodLike, ...] = ("batch_sgd(policy=None)",)
    """Methods of these runs; by default SGD with the mean of a version's messages."""
    tune: tuple[float, ...] | None = (0.05, 0.2, 0.8)
    """Learning rates to try in these runs; each combination counts at its best one. none:
    --learning-rate.
    """
    evaluate_every: int | None = None
    """Commits of a worker between evaluations on all data in these runs. none: 40 evaluations in
    all.
    """

    @property
    def horizon(self) -> Horizon:
        """The horizon: an amount of versions, gradients or seconds."""
        horizons = {"versions": self.versions, "gradients": self.gradients, "seconds": self.hours}
        stated = {name: value for name, value in horizons.items() if value is not None}
        if len(stated) > 1:
            names = " and ".join("hours" if name == "seconds" else name for name in stated)
            raise InputError(
                f"{names}: there is one horizon; give one of versions, gradients and hours"
            )
        ((of, amount),) = stated.items() or {"gradients": 100_000.0}.items()
        amount = require_positive("hours" if of == "seconds" else of, amount)
        return Horizon(of, amount * (_HOUR if of == "seconds" else 1))

    def check(self) -> None:
        """Check the options; see `StudyConfig.check`."""
        self.at(protocol="exchange", policy="asynchronous", window=1).check()
        self.horizon  # noqa: B018  raises an error for two horizons
        self.check_target()
        for name, minimum in (("simulate", 1), ("show", 1), ("replay", 0)):
            require_count(name, getattr(self, name), minimum)
        if self.model_parameters is not None:
            require_positive("model_parameters", self.model_parameters)
            if self.message_bytes is not None:
                raise InputError("message_bytes: follows from model_parameters; give one of them")
        if self.price is not None:
            require_nonnegative("price", self.price)
        for name in CHOICES:
            check_values(name, getattr(self, name))
        for policy in self.policy:
            as_policy(policy)
        for topology in set(self.topology) - {SERVER}:
            as_topology(topology)
        for collective in self.collective:
            require_choice("collective", collective, (NONE, *COLLECTIVES))
        if self.recording is not None and not Path(self.recording).is_file():
            raise InputError(
                f"recording = {str(self.recording)!r}: there is no such file; give one of "
                "Trace.save"
            )

    def at(self, **values: Any) -> StudyConfig:
        """Return the options of one combination, by default of the first values."""
        options = field_values(self, StudyConfig)
        if (
            self.bandwidth is None
            and self.far_bandwidth is None
            and not self.changed("shared_bandwidth")
        ):
            options["shared_bandwidth"] = False
        first = {name: getattr(self, name)[0] for name in ("protocol", "policy", "window")}
        return StudyConfig(**{**options, **first, **values})


def run(config: Config) -> Result:
    """Run the study; see `asyncsim.study.jobs.run_jobs`.

    Raises
    ------
    InputError
        No combination is possible, or the replays have no target.
    """
    config.check()
    candidates = make_candidates(config)
    horizon = config.horizon
    job_size = max(1, _JOB // min(config.simulate, 10**9) // config.seeds)
    jobs = []
    for first in range(0, len(candidates), job_size):
        batch = candidates[first : first + job_size]
        name = f"combinations {first + 1} to {first + len(batch)} of {len(candidates)}"
        name += f", {counted(config.seeds, 'seed')}"
        arguments = (batch, horizon, config.simulate, config.seeds, results.SUMMARY)
        jobs.append(measurement(name, measure_all, *arguments))
    follow = None if not config.replay else functools.partial(_replays, config, candidates)
    conclude = functools.partial(_conclude, config, candidates)
    return run_jobs(
        "plan", config, config.options_record(), jobs, _executor(config), conclude, follow
    )


@contextlib.contextmanager
def _executor(config: Config) -> Iterator[Executor]:
    if config.executor == "ray":
        with executor_of(config, ()) as executor:
            yield executor
    else:
        yield LocalProcesses(measure_all)


@each_note_once()
def make_candidates(config: Config) -> list[Candidate]:
    """Build the clusters of all possible combinations; note the impossible ones."""
    base, size = _calibrated(config), _message_bytes(config)
    accepted: list[Candidate] = []
    refused = Counter[str]()
    for values in itertools.product(*(getattr(config, name) for name in CHOICES)):
        choices = dict(zip(CHOICES, values, strict=True))
        labels = {name: _label(choices[name]) for name in CHOICES} | {"window": choices["window"]}
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                candidate = _candidate(config, base, size, labels)
                if (
                    config.horizon.of == "versions"
                    and accepted
                    and _version(candidate) != _version(accepted[0])
                ):
                    raise InputError(
                        f"versions: do not hold {_version(accepted[0])}, unlike "
                        f"{accepted[0].labels['policy']}, "
                        f"window {accepted[0].labels['window']}; give gradients instead to compare "
                        "all"
                    )
                accepted.append(candidate)
            for warning in caught:
                note(str(warning.message))
        except InputError as error:
            refused[str(error)] += 1
    total = len(accepted) + sum(refused.values())
    for reason, count in refused.items():
        note(f"{count} of {counted(total, 'combination')} left out: {reason}")
    if not accepted:
        raise InputError(f"no combination is possible: {next(iter(refused))}")
    differing = [
        name for name in CHOICES if len({candidate.labels[name] for candidate in accepted}) > 1
    ]
    differing = differing or ["policy"]
    return [
        candidate._replace(labels={"name": _name(candidate.labels, differing), **candidate.labels})
        for candidate in accepted
    ]


def _version(candidate: Candidate) -> str:
    """Describe the number of gradients of a version."""
    labels, cluster, _ = candidate
    if cluster.policy.name in _UNEVEN or cluster.policy.completes_between_messages:
        return f"a varying number of gradients by {labels['policy']}, window {labels['window']}"
    count = cluster.policy.per_version(cluster.workers) * cluster.mean_window
    return f"{count:g} gradient{'' if count == 1 else 's'}"


def _label(value: Any) -> str:
    """Format a choice; numbers in their shortest form."""
    try:
        return f"{float(value):g}"
    except (TypeError, ValueError):
        return str(value)


def _candidate(
    config: Config, base: Cluster | None, size: float | None, labels: dict[str, Any]
) -> Candidate:
    """Build one combination; raise InputError if it is contradictory."""
    policy, collective = as_policy(labels["policy"]), labels["collective"]
    options: dict[str, Any] = {"protocol": labels["protocol"], "window": labels["window"]}
    if collective != NONE:
        if policy.name != "barrier":
            raise InputError(
                "collective: an all-reduce needs a barrier; other policies cannot have one"
            )
        if labels["compression"] != NONE:
            raise InputError(
                "compression: a sum of compressed messages is not compressed, so an all-reduce "
                "takes none"
            )
        policy = barrier(policy.count, collective)
    topology = None if labels["topology"] == SERVER else as_topology(labels["topology"])
    gossip: dict[str, Any] = {} if topology is None else {"topology": topology, "policy": policy}
    if topology is not None and policy.name in WITHOUT_SERVER:
        policy = asynchronous()  # until the cluster has its topology
    serverless = policy.collective is not None or topology is not None
    if serverless:
        options |= {"service": 0.0, "shared_bandwidth": False, "discipline": "fifo", "servers": 1}
        for name in ("bandwidth", "far_bandwidth"):
            options[name] = _narrower(name, getattr(config, name), len(config.sites))
    options["policy"] = policy
    sizes = None
    if size is not None:
        up = _compressed(labels["compression"], size, config)
        sizes = size if up == size else (up, size)
    elif labels["compression"] != NONE:
        raise InputError(
            f"compression = {labels['compression']}: the size of messages is not known; give "
            "model_parameters"
        )
    if base is not None:
        if serverless:
            laws = (base.latency_up, base.latency_down)
            options["latency"] = sum(law.mean for law in laws) / 2
            note("without a server the mean of the recorded latencies counts")
        bandwidth = options.pop("bandwidth", config.bandwidth)
        if bandwidth is not None:
            shared = config.shared_bandwidth and not serverless
            options |= {"bandwidth": bandwidth, "message_bytes": sizes, "shared_bandwidth": shared}
        options.pop("far_bandwidth", None)
        cluster = dataclasses.replace(base, exclusive=True, **options)
    else:
        cluster = config.at(**options)._cluster(message_bytes=sizes)  # type: ignore[arg-type]  # checked options
    cluster = dataclasses.replace(cluster, **gossip)
    up, down = sizes if isinstance(sizes, tuple) else (sizes or 0.0, sizes or 0.0)
    return Candidate(labels, cluster, (up, down))


def _narrower(name: str, value: Any, sites: int) -> Any:
    """Return the smaller bandwidth of both directions: each worker sends and receives in an
    all-reduce.
    """
    bandwidths = None if value is None else as_bandwidth(name, value, 1, sites)
    is_pair = isinstance(bandwidths, tuple) and not is_matrix(bandwidths)
    return min(bandwidths) if is_pair else bandwidths  # type: ignore[arg-type]  # a pair


def _message_bytes(config: Config) -> float | None:
    """Return the bytes of a message with all parameters; None if unknown."""
    if config.model_parameters is not None:
        return config.model_parameters * _WIDTHS[config.message_type]
    if config.message_bytes is not None:
        return positive("message_bytes", config.message_bytes, BYTES)
    if config.replay or config.bandwidth is not None or config.far_bandwidth is not None:
        problem = config.at().make_problem()
        if not config.replay:
            note(
                f"messages have the size of {problem.name}'s parameters; --model-parameters gives "
                "another model's"
            )
        return float(problem.parameter_count * _WIDTHS[config.message_type])
    return None


def _compressed(compression: str, size: float, config: Config) -> float:
    """Return the bytes of a compressed message; raise InputError for a method without
    compression.
    """
    if compression == NONE:
        return size
    try:
        share = float(compression)
    except ValueError:
        share = None
    if share is not None:
        if not 0 < share <= 1:
            raise InputError(
                f"compression = {compression}: a share of the bytes must be above zero and at most "
                "one"
            )
        return share * size
    (method,) = config.at(methods=(compression,)).make_methods(
        changed=lambda name: name == "learning_rate"
    )
    share_of_type = method.timing.size_of_message(8 * _WIDTHS[config.message_type])
    if share_of_type is None:
        raise InputError(
            f"compression = {compression}: compresses no messages; give none, 0.25 or "
            "qsgd(levels=7) say"
        )
    return min(size, share_of_type * size)


def _calibrated(config: Config) -> Cluster | None:
    """Return the cluster of the recording; None without one."""
    if config.recording is None:
        return None
    from asyncsim.calibration import calibrate
    from asyncsim.calibration.prediction import with_workers

    ignored = (
        "compute",
        "service",
        "latency",
        "discipline",
        "sites",
        "far_latency",
        "far_bandwidth",
    )
    config.say_ignored(ignored, "beside --recording")
    cluster = calibrate(Trace.load(config.recording))
    return with_workers(cluster, config.workers) if config.changed("workers") else cluster


def plan_table(
    config: Config, candidates: Sequence[Candidate], summary: pd.DataFrame
) -> pd.DataFrame:
    """Tabulate the combinations, the fastest first: means over seeds.

    Columns: the choices, and ``name`` with the choices that differ; ``seconds``, ``gradients`` and
    ``versions`` at the horizon; ``cost`` (s), of the horizon or, for a horizon in hours, of a
    thousand gradients, with ``cost_low`` and ``cost_high``, as `_range` says; ``behind``,
    ``behind_low`` and ``behind_high``, the ratio to the first row's cost in the same seed; the
    columns of `asyncsim.study.planning.measure`; ``gigabytes`` (missing if the size of messages is
    unknown), ``worker_hours`` and ``money`` until the horizon; ``theory`` (s), the closed form
    ``theory_name`` of the cost if ``exact``, else a lower bound; ``front``: whether the row is on
    the Pareto front of cost and staleness; ``round_gradients``: gradients of one commit of each
    worker.
    """
    summary = summary[summary["seconds"].notna()]
    per_cost = 1000 / summary["gradients"] if config.horizon.of == "seconds" else 1.0
    summary = summary.assign(cost=summary["seconds"] * per_cost)
    runs_of = dict(iter(summary.groupby("name", sort=False)))
    texts = {*candidates[0].labels, "theory_name", "exact", "seed", "status", "error"}
    rows = []
    for labels, cluster, _ in candidates:
        if (runs := runs_of.get(labels["name"])) is None:  # failed
            continue
        mean = runs[[name for name in runs if name not in texts]].astype(float).mean()
        low, high = _range(runs)
        gigabytes = mean["bytes_per_second"] * mean["seconds"] / 1e9
        present = 1.0 if config.reserved else 1.0 - mean["away"]
        rows.append(
            {
                **labels,
                **mean,
                "theory_name": runs["theory_name"].fillna("").iloc[0],
                "exact": bool(runs["exact"].iloc[0]),
                "round_gradients": cluster.workers * cluster.mean_window,
                "seeds": len(runs),
                "cost_low": low,
                "cost_high": high,
                "gigabytes": gigabytes or math.nan,  # zero: the size of messages is not known
                "worker_hours": mean["seconds"] * cluster.workers * present / _HOUR,
            }
        )
    by = ["cost", "staleness_mean"]
    table = pd.DataFrame(rows).sort_values(by, kind="stable", ignore_index=True)
    if config.price is not None:
        table["money"] = table["worker_hours"] * config.price
    costs = [runs_of[name].set_index("seed")["cost"] for name in table["name"]]
    ratios = pd.DataFrame([cost / costs[0] for cost in costs])
    table["behind"] = ratios.mean(axis=1).to_numpy()
    table["behind_low"] = ratios.min(axis=1).to_numpy()
    table["behind_high"] = ratios.max(axis=1).to_numpy()
    table["front"] = pareto(table["cost"].to_numpy(), table["staleness_mean"].to_numpy())
    return table


def _range(runs: pd.DataFrame) -> tuple[float, float]:
    """Return the range of the costs over the seeds; with failures and beyond the simulations the
    95 % interval of their mean.
    """
    cost = runs["cost"]
    if runs["extrapolated"].any() and runs["absences"].any() and len(runs) > 1:
        interval = paired_interval(cost)
        return interval.low, interval.high
    return cost.min(), cost.max()


def _name(labels: Mapping[str, Any], differing: Sequence[str]) -> str:
    """Name a combination by its differing choices; a choice of none is omitted unless all are
    none.
    """
    parts_of_name = [
        f"window {labels[name]}" if name == "window" else str(labels[name]) for name in differing
    ]
    return ", ".join(part for part in parts_of_name if part != NONE) or f"no {differing[0]}"


def chosen(table: pd.DataFrame, count: int) -> pd.DataFrame:
    """Choose the rows to replay: evenly from the front, fastest to freshest, then the fastest of
    the rest.
    """
    front, rest = table[table["front"]], table[~table["front"]]
    if len(front) > count:
        places = {round(i * (len(front) - 1) / max(1, count - 1)) for i in range(count)}
        return front.iloc[sorted(places)]
    return table.loc[[*front.index, *rest.index[: count - len(front)]]]


def _replays(config: Config, candidates: Sequence[Candidate], folder: Path) -> list[Job]:
    """Return the training jobs of the chosen combinations; their rows go into `REPLAYS`."""
    from asyncsim.methods import Timing, batch_sgd
    from asyncsim.study.cell import Cell, jobs_of

    summary = read_summary(folder)
    if summary.empty:
        return []
    clusters = {candidate.labels["name"]: candidate.cluster for candidate in candidates}
    problem = config.at().make_problem()
    config.goal.check_of(problem)
    mean = batch_sgd(policy=None)
    cells: list[Any] = []
    for row in chosen(plan_table(config, candidates, summary), config.replay).to_dict("records"):
        cluster, policy = clusters[row["name"]], clusters[row["name"]].policy
        steps = max(1, round(config.steps / cluster.mean_window))
        entries, is_compressed = config.methods, False
        if cluster.topology is not None:
            by_policy = {"handshake": "adpsgd"}
            entries = (by_policy.get(policy.name, f"sgp(policy={str(policy)!r})"),)
        elif row["compression"] != NONE and not row["compression"][0].isdigit():
            entries, is_compressed = (row["compression"],), True
        for rate in config.tune or (config.learning_rate,):
            options = config.at(
                workers=cluster.workers,
                steps=steps,
                learning_rate=rate,
                methods=entries,
                evaluate_every=config.evaluate_every or max(1, steps // _EVALUATIONS),
            )
            methods = options.make_methods({"learning_rate"}, config.changed)
            if is_compressed:
                # Average a version's messages as for other combinations; the cluster has the
                # message size.
                methods = [
                    method._replace(apply=mean.apply, init_server=mean.init_server, timing=Timing())
                    for method in methods
                ]
            values = {"name": row["name"], "learning_rate": rate}
            place = f"{len(cells):03d}-{rate:g}"
            cell = Cell(place, values, options, cluster, methods, problem, config.goal)
            cells.append(cell._replace(table=REPLAYS))
    return jobs_of(cells, {})


def _with_replays(config: Config, runs: pd.DataFrame, table: pd.DataFrame) -> pd.DataFrame:
    """Add each replayed combination's best rate, time to the target (s) and rounds until then.

    ``rounds_to_target``: commits per worker; the minimum over seeds.
    """
    best = _at_best_rates(runs)[[*_REPLAYED, "reached", "diverged", "time_to_target", "final_loss"]]
    ends = runs.merge(best[_REPLAYED]).groupby(_REPLAYED, sort=False)
    ends = ends.agg(
        time_low=("time_to_target_low", "min"),
        time_high=("time_to_target_high", "max"),
        rounds_to_target=("gradients_to_target", "min"),
    )
    table = table.merge(best.merge(ends, on=_REPLAYED), how="left", on="name")
    if config.price is not None:
        table["money_to_target"] = table["money"] / table["seconds"] * table["time_to_target"]
    return table.assign(rounds_to_target=table["rounds_to_target"] / table["round_gradients"])


def _at_best_rates(runs: pd.DataFrame) -> pd.DataFrame:
    """Return a row for each replayed combination, the first at the target first."""
    columns = ["final_loss", "simulated_seconds"]
    return grid(runs, _REPLAYED, columns, _TO_TARGET).drop_duplicates("name")


def _replay_verdict(config: Config, runs: pd.DataFrame, table: pd.DataFrame) -> str:
    """State the cheapest replayed combination, and the first to reach the target."""
    rows = ranked(_at_best_rates(runs), runs, _REPLAYED, _TO_TARGET)
    table, names, what = table.set_index("name"), list(rows["name"]), "replayed combination"
    words = verdict(rows, names, _TO_TARGET, what, config.goal)
    leading = [name for name, apart in zip(names, rows["is_apart"], strict=True) if not apart]
    rounds = table.loc[leading, "rounds_to_target"]
    if soon := list(rounds.index[rounds < FEWEST_ROUNDS]):
        words = f"no fastest {what}\nwithin {FEWEST_ROUNDS} rounds of the workers at the target: "
        words += f"{'; '.join(soon)}; give a harder --target"
    elif config.price is not None and (table["money_to_target"] < math.inf).any():
        cheapest = table["money_to_target"].idxmin()
        price = number_text(table.loc[cheapest, "money_to_target"])
        words = f"cheapest {what}: {cheapest}, at a price of {price}\n{words}"
    return f"{words}\nto {config.goal} on {config.problem}, of {len(rows)} replayed"


def _conclude(
    config: Config, candidates: Sequence[Candidate], folder: Path, summary: pd.DataFrame
) -> None:
    table = plan_table(config, candidates, summary)
    assumed, links = _assumptions(candidates)
    verdicts, edges = [answer(config, table, links)], ""
    runs = read_summary(folder, REPLAYS) if (folder / REPLAYS).exists() else table.head(0)
    if len(runs):
        if warning := say_at_start(runs, config.goal):
            note(warning)
        table = _with_replays(config, runs, table)
        verdicts.insert(0, _replay_verdict(config, runs, table))
        best = _at_best_rates(runs)
        edges = at_the_edge(best, config.tune, list(map(repr, best["name"])))
    clusters = {candidate.labels["name"]: candidate.cluster for candidate in candidates}
    cluster = clusters[fastest := table["name"][0]]
    commits = min(config.simulate, _ROUNDS_SHOWN * cluster.workers)
    present(
        folder,
        {PLAN: table},
        assumed,
        links,
        *_parts(config, table),
        ONE_SEED if table["seeds"].max() == 1 else "",
        edges,
        verdict=verdicts,
        example=(f"{fastest}, seed 0", simulate(cluster, commits, 0, progress=False)),
    )


def _assumptions(candidates: Sequence[Candidate]) -> tuple[str, str]:
    """Describe the common cluster of the combinations, and who shares the links to its server."""
    clusters = sorted(
        (candidate.cluster for candidate in candidates),
        key=lambda cluster: cluster.policy.collective is not None,
    )
    first = clusters[0]  # with a server, if there is any
    common = [
        part
        for part in parts(first)
        if part != str(first.policy) and not part.startswith("window ")
    ]
    text = f"assumed, apart from the choices: {', '.join(common)}"
    text += (
        "\nan all-reduce has no server, and no service"
        if clusters[-1].policy.collective is not None
        else ""
    )
    if first.message_bytes is None or first.policy.collective is not None:
        return text, ""
    if not first.shared_bandwidth:
        return (
            text,
            "links: each worker has a separate one to the server, together more than in an "
            "all-reduce",
        )
    far = ", and each other site one to it" if first.far_bandwidth is not None else ""
    server = "the server" if first.server_count == 1 else "each server"
    return text, f"links: {server} has one{far}; workers share them, as an all-reduce does"


#: Units of times; the first in which a time is at least 2 is used.
_UNITS = (("days", 86400.0), ("hours", _HOUR), ("min", 60.0), ("s", 1.0))


def _unit(seconds: float) -> tuple[str, float]:
    return next(unit for unit in _UNITS if seconds >= 2 * unit[1] or unit[1] == 1)


def _parts(config: Config, table: pd.DataFrame) -> list[str | pd.DataFrame]:
    horizon, printed = config.horizon, table.head(config.show)
    unit, unit_seconds = _unit(table["cost"].median())
    in_time = horizon.of == "seconds"
    rows = printed.to_dict("records")
    printed = printed.assign(
        cost=[_band(row, "cost", unit_seconds) for row in rows],
        theory=[
            f"{'' if row['exact'] else 'at least '}{number_text(row['theory'] / unit_seconds)}"
            if row["theory_name"]
            else "-"
            for row in rows
        ],
    )
    shares = [
        name
        for name in ("sending", "waiting", "held", "away", "in_vain")
        if printed[name].max() >= LEAST_SHARE
    ]
    time = f"{unit} per 1,000 gradients" if in_time else f"time ({unit})"
    columns: Columns = [
        Column("name", "combination"),
        Column("cost", time),
        Column("time_to_target", "to target (s)"),
        Column("money_to_target", "money to target"),
        "money",
        "theory",
        "behind",
        "staleness_mean",
        *(["computing"] if "in_vain" in shares else []),  # otherwise equal to the goodput
        *(*shares, "goodput"),
        Column("gigabytes", "GB"),
        *("worker_hours", *(["gradients"] if in_time else [])),
        "rounds_to_target",
        "learning_rate",
    ]
    beyond = int((table["extrapolated"] > 0).sum())
    far = (
        f"; {beyond} of {len(table)} beyond {config.simulate:,} commits, at the rate after the "
        "start-up"
        if beyond
        else ""
    )
    if (most_absences := table["absences"].max()) > 0:
        far += (
            f"; with failures: a simulation had {table['absences'].min():.0f} to "
            f"{most_absences:.0f} absences"
        )
        far += "; in brackets the 95 % interval of such a mean" if beyond else ""
    omitted = f"and {len(table) - len(printed)} more in {PLAN}" if len(table) > len(printed) else ""
    over = over_seeds(int(table["seeds"].max()), "means over")
    return [
        f"{horizon}, {counted(config.workers, 'worker')}, {over}{far}\n"
        "computing, sending, ...: parts of the workers' time; goodput: the part spent on accepted "
        "gradients",
        titled(printed, columns),
        omitted,
    ]


def answer(config: Config, table: pd.DataFrame, links: str) -> str:
    """State the fastest combination; in further lines its staleness and price, the
    indistinguishable ones, and the cost of less staleness.
    """
    first, rest, horizon = table.iloc[0], table.iloc[1:], config.horizon
    seeds = over_seeds(int(table["seeds"].max()), "")
    if horizon.of == "seconds":
        amount = f"{number_text(first['gradients'])} gradients in {horizon}"
    else:
        unit, unit_seconds = _unit(first["cost"])
        amount = f"{horizon} in {_band(first, 'cost', unit_seconds)} {unit}"
    price = f", at a price of {number_text(first['money'])}" if config.price is not None else ""
    lines = [
        f"Fastest: {first['name']}, {amount}",
        f"at a mean staleness of {number_text(first['staleness_mean'])}{price}",
    ]
    alike = rest[(rest["behind_low"] <= 1 + _TOLERANCE) | (rest["behind"] < _ALIKE)]
    if len(alike):
        omitted = f" and {len(alike) - 3} more" if len(alike) > 3 else ""
        names = "; ".join(alike["name"].head(3))
        lines.append(f"not distinguishable with {seeds}: {names}{omitted}")
    elif len(rest):
        second = rest.iloc[0]
        times = f"{_band(second, 'behind')} times as long, paired over {seeds}"
        lines.append(f"the next, {second['name']}, takes {times}")
    freshest = table[table["front"]].iloc[-1]
    if freshest["name"] != first["name"]:
        staleness = number_text(freshest["staleness_mean"])
        times = f"{freshest['name']} takes {_band(freshest, 'behind')} times as long"
        lines.append(f"at a staleness of {staleness} {times}")
    return "\n".join(filter(None, [*lines, links]))


def _band(row: Any, name: str, unit: float = 1.0) -> str:
    """Format a mean of a row with its range, if the range is visible at this precision."""
    texts = [number_text(row[end] / unit) for end in (name, f"{name}_low", f"{name}_high")]
    return texts[0] if len(set(texts)) == 1 else f"{texts[0]} ({texts[1]} to {texts[2]})"
