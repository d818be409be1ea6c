"""Rules of robust aggregation: from the messages of some workers, of whom a few may send anything, to one vector.

A rule is called with ``messages[n, parameters]`` and returns ``[parameters]``::

    krum(f=3)(messages)
    nnm(krum(f=3))(messages, there=[True, False, ...])         # of those messages only

``f`` is the number of Byzantine messages that a rule is made for. Of fewer messages than it needs for that, which
happens where some are not there, a rule takes the largest ``f`` that they allow. A message that is not finite counts as
the worst there is; where a rule works coordinate by coordinate, only its coordinates that are not. Ties go to the
lower index.

Order statistics over the messages are those of a network of minima and maxima (Batcher's merge exchange), which is one
pass over the parameters: of ``[51, 17226]`` .3 ms, where a sort takes 56 ms.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

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

#: From so many coordinates a rule that works on each tells how much each message counted.
_SHARE_COORDINATES = 1000
#: Of `geometric_median`: its smoothing and its last step, over the messages' scale; and its most steps.
_SMOOTHING, _TOLERANCE, _MOST_STEPS = 1e-3, 1e-6, 50

Array = jax.Array
State = Any
Number = Any  #: a whole number, or a traced one


class Aggregated(NamedTuple):
    """What a rule makes of messages."""

    vector: Array  #: shape ``[parameters]``
    #: How much each message counted, shape ``[n]``, their sum being one; by coordinate, the mean over a thousand.
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
        ``aggregate(state, messages, there, key) -> Aggregated``: of the messages that are ``there``, a mask, or None
        for all of them.
    largest : function
        From a number of messages to the largest ``f`` with which the rule withstands them; negative if there is none.
    f : int or None
        What it is made for; None for rules that do not depend on it.
    init : function
        From a vector like the messages to the state, for rules that keep one; else ``()``.
    averaging : float
        What is left at each message of the average of the worker's messages before, which the rule is given in the
        place of the message; 0 for the message itself.
    needs_key : bool
        Whether it draws random numbers.
    """

    text: str
    aggregate: Callable[[State, Array, Array | None, Any], Aggregated]
    largest: Callable[[Number], Number]
    f: int | None = None
    init: Callable[[Array], State] = _no_state
    averaging: float = 0.0
    needs_key: bool = False

    def __call__(self, messages: Any, there: Any = None, key: Any = ()) -> Array:
        """Aggregate messages without a state before; raise InputError if the rule needs more of them."""
        messages = jnp.asarray(messages)
        self.require(len(messages) if there is None else int(np.sum(np.asarray(there))))
        there = None if there is None else jnp.asarray(there)
        return self.aggregate(self.init(messages[0]), messages, there, key).vector

    def require(self, n: int) -> None:
        """Raise InputError if the rule is made for more Byzantine messages than it withstands of ``n``."""
        f = self.f or 0
        if (most := self.largest(n)) < f:
            most_of = f"the largest for {n} messages is f = {most}" if most >= 0 else f"{n} messages are too few"
            raise InputError(f"rule = {self.text!r}: f = {f} is too large: {most_of}")


def mean() -> Rule:
    """Return the mean, which a single Byzantine message moves anywhere."""

    def aggregate(state, messages, there, key):
        share = _equal_shares(_mask(messages, there), _number(messages, there), messages)
        # What is not finite stays so: this rule withstands nothing.
        return Aggregated(_combined(share, messages), share)

    return Rule("mean()", aggregate, lambda n: n * 0)


