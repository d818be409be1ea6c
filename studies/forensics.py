"""Which cluster produced published curves: its service time and spread, inferred from losses.

The GEM paper states neither the service time of its server nor the spread of its workers' times,
and its curves depend on both. So the methods of its figure 1 are run over a grid of clusters and
learning rates, with some numbers of workers (--fitted). The study chooses the cluster whose curves
are nearest to the published ones over all methods, each at its best learning rate. It checks that
cluster, and for comparison each method's best cluster, with the held-out numbers of workers.

Times are in units of the mean time of a gradient, one second, because curves over worker steps have
no other unit. The deviation is the root mean square of log10(ours / published), losses averaged
over 20 worker steps and the seeds. Bins outside the published axes are left out; a curve with fewer
than half of the published bins, because it diverged, has no deviation. Prints the preferred cluster
and the next one, with their deviations over all methods, and a verdict: the fit is good if each
held-out curve deviates by at most 0.15, a factor of 1.4.

Curves are published only for MNIST (--scale paper). On any other problem the study tests itself: it
fits the curves of a hidden cluster (--hidden), computed with other seeds, and should recover that
cluster. It may fail: if the compute times hardly vary (CV 0.05), all delays are nearly constant
with or without a queue, and curves of one seed cannot distinguish service times of 0 and 0.2 s.

At paper scale the grid is 18 points of 70,000 commits of MNIST's network each, the check at most
four times 110,000 more: about two hours on two cores for each seed.
"""

import contextlib
import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pandas as pd

from asyncsim.base.console import counted, note
from asyncsim.base.errors import InputError, require_choice, require_nonnegative
from asyncsim.drawing.curves import Curve, curve_of
from asyncsim.methods import Method
from asyncsim.problems import Problem
from asyncsim.replays.replay import replay
from asyncsim.replays.run import Run
from asyncsim.simulation.simulate import simulate
from asyncsim.study import load_file, shipped
from asyncsim.study.cell import Cell
from asyncsim.study.columns import titled
from asyncsim.study.config import MethodLike, StudyConfig
from asyncsim.study.finished import Finished, outcomes, present, read
from asyncsim.study.sweep import Result, SweepConfig, run_cells, sweep

#: The panels of the paper's figure by their methods.
_PANELS = {"gem": "1a", "downpour": "1b", "adaptive_staleness": "1c"}
#: Columns that identify a cell, besides the workers.
_POINT = ["service", "cv", "learning_rate"]
_CLUSTER = ["service", "cv"]
#: Largest deviation of a held-out curve for a good fit.
HELD_OUT_BAR = 0.15


@dataclass(frozen=True)
class Config(SweepConfig):
    """Options of the forensics study."""

    varied: ClassVar = ("workers", "service", "cv", "learning_rate")

    service: tuple[float, ...] = (0.0, 0.2)
    """Constant times that the server is busy with a visit, one after the other (s; a gradient takes
    1 s on average).
    """
    cv: tuple[float, ...] = (0.05, 0.5)
    """Coefficients of variation of the compute times, which are gamma distributed, one after the
    other.
    """
    # A sequence, unlike in the base class: each cell has one value.
    learning_rate: tuple[float, ...] = (0.05, 0.02)  # type: ignore[assignment]
    """Step sizes of a gradient, one after the other, for all methods."""
    fitted: tuple[int, ...] = (5, 20)
    """Numbers of workers on which the cluster is fitted; the rest of --workers is held out."""
    hidden: tuple[float, float, float] = (0.2, 0.5, 0.05)
    """Service time (s), CV and learning rate of the hidden cluster, on a problem without published
    curves.
    """
    methods: tuple[MethodLike, ...] = ("gem", "downpour")
    """Methods to compare: gem, downpour, adaptive_staleness, or your own (not with published
    curves).
    """
    seeds: int = 1
    """Number of seeds: 0, 1, ... One trace per seed, shared by the methods."""
    steps: int = 100
    """Commits per worker, on average; a trace has steps * workers commits."""

    def check(self) -> None:
        """Check the options; see `StudyOptions.check`."""
        for name, values in (("service", self.service), ("cv", self.cv), ("hidden", self.hidden)):
            for value in values:
                require_nonnegative(name, value)
        super().check()
        if self.changed("compute"):
            raise InputError(f"compute = {self.compute!r}: follows from cv here; give that")
        if not self.fitted:
            raise InputError("fitted: none given; give one or more of workers")
        for count in self.fitted:
            if count not in self.workers:
                counts = ", ".join(map(str, self.workers))
                raise InputError(
                    f"fitted = {count}: is not among workers, {counts}; give some of these"
                )

    def record(self, methods: Sequence[Method], problem: Problem) -> dict[str, Any]:
        """Return the recorded options, with ``cv`` instead of ``compute``."""
        return {
            name: value
            for name, value in super().record(methods, problem).items()
            if name != "compute"
        }

    def at(self, **values: Any) -> StudyConfig:
        """Return the options of one cluster; ``cv``: coefficient of variation of its compute
        times.
        """
        cv = values.pop("cv", self.cv[0])
        return super().at(
            **{"compute": f"gamma(mean=1, cv={cv})" if cv else "constant(1)", **values}
        )


