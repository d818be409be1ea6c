"""The memory that a replay takes at most, measured in a process of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import asyncsim
from asyncsim.errors import InputError

if TYPE_CHECKING:
    import pandas as pd

    from asyncsim.methods import Method
    from asyncsim.problems import Problem

_PROGRAM = "import sys; from asyncsim.benchmark.memory import child; child(sys.argv[1])"


def measure(case: Any, commits: int, data_dir: Path | None) -> "pd.DataFrame":
    """Replay a case in a fresh process.

    Returns
    -------
    pandas.DataFrame
        One row: the case; ``peak_bytes`` of the whole process, ``replay_bytes``, that without what was resident
        before the replay was made; ``expected_bytes``, the workers' state; and ``memory_ratio`` of the latter two. On
        an accelerator all are its memory.

    Raises
    ------
    InputError
        The process ended with an error, for lack of memory say.
    """
    import pandas as pd

    asked = {**case._asdict(), "commits": commits, "data_dir": data_dir and str(data_dir.absolute())}
    package = str(Path(asyncsim.__file__).parent.parent)
    paths = [package, *filter(None, [os.environ.get("PYTHONPATH")])]
    ended = subprocess.run(
        [sys.executable, "-c", _PROGRAM, json.dumps(asked)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        stdout=subprocess.PIPE,
        text=True,
    )
    if ended.returncode != 0:
        raise InputError(
            f"memory: the process that replayed {case} ended with code {ended.returncode}; use fewer workers, or leave "
            "--memory out"
        )
    row = {**case._asdict(), **json.loads(ended.stdout.splitlines()[-1])}
    row["memory_ratio"] = row["replay_bytes"] / row["expected_bytes"]
    return pd.DataFrame([row])


def child(text: str) -> None:
    """Replay the case that a JSON text names; print the memory it took as JSON."""
    import jax

    from asyncsim.benchmark import tasks
    from asyncsim.replays.replay import Replay
    from asyncsim.simulation.simulate import simulate

    asked = json.loads(text)
    problem = tasks.make_problem(asked["task"], asked["data_dir"] and Path(asked["data_dir"]))
    method = tasks.make_method(asked["method"], asked["workers"])
    trace = simulate(tasks.cluster_for(method, asked["workers"]), asked["commits"])
    # The backend and its threads are there before, whatever they take.
    device = jax.local_devices()[0]
    jax.block_until_ready(jax.tree.map(jax.numpy.asarray, problem.init(jax.random.key(0))))
    before, _ = _resident_and_peak(device)
    replay = Replay(trace, method, problem)
    replay.advance(asked["commits"])
    replay.wait()
    _, peak = _resident_and_peak(device)
    memory = {"peak_bytes": peak, "replay_bytes": peak - before}
    print(json.dumps({**memory, "expected_bytes": expected_bytes(method, problem, asked["workers"])}))


def expected_bytes(method: "Method", problem: "Problem", workers: int) -> int:
    """Return the size of the workers' state in float32: what each read, the method's own, and the proxy if kept.

    Where commits are dispatched a few at a time, workers share some of it.
    """
    import jax
    import jax.numpy as jnp

    params = jax.eval_shape(problem.init, jax.random.key(0))
    central = jax.ShapeDtypeStruct((problem.parameter_count,), jnp.float32)
    parts = [central, *([] if method.proxy else [central])]
    parts += jax.tree.leaves(
        (
            jax.eval_shape(method.init_worker, central),
            jax.eval_shape(method.init_memory, central),
            jax.eval_shape(method.optimizer.init, params),
        )
    )
    return workers * sum(part.size * part.dtype.itemsize for part in parts)


def _resident_and_peak(device: Any) -> tuple[int, int]:
    """Return the bytes in use now and at most so far: the accelerator's, or the process's."""
    stats = device.memory_stats() if device.platform != "cpu" else None
    if stats:
        return stats["bytes_in_use"], stats["peak_bytes_in_use"]
    status = Path("/proc/self/status")
    if status.exists():
        # Not getrusage: its maximum includes the process that this one was started from.
        lines = (line.split() for line in status.read_text().splitlines())
        values = {words[0]: 1024 * int(words[1]) for words in lines if words and words[0] in ("VmRSS:", "VmHWM:")}
        return values["VmRSS:"], values["VmHWM:"]
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return peak, peak
