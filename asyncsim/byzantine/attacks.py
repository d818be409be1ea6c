"""Attacks: the messages that Byzantine workers send instead of honest ones.

An attack is part of a replay: ``replay(..., attack=attacks.alie(workers=3))``, and ``--attack
"alie(workers=3)"`` in studies. ``workers`` are the Byzantine ones: a number of them, from worker 0
on, or a list. They compute as honest workers do; then the attack replaces their messages by a
function of these messages:

- `sign_flip`, `gaussian`, `disturbance`, `zero`, `infinite`: the worker's message alone.
- `alie`, `inner_product`, `mimic`, `min_max`: the messages of all honest workers (`alie`: or of the
  Byzantine ones). For methods that combine the messages of a version
  (`asyncsim.methods.Method.combine`) these are the messages of the version that is about to be
  completed; a version of Byzantine messages alone is unchanged. For all other methods they are, at
  each commit of a Byzantine worker, the last message of every honest worker. Without a server they
  are the honest messages that the receiver takes up in the same step, and its last message; where
  workers average in pairs, the states of all honest workers at that instant.
- `label_flip`: the message is honest, and comes from wrong labels.

A message is a gradient with `asyncsim.methods.robust`, a step with most other methods. A new attack
is a function::

    @declared
    def reverse(workers, scale=3.0):
        def change(messages, honest, byzantine, key):
            mean = jnp.mean(messages, axis=0, where=honest[:, None])
            return jnp.where(byzantine[:, None], -scale * mean, messages)
        return Attack(workers, change=change)
"""

import functools
from collections.abc import Callable, Mapping
from statistics import NormalDist
from typing import Annotated, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from asyncsim.base.calls import called
from asyncsim.base.declared import Factory, Natural, Positive, call_text, declaring
from asyncsim.base.errors import InputError, require_count, require_number
from asyncsim.methods.method import Array


class WeakAttackWarning(UserWarning):
    """A warning that an attack has no effect on this cluster."""


def _no_weakness(workers: int) -> str:
    return ""


class Attack(NamedTuple):
    """A change of the messages, or of the labels, of Byzantine workers.

    Attributes
    ----------
    workers : int or sequence of int
        The Byzantine workers, or their number: the first ones.
    corrupt : function, optional
        ``corrupt(message, key) -> message``, a vector or one array of a message that has several;
        it sees the worker's message alone. Where workers average in pairs, states replace messages.
    change : function, optional
        ``change(messages, honest, byzantine, key) -> messages``, with
        ``messages[workers, parameters]`` and the masks of the honest and the Byzantine workers
        whose messages are present; it sees all.
    labels : bool
        Whether Byzantine workers compute with the labels of the data in reverse order.
    coordinatewise : bool
        Whether each entry of a changed message depends on that entry of the messages alone; other
        attacks are refused where servers commit the parts of a message at different times.
    weakness : function, optional
        ``weakness(workers) -> str``: why the attack has no effect with this number of workers, or
        "".
    text : str
        The call that builds the attack, for records, ``"alie(workers=3)"``; `declared` writes it.
    """

    workers: Any
    corrupt: Callable[[Array, Any], Array] | None = None
    change: Callable[[Array, Array, Array, Any], Array] | None = None
    labels: bool = False
    coordinatewise: bool = False
    weakness: Callable[[int], str] = _no_weakness
    text: str = ""

    def byzantine(self, workers: int) -> np.ndarray:
        """Return the mask of the Byzantine workers, ``[workers]``.

        Raises
        ------
        InputError
            The cluster has one worker, no honest worker, or too few workers for the indices.
        """
        chosen = _chosen(self.workers)
        if workers == 1:
            raise InputError(
                f"attack = {self.text!r}: the cluster has one worker, which is honest; leave out "
                "methods of one worker"
            )
        if outside := [index for index in chosen if index >= workers]:
            raise InputError(
                f"attack = {self.text!r}: worker {outside[0]} is outside the cluster, whose "
                f"{workers} workers are 0 to "
                f"{workers - 1}"
            )
        if len(chosen) == workers:
            raise InputError(
                f"attack = {self.text!r}: all {workers} workers are Byzantine; leave one or more "
                "honest"
            )
        return np.isin(np.arange(workers), chosen)


#: The most Byzantine workers that a number can name.
_MOST_WORKERS = 10_000_000


def _chosen(workers: Any) -> list[int]:
    """List the indices of the Byzantine workers, given a number or a list of them."""
    if not isinstance(workers, list | tuple | range | np.ndarray):
        return list(range(require_count("workers", workers, maximum=_MOST_WORKERS)))
    indices = [require_count("workers", index, minimum=0) for index in workers]
    if not indices or len(set(indices)) < len(indices):
        raise InputError(f"workers = {workers!r}: must hold at least one worker, each once")
    return indices


