"""Laws fitted to durations: the named families by maximum likelihood, the best of them by BIC.

Of ``n`` durations and a family with ``p`` parameters the criterion is Schwarz's, ``p log n - 2 log L``: the least is
the best. Uniform and Pareto laws end where the durations do, so that for them it is a rule of thumb; mixtures are not
tried.

References
----------
Schwarz 1978, Annals of Statistics 6, 461. Log-normal, Pareto, uniform and exponential laws have closed forms; the
shapes of gamma and Weibull laws solve one equation each (Johnson, Kotz and Balakrishnan 1994, ch. 17 and 21).
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from scipy.optimize import brentq
from scipy.special import digamma

from asyncsim.clusters.cluster_text import brief
from asyncsim.clusters.laws import Constant, Empirical, Exponential, Gamma, Law, LogNormal, Pareto, Uniform, Weibull
from asyncsim.errors import InputError, require_choice

#: A law is not fitted to fewer durations than these.
FEWEST = 20
#: How a law is chosen.
KINDS = ("best", "empirical")
#: Durations spread less than this, relative to their mean, are constant: clocks and differences are not that exact.
NO_SPREAD = 1e-6
#: Shorter than any clock's step, seconds.
_NO_TIME = 1e-9
#: A named law is taken unless its distribution function, or its mean, is further off than this.
_TOO_FAR = 0.1
#: What the Kolmogorov distance of a sample of n exceeds once in a hundred, times the root of n.
_CHANCE = 1.63
#: Standard errors from which on a difference is no chance.
ERRORS = 4.0
#: Between these the shapes of gamma and Weibull laws are sought.
_GAMMA_SHAPES, _WEIBULL_SHAPES = (1e-5, 1e15), (0.05, 1e4)
#: And between these the power of durations that spreads as what is left of them does.
_POWERS = (1e-6, 1e3)


class Fit(NamedTuple):
    """A law and how well it fits some durations."""

    law: Law  #: of one of the ``steps`` that make a duration
    log_likelihood: float  #: of the durations
    parameters: int  #: of the family; of an empirical law the number of durations
    distance: float  #: the largest difference of the durations' distribution function and the law's

    def bic(self, samples: int) -> float:
        """Return Schwarz's criterion for so many durations in all; less is better."""
        return self.parameters * math.log(samples) - 2 * self.log_likelihood


