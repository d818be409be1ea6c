"""Studies of a grid: cells that differ in workers, rates or whatever else, run into one folder.

Each option of a `ComparisonConfig` may have several values; each combination is a cell.
`sweep` builds the cells and `run_cells` runs them; see `asyncsim.study.comparison`.

Scales. A study may have a table ``SCALES`` of configs by name, from which ``--scale`` takes the
defaults of all other options; see `asyncsim.study.configure`.
"""

import dataclasses
import itertools
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from asyncsim.base.console import each_note_once, note
from asyncsim.base.errors import InputError, require_positive
from asyncsim.study import results
from asyncsim.study.config import CellConfig, JobOptions, StudyConfig, check_values
from asyncsim.study.jobs import Job, Result, executor_of, run_jobs
from asyncsim.study.loading import OF_METHODS, OF_PROBLEMS
from asyncsim.study.target import TargetOptions

if TYPE_CHECKING:
    import pandas as pd

    from asyncsim.study.cell import Cell

#: Options with a single value in each study, and the lengths of runs beside --steps.
_SINGLE = {
    *(field.name for field in dataclasses.fields(JobOptions)),
    *("methods", "seeds", "sites", "failures", "x64", "animate"),
    *("diagnose_energy", "shared_bandwidth"),
}
_LENGTHS = ("time_budget", "epochs", "gradients")
#: Relative deviation from the epochs that is reported.
_OFF = 0.05
#: Characters of a value in the name of a cell's folders.
_LONGEST = 60


