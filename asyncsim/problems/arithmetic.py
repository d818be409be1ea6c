"""Arithmetic: an autoregressive policy that adds numbers, with a verifiable reward."""

import functools
from typing import Annotated, Any

import jax
import jax.numpy as jnp

from asyncsim.base.declared import Count, in_range
from asyncsim.base.errors import require_count
from asyncsim.problems.policy import PolicyProblem

_BASE = 10
#: Digits that a sum may have at most: its reward is nearly always zero beyond.
Digits = Annotated[int, functools.partial(require_count, maximum=8)]


@in_range
def arithmetic(digits: Digits = 2, hidden: Count = 64, partial: bool = False) -> PolicyProblem:
    """Return sums of two numbers of up to ``digits`` digits, written from the last digit on.

    A longer sample has longer numbers: quantile ``u`` of the lengths has ``1 + floor(u * digits)``
    digits, and one token more. The policy is a perceptron with one hidden layer. It sees, at each
    position, the two digits there and at the position before, and the token before, from which the
    carry follows; for 64 hidden units it has 4,234 parameters. The reward is 1 if all tokens are
    right, else 0; with ``partial`` the share of right tokens, which a new policy learns from
    faster.

    Raises
    ------
    InputError
        ``digits`` above 8.
    """
    inputs = 4 * (_BASE + 1) + _BASE + 1

    def init(key: jax.Array) -> dict[str, Any]:
        first, second = jax.random.split(key)
        scale = inputs**-0.5
        return {
            "hidden": jax.random.normal(first, (inputs, hidden)) * scale,
            "hidden_bias": jnp.zeros(hidden),
            "output": jax.random.normal(second, (hidden, _BASE)) * hidden**-0.5,
            "output_bias": jnp.zeros(_BASE),
        }

    def prompt(key: jax.Array, quantile: jax.Array) -> jax.Array:
        """Return two numbers, ``[2, digits + 1]`` digits from the last on; -1 past their ends."""
        count = _digits(quantile)
        numbers = jax.random.randint(key, (2, digits + 1), 0, _BASE, jnp.int32)
        return jnp.where(jnp.arange(digits + 1, dtype=jnp.int32) < count, numbers, -1)

    def _digits(quantile: jax.Array) -> jax.Array:
        return jnp.minimum(1 + (quantile * digits).astype(jnp.int32), digits)

    def logits(parameters: Any, numbers: Any, tokens: Any, position: Any) -> jax.Array:
        def digit(sequence: jax.Array, at: jax.Array) -> jax.Array:
            entry = jnp.where(at >= 0, sequence[jnp.maximum(at, 0)], -1)
            return jnp.where(entry < 0, _BASE, entry)

        before = position - 1
        entries = [
            *(digit(numbers[i], at) for i in (0, 1) for at in (position, before)),
            digit(tokens, before),
        ]
        # Rows of the matrix in place of a product with ones and zeros: each sample has a version of
        # its own.
        rows = jnp.stack(entries) + (_BASE + 1) * jnp.arange(len(entries), dtype=jnp.int32)
        inputs = parameters["hidden"][rows].sum(0) + parameters["hidden_bias"]
        hidden = jax.nn.relu(inputs)
        return hidden @ parameters["output"] + parameters["output_bias"]

    def reward(tokens: jax.Array, numbers: jax.Array) -> jax.Array:
        def add(carry: jax.Array, column: jax.Array) -> tuple[jax.Array, jax.Array]:
            total = jnp.maximum(column, 0).sum(dtype=jnp.int32) + carry
            return total // _BASE, total % _BASE

        _, right = jax.lax.scan(add, jnp.zeros((), jnp.int32), numbers.T)
        present = jnp.arange(digits + 1, dtype=jnp.int32) <= (numbers[0] >= 0).sum(dtype=jnp.int32)
        if partial:
            return jnp.mean(tokens == right, where=present)
        return jnp.all((tokens == right) | ~present).astype(jnp.float32)

    return PolicyProblem(
        name="arithmetic",
        init=init,
        prompt=prompt,
        logits=logits,
        reward=reward,
        length=lambda quantile: _digits(quantile) + 1,
        tokens=digits + 1,
        vocabulary=_BASE,
        config={"digits": digits, "hidden": hidden, "partial": partial},
    )
