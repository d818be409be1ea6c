"""Do real processes behave as the simulator predicts? Records training and replays the records.

A server process and worker processes train, and their visits are recorded as traces with the times
of the server's clock. A replay of the recorded order from the same seed must give the same losses
and parameters; for methods that amplify round-off (GEM) the replay restarts from the recorded state
every 50 commits. Laws fitted to the earlier half of a recording predict its later half, or with
--extrapolate a recording with twice as many workers; `asyncsim.prediction` explains failures. With
--topology there is no server: each worker records its gradients, and there is no prediction.

Needs Ray: pip install "asyncsim[ray]". Recordings interrupted by Ctrl-C or by the death of a
process stay in the study's folder; --resume continues them.
"""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
import tyro

from asyncsim.base.console import counted, note
from asyncsim.base.errors import InputError, require_count
from asyncsim.base.files import folder_name, plain, write_csv
from asyncsim.calibration.prediction import extrapolate, predict
from asyncsim.methods import Method
from asyncsim.problems import Problem
from asyncsim.real.agreement import agreement
from asyncsim.real.options import RealConfig
from asyncsim.real.supervisor import require_ray, require_timing
from asyncsim.study import results
from asyncsim.study.columns import text_of
from asyncsim.study.config import MethodLike
from asyncsim.study.finished import present
from asyncsim.study.jobs import Result, Tables, measurement, run_jobs

_RECORDINGS = "recordings"
_AGREEMENT = "agreement.csv"


@dataclass(frozen=True)
class Config(RealConfig):
    """Options of the validate study."""

    methods: Annotated[tuple[MethodLike, ...], tyro.conf.arg(aliases=("--method",))] = (
        "downpour",
        "agn",
        "aeasgd",
        "gem",
    )
    """Methods to record, by their names or as FILE.py:FUNCTION (see the README)."""
    runs: int = 1
    """Recordings of each method, with the seeds 0, 1, ..."""
    extrapolate: bool = False
    """Also record twice as many workers, and predict them from the first recording."""
    topology: str | None = None
    """Gossip without a server on ring(), complete(), one_peer_exponential(), ...; with the methods
    dpsgd, sgp, osgp and adpsgd. none: a server."""

    def check(self) -> None:
        """Check the options; see `StudyOptions.check`."""
        require_count("runs", self.runs)
        for name in ("extrapolate", "restart"):
            if self.topology is not None and getattr(self, name):
                raise InputError(f"{name} = True: needs a server; leave it or topology out")
        super().check()

    def twice(self) -> "Config":
        """Return the options for twice as many workers; a list of delays is repeated."""
        laws = self.processes().delay_laws
        return dataclasses.replace(self, workers=2 * self.workers, delay=[*laws, *laws])


def run(config: Config) -> Result:
    """Run the study; see `asyncsim.study.jobs.run_jobs`.

    Raises
    ------
    InputError
        An option that cannot be used, Ray is missing, or processes cannot start or die.
    KeyboardInterrupt
        Passed on; the recording is kept and can be resumed.
    """
    config.check()
    require_ray()
    methods, problem = config.make_methods(), config.make_problem()
    for method in methods:
        require_timing(method, config.processes(method))
    record = {"study": "validate", **config.record(methods, problem)}
    jobs = [
        measurement(
            f"{method.name}, seed {seed}",
            _measured,
            *(config, method, problem, seed),
            place=f"{_folder_of(method, seed)}/row",
            labels={"method": method.name, "seed": seed, "folder": _folder_of(method, seed)},
            say=_agreement_text,
            in_folder=True,
        )
        for method in methods
        for seed in range(config.runs)
    ]
    processes = (1 + config.extrapolate) * config.workers + 1
    return run_jobs("validate", config, record, jobs, config.one_by_one(processes), _conclude)


def _folder_of(method: Method, seed: int) -> str:
    return f"{_RECORDINGS}/{folder_name(f'{method.name}-seed{seed}')}"


def _measured(
    folder: Path, config: Config, method: Method, problem: Problem, seed: int
) -> dict[str, Any]:
    """Record, or resume, and compare with replays and predictions; write tables and figures; return
    the row.
    """
    folder = folder / _folder_of(method, seed)
    recorded = config.recorded(method, problem, folder, seed, keep_states=True)
    comparison = agreement(recorded, method, problem)
    write_csv(folder / _AGREEMENT, comparison.table)
    write_csv(folder / "faults.csv", recorded.faults)
    row = {
        "method": method.name,
        "seed": seed,
        "status": "finished",
        "workers": recorded.trace.workers,
        "precision": recorded.header.precision,
        **comparison.row(),
        "faults": len(recorded.faults),
        **{f"trace.{name}": value for name, value in recorded.trace.summary().items()},
        "folder": _folder_of(method, seed),
    }
    predictions = (
        {"prediction": lambda: predict(recorded.trace, seed)} if config.topology is None else {}
    )
    if config.extrapolate:
        doubled = config.twice().recorded(method, problem, folder / "twice", seed, keep_states=True)
        predictions["extrapolation"] = lambda: extrapolate(recorded.trace, doubled.trace, seed)
    for name, ask in predictions.items():
        try:
            prediction = ask()
        except InputError as error:
            note(f"no {name}: {error}")
            continue
        write_csv(folder / f"{name}.csv", prediction.table)
        prediction.draw(folder / name)
        print(prediction.text)
        row[name] = prediction.holds
    return {results.SUMMARY: [plain(row)]}


def _agreement_text(tables: Tables) -> str:
    (row,) = tables[results.SUMMARY]
    far = max(row[f"loss_{row['held_to']}"], row[f"params_{row['held_to']}"])
    rate = f"{row['trace.throughput']:.3g} commits/s"
    holds = "holds" if row["holds"] else "does not hold"
    return f"{rate}; {row['held_to']} replay {far:.1e} away, {holds}"


def table(summary: pd.DataFrame) -> pd.DataFrame:
    """Tabulate the largest differences of each replay by method, and the recordings within the
    bar.
    """
    far = {
        name: summary[[f"loss_{name}", f"params_{name}"]]
        .max(axis=1)
        .groupby(summary["method"], sort=False)
        .max()
        for name in ("free", "perturbed", "forced")
    }
    groups = summary.groupby("method", sort=False)

    return pd.DataFrame(
        {
            **far,
            "bar": groups["bar"].first(),
            "held_to": groups["held_to"].agg(lambda kinds: ", ".join(sorted(set(kinds)))),
            "within_bar": groups["holds"].sum(),
            "recordings": groups.size(),
        }
    ).reset_index()


def _conclude(folder: Path, summary: pd.DataFrame) -> None:
    printed = text_of(table(summary), digits=2)
    present(
        folder,
        {},
        f"replays of the recorded order: largest difference of losses and parameters\n{printed}",
        verdict=f"replays agree within the bar with {int(summary['holds'].sum())} of "
        f"{counted(len(summary), 'recording')}",
    )
