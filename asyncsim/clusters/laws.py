"""Laws of random durations: the base class, ten laws of thirty lines each, and their parser.

A law is one value: ``gamma(mean=1, cv=0.2)`` on the command line, ``Gamma(mean=1, cv=0.2)`` in
Python. Means and standard deviations are exact, so that samples can be checked against them.
"""

import functools
import math
import numbers
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, TypeAlias

import numpy as np

from asyncsim.base.calls import Call, called, read
from asyncsim.base.declared import Value, each
from asyncsim.base.errors import InputError, require_number, require_positive, shown
from asyncsim.base.units import Delay, Duration, delay

#: Of a longer law `brief` writes the family and the mean.
_LONGEST_LAW = 40
#: Fields that are no times: they have no unit.
_SHAPES = ("cv", "shape")


class Law(Value):
    """The law of a duration in seconds, zero or above.

    ``str(law)`` is the law as written on the command line; ``parse`` reads it back to an equal law.

    Attributes
    ----------
    mean : float
        Exact mean, seconds; always finite.
    std : float
        Exact standard deviation, seconds; ``inf`` where the law has none (Pareto with shape 2 or
        less).
    """

    kind: ClassVar[str] = "law"

    # Not at run time: a dataclass would take an inherited property for the default of a field
    # `mean`.
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
            Source of the randomness; a constant law draws nothing.
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

    @abstractmethod
    def _std(self) -> float: ...

    @abstractmethod
    def _sample(self, generator: np.random.Generator, size: Any) -> np.ndarray: ...

    @abstractmethod
    def _cdf(self, x: np.ndarray) -> np.ndarray: ...


#: Accepted as a law: a law, a number of seconds, or a text.
LawLike: TypeAlias = Law | float | str


def parse(text: str) -> Law | list[Law]:
    """Parse a law, or a list of laws, from its command-line form.

    Parameters
    ----------
    text : str
        ``"gamma(mean=1, cv=0.2)"``; a number of seconds for a constant, ``"0.005"``; or one law per
        worker, ``"[gamma(mean=1, cv=0.2)] * 90 + [constant(3)] * 10"``. Parameters may be given in
        order, without their names. Times may have a unit, ``"gamma(mean=40 ms, cv=0.2)"``: ns, us,
        ms, s, min or h. Nothing is evaluated but these forms.

    Returns
    -------
    Law or list of Law
    """
    value = read(text, "a law", "gamma(mean=1, cv=0.2) or 0.005", units=True)
    if isinstance(value, list):
        return [as_law(f"{shown(text)}: entry {i}", entry) for i, entry in enumerate(value)]
    if isinstance(value, Call):
        return called("law", replace(value, name=value.name.lower()), LAWS)
    if isinstance(value, bool) or value is None:
        raise InputError(f"{text}: not a law; write for example gamma(mean=1, cv=0.2) or 0.005")
    return Constant(value)


def as_law(argument: str, value: Any) -> Law:
    """Convert a law, a number of seconds or a text, also with a unit, to a law.

    Parameters
    ----------
    argument : str
        Name for error messages.
    """
    if isinstance(value, Law):
        return value
    is_text = isinstance(value, str | Call)
    if isinstance(value, bool) or not (is_text or isinstance(value, numbers.Real)):
        raise InputError(
            f"{argument} = {value!r}: must be one law, such as gamma(mean=1, cv=0.2), or a number "
            "of seconds"
        )
    try:
        # A real number of any type: Constant checks it and makes it a float.
        law = parse(str(value)) if is_text else Constant(value)
    except InputError as error:
        raise InputError(f"{argument}: {error}") from None
    if not isinstance(law, Law):
        raise InputError(
            f"{argument} = {shown(str(value))}: must be one law, not a list of {len(law)}"
        )
    return law


def lasting(argument: str, value: Any) -> Law:
    """Return a law as `as_law`; raise InputError unless its mean is above zero and finite."""
    law = as_law(argument, value)
    if not 0 < law.mean < math.inf:
        raise InputError(f"{argument} = {law}: must have a mean above zero and finite")
    return law


def _between(low: float, high: float, argument: str, value: Any) -> float:
    number = require_number(argument, value)
    if not low <= number <= high:
        raise InputError(
            f"{argument} = {value}: must be between {low:g} and {high:g}; for no spread write "
            "constant(...)"
        )
    return number


