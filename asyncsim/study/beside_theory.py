"""What theory says beside a measured value, in tables."""

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import pandas as pd

#: Commits of each worker from which on a trace is no short one: of 20 workers behind a barrier a bound that is all but
#: reached is exceeded by some per cent in hundreds of them.
_LONG_TRACE = 1000


class Known(NamedTuple):
    """What theory says of a quantity: its value if that is ``exact``, else the largest possible one."""

    value: float
    name: str
    exact: bool


def trace_means(traces: "pd.DataFrame", workers: int) -> "pd.Series":
    """Return the means over a cluster's traces of what a study's summary says of them, as `Trace.summary` names it.

    Beside that ``steps``, the commits per worker of a trace, and ``least`` and ``most``, the commits of a worker
    relative to the mean.
    """
    mean = traces.filter(regex="^trace\\.").mean().rename(lambda column: column.removeprefix("trace."))
    mean["steps"] = (mean["commits"] + mean["warm_up"]) / workers
    mean["least"], mean["most"] = workers * mean["share_min"], workers * mean["share_max"]
    return mean


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
        Commits per worker of the trace: a short one may lie beyond what bounds the long run, which is then said.
    """
    value = f"{measured:.{digits}f}"
    if known is None:
        return value, ""
    beyond = round(measured, digits) > round(known.value, digits)
    exceeded = not known.exact and beyond and steps < _LONG_TRACE
    why = f"{known.name}, which short traces exceed" if exceeded else known.name
    return value, f"{'' if known.exact else 'at most '}{known.value:.{digits}f} ({why})"
