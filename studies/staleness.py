"""What staleness does to asynchronous SGD: methods side by side on one trace per seed.

One cluster is simulated for each seed and every method replays its trace with real gradients. Prints the staleness
measured and in theory, and how each method ended; writes traces, runs, a summary and figures.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from asyncsim import results
from asyncsim.study import load_file, shipped
from asyncsim.study_config import StudyConfig

if TYPE_CHECKING:
    import pandas as pd

    from asyncsim.cluster import Cluster
    from asyncsim.expectations import QueueTheory, StalenessTheory


@dataclass(frozen=True)
class Config(StudyConfig):
    """Options of the staleness study."""


class Result(NamedTuple):
    """What the study returns.

    Attributes
    ----------
    folder : Path
        Where everything was written.
    summary : pandas.DataFrame
        One row per method and seed; also in ``summary.csv``.
    """

    folder: Path
    summary: "pd.DataFrame"


def run(config: Config) -> Result:
    """Run the study.

    Raises
    ------
    InputError
        An option that cannot be used, or a folder or disk that cannot be written.
    """
    config.check()
    from asyncsim.comparison import compare

    with config.computing_device():
        methods, problem = config.make_methods(), config.make_problem()
        cluster = config.make_cluster(message_bytes=problem.parameter_count * config.bytes_per_parameter)
        with results.new_folder(config.out, "staleness") as folder:
            results.write_json(folder / "config.json", {"study": "staleness", **config.to_dict()})
            summary = compare(config, cluster, methods, problem, folder)
            figures = load_file("asyncsim.figures.staleness", shipped("figures") / "staleness.py").draw(folder)
    print(report(cluster, problem.name, summary))
    print(f"\nwrote {folder}: config.json, traces, runs, summary.csv, {', '.join(path.name for path in figures)}")
    return Result(folder, summary)


def report(cluster: "Cluster", problem: str, summary: "pd.DataFrame") -> str:
    """Return the two tables that the study prints: the cluster against theory, and the methods side by side."""
    alike = summary[~summary["own_trace"]]
    lines = []
    if len(alike):
        traces = alike.drop_duplicates("trace_file")
        lines = [f"{_cluster_line(cluster)}, {len(traces)} trace{'s' if len(traces) > 1 else ''}"]
        lines += [
            f"  {name:<24} {measured:<24} {theory}" for name, measured, theory in _against_theory(cluster, traces)
        ]
        lines.append("")
    seeds = summary["seed"].nunique()
    lines.append(f"{problem}, {f'mean over {seeds} seeds' if seeds > 1 else 'one seed'}")
    return "\n".join([*lines, _method_table(summary)])


def _cluster_line(cluster: "Cluster") -> str:
    laws = f"compute {cluster.compute}" if not isinstance(cluster.compute, tuple) else "compute one law per worker"
    return f"{cluster.workers} workers, {cluster.protocol}, {laws}, service {cluster.service}"


def _against_theory(cluster: "Cluster", traces: "pd.DataFrame") -> list[tuple[str, str, str]]:
    """Return name, measured value and theory of each quantity of the traces."""
    from asyncsim.expectations import queue_theory, staleness_theory, think_time
    from asyncsim.theory import saturation_bound

    mean = traces.filter(regex="^trace\\.").mean()
    commits = mean["trace.commits"] + mean["trace.warm_up"]
    expected = staleness_theory(cluster, computations=commits / cluster.workers)
    queue, think = queue_theory(cluster), think_time(cluster)
    low, high = expected.mean_bounds
    rows = [
        (
            "staleness, mean",
            f"{mean['trace.staleness_mean']:.2f}",
            f"{low:g} (conserved)" if low == high else f"{low:g} to {high:g} (bounds)",
        ),
        (
            "staleness, std",
            f"{mean['trace.staleness_std']:.2f}",
            _spread(expected),
        ),
    ]
    if think is not None and cluster.service.mean > 0:
        visits = 2 if cluster.separate_reads else 1
        bound = saturation_bound(cluster.workers, think, visits * cluster.service.mean)
        rows.append(
            ("throughput (commits/s)", f"{mean['trace.throughput']:.2f}", f"at most {bound:.2f} (saturation, long run)")
        )
    rows.append(
        (
            "server utilisation",
            f"{mean['trace.utilisation']:.3f}",
            _utilisation(queue),
        )
    )
    rows.append(("mean wait (s)", f"{mean['trace.wait_mean']:.4f}", ""))
    return [("", "measured", "theory"), *rows]


def _spread(expected: "StalenessTheory") -> str:
    if expected.std is None:
        return ""
    return f"{expected.std:.2f} ({expected.law}{'' if expected.queue_free else ', without the queue'})"


def _utilisation(queue: "QueueTheory | None") -> str:
    if queue is None:
        return ""
    return f"{'at most ' if 'bound' in queue.law else ''}{queue.utilisation:.3f} ({queue.law})"


def _method_table(summary: "pd.DataFrame") -> str:
    columns = {
        "final_loss": "minibatch loss",
        "train_loss": "train loss",
        "test_loss": "test loss",
        "test_accuracy": "test accuracy",
        "energy_ratio": "energy ratio",
        "simulated_seconds": "simulated s",
        "trace.throughput": "commits/s",
    }
    shown = [name for name in columns if name in summary]
    by_method = summary.groupby("method", sort=False)
    table = by_method[shown].mean().rename(columns=columns)
    runs = by_method["status"].agg(lambda status: f"{(status == 'diverged').sum()} of {len(status)}")
    table.insert(0, "diverged", runs)
    return table.reset_index().to_string(index=False, float_format="{:#.3g}".format, na_rep="-")