def _above_one(argument: str, value: Any) -> float:
    if (shape := require_positive(argument, value)) <= 1:
        raise InputError(f"{argument} = {value}: the mean is infinite; the shape must be above 1")
    return shape


#: A smaller coefficient of variation is a constant numerically; a larger one has no usable sample
#: mean.
CV = Annotated[float, functools.partial(_between, 1e-8, 1e3)]
#: A larger Weibull shape loses its standard deviation to rounding; a smaller one has no usable
#: sample mean.
WeibullShape = Annotated[float, functools.partial(_between, 0.05, 1e4)]
ParetoShape = Annotated[float, _above_one]


@dataclass(frozen=True)
class Constant(Law):
    """Always the same duration: ``constant(value=0.005)``, or just the number."""

    value: Delay

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

    mean: Duration

    def _std(self) -> float:
        return self.mean

    def _sample(self, generator: np.random.Generator, size: Any) -> np.ndarray:
        return generator.exponential(self.mean, size)

    def _cdf(self, x: np.ndarray) -> np.ndarray:
        return -np.expm1(-x / self.mean)


@dataclass(frozen=True)
class Gamma(Law):
    """Gamma durations with standard deviation ``cv * mean``: ``gamma(mean=1, cv=0.2)``."""

    mean: Duration
    cv: CV

    @property
    def shape(self) -> float:
        """The shape parameter, ``1 / cv**2``: a sum of ``m`` such durations has ``m`` times
        this.
        """
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

    mean: Duration
    cv: CV

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

    low: Delay
    high: Duration

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.low >= self.high:
            raise InputError(
                f"{self.subject}: high = {self.high}: must be above low = {self.low}; "
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
    """Weibull durations: ``weibull(mean=1, shape=2)``; below shape 1 the tail is heavier than
    exponential.
    """

    mean: Duration
    shape: WeibullShape

    @property
    def _scale(self) -> float:
        return self.mean / math.gamma(1 + 1 / self.shape)

    def _std(self) -> float:
        log_ratio = math.lgamma(1 + 2 / self.shape) - 2 * math.lgamma(1 + 1 / self.shape)
        return self.mean * math.sqrt(math.expm1(log_ratio))

    def _sample(self, generator: np.random.Generator, size: Any) -> np.ndarray:
        return self._scale * generator.weibull(self.shape, size)

    def _cdf(self, x: np.ndarray) -> np.ndarray:
        with np.errstate(over="ignore"):  # exp(-inf) = 0 is intended
            return -np.expm1(-((x / self._scale) ** self.shape))


@dataclass(frozen=True)
class Pareto(Law):
    """Classical Pareto durations, never below ``mean * (shape - 1) / shape``:
    ``pareto(mean=1, shape=2.5)``.

    The mean needs a shape above 1; up to shape 2 the variance is infinite and ``std`` is ``inf``.
    """

    mean: Duration
    shape: ParetoShape

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


@dataclass(frozen=True)
class HalfNormal(Law):
    """A constant plus the absolute value of a normal variable: ``halfnormal(low=1, scale=0.2)``.

    ``scale`` is the standard deviation of the normal variable, seconds.
    """

    low: Delay
    scale: Duration

    @property
    def mean(self) -> float:
        """Exact mean, seconds."""
        return self.low + self.scale * math.sqrt(2 / math.pi)

    def _std(self) -> float:
        return self.scale * math.sqrt(1 - 2 / math.pi)

    def _sample(self, generator: np.random.Generator, size: Any) -> np.ndarray:
        return self.low + self.scale * np.abs(generator.standard_normal(size))

    def _cdf(self, x: np.ndarray) -> np.ndarray:
        from scipy.special import erf

        return erf(np.maximum(x - self.low, 0.0) / (self.scale * math.sqrt(2)))


#: The squares of larger durations may overflow.
_SAFE_TO_SQUARE = 1e150
#: Largest number of samples that a representation lists.
_SHOWN_SAMPLES = 8


@dataclass(frozen=True)
class Empirical(Law):
    """One of the given durations, each as likely as the others:
    ``empirical(samples=[0.9, 1, 1.4])``.
    """

    samples: Annotated[Sequence[float], each(delay)]

    def __post_init__(self) -> None:
        super().__post_init__()
        if not math.isfinite(sum(self.samples)):
            raise InputError(
                f"{self.subject}: samples up to {max(self.samples):g}: too large; their sum must "
                "be finite"
            )

    def __repr__(self) -> str:
        """Show the samples; if they are many, their number, range and mean."""
        if len(self.samples) <= _SHOWN_SAMPLES:
            return f"Empirical(samples={self.samples})"
        lowest, highest = min(self.samples), max(self.samples)
        return (
            f"<Empirical: {len(self.samples):,} samples from {lowest:g} to {highest:g} s, mean "
            f"{self.mean:g} s>"
        )

    @functools.cached_property
    def _sorted(self) -> np.ndarray:
        return np.sort(self.samples)

    @property
    def mean(self) -> float:
        """Exact mean, seconds."""
        return math.fsum(self.samples) / len(self.samples)

    def _std(self) -> float:
        longest = float(self._sorted[-1])
        scale = longest if longest > _SAFE_TO_SQUARE else 1.0
        return float(np.std(self._sorted / scale)) * scale

    def _sample(self, generator: np.random.Generator, size: Any) -> np.ndarray:
        return self._sorted[generator.integers(len(self._sorted), size=size)]

    def _cdf(self, x: np.ndarray) -> np.ndarray:
        return np.searchsorted(self._sorted, x, side="right") / len(self._sorted)


@dataclass(frozen=True)
class Mixture(Law):
    """Each duration from one of several laws:
    ``mixture(laws=[gamma(1, 0.2), 9], weights=[0.9, 0.1])``.

    For example with stragglers. The weights are relative: only their ratios count.
    """

    laws: Annotated[Sequence[Any], each(as_law)]
    weights: Annotated[Sequence[float], each(require_positive)]

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.laws) != len(self.weights):
            raise InputError(
                f"{self.subject}: weights: {len(self.weights)} for {len(self.laws)} laws; give one "
                "per law"
            )

    @functools.cached_property
    def _shares(self) -> np.ndarray:
        weights = np.asarray(self.weights) / max(self.weights)  # the sum cannot overflow
        return weights / weights.sum()

    @property
    def mean(self) -> float:
        """Exact mean, seconds."""
        return float(self._shares @ [law.mean for law in self.laws])

    def _std(self) -> float:
        deviations = [math.hypot(law.std, law.mean - self.mean) for law in self.laws]
        return math.hypot(*(np.sqrt(self._shares) * deviations))  # no square can overflow

    def _sample(self, generator: np.random.Generator, size: Any) -> np.ndarray:
        choice = np.searchsorted(np.cumsum(self._shares)[:-1], generator.random(size), side="right")
        durations = np.empty(choice.shape)
        for i, law in enumerate(self.laws):
            chosen = choice == i
            durations[chosen] = law.sample(generator, int(np.count_nonzero(chosen)))
        return durations

    def _cdf(self, x: np.ndarray) -> np.ndarray:
        total = np.tensordot(self._shares, [law.cdf(x) for law in self.laws], axes=1)
        return np.minimum(total, 1.0)


#: The laws by their names on the command line.
LAWS: dict[str, type[Law]] = {
    law.__name__.lower(): law
    for law in (
        *(Constant, Exponential, Gamma, LogNormal, Uniform),
        *(Weibull, Pareto, HalfNormal, Empirical, Mixture),
    )
}


def scaled(law: Law, factor: float) -> Law:
    """Return a law with all durations multiplied by a factor above zero."""
    if isinstance(law, Empirical):
        return Empirical(tuple(factor * sample for sample in law.samples))
    if isinstance(law, Mixture):
        return Mixture(tuple(scaled(part, factor) for part in law.laws), law.weights)
    times = {name: value for name, value in vars(law).items() if name not in _SHAPES}
    return replace(law, **{name: factor * time for name, time in times.items()})  # type: ignore[type-var]  # laws are dataclasses


def brief(law: Law) -> str:
    """Write a law in a few words: in full, or if that is long by its family and its mean."""
    if isinstance(law, Constant):
        return f"{law.value:g} s"
    text = str(law)
    return (
        text
        if len(text) <= _LONGEST_LAW
        else f"{text.partition('(')[0]}(...) of mean {law.mean:.3g} s"
    )
