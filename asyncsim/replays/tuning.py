"""Sizes that only affect speed: constants, never tuned while running.

Those for the CPU are measured; an accelerator's are a guess until somebody measures them.

A size changes the order of floating-point sums, so these are constants: one machine, with as many cores, one result.
"""

from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp

from asyncsim.replays.side_by_side import cores
from asyncsim.threads import has_one_core

if TYPE_CHECKING:
    from asyncsim.problems.problem import Problem


class Tuning(NamedTuple):
    """Sizes for one kind of device, one size of problem and one number of devices.

    Attributes
    ----------
    piece_sizes : tuple of int
        Commits that a piece may have room for, multiples of the number of devices.
    piece_overhead : float
        What a piece costs beside its commits, in commits.
    in_turn : bool
        Whether a device computes a piece's gradients one after the other, of every problem, not as one batch.
    chunk : int
        Most pieces planned and sent to the devices at once.
    """

    piece_sizes: tuple[int, ...]
    piece_overhead: float
    in_turn: bool
    chunk: int


#: Below this many parameters a piece's overhead counts for more than what its vectors take of the cache.
_FEW_PARAMETERS = 2_000

#: Parameters from which on a CPU's commits are dispatched a few at a time. On two cores that was, without groups, 1.3
#: times the rate of the kernel for MNIST's network (163,790), and 1.3 to 1.4 times for the thesis' perceptron
#: (4,798,010).
_LONG_VECTOR = 100_000
#: Groups of gradients that are then computed at a time, if there are cores for them, as each takes memory; and replays
#: of fewer parameters, as Python plans for one of them at a time. Measured on two cores only.
_MOST_AT_ONCE = 4
#: Gradients in such a group at most: 1.04 times the rate of 4 with 100 workers, the same with 10 (MNIST's network). And
#: elements of their vectors, as some ten groups are kept where workers are few and their times differ.
_GROUP, _GROUP_ELEMENTS = 8, 2**21
#: Gradients that each of two threads computes before both commit, at most: 100 workers of like speed make waves of some
#: 70 commits.
GRADIENTS_A_HALF = 48
#: Groups of such gradients and their commits that are dispatched at once, to wait then for the first of them: Python is
#: woken less often than if each is dispatched as soon as XLA takes it, 1.03 times the rate (digits, 100 workers); of 3,
#: 4 and 6 groups none is quicker than another.
GROUPS_AHEAD = 4
#: Commits of a mean wave from which on two threads replay vectors of middling length in halves. Digits, rate over that
#: of the kernel: 0.8 with 9 commits (10 workers), 1.0 with 17 (20), 1.15 with 24 (30), 1.4 with 74 (100). That is of
#: two cores that share a cache, where one sees after 30 ns what the other writes. Where it takes 160 ns (a hypervisor
#: may move them apart) a half that the other has read takes 15 us to write instead of 3, and the rate is 1.0.
_LONG_WAVE = 20
#: Elements of a vector of each worker up to which replays are computed at a time: with three vectors 0.4 GB a replay.
_MOST_ELEMENTS = 2**25
#: Parameters from which on moving a vector costs more than anything else that is done once a commit: several devices of
#: a CPU gain nothing, as vectors take too long from one to the other, and no copy is made that can be avoided.
VERY_LONG_VECTOR = 1_000_000
#: Elements of central variables of that length that are made between two trims: 0.3 GB in float32.
_ELEMENTS_TO_TRIM = 2**26
#: Commits of such vectors that are dispatched before the first of them has to be made, as each that is not holds some:
#: with four the rate is that of any number (two cores).
AHEAD = 4
#: Parts of vectors from so many elements on get a multiple of so many. XLA divides loops over them among threads, and
#: does not vectorize those that do not divide evenly: an update of MNIST's network took three to six times as long.
DIVIDED, EVEN = 4096, 64
#: The squares of vectors of so many elements are summed in so many parts, laid upon each other first: 1.03 to 1.05 the
#: rate of dot products (digits), for which XLA calls a library that takes the vector from memory. Of longer vectors it
#: would divide the parts among threads, as above: three times as slow. Accelerators have not been asked.
FOLDED_FROM, FOLDS = _FEW_PARAMETERS, 8
FOLDED_BELOW = FOLDS * DIVIDED

# CPU: two cores; a quadratic of 16 parameters (few), the perceptron of digits and MNIST's network (many), 10 and 100
# workers. A batched gradient of many parameters is no quicker there than one after the other, and what a piece holds
# of several commits leaves the cache: pieces of one are 1.1 to 1.2 times as fast as pieces of two (digits, exchange).
_CPU_FEW = Tuning(piece_sizes=(1, 2, 4, 8), piece_overhead=0.5, in_turn=False, chunk=512)
_CPU_MANY = Tuning(piece_sizes=(1,), piece_overhead=0.5, in_turn=True, chunk=512)
#: Commits of a piece that are unrolled for an accelerator, which makes one kernel of them. Pieces of several devices
#: have more, and twice as many take four times as long to compile (MNIST's network, GEM, for an H100: 8 s, 33 s).
UNROLLED = 32
#: Kinds of devices that loop over the rows of a piece.
_LOOPING = ("cpu",)
_ACCELERATOR = Tuning(piece_sizes=(1, 4, 16, 32), piece_overhead=8.0, in_turn=False, chunk=256)


