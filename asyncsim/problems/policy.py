"""Problems of reinforcement learning: a policy that writes tokens, and the reward of these.

A sample begins with a prompt. At each position the policy's logits decide the next token, given the
prompt and the tokens before it. When all tokens are written the sample has a reward.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from asyncsim.base.errors import require_count, require_name

Tree = Any
Array = jax.Array


@dataclass(frozen=True, eq=False)
class PolicyProblem:
    """A policy and the reward of its samples; it knows nothing of slots, queues or staleness.

    A sample has up to ``tokens`` tokens. How many it has, and how hard its prompt is, follows its
    *quantile*: the probability of a shorter sample under the cluster's law of lengths. So a queue
    that loses long samples loses hard prompts.

    Attributes
    ----------
    name : str
    init : function
        ``init(key)`` returns the initial parameters, a tree of floating-point arrays.
    prompt : function
        ``prompt(key, quantile)`` returns a prompt, a tree of arrays.
    logits : function
        ``logits(parameters, prompt, tokens, position)`` returns the logits of the token at
        ``position``, shape ``[vocabulary]``. Of ``tokens``, shape ``[tokens]``, only the entries
        before ``position`` are written.
    reward : function
        ``reward(tokens, prompt)`` returns a scalar.
    length : function
        ``length(quantile)`` returns the number of tokens, from 1 to ``tokens``.
    tokens, vocabulary : int
        The largest number of tokens of a sample, and the number of different tokens.
    value : function or None
        ``value(parameters)`` returns the expected reward of all prompts, exactly. None: a study
        estimates it from fresh samples.
    config : dict
        The arguments, as values that JSON can hold.
    """

    name: str
    init: Callable[[Array], Tree]
    prompt: Callable[[Array, Array], Tree]
    logits: Callable[[Tree, Tree, Array, Array], Array]
    reward: Callable[[Array, Tree], Array]
    length: Callable[[Array], Array]
    tokens: int
    vocabulary: int
    value: Callable[[Tree], Array] | None = None
    config: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        require_name("problem", self.name)
        require_count("tokens", self.tokens)
        require_count("vocabulary", self.vocabulary, 2)

    def sample(
        self, parameters: Callable[[Array], Tree], key: Array, prompt: Tree, length: Array
    ) -> tuple[Array, Array]:
        """Write a sample; return its tokens and their log-probabilities, each ``[tokens]``.

        ``parameters(position)`` returns the parameters that write the token at a position. Entries
        from ``length`` on are zero.
        """

        def write(tokens: Array, position: Array) -> tuple[Array, Array]:
            logp = jax.nn.log_softmax(self.logits(parameters(position), prompt, tokens, position))
            drawn = jax.random.categorical(jax.random.fold_in(key, position), logp)
            present = position < length
            token = jnp.where(present, drawn.astype(jnp.int32), 0)
            return tokens.at[position].set(token), jnp.where(present, logp[token], 0.0)

        tokens = jnp.zeros(self.tokens, jnp.int32)
        return jax.lax.scan(write, tokens, jnp.arange(self.tokens, dtype=jnp.int32))

    def logp(self, parameters: Tree, prompt: Tree, tokens: Array, length: Array) -> Array:
        """Return the log-probabilities of the tokens of a sample, ``[tokens]``, zero past its
        end.
        """

        def at(position: Array) -> Array:
            logits = self.logits(parameters, prompt, tokens, position)
            return jax.nn.log_softmax(logits)[tokens[position]]

        positions = jnp.arange(self.tokens, dtype=jnp.int32)
        return jnp.where(positions < length, jax.vmap(at)(positions), 0.0)
