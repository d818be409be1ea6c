"""What theory says beside a measured value, in tables."""

from typing import NamedTuple

#: Commits of each worker from which on a trace is no short one, and by how many a longer one may lie beyond what holds
#: in the long run.
_LONG_TRACE, _FEW = 100, 3


class Known(NamedTuple):
    """What theory says of a quantity: its value if that is ``exact``, else the largest possible one."""

    value: float
    name: str
    exact: bool


def beside(known: Known | None, measured: float, digits: int, steps: float) -> tuple[str, str]:
    """Return a measured value and what theory says of it, as texts.

    Parameters
    ----------
    known : Known or None
        Nothing is said of None.
    measured : float
    digits : int
        After the point.
    steps : float
        Commits per worker of the trace: a bound of the long run may be exceeded by a few of them, and a short trace may
        lie further beyond, which is then said.
    """
    value = f"{measured:.{digits}f}"
    if known is None:
        return value, ""
    excused = steps < _LONG_TRACE or measured < known.value * (1 + _FEW / steps)
    exceeded = not known.exact and round(measured, digits) > round(known.value, digits) and excused
    why = f"{known.name}, which short traces exceed" if exceeded else known.name
    return value, f"{'' if known.exact else 'at most '}{known.value:.{digits}f} ({why})"
