"""What every study lets its user choose: cluster, methods, problem and output, as one dataclass.

The command line is made from it. Building methods and problems imports JAX; making a config does not.
"""

import contextlib
import dataclasses
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import asyncsim.study.executor as executor
import asyncsim.study.results as results
from asyncsim.base.console import note
from asyncsim.base.errors import (
    InputError,
    require_choice,
    require_count,
    require_fraction,
    require_nonnegative,
    shown,
)
from asyncsim.base.files import plain
from asyncsim.base.units import BYTES, positive
from asyncsim.clusters.cluster import Cluster, SlowLinkWarning
from asyncsim.clusters.failures import Failure
from asyncsim.clusters.laws import Law, parse
from asyncsim.clusters.policy import Policy, parse_policy
from asyncsim.clusters.workers import HeterogeneityWarning, proportional_windows
from asyncsim.study.loading import OF_METHODS, OF_PROBLEMS, files_of, recognised

if TYPE_CHECKING:
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
    ProblemLike = str | Problem
else:
    # What the command line offers; tyro makes its options from these.
    LawLike = PolicyLike = FailureLike = MethodLike = ProblemLike = AttackLike = str
    BandwidthLike = SizeLike = float | str


Discipline = Literal["fifo", "lowest_rank", "random", "lock_free"]
#: Options on which no result depends.
ELSEWHERE = frozenset(("out", "resume", "executor", "address", "cpus_per_run", "accelerators_per_run"))
#: Their runs are listed before the first begins.
_MOST_SEEDS = 100_000


def fields_of(options: Iterable[str]) -> frozenset[str]:
    """Return the fields whose options were typed, the negations of switches among them."""
    names = {option.removeprefix("--").partition("=")[0] for option in options if option.startswith("--")}
    return frozenset(name.removeprefix("no-").replace("-", "_") for name in names)


