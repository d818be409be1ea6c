"""Durations of one kind and the law fitted to them."""

from typing import Any, NamedTuple

import numpy as np

from asyncsim.calibration.fitting import Fit, fit
from asyncsim.clusters.cluster_text import brief
from asyncsim.clusters.laws import Law
from asyncsim.errors import InputError

#: A law is not fitted to fewer durations than these.
FEWEST = 20


class Part(NamedTuple):
    """Durations and the law fitted to them.

    Attributes
    ----------
    name : str
        ``"compute"``, ``"compute of worker 3"``, ``"service"``, ``"latency up"`` or ``"latency down"``.
    durations : Float64[ndarray, "samples"]
        Seconds, in the order of time; of ``steps`` local steps each.
    fit : Fit
    steps : int
    """

    name: str
    durations: np.ndarray
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
    """Return durations with the law fitted to them; of a named family, or as `calibrate` chooses for ``law``.

    Raises
    ------
    InputError
        They are too few.
    """
    if len(values) < FEWEST:
        raise InputError(
            f"trace: {len(values)} durations for the law of {name} after the warm-up; record at least {FEWEST}, and "
            "some hundred for a law that can be relied on"
        )
    return Part(name, values, fit(values, law, steps), steps)


def unfitted(name: str, law: Law) -> Part:
    """Return a law that no durations tell."""
    return Part(name, np.zeros(0), Fit(law, 0.0, 0, 0.0))
