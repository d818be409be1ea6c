"""Policy gradients on samples of older policies, with corrections for their age.

The gradient of an update sums ``weight * advantage * grad logp`` over the tokens of each sample,
and divides the sum of all samples as `NORMALIZATIONS` say. A *correction* is the weight: a function
of the log-probabilities of the tokens under three policies, the current one, the one that wrote
them (*behaviour*) and the one at the begin of the update (*proximal*), and of the advantage.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from asyncsim.base.calls import called, form_of
from asyncsim.base.errors import InputError, require_choice, require_count, require_positive
from asyncsim.methods.method import require_optimizer

Array = jax.Array
#: ``weight(logp, behaviour, proximal, advantage, present)``: of one sample, each ``[tokens]``.
Weight = Callable[[Array, Array, Array, Array, Array], Array]
#: The quantities that a baseline subtracts from a reward.
BASELINES = ("group", "leave_one_out", "version_group", "none")
#: The divisors of a sample's sum over its tokens, see `policy_gradient`.
NORMALIZATIONS = ("constant", "sequence", "token")


class Correction(NamedTuple):
    """A weight with its text, ``"ppo(clip=0.2)"``, and the normalization of its source."""

    text: str
    weight: Weight
    normalize: str = "constant"


def _ratio(logp: Array, behaviour: Array) -> Array:
    return jnp.exp(logp - behaviour)


def _clipped(ratio: Array, advantage: Array, clip: float) -> Array:
    """Return the ratio where PPO's objective has a gradient, else zero."""
    beyond = jnp.where(advantage > 0, ratio > 1 + clip, ratio < 1 - clip)
    return jnp.where(beyond, 0.0, ratio)


@functools.cache  # compiled programs are cached by the object itself
def none() -> Correction:
    """Weigh every token by one: the plain policy gradient on old samples."""
    return Correction("none()", lambda logp, *_: jnp.ones_like(logp))


@functools.cache
def importance(level: str = "token") -> Correction:
    """Weigh by the ratio of the current policy to the behaviour.

    ``level``: ``"token"``, each token's own ratio, or ``"sequence"``, the product of all of them.
    """
    require_choice("importance: level", level, ("token", "sequence"))

    def weight(
        logp: Array, behaviour: Array, proximal: Array, advantage: Array, present: Array
    ) -> Array:
        if level == "sequence":
            return jnp.full_like(logp, jnp.exp(jnp.sum(logp - behaviour)))
        return _ratio(logp, behaviour)

    return Correction(f"importance(level={level})", weight)


@functools.cache
def truncated(cap: float = 2.0) -> Correction:
    """Weigh by the ratio, at most ``cap``: truncated importance sampling."""
    require_positive("truncated: cap", cap)

    return Correction(
        f"truncated(cap={cap:g})",
        lambda logp, behaviour, *_: jnp.minimum(_ratio(logp, behaviour), cap),
    )


@functools.cache
def cispo(low: float = 1.0, high: float = 0.28) -> Correction:
    """Weigh by the ratio, clipped to ``[1 - low, 1 + high]``; no token loses its gradient.

    MiniMax-M1 (2506.13585), equation 4, which bounds the ratio from above only: ``low=1``.
    """
    require_positive("cispo: high", high)

    return Correction(
        f"cispo(low={low:g}, high={high:g})",
        lambda logp, behaviour, *_: jnp.clip(_ratio(logp, behaviour), 1 - low, 1 + high),
    )


@functools.cache
def icepop(low: float = 0.5, high: float = 5.0) -> Correction:
    """Weigh by the ratio where it lies in ``[low, high]``; tokens outside have no gradient."""
    require_positive("icepop: low", low)
    if not high > low:
        raise InputError(f"icepop: high = {high:g}: must be above low, {low:g}")

    def weight(
        logp: Array, behaviour: Array, proximal: Array, advantage: Array, present: Array
    ) -> Array:
        ratio = _ratio(logp, behaviour)
        return jnp.where((ratio >= low) & (ratio <= high), ratio, 0.0)

    return Correction(f"icepop(low={low:g}, high={high:g})", weight)


