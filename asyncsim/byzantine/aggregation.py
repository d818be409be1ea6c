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

import math
from collections.abc import Callable, Mapping
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from asyncsim.base.calls import called, write
from asyncsim.base.errors import (
    InputError,
    require_choice,
    require_count,
    require_fraction,
    require_positive,
    require_switch,
)
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
    text : str
        The call that makes it: ``"krum(f=3)"``.
    aggregate : function
        ``aggregate(state, messages, mask, key) -> Aggregated``: of the messages in the mask, or of
        all if it is None.
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
    """

    text: str
    aggregate: Callable[[State, Array, Array | None, Any], Aggregated]
    largest: Callable[[Number], Number]
    f: int | None = None
    init: Callable[[Array], State] = _no_state
    averaging: float = 0.0
    needs_key: bool = False
    coordinatewise: bool = False

    def __str__(self) -> str:
        return self.text

    def __call__(self, messages: Any, mask: Any = None, key: Any = ()) -> Array:
        """Aggregate messages from the initial state; raise InputError for too few messages."""
        messages = jnp.asarray(messages)
        self.require(len(messages) if mask is None else int(np.sum(np.asarray(mask))))
        mask = None if mask is None else jnp.asarray(mask)
        return self.combine(self.init(messages[0]), messages, mask, key).vector

    def combine(self, state: State, messages: Array, mask: Array | None, key: Any) -> Aggregated:
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


def mean() -> Rule:
    """Return the mean, which a single Byzantine message can move anywhere."""

    def aggregate(state, messages, mask, key):
        share = _equal_shares(_mask(messages, mask), _number(messages, mask), messages)
        # Non-finite values stay: this rule tolerates no fault.
        return Aggregated(_combined(share, messages), share)

    return Rule("mean()", aggregate, lambda n: n * 0, coordinatewise=True)


def median(lower: bool = False) -> Rule:
    """Return the coordinate-wise median.

    ``lower``: take the lower of the two middle values of an even number, as PyTorch does; else
    their mean.

    References
    ----------
    Yin, Chen, Ramchandran and Bartlett 2018, "Byzantine-robust distributed learning", arXiv
    1803.01498, definition 1.
    """
    require_switch("lower", lower)

    def aggregate(state, messages, mask, key):
        low, high = _middle(messages, mask)
        share = _share_between(messages, mask, low, high)
        return Aggregated(low if lower else low / 2 + high / 2, share)

    return Rule(
        _text("median", lower=lower or None), aggregate, lambda n: (n - 1) // 2, coordinatewise=True
    )


def trimmed_mean(f: int) -> Rule:
    """Return the coordinate-wise mean without the ``f`` largest and the ``f`` smallest values.

    References
    ----------
    Yin et al. 2018, arXiv 1803.01498, definition 2.
    """
    require_count("f", f, minimum=0)
    middle = median()

    def aggregate(state, messages, mask, key):
        n = len(messages)
        if mask is None and n > 2 * f:
            middle_rows = _sorted(_entries(messages, None))[f : n - f]
            vector = sum(middle_rows[1:], middle_rows[0]) / len(middle_rows)
            return Aggregated(
                vector, _share_between(messages, None, middle_rows[0], middle_rows[-1])
            )
        if n <= 2 * f:
            return middle.aggregate(state, messages, mask, key)

        def trim():
            # A missing message is above the f-th smallest, and below the f-th largest.
            values, present = _entries(messages, mask), mask[:, None]
            low = _sorted(jax.lax.optimization_barrier(values))[f]
            high = _sorted(jax.lax.optimization_barrier(jnp.where(present, values, -values)))[
                n - 1 - f
            ]
            inside = present & (values > low) & (values < high)
            at_low = (jnp.sum(present & (values <= low), 0) - f).astype(values.dtype)
            at_high = (jnp.sum(present & (values >= high), 0) - f).astype(values.dtype)
            total = jnp.sum(jnp.where(inside, values, 0), 0) + at_low * low + at_high * high
            remaining = (jnp.sum(mask, dtype=jnp.int32) - 2 * f).astype(values.dtype)
            vector = jnp.where(low == high, low, total / remaining)
            return Aggregated(vector, _share_between(messages, mask, low, high))

        # Of too few messages all but the median can be trimmed.
        too_few = jnp.sum(mask, dtype=jnp.int32) <= 2 * f
        return jax.lax.cond(too_few, lambda: middle.aggregate(state, messages, mask, key), trim)

    return Rule(
        _text("trimmed_mean", f=f), aggregate, lambda n: (n - 1) // 2, f, coordinatewise=True
    )


def geometric_median(iterations: int | None = None, smoothing: float | None = None) -> Rule:
    """Return the geometric median: the point with the least sum of distances to the messages.

    Weiszfeld's algorithm, ``z <- sum of w_i g_i / sum of w_i`` with
    ``w_i = 1 / max(smoothing, |z - g_i|)``, starts at the coordinate-wise median and ends when a
    step is at most a millionth of the scale, or after 50 steps. The scale is the median distance of
    the messages to the start, and the smoothing is a thousandth of it, so that the rule moves and
    grows with its messages.

    Parameters
    ----------
    iterations, smoothing
        With either of them the rule is `rfa`.

    References
    ----------
    Weiszfeld 1937; Vardi and Zhang 2000, "The multivariate L1-median and associated data depth",
    PNAS 97.
    """
    if iterations is not None or smoothing is not None:
        rule = rfa(3 if iterations is None else iterations, 0.1 if smoothing is None else smoothing)
        return rule._replace(text=rule.text.replace("rfa", "geometric_median"))

    def aggregate(state, messages, mask, key):
        clean, usable = _clean(messages, mask)
        low, high = _middle(clean, usable)
        start = jnp.where(jnp.any(usable), low / 2 + high / 2, 0)
        distances = jnp.where(usable, jnp.sqrt(_squares(clean - start)), jnp.inf)
        scale = jnp.sort(distances)[jnp.maximum(jnp.sum(usable, dtype=jnp.int32) - 1, 0) // 2]
        tiny = jnp.finfo(clean.dtype).tiny
        smoothing = jnp.maximum(_SMOOTHING * scale, tiny)

        def iterate(carry):
            z, _, _, steps = carry
            # Multiplied by the smoothing, so that no weight overflows.
            weight = usable.astype(z.dtype) * (
                smoothing / jnp.maximum(smoothing, jnp.sqrt(_squares(clean - z)))
            )
            weight = weight / jnp.maximum(jnp.sum(weight), tiny)
            after = _combined(weight, clean)
            return after, weight, jnp.linalg.norm(after - z), steps + 1

        def moves(carry):
            *_, step, steps = carry
            return (step > _TOLERANCE * scale) & (steps < _MOST_STEPS)

        begin = start, jnp.zeros_like(distances), jnp.asarray(jnp.inf, clean.dtype), jnp.int32(0)
        # One step in any case: for equal messages the scale is zero, but the shares must be
        # computed.
        vector, share, *_ = jax.lax.while_loop(moves, iterate, iterate(begin))
        return Aggregated(vector, share)

    return Rule("geometric_median()", aggregate, lambda n: (n - 1) // 2)


def rfa(iterations: int = 3, smoothing: float = 0.1) -> Rule:
    """Return RFA's rule: a few smoothed iterations of Weiszfeld's algorithm, starting at zero.

    With ``z`` zero at the start, ``z <- sum of w_i g_i / sum of w_i``, and
    ``w_i = 1 / max(smoothing, |z - g_i|)``.

    Parameters
    ----------
    iterations : int
        From zero, so that a few are bounded for any input; from the mean they would not be.
    smoothing : float
        In the units of the messages, which are gradients. For messages shorter than this the result
        is the mean.

    Notes
    -----
    A few iterations from zero do not reach the geometric median: a majority that colludes far away
    does not capture them.

    References
    ----------
    Pillutla, Kakade and Harchaoui 2022, "Robust aggregation for federated learning", arXiv
    1912.13445, algorithm 2.
    """
    require_count("iterations", iterations)
    require_positive("smoothing", smoothing)

    def aggregate(state, messages, mask, key):
        clean, usable = _clean(messages, mask)

        def iterate(_, carry):
            z, _ = carry
            weight = usable.astype(z.dtype) / jnp.maximum(smoothing, jnp.sqrt(_squares(clean - z)))
            weight = weight / jnp.maximum(jnp.sum(weight), jnp.finfo(weight.dtype).tiny)
            return _combined(weight, clean), weight

        begin = jnp.zeros_like(clean[0]), jnp.zeros_like(clean[:, 0])
        return Aggregated(*jax.lax.fori_loop(0, iterations, iterate, begin))

    text = _text("rfa", iterations=iterations, smoothing=smoothing)
    return Rule(text, aggregate, lambda n: (n - 1) // 2)


#: Krum's scores: the power of the distances, and the ``k`` in the number of nearest others, ``n - f
#: - k``.
KRUM_SCORES: Mapping[str, tuple[int, int]] = {
    "paper": (2, 2),
    "byzfl": (2, 1),
    "byzantine_momentum": (1, 1),
    "epfml": (4, 2),
    "alie": (1, 0),
}


def krum(f: int, score: str = "paper") -> Rule:
    """Return Krum: the message with the least sum of squared distances to its ``n - f - 2`` nearest
    others.

    ``score``: ``"paper"``, or the choice of a published program: ``"byzfl"``, squared distances to
    ``n - f - 1`` others; ``"byzantine_momentum"``, distances to ``n - f - 1``; ``"epfml"``, fourth
    powers, ``n - f - 2``; ``"alie"``, distances to ``n - f``, or to all others if ``f`` is 0.

    Notes
    -----
    A Gram matrix has round-off, so that equal messages would not tie. It only selects the
    candidates; their scores are then compared by distances computed from differences.

    References
    ----------
    Blanchard, El Mhamdi, Guerraoui and Stainer 2017, "Machine learning with adversaries", arXiv
    1703.02757.
    """
    return _krum("krum", f, score, lambda m, f: 1)


def multi_krum(f: int, m: int | None = None, score: str = "paper") -> Rule:
    """Return Multi-Krum: the mean of the ``m`` messages with the least scores of `krum`.

    ``m``: by default ``n - f - 2``; with the score ``"byzfl"`` ``n - f``, as in that program.

    References
    ----------
    Blanchard et al. 2017, arXiv 1703.02757, section 5.
    """
    if m is not None:
        require_count("m", m)

    def winners(number: Number, f: Number) -> Number:
        return m if m is not None else number - f - (0 if score == "byzfl" else 2)

    return _krum("multi_krum", f, score, winners, m=m)


def _krum(
    name: str, f: int, score: str, winners: Callable[[Number, Number], Number], **options: Any
) -> Rule:
    require_count("f", f, minimum=0)
    power, fewer = KRUM_SCORES[require_choice("score", score, KRUM_SCORES)]

    def largest(n: Number) -> Number:
        return (n - 3) // 2

    def aggregate(state, messages, mask, key):
        m = _number(messages, mask)
        tolerated = _max(_min(f, largest(m)), 0)
        count = _max(_min(winners(m, tolerated), m), 1)
        # A message has m - 1 others; the authors of ALIE take a slice of n - f of them, which ends
        # there.
        neighbours = _max(_min(m - tolerated - fewer, m - 1), 1)
        scores = _krum_scores(messages, mask, neighbours, count, power)
        chosen = _smallest(scores, _mask(messages, mask), count)
        share = _equal_shares(chosen, count, messages)
        return Aggregated(_combined(share, messages), share)

    text = _text(name, f=f, score=None if score == "paper" else score, **options)
    return Rule(text, aggregate, largest, f)


def bulyan(f: int) -> Rule:
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
    require_count("f", f, minimum=0)

    def largest(n: Number) -> Number:
        return (n - 3) // 4

    def aggregate(state, messages, mask, key):
        clean, usable = _clean(messages, mask)
        n, m = len(clean), _number(messages, mask)
        tolerated = _max(_min(f, largest(m)), 0)
        theta = m - 2 * tolerated
        distances = _distances(clean, usable)

        def choose(turn, remaining):
            among = jnp.where(remaining[:, None] & remaining, distances, jnp.inf)
            scores = _sum_of_smallest(among, jnp.maximum(m - turn - tolerated - 2, 1))
            return jnp.where(turn < theta, remaining & ~_smallest(scores, remaining, 1), remaining)

        present = _mask(messages, mask)
        chosen = present & ~jax.lax.fori_loop(jnp.int32(0), jnp.int32(n), choose, present)
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

    return Rule(_text("bulyan", f=f), aggregate, largest, f)


def cge(f: int, total: bool = False, averaging: float = 0.0) -> Rule:
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
    require_count("f", f, minimum=0)
    require_switch("total", total)
    require_fraction("averaging", averaging)

    def aggregate(state, messages, mask, key):
        m = _number(messages, mask)
        count = m - _min(f, (m - 1) // 2)
        squares = _squares(messages)
        norms = jnp.where(jnp.isfinite(squares), squares, jnp.inf)
        chosen = _smallest(norms, _mask(messages, mask), count)
        share = _equal_shares(chosen, count, messages)
        weight = chosen.astype(messages.dtype) if total else share
        return Aggregated(_combined(weight, messages), share)

    text = _text("cge", f=f, total=total or None, averaging=averaging or None)
    return Rule(text, aggregate, lambda n: (n - 1) // 2, f, averaging=averaging)


def centred_clipping(radius: float = 100.0, iterations: int = 1) -> Rule:
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
    require_positive("radius", radius)
    require_count("iterations", iterations)

    def aggregate(state, messages, mask, key):
        clean, usable = _clean(messages, mask)
        m = jnp.asarray(_number(messages, mask), clean.dtype)

        def iterate(_, carry):
            v, _ = carry
            differences = clean - v
            lengths = jnp.maximum(jnp.sqrt(_squares(differences)), 1e-30)
            weight = usable.astype(v.dtype) * jnp.minimum(1, radius / lengths)
            return v + _combined(weight / m, differences), weight

        v, weight = jax.lax.fori_loop(0, iterations, iterate, (state, jnp.zeros_like(clean[:, 0])))
        return Aggregated(v, weight / jnp.maximum(jnp.sum(weight), 1e-30), v)

    text = _text("centred_clipping", radius=radius, iterations=iterations)
    return Rule(text, aggregate, lambda n: (n - 1) // 2, init=jnp.zeros_like)


class LastMedian(NamedTuple):
    """State of `lipschitz_filter`: the last median, and whether there is one."""

    median: Array
    is_set: Array


def lipschitz_filter(factor: float = 2.0) -> Rule:
    """Return a Lipschitz-inspired filter around the coordinate-wise median. Experimental.

    A value is accepted if its distance from the last median is at most ``factor`` times the new
    median's; each coordinate is the mean of the accepted values, or the new median without any. The
    first result is the median.

    Notes
    -----
    It follows the idea of LICM-SGD, whose exact rule of selection was not in the text that we could
    read: do not take it as a reproduction of that paper's results.

    References
    ----------
    Yang, Zhang, Fang and Liu 2019, "Byzantine-resilient SGD for distributed learning: a
    Lipschitz-inspired coordinate-wise median approach", arXiv 1909.04532, the abstract.
    """
    require_positive("factor", factor)
    middle = median()

    def aggregate(state, messages, mask, key):
        latest = middle.aggregate((), messages, mask, key)
        last = state.median
        finite = jnp.isfinite(messages) & _mask(messages, mask)[:, None]
        near = finite & (
            jnp.abs(jnp.where(finite, messages, 0) - last) <= factor * jnp.abs(latest.vector - last)
        )
        count = jnp.sum(near, 0, dtype=jnp.int32)
        accepted = jnp.sum(jnp.where(near, messages, 0), 0) / jnp.maximum(count, 1).astype(
            last.dtype
        )
        use = state.is_set & (count > 0)
        shares = jnp.mean(near.astype(last.dtype) / jnp.maximum(count, 1).astype(last.dtype), 1)
        share = jnp.where(state.is_set, shares / jnp.maximum(jnp.sum(shares), 1e-30), latest.share)
        return Aggregated(
            jnp.where(use, accepted, latest.vector),
            share,
            LastMedian(latest.vector, jnp.bool_(True)),
        )

    def init(central: Array) -> LastMedian:
        return LastMedian(jnp.zeros_like(central), jnp.bool_(False))

    return Rule(
        _text("lipschitz_filter", factor=factor), aggregate, lambda n: (n - 1) // 2, init=init
    )


def nnm(rule: Rule | str, f: int | None = None) -> Rule:
    """Return a rule after nearest-neighbour mixing: means of each message's ``n - f`` nearest.

    ``f``: by default the rule's; required for a rule without one. A message counts among its
    nearest.

    References
    ----------
    Allouah, Farhadkhani, Guerraoui, Gupta, Pinot and Stephan 2023, "Fixing by mixing", arXiv
    2302.01772.
    """
    rule = parse_rule(rule)
    if f is None and rule.f is None:
        raise InputError(
            f"nnm: f is missing, and {rule.text} has none; write for example nnm({rule.text}, f=2)"
        )
    tolerated = require_count("f", rule.f if f is None else f, minimum=0)

    def aggregate(state, messages, mask, key):
        clean, usable = _clean(messages, mask)
        n, m = len(clean), _number(messages, mask)
        count = m - _min(tolerated, (m - 1) // 2)
        distances = jnp.where(
            jnp.eye(n, dtype=bool), -1, _distances(clean, usable)
        )  # itself comes first
        near = jax.vmap(lambda row: _smallest(row, _mask(messages, mask), count))(distances)
        weights = _equal_shares(near, count, messages)
        mixed = jnp.matmul(weights, clean, precision=jax.lax.Precision.HIGHEST)
        spoilt = jnp.any(near & ~usable, axis=1)
        aggregated = rule.combine(state, jnp.where(spoilt[:, None], jnp.inf, mixed), mask, key)
        return aggregated._replace(share=aggregated.share @ weights)

    def largest(n: Number) -> Number:
        return _min((n - 1) // 2, rule.largest(n))

    text = f"nnm({rule.text}{'' if f is None else f', f={f}'})"
    return rule._replace(
        text=text, aggregate=aggregate, largest=largest, f=max(tolerated, rule.f or 0)
    )


def bucketing(rule: Rule | str, size: int = 2) -> Rule:
    """Return a rule on the means of buckets of ``size`` messages each, redrawn at random each time.

    One Byzantine message spoils a bucket, so that the rule's ``f`` is unchanged, among fewer
    messages.

    References
    ----------
    Karimireddy, He and Jaggi 2022, "Byzantine-robust learning on heterogeneous datasets via
    bucketing", arXiv 2006.09365, algorithm 1.
    """
    rule = parse_rule(rule)
    require_count("size", size)

    def aggregate(state, messages, mask, key):
        clean, usable = _clean(messages, mask)
        n, present = len(clean), _mask(messages, mask)
        draw, key = jax.random.split(key)
        # Present messages first, in random order.
        order = jnp.argsort(jnp.where(present, jax.random.uniform(draw, (n,)), 2.0))
        bucket = jnp.zeros(n, jnp.int32).at[order].set(_ranks(n) // size)
        inside = (bucket == _ranks(-(-n // size))[:, None]) & present
        count = jnp.sum(inside, 1, dtype=jnp.int32)
        weights = _equal_shares(inside, jnp.maximum(count, 1)[:, None], messages)
        means = jnp.matmul(weights, clean, precision=jax.lax.Precision.HIGHEST)
        means = jnp.where(jnp.any(inside & ~usable, axis=1)[:, None], jnp.inf, means)
        aggregated = rule.combine(state, means, None if mask is None else count > 0, key)
        return aggregated._replace(share=aggregated.share @ weights)

    def largest(n: Number) -> Number:
        return rule.largest(-(-n // size))

    text = f"bucketing({rule.text}, size={size})"
    return rule._replace(text=text, aggregate=aggregate, largest=largest, needs_key=True)


def clipping(rule: Rule | str, radius: float = 1.0) -> Rule:
    """Return a rule on messages shortened to a norm of at most ``radius``, a gradient's norm."""
    rule = parse_rule(rule)
    require_positive("radius", radius)

    def aggregate(state, messages, mask, key):
        norms = jnp.sqrt(_squares(messages))
        shortened = messages * jnp.minimum(1, radius / jnp.maximum(norms, 1e-30))[:, None]
        # Of a message whose norm overflows the direction is unknown.
        return rule.combine(
            state, jnp.where(jnp.isfinite(norms)[:, None], shortened, jnp.inf), mask, key
        )

    return rule._replace(
        text=f"clipping({rule.text}, radius={write(float(radius))})", aggregate=aggregate
    )


