"""The options of all studies: cluster, methods, problem and output, as one dataclass.

Its fields are the options of the command line. Building methods and problems imports JAX; building
a config does not.
"""

import contextlib
import dataclasses
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import asyncsim.study.results as results
from asyncsim.base.console import note
from asyncsim.base.errors import (
    InputError,
    require_choice,
    require_count,
    require_fraction,
    require_nonnegative,
    require_positive,
    shown,
)
from asyncsim.base.files import field_values, plain
from asyncsim.base.units import BYTES, positive
from asyncsim.clusters.cluster import Cluster
from asyncsim.clusters.failures import Failure
from asyncsim.clusters.laws import Constant, Law, parse
from asyncsim.clusters.network import SlowLinkWarning
from asyncsim.clusters.policy import Policy, as_policy
from asyncsim.clusters.topologies import Topology, as_topology
from asyncsim.clusters.workers import HeterogeneityWarning
from asyncsim.study.loading import OF_METHODS, OF_PROBLEMS, files_of, own_file, sha256

if TYPE_CHECKING:
    from asyncsim.byzantine.aggregation import Rule
    from asyncsim.byzantine.attacks import Attack
    from asyncsim.clusters.network import PerWorker, SizeLike
    from asyncsim.methods import Method
    from asyncsim.problems import Problem

    LawLike = str | float | Law | Sequence[str | float | Law] | PerWorker
    BandwidthLike = SizeLike | PerWorker
    PolicyLike = str | Policy
    FailureLike = str | Failure
    MethodLike = str | Method
    AttackLike = str | Attack
    RuleLike = str | Rule | Callable[[int], Rule]
    TopologyLike = str | Topology
    ProblemLike = str | Problem
else:  # the command line's types
    LawLike = PolicyLike = FailureLike = MethodLike = ProblemLike = str
    AttackLike = RuleLike = TopologyLike = str
    BandwidthLike = SizeLike = float | str


Discipline = Literal["fifo", "lowest_rank", "random", "lock_free"]
#: The topology of a cluster with a server.
SERVER = "server"
#: Options that do not affect the results.
ELSEWHERE = frozenset(
    ("out", "resume", "executor", "address", "cpus_per_run", "accelerators_per_run")
)
#: Their runs are listed before the first begins.
MOST_SEEDS = 100_000


def fields_of(options: Iterable[str]) -> frozenset[str]:
    """Return the fields whose options were typed, the negations of switches among them."""
    names = {
        option.removeprefix("--").partition("=")[0] for option in options if option.startswith("--")
    }
    return frozenset(name.removeprefix("no-").replace("-", "_") for name in names)


def check_values(name: str, values: Any, remedy: str = "give one or more") -> None:
    """Raise InputError unless the values of an option are a list, with each value once; ``remedy``:
    if it is empty.
    """
    if isinstance(values, str) or not isinstance(values, Sequence):
        raise InputError(f"{name} = {values!r}: must be a list; write ({values!r},) for one")
    if not values:
        raise InputError(f"{name}: none given; {remedy}")
    if len(set(map(str, values))) < len(values):
        raise InputError(f"{name} = {', '.join(map(str, values))}: one comes twice; give each once")


