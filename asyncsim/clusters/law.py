"""Laws of random durations: the base class, and the laws with a formula.

Means and standard deviations are exact, so that samples can be checked against them.
"""

import math
import numbers
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from asyncsim.calls import as_float, form_of, name_of, write
from asyncsim.errors import InputError, require_nonnegative, require_positive


class Law(ABC):
    """The law of a duration in seconds, zero or above.

    ``str(law)`` is the law as written on the command line; ``parse`` reads it back to an equal law.

    Attributes
    ----------
    mean : float
        Exact mean, seconds; always finite.
    std : float
        Exact standard deviation, seconds; ``inf`` where the law has none (Pareto with shape 2 or less).
    """

    # Not at run time: a dataclass would take an inherited property for the default of a field `mean`.
    if TYPE_CHECKING:

        @property
        def mean(self) -> float:
            """Exact mean, seconds."""

    @property
    def std(self) -> float:
        """Exact standard deviation, seconds; ``inf`` where there is none."""
        return self._std()

    def sample(self, generator: np.random.Generator, size: int | tuple[int, ...]) -> np.ndarray:
        """Draw independent durations.

        Parameters
        ----------
        generator : numpy.random.Generator
            Where the randomness comes from; a constant law takes nothing from it.
        size : int or tuple of int
            Shape of the result.

        Returns
        -------
        Float64[ndarray, "size"]
            Seconds, zero or above.
        """
        return self._sample(generator, size)

    def cdf(self, x: Any) -> Any:
        """Return the probability of a duration of at most ``x`` seconds, in the shape of ``x``."""
        x = np.asarray(x, np.float64)
        return np.where(x < 0, 0.0, self._cdf(np.maximum(x, 0.0)))[()]

    def __str__(self) -> str:
        return write(self)

    @abstractmethod
    def _std(self) -> float: ...

    @abstractmethod
    def _sample(self, generator: np.random.Generator, size: Any) -> np.ndarray: ...

    @abstractmethod
    def _cdf(self, x: np.ndarray) -> np.ndarray: ...

    def _check(self, parameter: str, require: Any, unit: str = "") -> None:
        """Store a checked parameter as a float."""
        value = getattr(self, parameter)
        object.__setattr__(self, parameter, self._number(parameter, value, require, unit))

    def _check_range(self, parameter: str, limits: tuple[float, float], remedy: str) -> None:
        self._check(parameter, require_nonnegative)
        value = getattr(self, parameter)
        if not limits[0] <= value <= limits[1]:
            raise InputError(
                f"{name_of(type(self))}: {parameter} = {write(value)}: must be between {limits[0]:g} and "
                f"{limits[1]:g}; {remedy}"
            )

    def _number(self, parameter: str, value: Any, require: Any, unit: str = "") -> float:
        argument = f"{name_of(type(self))}: {parameter}"
        if isinstance(value, numbers.Real) and not math.isfinite(as_float(value)):
            raise InputError(f"{argument} = {write(value)}: must be a finite number")
        return require(argument, value, unit)

    def _sequence(self, parameter: str, value: Any) -> list:
        kind = type(self)
        if isinstance(value, str | bytes) or not isinstance(value, Iterable) or getattr(value, "ndim", 1) == 0:
            raise InputError(f"{name_of(kind)}: {parameter} = {value!r}: must be a list; write {form_of(kind)}")
        entries = value.tolist() if isinstance(value, np.ndarray) else list(value)
        if not entries:
            raise InputError(f"{name_of(kind)}: {parameter} = []: must hold at least one entry")
        return entries


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
