"""Communication windows in proportion to the workers' speeds: dynamic local updates."""

import math
import numbers
from collections.abc import Sequence

from asyncsim.clusters.laws import Law, as_law, parse
from asyncsim.errors import InputError, require_count, require_list

#: Guards the floor against quotients such as 3 * (1 / 3).
_ROUND_OFF = 1e-9


def proportional_windows(compute: Sequence[Law | float | str] | str, window: int) -> tuple[int, ...]:
    """Return a window for each worker, in proportion to its speed, so that all communicate about as often.

    ::

        window of worker i = floor(window * speed of i / speed of the fastest), at least 1

    Parameters
    ----------
    compute : sequence of Law, or text
        Of the time of a local step, one per worker; the speed is the inverse of its mean.
    window : int
        Of the fastest workers.

    Returns
    -------
    tuple of int
        For ``Cluster(window=...)``.

    Raises
    ------
    InputError
        For a window that is no count, or laws that cannot be used.

    References
    ----------
    Liu et al. 2024, "Asynchronous local-SGD training for language modeling", arXiv 2401.09135 (DyLU).
    """
    require_count("window", window)
    laws = parse(compute) if isinstance(compute, str) else compute
    if isinstance(laws, Law | numbers.Real):
        raise InputError(f"compute = {compute!r}: must be a list of laws; with one for all, give one window")
    means = [as_law(f"compute[{i}]", law).mean for i, law in enumerate(require_list("compute", laws))]
    if not all(0 < mean < math.inf for mean in means):
        raise InputError(f"compute = {compute!r}: must be one law per worker, each with a mean above zero and finite")
    fastest = min(means)
    return tuple(max(1, math.floor(window * fastest / mean + _ROUND_OFF)) for mean in means)