@dataclass(frozen=True)
class JobOptions:
    """Options of every study that computes jobs: where they are computed, and where their results
    go.
    """

    #: The options on the command line, except `ELSEWHERE`; None in Python.
    command: ClassVar[tuple[str, ...] | None] = None

    #: The option whose values may stand first on the command line, without its name.
    first: ClassVar[str] = ""

    #: The file of a user's study, with its hash.
    study_file: ClassVar[Mapping[str, str]] = MappingProxyType({})

    device: Literal["default", "cpu", "gpu", "tpu"] = "default"
    """Device of the gradients."""
    out: Path | None = None
    """Folder for the results, new or empty. By default results/STUDY, results/STUDY-2, ..."""
    resume: Path | None = None
    """Folder of a study to complete, with its options; seeds and methods may be added."""
    executor: Literal["local", "ray"] = "local"
    """Runs in this process, or on a Ray cluster."""
    address: str | None = None
    """Ray cluster to join: auto, HOST:PORT; else a new one."""
    cpus_per_run: int = 1
    """Cores that each run reserves (ray)."""
    accelerators_per_run: float = 0.0
    """GPUs or TPUs that each run reserves (ray)."""

    def check(self) -> None:
        """Check where results go, where they are computed, and how many seeds there are."""
        if self.out is not None and self.resume is not None:
            raise InputError(
                f"out = {str(self.out)!r}: results that are resumed stay where they are; leave it "
                "out"
            )
        require_count("seeds", getattr(self, "seeds", 1), maximum=MOST_SEEDS)
        self.check_executor()

    def check_executor(self) -> None:
        """Check the options of the executor, and that Ray is installed if it is asked for."""
        local = require_choice("executor", self.executor, ("local", "ray")) == "local"
        require_count("cpus_per_run", self.cpus_per_run)
        accelerators = require_nonnegative("accelerators_per_run", self.accelerators_per_run)
        if local:
            requested = {
                "address": self.address is not None,
                "accelerators_per_run": accelerators > 0,
            }
            for name, is_set in (requested | {"cpus_per_run": self.cpus_per_run > 1}).items():
                if is_set:
                    raise InputError(
                        f"{name} = {getattr(self, name)!r}: is an option of --executor ray; add "
                        "that"
                    )
            return
        if find_spec("ray") is None:
            raise InputError(
                "executor = 'ray': Ray is not installed; install it with: pip install "
                '"asyncsim[ray]"'
            )
        if accelerators > 1 and accelerators != int(accelerators):
            raise InputError(
                f"accelerators_per_run = {accelerators}: above one it must be a whole number"
            )

    @contextlib.contextmanager
    def computing_device(self) -> Iterator[None]:
        """Let JAX compute on the chosen kind of device, for the length of a ``with`` block;
        ``default`` leaves it to JAX.
        """
        import jax

        if self.device == "default":
            yield
            return
        try:
            device = jax.devices(self.device)[0]
        except RuntimeError:
            raise InputError(
                f"device = {self.device!r}: JAX finds none here; choose default, which is "
                f"{jax.default_backend()}"
            ) from None
        with jax.default_device(device):
            yield

    def options_record(self, without: Collection[str] = ELSEWHERE) -> dict[str, Any]:
        """Return the options that the results depend on, as values of JSON.

        A file among them has its hash. The command line serves to resume the study.
        """
        from asyncsim.traces.columns import package_versions

        typed = self.command if self.command is not None else results.typed_in(self.resume)
        values = field_values(self)
        options = {name: value for name, value in values.items() if name not in without}
        files = {name: value for name, value in options.items() if isinstance(value, Path)}
        return {
            **({} if typed is None else {results.COMMAND: list(typed)}),
            results.FILES: {**files_of(values), **self.study_file},
            **{name: plain(value) for name, value in options.items()},
            **{f"{name}_sha256": sha256(file.read_bytes()) for name, file in files.items()},
            "versions_of": package_versions(),
        }

    def changed(self, option: str) -> bool:
        """Return whether the user chose an option: typed it, or in Python gave another value than
        the default.
        """
        if self.command is not None:
            return option in fields_of(self.command)
        default = {field.name: field.default for field in dataclasses.fields(self)}[option]
        return bool(getattr(self, option) != default)

    def say_ignored(self, options: Iterable[str], case: str) -> None:
        """Print a note about changed options that have no effect in a case: ``"with one
        worker"``.
        """
        for option in options:
            if self.changed(option):
                note(f"--{option.replace('_', '-')} changes nothing {case}")


