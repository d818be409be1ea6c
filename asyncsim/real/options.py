"""Options of the studies that make recordings with real processes."""

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from tyro.conf import Suppress as Hidden

from asyncsim.base.errors import InputError, require_count, require_positive
from asyncsim.base.files import RECORDING
from asyncsim.real.processes import Processes
from asyncsim.study.config import LawLike, StudyConfig
from asyncsim.study.executor import Local

if TYPE_CHECKING:
    from asyncsim.methods import Method
    from asyncsim.problems import Problem
    from asyncsim.real.recording import Recorded

#: Options of which recordings do not depend.
_ANEW = ("cpus", "memory", "restart", "start_timeout", "timeout")


#: Options of clusters that say nothing of real processes, which take the time that they take.
_OF_CLUSTERS = (
    *("compute", "latency", "bandwidth", "shared_bandwidth", "message_bytes", "sites", "far_latency", "far_bandwidth"),
    *("dynamic_window", "servers", "read_blocks", "policy"),
    *("device", "seeds", "evaluate_every", "diagnose_every", "diagnose_energy", "animate"),
    *("executor", "cpus_per_run", "accelerators_per_run"),
)


@dataclass(frozen=True)
class RealConfig(StudyConfig):
    """Options of a study with real processes."""

    help_notes: ClassVar[str] = StudyConfig.help_notes.partition("Policies:")[0].replace(" of the simulated clock", "")

    workers: int = 4
    """Worker processes; the server is one more."""
    steps: int = 250
    """Commits per worker, on average; a recording has steps * workers commits."""
    delay: LawLike = "constant(0)"
    """Law of the time that a worker sleeps per local step (s), besides computing; "[law, law, ...]" gives one each."""
    service: LawLike = "constant(0)"
    """Law of the time that the server sleeps per visit (s), besides applying the message."""
    checkpoint_every: int = 50
    """Commits between two checkpoints, at which a teacher-forced replay takes over the recorded state."""
    restart: bool = False
    """Start a worker again whose process died."""
    address: str | None = None
    """Of a Ray cluster to join, HOST:PORT or auto. None: a local one, for as long as the study takes."""
    cpus: float = 1.0
    """CPUs that each process asks the Ray cluster for."""
    memory: int | None = None
    """Bytes that each process asks the Ray cluster for."""
    start_timeout: float = 180.0
    """Seconds for all processes to start."""
    timeout: float = 120.0
    """Seconds without a commit after which a recording is given up."""

    compute: Hidden[LawLike] = StudyConfig.compute
    latency: Hidden[LawLike] = StudyConfig.latency
    bandwidth: Hidden[float | None] = None
    shared_bandwidth: Hidden[bool] = False
    message_bytes: Hidden[float | None] = None
    sites: Hidden[tuple[int, ...]] = ()
    far_latency: Hidden[LawLike | None] = None
    far_bandwidth: Hidden[float | None] = None
    dynamic_window: Hidden[bool] = False
    servers: Hidden[int] = 1
    read_blocks: Hidden[int] = 1
    discipline: Literal["fifo", "lowest_rank", "random"] = "fifo"
    """Who is served next among those that wait."""
    policy: Hidden[str] = "asynchronous"
    topology: Hidden[str | None] = None
    # Hidden and of one value: no choice is left that a Literal would spell out.
    device: Hidden[str] = "default"  # type: ignore[assignment]
    seeds: Hidden[int] = StudyConfig.seeds
    evaluate_every: Hidden[int | None] = None
    diagnose_every: Hidden[int] = StudyConfig.diagnose_every
    diagnose_energy: Hidden[bool] = False
    animate: Hidden[bool] = False
    executor: Hidden[str] = "local"  # type: ignore[assignment]  # as device
    cpus_per_run: Hidden[int] = 1
    accelerators_per_run: Hidden[float] = 0.0
    resume: Path | None = None
    """Folder of the same study to go on with; on the command line other options are those that it was begun with."""

    def check(self) -> None:
        """Check the options; see `StudyOptions.check`."""
        for name in _OF_CLUSTERS:
            if getattr(self, name) != getattr(StudyConfig(), name):
                raise InputError(f"{name} = {getattr(self, name)!r}: real processes have none to set; leave it out")
        require_count("checkpoint_every", self.checkpoint_every)
        if self.memory is not None:
            require_count("memory", self.memory)
        for name in ("cpus", "start_timeout", "timeout"):
            require_positive(name, getattr(self, name), "" if name == "cpus" else "s")
        self.processes()
        super().check()

    def check_executor(self) -> None:
        """Check nothing: Ray runs the processes of a recording, and recordings are made one after the other."""

    def processes(self, method: "Method | None" = None) -> Processes:
        """Return what is asked of the processes; without a server the policy is the one that a method needs, if any."""
        given = {field.name: getattr(self, field.name) for field in dataclasses.fields(Processes)}
        if self.topology is not None and method is not None and method.timing.policy is not None:
            given["policy"] = method.timing.policy
        return Processes(**given)

    def recorded(self, method: "Method", problem: "Problem", folder: Path, seed: int, **options: Any) -> "Recorded":
        """Return the recording in a folder: one that is whole, one that was broken off and goes on, or a new one."""
        from asyncsim.real.supervisor import load, record

        there = (folder / RECORDING).exists()
        if there and (found := load(folder)).complete:
            return found
        of_ray = ("address", "cpus", "memory", "start_timeout", "timeout")
        names = ("commits", "precision", "checkpoint_every", "restart", *of_ray)
        asked: dict[str, Any] = {name: getattr(self, name) for name in names} | options
        return record(method, problem, self.processes(method), folder=folder, seed=seed, resume=there, **asked)

    @contextlib.contextmanager
    def one_by_one(self, processes: int) -> Iterator[Local]:
        """Return what makes recordings one after the other, with so many processes of a Ray cluster at a time."""
        from asyncsim.real.supervisor import ray_cluster

        with ray_cluster(self.address, self.cpus * processes):
            yield Local()

    def record(self, methods: "Sequence[Method]", problem: "Problem") -> dict[str, Any]:
        """Return what recordings depend on: not how long to wait for processes, or what they ask the cluster for."""
        return {name: value for name, value in super().record(methods, problem).items() if name not in _ANEW}
