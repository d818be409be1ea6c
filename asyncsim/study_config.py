"""What every study lets its user choose: cluster, methods, problem and output, as one dataclass.

The command line is made from it. Building methods and problems imports JAX; making a config does not.
"""

import dataclasses
import inspect
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from asyncsim.cluster import Cluster
from asyncsim.errors import InputError, require_choice, require_count

if TYPE_CHECKING:
    from asyncsim.methods import Method
    from asyncsim.problems import Problem

    MethodLike = str | Method
    ProblemLike = str | Problem
else:
    MethodLike = ProblemLike = str


@dataclass(frozen=True)
class StudyConfig:
    """Options that all studies share; see each study for its own."""

    workers: int = 100
    """Workers of the cluster."""
    steps: int = 200
    """Commits per worker, on average; a trace has steps * workers commits."""
    methods: tuple[MethodLike, ...] = ("gem", "downpour", "adaptive_staleness")
    """Methods to compare, separated by spaces or commas; from Python also Method objects."""
    seeds: int = 3
    """Number of seeds: 0, 1, ... One trace per seed, shared by the methods."""

    compute: str = "gamma(mean=1, cv=0.2)"
    """Law of the time of a local step (s); a list such as "[constant(1)]*90 + [constant(3)]*10" gives one per worker."""
    service: str = "constant(0.005)"
    """Law of the time that the server is busy with a visit (s)."""
    latency: str = "constant(0)"
    """Law of the time of a message one way (s); "[up, down]" for two."""
    bandwidth: float | None = None
    """Bytes per second each way for messages with parameters; their size follows from the problem. None: unlimited."""
    shared_bandwidth: bool = False
    """Whether the workers share the server's bandwidth, one message at a time."""
    window: int = 1
    """Local steps per communication."""
    protocol: Literal["exchange", "read_then_write", "write_then_read"] = "exchange"
    """What a visit to the server is."""
    exclusive: bool = True
    """With read_then_write: whether the server stays with a worker from its read to its write."""
    discipline: Literal["fifo", "lowest_rank", "random"] = "fifo"
    """Who is served next."""

    problem: ProblemLike = "digits"
    """digits (bundled), mnist (downloaded once) or quadratic; from Python also a Problem object."""
    batch_size: int | None = None
    """Examples per gradient; None: the problem's own."""
    sharded: bool = False
    """Whether each worker sees only its own share of the training set."""
    dropout: float = 0.5
    """Share of the channels dropped (mnist)."""
    data_dir: Path | None = None
    """Folder that holds mnist/; else ASYNCSIM_DATA, else downloaded to the cache."""
    curvature: tuple[float, ...] = (1.0, 0.3, 0.1, 0.03)
    """Eigenvalues of the quadratic."""
    noise: float = 0.1
    """Standard deviation of each gradient coordinate of the quadratic."""

    learning_rate: float = 0.05
    """Step size of a gradient."""
    momentum: float = 0.9
    """Momentum of the proxy, for the methods that have one (gem, sgd)."""
    kappa: float = 1.0
    """Energy of the proxy relative to momentum SGD (gem)."""
    pi_max: float | None = 5.0
    """Upper end of the clip of pi; None for no clip (gem)."""
    variant: Literal["program", "paper"] = "program"
    """Which published form to follow (gem)."""

    evaluate_every: int | None = None
    """Worker steps between evaluations on all data; None: 20 evaluations."""
    diagnose_every: int = 5
    """Worker steps between recordings of the methods' diagnostics; 0: none."""
    x64: bool = False
    """Compute in float64 instead of float32."""
    device: Literal["default", "cpu", "gpu", "tpu"] = "default"
    """Where to compute."""
    out: Path | None = None
    """Folder for the results, new or empty; None: results/STUDY, then results/STUDY-2, ..."""

    @property
    def precision(self) -> str:
        """``"float64"`` or ``"float32"``."""
        return "float64" if self.x64 else "float32"

    @property
    def commits(self) -> int:
        """Commits of a trace."""
        return require_count("steps", self.steps) * require_count("workers", self.workers)

    @property
    def bytes_per_parameter(self) -> int:
        """Size of a parameter in a message."""
        return 8 if self.x64 else 4

    def check(self) -> None:
        """Check what can be checked before anything heavy is imported.

        Raises
        ------
        InputError
            A count or a law that cannot be used.
        """
        require_count("seeds", self.seeds)
        require_count("diagnose_every", self.diagnose_every, minimum=0)
        if self.evaluate_every is not None:
            require_count("evaluate_every", self.evaluate_every)
        require_count("steps", self.steps)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # told when the cluster is made in earnest
            self.make_cluster(message_bytes=1.0)

    def make_cluster(self, message_bytes: float | None = None) -> Cluster:
        """Return the cluster; ``message_bytes`` is the size of a message with parameters.

        Raises
        ------
        InputError
            A value that no cluster can have.
        """
        return Cluster(
            workers=self.workers,
            compute=self.compute,  # type: ignore[arg-type]  # the cluster parses laws
            service=self.service,  # type: ignore[arg-type]
            latency=self.latency,  # type: ignore[arg-type]
            bandwidth=self.bandwidth,
            message_bytes=message_bytes if self.bandwidth is not None else None,
            shared_bandwidth=self.shared_bandwidth,
            window=self.window,
            protocol=self.protocol,
            exclusive=self.exclusive,
            discipline=self.discipline,
        )

    def make_methods(self) -> "list[Method]":
        """Return the methods, saying aloud which changed options some of them ignore.

        Raises
        ------
        InputError
            An unknown method, one asked for twice, or a hyper-parameter outside its range.
        """
        from asyncsim.methods import METHODS

        methods, used = [], {}
        for entry in _split(self.methods):
            if not isinstance(entry, str):
                methods.append(entry)
                continue
            factory = METHODS[require_choice("methods", entry, METHODS)]
            arguments = self._arguments_of(factory)
            used[entry] = set(arguments)
            methods.append(factory(**arguments))
        if not methods:
            raise InputError(f"methods: none given; choose from {', '.join(METHODS)}")
        names = [method.name for method in methods]
        if len(set(names)) < len(names):
            raise InputError(f"methods = {', '.join(names)}: the same name twice; give each method once")
        self._say_ignored(_options_of(METHODS.values()), used, "method")
        return methods

    def make_problem(self) -> "Problem":
        """Return the problem, saying aloud which changed options it ignores.

        Raises
        ------
        InputError
            An unknown problem, an option outside its range, or data that cannot be had.
        """
        from asyncsim.problems import PROBLEMS

        if not isinstance(self.problem, str):
            return self.problem
        factory = PROBLEMS[require_choice("problem", self.problem, PROBLEMS)]
        arguments = self._arguments_of(factory)
        if arguments.get("batch_size", 0) is None:
            del arguments["batch_size"]
        self._say_ignored(_options_of(PROBLEMS.values()), {self.problem: set(arguments) | {"batch_size"}}, "problem")
        return factory(**arguments)

    def select_device(self) -> None:
        """Make JAX compute on the chosen kind of device.

        Raises
        ------
        InputError
            JAX finds no such device.
        """
        import jax

        if self.device == "default":
            return
        try:
            jax.config.update("jax_default_device", jax.devices(self.device)[0])
        except RuntimeError as error:
            raise InputError(f"device = {self.device!r}: JAX finds none here; choose default or cpu") from error

    def to_dict(self) -> dict[str, Any]:
        """Return the config as values that JSON can hold."""

        def plain(value: Any) -> Any:
            if isinstance(value, tuple | list):
                return [plain(entry) for entry in value]
            return value if isinstance(value, int | float | str | None) else getattr(value, "name", str(value))

        return {field.name: plain(getattr(self, field.name)) for field in dataclasses.fields(self)}

    def _arguments_of(self, factory: Callable[..., Any]) -> dict[str, Any]:
        return {name: getattr(self, name) for name in inspect.signature(factory).parameters if hasattr(self, name)}

    def _say_ignored(self, options: set[str], used: Mapping[str, set[str]], kind: str) -> None:
        for field in dataclasses.fields(self):
            if field.name not in options or getattr(self, field.name) == field.default:
                continue
            ignoring = [name for name, names in used.items() if field.name not in names]
            if ignoring:
                option = "--" + field.name.replace("_", "-")
                print(f"note: {option} changes nothing for {kind} {', '.join(ignoring)}", file=sys.stderr)


def _options_of(factories: Iterable[Callable[..., Any]]) -> set[str]:
    return {name for factory in factories for name in inspect.signature(factory).parameters}


def _split(methods: Iterable[Any]) -> list[Any]:
    """Split names that were given with commas between them."""
    entries: list[Any] = []
    for entry in methods:
        entries += [name.strip() for name in entry.split(",") if name.strip()] if isinstance(entry, str) else [entry]
    return entries
