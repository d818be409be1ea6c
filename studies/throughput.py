"""How fast simulation and replay are, against loops written by hand and the gradients alone.

All sides of a comparison run in this one process, in turns, several times; the ratios within each turn are what counts.
The gradients alone, in the best of several batchings, as many at a time as in the replay and without any update, are
the limit of what a replay can reach; those of one program at a time are listed beside them. What they and the commits
alone, those of gradients that cost nothing, would take one after the other is in the bars' column without_overlap, and
in the table times, in microseconds a commit; on a CPU the table commit_limits says what moving a worker's vectors at
each commit would leave at the speed at which one core moves rows, one piece at a time. Where studies compute several
replays at a time, on one core each, the rate of concurrent replays is that of all together. The usual loops use what
cores there are, and keep nothing but losses; one more records what a replay does of every commit. They have the
problem's own loss; for the CNN there is one more with the convolutions that one would write.
Prints rates, ratios, costs and how near the machine's ceilings all this comes, and in the end a line of each case in
short; writes tables and a figure. The table of bars holds some of the ratios against targets that this project has set
itself, and says which are met on this machine, or by how much they are missed; of what was not measured it has none.
"""

import importlib.util
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from asyncsim.benchmark import bars, turns
from asyncsim.benchmark.answer import answer
from asyncsim.errors import InputError, require_choice, require_count
from asyncsim.files import write_csv, write_json
from asyncsim.notes import note, tell
from asyncsim.study import results
from asyncsim.study.finished import figures, say_written
from asyncsim.table_text import table_text
from asyncsim.wording import split_names

if TYPE_CHECKING:
    import pandas as pd

TASKS = ("trace", "growth", "quadratic", "digits", "cnn", "mlp")
#: Methods that are held against the loops written by hand.
USUAL = ("downpour", "gem")
#: The thesis' network takes 19 MB a vector: with more workers than this its state outgrows most machines.
MOST_MLP_WORKERS = 100
#: Turns that --quick makes at most.
QUICK_REPEATS = 2
#: The tables; the summary is written last, as it makes the folder a result.
TABLES = (
    "machine",
    "sweep",
    "turns",
    "costs",
    "memory",
    "roofline",
    "commit_limits",
    "times",
    "ratios",
    "growth",
    "bars",
    "summary",
)


@dataclass(frozen=True)
class Config:
    """Options of the throughput study."""

    tasks: tuple[str, ...] = ("trace", "quadratic", "digits", "cnn")
    """What to measure: trace, growth (simulation alone), quadratic, digits, cnn (the GEM paper's network), mlp (the
    thesis' network); separated by spaces or commas."""
    workers: tuple[int, ...] = (10, 100)
    """Workers of the clusters, each a case of its own. mlp has at most 100."""
    methods: tuple[str, ...] = USUAL
    """Methods that are replayed, or all of several workers; those that need another timing get a trace with it. Only
    downpour and gem are held against loops written by hand."""
    repeats: int = 5
    """Turns of each comparison."""
    quick: bool = False
    """Only the most workers, two short turns, few sizes in the sweep, no ensemble: a rough answer in a minute."""
    memory: bool = False
    """Also replay each case in a process of its own and measure its memory."""
    data_dir: Path | None = None
    """Folder that holds mnist/ (cnn, mlp). None: random images of MNIST's shapes, which take as long."""
    out: Path | None = None
    """Folder for the results, new or empty; None: results/throughput, then results/throughput-2, ..."""


class Result(NamedTuple):
    """What the study returns.

    Attributes
    ----------
    folder : Path
        Where everything was written.
    tables : dict of pandas.DataFrame
        By the names of their files: ``summary``, ``ratios``, ``bars``, ...
    """

    folder: Path
    tables: "dict[str, pd.DataFrame]"


