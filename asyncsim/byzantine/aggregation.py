"""Rules of robust aggregation: combine messages, some of them arbitrary, into one vector.

A rule is called with ``messages[n, parameters]`` and returns ``[parameters]``::

    krum(f=3)(messages)
    nnm(krum(f=3))(messages, mask=[True, False, ...])         # of these messages only

``f`` is the number of Byzantine messages that a rule tolerates. With too few messages for its
``f``, which happens if some are missing, a rule uses the largest ``f`` that they allow. A message
that is not finite counts as the worst one; in coordinate-wise rules only its non-finite coordinates
do. Ties go to the lower index.

Order statistics over the messages use a network of minima and maxima (Batcher's merge exchange),
one pass over the parameters: .3 ms for ``[51, 17226]``, where a sort takes 56 ms.
"""

import functools
import math
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from asyncsim.base.calls import called
from asyncsim.base.declared import Count, Factory, Fraction, Natural, Positive, call_text, declaring
from asyncsim.base.errors import InputError
from asyncsim.base.tracing import naming_failures, tree_text

#: Coordinates from which a coordinate-wise rule estimates the messages' shares.
_SHARE_COORDINATES = 1000
#: For `geometric_median`: smoothing and last step relative to the messages' scale; largest number
#: of steps.
_SMOOTHING, _TOLERANCE, _MOST_STEPS = 1e-3, 1e-6, 50

Array = jax.Array
State = Any
Number = Any  #: a whole number, or a traced one


class Aggregated(NamedTuple):
    """The result of a rule."""

    vector: Array  #: shape ``[parameters]``
    #: Weight of each message, shape ``[n]``, with sum one; in coordinate-wise rules the mean over a
    #: thousand coordinates.
    share: Array
    state: State = ()


def _no_state(central: Array) -> State:
    return ()


class Rule(NamedTuple):
    """A rule of aggregation.

    Attributes
    ----------
    aggregate : function
        ``aggregate(state, messages, mask, key) -> Aggregated``, of the messages in the mask.
    largest : function
        Maps a number of messages to the largest ``f`` that the rule tolerates; negative for none.
    f : int or None
        The tolerated number; None for rules that do not depend on it.
    init : function
        Maps a vector like the messages to the initial state, for rules with a state; else ``()``.
    averaging : float
        Decay of the running average of each worker's messages, which replaces the message as the
        rule's input; 0 for the message itself.
    needs_key : bool
        Whether it draws random numbers.
    coordinatewise : bool
        Whether each entry of the result depends on that entry of the messages alone.
    text : str
        The call that makes it, ``"krum(f=3)"``; `declared` writes it.
    """

    aggregate: Callable[[State, Array, Array, Any], Aggregated]
    largest: Callable[[Number], Number]
    f: int | None = None
    init: Callable[[Array], State] = _no_state
    averaging: float = 0.0
    needs_key: bool = False
    coordinatewise: bool = False
    text: str = ""

    def __str__(self) -> str:
        return self.text

    def __call__(self, messages: Any, mask: Any = None, key: Any = ()) -> Array:
        """Aggregate messages from the initial state; raise InputError for too few messages."""
        messages = jnp.asarray(messages)
        mask = np.ones(len(messages), bool) if mask is None else np.asarray(mask)
        self.require(int(np.sum(mask)))
        return self.combine(self.init(messages[0]), messages, jnp.asarray(mask), key).vector

    def combine(self, state: State, messages: Array, mask: Array, key: Any) -> Aggregated:
        """Aggregate messages; raise InputError, while traced, for a result of a wrong form."""
        call = f"rule = {self.text!r}: aggregate(state, messages, mask, key)"
        with naming_failures(call):
            result = self.aggregate(state, messages, mask, key)
        expected = tree_text(Aggregated(messages[0], messages[:, 0], state))
        if tree_text(result) != expected:
            raise InputError(
                f"{call} of messages {tree_text(messages)} returned {tree_text(result)}; must "
                f"return asyncsim.aggregation.{expected}"
            )
        return result

    def require(self, n: int) -> None:
        """Raise InputError if the rule's ``f`` is too large for ``n`` messages."""
        f = self.f or 0
        if (limit := self.largest(n)) < f:
            remark = (
                f"the largest for {n} messages is f = {limit}"
                if limit >= 0
                else f"{n} messages are too few"
            )
            raise InputError(f"rule = {self.text!r}: f = {f} is too large: {remark}")


