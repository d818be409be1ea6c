"""Laws fitted to durations: the named families by maximum likelihood, the best of them by BIC.

Computations that a death cut short are censored observations: the whole duration would have been
longer. Their factor of the likelihood is the probability of a longer duration.

For ``n`` complete durations and a family with ``p`` parameters the criterion is Schwarz's,
``p log n - 2 log L``, least for the best law. Uniform and Pareto laws end where the durations do,
so that for them it is a rule of thumb; mixtures are not tried.

References
----------
Schwarz 1978, Annals of Statistics 6, 461. Log-normal, Pareto, uniform and exponential laws have
closed forms; the shapes of gamma and Weibull laws solve one equation each (Johnson, Kotz and
Balakrishnan 1994, ch. 17 and 21). With censored durations gamma and log-normal laws are found by
search, and a uniform law solves an equation.

Kaplan and Meier 1958, Journal of the American Statistical Association 53, 457: the distribution of
censored durations.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy.optimize import brentq, minimize
from scipy.special import digamma, gammaincc, log_ndtr

from asyncsim.base.errors import InputError, require_choice
from asyncsim.clusters.laws import (
    Constant,
    Empirical,
    Exponential,
    Gamma,
    Law,
    LogNormal,
    Pareto,
    Uniform,
    Weibull,
    brief,
)

#: Fewest durations to which a law is fitted.
FEWEST = 20
#: Rules for choosing a law.
KINDS = ("best", "empirical")
#: Durations with a smaller relative spread are constant: clocks and differences are not more exact.
NO_SPREAD = 1e-6
#: Durations below any clock's step, seconds.
_NO_TIME = 1e-9
#: Largest error of a named law's distribution function, or of its mean.
_TOO_FAR = 0.1
#: Times the root of n: exceeded by the Kolmogorov distance of a sample of n once in a hundred.
_CHANCE = 1.63
#: Standard errors above which a difference is no chance.
ERRORS = 4.0
#: The durations of each part of a visit, in the words of a log.
_TIMES = {
    "compute": "computations",
    "service": "services, from serve_time to commit_time,",
    "latency up": "ways up, from send_time to arrive_time,",
    "latency down": "ways down, from a commit_time to its worker's next start_time,",
}
#: Search intervals for the shapes of gamma and Weibull laws.
_GAMMA_SHAPES, _WEIBULL_SHAPES = (1e-5, 1e15), (0.05, 1e4)
#: Search interval for the power by which durations are scaled to a given spread.
_POWERS = (1e-6, 1e3)


class Fit(NamedTuple):
    """A law fitted to durations, and the quality of the fit."""

    law: Law  #: of one of a duration's ``steps``
    log_likelihood: float  #: of the durations
    parameters: int  #: of the family; of an empirical law the number of durations
    distance: float  #: the largest difference of the durations' distribution function and the law's

    def bic(self, samples: int) -> float:
        """Return Schwarz's criterion for this total number of durations; less is better."""
        return self.parameters * math.log(samples) - 2 * self.log_likelihood


