"""The command ``asyncsim calibrate``: from the log of a server to a cluster and a prediction."""

from pathlib import Path

from asyncsim.base.errors import require_choice, require_count, require_free
from asyncsim.base.files import free_folder, whole_folder, write_csv, write_json
from asyncsim.calibration.fitting import FAMILIES, KINDS
from asyncsim.calibration.log import read_visits, sites_of
from asyncsim.calibration.prediction import forecast
from asyncsim.clusters.workers import as_workers


def report(
    path: str,
    workers: int | None,
    unit: str | None = None,
    law: str = "best",
    runs: int = 199,
    seed: int = 0,
    out: str | None = None,
    sites: str | None = None,
    gaps_above: float | None = None,
) -> Path:
    """Print the fit and the prediction, and write them into a new folder; return the folder.

    The arguments are the options of ``asyncsim calibrate``. ``out``: by default the first free
    folder of ``NAME-calibrated``, ``NAME-calibrated-2``, ...

    Raises
    ------
    InputError
        See `read_visits` and `asyncsim.calibrate`; the folder exists; a number is out of range.
    """
    if workers is not None:
        as_workers("workers", workers)
    require_count("runs", runs, minimum=2, maximum=100_000)
    require_count("seed", seed, minimum=0)
    require_choice("law", law, (*KINDS, *FAMILIES))
    trace = read_visits(path, unit)
    named = None if sites is None else sites_of(path, sites)
    # Last, because a mistake in the arguments may be why the folder exists.
    target = require_free("out", out or free_folder(f"{Path(path).stem}-calibrated"))
    with whole_folder(target) as partial:  # a folder that cannot be written fails at once
        options = {"law": law, "sites": named, "gaps_above": gaps_above}
        predicted = forecast(trace, workers or trace.workers, seed, runs=runs, **options)
        write_json(partial / "cluster.json", predicted.cluster.to_dict())
        write_csv(partial / "fit.csv", predicted.calibration.table)
        write_csv(partial / "prediction.csv", predicted.table)
        predicted.draw(partial / "fit")
        names = sorted(file.name for file in partial.iterdir())
    print(predicted.text)
    print(f"\nwrote {target}: {', '.join(names)}")
    return target
