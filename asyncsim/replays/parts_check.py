"""Methods that say that they work element by element, asked whether they do before their vectors are divided."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from asyncsim.errors import InputError
from asyncsim.methods.method import Array, Memories, Method, Visit
from asyncsim.replays.method_check import memories_kinds, visit_kinds

#: A vector of so many elements is divided into two of half as many.
_ELEMENTS = 8
#: The visits of commits in a row, so that states count, and what depends on the visit.
_VISITS = ({"staleness": 0}, {"staleness": 2, "completes": False}, {"staleness": 1})
#: Of the vectors, so that bounds of norms show that are far from one.
_SCALES = (1e-3, 1.0, 1e3)
#: By how much entries may differ, in units of the last digit of the largest: compilers contract products and sums in
#: different ways, and methods divide by differences.
_ROUND_OFF = 1_000
#: Functions of a method in the order in which they are called: the first that differs is named.
_CALLED = ("init_worker", "init_server", "init_memory", "resume", "origin", "message", "apply", "reply", "proxy")


def require_elementwise(method: Method) -> None:
    """Raise InputError if a method that says elementwise computes anything else from two parts than from the whole.

    Some commits are computed with random vectors, so that norms, lengths and draws by the shape show; what a method
    does only later, or at other visits, does not. It must have passed `asyncsim.replays.method_check.check_method`.
    """
    generator = np.random.default_rng(0)
    vectors = jnp.asarray(generator.normal(size=(1 + 2 * len(_VISITS), _ELEMENTS)), float)
    half = _ELEMENTS // 2

    @jax.jit
    def compute(vectors: Array) -> list[Any]:
        return [_commits(method, part) for part in (vectors, vectors[:, :half], vectors[:, half:])]

    for scale in _SCALES:
        try:
            made = compute(scale * vectors)
        except Exception as error:
            told = (str(error).splitlines() or [""])[0]
            raise InputError(
                f"{method.name}.elementwise = True: fails with vectors of another length than the problem's "
                f"({type(error).__name__}: {told}), and they are about to be divided; make the method with "
                "elementwise=False"
            ) from error
        for name in _CALLED:
            if not _agree(*(one[name] for one in made)):
                raise InputError(
                    f"{method.name}.elementwise = True: {name} computes something else from two halves of its vectors "
                    "than from the whole, as norms, lengths and random draws do, and they are about to be divided; "
                    "make the method with elementwise=False"
                )


def _commits(method: Method, vectors: Array) -> dict[str, list[Any]]:
    """Return what each function of a method returns in some commits of a worker, but for diagnostics.

    These are computed from whole vectors in any case.
    """
    central, *others = vectors
    worker, server, memory = (make(central) for make in (method.init_worker, method.init_server, method.init_memory))
    made: dict[str, list[Any]] = {name: [] for name in _CALLED}
    made |= {"init_worker": [worker], "init_server": [server], "init_memory": [memory]}
    for read, update, given in zip(others[::2], others[1::2], _VISITS, strict=True):
        visit = _visit(method, given)
        start = method.resume(worker, read) if method.resume else read
        origin = method.origin(worker, read) if method.origin else ()
        message, worker, _ = method.message(worker, update, start, central, visit)
        memories = (_memories(memory),) if method.sees_memories else ()
        applied = method.apply(server, central, message, memory, visit, *memories)
        central, server, memory = applied
        made["resume"].append(start)
        made["origin"].append(origin)
        made["message"].append((message, worker))
        made["apply"].append(tuple(applied))
        made["reply"].append(method.reply(server, central, memory, visit) if method.reply else ())
        made["proxy"].append(method.proxy(worker) if method.proxy else ())
    return made


def _visit(method: Method, given: dict[str, Any]) -> Visit:
    """Return a visit of which each number that is not given is one."""
    numbers = [name for name in Visit._fields if name != "key" and (name != "loss" or method.sees_loss)]
    return jax.tree.map(
        lambda kind, value: jnp.asarray(value, kind.dtype),
        visit_kinds(method.sees_loss, draws=False),
        Visit(**{name: given.get(name, 1) for name in numbers}),
    )


def _memories(memory: Any) -> Memories:
    """Return memories of all workers that are this one, none of them newer."""
    kinds = memories_kinds(memory)
    rows, newer = (jax.tree.map(lambda kind, leaf: jnp.broadcast_to(leaf, kind.shape), of, memory) for of in kinds[:2])
    return Memories(rows, newer, jnp.full(kinds.worker.shape, 3, kinds.worker.dtype))


def _agree(*made: Any) -> bool:
    """Return whether the parts of all arrays are those of the whole ones, or alike if these are no vectors."""
    leaves, structures = zip(*map(jax.tree.flatten, made), strict=True)
    return len(set(structures)) == 1 and all(_alike(*of_leaf) for of_leaf in zip(*leaves, strict=True))


def _alike(whole: Array, first: Array, second: Array) -> bool:
    if jnp.shape(whole)[-1:] == (_ELEMENTS,) and jnp.shape(first)[-1:] == (_ELEMENTS // 2,):
        return _close(whole, jnp.concatenate([first, second], -1))
    return _close(whole, first) and _close(whole, second)


def _close(one: Array, other: Array) -> bool:
    if one.shape != other.shape:
        return False
    if jnp.issubdtype(one.dtype, jax.dtypes.prng_key):
        one, other = jax.random.key_data(one), jax.random.key_data(other)
    if not jnp.issubdtype(one.dtype, jnp.inexact):
        return bool(jnp.all(one == other))
    largest = jnp.max(jnp.abs(one), initial=0, where=jnp.isfinite(one))
    return bool(jnp.allclose(one, other, 0, _ROUND_OFF * jnp.finfo(one.dtype).eps * largest, equal_nan=True))