SCALES = {
    "small": Config(),
    "paper": Config(
        scale="paper",
        problem="mnist",
        service=(0.0, 0.05, 0.2),
        cv=(0.05, 0.2, 0.5),
        learning_rate=(0.05, 0.01),
        methods=("gem", "downpour", "adaptive_staleness"),
        steps=938,
        evaluate_every=938,
        diagnose_every=0,
    ),
}


def run(config: Config) -> Result:
    """Run the study; see `asyncsim.study.sweep.run_cells`."""
    config.check()
    with config.computing_device():
        points = list(itertools.product(config.service, config.cv, config.learning_rate))
        grid = list(itertools.product(dict.fromkeys([*points, config.hidden]), config.workers))
        all_cells = sweep(
            config, [{**dict(zip(_POINT, point, strict=True)), "workers": n} for point, n in grid]
        )
        cells = dict(zip(grid, all_cells, strict=True))
        published = _published(all_cells[0], config)
        targets = published or _hidden([cells[config.hidden, n] for n in config.workers])
        source = (
            "published"
            if published
            else "hidden: service {:g} s, CV {:g}, learning rate {:g}".format(*config.hidden)
        )

        def conclude(folder: Path, summary: pd.DataFrame) -> None:
            table = fit(read(folder, "forensics"), targets, config.fitted)
            sought = None if published else config.hidden[:2]
            present(
                folder,
                {"target.csv": _as_table(targets), "fit.csv": table},
                f"deviation from the curves to be fitted ({source})",
                _deviations(table),
                *outcomes(folder, summary, ("method", *_POINT, "workers")),
                verdict=verdict(table, sought),
            )

        def follow(folder: Path, summary: pd.DataFrame) -> list[Cell]:
            points = choose(fit(read(folder, "forensics"), targets, config.fitted))
            held_out = [n for n in config.workers if n not in config.fitted]
            return [
                _with_methods(cells[point, n], names)
                for point, names in points.items()
                for n in held_out
            ]

        first = [cells[point, n] for point in points for n in config.workers if n in config.fitted]
        return run_cells("forensics", config, first, conclude, follow=follow)


def fit(
    finished: Finished, targets: dict[tuple[str, int], pd.Series], fitted: tuple[int, ...]
) -> pd.DataFrame:
    """Compute the deviation of every method in every cell from its target.

    Returns ``method``, ``service``, ``cv``, ``learning_rate``, ``workers``, ``deviation`` (nan with
    less than half of the bins), ``fitted`` (whether this number of workers is used for the fit),
    ``bins``, ``diverged`` (seeds).
    """
    rows = []
    for key, group in finished.summary.groupby(["method", *_POINT, "workers"], sort=False):
        method, *point, n = key
        target = targets[method, n]
        ours = _curve([finished.run(name) for name in group["run_folder"]], n)
        bins = int((pd.Series(ours.mean).reindex(target.index).notna() & target.notna()).sum())
        deviation = (
            _measure().log_deviation(ours, target)
            if 2 * bins >= target.notna().sum()
            else float("nan")
        )
        row = {
            "method": method,
            **dict(zip(_POINT, point, strict=True)),
            "workers": n,
            "deviation": deviation,
        }
        diverged = int((group["status"] == "diverged").sum())
        rows.append({**row, "fitted": n in fitted, "bins": bins, "diverged": diverged})
    return pd.DataFrame(rows)