@dataclass(frozen=True)
class TaskOptions(JobOptions):
    """Options of every study that trains: its methods and its problem."""

    methods: tuple[MethodLike, ...] = ("gem", "downpour", "adaptive_staleness")
    """Methods to compare. With arguments: "gem(kappa=2)"; with several values: "gem(kappa=[1, 2])";
    your own: FILE.py:FUNCTION."""
    problem: ProblemLike = "digits"
    """Training problem; your own as FILE.py:FUNCTION. With arguments: "mnist(network=mlp)"."""
    batch_size: int | None = None
    """Examples per gradient. By default 64 for mnist and cifar10, else 32."""

    learning_rate: float = 0.05
    """Step size of methods that do not set their own."""
    optimizer: str | None = None
    """Local optimizer of the workers, by its name in optax. By default plain gradient steps."""
    momentum: float = 0.9
    """Momentum of methods that do not set their own, and of the proxy whose energy is the
    reference.
    """
    x64: bool = False
    """Compute in float64 instead of float32."""

    @property
    def precision(self) -> str:
        """``"float64"`` or ``"float32"``."""
        return "float64" if self.x64 else "float32"

    def make_methods(
        self, swept: Collection[str] = (), changed: Callable[[str], bool] | None = None
    ) -> "list[Method]":
        """Return the methods; print a note about changed options that some of them ignore.

        The user's functions get the options that were ``changed`` (by default as `changed` says)
        and the ``swept`` options, which differ between a study's cells. Raises InputError for
        entries that are no methods.
        """
        from asyncsim.study.entries import make_methods

        return make_methods(self, swept, changed or self.changed)

    def make_problem(
        self, swept: Collection[str] = (), changed: Callable[[str], bool] | None = None
    ) -> "Problem":
        """Return the problem; print a note about changed options that it ignores; see
        `make_methods`.
        """
        from asyncsim.study.entries import make_problem

        return make_problem(self, swept, changed or self.changed)

    def record(self, methods: "Sequence[Method]", problem: "Problem") -> dict[str, Any]:
        """Return everything that the results depend on, as values of JSON; where they are computed
        does not count.

        Options of methods and problems stand in the ``hyperparameters`` of each method and in
        ``problem_config``; the user's files have hashes. The command line serves to resume the
        study.
        """
        from asyncsim.base.tracing import jax_settings
        from asyncsim.traces.columns import package_versions

        elsewhere = {"methods", "problem", *OF_METHODS, *OF_PROBLEMS, *ELSEWHERE}
        elsewhere -= {"workers", "split"}  # the cluster's, too, and what cells differ in
        return {
            **self.options_record(elsewhere),
            **jax_settings(),
            "proxy_momentum": self.momentum,
            "methods": [method.name for method in methods],
            "hyperparameters": {method.name: plain(method.hyperparameters) for method in methods},
            "problem": problem.name,
            "problem_config": plain(problem.config),
            "versions_of": package_versions("jax", "optax"),
        }


