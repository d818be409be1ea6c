"""Studies of independent measurements, each some rows of one table; runs and traces are not kept."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncsim.errors import InputError
from asyncsim.files import write_csv, write_json
from asyncsim.notes import note, tell
from asyncsim.study import results
from asyncsim.study.config import StudyOptions
from asyncsim.study.executor import Failure, Failures, map_kept, opened
from asyncsim.study.sweep import study_folder

if TYPE_CHECKING:
    import pandas as pd

    from asyncsim.problems.problem import Problem


@contextlib.contextmanager
def tabulated(
    config: StudyOptions,
    study: str,
    record: Mapping[str, Any],
    function: Callable[..., list[dict[str, Any]]],
    jobs: Mapping[str, tuple[Any, ...]],
    replays: "Sequence[tuple[Problem, int]]",
) -> Iterator[tuple[Path, "pd.DataFrame"]]:
    """Measure with the study's executor and write ``summary.csv`` as results come; then go on in the study's folder.

    The rows of each job have a file of their own in ``parts``, which a resumed study reads.

    Parameters
    ----------
    config : StudyOptions
    study : str
    record : mapping
        What ``config.json`` says.
    function : function
        From the arguments of a job to its rows: values that JSON can hold.
    jobs : mapping
        Arguments by name, in the order of the rows.
    replays : sequence of (Problem, int)
        What the jobs replay, with how many workers.

    Yields
    ------
    folder : Path
    summary : pandas.DataFrame
        The rows of the jobs that did not fail; those that did are in ``summary.csv`` with their error.

    Raises
    ------
    InputError
        A folder or a disk that cannot be written; an executor that cannot be had; all jobs failed.
    """
    import pandas as pd

    names, failures = list(jobs), Failures()
    parts: dict[int, list[dict[str, Any]]] = {}
    failed: dict[int, list[dict[str, Any]]] = {}
    with study_folder(config, study, record) as folder, opened(config, replays) as executor:
        write_json(folder / results.CONFIG, dict(record))
        files = [folder / "parts" / f"{name}.json" for name in names]
        for place, value in map_kept(executor, function, list(jobs.values()), files):
            if isinstance(value, Failure):
                failures.tell(names[place], value)
                failed[place] = [{"job": names[place], "status": results.FAILED, "error": value.error}]
            else:
                tell(f"[{len(parts) + 1}/{len(names)}] {names[place]}")
                parts[place] = value
            write_csv(folder / results.SUMMARY, pd.DataFrame(_in_order(parts | failed)))
        if not parts:
            first, *_ = _in_order(failed)
            raise InputError(f"all {len(names)} measurements failed, the first with {first['error']}")
        yield folder, pd.DataFrame(_in_order(parts))
        if failed:
            note(
                f"{len(failed)} of {len(names)} measurements failed; {results.SUMMARY} has their errors, and "
                f"{results.resume_option(folder)} tries them again"
            )


def _in_order(parts: dict[int, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    return [row for place in sorted(parts) for row in parts[place]]
