"""What a law of random durations is: what it states about itself, how it is drawn and how it is checked."""

import math
import numbers
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from asyncsim.clusters.law_text import as_float, form_of, name_of, write
from asyncsim.errors import InputError, require_nonnegative


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
