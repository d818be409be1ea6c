"""All laws of random durations, and how they are read.

A law is one value: ``gamma(mean=1, cv=0.2)`` on the command line, ``Gamma(mean=1, cv=0.2)`` in Python. Here are the
laws made of samples or of other laws; those with a formula are in `asyncsim.clusters.law`.
"""

import functools
import math
import numbers
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np

from asyncsim.calls import Call, as_float, bind, form_of, name_of, not_a, read, write
from asyncsim.clusters.law import Constant, Exponential, Gamma, Law, LogNormal, Pareto, Uniform, Weibull
from asyncsim.errors import InputError, choices_like, require_nonnegative, require_positive, shown

#: What is read as a law: itself, a number of seconds, or a text.
LawLike: TypeAlias = Law | float | str
#: The squares of larger durations may overflow.
_SAFE_TO_SQUARE = 1e150
#: Samples that are shown, each of them.
_SHOWN_SAMPLES = 8


@dataclass(frozen=True)
class Empirical(Law):
    """One of the given durations, each as likely as the others: ``empirical(samples=[0.9, 1, 1.4])``."""

    samples: Sequence[float]

    def __post_init__(self) -> None:
        samples = self._sequence("samples", self.samples)
        checked = (self._number(f"samples[{i}]", x, require_nonnegative, "seconds") for i, x in enumerate(samples))
        object.__setattr__(self, "samples", tuple(checked))
        if not math.isfinite(sum(self.samples)):
            raise InputError(f"empirical: samples up to {max(self.samples):g}: too large; their sum must be finite")

    def __repr__(self) -> str:
        """Show the samples; many, as `asyncsim.calibrate` finds them, by their number, range and mean."""
        if len(self.samples) <= _SHOWN_SAMPLES:
            return f"Empirical(samples={self.samples})"
        least, most = min(self.samples), max(self.samples)
        return f"<Empirical: {len(self.samples):,} samples from {least:g} to {most:g} s, mean {self.mean:g} s>"

    @functools.cached_property
    def _sorted(self) -> np.ndarray:
        return np.sort(self.samples)

    @property
    def mean(self) -> float:
        """Exact mean, seconds."""
        return math.fsum(self.samples) / len(self.samples)

    def _std(self) -> float:
        most = float(self._sorted[-1])
        return float(np.std(self._sorted / most)) * most if most > _SAFE_TO_SQUARE else float(np.std(self._sorted))

    def _sample(self, generator: np.random.Generator, size: Any) -> np.ndarray:
        return self._sorted[generator.integers(len(self._sorted), size=size)]

    def _cdf(self, x: np.ndarray) -> np.ndarray:
        return np.searchsorted(self._sorted, x, side="right") / len(self._sorted)


@dataclass(frozen=True)
class Mixture(Law):
    """Each duration from one of several laws: ``mixture(laws=[gamma(1, 0.2), 9], weights=[0.9, 0.1])``.

    For stragglers, say. The weights are relative: only their ratios count.
    """

    laws: Sequence[Any]
    weights: Sequence[float]

    def __post_init__(self) -> None:
        laws = self._sequence("laws", self.laws)
        weights = self._sequence("weights", self.weights)
        if len(laws) != len(weights):
            raise InputError(
                f"mixture: weights = {write(weights)}: {len(weights)} for {len(laws)} laws; give one per law"
            )
        object.__setattr__(self, "laws", tuple(as_law(f"mixture: laws[{i}]", x) for i, x in enumerate(laws)))
        checked = (self._number(f"weights[{i}]", x, require_positive) for i, x in enumerate(weights))
        object.__setattr__(self, "weights", tuple(checked))

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
        which = np.searchsorted(np.cumsum(self._shares)[:-1], generator.random(size), side="right")
        durations = np.empty(which.shape)
        for i, law in enumerate(self.laws):
            mine = which == i
            durations[mine] = law.sample(generator, int(np.count_nonzero(mine)))
        return durations

    def _cdf(self, x: np.ndarray) -> np.ndarray:
        total = np.tensordot(self._shares, [law.cdf(x) for law in self.laws], axes=1)
        return np.minimum(total, 1.0)


#: The laws by the name they have on the command line.
LAWS: dict[str, type[Law]] = {
    "constant": Constant,
    "exponential": Exponential,
    "gamma": Gamma,
    "lognormal": LogNormal,
    "uniform": Uniform,
    "weibull": Weibull,
    "pareto": Pareto,
    "empirical": Empirical,
    "mixture": Mixture,
}


def parse(text: str) -> Law | list[Law]:
    """Read a law, or a list of laws, from its command-line form.

    Parameters
    ----------
    text : str
        ``"gamma(mean=1, cv=0.2)"``; a number of seconds for a constant, ``"0.005"``; or one law per
        worker, ``"[gamma(mean=1, cv=0.2)] * 90 + [constant(3)] * 10"``. Parameters may be given in
        order, without their names. Nothing is evaluated but these forms.

    Returns
    -------
    Law or list of Law

    Raises
    ------
    InputError
        Naming the law, the parameter, the value and what to write instead.
    """
    value = _built(read(text, "a law", "gamma(mean=1, cv=0.2) or 0.005"))
    if isinstance(value, list):
        told = shown(text)
        return [as_law(f"{told}: entry {i}", entry) for i, entry in enumerate(value)]
    return value if isinstance(value, Law) else Constant(value)


def _built(value: Any) -> Any:
    """Return the law of a call, the number of a number, and lists of these."""
    if isinstance(value, list):
        return [_built(entry) for entry in value]
    if isinstance(value, int | float) and not isinstance(value, bool):
        return as_float(value)
    if not isinstance(value, Call):
        raise not_a("a law", repr(value))
    if value.name.lower() not in LAWS:
        raise InputError(f"{shown(value.name)}: unknown law; {choices_like(value.name, LAWS)}")
    kind = LAWS[value.name.lower()]
    if not value.brackets:
        raise InputError(f"{value.name}: needs its parameters; write {form_of(kind)}")
    return kind(**{name: _built(one) for name, one in bind(value, kind, name_of(kind)).items()})


def as_law(argument: str, value: Any) -> Law:
    """Return one law from a law, a number of seconds or a text.

    Parameters
    ----------
    argument : str
        What the law is for; begins the message of an error.
    value : Law, float or str
    """
    if isinstance(value, Law):
        return value
    if isinstance(value, bool) or not isinstance(value, (str, numbers.Real)):
        raise InputError(
            f"{argument} = {value!r}: must be one law, such as gamma(mean=1, cv=0.2), or a number of seconds"
        )
    try:
        # A real number of any type: Constant checks it and makes it a float.
        law = parse(value) if isinstance(value, str) else Constant(value)  # type: ignore[arg-type]
    except InputError as error:
        raise InputError(f"{argument}: {error}") from None
    if not isinstance(law, Law):
        raise InputError(f"{argument} = {shown(str(value))}: must be one law, not a list of {len(law)}")
    return law


def scaled(law: Law, factor: float) -> Law:
    """Return a law with all durations multiplied by a factor above zero."""
    match law:
        case Constant(value):
            return Constant(factor * value)
        case Uniform(low, high):
            return Uniform(factor * low, factor * high)
        case Empirical(samples):
            return Empirical(tuple(factor * sample for sample in samples))
        case Mixture(laws, weights):
            return Mixture(tuple(scaled(one, factor) for one in laws), weights)
        case Exponential() | Gamma() | LogNormal() | Weibull() | Pareto():
            return replace(law, mean=factor * law.mean)
    raise AssertionError(f"unknown law {law!r}")
