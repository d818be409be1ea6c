"""Options of the studies that record real processes."""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from asyncsim.base.errors import InputError, require_count, require_positive
from asyncsim.base.files import RECORDING, field_values
from asyncsim.real.processes import Processes
from asyncsim.study.config import LawLike, StudyConfig
from asyncsim.study.executor import Local
from asyncsim.study.options import Hidden

if TYPE_CHECKING:
    from asyncsim.methods import Method
    from asyncsim.problems import Problem
    from asyncsim.real.recording import Recorded

#: Options on which recordings do not depend.
_INDEPENDENT = ("cpus", "memory", "restart", "start_timeout", "timeout")

#: Options of simulated clusters that real processes do not have.
_OF_CLUSTERS = (
    "compute",
    "latency",
    "bandwidth",
    "shared_bandwidth",
    "message_bytes",
    "sites",
    "far_latency",
    "far_bandwidth",
    "server_site",
    "dynamic_window",
    "servers",
    "read_blocks",
    "policy",
    "device",
    "seeds",
    "evaluate_every",
    "diagnose_every",
    "diagnose_energy",
    "directions_every",
    "animate",
    "executor",
    "cpus_per_run",
    "accelerators_per_run",
)


@dataclass(frozen=True)
class RealConfig(StudyConfig):
    """Options of a study with real processes."""

    example: ClassVar[str] = "--workers 2 --steps 100"
    help_notes: ClassVar[str] = StudyConfig.help_notes.partition("Policies:")[0]

    workers: int = 4
    """Worker processes; the server is one more."""
    steps: int = 250
    """Commits per worker, on average; a recording has steps * workers commits."""
    delay: LawLike = "constant(0)"
    """Law of the time that a worker sleeps per local step (s), besides computing; "[law, law, ...]"
    gives one each.
    """
    service: LawLike = "constant(0)"
    """Law of the time that the server sleeps per visit (s), besides applying the message."""
    checkpoint_every: int = 50
    """Commits between two checkpoints, at which a teacher-forced replay takes over the recorded
    state.
    """
    restart: bool = False
    """Restart a worker whose process died."""
    address: str | None = None
    """Address of a Ray cluster to join, HOST:PORT or auto. None: a local one for this study."""
    cpus: float = 1.0
    """CPUs that each process asks the Ray cluster for."""
    memory: int | None = None
    """Bytes that each process asks the Ray cluster for."""
    start_timeout: float = 180.0
    """Seconds for all processes to start."""
    timeout: float = 120.0
    """Seconds without a commit after which a recording stops with an error."""

    compute: Hidden[LawLike] = StudyConfig.compute
    latency: Hidden[LawLike] = StudyConfig.latency
    bandwidth: Hidden[float | None] = None
    shared_bandwidth: Hidden[bool] = False
    message_bytes: Hidden[float | None] = None
    sites: Hidden[tuple[int, ...]] = ()
    far_latency: Hidden[LawLike | None] = None
    far_bandwidth: Hidden[float | None] = None
    server_site: Hidden[int] = 0
    dynamic_window: Hidden[bool] = False
    servers: Hidden[int] = 1
    read_blocks: Hidden[int] = 1
    discipline: Literal["fifo", "lowest_rank", "random"] = "fifo"
    """Order of service of the waiting workers."""
    policy: Hidden[str] = "asynchronous"
    topology: Hidden[str | None] = None
    device: Hidden[str] = "default"  # type: ignore[assignment]  # a single value, no Literal
    seeds: Hidden[int] = StudyConfig.seeds
    evaluate_every: Hidden[int | None] = None
    diagnose_every: Hidden[int] = StudyConfig.diagnose_every
    diagnose_energy: Hidden[bool] = False
    directions_every: Hidden[int] = 0
    animate: Hidden[bool] = False
    executor: Hidden[str] = "local"  # type: ignore[assignment]  # a single value
    cpus_per_run: Hidden[int] = 1
    accelerators_per_run: Hidden[float] = 0.0
    resume: Path | None = None
    """Folder of the same study to resume; on the command line other options keep their values."""

    def check(self) -> None:
        """Check the options; see `StudyOptions.check`."""
        for name in _OF_CLUSTERS:
            if getattr(self, name) != getattr(StudyConfig(), name):
                raise InputError(
                    f"{name} = {getattr(self, name)!r}: real processes have none to set; leave it "
                    "out"
                )
        require_count("checkpoint_every", self.checkpoint_every)
        if self.memory is not None:
            require_count("memory", self.memory)
        for name in ("cpus", "start_timeout", "timeout"):
            require_positive(name, getattr(self, name), "" if name == "cpus" else "s")
        self.processes()
        super().check()

    def check_executor(self) -> None:
        """Check nothing: Ray runs the processes, and recordings run one after the other."""

    def processes(self, method: "Method | None" = None) -> Processes:
        """Return the processes of the options; without a server with a method's policy."""
        values = field_values(self, Processes)
        if self.topology is not None and method is not None and method.timing.policy is not None:
            values["policy"] = method.timing.policy
        return Processes(**values)

    def recorded(
        self, method: "Method", problem: "Problem", folder: Path, seed: int, **options: Any
    ) -> "Recorded":
        """Load the complete recording in a folder, resume an incomplete one, or record."""
        from asyncsim.real.supervisor import load, record

        exists = (folder / RECORDING).exists()
        if exists and (recording := load(folder)).complete:
            return recording
        of_ray = ("address", "cpus", "memory", "start_timeout", "timeout")
        names = ("commits", "precision", "checkpoint_every", "restart", *of_ray)
        settings: dict[str, Any] = {name: getattr(self, name) for name in names} | options
        return record(
            method,
            problem,
            self.processes(method),
            folder=folder,
            seed=seed,
            resume=exists,
            **settings,
        )

    @contextlib.contextmanager
    def one_by_one(self, processes: int) -> Iterator[Local]:
        """Yield an executor that records one after the other, with CPUs for ``processes``."""
        from asyncsim.real.supervisor import ray_cluster

        with ray_cluster(self.address, self.cpus * processes):
            yield Local()

    def record(self, methods: "Sequence[Method]", problem: "Problem") -> dict[str, Any]:
        """Return the options on which recordings depend: no timeouts and no resources."""
        return {
            name: value
            for name, value in super().record(methods, problem).items()
            if name not in _INDEPENDENT
        }
