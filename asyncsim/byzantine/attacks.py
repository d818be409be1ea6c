"""Attacks: what Byzantine workers send in the place of their messages.

An attack is part of a replay: ``replay(..., attack=attacks.alie(workers=3))``, and ``--attack "alie(workers=3)"`` in
studies. Without a server only attacks of the own message and `label_flip` are possible, and where workers meet in pairs
`label_flip` alone. ``workers`` are the Byzantine ones: so many, from worker 0 on, or a list.
They compute as the others do, and what they send is changed:

============================================  ==================================================================
`sign_flip`, `gaussian`, `disturbance`,       of the own message alone
`zero`, `infinite`
`alie`, `inner_product`, `mimic`, `min_max`   of the messages of all honest workers (`alie` also of the own ones):
                                              of the version that is about to be made, for methods that combine its
                                              messages (`asyncsim.methods.Method.combine`; a version of Byzantine
                                              messages alone stays as it is); for all others, at each commit of a
                                              Byzantine worker, of the last message of every honest worker
`label_flip`                                  the message is honest, and comes from wrong labels
============================================  ==================================================================

Messages are what a method sends: gradients with `asyncsim.methods.robust`, steps with most others. An attack of one's
own::

    def reverse(workers, scale=3.0):
        def change(messages, honest, byzantine, key):
            mean = jnp.mean(messages, axis=0, where=honest[:, None])
            return jnp.where(byzantine[:, None], -scale * mean, messages)
        return Attack(f"reverse(workers={workers}, scale={scale})", workers, change=change)
"""

import functools
from collections.abc import Callable, Mapping
from statistics import NormalDist
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from asyncsim.base.calls import called, write
from asyncsim.base.errors import (
    InputError,
    require_choice,
    require_count,
    require_number,
    require_positive,
)
from asyncsim.methods.method import Array


class WeakAttackWarning(UserWarning):
    """An attack that is none on this cluster."""


def _no_weakness(workers: int) -> str:
    return ""


class Attack(NamedTuple):
    """What Byzantine workers do.

    Attributes
    ----------
    text : str
        The call that makes it, for what is recorded: ``"alie(workers=3)"``.
    workers : int or sequence of int
        The Byzantine workers, or their number: the first ones.
    own : function, optional
        ``own(message, key) -> message``, a vector or an array of a message that has several: what is known is the
        worker's own message alone.
    change : function, optional
        ``change(messages, honest, byzantine, key) -> messages``, with ``messages[workers, parameters]`` and the masks
        of the honest and the Byzantine workers whose messages are there: all of them are known.
    labels : bool
        Whether Byzantine workers compute with the labels of the data in reverse order.
    weakness : function, optional
        ``weakness(workers) -> str``: why it is no attack on a cluster of so many workers; empty if it is one.
    """

    text: str
    workers: Any
    own: Callable[[Array, Any], Array] | None = None
    change: Callable[[Array, Array, Array, Any], Array] | None = None
    labels: bool = False
    weakness: Callable[[int], str] = _no_weakness

    def byzantine(self, workers: int) -> np.ndarray:
        """Return the mask of the Byzantine workers; raise InputError unless some of a cluster's are, and not all."""
        chosen = _chosen(self.workers)
        if workers == 1:
            raise InputError(
                f"attack = {self.text!r}: the cluster has one worker, which is honest; leave out methods of one worker"
            )
        if outside := [one for one in chosen if one >= workers]:
            raise InputError(
                f"attack = {self.text!r}: worker {outside[0]} is outside the cluster, whose {workers} workers are 0 to "
                f"{workers - 1}"
            )
        if len(chosen) == workers:
            raise InputError(f"attack = {self.text!r}: all {workers} workers are Byzantine; leave one or more honest")
        return np.isin(np.arange(workers), chosen)


def _chosen(workers: Any) -> list[int]:
    """Return the indices of the Byzantine workers; raise InputError for what is neither a number nor a list of them."""
    if not isinstance(workers, list | tuple | range | np.ndarray):
        return list(range(require_count("workers", workers)))
    found = [require_count("workers", one, minimum=0) for one in workers]
    if not found or len(set(found)) < len(found):
        raise InputError(f"workers = {workers!r}: must hold at least one worker, each once")
    return found