def tuning(backend: str, parameters: int, devices: int = 1) -> Tuning:
    """Return the sizes for a JAX backend ("cpu", "gpu", "tpu"), a problem of so many parameters and some devices."""
    if backend != "cpu":
        sizes = _ACCELERATOR
    elif parameters < _FEW_PARAMETERS:
        sizes = _CPU_FEW
    else:
        sizes = _CPU_MANY
    return sizes._replace(piece_sizes=tuple(size * devices for size in sizes.piece_sizes))


def loops_over_rows(backend: str) -> bool:
    """Return whether a device touches the rows of a piece one after the other, in loops over those that there are.

    Not an accelerator: it launches kernels for every turn, and asks the host whether such a loop goes on.
    """
    return backend in _LOOPING


def batches_members(backend: str, parameters: int) -> bool:
    """Return whether the runs of an ensemble are faster as one batch than one after the other."""
    return backend != "cpu" or parameters < _FEW_PARAMETERS


def dispatches(backend: str, parameters: int) -> bool:
    """Return whether commits are dispatched a few at a time (`asyncsim.replays.dispatched`), not turns of a loop."""
    return backend == "cpu" and parameters >= _LONG_VECTOR


def middling(backend: str, parameters: int) -> bool:
    """Return whether a replay keeps one core busy, and not another: with neither few nor very many parameters."""
    return backend == "cpu" and _FEW_PARAMETERS <= parameters < _LONG_VECTOR


def has_two_cores() -> bool:
    """Return whether a replay of this thread may use more than one core."""
    return cores() > 1 and not has_one_core()


def is_long(mean_wave: float) -> bool:
    """Return whether waves are so long that two threads replay such vectors in halves (`asyncsim.replays.halves`)."""
    return mean_wave >= _LONG_WAVE


def writes_slices(backend: str, parameters: int) -> bool:
    """Return whether a vector of so many elements is made by writing its parts into it one after the other.

    Otherwise they are concatenated, which XLA does element by element on a CPU: 50 ms for the perceptron of the thesis
    (4,798,010), which takes 2 ms in parts. MNIST's network (163,790) takes the same either way.
    """
    return backend == "cpu" and parameters >= VERY_LONG_VECTOR


def gradients_a_group(parameters: int, has_convolution: bool) -> int:
    """Return how many gradients one call may compute in a loop, where commits are dispatched a few at a time.

    One for very long vectors, which to copy out of the loop takes longer than another call, and for losses with XLA's
    own convolutions: in a loop they make the gradient of MNIST's network 3.5 times as slow.
    """
    if parameters >= VERY_LONG_VECTOR or has_convolution:
        return 1
    return min(_GROUP, _GROUP_ELEMENTS // parameters)


def commits_between_trims(parameters: int) -> int:
    """Return after how many dispatched commits `asyncsim.replays.allocation.trim` is called again; 0 for never.

    Vectors that are not very long are the smaller part of what a process holds.
    """
    return max(1, _ELEMENTS_TO_TRIM // parameters) if parameters >= VERY_LONG_VECTOR else 0


def gradients_at_once() -> int:
    """Return how many groups of gradients are computed at a time where commits are dispatched a few at a time.

    It depends on the cores, but is no size of a sum: results do not depend on it.
    """
    return min(cores(), _MOST_AT_ONCE)


def replays_at_once(problem: "Problem", workers: int) -> int:
    """Return how many replays of a problem are computed at a time where there are many: those that keep one core busy.

    Larger ones use all cores, or devices that each of them needs, or much memory; smaller ones mostly wait for Python,
    which works for one thread at a time. Two at a time have 1.8 times the rate of one after the other (digits, 100
    workers; 1.5 with 10), MNIST's network 0.8 times, and the short runs of quadratics in the study ``momentum`` 0.7.
    """
    one_core = middling(backend(), problem.parameter_count) and not problem.map_on_cpu
    small = workers * problem.parameter_count <= _MOST_ELEMENTS
    return min(cores(), _MOST_AT_ONCE) if one_core and small else 1


def current_devices(parameters: int, workers: int, divided: bool) -> tuple[Any, ...]:
    """Return the devices to replay a problem of so many parameters on.

    All that JAX has of its default kind; only the chosen one if the user has set a default device, and only the first
    if there is too little work to divide. The cores of a CPU work on one gradient together in any case. Several of its
    devices gain where the gradients of many workers are ``divided`` among them and one does not keep all cores busy;
    but no more devices than workers, whose commits each depend on the one before.
    """
    # Asked of an array, as jax.default_backend() knows nothing of a chosen default device.
    (device,) = jnp.zeros(()).devices()
    config: Any = jax.config
    if config.jax_default_device is not None or parameters < _FEW_PARAMETERS:
        return (device,)
    devices = tuple(jax.local_devices(backend=device.platform))
    if device.platform != "cpu":
        return devices
    return devices[:workers] if divided else (device,)


def backend() -> str:
    """Return the kind of device that JAX computes on now: "cpu", "gpu" or "tpu"."""
    (device,) = jnp.zeros(()).devices()
    return device.platform