def scores(table: pd.DataFrame) -> pd.Series:
    """Compute the mean square deviation over the fitted numbers of workers, by method and point;
    without nan.
    """
    square = table[table["fitted"]].assign(square=lambda rows: rows["deviation"] ** 2)
    # All numbers of workers must count: a mean over the survivors would favour the worst points.
    by_point = square.groupby(["method", *_POINT], sort=False)["square"]
    return by_point.mean().where(by_point.count() == by_point.size()).dropna()


def choose(table: pd.DataFrame) -> dict[tuple[float, float, float], set[str]]:
    """Choose the points to check with their methods: the common cluster, and each method's best
    point.
    """
    all_scores = scores(table)
    chosen: dict[tuple[float, float, float], set[str]] = {}
    for method in all_scores.index.unique("method"):
        method_scores = all_scores[method]
        chosen.setdefault(method_scores.idxmin(), set()).add(method)
        with contextlib.suppress(KeyError):
            service, cv = common_cluster(all_scores)
            rate = rates_at(all_scores, (service, cv))[method]
            chosen.setdefault((service, cv, rate), set()).add(method)
    return chosen


def common_cluster(all_scores: pd.Series) -> tuple[float, float]:
    """Return service time and CV with the lowest mean square deviation over all methods at their
    best rates.

    Raises
    ------
    KeyError
        At no cluster do all methods have comparable curves.
    """
    ranked = _ranked(all_scores)
    if ranked.empty:
        raise KeyError("no cluster for all methods")
    return ranked.index[0]


def rates_at(all_scores: pd.Series, cluster: tuple[float, float]) -> dict[str, float]:
    """Return each method's best learning rate at a cluster; ``all_scores``: from `scores`."""
    best = all_scores.xs(cluster, level=_CLUSTER).groupby("method").idxmin()
    return {method: rate for method, rate in best}


def verdict(table: pd.DataFrame, sought: tuple[float, float] | None = None) -> str:
    """Describe the preferred cluster, the quality of its fit, and whether it is the hidden one.

    ``table``: from `fit`. ``sought``: service time (s) and CV of the hidden cluster; None with
    published curves.
    """
    all_scores = scores(table)
    ranked = _ranked(all_scores)
    if ranked.empty:
        return "none, because at no cluster all methods have comparable curves"
    chosen, off = ranked.index[0], ranked**0.5
    lines = [
        _held_out_verdict(table, all_scores, chosen),
        f"preferred of {counted(len(off), 'cluster')}, over all methods: {_cluster_text(chosen)}, "
        f"with a deviation of {off.iloc[0]:.4g}",
    ]
    if len(off) > 1:
        lines[1] += f"; next: {_cluster_text(off.index[1])}, with {off.iloc[1]:.4g}"
    if sought is not None:
        missed = "is not recovered: its curves do not distinguish it from others"
        if not (table[_CLUSTER] == list(sought)).all(axis=1).any():
            missed = "is not among the fitted clusters; add its values to service and cv"
        lines.append(
            f"the hidden cluster, {_cluster_text(sought)}, "
            f"{'is recovered' if chosen == sought else missed}"
        )
    return "\n".join(lines)


def _held_out_verdict(
    table: pd.DataFrame, all_scores: pd.Series, cluster: tuple[float, float]
) -> str:
    """Describe how well a cluster predicts the held-out curves, each method at its best rate."""
    at_best = table["learning_rate"] == table["method"].map(rates_at(all_scores, cluster))
    rows = table[(table[_CLUSTER] == list(cluster)).all(axis=1) & at_best & ~table["fitted"]]
    if rows.empty:
        return "none, because no held-out curve is finished; leave some of workers out of fitted"
    worst = rows.sort_values("deviation", na_position="last").iloc[-1]
    quality = "good" if worst["deviation"] <= HELD_OUT_BAR else "poor"
    reached = (
        "diverged early"
        if math.isnan(worst["deviation"])
        else f"deviates by {worst['deviation']:.3g}"
    )
    name = f"{worst['method']} with {counted(worst['workers'], 'worker')}"
    bar = f"held-out curves may deviate by {HELD_OUT_BAR:g}"
    return f"the fit is {quality}: {bar}, and the worst of {len(rows)}, {name}, {reached}"