@dataclass(frozen=True)
class StudyOptions:
    """Options that all studies share, those of one cluster and those of several; see each study for its own."""

    #: Shown with the help of each study: what does not fit into the line of an option.
    help_notes: ClassVar[str] = """
Laws of times: a number of seconds, constant(value), exponential(mean), gamma(mean, cv), lognormal(mean, cv),
uniform(low, high), weibull(mean, shape), pareto(mean, shape), empirical([s, s, ...]), mixture([law, law], [weight,
weight]). Times are in seconds of the simulated clock, or have a unit: "gamma(mean=40 ms, cv=0.2)".

Protocols: exchange, one visit applies the update and takes the result back; read_then_write, the worker reads before
its own update is applied; write_then_read, two visits, between which others are served.

Policies: asynchronous; bounded_staleness(bound), nobody is more than so many commits ahead of the slowest (a bound of
the workers' clocks, not of the staleness in versions); buffered(count), so many messages make a version;
first_of(count), and their workers wait for it; barrier(count), and the others are stopped, all workers without a count;
barrier(collective=ring), an all-reduce and no server (also tree, halving_doubling, shared_link, two_level);
discard_stale(limit, count=1), without what is so many versions stale; cancel_stale(limit, count=1), and computations
that become so are stopped; rounds, a version by every worker in turn, while further messages are buffered and nobody
waits; buckets(count), a version once each of so many, among which the workers are divided, has a message.

Failures: crash(every, lasts, detect=0), workers lose their state and come back, the server knows after detect seconds;
pause(every, lasts), slow(every, lasts, speed), spells of a worker; outage(every, lasts, checkpoint_every=100,
checkpoint_time=0), the server goes back to its last checkpoint of so many versions each; loss(probability, timeout,
resend=True), messages to the server; leave(at), join(at). All for workers=[0, 3], say, site=1, or all.

Attacks: what the workers 0 to workers - 1, or those of a list, send: sign_flip(workers, scale=1), gaussian(workers,
sigma=200), disturbance(workers, sigma=0.2), zero(workers), infinite(workers), label_flip(workers), alie(workers, z),
inner_product(workers, scale=2), mimic(workers, target), min_max(workers).
"""

    #: What was typed on the command line, but for options on which no result depends; in Python nothing was.
    command: ClassVar[tuple[str, ...] | None] = None

    #: The file of a study of the user's own, with its hash.
    study_file: ClassVar[Mapping[str, str]] = MappingProxyType({})

    #: 0 for studies that have another option for how long they are, which counts where ``steps`` is 0.
    fewest_steps: ClassVar[int] = 1

    workers: int | tuple[int, ...] = 100
    """Workers of the cluster."""
    steps: int = 200
    """Commits per worker, on average; a trace has steps * workers commits."""
    methods: tuple[MethodLike, ...] = ("gem", "downpour", "adaptive_staleness")
    """Methods to compare, of those above; with arguments as in "gem(kappa=2)", with several values of one as in
    "gem(kappa=[1, 2])"; your own as FILE.py:FUNCTION (see the README)."""
    seeds: int = 3
    """Number of seeds: 0, 1, ... One trace per seed, shared by the methods."""

    compute: LawLike = "gamma(mean=1, cv=0.2)"
    """Law of the time of a local step (s); "[constant(1)]*90 + [constant(3)]*10" gives one per worker."""
    service: LawLike = "constant(0.005)"
    """Law of the time that the server is busy with a visit (s)."""
    latency: LawLike = "constant(0)"
    """Law of the time of a message one way (s), or "40 ms"; "[up, down]" for two, "per_worker([law, law, ...])" for
    each worker its own."""
    bandwidth: BandwidthLike | None = None
    """Bytes per second each way for messages with parameters, or "100 Mbit/s"; "[up, down]" and "per_worker([...])" as
    for the latency. None: unlimited."""
    shared_bandwidth: bool = False
    """The workers share the server's bandwidth, one message at a time; else each has it to itself."""
    message_bytes: SizeLike | None = None
    """Bytes of a message with parameters, or "25 MB", as those of another model; a bandwidth goes with it. None: as
    many as the problem's parameters have."""
    sites: tuple[int, ...] = ()
    """Workers of each site, the server at the first: 16 16. None given: one site."""
    far_latency: LawLike | None = None
    """Law of the time of a message one way between sites (s); None: as within one."""
    far_bandwidth: BandwidthLike | None = None
    """Bytes per second each way between sites; None: as within one."""
    window: int = 1
    """Local steps per communication."""
    dynamic_window: bool = False
    """The window is that of the fastest workers; the others take fewer local steps, in proportion to their speed."""
    protocol: Literal["exchange", "read_then_write", "write_then_read"] = "exchange"
    """What a visit to the server is; see above."""
    exclusive: bool = True
    """With read_then_write: nobody comes between a read and its write; --no-exclusive lets others."""
    discipline: Discipline = "fifo"
    """Who is served next of those that wait: the first to come, the lowest worker index, or any; lock_free: nobody
    waits."""
    servers: int = 1
    """Servers that each hold an equal part of the parameters; above 1 only in the study plan: replays have one."""
    read_blocks: int = 1
    """With lock_free and write_then_read: blocks of the parameters that a read sees one after the other."""

    policy: PolicyLike = "asynchronous"
    """What the server takes up and when workers go on: "bounded_staleness(3)", say; see above."""

    failures: tuple[FailureLike, ...] = ()
    """What breaks: "crash(every=exponential(3600), lasts=exponential(120))", "loss(0.01, timeout=2)"; see above."""

    problem: ProblemLike = "digits"
    """What is learnt, of the problems above; with arguments as in "mnist(network=mlp)"; your own as FILE.py:FUNCTION
    (see the README). From Python also a Problem object."""
    batch_size: int | None = None
    """Examples per gradient, unless the problem says its own. None: 64 for mnist and cifar10, 32 for the others;
    quadratic has no examples."""

    learning_rate: float = 0.05
    """Step size of a gradient, of all methods that do not say their own; one of your own function keeps its default
    unless this is another."""
    optimizer: str | None = None
    """Local optimizer of the workers by its name in optax, adam say, with the learning rate for its own: those whose
    steps need gradients and parameters alone, of all methods that take one and do not say their own. None: plain
    gradient steps."""
    momentum: float = 0.9
    """Momentum of the methods that have one and do not say their own, and of the proxy whose energy all are compared
    with; from 0 to below 1."""

    attack: AttackLike | None = None
    """What some of the workers send in the place of their messages: "alie(workers=3)", say, the first three; see
    above. None: all are honest."""

    evaluate_every: int | None = None
    """Worker steps between evaluations on all data, of which three examples take as long as the gradient of one. None:
    20 evaluations in all."""
    diagnose_every: int = 5
    """Worker steps, and one commit, between recordings of the methods' costly diagnostics; 0 for none."""
    diagnose_energy: bool = False
    """Record also the energies of each tensor, and the distribution of their ratio over the weights."""
    animate: bool = False
    """Record where the central variable is after each commit: asyncsim animate, and the page of the results, then show
    how far from it the workers' reads are, and not only how many versions."""
    x64: bool = False
    """Compute in float64 instead of float32."""
    device: Literal["default", "cpu", "gpu", "tpu"] = "default"
    """Where to compute; default leaves it to JAX."""
    out: Path | None = None
    """Folder for the results, new or empty. None: the first free one of results/STUDY, results/STUDY-2, ..."""
    resume: Path | None = None
    """Folder of the same study that was interrupted, or of which runs failed: what is missing there is computed. On the
    command line all other options are those that it was begun with; studies that keep their runs take more seeds and
    methods, if these are given with the old ones."""
    executor: Literal["local", "ray"] = "local"
    """Where independent runs are computed: local, in this process, several at a time if each keeps one core busy; ray,
    on all cores or machines of a Ray cluster."""
    address: str | None = None
    """Of a running Ray cluster: auto, or HOST:PORT. None: one is started on this machine (ray)."""
    cpus_per_run: int = 1
    """Cores that each run reserves (ray)."""
    accelerators_per_run: float = 0.0
    """GPUs, with --device tpu TPUs, that each run reserves; a fraction shares one (ray)."""

    @property
    def precision(self) -> str:
        """``"float64"`` or ``"float32"``."""
        return "float64" if self.x64 else "float32"

    @property
    def bits(self) -> int:
        """Of a parameter."""
        return 64 if self.x64 else 32

    def vector_bytes(self, problem: "Problem") -> float:
        """Return the size of a message with all parameters."""
        own = problem.parameter_count * self.bits // 8
        return own if self.message_bytes is None else positive("message_bytes", self.message_bytes, BYTES)

    def check(self) -> None:
        """Check what can be checked before anything heavy is imported.

        Every study calls it first; configs that have more options check these, too.
        """
        if require_count("seeds", self.seeds) > _MOST_SEEDS:
            raise InputError(f"seeds = {self.seeds}: must be at most {_MOST_SEEDS:,}; each is a run of every method")
        require_count("diagnose_every", self.diagnose_every, minimum=0)
        if self.evaluate_every is not None:
            require_count("evaluate_every", self.evaluate_every)
        require_count("steps", self.steps, minimum=self.fewest_steps)
        # Also that of the proxy, whose name for it nobody has typed.
        require_fraction("momentum", self.momentum)
        if self.shared_bandwidth and self.bandwidth is None and self.far_bandwidth is None:
            raise InputError("shared_bandwidth = True: there is no bandwidth to share; give bandwidth as well")
        if self.message_bytes is not None:
            size = positive("message_bytes", self.message_bytes, BYTES)
            if self.bandwidth is None and self.far_bandwidth is None:
                raise InputError(f"message_bytes = {size:g}: takes no time without a bandwidth; give bandwidth as well")
        if self.out is not None and self.resume is not None:
            raise InputError(f"out = {str(self.out)!r}: results that are resumed stay where they are; leave it out")
        self.check_executor()

    def check_executor(self) -> None:
        """Check the options of the executor, and that Ray is installed if it is asked for."""
        local = require_choice("executor", self.executor, ("local", "ray")) == "local"
        require_count("cpus_per_run", self.cpus_per_run)
        accelerators = require_nonnegative("accelerators_per_run", self.accelerators_per_run)
        if local:
            asked = {"address": self.address is not None, "accelerators_per_run": accelerators > 0}
            for name, given in (asked | {"cpus_per_run": self.cpus_per_run > 1}).items():
                if given:
                    raise InputError(f"{name} = {getattr(self, name)!r}: is an option of --executor ray; add that")
            return
        if find_spec("ray") is None:
            raise InputError("executor = 'ray': Ray is not installed; install it with: pip install \"asyncsim[ray]\"")
        if accelerators > 1 and accelerators != int(accelerators):
            raise InputError(f"accelerators_per_run = {accelerators}: above one it must be a whole number")
        if self.device in ("gpu", "tpu") and not accelerators:
            raise InputError(
                f"device = {self.device!r}: runs that Ray spreads have only the accelerators they ask for; "
                "give accelerators_per_run as well"
            )
        if self.device == "cpu" and accelerators:
            raise InputError(
                f"accelerators_per_run = {accelerators:g}: would lie idle with device = 'cpu'; give one of them"
            )

    def make_methods(self, swept: Collection[str] = (), changed: Callable[[str], bool] | None = None) -> "list[Method]":
        """Return the methods, saying aloud which changed options some of them ignore.

        Functions of the user's own get the options that were ``changed``, by default what `changed` says, and those
        that are ``swept``, which set a study's cells apart. Raises InputError for entries that make no methods.
        """
        from asyncsim.study.entries import make_methods

        return make_methods(self, swept, changed or self.changed)

    def make_problem(self, swept: Collection[str] = (), changed: Callable[[str], bool] | None = None) -> "Problem":
        """Return the problem, saying aloud which changed options it ignores; as `make_methods`."""
        from asyncsim.study.entries import make_problem

        return make_problem(self, swept, changed or self.changed)

    def computing_device(self) -> contextlib.AbstractContextManager[None]:
        """Let JAX compute on the chosen kind of device; see `asyncsim.study.executor.computing_device`."""
        return executor.computing_device(self.device)

    def record(self, methods: "Sequence[Method]", problem: "Problem") -> dict[str, Any]:
        """Return what the results depend on, as values that JSON can hold; where they are computed is left out.

        Options of methods and problems stand where they count: in ``hyperparameters`` of each method and in
        ``problem_config``, as these very objects have them; of their functions and data there are hashes. What was
        typed, and of files of the user's own the paths and hashes, is there for those who resume the study.
        """
        from asyncsim.base.tracing import jax_settings
        from asyncsim.traces.columns import package_versions

        elsewhere = {"methods", "problem", *OF_METHODS, *OF_PROBLEMS, *ELSEWHERE}
        elsewhere -= {"workers", "dirichlet"}  # the cluster's, too, and what cells differ in
        own = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        typed = self.command if self.command is not None else results.typed_in(self.resume)
        code = {f"code of {method.name}": recognised(method) for method in methods}
        code[f"code and data of {problem.name}"] = recognised(problem)
        unknown = [what for what, known in code.items() if known is None]
        if unknown and self.resume is not None:
            raise InputError(
                f"resume = {str(self.resume)!r}: nobody can tell whether the {unknown[0]} is the same as before: it is "
                f"in no file; write it into one and give FILE.py:FUNCTION, or {results.ANEW}"
            )
        return {
            **({} if typed is None else {results.COMMAND: list(typed)}),
            results.FILES: {**{path: found for path, (_, found) in files_of(own).items()}, **self.study_file},
            **{name: plain(value) for name, value in own.items() if name not in elsewhere},
            **jax_settings(),
            "proxy_momentum": self.momentum,
            "methods": [method.name for method in methods],
            "hyperparameters": {method.name: plain(method.hyperparameters) for method in methods},
            "problem": problem.name,
            "problem_config": plain(problem.config),
            **code,
            "versions": {**package_versions(), **{name: version(name) for name in ("jax", "optax")}},
        }

    def changed(self, option: str) -> bool:
        """Return whether the user chose an option: on the command line gave it, in Python gave another value."""
        if self.command is not None:
            return option in fields_of(self.command)
        default = {field.name: field.default for field in dataclasses.fields(self)}[option]
        return bool(getattr(self, option) != default)

    def say_ignored(self, options: Iterable[str], where: str) -> None:
        """Say aloud which of some options were changed although they change nothing there."""
        for option in options:
            if self.changed(option):
                note(f"--{option.replace('_', '-')} changes nothing {where}")


