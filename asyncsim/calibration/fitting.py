"""Laws fitted to durations: the named families by maximum likelihood, the best of them by BIC.

Computations that a death cut short are censored observations: the whole duration would have been
longer. Their factor of the likelihood is the probability of a longer duration.

SciPy finds the laws; a uniform law ends at the longest duration. For ``n`` complete durations and a
family with ``p`` parameters the criterion is Schwarz's,
``p log n - 2 log L``, least for the best law. Uniform and Pareto laws end where the durations do,
so that for them it is a rule of thumb; mixtures are not tried.

References
----------
Schwarz 1978, Annals of Statistics 6, 461.

Kaplan and Meier 1958, Journal of the American Statistical Association 53, 457: the distribution of
censored durations.
"""

import functools
import math
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from scipy import stats
from scipy.optimize import fmin

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

    #: ``"compute"``, ``"compute of worker 3"``, ``"service"``, ``"latency up"``, ``"latency down of
    #: site 1"``, ...
    name: str
    durations: np.ndarray  #: seconds, in the order of time; of ``steps`` local steps each
    fit: Fit
    steps: int = 1
    censored: np.ndarray | None = None  #: whether each was cut short; None for no such duration
    workers: tuple[int, ...] | None = None  #: to which the law applies; None for all

    @property
    def quantity(self) -> str:
        """The name without the workers."""
        return self.name.partition(" of ")[0]

    @property
    def uncensored(self) -> np.ndarray:
        """The durations, with estimates for those that were cut short; see `uncensored`."""
        return uncensored(self.durations, self.censored)

    def resampled(self, generator: np.random.Generator) -> "Part":
        """Fit the family of the part's law to random stretches of its durations."""
        values, family = self.durations, type(self.fit.law).__name__.lower()
        law = family if family in (*KINDS, *FAMILIES) else "best"
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
    cdf = stats.ecdf(stats.CensoredData.right_censored(durations, censored)).cdf
    samples = np.count_nonzero(~censored)
    places = np.searchsorted(cdf.probabilities, (np.arange(samples) + 0.5) / samples)
    return cdf.quantiles[np.minimum(places, len(cdf.quantiles) - 1)]


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
    is_rare = kind == "exponential" and len(observed) < FEWEST  # deaths, whose times are no clock's
    if spread <= max(NO_SPREAD * mean, _NO_TIME) and not is_rare:
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


def _mean_up_to(longest: float, law: Law, points: np.ndarray) -> float:
    """Integrate the probability of longer durations up to the longest observable, by trapezoids."""
    edges = np.concatenate([[0.0], np.sort(points), [longest]])
    return float(np.trapezoid(1 - law.cdf(edges), edges))


def without(argument: str, values: np.ndarray, part: float) -> np.ndarray:
    """Subtract a constant part from durations."""
    rest = values - part
    if len(rest) and rest.min() < -1e-9 * max(1.0, part):
        raise InputError(
            f"{argument} = {part:g}: longer than the {values.min():.6g} s in which it must be "
            "contained; give less"
        )
    return np.maximum(rest, 0.0)


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


def _gamma(steps: int) -> Callable[..., Law]:
    return lambda shape, scale: Gamma(shape * scale / steps, math.sqrt(steps / shape))


def _family(
    name: str, complete: np.ndarray, cut: np.ndarray, steps: int
) -> tuple[Law, float, int] | None:
    """Return the law of a family with the largest likelihood, its logarithm, and the number of
    parameters.

    None if no law of the family fits. ``cut``: the durations that were cut short. A sum of several
    steps has a known law for gamma steps alone.
    """
    distribution, law_of = FAMILIES[name]
    fixed: dict[str, float] = {"floc": 0.0}
    if steps > 1:
        if name not in ("exponential", "gamma"):
            return None
        distribution, law_of = stats.gamma, _gamma(steps)
        fixed |= {"f0": steps} if name == "exponential" else {}
    if name == "pareto":
        fixed["fscale"] = shortest = float(complete.min())
        cut = cut[cut > shortest]  # shorter ones say nothing
    data = stats.CensoredData(complete, right=cut) if len(cut) else complete
    try:
        with np.errstate(all="ignore"), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of steps of the search outside a family
            if name == "uniform":
                low = float(complete.min())
                shape = (low, float(max(complete.max(), cut.max(initial=0.0))) - low)
            else:
                shape = distribution.fit(data, **fixed, optimizer=_search)
            frozen = distribution(*shape)
            likelihood = float(frozen.logpdf(complete).sum() + frozen.logsf(cut).sum())
        law = law_of(*shape[:-2], shape[-1]) if name != "uniform" else Uniform(shape[0], sum(shape))
    except (InputError, ValueError, ArithmeticError):
        return None
    if name == "exponential":
        law = Exponential(law.mean)
    parameters = 1 if name == "exponential" else 2
    return (law, likelihood, parameters) if math.isfinite(likelihood) else None


#: Searches more closely than SciPy's fits do by default.
_search = functools.partial(fmin, xtol=1e-7, ftol=1e-7, maxiter=1_000, maxfun=1_000)
#: The families by name: SciPy's distribution, and the law of its shape, if any, and its scale.
FAMILIES: dict[str, tuple[Any, Callable[..., Law]]] = {
    "exponential": (stats.expon, Exponential),
    "gamma": (stats.gamma, _gamma(1)),
    "lognormal": (
        stats.lognorm,
        lambda s, scale: LogNormal(scale * math.exp(s * s / 2), math.sqrt(math.expm1(s * s))),
    ),
    "uniform": (stats.uniform, Uniform),
    "weibull": (stats.weibull_min, lambda c, scale: Weibull(scale * math.gamma(1 + 1 / c), c)),
    "pareto": (stats.pareto, lambda b, scale: Pareto(scale * b / (b - 1), b)),
}
