"""What a trace tells of the ways of messages: the law of the way up, and what messages take for their size."""

import math
from typing import Any

import numpy as np

from asyncsim.calibration.fitting import ERRORS, NO_SPREAD, without
from asyncsim.calibration.parts import Part, fitted, unfitted
from asyncsim.clusters.laws import Constant, Law, as_law
from asyncsim.errors import InputError
from asyncsim.traces.durations import Durations


def way_up(found: Durations, given: Any, down: Law, law: str) -> tuple[Part, np.ndarray, list[str]]:
    """Return the law of the way up, the durations of computing without it, and what is to be known of it."""
    if given is not None:
        taken = down if given == "down" else as_law("latency_up", given)
        together = found.compute if found.up is None else found.compute + found.up
        return unfitted("latency up", taken), without("latency_up", together, taken), []
    if found.up is not None:
        ways, notes = found.up, list[str]()
    elif found.round_trip is not None:
        ways, notes = _without_the_way_down(found.round_trip, down)
    else:
        return unfitted("latency up", Constant(0.0)), found.compute, []
    up = fitted("latency up", ways, law)
    computed = found.compute if found.up is not None else without("latency up", found.compute, up.fit.law)
    return up, computed, notes


def longer_with_parameters(found: Durations) -> float:
    """Return how much longer messages with parameters take, down and up together, than those without (s).

    Zero where that is not known, or chance.
    """
    if found.round_trip is None or found.up is None:
        return 0.0
    longer = float(found.round_trip.mean() - found.up.mean() - found.down.mean())
    error = math.sqrt(sum(float(ways.var()) / len(ways) for ways in (found.round_trip, found.up, found.down)))
    chance = max(ERRORS * error, NO_SPREAD * float(found.round_trip.mean()))
    return float(f"{longer:.9g}") if longer > chance else 0.0


def _without_the_way_down(round_trip: np.ndarray, down: Law) -> tuple[np.ndarray, list[str]]:
    """Return the durations of both ways without the way down; a constant and a note where they cannot be told apart."""
    try:
        return without("latency down", round_trip, down), []
    except InputError:  # what is left is less than the noise of what it is the difference of
        mean = max(0.0, float(round_trip.mean()) - down.mean)
        note = (
            f"the way up is taken for a constant, {mean:.2g} s: it is too short beside the way down for its law to be "
            "found; give latency_up"
        )
        return np.full(len(round_trip), mean), [note]
