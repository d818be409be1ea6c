"""Figures of "Ringmaster LMO" (Sadiev et al. 2026, arXiv 2605.18174), its small experiment, from
our own runs.

Eight workers, the i-th with compute times of sqrt(i) seconds and half-normal noise of 5 %; a
gradient whose delay reaches R is cancelled; R and the learning rate from the authors' grids. Their
task is a language model (NanoChat) and their numbers are not available: the figures show only ours,
on digits by default. To draw them::

    python -m figures ringmaster_lmo                            # in a clone
    asyncsim figures ringmaster_lmo --results results           # installed
"""

from asyncsim.base.console import summary_of
from asyncsim.drawing.paper import Drawing, Paper, Study
from asyncsim.study.finished import figures

#: The authors' limits of the delay and learning rates, and smaller rates for a smaller task.
LIMITS, RATES = (1, 2, 4, 8, 16), (0.0016, 0.008, 0.04, 0.2, 1, 5)
WORKERS = 8


def _options() -> str:
    """Return the options of the study: the authors' cluster and grids."""
    laws = [f"halfnormal({i**0.5:.4g}, {0.05 * i**0.5:.3g})" for i in range(1, WORKERS + 1)]
    limits = f"[{', '.join(f'cancel_stale({limit})' for limit in LIMITS)}]"
    return (
        f'--workers {WORKERS} --compute "[{", ".join(laws)}]" --service 0 '
        f'--methods "ringmaster_lmo(policy={limits})" "ringmaster(policy={limits})" '
        f"--tune {' '.join(f'{rate:g}' for rate in RATES)} --time-budget 100 "
        "--measure train_loss --evaluate-every 1 --seeds 2"
    )


comparison = figures("comparison")
#: The figures by their names.
FIGURES = {
    "loss": Drawing("lmo", "training loss against simulated time, by R", comparison.curves),
    "grid": Drawing("lmo", "training loss at the end by R and learning rate", comparison.rates),
}

PAPER = Paper(
    "ringmaster_lmo",
    summary_of(__doc__),
    {"lmo": Study("compare", "on two cores about 2 min", _options())},
    FIGURES,
)
draw, draw_study = PAPER.draw, PAPER.draw_study
