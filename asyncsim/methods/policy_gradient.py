"""Policy gradients on samples of older policies, with corrections for their age.

The gradient of an update sums ``weight * advantage * grad logp`` over the tokens of each sample,
and divides it as ``normalize`` says. A *correction* is the weight: a function
of the log-probabilities of the tokens under three policies, the current one, the one that wrote
them (*behaviour*) and the one at the begin of the update (*proximal*), and of the advantage.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from asyncsim.base.calls import called, form_of
from asyncsim.base.declared import Count, Positive, call_text, declaring, in_range
from asyncsim.base.errors import InputError
from asyncsim.base.tracing import naming, tree_text
from asyncsim.methods.method import require_optimizer

Array = jax.Array
#: ``weight(logp, behaviour, proximal, advantage, present)``: of one sample, each ``[tokens]``.
Weight = Callable[[Array, Array, Array, Array, Array], Array]


class Correction(NamedTuple):
    """A weight, the normalization of its source, and its text, ``"ppo(clip=0.2)"``."""

    weight: Weight
    normalize: str = "constant"
    text: str = ""


@functools.cache  # equal calls return one object: compiled programs are cached by it
def _build(factory: Callable[..., Correction], **arguments: Any) -> Correction:
    return factory(**arguments)._replace(text=call_text(factory, arguments))


#: The decorator that checks arguments; the call is the correction's text.
declared = declaring(lambda factory, arguments: _build(factory, **arguments))


def _ratio(logp: Array, behaviour: Array, *_: Any) -> Array:
    return jnp.exp(logp - behaviour)


def _clipped(ratio: Array, advantage: Array, clip: float) -> Array:
    """Return the ratio where PPO's objective has a gradient, else zero."""
    beyond = jnp.where(advantage > 0, ratio > 1 + clip, ratio < 1 - clip)
    return jnp.where(beyond, 0.0, ratio)


@declared
def none() -> Correction:
    """Weigh every token by one: the plain policy gradient on old samples."""
    return Correction(lambda logp, *_: jnp.ones_like(logp))


@declared
def importance(level: Literal["token", "sequence"] = "token") -> Correction:
    """Weigh by the ratio of the current policy to the behaviour.

    ``level``: ``"token"``, each token's own ratio, or ``"sequence"``, the product of all of them.
    """

    def product(logp, behaviour, *_):
        return jnp.full_like(logp, jnp.exp(jnp.sum(logp - behaviour)))

    return Correction(product if level == "sequence" else _ratio)


@declared
def truncated(cap: Positive = 2.0) -> Correction:
    """Weigh by the ratio, at most ``cap``: truncated importance sampling."""
    return Correction(lambda *sample: jnp.minimum(_ratio(*sample), cap))


@declared
def cispo(low: float = 1.0, high: Positive = 0.28) -> Correction:
    """Weigh by the ratio, clipped to ``[1 - low, 1 + high]``; no token loses its gradient.

    MiniMax-M1 (2506.13585), equation 4, which bounds the ratio from above only: ``low=1``.
    """
    return Correction(lambda *sample: jnp.clip(_ratio(*sample), 1 - low, 1 + high))


@declared
def icepop(low: Positive = 0.5, high: Positive = 5.0) -> Correction:
    """Weigh by the ratio where it lies in ``[low, high]``; tokens outside have no gradient."""
    if not high > low:
        raise InputError(f"icepop: high = {high:g}: must be above low, {low:g}")

    def weight(*sample):
        ratio = _ratio(*sample)
        return jnp.where((ratio >= low) & (ratio <= high), ratio, 0.0)

    return Correction(weight)


@declared
def ppo(clip: Positive = 0.2) -> Correction:
    """Clip the ratio to the behaviour as PPO does (Schulman et al. 2017, equation 7)."""

    def weight(logp, behaviour, proximal, advantage, present):
        return _clipped(_ratio(logp, behaviour), advantage, clip)

    return Correction(weight)


@declared
def decoupled(clip: Positive = 0.2, cap: Positive = 5.0) -> Correction:
    """Clip the ratio to the proximal policy, times the proximal's ratio to the behaviour.

    Decoupled PPO (Hilton et al. 2021; AReaL, 2505.24298, equation 5); the second ratio is at most
    ``cap``.
    """

    def weight(logp, behaviour, proximal, advantage, present):
        age = jnp.minimum(_ratio(proximal, behaviour), cap)
        return age * _clipped(_ratio(logp, proximal), advantage, clip)

    return Correction(weight)


@declared
def gspo(clip: Positive = 3e-4) -> Correction:
    """Clip the geometric mean of a sequence's ratios (GSPO, 2507.18071, equations 5 and 7).

    Equation 5 divides by the sequence's length: its ``normalize`` is ``"sequence"``.
    """

    def weight(logp, behaviour, proximal, advantage, present):
        mean = jnp.sum(logp - behaviour) / jnp.sum(present).astype(logp.dtype)
        return _clipped(jnp.full_like(logp, jnp.exp(mean)), advantage, clip)

    return Correction(weight, normalize="sequence")


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


def _correction(argument: str, correction: Any) -> Correction:
    """Return a correction from its text, or from a function that is its weight.

    Raises
    ------
    InputError
        The text is no call of a correction, or the function returns no weight for each token.
    """
    if isinstance(correction, str):
        return called(argument, correction, CORRECTIONS)
    if isinstance(correction, Correction):
        return correction
    if not callable(correction) or correction in CORRECTIONS.values():
        hint = f"; call it, {form_of(correction)}" if callable(correction) else ""
        raise InputError(f"{argument} = {correction!r}: must be a correction{hint}")
    tokens, present = (jax.ShapeDtypeStruct((3,), kind) for kind in (jnp.float32, bool))
    weight = naming(f"{argument}(logp, behaviour, proximal, advantage, present)", correction)
    result = jax.eval_shape(weight, tokens, tokens, tokens, tokens, present)
    if getattr(result, "shape", None) != (3,):
        raise InputError(
            f"{argument} = {correction!r}: returns {tree_text(result)} for 3 tokens; must return "
            "one weight for each token"
        )
    return Correction(correction, text=getattr(correction, "__name__", "custom"))


@in_range
def policy_gradient(
    learning_rate: Positive = 0.1,
    correction: Annotated[Any, _correction] = "none",
    baseline: Literal["group", "leave_one_out", "version_group", "none"] = "group",
    inner_steps: Count = 1,
    optimizer: Annotated[optax.GradientTransformation, require_optimizer] | None = None,
    normalize: Literal["constant", "sequence", "token"] | None = None,
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
    normalize = normalize or correction.normalize
    return PolicyGradient(
        name="policy_gradient",
        hyperparameters={
            "learning_rate": learning_rate,
            "correction": correction.text,
            "baseline": baseline,
            "normalize": normalize,
            "inner_steps": inner_steps,
        },
        optimizer=optimizer or _PLAIN,
        correction=correction,
        baseline=baseline,
        normalize=normalize,
        inner_steps=inner_steps,
        learning_rate=learning_rate,
    )
