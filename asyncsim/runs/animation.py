"""Animate the runs of a finished study, in one file."""

from collections.abc import Sequence
from pathlib import Path

from asyncsim.base.errors import InputError, choices_like, reading_results
from asyncsim.pages.movie import write_movie
from asyncsim.pages.page import MOST_FRAMES, shown_runs, write_animation
from asyncsim.runs.opened import open


def animate(
    name: str,
    runs: Sequence[str] | None,
    frames: int | None = None,
    out: str | None = None,
    force: bool = False,
) -> Path:
    """Write the animation of one or two runs of a study; return the path of its file.

    ``name``: the study's tag or folder. The other arguments are the options of
    ``asyncsim animate``.
    """
    study = open(name)
    path = Path(out or f"{study.name}-animation.html")
    if path.exists() and not force:
        raise InputError(
            f"--out {path}: exists already; give another name, or --force to overwrite it"
        )
    if frames is not None and not 2 <= frames <= MOST_FRAMES:
        raise InputError(f"--frames {frames}: must be from 2 to {MOST_FRAMES}")
    names = runs or ([study.place.run] if study.place else [])
    if len(names) > 2:
        raise InputError(f"--runs {' '.join(names)}: {len(names)} runs; give one or two")
    chosen = []
    rows = study.summary.reindex(columns=["run_folder", "trace_file"]).dropna()
    trace_files = dict(zip(rows["run_folder"], rows["trace_file"], strict=True))
    for run in names:
        if run not in study.runs:
            raise InputError(
                f"--runs {run}: not in {study.folder}; {choices_like(run, study.runs)}"
            )
        file = trace_files.get(f"runs/{run}")
        if file is None:
            raise InputError(
                f"--runs {run}: the summary in {study.folder} names no trace for it; choose another"
            )
        chosen.append((run, study.runs[run], study.finished.trace(file)))
    chosen = chosen or shown_runs(study.folder)
    if not chosen:
        raise InputError(f"name = {name!r}: {study.folder} has no run with a trace to animate")
    with reading_results(study.folder):
        if path.suffix == ".html":
            return write_animation(chosen, path, frames or MOST_FRAMES)
        return write_movie(chosen, path, frames or 300)