@dataclass(frozen=True)
class ComparisonConfig(TargetOptions, CellConfig):
    """Options of a comparison: each option of the cluster, the data and the training may have
    several values; each combination is a cell.
    """

    #: The options that may have several values.
    several: ClassVar[frozenset[str]] = frozenset(
        field.name for field in dataclasses.fields(CellConfig) if field.name not in _SINGLE
    )

    scale: Literal["small", "paper"] = "small"
    """Defaults of all other options. small: minutes on the bundled digits; paper: the paper's."""
    time_budget: float | None = None
    """Simulated time of each run (s), instead of --steps."""
    epochs: float | None = None
    """Passes of all workers together through the training data, instead of --steps."""
    gradients: int | None = None
    """Gradients of each worker, on average, instead of --steps."""

    @property
    def varied(self) -> dict[str, tuple[Any, ...]]:
        """The options with several values."""
        values = {name: getattr(self, name) for name in vars(self) if name in self.several}
        return {name: value for name, value in values.items() if isinstance(value, tuple)}

    @property
    def lengths(self) -> list[str]:
        """The options in place of ``steps``."""
        return [name for name in _LENGTHS if getattr(self, name) is not None]

    @property
    def has_trials(self) -> bool:
        """Whether rates are chosen on further seeds."""
        return self.tune_seeds > 0 and self.rates is not None and len(self.rates) > 1

    @property
    def rates(self) -> tuple[float, ...] | None:
        """The learning rates to choose from; none if --learning-rate states one and --tune is a
        default.
        """
        is_stated = self.changed("learning_rate") and not self.changed("tune")
        return None if is_stated else self.tune

    def points(self) -> list[dict[str, Any]]:
        """Return the values of each cell."""
        varied = self.varied | ({"learning_rate": self.rates} if self.rates else {})
        return [
            dict(zip(varied, values, strict=True)) for values in itertools.product(*varied.values())
        ]

    def at(self, **values: Any) -> StudyConfig:
        """Return the options of a cell; of other options with several values the first."""
        first = {name: several[0] for name, several in self.varied.items()}
        options: dict[str, Any] = {**vars(self), **first, **values}
        names = [field.name for field in dataclasses.fields(CellConfig)]
        return CellConfig(**{name: options[name] for name in names})

    def check(self) -> None:
        """Check the options; see `StudyConfig.check`."""
        for name, values in self.varied.items():
            check_values(name, values)
        self.check_target()
        for name in self.lengths:
            require_positive(name, getattr(self, name))
        if len(self.lengths) > 1:
            first, second = self.lengths[:2]
            raise InputError(
                f"{first} = {getattr(self, first)}: is a length, and so is {second}; give one"
            )
        for point in self.points():
            self.at(**point).check()

    def with_length(self, cell: "Cell") -> "Cell":
        """Return a cell with the length of its runs."""
        if self.epochs is not None:
            visit = (cell.problem.batch_size or 1) * sum(cell.cluster.windows)
            steps = max(1, round(self.epochs * cell.problem.examples / visit))
            trained = steps * visit / cell.problem.examples
            if abs(trained / self.epochs - 1) > _OFF:
                note(f"{cell.name}: whole visits of all workers are {trained:.3g} epochs")
            interval = cell.config.evaluate_every or max(1, int(steps // self.epochs))
            return cell.with_options(steps=steps, evaluate_every=interval)
        if self.gradients is not None:
            return cell.with_options(steps=int(self.gradients // cell.cluster.mean_window))
        return cell._replace(seconds=self.time_budget)


def preset(
    base: type[ComparisonConfig] = ComparisonConfig,
    *,
    small: Mapping[str, Any],
    paper: Mapping[str, Any] | None = None,
) -> tuple[Any, dict[str, Any]]:
    """Return a study's Config, with the defaults of the small scale, and its SCALES."""
    types = {field.name: field.type for field in dataclasses.fields(base)}
    defaults = [(name, types[name], dataclasses.field(default=small[name])) for name in small]
    config: Any = dataclasses.make_dataclass("Config", defaults, bases=(base,), frozen=True)
    config.__module__ = base.__module__
    scales = {"small": config()}
    return config, scales if paper is None else {**scales, "paper": config(scale="paper", **paper)}


@each_note_once()
def sweep(
    config: StudyConfig, grid: Iterable[Mapping[str, Any]], traces_alone: bool = False
) -> "list[Cell]":
    """Return a cell for each entry of a grid: the config with the entry's values.

    ``traces_alone``: without methods the cells have traces only; otherwise an empty list of methods
    raises InputError.

    Cells with equal options of their methods, or of their problem, share these objects, which are
    then compiled once. Notes name options without effect.
    """
    from asyncsim.byzantine.attacks import Attack
    from asyncsim.clusters.topologies import Topology
    from asyncsim.study.cell import Cell
    from asyncsim.study.entries import from_file

    methods: dict[Any, Any] = {}
    problems: dict[Any, Any] = {}
    cells = []
    for values in grid:
        options = config.at(**values)
        options.check()
        options = options.at(attack=from_file("attack", options.attack, Attack))
        if isinstance(options, CellConfig):
            topology = from_file("topology", options.topology, Topology, options.workers)
            options = options.at(topology=topology)
        of_methods, of_problem = (
            _chosen(options, ("methods", *OF_METHODS)),
            _chosen(options, ("problem", *OF_PROBLEMS)),
        )
        if of_methods not in methods:
            has_traces_only = traces_alone and not options.methods
            methods[of_methods] = (
                [] if has_traces_only else options.make_methods(set(values), config.changed)
            )
        if of_problem not in problems:
            problems[of_problem] = options.make_problem(set(values), config.changed)
        problem = problems[of_problem]
        cluster = options.make_cluster(message_bytes=options.vector_bytes(problem))
        cells.append(
            Cell(cell_name(values), dict(values), options, cluster, methods[of_methods], problem)
        )
    names = [cell.name for cell in cells]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise InputError(
            f"grid: two of its cells are called {twice!r}, as are their folders; let other values "
            "differ"
        )
    if config.diagnose_energy and not config.diagnose_every:
        note("--diagnose-energy changes nothing with --diagnose-every 0")
    return cells


def run_cells(
    study: str,
    config: StudyConfig,
    cells: "Sequence[Cell]",
    conclude: "Callable[[Path, pd.DataFrame], None]",
    measure: Sequence[Job] = (),
    follow: "Callable[[Path], Sequence[Cell]] | None" = None,
    also: Mapping[str, Any] = MappingProxyType({}),
) -> Result:
    """Run the methods of each cell, on one trace per seed; see `asyncsim.study.jobs.run_jobs`.

    The ``run`` of a study calls it after `StudyConfig.check` and `sweep`, which raise InputError
    for invalid options.

    ``study``: its name. ``conclude(folder, summary)`` draws the figures and prints the tables of
    the finished runs. ``measure``: additional measurements. ``follow(folder)`` returns further
    cells. ``also``: further entries of ``config.json``.
    """
    from asyncsim.study.cell import jobs_of, weak_attacks

    methods: dict[str, Any] = {}  # of the first cell that has each
    for cell in cells:
        methods |= {method.name: method for method in cell.methods if method.name not in methods}
    record = {**config.record(list(methods.values()), cells[0].problem), **also}
    if cells[0].goal is not None:
        record |= {"target": cells[0].goal.value, "target_of": cells[0].goal.of}
    if any(cell.values for cell in cells):
        record.setdefault("cells", [dict(cell.values) for cell in cells])
    record[results.NOTES] = weak_attacks(cells)
    traces: dict[Any, str] = {}
    jobs = [*jobs_of(cells, traces), *measure]
    executor = executor_of(config, [(cell.problem, cell.cluster.workers) for cell in cells])

    further = None if follow is None else lambda folder: jobs_of(follow(folder), traces)
    return run_jobs(study, config, record, jobs, executor, conclude, further)


def _chosen(config: StudyConfig, options: Iterable[str]) -> tuple[Any, ...]:
    """Return the values of some options as a key: texts and numbers by value, other objects by
    identity.
    """

    def key(value: Any) -> Any:
        if isinstance(value, tuple | list) and not hasattr(value, "_fields"):
            return tuple(map(key, value))
        return value if isinstance(value, str | int | float | Path | None) else id(value)

    return tuple(key(getattr(config, name)) for name in sorted(options) if hasattr(config, name))


def cell_name(values: Mapping[str, Any]) -> str:
    """Return the name of a cell's folders: its values; long ones are cut and end with a
    checksum.
    """
    texts = [(name, str(value).replace("/", "-")) for name, value in values.items()]
    return "_".join(
        f"{name}-{text}"
        if len(text) <= _LONGEST
        else f"{name}-{text[:_LONGEST]}-{zlib.crc32(text.encode()):08x}"
        for name, text in texts
    )