def _plain(argument: str, workers: Any) -> Any:
    """Check the Byzantine workers; return a number or a list."""
    _chosen(workers)
    return list(workers) if isinstance(workers, tuple | range | np.ndarray) else workers


Workers = Annotated[Any, _plain]


def declared(factory: Factory) -> Factory:
    """Check the arguments of an attack's factory by its annotations; the call becomes its text."""
    return declaring(_build)(factory)


def _build(factory: Callable[..., Attack], arguments: dict[str, Any]) -> Attack:
    return factory(**arguments)._replace(text=call_text(factory, arguments))


@declared
def sign_flip(workers: Workers, scale: Positive = 1.0) -> Attack:
    """Send the worker's message times ``-scale``: 10 for BASGD's negative gradients."""
    return Attack(
        workers,
        corrupt=lambda message, key: -scale * message,
        coordinatewise=True,
    )


@declared
def gaussian(workers: Workers, sigma: Positive = 200.0) -> Attack:
    """Send normal noise, of standard deviation ``sigma`` in each coordinate (Blanchard et al.)."""

    def corrupt(message: Array, key: Any) -> Array:
        return sigma * jax.random.normal(key, message.shape, message.dtype)

    return Attack(workers, corrupt=corrupt)


@declared
def disturbance(workers: Workers, sigma: Positive = 0.2) -> Attack:
    """Add normal noise of ``sigma`` times the message's length: BASGD's random disturbance.

    References
    ----------
    Yang and Li 2021, "BASGD: buffered asynchronous SGD for Byzantine learning", arXiv 2003.00937.
    """

    def corrupt(message: Array, key: Any) -> Array:
        length = jnp.sqrt(jnp.sum(message**2))
        return message + sigma * length * jax.random.normal(key, message.shape, message.dtype)

    return Attack(workers, corrupt=corrupt)


@declared
def zero(workers: Workers) -> Attack:
    """Send zeros."""
    return Attack(
        workers, corrupt=lambda message, key: jnp.zeros_like(message), coordinatewise=True
    )


@declared
def infinite(workers: Workers) -> Attack:
    """Send infinite numbers."""
    return Attack(
        workers,
        corrupt=lambda message, key: jnp.full_like(message, jnp.inf),
        coordinatewise=True,
    )


@declared
def label_flip(workers: Workers) -> Attack:
    """Compute with the labels in reverse order: 9 for 0, 8 for 1."""
    return Attack(workers, labels=True, coordinatewise=True)


@declared
def alie(
    workers: Workers,
    z: Annotated[float, require_number] | None = None,
    knows: Literal["all", "own"] = "all",
) -> Attack:
    """Send the mean minus ``z`` standard deviations, per coordinate: "a little is enough".

    Parameters
    ----------
    z : float, optional
        By default the largest that leaves enough honest workers further from the mean: with ``n``
        workers, ``f`` of them Byzantine, the standard normal quantile of ``(n - f - s) / (n - f)``,
        and ``s = n // 2 + 1 - f``. It is zero, which has no effect, for an even number of workers
        with 2 Byzantine ones and an odd number with 1; a replay warns of that.
    knows : {"all", "own"}
        Mean and standard deviation (over all, not one less) are of the honest messages, or, as in
        the authors' program, of the Byzantine workers' messages before the attack.

    References
    ----------
    Baruch, Baruch and Goldberg 2019, "A little is enough", arXiv 1902.06156.
    """
    f = len(_chosen(workers))

    def strength(n: int) -> float:
        return alie_z(n, f) if z is None else z

    def change(messages: Array, honest: Array, byzantine: Array, key: Any) -> Array:
        basis = honest if knows == "all" else byzantine
        mean, deviation = _moments(messages, basis)
        return _in_place(messages, byzantine, mean - strength(len(messages)) * deviation)

    def weakness(n: int) -> str:
        if strength(n) != 0:
            return ""
        return (
            f"with {f} of {n} workers z is 0, so that they send the mean, which is no attack; give "
            "another z"
        )

    return Attack(workers, change=change, weakness=weakness, coordinatewise=True)


def alie_z(n: int, f: int) -> float:
    """Return the default z of `alie`: ``f`` of ``n`` workers are Byzantine."""
    supporters = n // 2 + 1 - f
    if not 0 < supporters < n - f:
        raise InputError(
            f"workers = {f}: of {n} workers, z has no value for so many Byzantine ones; give z"
        )
    return NormalDist().inv_cdf((n - f - supporters) / (n - f))


@declared
def inner_product(workers: Workers, scale: Positive = 2.0) -> Attack:
    """Send ``-scale`` times the mean of the honest messages: inner-product manipulation.

    ``scale``: .1 evades distance-based rules; above one, a mean changes its sign.

    References
    ----------
    Xie, Koyejo and Gupta 2019, "Fall of empires", arXiv 1903.03936.
    """

    def change(messages: Array, honest: Array, byzantine: Array, key: Any) -> Array:
        return _in_place(messages, byzantine, -scale * _moments(messages, honest)[0])

    return Attack(workers, change=change, coordinatewise=True)


