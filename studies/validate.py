"""Do real processes do what the simulator says? Records some, and replays the recordings.

A server process and worker processes train, each with gradients of its own, and their visits are recorded as traces
with the times of the server's clock. The recorded order is then replayed from the same seed: it must give the same
losses and parameters; of methods that amplify round-off (GEM) when the replay takes over the recorded state every 50
commits. And laws fitted to the earlier half of a recording predict its later half, or with --extrapolate a recording
with twice as many workers: `asyncsim.prediction` says what, and where that fails from which times.

Needs Ray: pip install "asyncsim[ray]". Recordings that were broken off, by Ctrl-C or because a process died, are in the
study's folder with all that was recorded; --resume goes on with them.
"""

import dataclasses
import functools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import tyro

from asyncsim.errors import InputError, require_count
from asyncsim.files import alone_in, write_csv, write_json
from asyncsim.real.options import RealConfig
from asyncsim.study import results
from asyncsim.study.config import ELSEWHERE, MethodLike
from asyncsim.study.finished import figures, say_written
from asyncsim.study.loading import require_as_they_were
from asyncsim.study.sweep import Result
from asyncsim.wording import note, tell

if TYPE_CHECKING:
    import pandas as pd

    from asyncsim.methods import Method
    from asyncsim.problems import Problem
    from asyncsim.real import Recorded
    from asyncsim.real.agreement import Agreement

_RECORDINGS = "recordings"
_AGREEMENT = "agreement.csv"
#: Options that a study which goes on may have anew.
_ANEW = ("address", "cpus", "memory", "restart", "start_timeout", "timeout")


@dataclass(frozen=True)
class Config(RealConfig):
    """Options of the validate study."""

    methods: Annotated[tuple[MethodLike, ...], tyro.conf.arg(aliases=["--method"])] = (
        "downpour",
        "agn",
        "aeasgd",
        "gem",
    )
    """Methods to record, by their names or as FILE.py:FUNCTION (see the README)."""
    runs: int = 1
    """Recordings of each method, with the seeds 0, 1, ..."""
    extrapolate: bool = False
    """Record also twice as many workers, which the simulator predicts from the first recording."""
    resume: Path | None = None
    """Folder of this study to go on with; all other options are those that it was begun with."""

    def check(self) -> None:
        """Check the options; see `StudyOptions.check`."""
        require_count("runs", self.runs)
        super().check()

    def twice(self) -> "Config":
        """Return the options for twice as many workers; a list of delays is repeated."""
        laws = self.processes().delay_laws
        return dataclasses.replace(self, workers=2 * self.workers, delay=[*laws, *laws])


class Task(NamedTuple):
    """A recording to make: its folder, method and seed."""

    folder: Path
    method: "Method"
    seed: int


def run(config: Config) -> Result:
    """Run the study.

    Raises
    ------
    InputError
        An option that cannot be used, Ray is missing, processes cannot start or die, or a folder cannot be written.
    KeyboardInterrupt
        Passed on; what was recorded is there then, and can be gone on with.
    """
    if config.resume is not None:
        begun = _begun(config, config.resume)
        with alone_in(config.resume, "resume") as held, results.telling(config.resume, held):
            return _run(begun, begun.make_methods(), config.resume)
    config.check()
    from asyncsim.real.supervisor import require_timing

    methods = config.make_methods()
    for method in methods:
        require_timing(method, config.processes())
    with results.new_folder(config.out, "validate", resumable=True) as folder:
        return _run(config, methods, folder)


def _run(config: Config, methods: "list[Method]", folder: Path) -> Result:
    from asyncsim.real.supervisor import ray_cluster, require_ray

    require_ray()
    problem = config.make_problem()
    if not (folder / results.CONFIG).exists():
        record = {"study": "validate", **config.record(methods, problem), "options": config.plain()}
        write_json(folder / results.CONFIG, record)
    tasks = [
        Task(folder / _RECORDINGS / f"{method.name}-seed{seed}", method, seed)
        for method in methods
        for seed in range(config.runs)
    ]
    rows: list[dict[str, Any]] = []
    processes = (1 + config.extrapolate) * config.workers + 1
    with ray_cluster(config.address, config.cpus * processes):
        for number, task in enumerate(tasks, 1):
            recorded = _recorded(config, problem, task, functools.partial(_write, folder, [*rows, _unfinished(task)]))
            found = _compared(recorded, task, problem)
            rows.append({**_row(recorded, task, found), **_simulated(config, recorded, task, problem)})
            _write(folder, rows)
            tell(f"[{number}/{len(tasks)}] {_told(rows[-1])}")
    import pandas as pd

    summary = pd.DataFrame(rows)
    _conclude(folder, summary)
    return Result(folder, summary)


