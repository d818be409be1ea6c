"""Which cluster published curves came from: its service time and spread, found from losses alone.

The GEM paper does not say how long its server took for a visit, nor how much its workers' times varied, and its curves
depend on both. So the methods of its figure 1 are run over a grid of clusters and learning rates, with some numbers of
workers (--fitted). Chosen is the cluster whose curves are nearest to the published ones of all methods, each at its
best learning rate. It is checked with the other numbers of workers, on which nothing was fitted; for comparison so is
the cluster that fits each method best by itself.

Times are in units of the mean time of a gradient, one second, as curves over worker steps know no other. The deviation
is the root mean square of log10(ours / published), losses averaged over 20 worker steps and the seeds. Bins outside the
published axes are left out, and a curve that has fewer than half of the published bins, because it diverged, has none.
Printed are the cluster that is preferred, the next one, each with its deviation over all methods, and a verdict: the
fit is good if the curves that were held out, of the other numbers of workers, deviate by at most 0.15 each, a factor of
1.4.

Curves are published for MNIST alone (--scale paper). On any other problem the study shows instead how far it can be
trusted: the curves to be fitted are those of a hidden cluster (--hidden), with seeds of their own, and it has to
find that cluster again. It need not: where the compute times hardly vary (CV 0.05) all delays are nearly constant with
or without a queue, and curves of one seed do not tell service times of 0 and 0.2 s apart.

At paper scale the grid is 18 points of 70,000 commits of MNIST's network each, the check at most four times 110,000
more: about two hours on two cores for each seed.
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
from asyncsim.study.config import MethodLike, StudyConfig
from asyncsim.study.finished import Finished, outcomes, present, read
from asyncsim.study.sweep import Result, SweepConfig, run_cells, sweep

#: The panels of the paper's figure by their methods.
_PANELS = {"gem": "1a", "downpour": "1b", "adaptive_staleness": "1c"}
#: What sets the cells apart besides the workers.
_POINT = ["service", "cv", "learning_rate"]
_CLUSTER = ["service", "cv"]
#: The most that a curve may deviate that was held out, for a good fit.
HELD_OUT_BAR = 0.15


@dataclass(frozen=True)
class Config(SweepConfig):
    """Options of the forensics study."""

    varied: ClassVar = ("workers", "service", "cv", "learning_rate")

    service: tuple[float, ...] = (0.0, 0.2)
    """Constant times that the server is busy with a visit, one after the other (s; a gradient takes 1 s on average)."""
    cv: tuple[float, ...] = (0.05, 0.5)
    """Coefficients of variation of the compute times, which are gamma distributed, one after the other."""
    # Several values here, of which each cell has one.
    learning_rate: tuple[float, ...] = (0.05, 0.02)  # type: ignore[assignment]
    """Step sizes of a gradient, one after the other, for all methods."""
    fitted: tuple[int, ...] = (5, 20)
    """Those of workers on which the cluster is fitted; it is checked on the others."""
    hidden: tuple[float, float, float] = (0.2, 0.5, 0.05)
    """Service time (s), CV and learning rate that are to be found again, on a problem without published curves."""
    methods: tuple[MethodLike, ...] = ("gem", "downpour")
    """Methods to compare: gem, downpour, adaptive_staleness, or your own (not with published curves)."""
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
                known = ", ".join(map(str, self.workers))
                raise InputError(f"fitted = {count}: is not among workers, {known}; give some of these")

    def record(self, methods: Sequence[Method], problem: Problem) -> dict[str, Any]:
        """Return what the results depend on; of the compute times that is ``cv``."""
        return {name: value for name, value in super().record(methods, problem).items() if name != "compute"}

    def at(self, **values: Any) -> StudyConfig:
        """Return the options of one cluster; ``cv`` is that of its compute times."""
        cv = values.pop("cv", self.cv[0])
        return super().at(**{"compute": f"gamma(mean=1, cv={cv})" if cv else "constant(1)", **values})


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
        made = sweep(config, [{**dict(zip(_POINT, point, strict=True)), "workers": n} for point, n in grid])
        cells = dict(zip(grid, made, strict=True))
        published = _published(made[0], config)
        targets = published or _hidden([cells[config.hidden, n] for n in config.workers])
        source = (
            "published" if published else "hidden: service {:g} s, CV {:g}, learning rate {:g}".format(*config.hidden)
        )

        def conclude(folder: Path, summary: pd.DataFrame) -> None:
            table = fit(read(folder, "forensics"), targets, config.fitted)
            sought = None if published else config.hidden[:2]
            text = f"deviation from the curves to be fitted ({source})\n{_told(table)}\n\n{verdict(table, sought)}\n"
            tables = {"target.csv": _as_table(targets), "fit.csv": table}
            present(folder, tables, text, outcomes(folder, summary, ("method", *_POINT, "workers")))

        def follow(folder: Path, summary: pd.DataFrame) -> list[Cell]:
            found = choose(fit(read(folder, "forensics"), targets, config.fitted))
            held_out = [n for n in config.workers if n not in config.fitted]
            return [_only(cells[point, n], names) for point, names in found.items() for n in held_out]

        first = [cells[point, n] for point in points for n in config.workers if n in config.fitted]
        return run_cells("forensics", config, first, conclude, follow=follow)


def fit(finished: Finished, targets: dict[tuple[str, int], pd.Series], fitted: tuple[int, ...]) -> pd.DataFrame:
    """Return the deviation of every method in every cell from its target.

    Returns ``method``, ``service``, ``cv``, ``learning_rate``, ``workers``, ``deviation`` (nan without half of the
    bins), ``fitted`` (whether the cluster is chosen by this number of workers), ``bins``, ``diverged`` (seeds).
    """
    rows = []
    for key, group in finished.summary.groupby(["method", *_POINT, "workers"], sort=False):
        method, *point, n = key
        target = targets[method, n]
        ours = _curve([finished.run(name) for name in group["run_folder"]], n)
        bins = int((pd.Series(ours.mean).reindex(target.index).notna() & target.notna()).sum())
        deviation = _measure().log_deviation(ours, target) if 2 * bins >= target.notna().sum() else float("nan")
        row = {"method": method, **dict(zip(_POINT, point, strict=True)), "workers": n, "deviation": deviation}
        diverged = int((group["status"] == "diverged").sum())
        rows.append({**row, "fitted": n in fitted, "bins": bins, "diverged": diverged})
    return pd.DataFrame(rows)


def scores(table: pd.DataFrame) -> pd.Series:
    """Return the mean square deviation at the fitted numbers of workers, by method and point; without nan."""
    square = table[table["fitted"]].assign(square=lambda rows: rows["deviation"] ** 2)
    # All of them count: a mean over those that did not diverge would choose the worst.
    by_point = square.groupby(["method", *_POINT], sort=False)["square"]
    return by_point.mean().where(by_point.count() == by_point.size()).dropna()


def choose(table: pd.DataFrame) -> dict[tuple[float, float, float], set[str]]:
    """Return the points to check, each with its methods: the common cluster, and each method's own best."""
    found = scores(table)
    chosen: dict[tuple[float, float, float], set[str]] = {}
    for method in found.index.unique("method"):
        own = found[method]
        chosen.setdefault(own.idxmin(), set()).add(method)
        with contextlib.suppress(KeyError):
            service, cv = common_cluster(found)
            rate = rates_at(found, (service, cv))[method]
            chosen.setdefault((service, cv, rate), set()).add(method)
    return chosen