def declared(factory: Factory) -> Factory:
    """Check the arguments of a rule's factory by its annotations; the call becomes its text."""
    return declaring(_build)(factory)


def _build(factory: Callable[..., Rule], arguments: dict[str, Any]) -> Rule:
    plain = {
        name: str(value) if isinstance(value, Rule) else value for name, value in arguments.items()
    }
    # The rule of a rule stands without its name.
    text = call_text(factory, plain).replace("(rule=", "(", 1)
    return factory(**arguments)._replace(text=text)


def parse_rule(rule: Rule | str) -> Rule:
    """Convert a rule or its text, ``"krum(f=3)"`` or ``"nnm(trimmed_mean(f=2))"``, to a rule.

    Raises
    ------
    InputError
        For another value.
    """
    return rule if isinstance(rule, Rule) else _rule_of(str(rule))


@functools.lru_cache(64)  # the same object each time: methods with it share compiled programs
def _rule_of(text: str) -> Rule:
    return called("rule", text, RULES, prefixed=True)


#: A rule or its text; the factory gets it parsed.
RuleLike = Annotated[Any, lambda argument, rule: parse_rule(rule)]


@declared
def mean() -> Rule:
    """Return the mean, which a single Byzantine message can move anywhere."""

    def aggregate(state, messages, mask, key):
        share = _equal_shares(mask, _count(mask), messages)
        # Non-finite values stay: this rule tolerates no fault.
        return Aggregated(_combined(share, messages), share)

    return Rule(aggregate, lambda n: n * 0, coordinatewise=True)