@functools.cache
def ppo(clip: float = 0.2) -> Correction:
    """Clip the ratio to the behaviour as PPO does (Schulman et al. 2017, equation 7)."""
    require_positive("ppo: clip", clip)

    return Correction(
        f"ppo(clip={clip:g})",
        lambda logp, behaviour, proximal, advantage, present: _clipped(
            _ratio(logp, behaviour), advantage, clip
        ),
    )


@functools.cache
def decoupled(clip: float = 0.2, cap: float = 5.0) -> Correction:
    """Clip the ratio to the proximal policy, times that of the proximal to the behaviour.

    Decoupled PPO (Hilton et al. 2021; AReaL, 2505.24298, equation 5); the second ratio is at most
    ``cap``.
    """
    require_positive("decoupled: clip", clip)
    require_positive("decoupled: cap", cap)

    def weight(
        logp: Array, behaviour: Array, proximal: Array, advantage: Array, present: Array
    ) -> Array:
        age = jnp.minimum(_ratio(proximal, behaviour), cap)
        return age * _clipped(_ratio(logp, proximal), advantage, clip)

    return Correction(f"decoupled(clip={clip:g}, cap={cap:g})", weight)


@functools.cache
def gspo(clip: float = 3e-4) -> Correction:
    """Clip the geometric mean of a sequence's ratios (GSPO, 2507.18071, equations 5 and 7).

    Equation 5 divides by the sequence's length: its ``normalize`` is ``"sequence"``.
    """
    require_positive("gspo: clip", clip)

    def weight(
        logp: Array, behaviour: Array, proximal: Array, advantage: Array, present: Array
    ) -> Array:
        count = jnp.sum(present).astype(logp.dtype)
        mean = jnp.sum(logp - behaviour) / count
        return _clipped(jnp.full_like(logp, jnp.exp(mean)), advantage, clip)

    return Correction(f"gspo(clip={clip:g})", weight, normalize="sequence")


#: The corrections by name.
CORRECTIONS: Mapping[str, Callable[..., Correction]] = {
    correction.__name__: correction
    for correction in (none, importance, truncated, cispo, icepop, ppo, decoupled, gspo)
}


#: Plain steps: one object, so that methods which differ in their rate share programs.
_PLAIN = optax.scale(-1.0)


class PolicyGradient(NamedTuple):
    """A method for clusters with rollouts; made by `policy_gradient`.

    Attributes
    ----------
    name : str
    hyperparameters : Mapping
    optimizer : optax.GradientTransformation
        Its updates times ``learning_rate`` are added to the parameters.
    correction : Correction
    baseline : str
    normalize : str
    inner_steps : int
    learning_rate : float
    proxy, rounds : None
        Quantities of other methods that recorders ask for.
    """

    name: str
    hyperparameters: Mapping[str, Any]
    optimizer: optax.GradientTransformation
    correction: Correction
    baseline: str
    normalize: str
    inner_steps: int
    learning_rate: float
    proxy: None = None
    rounds: None = None

    def loss(
        self,
        logp: Array,
        behaviour: Array,
        proximal: Array | None,
        advantage: Array,
        present: Array,
    ) -> tuple[Array, Array]:
        """Return the loss whose gradient a step follows, and the weights of the tokens.

        Parameters
        ----------
        logp, behaviour, proximal : Float[Array, "samples tokens"]
            Log-probabilities under the three policies; without ``proximal`` it is the current one.
        advantage : Float[Array, "samples"]
        present : Bool[Array, "samples tokens"]
        """
        # Weights are constants of the surrogate: only the log-probabilities have a gradient.
        fixed = jax.lax.stop_gradient(logp)
        proximal = fixed if proximal is None else proximal
        spread = jnp.broadcast_to(advantage[:, None], logp.shape)
        weight = jax.vmap(self.correction.weight)(fixed, behaviour, proximal, spread, present)
        weight = jax.lax.stop_gradient(jnp.where(present, weight, 0.0))
        of_samples = jnp.sum(weight * spread * logp, 1)
        lengths = jnp.sum(present, 1).astype(logp.dtype)
        if self.normalize != "constant":
            of_samples /= lengths if self.normalize == "sequence" else lengths.mean()
        return -jnp.mean(of_samples), weight

    def advantages(self, rewards: Array, versions: Array) -> Array:
        """Return the advantages of groups, ``[groups, members]``; rewards less their baseline.

        ``versions`` are those that the members started with. Rewards are not divided by their
        standard deviation.
        """
        members = rewards.shape[1]
        if self.baseline == "none" or members == 1:
            return rewards
        if self.baseline == "version_group":
            alike = (versions[:, :, None] == versions[:, None, :]).astype(rewards.dtype)
            return rewards - jnp.einsum("gij,gj->gi", alike, rewards) / alike.sum(2)
        mean = rewards.mean(1, keepdims=True)
        scale = members / (members - 1) if self.baseline == "leave_one_out" else 1.0
        return scale * (rewards - mean)


