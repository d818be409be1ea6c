"""Which method is best on a cluster: any methods side by side, by the time or the gradients they need.

Every seed has one trace for each timing that some method needs, with the same random numbers. Prints a table sorted by
the measure of your choice, with what each method sends and throws away; writes traces, runs, two tables and a figure.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from asyncsim.clusters.cluster_text import describe
from asyncsim.errors import InputError, require_choice, require_positive
from asyncsim.files import write_csv
from asyncsim.study.config import MethodLike, StudyConfig
from asyncsim.study.finished import figures, read
from asyncsim.study.sweep import Result, run_cells, sweep
from asyncsim.study.target import Target, until_target
from asyncsim.wording import note, table_text

if TYPE_CHECKING:
    import pandas as pd

    from asyncsim.problems import Problem
    from asyncsim.runs.run import Run
    from asyncsim.study.cell import Cell
    from asyncsim.traces.trace import Trace

#: The measures of every problem that has them; a problem may have others of its own.
MEASURES = ("time_to_target", "gradients_to_target", "train_loss", "test_loss", "final_loss", "test_accuracy")
#: Those of every run, whatever the problem evaluates.
_ALWAYS = ("time_to_target", "gradients_to_target", "final_loss")
#: The table of each method at its best learning rate, beside the summary of all runs.
TABLE = "comparison.csv"


@dataclass(frozen=True)
class Config(StudyConfig):
    """Options of the comparison."""

    workers: int = 20
    """Workers of the cluster."""
    methods: tuple[MethodLike, ...] = ("sgd", "downpour", "adaptive_staleness", "gem")
    """Methods to compare, or your own as FILE.py:FUNCTION (see the README)."""
    # None leaves the rate to each method.
    learning_rate: float | None = None  # type: ignore[assignment]
    """Step size of a gradient, for all methods. None: each method's own default."""
    tune: tuple[float, ...] = ()
    """Learning rates to try for every method; the table shows each method at its best one."""
    target: float = 0.3
    """Loss that is to be reached, or accuracy."""
    target_of: str = "train_loss"
    """What the target is of: train_loss or test_loss, reached from above, or train_accuracy or test_accuracy, from
    below, if the problem has it."""
    measure: str = "time_to_target"
    """What the table is sorted by, and the best learning rate chosen by: time_to_target, gradients_to_target,
    final_loss (of minibatches), or train_ or test_ and what the problem evaluates: test_accuracy, say."""
    best: Literal["least", "most"] | None = None
    """Which values of the measure are best. None: the most of accuracies, the least of losses, times and counts."""
    evaluate_every: int | None = 5
    """Worker steps between evaluations on all data, between which the time to the target is interpolated, linearly in
    the logarithm of the loss."""

    @property
    def goal(self) -> Target:
        """What is to be reached."""
        return Target(self.target, self.target_of)

    def check(self) -> None:
        """Check the options; see `StudyOptions.check`."""
        super().check()
        self.goal.check()
        for rate in self.tune:
            require_positive("tune", rate)
        if len(set(self.tune)) < len(self.tune):
            raise InputError(f"tune = {self.tune}: holds a rate twice; give each once")


def run(config: Config) -> Result:
    """Run the comparison; see `asyncsim.study.sweep.run_cells`."""
    config.check()
    if config.tune and config.learning_rate is not None:
        note("learning_rate changes nothing beside tune")
    rates: list[dict[str, float]] = [{"learning_rate": rate} for rate in config.tune] or [{}]
    with config.computing_device():
        cells = sweep(config, rates)
        _check_measure(config, cells[0].problem)
        config.goal.check_of(cells[0].problem)

        def conclude(folder: Path, summary: "pd.DataFrame") -> None:
            table = results_table(config, cells[0], folder)
            write_csv(folder / TABLE, table)
            figures("compare").draw(folder)
            print(report(config, cells[0], table))
            _say_at_the_edge(summary, table)

        return run_cells("compare", config, cells, conclude)


def results_table(config: Config, cell: "Cell", folder: Path) -> "pd.DataFrame":
    """Return a row per method at its best learning rate, the best method first.

    Columns: ``method``, ``learning_rate``, ``seeds``, ``diverged``, ``reached`` (seeds that met the target), the
    measures (those to the target are infinite if a seed did not meet it, the others means over the seeds that finished;
    those of the problem's own last), ``simulated_seconds`` of these runs, and means over the method's traces:
    ``staleness_mean``, ``discarded`` (share of the computations whose work was thrown away), ``messages`` and
    ``gigabytes`` (both ways; a vector of parameters each, up as much of it as the method's ``message_size``).
    """
    import pandas as pd

    from asyncsim.problems.problem import measures

    names = [*MEASURES, *sorted(measures(cell.problem).difference(MEASURES))]
    finished = read(folder, "compare")
    summary = finished.summary
    if "method.learning_rate" not in summary:  # all are methods of one's own, with other hyper-parameters
        summary = summary.assign(**{"method.learning_rate": float("nan")})
    vector = config.vector_bytes(cell.problem)
    sizes = {method.name: method.timing.message_size or 1.0 for method in cell.methods}
    rows = []
    for (method, rate), group in summary.groupby(["method", "method.learning_rate"], sort=False, dropna=False):
        traces = {name: finished.trace(name) for name in group["trace_file"]}
        seeds = [(finished.run(row.run_folder), traces[row.trace_file]) for row in group.itertuples()]
        ended = group[group["status"] == "finished"]
        costs = pd.DataFrame([_costs(trace, vector, sizes[method]) for _, trace in seeds]).mean()
        rows.append(
            {
                "method": method,
                "learning_rate": rate,
                "seeds": len(group),
                "diverged": len(group) - len(ended),
                **_until_target(seeds, config.goal),
                **{name: ended[name].mean() for name in names if name in ended},
                "simulated_seconds": ended["simulated_seconds"].mean(),
                **costs,
            }
        )
    table = pd.DataFrame(rows)
    # By seeds that diverged first: the means of the others would flatter a method. Where the measures are the same, as
    # those of rates with which the target was never met, by a loss that is shown.
    least = _best(config) == "least"
    then = "train_loss" if "train_loss" in table else "final_loss"
    order = {"diverged": True, then: True, config.measure: least}
    by = ["diverged", config.measure, *({then} - {config.measure})]
    table = table.sort_values(by, ascending=[order[name] for name in by], na_position="last", kind="stable")
    return table.drop_duplicates("method").reset_index(drop=True)


