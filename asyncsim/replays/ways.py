"""In which way, and on which devices, a replay is computed: what pays depends on vectors, waves, method and cores.

On a CPU, by the parameters of the problem:

============================  ==========================================================================================
fewer than 2,000              ``kernel``: one compiled loop over pieces of a few commits
2,000 to 100,000              ``halves``: two threads with half of each vector, if waves are long, the method works
                              element by element and nothing is kept for local steps; else ``kernel``
100,000 or more               ``dispatched``: gradients side by side, if reads are whole and the method does not see all
                              memories; else ``kernel``
============================  ==========================================================================================

Several devices of a CPU have ``kernel``; accelerators, one or several, ``batched``, the kernel with all rows of a piece
at once. The numbers themselves are in `asyncsim.replays.tuning`.
"""

from collections.abc import Sequence
from typing import Any, Literal

import jax

from asyncsim.errors import InputError
from asyncsim.methods.method import Method
from asyncsim.problems.problem import Problem
from asyncsim.replays.halves import THREADS
from asyncsim.replays.method_check import check_method
from asyncsim.replays.tuning import (
    VERY_LONG_VECTOR,
    current_devices,
    dispatches,
    gradients_at_once,
    has_two_cores,
    is_long,
    loops_over_rows,
    middling,
)
from asyncsim.replays.waves import mean_wave
from asyncsim.traces.trace import Trace

#: Their names: those of the modules that have them, or their pieces.
WayName = Literal["kernel", "batched", "dispatched", "halves"]


def way_of(trace: Trace, method: Method, problem: Problem, devices: Sequence[Any]) -> WayName:
    """Return in which way a replay on these devices is computed."""
    platform, parameters = devices[0].platform, problem.parameter_count
    if not loops_over_rows(platform) or not _has_rows_apart(trace, method, devices):
        return kernel_of(platform)
    if dispatches(platform, parameters):
        return "dispatched"
    # The longest look comes last.
    if middling(platform, parameters) and has_two_cores() and _can_be_halved(method, problem):
        return "halves" if is_long(mean_wave(trace)) else "kernel"
    return "kernel"


def kernel_of(platform: str) -> WayName:
    """Return in which way a compiled loop over pieces runs them on a kind of device."""
    return "kernel" if loops_over_rows(platform) else "batched"


def default_devices(trace: Trace, method: Method, problem: Problem) -> tuple[Any, ...]:
    """Return the devices on which a replay takes place unless others are given."""
    undivided = current_devices(problem.parameter_count, trace.workers, divided=False)
    if _has_rows_apart(trace, method, undivided) and dispatches(undivided[0].platform, problem.parameter_count):
        return undivided
    # Devices of a CPU wait for each other, so that local steps should be as many on each.
    short = problem.parameter_count < VERY_LONG_VECTOR
    divided = problem.map_on_cpu and short and not trace.windows_differ
    return current_devices(problem.parameter_count, trace.workers, divided)


def pieces_at_once(trace: Trace, method: Method, problem: Problem) -> int:
    """Return of how many pieces a replay on its default devices computes the gradients at a time."""
    devices = default_devices(trace, method, problem)
    at_once = {"kernel": len(devices), "batched": len(devices), "dispatched": gradients_at_once(), "halves": THREADS}
    return at_once[way_of(trace, method, problem, devices)]


def _has_rows_apart(trace: Trace, method: Method, devices: Sequence[Any]) -> bool:
    # Blocks of reads, and the memories of all workers, are parts of arrays of all rows.
    return trace.read_blocks == 1 and not method.sees_memories and len(devices) == 1


def _can_be_halved(method: Method, problem: Problem) -> bool:
    """Return whether half of a vector is all that a commit needs, and the other half of what was read a gradient.

    What a worker keeps for its local steps is in trees of the problem's own shapes, and where those of a replica start
    is for the method to say.
    """
    if not method.elementwise or method.resume is not None or problem.init_state is not None:
        return False
    params = jax.eval_shape(problem.init, jax.random.key(0))
    keeps = jax.tree.leaves(jax.eval_shape(method.optimizer.init, params))
    return not keeps and _takes_parts(method, params)


def _takes_parts(method: Method, params: Any) -> bool:
    """Return whether a method takes vectors of another length: not if it holds one of the problem's own."""
    leaves = jax.tree.leaves(params)
    part = jax.ShapeDtypeStruct((sum(leaf.size for leaf in leaves) // 2,), leaves[0].dtype)
    try:
        check_method(method, part)
    except InputError:
        return False
    return True
