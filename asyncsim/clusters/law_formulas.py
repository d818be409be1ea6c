"""The laws that a formula says: one value, zero or above, or a density of two numbers.

Means and standard deviations are exact, so that samples can be checked against them.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from asyncsim.clusters.law import Law
from asyncsim.clusters.law_text import write
from asyncsim.errors import InputError, require_nonnegative, require_positive

#: Coefficients of variation outside cannot be told from a constant, or have no usable sample mean.
_CV_RANGE = (1e-8, 1e3)
#: Weibull shapes outside lose their standard deviation to rounding, or have no usable sample mean.
_WEIBULL_SHAPE_RANGE = (0.05, 1e4)


@dataclass(frozen=True)
class Constant(Law):
    """Always the same duration: ``constant(value=0.005)``, or just the number."""

    value: float

    def __post_init__(self) -> None:
        self._check("value", require_nonnegative, "seconds")

    @property
    def mean(self) -> float:
        """Exact mean, seconds."""
        return self.value

    def _std(self) -> float:
        return 0.0

    def _sample(self, generator: np.random.Generator, size: Any) -> np.ndarray:
        return np.full(size, self.value)

    def _cdf(self, x: np.ndarray) -> np.ndarray:
        return (x >= self.value).astype(np.float64)


@dataclass(frozen=True)
class Exponential(Law):
    """Memoryless durations: ``exponential(mean=1)``."""

    mean: float

    def __post_init__(self) -> None:
        self._check("mean", require_positive, "seconds")

    def _std(self) -> float:
        return self.mean

    def _sample(self, generator: np.random.Generator, size: Any) -> np.ndarray:
        return generator.exponential(self.mean, size)

    def _cdf(self, x: np.ndarray) -> np.ndarray:
        return -np.expm1(-x / self.mean)


@dataclass(frozen=True)
class Gamma(Law):
    """Gamma durations with standard deviation ``cv * mean``: ``gamma(mean=1, cv=0.2)``."""

    mean: float
    cv: float

    def __post_init__(self) -> None:
        self._check("mean", require_positive, "seconds")
        self._check_range("cv", _CV_RANGE, "for no spread write constant(...)")

    @property
    def shape(self) -> float:
        """The shape parameter, ``1 / cv**2``: a sum of ``m`` such durations has ``m`` times this."""
        return self.cv**-2

    def _std(self) -> float:
        return self.cv * self.mean

    def _sample(self, generator: np.random.Generator, size: Any) -> np.ndarray:
        return generator.gamma(self.shape, self.mean / self.shape, size)

    def _cdf(self, x: np.ndarray) -> np.ndarray:
        from scipy.special import gammainc

        return gammainc(self.shape, x * (self.shape / self.mean))


@dataclass(frozen=True)
class LogNormal(Law):
    """Log-normal durations with standard deviation ``cv * mean``: ``lognormal(mean=1, cv=0.5)``."""

    mean: float
    cv: float

    def __post_init__(self) -> None:
        self._check("mean", require_positive, "seconds")
        self._check_range("cv", _CV_RANGE, "for no spread write constant(...)")

    @property
    def _log_mean_std(self) -> tuple[float, float]:
        variance = math.log1p(self.cv**2)
        return math.log(self.mean) - variance / 2, math.sqrt(variance)

    def _std(self) -> float:
        return self.cv * self.mean

    def _sample(self, generator: np.random.Generator, size: Any) -> np.ndarray:
        return generator.lognormal(*self._log_mean_std, size)

    def _cdf(self, x: np.ndarray) -> np.ndarray:
        from scipy.special import ndtr

        mean, std = self._log_mean_std
        with np.errstate(divide="ignore"):  # log(0) = -inf has probability zero, as it should
            return ndtr((np.log(x) - mean) / std)


@dataclass(frozen=True)
class Uniform(Law):
    """Durations spread evenly between two bounds: ``uniform(low=0.5, high=1.5)``."""

    low: float
    high: float

    def __post_init__(self) -> None:
        self._check("low", require_nonnegative, "seconds")
        self._check("high", require_positive, "seconds")
        if self.low >= self.high:
            raise InputError(
                f"uniform: high = {write(self.high)}: must be above low = {write(self.low)}; "
                "for no spread write constant(...)"
            )

    @property
    def mean(self) -> float:
        """Exact mean, seconds."""
        return self.low + (self.high - self.low) / 2

    def _std(self) -> float:
        return (self.high - self.low) / math.sqrt(12)

    def _sample(self, generator: np.random.Generator, size: Any) -> np.ndarray:
        return generator.uniform(self.low, self.high, size)

    def _cdf(self, x: np.ndarray) -> np.ndarray:
        return np.clip((x - self.low) / (self.high - self.low), 0.0, 1.0)


@dataclass(frozen=True)
class Weibull(Law):
    """Weibull durations: ``weibull(mean=1, shape=2)``; below shape 1 the tail is heavier than exponential."""

    mean: float
    shape: float

    def __post_init__(self) -> None:
        self._check("mean", require_positive, "seconds")
        self._check_range("shape", _WEIBULL_SHAPE_RANGE, "for no spread write constant(...)")

    @property
    def _scale(self) -> float:
        return self.mean / math.gamma(1 + 1 / self.shape)

    def _std(self) -> float:
        log_ratio = math.lgamma(1 + 2 / self.shape) - 2 * math.lgamma(1 + 1 / self.shape)
        return self.mean * math.sqrt(math.expm1(log_ratio))

    def _sample(self, generator: np.random.Generator, size: Any) -> np.ndarray:
        return self._scale * generator.weibull(self.shape, size)

    def _cdf(self, x: np.ndarray) -> np.ndarray:
        with np.errstate(over="ignore"):  # exp(-inf) = 0 is meant
            return -np.expm1(-((x / self._scale) ** self.shape))


@dataclass(frozen=True)
class Pareto(Law):
    """Classical Pareto durations, never below ``mean * (shape - 1) / shape``: ``pareto(mean=1, shape=2.5)``.

    The mean needs a shape above 1; up to shape 2 the variance is infinite and ``std`` is ``inf``.
    """

    mean: float
    shape: float

    def __post_init__(self) -> None:
        self._check("mean", require_positive, "seconds")
        self._check("shape", require_positive)
        if self.shape <= 1:
            raise InputError(f"pareto: shape = {write(self.shape)}: the mean is infinite; the shape must be above 1")

    @property
    def minimum(self) -> float:
        """The shortest possible duration, seconds."""
        return self.mean * ((self.shape - 1) / self.shape)

    def _std(self) -> float:
        if self.shape <= 2:
            return math.inf
        return self.mean / math.sqrt(self.shape) / math.sqrt(self.shape - 2)

    def _sample(self, generator: np.random.Generator, size: Any) -> np.ndarray:
        return self.minimum * (1 + generator.pareto(self.shape, size))

    def _cdf(self, x: np.ndarray) -> np.ndarray:
        return 1 - (self.minimum / np.maximum(x, self.minimum)) ** self.shape