def _check_measure(config: Config, problem: "Problem") -> None:
    """Raise InputError if runs of the problem have no such measure, or nobody says which values of it are best."""
    from asyncsim.problems.problem import measures

    found = {*_ALWAYS, *measures(problem)}
    known = [name for name in MEASURES if name in found]
    require_choice("measure", config.measure, [*known, *sorted(found.difference(known))])
    if config.best == "most" and config.measure in MEASURES[:2]:
        raise InputError(f"best = 'most': nobody wants the most of {config.measure}; leave it out")
    if _best(config) is None:
        raise InputError(
            f"measure = {config.measure!r}: is the least of it best, or the most? say so with best = 'least' or 'most'"
        )


def _best(config: Config) -> str | None:
    """Return which values of the measure are best; None of a measure that has to be told."""
    if config.best is not None or config.measure in _ALWAYS:
        return config.best or "least"
    kind = config.measure.partition("_")[2]
    return {"loss": "least", "accuracy": "most"}.get(kind)


def report(config: Config, cell: "Cell", table: "pd.DataFrame") -> str:
    """Return what the study prints: beside losses and the test accuracy those measures for which there is room."""
    from asyncsim.study.cell import timings
    from asyncsim.study.outcome import ROOM, own_measures

    measured = [name for name in table if name.startswith(("final_", "train_", "test_"))]
    wanted = {"train_loss", "test_loss", "test_accuracy", *own_measures(table)[:ROOM], config.measure}
    shown = table.drop(columns=["seeds", *(name for name in measured if name not in wanted)])
    titles = {
        **{name: name.replace("_", " ") for name in measured},
        "time_to_target": "time (s)",
        "gradients_to_target": "gradients",
        "final_loss": "minibatch loss",
        "test_accuracy": "accuracy",
        "staleness_mean": "staleness",
        "simulated_seconds": "in all (s)",
    }
    shown = shown.rename(columns=titles)
    for name in ("reached", "diverged"):
        shown[name] = [f"{count} of {seeds}" for count, seeds in zip(table[name], table["seeds"], strict=True)]
    text = table_text(shown)
    direction = "" if config.best is None else f", the {config.best} first"
    tuned = ", each at the best of its learning rates" if config.tune else ""
    clusters = timings(cell.cluster, cell.methods)
    whose = {cluster: f"{', '.join(names)}: " if len(clusters) > 1 else "" for cluster, names in clusters.items()}
    described = "\n".join(f"{whose[cluster]}{describe(cluster)}" for cluster in clusters)
    return (
        f"{described}\n{cell.problem.name}; time and gradients until {config.goal} is "
        f"reached; sorted by {titles[config.measure]}{direction}{tuned}\n{text}"
    )


def _say_at_the_edge(summary: "pd.DataFrame", table: "pd.DataFrame") -> None:
    """Say aloud which methods are best at the least or the largest rate of several: others may be better."""
    at_edge: dict[tuple[str, float], list[str]] = {}
    for row in table.dropna(subset="learning_rate").itertuples():
        tried = sorted(summary.loc[summary["method"] == row.method, "method.learning_rate"].dropna().unique())
        if len(tried) > 2 and row.learning_rate in (tried[0], tried[-1]):
            which = "least" if row.learning_rate == tried[0] else "largest"
            at_edge.setdefault((which, float(row.learning_rate)), []).append(str(row.method))
    for (which, rate), names in at_edge.items():
        note(f"{', '.join(names)}: best at the {which} rate of --tune, {rate:g}; one beyond it may be better")


def _until_target(seeds: "list[tuple[Run, Trace]]", target: Target) -> dict[str, float]:
    """Return how many seeds met the target, and the mean time (s) and gradients computed until then.

    The time is read between evaluations; thrown-away gradients count. Infinite if a seed never met it.
    """
    import numpy as np

    times, gradients = [], []
    for run, trace in seeds:
        time = target.time(run.evaluations)
        computed = int(trace.frame.loc[trace.frame["commit_time"] <= time, "local_steps"].sum())
        times.append(time)
        gradients.append(float(computed) if np.isfinite(time) else np.inf)
    return {**until_target(times), "gradients_to_target": float(np.mean(gradients))}


def _costs(trace: "Trace", vector: float, message_size: float) -> dict[str, float]:
    """Return what one trace's visits cost; every message is answered by a read, of a vector of so many bytes."""
    outcome = trace.frame["outcome"]
    thrown_away = int(outcome.isin(["discarded", "cancelled"]).sum())
    sent = int((outcome != "cancelled").sum())
    return {
        "staleness_mean": trace.summary()["staleness_mean"],
        "discarded": thrown_away / len(trace),
        "messages": 2 * sent,
        "gigabytes": sent * (1 + message_size) * vector / 1e9,
    }
