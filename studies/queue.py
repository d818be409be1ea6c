"""What serving the lowest rank first does to staleness and learning, at a saturated server.

The server of the GEM paper's program takes messages from a first-come queue. Before it had that
queue, it polled its sockets in the order of the ranks: the lowest were served first and the highest
starved, which the authors name as a known issue. Here both disciplines serve the same workers,
twice the number that saturates the server.

At paper scale about 230,000 commits of MNIST's network: twenty minutes on two cores.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pandas as pd

from asyncsim.study.columns import text_of
from asyncsim.study.config import Discipline, LawLike, MethodLike
from asyncsim.study.finished import Finished, outcomes, present, read
from asyncsim.study.outcome import leading
from asyncsim.study.sweep import Result, SweepConfig, run_cells, sweep
from asyncsim.traces.trace_summary import per_worker

#: File with a row per trace and worker, and its renamed columns.
_RANKS = "ranks.csv"
_COLUMNS = {"mean_staleness": "staleness_mean", "mean_wait": "wait_mean"}


@dataclass(frozen=True)
class Config(SweepConfig):
    """Options of the queue study."""

    varied: ClassVar = ("workers", "discipline")

    workers: tuple[int, ...] = (20,)
    """Workers of the clusters, one after the other."""
    # A sequence, unlike in the base class: each cell has one value.
    discipline: tuple[Discipline, ...] = ("fifo", "lowest_rank")  # type: ignore[assignment]
    """Order in which waiting workers are served: fifo, lowest_rank or random."""
    service: LawLike = "constant(0.1)"
    """Law of the time that the server is busy with a visit (s)."""
    methods: tuple[MethodLike, ...] = ("gem", "downpour")
    """Methods to compare: gem, downpour, adaptive_staleness, sgd, or your own as FILE.py:FUNCTION
    (see the README).
    """


SCALES = {
    "small": Config(),
    "paper": Config(scale="paper", problem="mnist", steps=938, evaluate_every=469),
}


def run(config: Config) -> Result:
    """Run the study; see `asyncsim.study.sweep.run_cells`."""
    config.check()
    with config.computing_device():
        grid = [
            {"discipline": discipline, "workers": n}
            for n in config.workers
            for discipline in config.discipline
        ]
        return run_cells("queue", config, sweep(config, grid), _conclude)


def ranks(finished: Finished) -> pd.DataFrame:
    """Tabulate each trace and worker: share of the commits, mean staleness and mean wait (s),
    without a warm-up.
    """
    tables = []
    for row in finished.summary.drop_duplicates("trace_file").to_dict("records"):
        table = per_worker(finished.trace(row["trace_file"]), warm_up=0).rename(columns=_COLUMNS)
        keys = {name: row[name] for name in ("discipline", "workers", "seed")}
        tables.append(table.assign(**keys)[[*keys, *table.columns]])
    return pd.concat(tables, ignore_index=True)


def _conclude(folder: Path, summary: pd.DataFrame) -> None:
    table = ranks(read(folder, "queue"))
    lowest = table["worker"] < table["workers"] / 2
    half = lowest.map({True: "lower half", False: "upper half"}).rename("ranks")
    # A worker that never commits has no mean.
    of_commits = table.assign(
        **{name: table[name].fillna(0) * table["share"] for name in _COLUMNS.values()}
    )
    of_commits["never_commit"] = table["share"] == 0
    sums = of_commits.groupby(["workers", "discipline", half], sort=False)[
        [*_COLUMNS.values(), "share", "never_commit"]
    ].sum()
    means = sums[list(_COLUMNS.values())].div(sums["share"], axis=0)
    printed = means.join(sums[["share", "never_commit"]] / table["seed"].nunique())
    text = (
        f"means over commits; never commit: workers without any\n{text_of(printed.reset_index())}\n"
    )
    present(
        folder,
        {_RANKS: table},
        text,
        outcomes(folder, summary, ("workers", "discipline", "method")),
        verdict=leading(summary, ("workers", "discipline", "method")),
    )