def common_cluster(found: pd.Series) -> tuple[float, float]:
    """Return service time and CV with the least mean square deviation over all methods, each at its best rate.

    Raises
    ------
    KeyError
        There is no cluster at which every method has curves to compare.
    """
    ranked = _ranked(found)
    if ranked.empty:
        raise KeyError("no cluster for all methods")
    return ranked.index[0]


def rates_at(found: pd.Series, cluster: tuple[float, float]) -> dict[str, float]:
    """Return the learning rate at which each method's curves fit best with a cluster; ``found`` as `scores` has it."""
    best = found.xs(cluster, level=_CLUSTER).groupby("method").idxmin()
    return {method: rate for method, rate in best}


def verdict(table: pd.DataFrame, sought: tuple[float, float] | None = None) -> str:
    """Return in words which cluster is preferred, whether it fits well, and whether it is the hidden one.

    ``table``: as `fit` returns it. ``sought``: service time (s) and CV of the hidden cluster; None where curves are
    published.
    """
    found = scores(table)
    ranked = _ranked(found)
    if ranked.empty:
        return "verdict: none, as at no cluster do all methods have curves to compare"
    chosen, off = ranked.index[0], ranked**0.5
    lines = [
        f"preferred of {counted(len(off), 'cluster')}, over all methods: {_cluster_text(chosen)}, "
        f"with a deviation of {off.iloc[0]:.4g}"
    ]
    if len(off) > 1:
        lines[0] += f"; next: {_cluster_text(off.index[1])}, with {off.iloc[1]:.4g}"
    lines.append(f"verdict: {_held_out_verdict(table, found, chosen)}")
    if sought is not None:
        missed = "is not found again: such curves do not tell it from others"
        if not (table[_CLUSTER] == list(sought)).all(axis=1).any():
            missed = "is none of those that were tried; give its values to service and cv, too"
        lines.append(f"the hidden cluster, {_cluster_text(sought)}, {'is found again' if chosen == sought else missed}")
    return "\n".join(lines)