#: The rules by their names on the command line.
RULES: Mapping[str, Callable[..., Rule]] = {
    rule.__name__: rule
    for rule in (
        mean,
        median,
        trimmed_mean,
        geometric_median,
        rfa,
        krum,
        multi_krum,
        bulyan,
        cge,
        centred_clipping,
        lipschitz_filter,
        nnm,
        bucketing,
        clipping,
    )
}


def parse_rule(rule: Rule | str) -> Rule:
    """Convert a rule or its text, ``"krum(f=3)"`` or ``"nnm(trimmed_mean(f=2))"``, to a rule.

    Raises
    ------
    InputError
        For another value.
    """
    return rule if isinstance(rule, Rule) else called("rule", str(rule), RULES, prefixed=True)


#: A rule or its text; the factory of a method gets it parsed.
RuleLike = Annotated[Any, lambda argument, rule: parse_rule(rule)]


def _text(name: str, **arguments: Any) -> str:
    """Write the call that makes a rule, without the arguments that are None."""
    texts = (f"{key}={write(value)}" for key, value in arguments.items() if value is not None)
    return f"{name}({', '.join(texts)})"


def _min(a: Number, b: Number) -> Number:
    """Return the smaller of two whole numbers, which may be traced."""
    return min(a, b) if isinstance(a, int) and isinstance(b, int) else jnp.minimum(a, b)