def median(lower: bool = False) -> Rule:
    """Return the coordinate-wise median.

    ``lower``: of an even number the lower one of the two in the middle, as PyTorch has it; else their mean.

    References
    ----------
    Yin, Chen, Ramchandran and Bartlett 2018, "Byzantine-robust distributed learning", arXiv 1803.01498, definition 1.
    """
    require_switch("lower", lower)

    def aggregate(state, messages, there, key):
        low, high = _middle(messages, there)
        share = _share_between(messages, there, low, high)
        return Aggregated(low if lower else low / 2 + high / 2, share)

    return Rule(_text("median", lower=lower or None), aggregate, lambda n: (n - 1) // 2)


def trimmed_mean(f: int) -> Rule:
    """Return the coordinate-wise mean without the ``f`` largest and the ``f`` smallest values.

    References
    ----------
    Yin et al. 2018, arXiv 1803.01498, definition 2.
    """
    require_count("f", f, minimum=0)
    middle = median()

    def aggregate(state, messages, there, key):
        n = len(messages)
        if there is None and n > 2 * f:
            kept = _sorted(_entries(messages, None))[f : n - f]
            vector = sum(kept[1:], kept[0]) / len(kept)
            return Aggregated(vector, _share_between(messages, None, kept[0], kept[-1]))
        if n <= 2 * f:
            return middle.aggregate(state, messages, there, key)

        def trim():
            # What is not there is above the f-th smallest, and below the f-th largest.
            values, present = _entries(messages, there), there[:, None]
            low = _sorted(jax.lax.optimization_barrier(values))[f]
            high = _sorted(jax.lax.optimization_barrier(jnp.where(present, values, -values)))[n - 1 - f]
            inside = present & (values > low) & (values < high)
            at_low = (jnp.sum(present & (values <= low), 0) - f).astype(values.dtype)
            at_high = (jnp.sum(present & (values >= high), 0) - f).astype(values.dtype)
            total = jnp.sum(jnp.where(inside, values, 0), 0) + at_low * low + at_high * high
            kept = (jnp.sum(there, dtype=jnp.int32) - 2 * f).astype(values.dtype)
            vector = jnp.where(low == high, low, total / kept)
            return Aggregated(vector, _share_between(messages, there, low, high))

        # Of too few messages most that can be trimmed is all but the median.
        few = jnp.sum(there, dtype=jnp.int32) <= 2 * f
        return jax.lax.cond(few, lambda: middle.aggregate(state, messages, there, key), trim)

    return Rule(_text("trimmed_mean", f=f), aggregate, lambda n: (n - 1) // 2, f)


def geometric_median(iterations: int | None = None, smoothing: float | None = None) -> Rule:
    """Return the geometric median: the point with the least sum of distances to the messages.

    Weiszfeld's algorithm, ``z <- sum of w_i g_i / sum of w_i`` with ``w_i = 1 / max(smoothing, |z - g_i|)``, starts at
    the coordinate-wise median and ends when a step is at most a millionth of the scale, or after 50 steps. The scale is
    the median distance of the messages to the start, and the smoothing is a thousandth of it, so that the rule moves
    and grows with its messages.

    Parameters
    ----------
    iterations, smoothing
        If either is there, the rule is `rfa` with it.

    References
    ----------
    Weiszfeld 1937; Vardi and Zhang 2000, "The multivariate L1-median and associated data depth", PNAS 97.
    """
    if iterations is not None or smoothing is not None:
        rule = rfa(3 if iterations is None else iterations, 0.1 if smoothing is None else smoothing)
        return rule._replace(text=rule.text.replace("rfa", "geometric_median"))

    def aggregate(state, messages, there, key):
        clean, usable = _clean(messages, there)
        low, high = _middle(clean, usable)
        start = jnp.where(jnp.any(usable), low / 2 + high / 2, 0)
        distances = jnp.where(usable, jnp.sqrt(_squares(clean - start)), jnp.inf)
        scale = jnp.sort(distances)[jnp.maximum(jnp.sum(usable, dtype=jnp.int32) - 1, 0) // 2]
        tiny = jnp.finfo(clean.dtype).tiny
        smoothing = jnp.maximum(_SMOOTHING * scale, tiny)

        def iterate(carry):
            z, _, _, steps = carry
            # Times the smoothing, so that no weight overflows.
            weight = usable.astype(z.dtype) * (smoothing / jnp.maximum(smoothing, jnp.sqrt(_squares(clean - z))))
            weight = weight / jnp.maximum(jnp.sum(weight), tiny)
            after = _combined(weight, clean)
            return after, weight, jnp.linalg.norm(after - z), steps + 1

        def moves(carry):
            *_, step, steps = carry
            return (step > _TOLERANCE * scale) & (steps < _MOST_STEPS)

        begin = start, jnp.zeros_like(distances), jnp.asarray(jnp.inf, clean.dtype), jnp.int32(0)
        # The first step in any case: of equal messages the scale is zero, and the shares are still to be computed.
        vector, share, *_ = jax.lax.while_loop(moves, iterate, iterate(begin))
        return Aggregated(vector, share)

    return Rule("geometric_median()", aggregate, lambda n: (n - 1) // 2)


def rfa(iterations: int = 3, smoothing: float = 0.1) -> Rule:
    """Return RFA's aggregate: some iterations of Weiszfeld's algorithm, smoothed, from zero.

    With ``z`` zero at the start, ``z <- sum of w_i g_i / sum of w_i``, and ``w_i = 1 / max(smoothing, |z - g_i|)``.

    Parameters
    ----------
    iterations : int
        From zero, so that a few are bounded whatever comes in; from the mean they would not be.
    smoothing : float
        In the units of the messages, which are gradients. Of messages shorter than this the result is the mean.

    Notes
    -----
    A few iterations from zero do not reach the geometric median: a majority that colludes far away does not capture
    them.

    References
    ----------
    Pillutla, Kakade and Harchaoui 2022, "Robust aggregation for federated learning", arXiv 1912.13445, algorithm 2.
    """
    require_count("iterations", iterations)
    require_positive("smoothing", smoothing)

    def aggregate(state, messages, there, key):
        clean, usable = _clean(messages, there)

        def iterate(_, carry):
            z, _ = carry
            weight = usable.astype(z.dtype) / jnp.maximum(smoothing, jnp.sqrt(_squares(clean - z)))
            weight = weight / jnp.maximum(jnp.sum(weight), jnp.finfo(weight.dtype).tiny)
            return _combined(weight, clean), weight

        begin = jnp.zeros_like(clean[0]), jnp.zeros_like(clean[:, 0])
        return Aggregated(*jax.lax.fori_loop(0, iterations, iterate, begin))

    text = _text("rfa", iterations=iterations, smoothing=smoothing)
    return Rule(text, aggregate, lambda n: (n - 1) // 2)


#: Krum's scores: the power of the distances, and how many less than ``n - f`` nearest others they are summed over.
KRUM_SCORES: Mapping[str, tuple[int, int]] = {
    "paper": (2, 2),
    "byzfl": (2, 1),
    "byzantine_momentum": (1, 1),
    "epfml": (4, 2),
    "alie": (1, 0),
}


def krum(f: int, score: str = "paper") -> Rule:
    """Return Krum: the message with the least sum of squared distances to its ``n - f - 2`` nearest others.

    ``score``: ``"paper"``, or what published programs have in its place: ``"byzfl"``, squared distances to ``n - f -
    1`` others; ``"byzantine_momentum"``, distances to as many; ``"epfml"``, fourth powers, ``n - f - 2``; ``"alie"``,
    distances to ``n - f``, or to all others where ``f`` is 0.

    Notes
    -----
    A Gram matrix rounds, so that messages that are alike would not tie. It only tells which messages may win; their
    scores are then compared by distances computed from differences.

    References
    ----------
    Blanchard, El Mhamdi, Guerraoui and Stainer 2017, "Machine learning with adversaries", arXiv 1703.02757.
    """
    return _krum("krum", f, score, lambda m, f: 1)


def multi_krum(f: int, m: int | None = None, score: str = "paper") -> Rule:
    """Return Multi-Krum: the mean of the ``m`` messages with the least scores of `krum`.

    ``m``: ``n - f - 2`` unless it is said; with the score of ``"byzfl"`` ``n - f``, as that program has it.

    References
    ----------
    Blanchard et al. 2017, arXiv 1703.02757, section 5.
    """
    if m is not None:
        require_count("m", m)

    def winners(number: Number, f: Number) -> Number:
        return m if m is not None else number - f - (0 if score == "byzfl" else 2)

    return _krum("multi_krum", f, score, winners, m=m)


def _krum(name: str, f: int, score: str, winners: Callable[[Number, Number], Number], **given: Any) -> Rule:
    require_count("f", f, minimum=0)
    power, less = KRUM_SCORES[require_choice("score", score, KRUM_SCORES)]

    def largest(n: Number) -> Number:
        return (n - 3) // 2

    def aggregate(state, messages, there, key):
        m = _number(messages, there)
        tolerated = _most(_least(f, largest(m)), 0)
        wanted = _most(_least(winners(m, tolerated), m), 1)
        # A message has m - 1 others; the authors of ALIE take a slice of n - f of them, which ends there.
        neighbours = _most(_least(m - tolerated - less, m - 1), 1)
        scores = _krum_scores(messages, there, neighbours, wanted, power)
        chosen = _least_of(scores, _mask(messages, there), wanted)
        share = _equal_shares(chosen, wanted, messages)
        return Aggregated(_combined(share, messages), share)

    text = _text(name, f=f, score=None if score == "paper" else score, **given)
    return Rule(text, aggregate, largest, f)


def bulyan(f: int) -> Rule:
    """Return Bulyan: of messages chosen by Krum again and again, coordinate by coordinate those near the median.

    Krum's winner among those that are left is taken out ``n - 2 f`` times; then each coordinate is the mean of the
    ``n - 4 f`` values of those chosen that are nearest to their median (of two as near the lower one).

    Notes
    -----
    Among the last few of those that are left, scores have at least one neighbour.

    References
    ----------
    El Mhamdi, Guerraoui and Rouault 2018, "The hidden vulnerability of distributed learning in Byzantium", arXiv
    1802.07927.
    """
    require_count("f", f, minimum=0)

    def largest(n: Number) -> Number:
        return (n - 3) // 4

    def aggregate(state, messages, there, key):
        clean, usable = _clean(messages, there)
        n, m = len(clean), _number(messages, there)
        tolerated = _most(_least(f, largest(m)), 0)
        theta = m - 2 * tolerated
        distances = _distances(clean, usable)

        def choose(turn, left):
            among = jnp.where(left[:, None] & left, distances, jnp.inf)
            scores = _sum_of_least(among, jnp.maximum(m - turn - tolerated - 2, 1))
            return jnp.where(turn < theta, left & ~_least_of(scores, left, 1), left)

        present = _mask(messages, there)
        chosen = present & ~jax.lax.fori_loop(jnp.int32(0), jnp.int32(n), choose, present)
        rows = jnp.sort(_entries(messages, chosen), axis=0)
        middle = (rows[(theta - 1) // 2] + rows[theta // 2]) / 2
        kept = theta - 2 * tolerated
        # Of sorted values those nearest to a point are neighbours: their run moves up while what comes in is nearer
        # than what goes out.
        ranks = _ranks(n)[:, None]
        coming = rows[jnp.minimum(_ranks(n) + kept, n - 1)]
        nearer = jnp.abs(coming - middle) < jnp.abs(rows - middle)
        first = jnp.sum(nearer & (ranks < theta - kept), 0, dtype=jnp.int32)
        inside = (ranks >= first) & (ranks < first + kept)
        vector = jnp.sum(jnp.where(inside, rows, 0), 0) / jnp.asarray(kept, rows.dtype)
        low, high = (jnp.take_along_axis(rows, at[None], 0)[0] for at in (first, first + kept - 1))
        return Aggregated(vector, _share_between(messages, chosen, low, high))

    return Rule(_text("bulyan", f=f), aggregate, largest, f)


def cge(f: int, total: bool = False, averaging: float = 0.0) -> Rule:
    """Return comparative gradient elimination: the mean of all messages but the ``f`` with the largest norms.

    Parameters
    ----------
    total : bool
        Their sum, as the paper's theory has it.
    averaging : float
        In [0, 1): what is left, at each of its messages, of a worker's average, ``h <- averaging h + (1 - averaging)
        g``, which is zero at the start; the rule is given the averages.

    Notes
    -----
    It does not see the direction of a message: one that is reversed and shortened is always kept.

    References
    ----------
    Gupta, Liu and Vaidya 2020, "Byzantine fault-tolerant distributed machine learning using SGD and norm-based
    comparative gradient elimination", arXiv 2008.04699.
    """
    require_count("f", f, minimum=0)
    require_switch("total", total)
    require_fraction("averaging", averaging)

    def aggregate(state, messages, there, key):
        m = _number(messages, there)
        kept = m - _least(f, (m - 1) // 2)
        squares = _squares(messages)
        norms = jnp.where(jnp.isfinite(squares), squares, jnp.inf)
        chosen = _least_of(norms, _mask(messages, there), kept)
        share = _equal_shares(chosen, kept, messages)
        weight = chosen.astype(messages.dtype) if total else share
        return Aggregated(_combined(weight, messages), share)

    text = _text("cge", f=f, total=total or None, averaging=averaging or None)
    return Rule(text, aggregate, lambda n: (n - 1) // 2, f, averaging=averaging)


def centred_clipping(radius: float = 100.0, iterations: int = 1) -> Rule:
    """Return centred clipping: from where the last one ended, the mean of the messages' clipped differences.

    ``v <- v + mean of (g_i - v) min(1, radius / |g_i - v|)``, some iterations; zero before the first.

    Parameters
    ----------
    radius : float
        In the units of the messages, which are gradients.

    References
    ----------
    Karimireddy, He and Jaggi 2021, "Learning from history for Byzantine robust optimization", arXiv 2012.10333.
    """
    require_positive("radius", radius)
    require_count("iterations", iterations)

    def aggregate(state, messages, there, key):
        clean, usable = _clean(messages, there)
        m = jnp.asarray(_number(messages, there), clean.dtype)

        def iterate(_, carry):
            v, _ = carry
            apart = clean - v
            weight = usable.astype(v.dtype) * jnp.minimum(1, radius / jnp.maximum(jnp.sqrt(_squares(apart)), 1e-30))
            return v + _combined(weight / m, apart), weight

        v, weight = jax.lax.fori_loop(0, iterations, iterate, (state, jnp.zeros_like(clean[:, 0])))
        return Aggregated(v, weight / jnp.maximum(jnp.sum(weight), 1e-30), v)

    text = _text("centred_clipping", radius=radius, iterations=iterations)
    return Rule(text, aggregate, lambda n: (n - 1) // 2, init=jnp.zeros_like)


class LastMedian(NamedTuple):
    """State of `lipschitz_filter`: the last median, and whether there was one."""

    median: Array
    known: Array


def lipschitz_filter(factor: float = 2.0) -> Rule:
    """Return a Lipschitz-inspired filter around the coordinate-wise median. Experimental.

    A value is accepted if it is at most ``factor`` times as far from the last median as the new median is; each
    coordinate is the mean of the accepted values, or the new median if there are none. The first is the median.

    Notes
    -----
    It follows the idea of LICM-SGD, whose exact rule of selection was not in what we could read: take it for no
    reproduction of that paper's results.

    References
    ----------
    Yang, Zhang, Fang and Liu 2019, "Byzantine-resilient SGD for distributed learning: a Lipschitz-inspired
    coordinate-wise median approach", arXiv 1909.04532, the abstract.
    """
    require_positive("factor", factor)
    middle = median()

    def aggregate(state, messages, there, key):
        now = middle.aggregate((), messages, there, key)
        last = state.median
        finite = jnp.isfinite(messages) & _mask(messages, there)[:, None]
        near = finite & (jnp.abs(jnp.where(finite, messages, 0) - last) <= factor * jnp.abs(now.vector - last))
        count = jnp.sum(near, 0, dtype=jnp.int32)
        accepted = jnp.sum(jnp.where(near, messages, 0), 0) / jnp.maximum(count, 1).astype(last.dtype)
        use = state.known & (count > 0)
        shares = jnp.mean(near.astype(last.dtype) / jnp.maximum(count, 1).astype(last.dtype), 1)
        share = jnp.where(state.known, shares / jnp.maximum(jnp.sum(shares), 1e-30), now.share)
        return Aggregated(jnp.where(use, accepted, now.vector), share, LastMedian(now.vector, jnp.bool_(True)))

    def init(central: Array) -> LastMedian:
        return LastMedian(jnp.zeros_like(central), jnp.bool_(False))

    return Rule(_text("lipschitz_filter", factor=factor), aggregate, lambda n: (n - 1) // 2, init=init)


def nnm(rule: Rule | str, f: int | None = None) -> Rule:
    """Return a rule after nearest-neighbour mixing: of each message, the mean of its ``n - f`` nearest.

    ``f``: that of the rule, unless it is said; of a rule without one it has to be. A message is one of its own nearest.

    References
    ----------
    Allouah, Farhadkhani, Guerraoui, Gupta, Pinot and Stephan 2023, "Fixing by mixing", arXiv 2302.01772.
    """
    rule = parse_rule(rule)
    if f is None and rule.f is None:
        raise InputError(f"nnm: f is missing, and {rule.text} has none; write nnm({rule.text}, f=2), say")
    tolerated = require_count("f", rule.f if f is None else f, minimum=0)

    def aggregate(state, messages, there, key):
        clean, usable = _clean(messages, there)
        n, m = len(clean), _number(messages, there)
        kept = m - _least(tolerated, (m - 1) // 2)
        distances = jnp.where(jnp.eye(n, dtype=bool), -1, _distances(clean, usable))  # itself comes first
        near = jax.vmap(lambda own: _least_of(own, _mask(messages, there), kept))(distances)
        weights = _equal_shares(near, kept, messages)
        mixed = jnp.matmul(weights, clean, precision=jax.lax.Precision.HIGHEST)
        spoilt = jnp.any(near & ~usable, axis=1)
        made = rule.aggregate(state, jnp.where(spoilt[:, None], jnp.inf, mixed), there, key)
        return made._replace(share=made.share @ weights)

    def largest(n: Number) -> Number:
        return _least((n - 1) // 2, rule.largest(n))

    text = f"nnm({rule.text}{'' if f is None else f', f={f}'})"
    return rule._replace(text=text, aggregate=aggregate, largest=largest, f=max(tolerated, rule.f or 0))


def bucketing(rule: Rule | str, size: int = 2) -> Rule:
    """Return a rule on the means of buckets of ``size`` messages each, put together at random anew each time.

    One Byzantine message spoils a bucket, so that the rule's ``f`` stays, of fewer messages.

    References
    ----------
    Karimireddy, He and Jaggi 2022, "Byzantine-robust learning on heterogeneous datasets via bucketing", arXiv
    2006.09365, algorithm 1.
    """
    rule = parse_rule(rule)
    require_count("size", size)

    def aggregate(state, messages, there, key):
        clean, usable = _clean(messages, there)
        n, present = len(clean), _mask(messages, there)
        draw, key = jax.random.split(key)
        # Those that are there first, in random order.
        order = jnp.argsort(jnp.where(present, jax.random.uniform(draw, (n,)), 2.0))
        bucket = jnp.zeros(n, jnp.int32).at[order].set(_ranks(n) // size)
        inside = (bucket == _ranks(-(-n // size))[:, None]) & present
        count = jnp.sum(inside, 1, dtype=jnp.int32)
        weights = _equal_shares(inside, jnp.maximum(count, 1)[:, None], messages)
        means = jnp.matmul(weights, clean, precision=jax.lax.Precision.HIGHEST)
        means = jnp.where(jnp.any(inside & ~usable, axis=1)[:, None], jnp.inf, means)
        made = rule.aggregate(state, means, None if there is None else count > 0, key)
        return made._replace(share=made.share @ weights)

    def largest(n: Number) -> Number:
        return rule.largest(-(-n // size))

    text = f"bucketing({rule.text}, size={size})"
    return rule._replace(text=text, aggregate=aggregate, largest=largest, needs_key=True)


def clipping(rule: Rule | str, radius: float = 1.0) -> Rule:
    """Return a rule on messages that are first shortened to a norm of at most ``radius``, a gradient's length."""
    rule = parse_rule(rule)
    require_positive("radius", radius)

    def aggregate(state, messages, there, key):
        norms = jnp.sqrt(_squares(messages))
        shortened = messages * jnp.minimum(1, radius / jnp.maximum(norms, 1e-30))[:, None]
        # Of what is too long to have a norm the direction is not known.
        return rule.aggregate(state, jnp.where(jnp.isfinite(norms)[:, None], shortened, jnp.inf), there, key)

    return rule._replace(text=f"clipping({rule.text}, radius={write(float(radius))})", aggregate=aggregate)


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
    """Return the rule that a text stands for: ``"krum(f=3)"``, ``"nnm(trimmed_mean(f=2))"``; a rule as it is.

    Raises
    ------
    InputError
        For anything else.
    """
    return rule if isinstance(rule, Rule) else called("rule", str(rule), RULES, prefixed=True)


def _text(name: str, **given: Any) -> str:
    """Return the call that makes a rule, without the arguments that are None."""
    return f"{name}({', '.join(f'{key}={write(value)}' for key, value in given.items() if value is not None)})"


def _least(one: Number, other: Number) -> Number:
    """Return the lesser of two whole numbers, which may be traced."""
    return min(one, other) if isinstance(one, int) and isinstance(other, int) else jnp.minimum(one, other)


def _most(one: Number, other: Number) -> Number:
    return max(one, other) if isinstance(one, int) and isinstance(other, int) else jnp.maximum(one, other)


def _number(messages: Array, there: Array | None) -> Number:
    """Return how many messages there are."""
    return len(messages) if there is None else jnp.sum(there, dtype=jnp.int32)


def _ranks(n: int) -> Array:
    return jnp.arange(n, dtype=jnp.int32)


def _mask(messages: Array, there: Array | None) -> Array:
    return jnp.ones(len(messages), bool) if there is None else there


def _equal_shares(chosen: Array, count: Number, messages: Array) -> Array:
    """Return one over the count for those that are chosen, else zero."""
    return chosen.astype(messages.dtype) / jnp.asarray(count, messages.dtype)


def _squares(rows: Array) -> Array:
    """Return the squared norm of each row."""
    return jnp.einsum("np,np->n", rows, rows, precision=jax.lax.Precision.HIGHEST)


def _combined(weights: Array, rows: Array) -> Array:
    """Return the sum of the rows times their weights; rows without weight may be anything.

    Written out, as XLA makes one pass of it.
    """
    total = jnp.zeros_like(rows[0])
    for weight, row in zip(weights.astype(rows.dtype), rows, strict=True):
        total += jnp.where(weight == 0, 0, weight * row)
    return total


def _clean(messages: Array, there: Array | None) -> tuple[Array, Array]:
    """Return the messages, zero where they cannot be used, and which can: those that are finite and have a norm."""
    usable = jnp.isfinite(_squares(messages)) & _mask(messages, there)
    return jnp.where(usable[:, None], messages, 0), usable


def _entries(messages: Array, there: Array | None) -> Array:
    """Return the messages with the largest number there is in the place of what is not finite, or not there."""
    most = jnp.finfo(messages.dtype).max
    finite = jnp.nan_to_num(messages, nan=most, posinf=most, neginf=-most)
    return finite if there is None else jnp.where(there[:, None], finite, most)


def _comparisons(n: int) -> list[tuple[int, int]]:
    """Return the pairs that Batcher's odd-even merge sort of ``n`` values compares, one after the other."""
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
    """Return the rows sorted, coordinate by coordinate."""
    ordered = list(rows)
    for i, j in _comparisons(len(ordered)):
        ordered[i], ordered[j] = jnp.minimum(ordered[i], ordered[j]), jnp.maximum(ordered[i], ordered[j])
    return ordered


def _middle(messages: Array, there: Array | None) -> tuple[Array, Array]:
    """Return the two values in the middle of each coordinate; the same twice, if they are an odd number."""
    n = len(messages)
    values = _entries(messages, there)
    if there is None:
        rows = _sorted(values)
        return rows[(n - 1) // 2], rows[n // 2]
    # Half of those that are not there are put below all others, and half above, so that the middle stays where it is.
    absent = n - jnp.sum(there, dtype=jnp.int32)
    below = ~there & (jnp.cumsum(~there, dtype=jnp.int32) <= absent // 2)
    rows = _sorted(jax.lax.optimization_barrier(jnp.where(below[:, None], -values, values)))
    lower, upper, one_more = rows[max(n // 2 - 1, 0)], rows[n // 2], absent % 2 == 1
    if n % 2:
        return jnp.where(one_more, lower, upper), upper
    return lower, jnp.where(one_more, lower, upper)


def _share_between(messages: Array, there: Array | None, low: Array, high: Array) -> Array:
    """Return how much each message counts where values between two are kept, from some of the coordinates."""
    every = max(1, messages.shape[1] // _SHARE_COORDINATES)
    messages, low, high = messages[:, ::every], low[::every], high[::every]
    inside = (messages >= low) & (messages <= high) & _mask(messages, there)[:, None]
    count = jnp.sum(inside, 1).astype(messages.dtype)
    return count / jnp.maximum(jnp.sum(count), 1)


def _least_of(values: Array, there: Array, count: Number) -> Array:
    """Return which are the ``count`` least values of those that are there; of those that tie, the first."""
    order = jnp.lexsort((values, ~there))
    return jnp.zeros(len(values), bool).at[order].set(_ranks(len(values)) < count) & there


def _distances(clean: Array, usable: Array) -> Array:
    """Return the squared distances of all pairs, from differences; infinite to itself and from what is not usable."""
    found = jax.lax.map(lambda own: _squares(clean - own), clean)
    return jnp.where(usable[:, None] & usable & ~jnp.eye(len(clean), dtype=bool), found, jnp.inf)


def _sum_of_least(table: Array, count: Number) -> Array:
    """Return for each row of a table the sum of its ``count`` least entries."""
    return jnp.sum(jnp.where(_ranks(len(table)) < count, jnp.sort(table), 0), 1)


def _krum_scores(messages: Array, there: Array | None, neighbours: Number, wanted: Number, power: int) -> Array:
    """Return scores whose ``wanted`` least are Krum's.

    Bounds of all scores, from a Gram matrix, tell which messages win or lose in any case; the others get scores from
    distances computed from differences, so that equal messages have equal scores.
    """
    n, parameters = messages.shape
    dtype = messages.dtype
    raised = {1: jnp.sqrt, 2: lambda squares: squares, 4: lambda squares: squares**2}[power]
    # What is not finite spoils its own row and column.
    gram = jnp.matmul(messages, messages.T, precision=jax.lax.Precision.HIGHEST)
    squares = jnp.diagonal(gram)
    usable = jnp.isfinite(squares) & _mask(messages, there)
    pairs = usable[:, None] & usable & ~jnp.eye(n, dtype=bool)
    lengths = squares[:, None] + squares
    estimated = lengths - 2 * gram
    error = 8 * float(jnp.finfo(dtype).eps) * math.sqrt(parameters) * lengths

    def scores(distances: Array) -> Array:
        return _sum_of_least(jnp.where(pairs & ~jnp.isnan(distances), raised(distances), jnp.inf), neighbours)

    low, high = scores(jnp.maximum(estimated - error, 0)), scores(jnp.maximum(estimated + error, 0))
    ranks = _ranks(n)
    worst_winner = jnp.sort(high)[jnp.minimum(wanted, n) - 1]
    best_loser = jnp.where(wanted < n, jnp.sort(low)[jnp.minimum(wanted, n - 1)], jnp.inf)
    wins, open_ = high < best_loser, low <= worst_winner
    asked = open_ & ~wins & usable

    def measure(state):
        found, left = state
        i = jnp.argmax(left)
        own = jnp.where(pairs[i], raised(_squares(messages - messages[i])), jnp.inf)
        own_score = jnp.sum(jnp.where(ranks < neighbours, jnp.sort(own), 0))
        return found.at[i].set(own_score), left.at[i].set(False)

    exact, _ = jax.lax.while_loop(lambda state: jnp.any(state[1]), measure, (jnp.full(n, jnp.inf, dtype), asked))
    # Those whose neighbours are not all finite still come before those that are not finite themselves.
    return jnp.where(usable, jnp.where(wins, -1, jnp.minimum(exact, jnp.finfo(dtype).max)), jnp.inf)