@dataclass(frozen=True)
class StudyConfig(TaskOptions):
    """Options of a study of a simulated cluster."""

    #: The options of the example in the help.
    example: ClassVar[str] = "--workers 20 --seeds 5"
    #: The values that options may name, at the end of the help.
    help_notes: ClassVar[str] = """
Laws: a number (s), "40 ms", constant(value), exponential(mean), gamma(mean, cv),
lognormal(mean, cv), uniform(low, high), halfnormal(low, scale), weibull(mean, shape),
pareto(mean, shape), empirical([s, ...]), mixture([law, ...], [weight, ...]).

Policies: asynchronous, bounded_staleness(bound), buffered(count), first_of(count), barrier(count),
rounds, buckets(count), discard_stale(limit, count=1), cancel_stale(limit, count=1),
trials(2 s, count=1), buffered(count, grace=200 ms), first_of(count, grace),
barrier(collective=ring) (also tree, halving_doubling, shared_link, two_level); without a server:
asynchronous, neighbours(mix=before) (also beside), overlap(steps), handshake.

Failures: crash(every, lasts, detect=0), job_crash(every, lasts, checkpoint=10 min,
saving=20 s) of a barrier's job, pause(every, lasts), slow(every, lasts, speed),
outage(every, lasts, checkpoint_every=100, checkpoint_time=0), loss(probability, timeout,
resend=True), leave(at), join(at), also with workers=[0, 3] or site=1.

Attacks: sign_flip(workers, scale=1), gaussian(workers, sigma=200), disturbance(workers, sigma=0.2),
zero(workers), infinite(workers), label_flip(workers), alie(workers, z), inner_product(workers,
scale=2), mimic(workers, target), min_max(workers), of the first workers or a list.

Explanations: python -m pydoc asyncsim.clusters.policy, or .failures, or .laws
"""

    workers: int = 100
    """Workers of the cluster."""
    steps: int = 200
    """Commits per worker, on average."""
    seeds: int = 3
    """Number of seeds; methods share a trace per seed."""

    compute: LawLike = "gamma(mean=1, cv=0.2)"
    """Law of a local step's time (s). A law per worker: "[1]*90 + [3]*10"."""
    service: LawLike = "constant(0.005)"
    """Law of a visit's service time (s)."""
    latency: LawLike = "constant(0)"
    """Law of a message's time one way (s). Also "40 ms", "[up, down]", "per_worker([...])"."""
    bandwidth: BandwidthLike | None = None
    """Bytes per second each way; unlimited by default. Also "100 Mbit/s", "[up, down]",
    "per_worker([...])".
    """
    shared_bandwidth: bool = False
    """The workers share the bandwidth, a message at a time."""
    message_bytes: SizeLike | None = None
    """Bytes of a message with parameters, or "25 MB". By default the size of the problem's
    parameters.
    """
    sites: tuple[int, ...] = ()
    """Workers of each site: 16 16; the server is at the first. One site by default."""
    far_latency: LawLike | None = None
    """Law of a message's time between sites (s). Also a matrix, from each site (row) to each:
    "[[0, 40 ms], [40 ms, 0]]".
    """
    far_bandwidth: BandwidthLike | None = None
    """Bytes per second each way between sites, or a matrix."""
    window: int = 1
    """Local steps per communication."""
    protocol: Literal["exchange", "read_then_write", "write_then_read"] = "exchange"
    """Order of a visit. exchange: the update is applied, then read; read_then_write: the read
    misses the update; write_then_read: two visits."""
    discipline: Discipline = "fifo"
    """Order of service: fifo, lowest_rank (worker index), random, or lock_free (nobody waits)."""
    servers: int = 1
    """Servers that share the parameters equally."""

    policy: PolicyLike = "asynchronous"
    """When versions are made and who waits."""

    failures: tuple[FailureLike, ...] = ()
    """Failures, such as "loss(0.01, timeout=2)"."""

    attack: AttackLike | None = None
    """False messages of some workers, or FILE.py:FUNCTION."""

    evaluate_every: int | None = None
    """Worker steps between evaluations; else 20 in all."""
    diagnose_every: int = 5
    """Worker steps between diagnostics; 0: none."""
    diagnose_energy: bool = False
    """Record the energies of each tensor and their ratio."""
    directions_every: int = 0
    """Worker steps between cosines of updates with the full gradient, the last step and the way to
    the end (a second replay); 0: none.
    """
    animate: bool = False
    """Record distances of reads, for animations."""

    @property
    def bits(self) -> int:
        """Of a parameter."""
        return 64 if self.x64 else 32

    def vector_bytes(self, problem: "Problem") -> float:
        """Return the size of a message with all parameters."""
        size = problem.parameter_count * self.bits // 8
        return (
            size
            if self.message_bytes is None
            else positive("message_bytes", self.message_bytes, BYTES)
        )

    def check(self) -> None:
        """Check the options before anything heavy is imported.

        Every study calls it first; a study's config checks its additional options, too.
        """
        require_count("diagnose_every", self.diagnose_every, minimum=0)
        require_count("directions_every", self.directions_every, minimum=0)
        if self.servers > 1:
            for name in ("directions_every", "animate"):
                if value := getattr(self, name):
                    raise InputError(
                        f"{name} = {value}: needs all parameters at one instant, and with "
                        f"servers = {self.servers} each commits its shard at another time; leave "
                        "it out, or give servers = 1"
                    )
        if self.evaluate_every is not None:
            require_count("evaluate_every", self.evaluate_every)
        require_count("steps", self.steps)
        # The proxy has it, too.
        require_fraction("momentum", self.momentum)
        if self.shared_bandwidth and self.bandwidth is None and self.far_bandwidth is None:
            raise InputError(
                "shared_bandwidth = True: there is no bandwidth to share; give bandwidth as well"
            )
        if self.message_bytes is not None:
            size = positive("message_bytes", self.message_bytes, BYTES)
            if self.bandwidth is None and self.far_bandwidth is None:
                raise InputError(
                    f"message_bytes = {size:g}: takes no time without a bandwidth; give bandwidth "
                    "as well"
                )
        super().check()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # `make_cluster` prints them
            self._cluster(message_bytes=1.0)

    @property
    def commits(self) -> int:
        """Commits of a trace."""
        return require_count("steps", self.steps) * require_count("workers", self.workers)

    def at(self, **values: Any) -> "StudyConfig":
        """Return these options with some values replaced."""
        return dataclasses.replace(self, **values)

    def make_cluster(self, message_bytes: float | None = None) -> Cluster:
        """Return the cluster; print notes about options without effect; a bandwidth needs
        ``message_bytes``.
        """
        with warnings.catch_warnings(record=True) as caught:
            for category in (HeterogeneityWarning, SlowLinkWarning):
                warnings.simplefilter("always", category)
            cluster = self._cluster(message_bytes)
        for warning in caught:
            note(str(warning.message))
        if cluster.workers == 1:
            self.say_ignored(("discipline",), "with one worker")
        return cluster

    def _cluster(self, message_bytes: float | None) -> Cluster:
        compute = self._law("compute")
        policy = as_policy(self.policy)
        # An all-reduce has no server; a service that was asked for is refused by name.
        serverless = policy.collective is not None and not self.changed("service")
        return Cluster(
            workers=self.workers,
            compute=compute,
            service=0.0 if serverless else self._law("service"),
            latency=self.latency,
            bandwidth=self.bandwidth,
            message_bytes=message_bytes
            if self.bandwidth is not None or self.far_bandwidth is not None
            else None,
            shared_bandwidth=self.shared_bandwidth,
            window=self.window,
            protocol=self.protocol,
            discipline=self.discipline,
            servers=self.servers,
            policy=policy,
            sites=self.sites or None,
            far_latency=self.far_latency,
            far_bandwidth=self.far_bandwidth,
            failures=self.failures,
        )

    def _law(self, option: str) -> Any:
        """Return the law or the laws of an option; the laws' own errors do not know which option
        they came from.
        """
        value = getattr(self, option)
        try:
            return parse(value) if isinstance(value, str) else value
        except InputError as error:
            raise InputError(f"{option} = {shown(value)}: {error}") from None


@dataclass(frozen=True)
class CellConfig(StudyConfig):
    """Options of a cell of a comparison, also without a server or on heterogeneous data."""

    topology: TopologyLike = SERVER
    """Who sends to whom without a server: ring(), exponential(), one_peer_exponential(),
    complete(), random_regular(degree), base2(), or FILE.py:FUNCTION."""
    split: float | None = None
    """How heterogeneous the workers' data are: the parameter of the Dirichlet distribution by which
    each worker's classes are mixed; 0.1 is much, 100 hardly. none: as the problem says, by default
    all data for all workers."""

    def check(self) -> None:
        """Check the options; see `StudyConfig.check`."""
        super().check()
        if self.split is not None:
            require_positive("split", self.split)

    def _cluster(self, message_bytes: float | None) -> Cluster:
        cluster = super()._cluster(message_bytes)
        # A user's file is imported later: the folder of a resumed study may name a stranger's.
        is_file = isinstance(self.topology, str) and own_file(self.topology)[0]
        if is_file or self.topology == SERVER:
            return cluster
        service = cluster.service if self.changed("service") else Constant(0.0)
        return dataclasses.replace(cluster, service=service, topology=as_topology(self.topology))