class Part(NamedTuple):
    """Durations and the law fitted to them."""

    name: str  #: ``"compute"``, ``"compute of worker 3"``, ``"service"``, ``"latency up"`` or ``"latency down"``
    durations: np.ndarray  #: seconds, in the order of time; of ``steps`` local steps each
    fit: Fit
    steps: int = 1

    def resampled(self, generator: np.random.Generator, law: str) -> "Part":
        """Return it fitted to stretches of its durations, drawn anew; see `Calibration.resampled`."""
        values = self.durations
        if not len(values):
            return self
        length = max(1, round(len(values) ** (1 / 3)))
        first = generator.integers(len(values) - length + 1, size=-(-len(values) // length))
        drawn = values[(first[:, None] + np.arange(length)).ravel()[: len(values)]]
        return self._replace(fit=fit(drawn, law, self.steps))

    def row(self) -> dict[str, Any]:
        """Return the row of `Calibration.table`."""
        values, law = self.durations / self.steps, self.fit.law
        known = len(values) > 0
        return {
            "what": self.name,
            "samples": len(values),
            "mean": float(values.mean()) if known else np.nan,
            "std": float(values.std() * self.steps**0.5) if known else np.nan,
            "law": brief(law),
            "law_mean": law.mean,
            "law_std": law.std,
            "error": law.std / (len(values) * self.steps) ** 0.5 if known else np.nan,
            "distance": self.fit.distance if known else np.nan,
        }


def fitted(name: str, values: np.ndarray, law: str, steps: int = 1) -> Part:
    """Return durations with the law fitted to them; of a named family, or as `calibrate` chooses for ``law``."""
    if len(values) < FEWEST:
        raise InputError(
            f"trace: {len(values)} durations for the law of {name} after the warm-up; record at least {FEWEST}, and "
            "some hundred for a law that can be relied on"
        )
    return Part(name, values, fit(values, law, steps), steps)


def fit(durations: np.ndarray, kind: str = "best", steps: int = 1) -> Fit:
    """Return the law of durations.

    ``durations``: seconds, zero or above. ``kind``: ``"best"``: of the named families the
    one with the least BIC; the durations themselves if even that one is off by more than 0.1 somewhere in its
    distribution function, or by a tenth in its mean. ``"empirical"``: the durations themselves. Or the name of a
    family. ``steps``: each duration is the sum of so many independent ones of the law. Above one, only the families are
    tried of which the sum is known: constant, exponential and gamma.
    """
    require_choice("law", kind, (*KINDS, *FAMILIES))
    spread, mean = float(np.std(durations)), float(np.mean(durations))
    if spread <= max(NO_SPREAD * mean, _NO_TIME):
        # Differences of clock readings end in noise, which is no part of the value.
        value = 0.0 if mean <= _NO_TIME else float(f"{mean / steps:.9g}")
        return Fit(Constant(value), math.inf, 1, 0.0)
    if kind == "empirical":
        if steps > 1:
            raise InputError(
                f"law = 'empirical': a computation is a sum of {steps} local steps here, which does not tell the law "
                "of one; write law='best'"
            )
        return Fit(Empirical(tuple(durations)), -len(durations) * math.log(len(durations)), len(durations), 0.0)
    found = [made for name in (FAMILIES if kind == "best" else [kind]) if (made := _family(name, durations, steps))]
    if not found:
        remedy = f"record single local steps, not sums of {steps}" if kind == "best" else "write law='best'"
        raise InputError(f"law = {kind!r}: the durations cannot come from such a law; {remedy}")
    best = min(found, key=lambda made: made.bic(len(durations)))
    far = best.distance > max(_TOO_FAR, _CHANCE / math.sqrt(len(durations)))
    if kind == "best" and steps == 1 and (far or abs(best.law.mean / mean - 1) > _TOO_FAR):
        return fit(durations, "empirical")
    return best


def _family(name: str, durations: np.ndarray, steps: int) -> Fit | None:
    """Return the law of one family with the largest likelihood; None if there is none."""
    family, parameters, estimate = FAMILIES[name]
    if steps > 1 and family not in (Exponential, Gamma):
        return None
    try:
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            law, log_likelihood = estimate(durations, steps)
    except (InputError, ValueError, ArithmeticError):
        return None
    if not math.isfinite(log_likelihood):
        return None
    total = Gamma(law.mean * steps, law.std / law.mean / math.sqrt(steps)) if steps > 1 else law
    return Fit(law, log_likelihood, parameters, distance(durations, total))


def without(argument: str, values: np.ndarray, part: Law) -> np.ndarray:
    """Return durations less an independent part of them: a constant exactly, another law by mean and variance.

    The rest is a scaled power of the durations, so that they keep their order and stay positive.
    """
    mean, variance = float(values.mean()) - part.mean, float(values.var()) - part.std**2
    if isinstance(part, Constant):
        rest = values - part.value
        tiny = 1e-9 * max(1.0, part.value)
        if len(rest) and rest.min() < -tiny:
            raise InputError(
                f"{argument} = {part}: longer than the {values.min():.6g} s in which it must be contained; give less"
            )
        return np.maximum(rest, 0.0)
    if mean <= 0:
        raise InputError(
            f"{argument} = {part}: longer on average than the {values.mean():.6g} s that contain it; give less"
        )
    fourth = float(np.mean((values - values.mean()) ** 4))
    error = math.sqrt(max(0.0, fourth - float(values.var()) ** 2) / len(values))
    if variance < -ERRORS * error:
        raise InputError(
            f"{argument} = {part}: spreads more, by {part.std:.6g} s, than the durations that contain it, by "
            f"{values.std():.6g} s; give another"
        )
    if variance <= 0 or values.min() <= 0:
        return np.full(len(values), mean)
    logs = np.log(values / values.max())

    def excess(power: float) -> float:
        x = np.exp(power * logs)
        return float(x.std() / x.mean()) - variance**0.5 / mean

    if excess(_POWERS[0]) >= 0:  # next to no spread
        return np.full(len(values), mean)
    if excess(_POWERS[1]) < 0:
        raise InputError(
            f"{argument} = {part}: without it {len(values)} durations of {values.mean():.6g} s on average would spread "
            "more than so many can; give less, or record more"
        )
    power = brentq(excess, *_POWERS)
    shape = np.exp(power * logs)
    return shape * (mean / shape.mean())


def distance(durations: np.ndarray, law: Law) -> float:
    """Return the largest difference between the distribution functions of durations and of a continuous law."""
    ordered = np.sort(durations)
    probability, n = law.cdf(ordered), len(ordered)
    above, below = np.arange(1, n + 1) / n - probability, probability - np.arange(n) / n
    return float(max(above.max(), below.max()))


def _exponential(x: np.ndarray, steps: int) -> tuple[Law, float]:
    law = Exponential(float(x.mean()) / steps)
    return law, _gamma_likelihood(x, float(steps), law.mean)


def _gamma(x: np.ndarray, steps: int) -> tuple[Law, float]:
    mean = float(x.mean())
    excess = math.log(mean) - float(np.log(x).mean())
    shape = math.exp(brentq(lambda t: t - digamma(math.exp(t)) - excess, *map(math.log, _GAMMA_SHAPES), xtol=1e-12))
    return Gamma(mean / steps, math.sqrt(steps / shape)), _gamma_likelihood(x, shape, mean / shape)


def _gamma_likelihood(x: np.ndarray, shape: float, scale: float) -> float:
    powers = (shape - 1) * float(np.log(x).sum()) if shape != 1 else 0.0
    return powers - float(x.sum()) / scale - len(x) * (shape * math.log(scale) + math.lgamma(shape))


def _lognormal(x: np.ndarray, steps: int) -> tuple[Law, float]:
    logs = np.log(x)
    mean, std = float(logs.mean()), float(logs.std())
    law = LogNormal(math.exp(mean + std**2 / 2), math.sqrt(math.expm1(std**2)))
    return law, -float(logs.sum()) - len(x) * (math.log(std) + 0.5 * math.log(2 * math.pi) + 0.5)


def _uniform(x: np.ndarray, steps: int) -> tuple[Law, float]:
    law = Uniform(float(x.min()), float(x.max()))
    return law, -len(x) * math.log(law.high - law.low)


def _weibull(x: np.ndarray, steps: int) -> tuple[Law, float]:
    logs = np.log(x) - math.log(float(x.max()))  # no power of these can overflow

    def slope(shape: float) -> float:
        powers = np.exp(shape * logs)
        return float(powers @ logs / powers.sum() - logs.mean()) - 1 / shape

    shape = brentq(slope, *_WEIBULL_SHAPES, xtol=1e-12)
    scale = float(x.max()) * float(np.exp(shape * logs).mean()) ** (1 / shape)
    law = Weibull(scale * math.gamma(1 + 1 / shape), shape)
    logs = np.log(x / scale)
    return law, len(x) * (math.log(shape / scale) - 1) + (shape - 1) * float(logs.sum())


def _pareto(x: np.ndarray, steps: int) -> tuple[Law, float]:
    minimum = float(x.min())
    shape = 1 / float(np.log(x / minimum).mean())
    if shape <= 1:
        raise ValueError("a Pareto law without a mean")
    law = Pareto(minimum * shape / (shape - 1), shape)
    return law, len(x) * (math.log(shape) - math.log(minimum)) - (shape + 1) * float(np.log(x / minimum).sum())


_Estimate = Callable[[np.ndarray, int], tuple[Law, float]]
#: The families by name: the law, its number of parameters, and its estimate with the log-likelihood.
FAMILIES: dict[str, tuple[Any, int, _Estimate]] = {
    "exponential": (Exponential, 1, _exponential),
    "gamma": (Gamma, 2, _gamma),
    "lognormal": (LogNormal, 2, _lognormal),
    "uniform": (Uniform, 2, _uniform),
    "weibull": (Weibull, 2, _weibull),
    "pareto": (Pareto, 2, _pareto),
}
