"""How much GEM scales down the updates of each tensor of a network.

Figures 9 and 10 of the GEM paper: the median of pi over the elements of each tensor, over server
updates, with 8 and with 16 workers, at the rate of the paper's algorithm 1, 0.01. Its figure 7, the
losses of these runs, is drawn, too. The paper trains AlexNet on ImageNet; at paper scale CIFAR-10
stands in for ImageNet, with a network like AlexNet, the paper's effective batch of 1024 examples in
all workers together, and some twenty epochs. That takes a GPU; small scale is the perceptron of the
digits.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from asyncsim.base.console import number_text, tensor_label
from asyncsim.base.errors import InputError, require_count
from asyncsim.replays.check import check_method
from asyncsim.replays.run import Run
from asyncsim.study.cell import Cell
from asyncsim.study.columns import titled
from asyncsim.study.config import MethodLike
from asyncsim.study.finished import present, read
from asyncsim.study.sweep import Result, SweepConfig, run_cells, sweep

TABLE = "tensors.csv"
#: Parts of a run in the printed table.
_PARTS = 4


@dataclass(frozen=True)
class Config(SweepConfig):
    """Options of the tensors study."""

    workers: tuple[int, ...] = (8, 16)
    """Workers of the clusters, one after the other."""
    methods: tuple[MethodLike, ...] = ("gem",)
    """Methods that have a pi: gem, or your own as FILE.py:FUNCTION (see the README)."""
    learning_rate: float = 0.01
    """Step size of methods that do not set their own."""
    seeds: int = 1
    """Number of seeds: 0, 1, ..."""
    diagnose_every: int = 2
    """Worker steps, and one commit, between two medians."""
    effective_batch: int | None = None
    """Examples of a gradient of each worker, all together: each has its share. none: batch_size for
    every worker.
    """

    def check(self) -> None:
        """Check the options; see `StudyOptions.check`."""
        super().check()
        if self.diagnose_every == 0:
            raise InputError("diagnose_every = 0: this study needs the diagnostics; give 1 or more")
        if self.effective_batch is None:
            return
        require_count("effective_batch", self.effective_batch)
        if self.batch_size is not None:
            raise InputError(
                f"effective_batch = {self.effective_batch}: give it or batch_size, not both"
            )
        for workers in self.workers:
            if self.effective_batch % workers:
                raise InputError(
                    f"effective_batch = {self.effective_batch}: cannot be shared evenly by "
                    f"{workers} workers"
                )


SCALES = {
    "small": Config(),
    "paper": Config(
        scale="paper",
        problem="cifar10(network=alexnet)",
        effective_batch=1024,
        steps=1000,
        diagnose_every=5,
    ),
}


def run(config: Config) -> Result:
    """Run the study; see `asyncsim.study.sweep.run_cells`."""
    config.check()
    grid: list[dict[str, Any]] = [{"workers": n} for n in config.workers]
    if config.effective_batch is not None:
        grid = [{"workers": n, "batch_size": config.effective_batch // n} for n in config.workers]
    with config.computing_device():
        cells = sweep(config, grid)
        _require_pi(cells[0])
        return run_cells("tensors", config, cells, _conclude)


def _require_pi(cell: Cell) -> None:
    params = cell.problem.shapes
    for method in cell.methods:
        if "pi" not in check_method(method, params):
            raise InputError(
                f"methods = {method.name!r}: has no diagnostic pi, which this study measures; "
                "choose gem"
            )


def medians(run: Run) -> pd.DataFrame:
    """Return the median of pi of each tensor, in the network's order, at each diagnosed server
    update.
    """
    pi = run.diagnostics[
        (run.diagnostics["quantity"] == "pi") & (run.diagnostics["quantile"] == 0.5)
    ]
    # The unnamed median is over all parameters; for a plain vector it is the only one.
    named = pi[pi["tensor"] != ""] if (pi["tensor"] != "").any() else pi.drop_duplicates("commit")
    if named.empty:
        raise InputError("no pi was recorded")
    table = named[["commit", "tensor", "value"]].rename(columns={"value": "pi_median"})
    table.insert(1, "worker_step", table["commit"] / run.config["workers"])
    return table


def report(table: pd.DataFrame) -> pd.DataFrame:
    """Tabulate each tensor's mean of the medians over each quarter of the runs."""
    ends = table.groupby(["workers", "method"])["commit"].transform("max") + 1
    quarter = (_PARTS * table["commit"] // ends).map(lambda part: f"{part + 1}/{_PARTS}")
    keys = [table[name] for name in ("method", "tensor", "workers")]
    wide = (
        table.groupby([*keys, quarter.rename("part")], sort=False)["pi_median"]
        .mean()
        .unstack("part")
    )
    printed = wide.reset_index()
    printed["tensor"] = printed["tensor"].map(tensor_label)
    return titled(printed)


def _verdict(table: pd.DataFrame) -> str:
    """Say which tensors GEM scales down most and least."""
    scales = table.groupby("tensor")["pi_median"].mean()
    names = tensor_label(scales.idxmin()), tensor_label(scales.idxmax())
    least, most = (number_text(value) for value in (scales.min(), scales.max()))
    return f"the median of pi is lowest for {names[0]}, {least}, and highest for {names[1]}, {most}"


def _conclude(folder: Path, summary: pd.DataFrame) -> None:
    (table,) = read(folder, "tensors").each_run(lambda run: [medians(run)])
    present(
        folder,
        {TABLE: table},
        f"median of pi, means over {_PARTS} parts of the run",
        report(table),
        verdict=_verdict(table),
    )