@declared
def mimic(workers: Workers, target: Natural | None = None) -> Attack:
    """Repeat the message of one honest worker: harmful where workers hold different data.

    ``target``: that worker; by default, or without a message of it, the first honest one.

    References
    ----------
    Karimireddy, He and Jaggi 2022, arXiv 2006.09365, section 3.
    """
    if target in _chosen(workers):
        raise InputError(f"target = {target}: is Byzantine itself; choose an honest worker")

    def change(messages: Array, honest: Array, byzantine: Array, key: Any) -> Array:
        copied = jnp.argmax(honest)
        if target is not None:
            if target >= len(messages):
                raise InputError(
                    f"target = {target}: is outside the cluster of {len(messages)} workers"
                )
            copied = jnp.where(honest[target], target, copied)
        return _in_place(messages, byzantine, messages[copied])

    return Attack(workers, change=change, coordinatewise=True)


@declared
def min_max(
    workers: Workers, direction: Literal["deviation", "mean", "sign"] = "deviation"
) -> Attack:
    """Send a vector as far from the honest mean as the distances between honest messages allow.

    All send ``mean + gamma p``, with the largest ``gamma`` at which no honest message is further
    away than the two honest messages furthest from each other.

    Parameters
    ----------
    direction : {"deviation", "mean", "sign"}
        ``p``: minus the standard deviations, the mean's reversed unit vector, or its reversed
        signs.

    Notes
    -----
    The paper halves an interval to find ``gamma``; here it is the root of a quadratic equation.

    References
    ----------
    Shejwalkar and Houmansadr 2021, "Manipulating the Byzantine", NDSS, section IV-B.
    """

    def change(messages: Array, honest: Array, byzantine: Array, key: Any) -> Array:
        mean, deviation = _moments(messages, honest)
        units = {"mean": mean / jnp.maximum(jnp.linalg.norm(mean), 1e-30), "sign": jnp.sign(mean)}
        p = -units.get(direction, deviation)
        # Absent and Byzantine rows become the mean, which changes no maximum.
        honest_messages = jnp.where(honest[:, None], messages, mean)
        # Row by row: all pairs at once would need [workers, workers, parameters].
        furthest = jax.lax.map(
            lambda row: jnp.max(jnp.sum((honest_messages - row) ** 2, 1)), honest_messages
        )
        offsets = mean - honest_messages
        # |offsets + gamma p|^2 = max distance^2, for each message; the smallest root meets all.
        a, b = jnp.sum(p * p), offsets @ p
        c = jnp.sum(offsets * offsets, 1) - jnp.max(furthest)
        gamma = (jnp.sqrt(jnp.maximum(b * b - a * c, 0)) - b) / jnp.maximum(a, 1e-30)
        return _in_place(messages, byzantine, mean + jnp.min(jnp.where(honest, gamma, jnp.inf)) * p)

    return Attack(workers, change=change)


#: The attacks by their names on the command line.
ATTACKS: Mapping[str, Callable[..., Attack]] = {
    attack.__name__: attack
    for attack in (
        sign_flip,
        gaussian,
        disturbance,
        zero,
        infinite,
        label_flip,
        alie,
        inner_product,
        mimic,
        min_max,
    )
}


def parse_attack(attack: Attack | str | None) -> Attack | None:
    """Parse an attack from its text, ``"alie(workers=3)"``; return an attack, or None, unchanged.

    Raises
    ------
    InputError
        The value is of another type, or its text is no call of an attack.
    """
    if attack is None or isinstance(attack, Attack):
        return attack
    if not isinstance(attack, str):
        raise InputError(
            f"attack = {attack!r}: must be an attack, asyncsim.attacks.alie(workers=3) say, or its "
            "text"
        )
    return _parsed(attack)


@functools.lru_cache(64)  # the same object each time: compiled programs are cached by identity
def _parsed(attack: str) -> Attack:
    return called("attack", attack, ATTACKS, prefixed=True)


def _in_place(messages: Array, byzantine: Array, vector: Array) -> Array:
    return jnp.where(byzantine[:, None], vector, messages)


def _moments(messages: Array, mask: Array) -> tuple[Array, Array]:
    """Return mean and standard deviation of the messages in a mask, coordinate by coordinate."""
    share = mask.astype(messages.dtype) / jnp.maximum(jnp.sum(mask), 1).astype(messages.dtype)
    present = jnp.where(mask[:, None], messages, 0)
    mean = jnp.matmul(share, present, precision=jax.lax.Precision.HIGHEST)
    deviations = jnp.where(mask[:, None], messages - mean, 0)
    return mean, jnp.sqrt(jnp.matmul(share, deviations**2, precision=jax.lax.Precision.HIGHEST))