def _attack(name: str, workers: Any, given: Mapping[str, Any] | None = None, **does: Any) -> Attack:
    """Return an attack; ``given`` are the arguments besides the workers that are not None."""
    _chosen(workers)
    held = list(workers) if isinstance(workers, range | np.ndarray) else workers
    arguments = {"workers": held, **{key: one for key, one in (given or {}).items() if one is not None}}
    text = f"{name}({', '.join(f'{key}={write(value)}' for key, value in arguments.items())})"
    return Attack(text, workers, **does)


def sign_flip(workers: Any, scale: float = 1.0) -> Attack:
    """Return the attack that sends the own message times ``-scale``: 10 for BASGD's negative gradients."""
    require_positive("scale", scale)
    return _attack("sign_flip", workers, {"scale": scale}, own=lambda message, key: -scale * message)


def gaussian(workers: Any, sigma: float = 200.0) -> Attack:
    """Return the attack that sends noise, of standard deviation ``sigma`` in each coordinate (Blanchard et al.)."""
    require_positive("sigma", sigma)

    def own(message: Array, key: Any) -> Array:
        return sigma * jax.random.normal(key, message.shape, message.dtype)

    return _attack("gaussian", workers, {"sigma": sigma}, own=own)


def disturbance(workers: Any, sigma: float = 0.2) -> Attack:
    """Return BASGD's random disturbance: noise is added, ``sigma`` times as long in each coordinate as the message.

    References
    ----------
    Yang and Li 2021, "BASGD: buffered asynchronous SGD for Byzantine learning", arXiv 2003.00937.
    """
    require_positive("sigma", sigma)

    def own(message: Array, key: Any) -> Array:
        length = jnp.sqrt(jnp.sum(message**2))
        return message + sigma * length * jax.random.normal(key, message.shape, message.dtype)

    return _attack("disturbance", workers, {"sigma": sigma}, own=own)


def zero(workers: Any) -> Attack:
    """Return the attack that sends zeros."""
    return _attack("zero", workers, own=lambda message, key: jnp.zeros_like(message))


def infinite(workers: Any) -> Attack:
    """Return the attack that sends infinite numbers."""
    return _attack("infinite", workers, own=lambda message, key: jnp.full_like(message, jnp.inf))


def label_flip(workers: Any) -> Attack:
    """Return the attack that computes with the labels in reverse order: 9 for 0, 8 for 1."""
    return _attack("label_flip", workers, labels=True)


def alie(workers: Any, z: float | None = None, knows: str = "all") -> Attack:
    """Return "a little is enough": all send the mean minus ``z`` standard deviations, coordinate by coordinate.

    Parameters
    ----------
    z : float, optional
        Else the largest with which enough honest workers are still further from the mean: with ``n`` workers, ``f`` of
        them Byzantine, the standard normal quantile of ``(n - f - s) / (n - f)``, and ``s = n // 2 + 1 - f``. It is
        zero, which is no attack, of an even number of workers with 2 Byzantine ones and of an odd number with 1; a
        replay warns of that.
    knows : {"all", "own"}
        Mean and standard deviation (over all, not one less) are of the honest messages, or, as in the authors' program,
        of what the Byzantine workers would have sent.

    References
    ----------
    Baruch, Baruch and Goldberg 2019, "A little is enough", arXiv 1902.06156.
    """
    require_choice("knows", knows, ("all", "own"))
    if z is not None:
        require_number("z", z)
    f = len(_chosen(workers))

    def strength(n: int) -> float:
        return alie_z(n, f) if z is None else z

    def change(messages: Array, honest: Array, byzantine: Array, key: Any) -> Array:
        known = honest if knows == "all" else byzantine
        mean, deviation = _moments(messages, known)
        return _in_place(messages, byzantine, mean - strength(len(messages)) * deviation)

    def weakness(n: int) -> str:
        if strength(n) != 0:
            return ""
        return f"with {f} of {n} workers z is 0, so that they send the mean, which is no attack; give another z"

    given = {"z": z, "knows": None if knows == "all" else knows}
    return _attack("alie", workers, given, change=change, weakness=weakness)


def alie_z(n: int, f: int) -> float:
    """Return the z of `alie` for ``n`` workers of which ``f`` are Byzantine."""
    needed = n // 2 + 1 - f
    if not 0 < needed < n - f:
        raise InputError(f"workers = {f}: of {n} workers, z has no value for so many Byzantine ones; give z")
    return NormalDist().inv_cdf((n - f - needed) / (n - f))


