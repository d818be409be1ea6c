"""The form, device and sizes of a replay's computation: constants, never tuned at run time.

On a CPU problems of fewer than 2,000 parameters have the form ``batch``, pieces of a few commits,
and longer vectors ``single``, one commit after the other. Accelerators have ``batch``.

Sizes for the CPU are measured; an accelerator's are guesses without measurements. A size changes
the order of floating-point sums: constants give one result on one machine.
"""

import os
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp

from asyncsim.problems.problem import Problem

Form = Literal["batch", "single"]


class Tuning(NamedTuple):
    """Sizes of batches for one kind of device.

    Attributes
    ----------
    piece_sizes : tuple of int
        Commits that a piece may have room for.
    piece_overhead : float
        The cost of a piece beside its commits, in commits.
    chunk : int
        Most pieces planned and sent to the device at once.
    unrolled : int
        Commits of a piece that are unrolled.
    """

    piece_sizes: tuple[int, ...]
    piece_overhead: float
    chunk: int
    unrolled: int


#: Below this number of parameters a piece's overhead outweighs the cache that its vectors take.
_FEW_PARAMETERS = 2_000
#: Parameters from which one gradient keeps several cores busy.
_LONG_VECTOR = 100_000
#: Replays of fewer parameters that are computed at a time, as Python plans for one of them at a
#: time.
_MOST_AT_ONCE = 4
#: Elements of all workers' vectors up to which replays are computed at a time: with three vectors
#: 0.4 GB a replay.
_MOST_ELEMENTS = 2**25
#: Parameters from which a vector is written in parts.
_VERY_LONG_VECTOR = 1_000_000

# CPU: two cores; quadratics of 16 to 2,000 parameters. Batches of longer vectors are no quicker
# there than one gradient after the other, and the vectors of several commits leave the cache. Four
# commits unrolled run as fast as all, and compile in half the time.
_CPU = Tuning(piece_sizes=(1, 2, 4, 8, 16, 32), piece_overhead=0.5, chunk=512, unrolled=4)
#: Elements of the vectors of a piece on a CPU: with 16 parameters pieces of 32 are 1.3 times as
#: quick as pieces of 8 (the methods GEM and DOWNPOUR), with 1,000 half as quick.
_PIECE_ELEMENTS = 2**13
# An accelerator makes one kernel of the unrolled commits. Twice the number takes four times as long
# to compile (MNIST's network, GEM, for an H100: 8 s, 33 s).
_ACCELERATOR = Tuning(piece_sizes=(1, 4, 16, 32), piece_overhead=8.0, chunk=256, unrolled=32)


def tuning(platform: str, parameters: int) -> Tuning:
    """Return the sizes for a kind of device, "cpu", "gpu" or "tpu", and a number of parameters."""
    if platform != "cpu":
        return _ACCELERATOR
    sizes = tuple(size for size in _CPU.piece_sizes if size * parameters <= _PIECE_ELEMENTS)
    return _CPU._replace(piece_sizes=sizes or (1,))


def form_of(problem: Problem, device: Any) -> Form:
    """Choose the form in which a replay on a device is computed."""
    on_cpu = device.platform == "cpu"
    return "single" if on_cpu and problem.parameter_count >= _FEW_PARAMETERS else "batch"


def default_device() -> Any:
    """Return the device of replays: the user's default, else JAX's first of the fastest kind."""
    # From an array, as jax.default_backend() ignores a default device of the user.
    (device,) = jnp.zeros(()).devices()
    return device


def batches_members(parameters: int) -> bool:
    """Return whether the runs of an ensemble are faster as one batch than one after the other."""
    return default_device().platform != "cpu" or parameters < _FEW_PARAMETERS


def writes_slices(platform: str, parameters: int) -> bool:
    """Return whether a vector of this length is built by writing its parts one after the other.

    Otherwise they are concatenated, which XLA does element by element on a CPU: 50 ms for the
    perceptron of the thesis (4,798,010), which takes 2 ms in parts. MNIST's network (163,790) takes
    the same either way.
    """
    return platform == "cpu" and parameters >= _VERY_LONG_VECTOR


def cores() -> int:
    """Count the cores that this process may use, which is the number of XLA's threads."""
    if os.environ.get("NPROC", "").isdigit():
        return max(1, int(os.environ["NPROC"]))
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def replays_at_once(problem: Problem, workers: int) -> int:
    """Return the number of replays to compute at a time: above 1 if each keeps a single core busy.

    Larger replays use all cores, or an accelerator that each of them needs, or much memory; smaller
    ones mostly wait for Python, which works for one thread at a time. Two at a time have 1.8 times
    the rate of one after the other (digits, 100 workers; 1.5 with 10), MNIST's network 0.8 times,
    and the short runs of quadratics in the study ``momentum`` 0.7.
    """
    on_cpu = default_device().platform == "cpu"
    one_core = on_cpu and _FEW_PARAMETERS <= problem.parameter_count < _LONG_VECTOR
    small = workers * problem.parameter_count <= _MOST_ELEMENTS
    return min(cores(), _MOST_AT_ONCE) if one_core and small else 1