class Tables:
    """The tables so far, written after each case, so that Ctrl-C keeps those that are finished."""

    def __init__(self, folder: Path):
        self._folder = folder
        self.of: dict[str, pd.DataFrame] = {}

    def add(self, name: str, rows: "pd.DataFrame") -> "pd.DataFrame":
        """Append rows to a table; return the rows."""
        import pandas as pd

        self.of[name] = pd.concat([self.of[name], rows], ignore_index=True) if name in self.of else rows
        return rows

    def write(self) -> None:
        """Write all, with what follows from the others."""
        if "machine" in self.of:
            backend = self.of["machine"]["backend"].iloc[0]
            self.of["growth"] = bars.growth(self.of["summary"])
            self.of["bars"] = bars.bars(self.of["ratios"], self.of["summary"], self.of.get("memory"), backend)
        for name in TABLES:
            if name in self.of and len(self.of[name]):
                write_csv(self._folder / f"{name}.csv", self.of[name])


def run(config: Config) -> Result:
    """Run the study.

    Raises
    ------
    InputError
        An option that cannot be used, or a folder that cannot be written.
    """
    tasks, methods = _check(config)
    with results.new_folder(config.out, "throughput") as folder:
        write_json(folder / results.CONFIG, {"study": "throughput", **_plain(config)})
        tables = Tables(folder)
        for task in tasks:
            if task in ("trace", "growth"):
                _measure_simulation(task, config, tables)
            else:
                _measure_replay(task, methods, config, tables)
        for name in ("growth", "bars"):
            if name in tables.of and len(tables.of[name]):
                _show(name, tables.of[name], bars.EXPLANATION if name == "bars" else "")
        drawn = figures("throughput").draw(folder)
    print(f"\nin short\n{answer(tables.of.get('ratios'), tables.of['summary'])}")
    written = [f"{name}.csv" for name in TABLES if name in tables.of and len(tables.of[name])]
    say_written(folder, *written, *drawn)
    return Result(folder, tables.of)


def _check(config: Config) -> tuple[list[str], list[str]]:
    """Return the tasks and the methods; say aloud what is left out."""
    tasks = [require_choice("tasks", task, TASKS) for task in split_names(config.tasks)]
    methods = _methods(split_names(config.methods))
    workers = [config.workers] if isinstance(config.workers, int) else config.workers
    for name, values, choices in (("tasks", tasks, TASKS), ("methods", methods, (*USUAL, "all"))):
        if not values:
            raise InputError(f"{name}: none given; choose from {', '.join(choices)}")
        if len(set(values)) < len(values):
            raise InputError(f"{name} = {', '.join(values)}: one comes twice; give each once")
    if not workers:
        raise InputError("workers: none given; give at least one number")
    for count in workers:
        require_count("workers", count)
    if len(set(workers)) < len(workers):
        raise InputError(f"workers = {', '.join(map(str, workers))}: one comes twice; give each once")
    require_count("repeats", config.repeats)
    if "mlp" in tasks and min(workers) > MOST_MLP_WORKERS:
        raise InputError(f"workers = {min(workers)}: mlp is measured with at most {MOST_MLP_WORKERS}; give fewer")
    if not set(tasks) & {"cnn", "mlp"} and config.data_dir is not None:
        note("--data-dir changes nothing for these tasks")
    if set(tasks) - {"trace", "growth"} and importlib.util.find_spec("torch") is None:
        note("PyTorch is not installed: its rows are left out")
    return tasks, methods


def _methods(given: list[str]) -> list[str]:
    """Return the names of methods, checked; one that has a single worker is none of them."""
    from asyncsim.methods import METHODS

    several = [name for name, make in METHODS.items() if make().timing.workers is None]
    return several if given == ["all"] else [require_choice("methods", name, several) for name in given]


def _workers(config: Config, task: str) -> list[int]:
    """Return the numbers of workers that a task is measured with."""
    workers = [config.workers] if isinstance(config.workers, int) else list(config.workers)
    if task == "mlp" and max(workers) > MOST_MLP_WORKERS:
        note(f"mlp is measured with at most {MOST_MLP_WORKERS} workers: with more its state is too large")
        workers = [count for count in workers if count <= MOST_MLP_WORKERS]
    return [max(workers)] if config.quick else workers


