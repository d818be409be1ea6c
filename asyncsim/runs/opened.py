"""Finished studies in Python: a table of all, and one study opened by its tag."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import pandas as pd

from asyncsim.base.errors import InputError, require_choice, require_count
from asyncsim.base.files import files_below
from asyncsim.replays.run import Run
from asyncsim.runs.known import entries, find, place_text, runs_in
from asyncsim.study import results
from asyncsim.study.finished import Finished, read
from asyncsim.traces.trace import Trace

Loaded = TypeVar("Loaded")


class LazyMapping(Mapping[str, Loaded]):
    """Runs or traces by name; each is loaded on access."""

    def __init__(self, names: list[str], load: Callable[[str], Loaded]):
        self._names, self._load = names, load

    def __getitem__(self, name: str) -> Loaded:
        """Load an entry; raise InputError with the available names for an unknown one."""
        return self._load(require_choice("name", name, self._names))

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __repr__(self) -> str:
        return f"<{len(self)}: {', '.join(self._names)}>"


class TaggedPlace(NamedTuple):
    """The run, or one of its commits, that a tag names."""

    run: str
    commit: int | None
    folder: Path

    def rows(self, around: int = 5) -> pd.DataFrame:
        """Return the run's commits around this one; all commits for a tag without a commit."""
        require_count("around", around, minimum=0)
        commits = Run.load(self.folder / "runs" / self.run).commits
        if self.commit is None:
            return commits
        return commits[commits["commit"].between(self.commit - around, self.commit + around)]


class TaggedStudy(NamedTuple):
    """A finished study.

    Attributes
    ----------
    name, note : str
        The tag, or the folder's name, and the tag's note.
    finished : Finished
        The results in its folder.
    place : TaggedPlace or None
        The run, and possibly its commit, that the tag names.
    """

    name: str
    note: str
    finished: Finished
    place: TaggedPlace | None

    @property
    def folder(self) -> Path:
        """The folder of its results."""
        return self.finished.folder

    @property
    def config(self) -> dict[str, Any]:
        """The contents of its ``config.json``."""
        return self.finished.config

    @property
    def summary(self) -> pd.DataFrame:
        """One row per run."""
        return self.finished.summary

    @property
    def runs(self) -> LazyMapping[Run]:
        """Its runs by name, such as ``gem-seed0``."""
        return LazyMapping(runs_in(self.folder), lambda name: Run.load(self.folder / "runs" / name))

    @property
    def traces(self) -> LazyMapping[Trace]:
        """Its traces by name."""
        traces = self.folder / "traces"
        paths = [
            path.relative_to(traces) for path in files_below(traces) if path.suffix == ".parquet"
        ]
        names = [path.with_suffix("").as_posix() for path in paths if not path.name.startswith(".")]
        return LazyMapping(
            names, lambda name: Trace.load(self.folder / "traces" / f"{name}.parquet")
        )

    def __repr__(self) -> str:
        at = place_text(self.place, " at ") if self.place else ""
        return f"<{self.config['study']} {self.name!r}{at}: {len(self.runs)} runs in {self.folder}>"


def table() -> pd.DataFrame:
    """Return a row for each known study, newest first, as printed by ``asyncsim runs``."""
    rows = [
        {
            "tags": ", ".join(tag.name for tag in entry.tags),
            **{name: getattr(entry, name) for name in ("study", "cluster", "methods", "verdict")},
            "date": pd.to_datetime(entry.date, errors="coerce"),
            "folder": str(entry.folder),
        }
        for entry in entries()
    ]
    columns = ["tags", "study", "cluster", "methods", "verdict", "date", "folder"]
    return pd.DataFrame(rows, columns=columns)


def open(name: str) -> TaggedStudy:
    """Open a finished study by its tag, its folder's name or its path.

    Raises
    ------
    InputError
        For an unknown name, a name of several folders, or a damaged folder.
    """
    tag = find(name)
    study = read(tag.folder, str(results.config_of(tag.folder).get("study")))
    if tag.run is not None and tag.run not in runs_in(tag.folder):
        raise InputError(
            f"name = {name!r}: its run {tag.run} is not in {tag.folder} any more; tag another"
        )
    place = TaggedPlace(tag.run, tag.commit, tag.folder) if tag.run else None
    return TaggedStudy(tag.name, tag.note, study, place)