def _max(a: Number, b: Number) -> Number:
    return max(a, b) if isinstance(a, int) and isinstance(b, int) else jnp.maximum(a, b)


def _number(messages: Array, mask: Array | None) -> Number:
    """Count the messages in the mask."""
    return len(messages) if mask is None else jnp.sum(mask, dtype=jnp.int32)


def _ranks(n: int) -> Array:
    return jnp.arange(n, dtype=jnp.int32)


def _mask(messages: Array, mask: Array | None) -> Array:
    return jnp.ones(len(messages), bool) if mask is None else mask


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


def _clean(messages: Array, mask: Array | None) -> tuple[Array, Array]:
    """Return the messages with zeros for unusable ones, and the mask of usable ones."""
    usable = jnp.isfinite(_squares(messages)) & _mask(messages, mask)
    return jnp.where(usable[:, None], messages, 0), usable


def _entries(messages: Array, mask: Array | None) -> Array:
    """Replace non-finite and absent entries by the largest finite float."""
    largest = jnp.finfo(messages.dtype).max
    finite = jnp.nan_to_num(messages, nan=largest, posinf=largest, neginf=-largest)
    return finite if mask is None else jnp.where(mask[:, None], finite, largest)


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


def _middle(messages: Array, mask: Array | None) -> tuple[Array, Array]:
    """Return the two middle values of each coordinate; the same twice for an odd number."""
    n = len(messages)
    values = _entries(messages, mask)
    if mask is None:
        rows = _sorted(values)
        return rows[(n - 1) // 2], rows[n // 2]
    # Half of the absent messages are placed below all others, and half above, so that the middle
    # stays.
    absent = n - jnp.sum(mask, dtype=jnp.int32)
    below = ~mask & (jnp.cumsum(~mask, dtype=jnp.int32) <= absent // 2)
    rows = _sorted(jax.lax.optimization_barrier(jnp.where(below[:, None], -values, values)))
    lower, upper, one_more = rows[max(n // 2 - 1, 0)], rows[n // 2], absent % 2 == 1
    if n % 2:
        return jnp.where(one_more, lower, upper), upper
    return lower, jnp.where(one_more, lower, upper)


def _share_between(messages: Array, mask: Array | None, low: Array, high: Array) -> Array:
    """Estimate each message's share where values between two are kept, from some coordinates."""
    step = max(1, messages.shape[1] // _SHARE_COORDINATES)
    messages, low, high = messages[:, ::step], low[::step], high[::step]
    inside = (messages >= low) & (messages <= high) & _mask(messages, mask)[:, None]
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


def _krum_scores(
    messages: Array, mask: Array | None, neighbours: Number, winners: Number, power: int
) -> Array:
    """Return scores whose ``winners`` smallest are Krum's.

    Bounds of all scores, from a Gram matrix, decide clear winners and losers; the others get scores
    from distances computed from differences, so that equal messages have equal scores.
    """
    n, parameters = messages.shape
    dtype = messages.dtype
    raised = {1: jnp.sqrt, 2: lambda squares: squares, 4: lambda squares: squares**2}[power]
    # A non-finite message spoils only its own row and column.
    gram = jnp.matmul(messages, messages.T, precision=jax.lax.Precision.HIGHEST)
    squares = jnp.diagonal(gram)
    usable = jnp.isfinite(squares) & _mask(messages, mask)
    pairs = usable[:, None] & usable & ~jnp.eye(n, dtype=bool)
    lengths = squares[:, None] + squares
    estimated = lengths - 2 * gram
    error = 8 * float(jnp.finfo(dtype).eps) * math.sqrt(parameters) * lengths

    def scores(distances: Array) -> Array:
        return _sum_of_smallest(
            jnp.where(pairs & ~jnp.isnan(distances), raised(distances), jnp.inf), neighbours
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
        distances = jnp.where(pairs[i], raised(_squares(messages - messages[i])), jnp.inf)
        score = jnp.sum(jnp.where(ranks < neighbours, jnp.sort(distances), 0))
        return scores_so_far.at[i].set(score), remaining.at[i].set(False)

    exact, _ = jax.lax.while_loop(
        lambda state: jnp.any(state[1]), measure, (jnp.full(n, jnp.inf, dtype), undecided)
    )
    # Messages with non-finite neighbours still precede non-finite messages.
    return jnp.where(usable, jnp.where(wins, -1, jnp.minimum(exact, jnp.finfo(dtype).max)), jnp.inf)