@declared
def median(lower: bool = False) -> Rule:
    """Return the coordinate-wise median.

    ``lower``: take the lower of the two middle values of an even number, as PyTorch does; else
    their mean.

    References
    ----------
    Yin, Chen, Ramchandran and Bartlett 2018, "Byzantine-robust distributed learning", arXiv
    1803.01498, definition 1.
    """

    def aggregate(state, messages, mask, key):
        low, high, _ = _limits(messages, mask)
        share = _share_between(messages, mask, low, high)
        return Aggregated(low if lower else low / 2 + high / 2, share)

    return Rule(aggregate, lambda n: (n - 1) // 2, coordinatewise=True)


@declared
def trimmed_mean(f: Natural) -> Rule:
    """Return the coordinate-wise mean without the ``f`` largest and the ``f`` smallest values.

    References
    ----------
    Yin et al. 2018, arXiv 1803.01498, definition 2.
    """

    def aggregate(state, messages, mask, key):
        low, high, trimmed = _limits(messages, mask, f)
        # Trimmed values count as the limits, and leave the sum again.
        total = _combined(mask, jnp.clip(_entries(messages, mask), low, high))
        total -= trimmed.astype(total.dtype) * (low + high)
        remaining = jnp.maximum(_count(mask) - 2 * trimmed, 1).astype(total.dtype)
        vector = jnp.where(low == high, low, total / remaining)
        return Aggregated(vector, _share_between(messages, mask, low, high))

    return Rule(aggregate, lambda n: (n - 1) // 2, f, coordinatewise=True)


@declared
def geometric_median(iterations: Count | None = None, smoothing: Positive | None = None) -> Rule:
    """Return the geometric median: the point with the least sum of distances to the messages.

    Weiszfeld's algorithm, ``z <- sum of w_i g_i / sum of w_i`` with
    ``w_i = 1 / max(smoothing, |z - g_i|)``, starts at the coordinate-wise median and ends when a
    step is at most a millionth of the scale, or after 50 steps. The scale is the median distance of
    the messages to the start, and the smoothing is a thousandth of it, so that the rule moves and
    grows with its messages.

    Parameters
    ----------
    iterations : int, optional
        With it, or the smoothing, the rule is RFA's: so many iterations, by default 3, from zero. A
        few are then bounded for any input; from the mean they would not be.
    smoothing : float, optional
        Of RFA, in the units of the messages, which are gradients; by default 0.1. For messages
        shorter than this the result is the mean.

    Notes
    -----
    A few iterations from zero do not reach the geometric median: a majority that colludes far away
    does not capture them.

    References
    ----------
    Weiszfeld 1937; Vardi and Zhang 2000, "The multivariate L1-median and associated data depth",
    PNAS 97; Pillutla, Kakade and Harchaoui 2022, "Robust aggregation for federated learning", arXiv
    1912.13445, algorithm 2 (RFA).
    """
    is_rfa = iterations is not None or smoothing is not None
    most_steps = (iterations or 3) if is_rfa else _MOST_STEPS
    no_tolerance: Any = 0.0
    rfa_smoothing: Any = smoothing or 0.1

    def aggregate(state, messages, mask, key):
        clean, usable = _clean(messages, mask)
        tiny = jnp.finfo(clean.dtype).tiny
        start, tolerance, floor = jnp.zeros_like(clean[0]), no_tolerance, rfa_smoothing
        if not is_rfa:
            low, high, _ = _limits(clean, usable)
            start = jnp.where(jnp.any(usable), low / 2 + high / 2, 0)
            distances = jnp.where(usable, jnp.sqrt(_squares(clean - start)), jnp.inf)
            scale = jnp.sort(distances)[jnp.maximum(_count(usable) - 1, 0) // 2]
            tolerance, floor = _TOLERANCE * scale, jnp.maximum(_SMOOTHING * scale, tiny)

        def iterate(carry):
            z, _, _, steps = carry
            # Multiplied by the smoothing, so that no weight overflows.
            weight = usable.astype(z.dtype) * (
                floor / jnp.maximum(floor, jnp.sqrt(_squares(clean - z)))
            )
            weight = weight / jnp.maximum(jnp.sum(weight), tiny)
            after = _combined(weight, clean)
            return after, weight, jnp.linalg.norm(after - z), steps + 1

        def moves(carry):
            *_, step, steps = carry
            return (step > tolerance) & (steps < most_steps)

        begin = start, jnp.zeros_like(clean[:, 0]), jnp.asarray(jnp.inf, clean.dtype), jnp.int32(0)
        # One step in any case: for equal messages the scale is zero, but the shares must be
        # computed.
        vector, share, *_ = jax.lax.while_loop(moves, iterate, iterate(begin))
        return Aggregated(vector, share)

    return Rule(aggregate, lambda n: (n - 1) // 2)


#: The program's score is of ``n - f - 1`` others, the paper's of ``n - f - 2``.
KrumScore = Literal["paper", "byzfl"]


@declared
def krum(f: Natural, score: KrumScore = "paper") -> Rule:
    """Return Krum: the message with the least sum of squared distances to its ``n - f - 2`` nearest
    others.

    ``score``: ``"paper"``, or ``"byzfl"``, as in that program: distances to ``n - f - 1`` others.

    Notes
    -----
    A Gram matrix has round-off, so that equal messages would not tie. It only selects the
    candidates; their scores are then compared by distances computed from differences.

    References
    ----------
    Blanchard, El Mhamdi, Guerraoui and Stainer 2017, "Machine learning with adversaries", arXiv
    1703.02757.
    """
    return _krum(f, score, lambda m, f: 1)


@declared
def multi_krum(f: Natural, m: Count | None = None, score: KrumScore = "paper") -> Rule:
    """Return Multi-Krum: the mean of the ``m`` messages with the least scores of `krum`.

    ``m``: by default ``n - f - 2``; with the score ``"byzfl"`` ``n - f``, as in that program.

    References
    ----------
    Blanchard et al. 2017, arXiv 1703.02757, section 5.
    """

    def winners(number: Number, f: Number) -> Number:
        return m if m is not None else number - f - (0 if score == "byzfl" else 2)

    return _krum(f, score, winners)


def _krum(f: int, score: KrumScore, winners: Callable[[Number, Number], Number]) -> Rule:
    def largest(n: Number) -> Number:
        return (n - 3) // 2

    def aggregate(state, messages, mask, key):
        m = _count(mask)
        tolerated = jnp.clip(largest(m), 0, f)
        count = jnp.maximum(jnp.minimum(winners(m, tolerated), m), 1)
        neighbours = jnp.maximum(m - tolerated - (1 if score == "byzfl" else 2), 1)
        scores = _krum_scores(messages, mask, neighbours, count)
        chosen = _smallest(scores, mask, count)
        share = _equal_shares(chosen, count, messages)
        return Aggregated(_combined(share, messages), share)

    return Rule(aggregate, largest, f)


@declared
def bulyan(f: Natural) -> Rule:
    """Return Bulyan: repeated choices by Krum, then in each coordinate the values near the median.

    Krum's winner among the remaining messages is taken out ``n - 2 f`` times; then each coordinate
    is the mean of the ``n - 4 f`` chosen values nearest to their median (of two equally near ones
    the lower).

    Notes
    -----
    Scores always have at least one neighbour, also among the last few messages.

    References
    ----------
    El Mhamdi, Guerraoui and Rouault 2018, "The hidden vulnerability of distributed learning in
    Byzantium", arXiv 1802.07927.
    """

    def largest(n: Number) -> Number:
        return (n - 3) // 4

    def aggregate(state, messages, mask, key):
        clean, usable = _clean(messages, mask)
        n, m = len(clean), _count(mask)
        tolerated = jnp.clip(largest(m), 0, f)
        theta = m - 2 * tolerated
        distances = _distances(clean, usable)

        def choose(turn, remaining):
            among = jnp.where(remaining[:, None] & remaining, distances, jnp.inf)
            scores = _sum_of_smallest(among, jnp.maximum(m - turn - tolerated - 2, 1))
            return jnp.where(turn < theta, remaining & ~_smallest(scores, remaining, 1), remaining)

        chosen = mask & ~jax.lax.fori_loop(jnp.int32(0), jnp.int32(n), choose, mask)
        rows = jnp.sort(_entries(messages, chosen), axis=0)
        middle = (rows[(theta - 1) // 2] + rows[theta // 2]) / 2
        width = theta - 2 * tolerated
        # The sorted values nearest to a point are neighbours: their run moves up while the entering
        # value is nearer than the leaving one.
        ranks = _ranks(n)[:, None]
        entering = rows[jnp.minimum(_ranks(n) + width, n - 1)]
        nearer = jnp.abs(entering - middle) < jnp.abs(rows - middle)
        first = jnp.sum(nearer & (ranks < theta - width), 0, dtype=jnp.int32)
        inside = (ranks >= first) & (ranks < first + width)
        vector = jnp.sum(jnp.where(inside, rows, 0), 0) / jnp.asarray(width, rows.dtype)
        low, high = (jnp.take_along_axis(rows, at[None], 0)[0] for at in (first, first + width - 1))
        return Aggregated(vector, _share_between(messages, chosen, low, high))

    return Rule(aggregate, largest, f)


@declared
def cge(f: Natural, total: bool = False, averaging: Fraction = 0.0) -> Rule:
    """Return comparative gradient elimination: the mean without the ``f`` messages of largest norm.

    Parameters
    ----------
    total : bool
        Return the sum instead, as in the paper's theory.
    averaging : float
        In [0, 1): decay of a worker's running average, ``h <- averaging h + (1 - averaging) g``,
        which is zero at the start; the rule receives the averages.

    Notes
    -----
        It ignores the direction of a message: a reversed and shortened one is always kept.

    References
    ----------
    Gupta, Liu and Vaidya 2020, "Byzantine fault-tolerant distributed machine learning using SGD and
    norm-based comparative gradient elimination", arXiv 2008.04699.
    """

    def aggregate(state, messages, mask, key):
        m = _count(mask)
        count = m - jnp.minimum(f, (m - 1) // 2)
        squares = _squares(messages)
        norms = jnp.where(jnp.isfinite(squares), squares, jnp.inf)
        chosen = _smallest(norms, mask, count)
        share = _equal_shares(chosen, count, messages)
        weight = chosen.astype(messages.dtype) if total else share
        return Aggregated(_combined(weight, messages), share)

    return Rule(aggregate, lambda n: (n - 1) // 2, f, averaging=averaging)


@declared
def centred_clipping(radius: Positive = 100.0, iterations: Count = 1) -> Rule:
    """Return centred clipping: the last result plus the mean of the clipped differences from it.

    ``v <- v + mean of (g_i - v) min(1, radius / |g_i - v|)`` in each iteration; ``v`` is zero
    before the first.

    Parameters
    ----------
    radius : float
        In the units of the messages, which are gradients.

    References
    ----------
    Karimireddy, He and Jaggi 2021, "Learning from history for Byzantine robust optimization", arXiv
    2012.10333.
    """

    def aggregate(state, messages, mask, key):
        clean, usable = _clean(messages, mask)
        m = _count(mask).astype(clean.dtype)

        def iterate(_, carry):
            v, _ = carry
            differences = clean - v
            lengths = jnp.maximum(jnp.sqrt(_squares(differences)), 1e-30)
            weight = usable.astype(v.dtype) * jnp.minimum(1, radius / lengths)
            return v + _combined(weight / m, differences), weight

        v, weight = jax.lax.fori_loop(0, iterations, iterate, (state, jnp.zeros_like(clean[:, 0])))
        return Aggregated(v, weight / jnp.maximum(jnp.sum(weight), 1e-30), v)

    return Rule(aggregate, lambda n: (n - 1) // 2, init=jnp.zeros_like)


@declared
def nnm(rule: RuleLike, f: Natural | None = None) -> Rule:
    """Return a rule after nearest-neighbour mixing: means of each message's ``n - f`` nearest.

    ``f``: by default the rule's; required for a rule without one. A message counts among its
    nearest.

    References
    ----------
    Allouah, Farhadkhani, Guerraoui, Gupta, Pinot and Stephan 2023, "Fixing by mixing", arXiv
    2302.01772.
    """
    if f is None and rule.f is None:
        raise InputError(
            f"nnm: f is missing, and {rule.text} has none; write for example nnm({rule.text}, f=2)"
        )
    tolerated = rule.f if f is None else f

    def aggregate(state, messages, mask, key):
        clean, usable = _clean(messages, mask)
        m = _count(mask)
        count = m - jnp.minimum(tolerated, (m - 1) // 2)
        itself = jnp.eye(len(clean), dtype=bool)  # comes first
        distances = jnp.where(itself, -1, _distances(clean, usable))
        near = jax.vmap(lambda row: _smallest(row, mask, count))(distances)
        weights = _equal_shares(near, count, messages)
        mixed = jnp.matmul(weights, clean, precision=jax.lax.Precision.HIGHEST)
        spoilt = jnp.any(near & ~usable, axis=1)
        aggregated = rule.combine(state, jnp.where(spoilt[:, None], jnp.inf, mixed), mask, key)
        return aggregated._replace(share=aggregated.share @ weights)

    return rule._replace(aggregate=aggregate, f=max(tolerated, rule.f or 0))


@declared
def bucketing(rule: RuleLike, size: Count = 2) -> Rule:
    """Return a rule on the means of buckets of ``size`` messages each, redrawn at random each time.

    One Byzantine message spoils a bucket, so that the rule's ``f`` is unchanged, among fewer
    messages.

    References
    ----------
    Karimireddy, He and Jaggi 2022, "Byzantine-robust learning on heterogeneous datasets via
    bucketing", arXiv 2006.09365, algorithm 1.
    """

    def aggregate(state, messages, mask, key):
        clean, usable = _clean(messages, mask)
        n = len(clean)
        draw, key = jax.random.split(key)
        # Present messages first, in random order.
        order = jnp.argsort(jnp.where(mask, jax.random.uniform(draw, (n,)), 2.0))
        bucket = jnp.zeros(n, jnp.int32).at[order].set(_ranks(n) // size)
        inside = (bucket == _ranks(-(-n // size))[:, None]) & mask
        count = jnp.sum(inside, 1, dtype=jnp.int32)
        weights = _equal_shares(inside, jnp.maximum(count, 1)[:, None], messages)
        means = jnp.matmul(weights, clean, precision=jax.lax.Precision.HIGHEST)
        means = jnp.where(jnp.any(inside & ~usable, axis=1)[:, None], jnp.inf, means)
        aggregated = rule.combine(state, means, count > 0, key)
        return aggregated._replace(share=aggregated.share @ weights)

    def largest(n: Number) -> Number:
        return rule.largest(-(-n // size))

    return rule._replace(aggregate=aggregate, largest=largest, needs_key=True)


@declared
def clipping(rule: RuleLike, radius: Positive = 1.0) -> Rule:
    """Return a rule on messages shortened to a norm of at most ``radius``, a gradient's norm."""

    def aggregate(state, messages, mask, key):
        norms = jnp.sqrt(_squares(messages))
        shortened = messages * jnp.minimum(1, radius / jnp.maximum(norms, 1e-30))[:, None]
        # Of a message whose norm overflows the direction is unknown.
        return rule.combine(
            state, jnp.where(jnp.isfinite(norms)[:, None], shortened, jnp.inf), mask, key
        )

    return rule._replace(aggregate=aggregate)


#: The rules by their names on the command line.
RULES: Mapping[str, Callable[..., Rule]] = {
    rule.__name__: rule
    for rule in (
        mean,
        median,
        trimmed_mean,
        geometric_median,
        krum,
        multi_krum,
        bulyan,
        cge,
        centred_clipping,
        nnm,
        bucketing,
        clipping,
    )
}


def _count(mask: Array) -> Array:
    return jnp.sum(mask, dtype=jnp.int32)


def _ranks(n: int) -> Array:
    return jnp.arange(n, dtype=jnp.int32)


def _equal_shares(chosen: Array, count: Number, messages: Array) -> Array:
    """Return one over the count for chosen messages, else zero."""
    return chosen.astype(messages.dtype) / jnp.asarray(count, messages.dtype)


def _squares(rows: Array) -> Array:
    return jnp.einsum("np,np->n", rows, rows, precision=jax.lax.Precision.HIGHEST)


def _combined(weights: Array, rows: Array) -> Array:
    """Add up the rows times their weights; rows without weight may be anything.

    An explicit sum, which XLA compiles to one pass.
    """
    total = jnp.zeros_like(rows[0])
    for weight, row in zip(weights.astype(rows.dtype), rows, strict=True):
        total += jnp.where(weight == 0, 0, weight * row)
    return total


def _clean(messages: Array, mask: Array) -> tuple[Array, Array]:
    """Return the messages with zeros for unusable ones, and the mask of usable ones."""
    usable = jnp.isfinite(_squares(messages)) & mask
    return jnp.where(usable[:, None], messages, 0), usable


def _entries(messages: Array, mask: Array) -> Array:
    """Replace non-finite and absent entries by the largest finite float."""
    largest = jnp.finfo(messages.dtype).max
    finite = jnp.nan_to_num(messages, nan=largest, posinf=largest, neginf=-largest)
    return jnp.where(mask[:, None], finite, largest)


def _comparisons(n: int) -> list[tuple[int, int]]:
    """Return the successive comparisons of Batcher's odd-even merge sort of ``n`` values."""
    pairs = []
    p = 1
    while p < n:
        k = p
        while k >= 1:
            for j in range(k % p, n - k, 2 * k):
                for i in range(j, j + min(k, n - j - k)):
                    if i // (2 * p) == (i + k) // (2 * p):
                        pairs.append((i, i + k))
            k //= 2
        p *= 2
    return pairs


def _sorted(rows: Array) -> list[Array]:
    """Sort the rows, coordinate by coordinate."""
    ordered = list(rows)
    for i, j in _comparisons(len(ordered)):
        ordered[i], ordered[j] = (
            jnp.minimum(ordered[i], ordered[j]),
            jnp.maximum(ordered[i], ordered[j]),
        )
    return ordered


def _limits(messages: Array, mask: Array, f: int | None = None) -> tuple[Array, Array, Array]:
    """Return each coordinate's least and largest value after trimming, and the number trimmed.

    From either end ``f`` values are trimmed; of too few messages, or without ``f``, all but the
    median: the middle value, or the two in the middle.
    """
    n = len(messages)
    rank = (n - 1) // 2 if f is None else min(f, (n - 1) // 2)
    trimmed = jnp.clip((_count(mask) - 1) // 2, 0, rank)
    values = _entries(messages, mask)
    # Absent messages below all others move the limit to a rank that is known at tracing.
    is_below = ~mask & (jnp.cumsum(~mask, dtype=jnp.int32) <= rank - trimmed)
    ends = jnp.where(is_below, -1, 1).astype(values.dtype) * jnp.finfo(values.dtype).max

    def limit(sign: Array) -> Array:
        return sign * _sorted(jnp.where(mask[:, None], sign * values, ends[:, None]))[rank]

    # In a loop, as XLA would sort again for each use of the limits.
    low, high = jax.lax.map(limit, jnp.asarray([1, -1], values.dtype))
    return low, high, trimmed


def _share_between(messages: Array, mask: Array, low: Array, high: Array) -> Array:
    """Estimate each message's share where values between two are kept, from some coordinates."""
    step = max(1, messages.shape[1] // _SHARE_COORDINATES)
    messages, low, high = messages[:, ::step], low[::step], high[::step]
    inside = (messages >= low) & (messages <= high) & mask[:, None]
    count = jnp.sum(inside, 1).astype(messages.dtype)
    return count / jnp.maximum(jnp.sum(count), 1)


def _smallest(values: Array, mask: Array, count: Number) -> Array:
    """Return the mask of the ``count`` smallest values within a mask; ties go to the first."""
    order = jnp.lexsort((values, ~mask))
    return jnp.zeros(len(values), bool).at[order].set(_ranks(len(values)) < count) & mask


def _distances(clean: Array, usable: Array) -> Array:
    """Return the squared distances of all pairs; infinite to itself and to unusable messages."""
    squares = jax.lax.map(lambda row: _squares(clean - row), clean)
    return jnp.where(usable[:, None] & usable & ~jnp.eye(len(clean), dtype=bool), squares, jnp.inf)


def _sum_of_smallest(table: Array, count: Number) -> Array:
    """Add up the ``count`` smallest entries of each row."""
    return jnp.sum(jnp.where(_ranks(len(table)) < count, jnp.sort(table), 0), 1)


def _krum_scores(messages: Array, mask: Array, neighbours: Number, winners: Number) -> Array:
    """Return scores whose ``winners`` smallest are Krum's.

    Bounds of all scores, from a Gram matrix, decide clear winners and losers; the others get scores
    from distances computed from differences, so that equal messages have equal scores.
    """
    n, parameters = messages.shape
    dtype = messages.dtype
    # A non-finite message spoils only its own row and column.
    gram = jnp.matmul(messages, messages.T, precision=jax.lax.Precision.HIGHEST)
    squares = jnp.diagonal(gram)
    usable = jnp.isfinite(squares) & mask
    pairs = usable[:, None] & usable & ~jnp.eye(n, dtype=bool)
    lengths = squares[:, None] + squares
    estimated = lengths - 2 * gram
    error = 8 * float(jnp.finfo(dtype).eps) * math.sqrt(parameters) * lengths

    def scores(distances: Array) -> Array:
        return _sum_of_smallest(
            jnp.where(pairs & ~jnp.isnan(distances), distances, jnp.inf), neighbours
        )

    low, high = scores(jnp.maximum(estimated - error, 0)), scores(jnp.maximum(estimated + error, 0))
    ranks = _ranks(n)
    worst_winner = jnp.sort(high)[jnp.minimum(winners, n) - 1]
    best_loser = jnp.where(winners < n, jnp.sort(low)[jnp.minimum(winners, n - 1)], jnp.inf)
    wins, open_ = high < best_loser, low <= worst_winner
    undecided = open_ & ~wins & usable

    def measure(state):
        scores_so_far, remaining = state
        i = jnp.argmax(remaining)
        distances = jnp.where(pairs[i], _squares(messages - messages[i]), jnp.inf)
        score = jnp.sum(jnp.where(ranks < neighbours, jnp.sort(distances), 0))
        return scores_so_far.at[i].set(score), remaining.at[i].set(False)

    exact, _ = jax.lax.while_loop(
        lambda state: jnp.any(state[1]), measure, (jnp.full(n, jnp.inf, dtype), undecided)
    )
    # Messages with non-finite neighbours still precede non-finite messages.
    return jnp.where(usable, jnp.where(wins, -1, jnp.minimum(exact, jnp.finfo(dtype).max)), jnp.inf)