def _ranked(all_scores: pd.Series) -> pd.Series:
    """Rank the clusters at which every method has curves by mean square deviation, the lowest
    first.
    """
    best = all_scores.groupby(["method", *_CLUSTER], sort=False).min().groupby(_CLUSTER, sort=False)
    everywhere = best.count() == all_scores.index.unique("method").size
    return best.mean()[everywhere].sort_values(kind="stable")


def _cluster_text(cluster: tuple[float, float]) -> str:
    return "service {:g} s, CV {:g}".format(*cluster)


def _deviations(table: pd.DataFrame) -> str | pd.DataFrame:
    """Tabulate the deviations at the chosen points."""
    parts = []
    for point, names in choose(table).items():
        selected = (table[_POINT] == list(point)).all(axis=1) & table["method"].isin(names)
        parts.append(table[selected])
    if not parts:
        return "no comparable curves: all of them diverged early"
    rows = pd.concat(parts).sort_values(["fitted", "workers"], ascending=[False, True])
    use = rows["fitted"].map({True: "fitted", False: "held out"})
    rows = rows.assign(
        workers=[f"{use}, n = {n}" for use, n in zip(use, rows["workers"], strict=True)]
    )
    wide = rows.pivot(index=["method", *_POINT], columns="workers", values="deviation")[
        rows["workers"].unique()
    ]
    return titled(wide.reset_index())


def _published(cell: Cell, config: Config) -> dict[tuple[str, int], pd.Series]:
    """Return the published curves of the study's methods and workers; empty for another task."""
    module, curves = _measure(), {}
    if not module.TASK.is_posed_by(cell.problem.name, cell.problem.config):
        return {}
    for method in cell.methods:
        panel = _PANELS[require_choice("methods", method.name, _PANELS)]
        for n in config.workers:
            curves[method.name, n] = module.binned(panel, f"{method.name} n={n}")
            if curves[method.name, n].empty:
                raise InputError(
                    f"workers = {n}: no curve of {method.name} is published for it; give 5, 10, 20 "
                    "or 30"
                )
    return curves


def _hidden(cells: Iterable[Cell]) -> dict[tuple[str, int], pd.Series]:
    """Compute the curves of the hidden cluster, with seeds that the study does not use."""
    curves = {}
    for cell in cells:
        config = cell.config
        note(f"{cell.problem.name} has no published curves: fits the curves of {cell.name}")
        for method in cell.methods:
            runs = []
            cluster, commits = cell.cluster_of(method)
            for seed in range(config.seeds, 2 * config.seeds):
                trace = simulate(cluster, commits, seed)
                runs.append(replay(trace, method, cell.problem, seed, precision=config.precision))
            curves[method.name, cell.cluster.workers] = pd.Series(
                _curve(runs, cell.cluster.workers).mean
            )
    return curves


def _curve(runs: list[Run], workers: int) -> Curve:
    """Average the minibatch losses over bins of 20 worker steps and over the runs."""
    return curve_of(
        runs, lambda commits: commits["loss"].to_numpy(), "mean", workers, _measure().BIN_STEPS
    )


def _as_table(targets: dict[tuple[str, int], pd.Series]) -> pd.DataFrame:
    steps = _measure().BIN_STEPS
    parts = [
        pd.DataFrame(
            {
                "method": method,
                "workers": n,
                "step": (target.index + 0.5) * steps,
                "loss": target.to_numpy(),
            }
        )
        for (method, n), target in targets.items()
    ]
    return pd.concat(parts, ignore_index=True)


def _with_methods(cell: Cell, names: set[str]) -> Cell:
    return cell._replace(methods=[method for method in cell.methods if method.name in names])


def _measure() -> Any:
    """Load the module of the published curves and their deviations."""
    return load_file("asyncsim.figures.gem.published", shipped("figures") / "gem" / "published.py")