def inner_product(workers: Any, scale: float = 2.0) -> Attack:
    """Return inner-product manipulation: all send ``-scale`` times the mean of the honest messages.

    ``scale``: .1 evades rules by distance, above one reverses a mean.

    References
    ----------
    Xie, Koyejo and Gupta 2019, "Fall of empires", arXiv 1903.03936.
    """
    require_positive("scale", scale)

    def change(messages: Array, honest: Array, byzantine: Array, key: Any) -> Array:
        return _in_place(messages, byzantine, -scale * _moments(messages, honest)[0])

    return _attack("inner_product", workers, {"scale": scale}, change=change)


def mimic(workers: Any, target: int | None = None) -> Attack:
    """Return the attack that sends what one honest worker sends, over and over: harmful where data differ.

    ``target``: that worker; the first that is there unless it is said, or if it is not there.

    References
    ----------
    Karimireddy, He and Jaggi 2022, arXiv 2006.09365, section 3.
    """
    if target is not None and require_count("target", target, minimum=0) in _chosen(workers):
        raise InputError(f"target = {target}: is Byzantine itself; choose an honest worker")

    def change(messages: Array, honest: Array, byzantine: Array, key: Any) -> Array:
        copied = jnp.argmax(honest)
        if target is not None:
            if target >= len(messages):
                raise InputError(f"target = {target}: is outside the cluster of {len(messages)} workers")
            copied = jnp.where(honest[target], target, copied)
        return _in_place(messages, byzantine, messages[copied])

    return _attack("mimic", workers, {"target": target}, change=change)


def min_max(workers: Any, direction: str = "deviation") -> Attack:
    """Return the attack that goes from the honest mean as far as no honest message would betray it.

    All send ``mean + gamma p``, with the largest ``gamma`` at which the distance to no honest message is larger than
    the largest between two honest ones.

    Parameters
    ----------
    direction : {"deviation", "mean", "sign"}
        ``p``: minus the standard deviations, the mean's reversed unit vector, or its reversed signs.

    Notes
    -----
    The paper searches ``gamma`` by halving; here it is the root of a quadratic equation.

    References
    ----------
    Shejwalkar and Houmansadr 2021, "Manipulating the Byzantine", NDSS, section IV-B.
    """
    require_choice("direction", direction, ("deviation", "mean", "sign"))

    def change(messages: Array, honest: Array, byzantine: Array, key: Any) -> Array:
        mean, deviation = _moments(messages, honest)
        units = {"mean": mean / jnp.maximum(jnp.linalg.norm(mean), 1e-30), "sign": jnp.sign(mean)}
        p = -units.get(direction, deviation)
        kept = jnp.where(honest[:, None], messages, mean)
        pairs = jax.lax.map(lambda own: jnp.max(jnp.sum((kept - own) ** 2, 1)), kept)
        apart = mean - kept
        a, b = jnp.sum(p * p), apart @ p
        c = jnp.sum(apart * apart, 1) - jnp.max(pairs)
        gamma = (jnp.sqrt(jnp.maximum(b * b - a * c, 0)) - b) / jnp.maximum(a, 1e-30)
        return _in_place(messages, byzantine, mean + jnp.min(jnp.where(honest, gamma, jnp.inf)) * p)

    given = {"direction": None if direction == "deviation" else direction}
    return _attack("min_max", workers, given, change=change)


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
    """Return the attack that a text stands for: ``"alie(workers=3)"``; an attack, or None, as it is.

    Raises
    ------
    InputError
        For anything else.
    """
    if attack is None or isinstance(attack, Attack):
        return attack
    if not isinstance(attack, str):
        raise InputError(f"attack = {attack!r}: must be an attack, asyncsim.attacks.alie(workers=3) say, or its text")
    return _parsed(attack)


@functools.lru_cache(64)  # what is compiled is kept by the very object
def _parsed(attack: str) -> Attack:
    return called("attack", attack, ATTACKS, prefixed=True)


def _in_place(messages: Array, byzantine: Array, vector: Array) -> Array:
    return jnp.where(byzantine[:, None], vector, messages)


def _moments(messages: Array, known: Array) -> tuple[Array, Array]:
    """Return mean and standard deviation of the messages that are known, coordinate by coordinate."""
    share = known.astype(messages.dtype) / jnp.maximum(jnp.sum(known), 1).astype(messages.dtype)
    kept = jnp.where(known[:, None], messages, 0)
    mean = jnp.matmul(share, kept, precision=jax.lax.Precision.HIGHEST)
    apart = jnp.where(known[:, None], messages - mean, 0)
    return mean, jnp.sqrt(jnp.matmul(share, apart**2, precision=jax.lax.Precision.HIGHEST))
