"""The further figure of a study of gossip, beside the figures of every comparison.

The data come from ``python -m asyncsim.study gossip``, which draws this itself. To draw it again::

    python -m figures results/gossip              # in a clone
    asyncsim figures results/gossip     # installed

``consensus``: the replicas' distance from their mean against the topology's spectral gap, each
method at its best learning rate.
"""

from matplotlib.figure import Figure

from asyncsim.drawing.paper import drawer
from asyncsim.study.finished import Finished, figures

comparison = figures("comparison")
_DISTANCE = "consensus_distance"


def consensus(finished: Finished) -> Figure | None:
    """Draw the distances of the replicas against the spectral gap, a panel for each setting."""
    if _DISTANCE not in finished.summary:
        return None
    results = comparison.Comparison(finished, compared=["method"])
    results.measure, results.rising = _DISTANCE, False
    results.settings = [name for name in results.settings if name != "topology"]
    figure: Figure | None = comparison.along(results, results.best, "spectral_gap")
    return figure


draw = drawer("gossip", ("seed",), consensus=consensus)
