"""The driver of a recording: checks what is asked for, lets the processes do it, and gathers what they leave."""

import contextlib
from pathlib import Path
from typing import Any

from asyncsim.errors import InputError, require_count, require_path, require_positive
from asyncsim.files import plain
from asyncsim.real.cluster import check_room, ray, ray_cluster
from asyncsim.real.crew import Crew
from asyncsim.real.folder import CHECKPOINT, Header, Recorded, load, write_trace
from asyncsim.real.log import LOG, read_log
from asyncsim.real.processes import Processes


def record(
    method: Any,
    problem: Any,
    processes: Processes,
    commits: int,
    seed: int = 0,
    *,
    folder: str | Path,
    precision: str = "float32",
    checkpoint_every: int = 50,
    keep_states: bool = False,
    restart: bool = False,
    resume: bool = False,
    address: str | None = None,
    cpus: float = 1.0,
    memory: int | None = None,
    start_timeout: float = 180.0,
    timeout: float = 120.0,
    progress: bool | None = None,
) -> Recorded:
    """Train with real worker processes around a real parameter server, and record it as a trace.

    Parameters
    ----------
    method : Method
        Without a timing policy, and whose local steps depend on nothing that a worker cannot know.
    problem : Problem
    processes : Processes
    commits : int
    seed : int
        Of the initial parameters, the minibatches, the problem's randomness and the delays: the streams of a replay.
    folder : path
        For the recording; see `asyncsim.real.folder`.
    precision : {"float32", "float64"}
    checkpoint_every : int
        Commits between two checkpoints.
    keep_states : bool
        Keep all checkpoints, not only the last.
    restart : bool
        Start a worker again whose process was lost: from a read of its own, and with the job after the lost one.
    resume : bool
        Go on with the recording in the folder, which was broken off.
    address : str, optional
        Of a Ray cluster; None starts one on this machine for as long as it takes.
    cpus : float
        That each process asks the cluster for.
    memory : int, optional
        Bytes that each process asks the cluster for.
    start_timeout : float
        Seconds for all processes to start and compile.
    timeout : float
        Seconds without a commit after which it is given up, and for the server to show that it lives.
    progress : bool, optional
        Show a progress bar on standard error; by default if that is a terminal.

    Returns
    -------
    Recorded

    Notes
    -----
    The server runs on this machine, where the folder is; the workers wherever the cluster has room, each on CPUs and
    with one thread. When a computation began is told by the worker: on another machine up to half the time of the
    quickest of ten calls. A clock stands still while a recording is broken off. A method that uses the time of its
    visit sees when its message was taken up, and in a replay when the service ended.

    Computations that went with a lost worker are rows of the trace with the outcome ``"cancelled"``; their start is
    taken to be the end of the read, as nobody was told.

    Raises
    ------
    InputError
        Ray is not installed; arguments cannot be used, or processes cannot start; the server died, or all workers did:
        the message says so, and what was recorded is kept.
    """
    ray()
    folder = require_path("folder", folder)
    require_count("checkpoint_every", checkpoint_every)
    for name, value in (("cpus", cpus), ("start_timeout", start_timeout), ("timeout", timeout)):
        require_positive(name, value)
    header = _header(method, problem, processes, require_count("commits", commits), seed, precision)
    _prepare(folder, header, resume)
    with ray_cluster(address, cpus * (processes.workers + 1)) as module:
        check_room(module, processes.workers + 1, cpus, memory)
        crew = Crew(module, (method, problem), header, cpus, memory, start_timeout, timeout)
        try:
            crew.start(str(folder.resolve()), checkpoint_every, keep_states)
            try:
                crew.watch(restart, progress)
            except BaseException:
                crew.end()  # before the server writes the same file
                with contextlib.suppress(InputError):
                    write_trace(folder, load(folder).trace)
                raise
        finally:
            crew.end()
    return load(folder)


def require_timing(method: Any, processes: Processes) -> None:
    """Raise InputError if real processes cannot give a method what it needs."""
    for name, needed in method.timing._asdict().items():
        has = getattr(processes, name, None)
        if needed not in (None, has) and name != "message_size":
            raise InputError(
                f"method = {method.name!r}: needs {name} = {needed}, and these processes have "
                f"{'none' if has is None else repr(has)}"
            )
    if method.sees_loss or method.sees_memories:
        raise InputError(
            f"method = {method.name!r}: sees losses or the memories of all workers, which the server of real processes "
            "does not tell; choose another"
        )
    if method.reply is not None and processes.separate_reads:
        raise InputError(
            f"method = {method.name!r}: replies to its workers with more than the central variable, which reads of "
            "their own do not bring; choose protocol='exchange'"
        )


def _header(method: Any, problem: Any, processes: Processes, commits: int, seed: int, precision: str) -> Header:
    """Return what is asked for; raise InputError if it cannot be done."""
    import jax

    from asyncsim.real.computing import Computing
    from asyncsim.replays.method_check import check_method

    require_count("seed", seed, minimum=0)
    params = jax.eval_shape(problem.init, jax.random.key(0))
    check_method(method, params)
    _require_no_keys(method, params)
    require_timing(method, processes)
    Computing(method, problem, processes.workers, processes.window, seed, precision).check()
    return Header(
        processes,
        commits,
        seed,
        precision,
        {"name": method.name, "hyperparameters": plain(method.hyperparameters)},
        {"name": problem.name, "config": plain(problem.config)},
        method.reply is not None,
    )


def _require_no_keys(method: Any, params: Any) -> None:
    """Raise InputError if a method keeps a random key in a state, which cannot be written as a checkpoint."""
    import jax
    import jax.numpy as jnp

    def states(params: Any) -> Any:
        central = jnp.concatenate([leaf.reshape(-1).astype(float) for leaf in jax.tree.leaves(params)])
        own = [make(central) for make in (method.init_worker, method.init_server, method.init_memory)]
        return own, method.optimizer.init(params)

    for leaf in jax.tree.leaves(jax.eval_shape(states, params)):
        if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            raise InputError(
                f"method = {method.name!r}: keeps a random key in a state, which real processes cannot write; keep "
                "jax.random.key_data of it, or draw from visit.key"
            )


def _prepare(folder: Path, header: Header, resume: bool) -> None:
    """Make the folder, or see that it holds this very recording."""
    if not resume:
        try:
            if folder.exists() and any(folder.iterdir()):
                raise InputError(f"folder = {str(folder)!r}: exists and is not empty; give another, or go on (resume)")
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"folder = {str(folder)!r}: cannot be written: {error.strerror}; give another") from error
        header.save(folder)
        return
    found = Header.load(folder)
    for name, value in header.comparable().items():
        if value != found.comparable()[name]:
            raise InputError(
                f"resume: {name} = {value!r}, and the recording in {str(folder)!r} has {found.comparable()[name]!r}; "
                "go on with what it was begun with"
            )
    from asyncsim.real.parameters import usable_checkpoint

    # The server does this too; here the user sees what it says.
    usable_checkpoint(folder / CHECKPOINT, len(read_log(folder)[0]) if (folder / LOG).exists() else 0)