class Part(NamedTuple):
    """Durations and the law fitted to them."""

    #: ``"compute"``, ``"compute of worker 3"``, ``"service"``, ``"latency up"`` or
    #: ``"latency down"``
    name: str
    durations: np.ndarray  #: seconds, in the order of time; of ``steps`` local steps each
    fit: Fit
    steps: int = 1
    censored: np.ndarray | None = None  #: whether each was cut short; None for no such duration

    @property
    def uncensored(self) -> np.ndarray:
        """The durations, with estimates for those that were cut short; see `uncensored`."""
        return uncensored(self.durations, self.censored)

    def resampled(self, generator: np.random.Generator, law: str) -> "Part":
        """Fit the part to random stretches of its durations; see `Calibration.resampled`."""
        values = self.durations
        if not len(values):
            return self
        length = max(1, round(len(values) ** (1 / 3)))
        first = generator.integers(len(values) - length + 1, size=-(-len(values) // length))
        drawn = (first[:, None] + np.arange(length)).ravel()[: len(values)]
        censored = None if self.censored is None else self.censored[drawn]
        return self._replace(fit=fit(values[drawn], law, self.steps, censored))

    def row(self) -> dict[str, Any]:
        """Return the row of `Calibration.table`."""
        values, law = self.uncensored / self.steps, self.fit.law
        has_samples = len(values) > 0
        return {
            "what": self.name,
            "samples": len(values),
            "mean": float(values.mean()) if has_samples else np.nan,
            "std": float(values.std() * self.steps**0.5) if has_samples else np.nan,
            "law": brief(law),
            "law_mean": law.mean,
            "law_std": law.std,
            "error": law.std / (len(values) * self.steps) ** 0.5 if has_samples else np.nan,
            "distance": self.fit.distance if has_samples else np.nan,
        }


def fitted(
    name: str, values: np.ndarray, law: str, steps: int = 1, censored: np.ndarray | None = None
) -> Part:
    """Fit a law to durations, from a named family or by the rules of `calibrate`."""
    completed = len(values) if censored is None else int(np.count_nonzero(~censored))
    if completed < FEWEST:
        meaning = next((text for part, text in _TIMES.items() if name.startswith(part)), name)
        raise InputError(
            f"trace: has {completed} {meaning} after the first of each worker; record at least "
            f"{FEWEST}, and some hundred for a reliable law"
        )
    return Part(name, values, fit(values, law, steps, censored), steps, censored)


def uncensored(durations: np.ndarray, censored: np.ndarray | None) -> np.ndarray:
    """Estimate the whole durations of computations that were cut short.

    The result holds quantiles of Kaplan and Meier's distribution, one for each complete duration.
    If the longest duration is censored, quantiles beyond the complete ones are equal to it. Without
    censored ones the durations are unchanged.
    """
    if censored is None:
        return durations
    order = np.lexsort((censored, durations))
    complete, at_risk = ~censored[order], len(durations) - np.arange(len(durations))
    reached = 1 - np.cumprod(1 - complete / at_risk)
    samples = int(complete.sum())
    places = np.searchsorted(reached, (np.arange(samples) + 0.5) / samples)
    return durations[order][np.minimum(places, len(durations) - 1)]


def fit(
    durations: np.ndarray, kind: str = "best", steps: int = 1, censored: np.ndarray | None = None
) -> Fit:
    """Fit a law to durations.

    ``durations``: seconds, zero or above. ``kind``: ``"best"``: the named family with the least
    BIC, or the durations themselves if that law misses their distribution function by more than 0.1
    somewhere, or their mean by a tenth. ``"empirical"``: the durations themselves. Or the name of a
    family. ``steps``: number of independent draws of the law whose sum is a duration; above one,
    only families with a known sum are tried: constant, exponential and gamma. ``censored``: whether
    each duration was cut short.
    """
    require_choice("law", kind, (*KINDS, *FAMILIES))
    observed, cut = durations, np.zeros(0)
    if censored is not None:
        observed, cut = durations[~censored], durations[censored]
        durations = uncensored(durations, censored)
    spread, mean = float(np.std(observed)), float(np.mean(observed))
    if spread <= max(NO_SPREAD * mean, _NO_TIME):
        # Differences of clock readings have noise in their last digits.
        value = 0.0 if mean <= _NO_TIME else float(f"{mean / steps:.9g}")
        return Fit(Constant(value), math.inf, 1, 0.0)
    if kind == "empirical":
        if steps > 1:
            raise InputError(
                f"law = 'empirical': a computation is a sum of {steps} local steps here, which "
                "does not determine the "
                "law of one step; write law='best'"
            )
        return Fit(
            Empirical(tuple(durations)),
            -len(durations) * math.log(len(durations)),
            len(durations),
            0.0,
        )
    longest = (
        math.inf if censored is None else max(float(observed.max()), float(cut.max(initial=0.0)))
    )
    fits = []
    for name in FAMILIES if kind == "best" else [kind]:
        estimate = _family(name, observed, cut, steps)
        if estimate is not None:
            law, log_likelihood, parameters = estimate
            total = (
                Gamma(law.mean * steps, law.std / law.mean / math.sqrt(steps)) if steps > 1 else law
            )
            fits.append(Fit(law, log_likelihood, parameters, distance(durations, total, longest)))
    if not fits:
        remedy = (
            f"record single local steps, not sums of {steps}"
            if kind == "best"
            else "write law='best'"
        )
        raise InputError(f"law = {kind!r}: the durations cannot come from such a law; {remedy}")
    best = min(fits, key=lambda candidate: candidate.bic(len(durations)))
    if kind != "best" or steps > 1:
        return best
    far = best.distance > max(_TOO_FAR, _CHANCE / math.sqrt(len(durations)))
    law_mean = best.law.mean if censored is None else _mean_up_to(longest, best.law, durations)
    if far or abs(law_mean / float(durations.mean()) - 1) > _TOO_FAR:
        return fit(durations, "empirical")
    return best


def _family(
    name: str, durations: np.ndarray, cut: np.ndarray, steps: int
) -> tuple[Law, float, int] | None:
    """Return the law of a family with the largest likelihood, its logarithm, and the number of
    parameters.

    None if no law of the family fits. ``cut``: the durations that were cut short.
    """
    family, parameters, estimate = FAMILIES[name]
    if steps > 1 and family not in (Exponential, Gamma):
        return None
    try:
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            law, log_likelihood = estimate(durations, cut, steps)
    except (InputError, ValueError, ArithmeticError):
        return None
    return (law, log_likelihood, parameters) if math.isfinite(log_likelihood) else None


def _mean_up_to(longest: float, law: Law, points: np.ndarray) -> float:
    """Integrate the probability of longer durations up to the longest observable, by trapezoids."""
    edges = np.concatenate([[0.0], np.sort(points), [longest]])
    return float(np.trapezoid(1 - law.cdf(edges), edges))


def without(argument: str, values: np.ndarray, part: Law) -> np.ndarray:
    """Subtract an independent part from durations: a constant exactly, else by mean and variance.

    The rest is a scaled power of the durations, so that they keep their order and stay positive.
    """
    mean, variance = float(values.mean()) - part.mean, float(values.var()) - part.std**2
    if isinstance(part, Constant):
        rest = values - part.value
        tiny = 1e-9 * max(1.0, part.value)
        if len(rest) and rest.min() < -tiny:
            raise InputError(
                f"{argument} = {part}: longer than the {values.min():.6g} s in which it must be "
                "contained; give less"
            )
        return np.maximum(rest, 0.0)
    if mean <= 0:
        raise InputError(
            f"{argument} = {part}: longer on average than the {values.mean():.6g} s that contain "
            "it; give less"
        )
    fourth = float(np.mean((values - values.mean()) ** 4))
    error = math.sqrt(max(0.0, fourth - float(values.var()) ** 2) / len(values))
    if variance < -ERRORS * error:
        raise InputError(
            f"{argument} = {part}: spreads more, by {part.std:.6g} s, than the durations that "
            "contain it, by "
            f"{values.std():.6g} s; give another"
        )
    if variance <= 0 or values.min() <= 0:
        return np.full(len(values), mean)
    logs = np.log(values / values.max())

    def excess(power: float) -> float:
        x = np.exp(power * logs)
        return float(x.std() / x.mean()) - variance**0.5 / mean

    if excess(_POWERS[0]) >= 0:  # almost no spread
        return np.full(len(values), mean)
    if excess(_POWERS[1]) < 0:
        raise InputError(
            f"{argument} = {part}: without it {len(values)} durations of {values.mean():.6g} s on "
            "average would spread "
            "more than is possible; give less, or record more"
        )
    power = brentq(excess, *_POWERS)
    shape = np.exp(power * logs)
    return shape * (mean / shape.mean())


def distance(durations: np.ndarray, law: Law, longest: float = math.inf) -> float:
    """Return the largest difference between the distribution functions of durations and of a
    continuous law.

    Durations of ``longest`` or more count, but are not compared: they stand for all unobservable
    ones.
    """
    ordered = np.sort(durations)
    n, compared = len(ordered), int(np.searchsorted(ordered, longest))
    probability = law.cdf(ordered[:compared])
    above, below = (
        np.arange(1, compared + 1) / n - probability,
        probability - np.arange(compared) / n,
    )
    return float(max(above.max(initial=0.0), below.max(initial=0.0)))


# The arguments of each estimate: complete durations, durations that were cut short, local steps of
# a duration.


def _exponential(x: np.ndarray, cut: np.ndarray, steps: int) -> tuple[Law, float]:
    mean = (
        float((x.sum() + cut.sum()) / len(x)) / steps
    )  # time computed over computations completed
    if len(cut) and steps > 1:
        (log_mean,) = _maximum(
            lambda t: _gamma_likelihood(x, cut, float(steps), math.exp(t[0])), [math.log(mean)]
        )
        mean = math.exp(log_mean)
    return Exponential(mean), _gamma_likelihood(x, cut, float(steps), mean)


def _gamma(x: np.ndarray, cut: np.ndarray, steps: int) -> tuple[Law, float]:
    mean = float(x.mean())
    excess = math.log(mean) - float(np.log(x).mean())
    shape = math.exp(
        brentq(
            lambda t: t - digamma(math.exp(t)) - excess, *map(math.log, _GAMMA_SHAPES), xtol=1e-12
        )
    )
    if len(cut):

        def likelihood(logs: Sequence[float]) -> float:
            return _gamma_likelihood(x, cut, math.exp(logs[0]), math.exp(logs[1] - logs[0]))

        mean = float((x.sum() + cut.sum()) / len(x))
        shape, mean = (
            math.exp(log) for log in _maximum(likelihood, [math.log(shape), math.log(mean)])
        )
    return Gamma(mean / steps, math.sqrt(steps / shape)), _gamma_likelihood(
        x, cut, shape, mean / shape
    )


def _gamma_likelihood(x: np.ndarray, cut: np.ndarray, shape: float, scale: float) -> float:
    powers = (shape - 1) * float(np.log(x).sum()) if shape != 1 else 0.0
    complete = (
        powers - float(x.sum()) / scale - len(x) * (shape * math.log(scale) + math.lgamma(shape))
    )
    return complete + float(np.log(gammaincc(shape, cut / scale)).sum())


def _lognormal(x: np.ndarray, cut: np.ndarray, steps: int) -> tuple[Law, float]:
    logs, cut_logs = np.log(x), np.log(cut)
    mean, std = float(logs.mean()), float(logs.std())
    total, squares = float(logs.sum()), float(logs.var())
    if len(cut):

        def likelihood(t: Sequence[float]) -> float:
            variance, longer = math.exp(2 * t[1]), log_ndtr((t[0] - cut_logs) / math.exp(t[1]))
            return float(longer.sum()) - len(x) * (
                t[1] + (squares + (total / len(x) - t[0]) ** 2) / (2 * variance)
            )

        mean, log_std = _maximum(likelihood, [mean, math.log(std)])
        std = math.exp(log_std)
        constant = total + len(x) * 0.5 * math.log(2 * math.pi)
        log_likelihood = likelihood([mean, log_std]) - constant
    else:
        log_likelihood = -total - len(x) * (math.log(std) + 0.5 * math.log(2 * math.pi) + 0.5)
    return LogNormal(math.exp(mean + std**2 / 2), math.sqrt(math.expm1(std**2))), log_likelihood


def _uniform(x: np.ndarray, cut: np.ndarray, steps: int) -> tuple[Law, float]:
    low, high = float(x.min()), float(x.max())
    cut = cut[cut > low]
    if len(cut):
        longest = max(high, float(cut.max()))

        def slope(log_excess: float) -> float:
            bound = longest + math.exp(log_excess)
            return float((1 / (bound - cut)).sum()) - (len(x) + len(cut)) / (bound - low)

        bounds = [math.log((longest - low) * factor) for factor in (1e-12, 1e6)]
        if slope(bounds[0]) > 0:
            high = longest + math.exp(brentq(slope, *bounds, xtol=1e-9))
    law = Uniform(low, high)
    beyond = float(np.log(high - cut).sum()) if len(cut) else 0.0
    return law, beyond - (len(x) + len(cut)) * math.log(law.high - law.low)


def _weibull(x: np.ndarray, cut: np.ndarray, steps: int) -> tuple[Law, float]:
    samples = np.concatenate([x, cut])
    longest = float(samples.max())
    # Divided by the longest, so that no power can overflow.
    logs, complete = np.log(samples) - math.log(longest), np.log(x) - math.log(longest)

    def slope(shape: float) -> float:
        powers = np.exp(shape * logs)
        return float(powers @ logs / powers.sum() - complete.mean()) - 1 / shape

    shape = brentq(slope, *_WEIBULL_SHAPES, xtol=1e-12)
    scale = longest * float(np.exp(shape * logs).sum() / len(x)) ** (1 / shape)
    law = Weibull(scale * math.gamma(1 + 1 / shape), shape)
    logs = np.log(x / scale)
    return law, len(x) * (math.log(shape / scale) - 1) + (shape - 1) * float(logs.sum())


def _pareto(x: np.ndarray, cut: np.ndarray, steps: int) -> tuple[Law, float]:
    minimum = float(x.min())
    longer = float(np.log(np.maximum(cut, minimum) / minimum).sum())
    shape = 1 / (float(np.log(x / minimum).mean()) + longer / len(x))
    if shape <= 1:
        raise ValueError("a Pareto law without a mean")
    law = Pareto(minimum * shape / (shape - 1), shape)
    complete = len(x) * (math.log(shape) - math.log(minimum)) - (shape + 1) * float(
        np.log(x / minimum).sum()
    )
    return law, complete - shape * longer


def _maximum(likelihood: Callable[[Sequence[float]], float], start: Sequence[float]) -> list[float]:
    """Search for the arguments with the largest likelihood, by Nelder and Mead's simplex."""

    def cost(arguments: Sequence[float]) -> float:
        value = likelihood(arguments)
        return -value if math.isfinite(value) else math.inf

    options = {"xatol": 1e-7, "fatol": 1e-7, "maxiter": 1_000}
    return minimize(cost, start, method="Nelder-Mead", options=options).x.tolist()


_Estimate = Callable[[np.ndarray, np.ndarray, int], tuple[Law, float]]
#: The families by name: the law, its number of parameters, and its estimate with the
#: log-likelihood.
FAMILIES: dict[str, tuple[Any, int, _Estimate]] = {
    "exponential": (Exponential, 1, _exponential),
    "gamma": (Gamma, 2, _gamma),
    "lognormal": (LogNormal, 2, _lognormal),
    "uniform": (Uniform, 2, _uniform),
    "weibull": (Weibull, 2, _weibull),
    "pareto": (Pareto, 2, _pareto),
}