def _require_weights(weight: Weight) -> None:
    """Raise InputError unless a user's function returns a weight for each token."""
    tokens, number = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((3,), ()))
    present = jax.ShapeDtypeStruct((3,), bool)
    shape = jax.eval_shape(weight, tokens, tokens, tokens, number, present).shape
    if shape != (3,):
        raise InputError(
            f"correction = {weight!r}: returns an array of shape {list(shape)} for 3 tokens; "
            "must return one weight for each token"
        )


def policy_gradient(
    learning_rate: float = 0.1,
    correction: Correction | str | Weight = "none",
    baseline: str = "group",
    inner_steps: int = 1,
    optimizer: optax.GradientTransformation | None = None,
    normalize: str | None = None,
) -> PolicyGradient:
    """Return the policy gradient on batches of samples of older policies.

    Parameters
    ----------
    learning_rate : float
        Of plain gradient steps; of ``optimizer`` the factor of its updates.
    correction : Correction, str or function
        One of `CORRECTIONS`, its text, ``"ppo(clip=0.2)"``, or a function
        ``weight(logp, behaviour, proximal, advantage, present)`` of one sample, arrays
        ``[tokens]``; ``present`` marks the tokens before its end.
    baseline : {"group", "leave_one_out", "version_group", "none"}
        The baseline of a reward: the mean of its group; of the other members; of the members that
        started with the same version; or zero.
    inner_steps : int
        Steps of an update, each on an equal part of its batch.
    optimizer : optax.GradientTransformation, optional
        Instead of plain steps; it persists across updates.
    normalize : {"constant", "sequence", "token"}, optional
        Divides a sample's sum over its tokens before the mean over samples: by one, for the
        gradient of the expected reward (Dr. GRPO's constant length, 2503.20783, is part of the
        learning rate); by the sample's length (GRPO, GSPO); or by the mean length, so that all
        tokens of a step weigh the same (DAPO, CISPO). By default ``"sequence"`` with `gspo`, and
        ``"constant"`` with the other corrections.

    Raises
    ------
    InputError
        A rate that is not above zero; an unknown correction, baseline or normalization.
    """
    require_positive("learning_rate", learning_rate)
    require_choice("baseline", baseline, BASELINES)
    require_count("inner_steps", inner_steps)
    if isinstance(correction, str):
        correction = called("correction", correction, CORRECTIONS)
    if not isinstance(correction, Correction):
        if not callable(correction) or correction in CORRECTIONS.values():
            hint = f"; call it, {form_of(correction)}" if callable(correction) else ""
            raise InputError(f"correction = {correction!r}: must be a correction{hint}")
        _require_weights(correction)
        correction = Correction(getattr(correction, "__name__", "custom"), correction)
    normalize = correction.normalize if normalize is None else normalize
    require_choice("normalize", normalize, NORMALIZATIONS)
    return PolicyGradient(
        name="policy_gradient",
        hyperparameters={
            "learning_rate": learning_rate,
            "correction": correction.text,
            "baseline": baseline,
            "normalize": normalize,
            "inner_steps": inner_steps,
        },
        optimizer=_PLAIN if optimizer is None else require_optimizer("optimizer", optimizer),
        correction=correction,
        baseline=baseline,
        normalize=normalize,
        inner_steps=inner_steps,
        learning_rate=learning_rate,
    )
