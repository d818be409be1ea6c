"""How much GEM scales down the updates of each tensor of a network.

Figures 9 and 10 of the GEM paper: the median of pi over the elements of each tensor, over server
updates, with 8 and with 16 workers, at the rate of the paper's algorithm 1, 0.01. Its figure 7, the
losses of these runs, is drawn, too. The paper trains AlexNet on ImageNet; at paper scale CIFAR-10
stands in for ImageNet, with a network like AlexNet, the paper's effective batch of 1024 examples in
all workers together, and some twenty epochs. That takes a GPU; small scale is the perceptron of the
digits.
"""

from dataclasses import dataclass
from typing import Any

import pandas as pd

from asyncsim.base.console import tensor_label
from asyncsim.base.errors import InputError, require_count
from asyncsim.replays.check import check_method
from asyncsim.replays.run import Run
from asyncsim.study.cell import Cell
from asyncsim.study.columns import titled
from asyncsim.study.comparison import Comparison, Further, Results, final_loss
from asyncsim.study.config import StudyConfig
from asyncsim.study.sweep import ComparisonConfig, preset

TABLE = "tensors.csv"
#: Parts of a run in the printed table.
_PARTS = 4


@dataclass(frozen=True)
class Options(ComparisonConfig):
    """Options of the tensors study."""

    effective_batch: int | None = None
    """Examples of a gradient of each worker, all together: each has its share. none: batch_size for
    every worker.
    """

    def at(self, **values: Any) -> StudyConfig:
        """Return the options of a cell, whose workers divide the batch."""
        options = super().at(**values)
        if self.effective_batch is None:
            return options
        if self.effective_batch % options.workers:
            raise InputError(
                f"effective_batch = {self.effective_batch}: cannot be shared evenly by "
                f"{options.workers} workers"
            )
        return options.at(batch_size=self.effective_batch // options.workers)

    def check(self) -> None:
        """Check the options; see `StudyConfig.check`."""
        if self.diagnose_every == 0:
            raise InputError("diagnose_every = 0: this study needs the diagnostics; give 1 or more")
        if self.effective_batch is not None:
            require_count("effective_batch", self.effective_batch)
            if self.batch_size is not None:
                raise InputError(
                    f"effective_batch = {self.effective_batch}: give it or batch_size, not both"
                )
        super().check()


Config, SCALES = preset(
    Options,
    small={
        "workers": (8, 16),
        "methods": ("gem",),
        "learning_rate": 0.01,
        "seeds": 1,
        "diagnose_every": 2,
        "evaluate_every": None,
    },
    paper={
        "problem": "cifar10(network=alexnet)",
        "effective_batch": 1024,
        "steps": 1000,
        "diagnose_every": 5,
    },
)


def with_pi(config: Options, cells: list[Cell]) -> list[Cell]:
    """Raise InputError for a method without the diagnostic pi."""
    for method in cells[0].methods:
        if "pi" not in check_method(method, cells[0].problem.shapes):
            raise InputError(
                f"methods = {method.name!r}: has no diagnostic pi, which this study measures; "
                "choose gem"
            )
    return cells


def medians(run: Run) -> pd.DataFrame:
    """Return the median of pi of each tensor, in the network's order, at each diagnosed server
    update.
    """
    pi = run.diagnostics[
        (run.diagnostics["quantity"] == "pi") & (run.diagnostics["quantile"] == 0.5)
    ]
    # The unnamed median is over all parameters; for a plain vector it is the only one.
    named = pi[pi["tensor"] != ""] if (pi["tensor"] != "").any() else pi.drop_duplicates("commit")
    table = named[["commit", "tensor", "value"]].rename(columns={"value": "pi_median"})
    table.insert(1, "worker_step", table["commit"] / run.config["workers"])
    return table


def by_tensor(table: Results) -> Further:
    """Tabulate the medians; print each tensor's mean of them over each quarter of the runs."""
    labels = table.finished.summary.set_index("run_folder")[["workers", "method", "seed"]]
    rows = pd.concat(
        [medians(table.finished.run(name)).assign(**row) for name, row in labels.iterrows()]
    )
    ends = rows.groupby(["workers", "method"])["commit"].transform("max") + 1
    quarter = (_PARTS * rows["commit"] // ends).map(lambda part: f"{part + 1}/{_PARTS}")
    keys = [rows[name] for name in ("method", "tensor", "workers")]
    parts = rows.groupby([*keys, quarter.rename("part")], sort=False)["pi_median"].mean()
    wide = parts.unstack("part").reset_index()
    wide["tensor"] = wide["tensor"].map(tensor_label)
    return {TABLE: rows}, [f"median of pi, means over {_PARTS} parts of the run", titled(wide)]


run = Comparison(
    "tensors",
    measure=final_loss,
    columns=("median_pi",),
    prepare=with_pi,
    further=by_tensor,
).run