def _held_out_verdict(table: pd.DataFrame, found: pd.Series, cluster: tuple[float, float]) -> str:
    """Return whether the curves at a cluster are near those that were held out, each method at its best rate."""
    at_best = table["learning_rate"] == table["method"].map(rates_at(found, cluster))
    rows = table[(table[_CLUSTER] == list(cluster)).all(axis=1) & at_best & ~table["fitted"]]
    if rows.empty:
        return "none, as no curves were held out that are finished; leave some of workers out of fitted"
    worst = rows.sort_values("deviation", na_position="last").iloc[-1]
    told = "good" if worst["deviation"] <= HELD_OUT_BAR else "poor"
    reached = "diverged early" if math.isnan(worst["deviation"]) else f"does by {worst['deviation']:.3g}"
    name = f"{worst['method']} with {counted(worst['workers'], 'worker')}"
    may = f"curves that were held out may deviate by {HELD_OUT_BAR:g}"
    return f"the fit is {told}: {may}, and the worst of {len(rows)}, {name}, {reached}"


def _ranked(found: pd.Series) -> pd.Series:
    """Return the mean square deviation of the clusters at which every method has curves, the least first."""
    best = found.groupby(["method", *_CLUSTER], sort=False).min().groupby(_CLUSTER, sort=False)
    everywhere = best.count() == found.index.unique("method").size
    return best.mean()[everywhere].sort_values(kind="stable")


def _cluster_text(cluster: tuple[float, float]) -> str:
    return "service {:g} s, CV {:g}".format(*cluster)


def _told(table: pd.DataFrame) -> str:
    """Return the deviations at the chosen points, as a table."""
    parts = []
    for point, names in choose(table).items():
        here = (table[_POINT] == list(point)).all(axis=1) & table["method"].isin(names)
        parts.append(table[here])
    if not parts:
        return "no curves to compare: all of them diverged early"
    rows = pd.concat(parts).assign(used=lambda rows: rows["fitted"].map({True: "fitted", False: "held out"}))
    wide = rows.pivot_table(index=["method", *_POINT], columns=["used", "workers"], values="deviation")
    return wide.to_string(float_format="{:.3f}".format, na_rep="-")


def _published(cell: Cell, config: Config) -> dict[tuple[str, int], pd.Series]:
    """Return the published curves of the study's methods and workers; none for another task than the paper's."""
    module, found = _measure(), {}
    if not module.TASK.is_posed_by(cell.problem.name, cell.problem.config):
        return {}
    for method in cell.methods:
        panel = _PANELS[require_choice("methods", method.name, _PANELS)]
        for n in config.workers:
            found[method.name, n] = module.binned(panel, f"{method.name} n={n}")
            if found[method.name, n].empty:
                raise InputError(f"workers = {n}: no curve of {method.name} is published for it; give 5, 10, 20 or 30")
    return found


def _hidden(cells: Iterable[Cell]) -> dict[tuple[str, int], pd.Series]:
    """Return the curves of a cluster that is to be found again, with seeds that the study does not use."""
    found = {}
    for cell in cells:
        config = cell.config
        note(f"{cell.problem.name} has no published curves: fits those of {cell.name}")
        for method in cell.methods:
            runs = []
            cluster, commits = cell.own(method)
            for seed in range(config.seeds, 2 * config.seeds):
                trace = simulate(cluster, commits, seed)
                runs.append(replay(trace, method, cell.problem, seed, precision=config.precision))
            found[method.name, cell.cluster.workers] = pd.Series(_curve(runs, cell.cluster.workers).mean)
    return found


def _curve(runs: list[Run], workers: int) -> Curve:
    """Return the losses averaged over bins of 20 worker steps and the runs."""
    return curve_of(runs, lambda commits: commits["loss"].to_numpy(), "mean", workers, _measure().BIN_STEPS)


def _as_table(targets: dict[tuple[str, int], pd.Series]) -> pd.DataFrame:
    steps = _measure().BIN_STEPS
    parts = [
        pd.DataFrame({"method": method, "workers": n, "step": (target.index + 0.5) * steps, "loss": target.to_numpy()})
        for (method, n), target in targets.items()
    ]
    return pd.concat(parts, ignore_index=True)


def _only(cell: Cell, names: set[str]) -> Cell:
    return cell._replace(methods=[method for method in cell.methods if method.name in names])


def _measure() -> Any:
    """Return the module of the published curves and of the deviation from them."""
    return load_file("asyncsim.figures.gem.published", shipped("figures") / "gem" / "published.py")
