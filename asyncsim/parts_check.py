"""Methods that say that they work element by element, asked whether they do before their vectors are divided."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from asyncsim.errors import InputError
from asyncsim.methods.method import Array, Memories, Method, Visit

#: A vector of so many elements is divided into two of half as many; with commits in a row, so that states count.
_ELEMENTS, _COMMITS = 8, 2
#: Functions of a method in the order in which they are called: the first that differs is named.
_CALLED = ("init_worker", "init_server", "init_memory", "resume", "origin", "message", "apply", "reply", "proxy")
#: What round-off may be: compilers sum and contract differently.
_RELATIVE, _ABSOLUTE = 1e-2, 1e-5


def require_elementwise(method: Method) -> None:
    """Raise InputError if a method that says elementwise computes anything else from two parts than from the whole.

    Two commits are computed with random vectors, so that norms, lengths and draws by the shape show; what a method does
    only later, or with other numbers, does not.
    """
    generator = np.random.default_rng(0)
    vectors = jnp.asarray(generator.normal(size=(1 + 2 * _COMMITS, _ELEMENTS)), float)
    half = _ELEMENTS // 2

    @jax.jit
    def compute(vectors: Array) -> tuple[Any, Any, Any]:
        whole, first, second = (_commits(method, part) for part in (vectors, vectors[:, :half], vectors[:, half:]))
        return whole, first, second

    try:
        whole, first, second = compute(vectors)
    except Exception as error:
        told = (str(error).splitlines() or [""])[0]
        raise InputError(
            f"{method.name}.elementwise = True: fails with vectors of another length than the problem's "
            f"({type(error).__name__}: {told}), and they are about to be divided; make the method with "
            "elementwise=False"
        ) from error
    for name in _CALLED:
        found = [jax.tree.leaves(of[name]) for of in (whole, first, second)]
        alike = len({jax.tree.structure(of[name]) for of in (whole, first, second)}) == 1
        if not alike or not all(_agree(*leaves) for leaves in zip(*found, strict=True)):
            raise InputError(
                f"{method.name}.elementwise = True: {name} computes something else from two halves of its vectors than "
                "from the whole, as norms, lengths and random draws do, and they are about to be divided; make the "
                "method with elementwise=False"
            )


def _commits(method: Method, vectors: Array) -> dict[str, list[Any]]:
    """Return what each function of a method returns in some commits of a worker."""
    central, *others = vectors
    worker, server, memory = (make(central) for make in (method.init_worker, method.init_server, method.init_memory))
    made: dict[str, list[Any]] = {name: [] for name in _CALLED}
    made |= {"init_worker": [worker], "init_server": [server], "init_memory": [memory]}
    for commit, (read, update) in enumerate(zip(others[::2], others[1::2], strict=True)):
        visit = _visit(method, commit, central.dtype)
        start = method.resume(worker, read) if method.resume else read
        origin = method.origin(worker, read) if method.origin else ()
        message, worker, _ = method.message(worker, update, start, central, visit)
        memories = (_memories(memory),) if method.sees_memories else ()
        applied = method.apply(server, central, message, memory, visit, *memories)
        central, server, memory = applied
        made["resume"].append(start)
        made["origin"].append(origin)
        made["message"].append((message, worker))  # diagnostics are computed of whole vectors
        made["apply"].append(tuple(applied))
        made["reply"].append(method.reply(server, central, memory, visit) if method.reply else ())
        made["proxy"].append(method.proxy(worker) if method.proxy else ())
    return made


def _visit(method: Method, commit: int, kind: Any) -> Visit:
    integers = {"staleness": 2, "worker": 1, "worker_step": commit, "commit": 4 + commit, "local_steps": 1}
    given: dict[str, Any] = {name: jnp.int32(value) for name, value in (integers | {"workers": 4}).items()}
    loss: Any = jnp.asarray(0.5, kind) if method.sees_loss else ()
    return Visit(**given, time=jnp.asarray(1.0, kind), completes=jnp.bool_(True), loss=loss)


def _memories(memory: Any) -> Memories:
    """Return the memories of four workers, which are alike; none is newer."""

    def several(count: int) -> Any:
        return jax.tree.map(lambda leaf: jnp.stack([jnp.asarray(leaf)] * count), memory)

    return Memories(several(4), several(1), jnp.full(1, 4, jnp.int32))


def _agree(whole: Array, first: Array, second: Array) -> bool:
    """Return whether the parts of an array are those of the whole one, or all are alike if it is no vector."""
    if jnp.shape(whole)[-1:] == (_ELEMENTS,) and jnp.shape(first)[-1:] == (_ELEMENTS // 2,):
        parts: list[tuple[Any, Any]] = [(whole, jnp.concatenate([first, second], -1))]
    else:
        parts = [(whole, first), (whole, second)]
    return all(_close(*pair) for pair in parts)


def _close(one: Any, other: Any) -> bool:
    if jnp.shape(one) != jnp.shape(other):
        return False
    if jnp.issubdtype(jnp.result_type(one), jax.dtypes.prng_key):
        one, other = jax.random.key_data(one), jax.random.key_data(other)
    return np.allclose(one, other, _RELATIVE, _ABSOLUTE, equal_nan=True)