def _begun(config: Config, folder: Path) -> Config:
    """Return the options that a study in a folder was begun with, but for what may be given anew.

    Raises
    ------
    InputError
        There is no such study, or an option contradicts it.
    """
    try:
        record = json.loads((folder / results.CONFIG).read_text())
        if record["study"] != "validate":
            raise ValueError(f"a folder of the study {record['study']}")
        options = record["options"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"resume = {str(folder)!r}: no study that was begun ({error}); give its folder") from None
    fields = [field.name for field in dataclasses.fields(Config) if field.name != "resume"]
    values: dict[str, Any] = {name: value for name, value in options.items() if name in fields}
    never = [name for name in ELSEWHERE if values.get(name, getattr(Config(), name)) != getattr(Config(), name)]
    if never:
        raise InputError(f"resume = {str(folder)!r}: its {results.CONFIG} has {never[0]}, which no study records")
    values |= {name: tuple(value) for name, value in values.items() if isinstance(value, list)}
    begun = Config(**values)
    require_as_they_were({name: values[name] for name in values if getattr(config, name) != values[name]}, folder)
    given = {name: getattr(config, name) for name in fields if getattr(config, name) != getattr(Config(), name)}
    for name, value in given.items():
        if name not in _ANEW and value != getattr(begun, name):
            raise InputError(f"{name} = {value!r}: {folder} was begun with {getattr(begun, name)!r}; leave it out")
    begun = dataclasses.replace(begun, **{name: given[name] for name in _ANEW if name in given})
    begun.check()
    return begun


def _recorded(config: Config, problem: "Problem", task: Task, begun: Any) -> "Recorded":
    """Return a recording: the one that is there, gone on with if it was broken off, or a new one."""
    from asyncsim.real import load, record
    from asyncsim.real.recording import HEADER

    there = (task.folder / HEADER).exists()
    if there:
        recorded = load(task.folder)
        if recorded.complete:
            return recorded
    begun()  # from here on there is something to go on with
    asked = config.recording()
    return record(task.method, problem, seed=task.seed, folder=task.folder, keep_states=True, resume=there, **asked)


def _compared(recorded: "Recorded", task: Task, problem: "Problem") -> "Agreement":
    """Compare a recording with its replays; write the differences of every commit."""
    from asyncsim.real.agreement import agreement

    found = agreement(recorded, task.method, problem)
    write_csv(task.folder / _AGREEMENT, found.table)
    write_csv(task.folder / "faults.csv", recorded.faults)
    return found


def _simulated(config: Config, recorded: "Recorded", task: Task, problem: "Problem") -> dict[str, Any]:
    """Hold the simulator's predictions against what was recorded; write their tables and figures."""
    from asyncsim.prediction import extrapolate, predict

    asked = {"prediction": lambda: predict(recorded.trace, task.seed)}
    if config.extrapolate:
        again = _recorded(config.twice(), problem, task._replace(folder=task.folder / "twice"), lambda: None)
        asked["extrapolation"] = lambda: extrapolate(recorded.trace, again.trace, task.seed)
    held = {}
    for name, ask in asked.items():
        try:
            found = ask()
        except InputError as error:
            note(f"no {name}: {error}")
            continue
        write_csv(task.folder / f"{name}.csv", found.table)
        found.draw(task.folder / name)
        print(found.text)
        held[name] = found.holds
    return held


def _row(recorded: "Recorded", task: Task, found: "Agreement") -> dict[str, Any]:
    """Return the row of a recording in the summary."""
    return {
        "method": task.method.name,
        "seed": task.seed,
        "status": "finished",
        "workers": recorded.trace.workers,
        "precision": recorded.header.precision,
        **found.row(),
        "faults": len(recorded.faults),
        **{f"trace.{name}": value for name, value in recorded.trace.summary().items()},
        "folder": f"{_RECORDINGS}/{task.folder.name}",
    }


def _unfinished(task: Task) -> dict[str, Any]:
    folder = f"{_RECORDINGS}/{task.folder.name}"
    return {"method": task.method.name, "seed": task.seed, "status": results.UNFINISHED, "folder": folder}


def _write(folder: Path, rows: list[dict[str, Any]]) -> None:
    import pandas as pd

    write_csv(folder / results.SUMMARY, pd.DataFrame(rows))


def _told(row: dict[str, Any]) -> str:
    far = max(row[f"loss_{row['held_to']}"], row[f"params_{row['held_to']}"])
    rate = f"{row['trace.throughput']:.3g} commits/s"
    holds = "holds" if row["holds"] else "does not hold"
    return f"{row['method']}, seed {row['seed']}: {rate}; {row['held_to']} replay {far:.1e} away, {holds}"


def table(summary: "pd.DataFrame") -> "pd.DataFrame":
    """Return one row per method: the largest differences of each replay, and in how many recordings the bar held."""
    far = {
        name: summary[[f"loss_{name}", f"params_{name}"]].max(axis=1).groupby(summary["method"], sort=False).max()
        for name in ("free", "perturbed", "forced")
    }
    groups = summary.groupby("method", sort=False)
    import pandas as pd

    return pd.DataFrame(
        {
            **far,
            "bar": groups["bar"].first(),
            "held to": groups["held_to"].agg(lambda kinds: ", ".join(sorted(set(kinds)))),
            "held": groups["holds"].agg(lambda held: f"{held.sum()} of {len(held)}"),
        }
    ).reset_index()


def _conclude(folder: Path, summary: "pd.DataFrame") -> None:
    drawn = figures("validate").draw(folder)
    shown = table(summary).to_string(index=False, float_format="{:.1e}".format)
    print(f"replays of the recorded order: largest difference of losses and parameters\n{shown}")
    say_written(folder, _RECORDINGS, results.SUMMARY, *drawn)