def _measure_simulation(task: str, config: Config, tables: Tables) -> None:
    """Measure the making of traces: beside the usual model, or on clusters that grow."""
    from asyncsim.benchmark import cases

    scale = cases.QUICK if config.quick else cases.FULL
    if task == "growth":
        measured = turns.measure(turns.Case(task, 0), cases.growth_contenders(scale), _repeats(config))
        measured["workers"] = measured["contender"].astype(int)
        _keep(measured.assign(contender="simulate"), tables)
        return
    for workers in _workers(config, task):
        measured = turns.measure(turns.Case(task, workers), cases.trace_contenders(workers, scale), _repeats(config))
        tables.add("ratios", turns.ratios(measured))
        _keep(measured, tables)


def _measure_replay(task: str, methods: list[str], config: Config, tables: Tables) -> None:
    """Measure a task's replays, one case after the other: for each number of workers the sweep, then the methods."""
    from asyncsim.benchmark import cases, machine, memory
    from asyncsim.benchmark.tasks import make_method, make_problem

    if "machine" not in tables.of:
        _show("machine", tables.add("machine", machine.machine()))
    problem = make_problem(task, config.data_dir)
    scale = cases.QUICK if config.quick else cases.FULL
    workers = _workers(config, task)
    for count in workers:
        tell(f"{task}, {count} workers: gradients alone")
        bench = cases.Bench(task, problem, count, scale)
        _show("sweep", tables.add("sweep", bench.sweep()))
        ceilings = tables.of["machine"]
        _show("roofline", tables.add("roofline", machine.roofline(task, count, problem, bench.limit, ceilings)))
        for name in methods:
            case = turns.Case(task, count, name)
            replaying, contenders = bench.contenders(make_method(name, max(workers)), name in USUAL)
            measured = turns.measure(case, contenders, _repeats(config))
            costs = replaying.costs(case, measured)
            if config.memory:
                taken = memory.measure(case, replaying.commits, config.data_dir)
                _show("memory", tables.add("memory", taken))
            _show("costs", tables.add("costs", costs))
            if ceilings["backend"].iloc[0] == "cpu":  # elsewhere rows do not move through the host's memory
                limit = machine.commit_limit(case, replaying.method, problem, bench.limit)
                if len(limit):
                    _show("commit_limits", tables.add("commit_limits", limit))
            tables.add("ratios", turns.ratios(measured))
            _keep(measured, tables)
            _show("times", tables.add("times", turns.times(turns.summarise(measured))))
            _show("ratios", turns.ratios(measured))


def _keep(measured: "pd.DataFrame", tables: Tables) -> None:
    """Keep the turns of a case, and print their rates."""
    tables.add("turns", measured)
    _show("summary", tables.add("summary", turns.summarise(measured)))
    tables.write()


def _repeats(config: Config) -> int:
    return min(config.repeats, QUICK_REPEATS) if config.quick else config.repeats


def _show(name: str, table: "pd.DataFrame", explanation: str = "") -> None:
    """Print a table, with the case as its title if it is of one, and between them what explains it."""
    columns = [column for column in ("task", "workers", "method") if column in table]
    one_case = name not in ("growth", "bars") and len(columns) > 1 and len(table[columns].drop_duplicates()) == 1
    title = f"{name}: {turns.Case(*table[columns].iloc[0])}" if one_case else name
    shown = table.drop(columns=columns) if one_case else table
    print("", title, *filter(None, [explanation]), table_text(shown), sep="\n", flush=True)


def _plain(config: Config) -> dict[str, Any]:
    values = {name: str(value) if isinstance(value, Path) else value for name, value in asdict(config).items()}
    return {name: value for name, value in values.items() if name != "out"}
