"""Token bandit: a softmax policy with shared features, of which every expectation is a finite
sum.
"""

import functools
import itertools
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from asyncsim.base.declared import Count, Natural, in_range
from asyncsim.base.errors import InputError, require_count, require_memory
from asyncsim.base.streams import Streams
from asyncsim.problems.policy import PolicyProblem

#: Sequences of tokens that are enumerated at most.
_MOST_SEQUENCES = 100_000
#: Tokens with which two actions already have more.
_LONGEST = 17


@in_range
def token_bandit(
    states: Count = 4,
    actions: Annotated[int, functools.partial(require_count, minimum=2)] = 4,
    features: Count = 8,
    tokens: Count = 2,
    seed: Natural = 0,
) -> PolicyProblem:
    """Return a contextual bandit whose actions are sequences of tokens.

    A prompt is a state, each as likely as the others; a longer sample has a higher state. The
    logits of the token at a position are linear in ``features`` shared parameters, with
    coefficients that depend on the state, the position and the token before. The reward of a
    sequence in a state is a number of a table. Coefficients and rewards are standard normal draws
    of ``seed``.

    ``value`` sums over all sequences, so that value, gradient and bias are exact.

    Raises
    ------
    InputError
        ``actions ** tokens * states`` exceeds 100,000.
    """
    if states * actions ** min(tokens, _LONGEST) > _MOST_SEQUENCES:
        raise InputError(
            f"tokens = {tokens}: {states} states have {states} * {actions}**{tokens} sequences; "
            f"give fewer tokens, actions or states (at most {_MOST_SEQUENCES:,} sequences)"
        )
    coefficients = states * tokens * (actions + 1) * actions * features
    require_memory(f"features = {features}", "a bandit of so many", 8.0 * coefficients)
    draws = Streams(seed, "token bandit").generator(0, 0)
    table = draws.standard_normal((states, tokens, actions + 1, actions, features))
    rewards = draws.standard_normal((states, *(actions,) * tokens))
    sequences = np.array(list(itertools.product(range(actions), repeat=tokens)), np.int32)

    def init(key: jax.Array) -> dict[str, Any]:
        return {"theta": jnp.zeros(features)}

    def prompt(key: jax.Array, quantile: jax.Array) -> jax.Array:
        return jnp.minimum((quantile * states).astype(jnp.int32), states - 1)

    def logits(parameters: Any, state: Any, tokens_so_far: Any, position: Any) -> jax.Array:
        before = jnp.where(position > 0, tokens_so_far[position - 1], actions)
        theta = parameters["theta"]
        return jnp.asarray(table, theta.dtype)[state, position, before] @ theta

    def reward(sequence: jax.Array, state: jax.Array) -> jax.Array:
        return jnp.asarray(rewards)[(state, *(sequence[i] for i in range(tokens)))]

    problem = PolicyProblem(
        name="token_bandit",
        init=init,
        prompt=prompt,
        logits=logits,
        reward=reward,
        length=lambda quantile: jnp.full(jnp.shape(quantile), tokens, jnp.int32),
        tokens=tokens,
        vocabulary=actions,
        config={
            "states": states,
            "actions": actions,
            "features": features,
            "tokens": tokens,
            "seed": seed,
        },
    )

    def value(parameters: Any) -> jax.Array:
        def of_state(state: jax.Array) -> jax.Array:
            def of_sequence(sequence: jax.Array) -> jax.Array:
                logp = problem.logp(
                    parameters, state, sequence, jnp.asarray(tokens, jnp.int32)
                ).sum()
                return jnp.exp(logp) * reward(sequence, state).astype(logp.dtype)

            return jax.vmap(of_sequence)(jnp.asarray(sequences)).sum()

        return jax.vmap(of_state)(jnp.arange(states, dtype=jnp.int32)).mean()

    object.__setattr__(problem, "value", value)
    return problem


class Policies(NamedTuple):
    """Policies on all prompts and sequences of tokens.

    Attributes
    ----------
    logp : Float[ndarray, "policies states sequences tokens"]
    score : Float[ndarray, "policies states sequences parameters"]
        Gradient of the log-probability of the sequence.
    reward : Float[ndarray, "states sequences"]
    """

    logp: np.ndarray
    score: np.ndarray
    reward: np.ndarray


def enumerate_policies(path: np.ndarray, problem: PolicyProblem) -> Policies:
    """Return the policies of some parameters, ``[policies, parameters]``."""
    logp, score, reward = _enumerated(problem)(jnp.asarray(path, jnp.float32))
    return Policies(*(np.asarray(part, float) for part in (logp, score, reward)))


@functools.cache
def _enumerated(problem: PolicyProblem) -> Any:
    """Return the compiled function of all policies."""
    states = jnp.arange(problem.config["states"], dtype=jnp.int32)
    combinations = list(itertools.product(range(problem.vocabulary), repeat=problem.tokens))
    sequences, length = jnp.array(combinations, jnp.int32), jnp.int32(problem.tokens)

    def over_all(function: Any) -> Any:
        return jax.vmap(lambda state: jax.vmap(lambda tokens: function(state, tokens))(sequences))(
            states
        )

    def of_policy(theta: jax.Array) -> Any:
        def logp(theta: jax.Array, state: jax.Array, tokens: jax.Array) -> jax.Array:
            return problem.logp({"theta": theta}, state, tokens, length)

        score = jax.grad(lambda *arguments: logp(*arguments).sum())
        return over_all(lambda *case: logp(theta, *case)), over_all(
            lambda *case: score(theta, *case)
        )

    def enumerated(path: jax.Array) -> Any:
        return *jax.vmap(of_policy)(path), over_all(
            lambda state, tokens: problem.reward(tokens, state)
        )

    return jax.jit(enumerated)