@dataclass(frozen=True)
class StudyConfig(StudyOptions):
    """Options of a study of one cluster."""

    workers: int = 100
    """Workers of the cluster."""

    @property
    def commits(self) -> int:
        """Commits of a trace."""
        return require_count("steps", self.steps) * require_count("workers", self.workers)

    def check(self) -> None:
        """Check the options; see `StudyOptions.check`."""
        super().check()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # told when the cluster is made in earnest
            self._cluster(message_bytes=1.0)

    def at(self, **values: Any) -> "StudyConfig":
        """Return these options but for some values."""
        return dataclasses.replace(self, **values)

    def make_cluster(self, message_bytes: float | None = None) -> Cluster:
        """Return the cluster, saying aloud which options change nothing; ``message_bytes`` goes with a bandwidth."""
        with warnings.catch_warnings(record=True) as caught:
            for one in (HeterogeneityWarning, SlowLinkWarning):
                warnings.simplefilter("always", one)
            cluster = self._cluster(message_bytes)
        for warning in caught:
            note(str(warning.message))
        if not self.exclusive and cluster.protocol == "write_then_read":
            note("--no-exclusive changes nothing: the visits of write_then_read are always separate")
        if cluster.workers == 1:
            self.say_ignored(("discipline",), "with one worker")
        if self.dynamic_window and set(cluster.windows) == {self.window}:
            note(f"--dynamic-window changes nothing with a window of {self.window}: all workers have it")
        return cluster

    def _cluster(self, message_bytes: float | None) -> Cluster:
        compute = self._law("compute")
        window: int | tuple[int, ...] = self.window
        if self.dynamic_window and isinstance(compute, list | tuple):  # else all are equally fast
            window = proportional_windows(compute, self.window)
        policy = parse_policy(self.policy) if isinstance(self.policy, str) else self.policy
        # An all-reduce has no server; a service that was asked for is refused by name.
        serverless = policy.collective is not None and not self.changed("service")
        return Cluster(
            workers=self.workers,
            compute=compute,
            service=0.0 if serverless else self._law("service"),
            latency=self.latency,
            bandwidth=self.bandwidth,
            message_bytes=message_bytes if self.bandwidth is not None or self.far_bandwidth is not None else None,
            shared_bandwidth=self.shared_bandwidth,
            window=window,
            protocol=self.protocol,
            exclusive=self.exclusive,
            discipline=self.discipline,
            servers=self.servers,
            read_blocks=self.read_blocks,
            policy=policy,
            sites=self.sites or None,
            far_latency=self.far_latency,
            far_bandwidth=self.far_bandwidth,
            failures=self.failures,
        )

    def _law(self, option: str) -> Any:
        """Return the law or the laws of an option; the laws' own errors do not know which option they came from."""
        value = getattr(self, option)
        try:
            return parse(value) if isinstance(value, str) else value
        except InputError as error:
            raise InputError(f"{option} = {shown(value)}: {error}") from None
