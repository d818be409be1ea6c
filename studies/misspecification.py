"""What too high a learning rate does: momentum SGD on one worker, GEM and DOWNPOUR on several.

Figure 6 of the GEM paper, at a learning rate of 0.1 instead of 0.05, and a sweep of rates, because
methods should be compared at their best rates. A method that needs a single worker, as sgd does,
runs on such a cluster only, for the same number of worker steps.

At paper scale about 800,000 commits of MNIST's network: one to two hours on two cores.
"""

from asyncsim.base.console import note
from asyncsim.study.cell import Cell
from asyncsim.study.columns import titled
from asyncsim.study.comparison import Comparison, Further, Results, final_loss
from asyncsim.study.sweep import ComparisonConfig, preset

Config, SCALES = preset(
    small={
        "workers": (1, 5, 10, 20),
        "tune": (0.05, 0.1, 0.2),
        "methods": ("sgd", "gem", "downpour"),
        "seeds": 2,
        "steps": 100,
        "evaluate_every": None,
    },
    paper={
        "problem": "mnist",
        "tune": (0.1, 0.025, 0.05, 0.2),
        "steps": 938,
        "seeds": 3,
        "evaluate_every": 469,
    },
)


def alone(config: ComparisonConfig, cells: list[Cell]) -> list[Cell]:
    """Run methods of one worker on clusters of one worker, and the others on the others."""

    def belongs(cell: Cell, workers: int | None) -> bool:
        return (workers == 1) == (cell.cluster.workers == 1)

    placed = [
        cell._replace(methods=[m for m in cell.methods if belongs(cell, m.timing.workers)])
        for cell in cells
    ]
    asked, run = ({m.name for cell in of for m in cell.methods} for of in (cells, placed))
    for name in sorted(asked - run):
        note(f"{name} is left out: methods of one worker need --workers 1, others need more")
    return placed


def all_rates(table: Results) -> Further:
    """Print every rate: what too high a rate does is the question."""
    columns = [*table.keys, "learning_rate", "diverged", "final_loss", "train_loss"]
    return {}, [titled(table.rates, columns)]


run = Comparison("misspecification", measure=final_loss, prepare=alone, further=all_rates).run
