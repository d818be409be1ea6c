"""Folders of results as the studies write them, made by hand: no simulation, no gradients."""

import dataclasses
import itertools
import json
from types import SimpleNamespace

import numpy as np
import pandas as pd

from asyncsim import Cluster, Run, Trace, recorded
from asyncsim.study import load
from asyncsim.study.outcome import late_energy_ratio

TENSORS = ("conv_1", "conv_1_bias", "dense", "dense_bias")
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
METHODS = ("gem", "downpour", "adaptive_staleness")
WITH_PI = ("gem", "mine")
#: Worker steps in which each method's loss falls by a factor e, and where to, with n workers.
_FALL = {
    "gem": lambda n: (40, 0.09 / n**0.3),
    "downpour": lambda n: (20 * n**0.7, 0.08),
    "adaptive_staleness": lambda n: (80 + 3 * n, 0.35),
    "sgd": lambda n: (60, 0.08),
    "mine": lambda n: (50, 0.1),
}


def plain_loss(method: str, n: int, step: np.ndarray) -> np.ndarray:
    fall, end = _FALL[method](n)
    return end + (2.3 - end) * np.exp(-step / fall)


def plain_pi(n: int, step: float) -> float:
    return 1.8 / (1 + n / 5) * (1 - np.exp(-step / 30))


def make_run(
    method="gem", n=2, *, steps=5, seed=0, seconds=1.0, diverged_at=None, noise=0.2, every=1
):
    """``steps`` commits of each worker in turn."""
    count = steps * n if diverged_at is None else diverged_at + 1
    generator, commit = np.random.default_rng([seed, n, len(method)]), np.arange(count)
    step = (commit + 1) / n
    loss = plain_loss(method, n, step) * np.exp(noise * generator.normal(size=count))
    ratio = (0.9 if method == "gem" else 0.5 * n) * np.exp(noise * generator.normal(size=count))
    commits = pd.DataFrame(
        {
            "commit": commit,
            "commit_time": step * seconds,
            "worker": commit % n,
            "worker_step": commit // n,
            "staleness": np.minimum(commit, n - 1),
            "loss": loss,
            "update_norm": 0.1,
            "central_energy": ratio * 1e-3 * loss,
            "proxy_energy": 1e-3 * loss,
        }
    )
    if diverged_at is not None:
        commits.loc[commits.index[-1], ["loss", "central_energy"]] = np.inf
    evaluated = np.unique(np.linspace(0, count, 11).astype(int))
    train = plain_loss(method, n, evaluated / n)
    evaluations = pd.DataFrame(
        {
            "commit": evaluated,
            "commit_time": evaluated / n,
            "gradients": evaluated,
            "train_loss": train,
            "test_loss": train * (1.1 + (method == "sgd") * 2 * evaluated / count),
            "test_accuracy": 0.99,
        }
    )
    config = {"method": method, "commits": steps * n, "workers": n}
    diagnostics = _diagnostics(commits, method, n, every)
    return Run(commits, evaluations, diagnostics, np.zeros(1), diverged_at, config)


def _diagnostics(commits, method, n, every):
    """Diagnose a step of worker 0 of every so many: the factors of some methods, the shares of
    GEM's weights.
    """
    rows, nan = [], np.nan
    for at in commits.iloc[:: every * n].itertuples(index=False):
        level = plain_pi(n, (at.commit + 1) / n) * (1 if method == "gem" else 0.5)
        values = []
        for place, tensor in enumerate(TENSORS):
            central = at.central_energy * (1 + place) / len(TENSORS)
            values.append(("central_energy", tensor, nan, central))
            values.append(("proxy_energy", tensor, nan, at.proxy_energy / len(TENSORS)))
            values.append(("pi", tensor, 0.5, level * (0.5 + 0.3 * place)))
        for quantile in QUANTILES:
            ratio = 10 ** (4 * (quantile - 0.5)) * at.central_energy / at.proxy_energy
            values.append(("weight_energy_ratio", "", quantile, ratio))
            values.append(("pi", "", quantile, level * 2 * quantile))
        low = n / (n + 30)
        shares = {"clipped_low": low, "clipped_high": 0.1 * (1 - low), "opposite_sign": 0.45}
        values += [(name, "", nan, share) for name, share in shares.items() if method == "gem"]
        rows += [(*at[:4], *row) for row in values if row[0] != "pi" or method in WITH_PI]
    when = ["commit", "commit_time", "worker", "worker_step"]
    return pd.DataFrame(rows, columns=[*when, "quantity", "tensor", "quantile", "value"])


def late_pi(run: Run) -> float:
    """The mean of the recorded medians of pi in the last tenth."""
    medians = run.diagnostics.query("quantity == 'pi' and quantile == 0.5 and tensor == ''")
    late = min(0.9 * run.config["commits"], medians["commit"].max())
    return float(medians.loc[medians["commit"] >= late, "value"].mean())


def write_study(folder, study, cells, problem="digits", seeds=2, tables=None, **problem_config):
    """Write runs and a summary; each cell is ``(values, method, arguments of make_run)``, for each
    of the seeds.
    """
    rows, medians, tables = [], [], dict(tables or {})
    for (index, (values, method, arguments)), seed in itertools.product(
        enumerate(cells), range(seeds)
    ):
        n = values["workers"]
        run = make_run(method, n, seed=seed, **arguments)
        path = run.save(folder / "runs" / f"{index}" / f"{method}-seed{seed}")
        if study == "tensors" and method in WITH_PI:
            table = load(study).medians(run)
            medians.append(table.assign(workers=n, method=method, seed=seed))
        commits, count = run.commits, run.config["commits"]
        ended = {
            "final_loss": commits["loss"].tail(max(1, round(0.1 * count))).mean(),
            "test_accuracy": 0.99,
            "median_pi": late_pi(run),
            "energy_ratio": late_energy_ratio(commits, count),
        }
        if run.diverged_at is not None:
            ended = dict.fromkeys(ended, np.nan)
        if study == "energy":
            ended |= load(study).compliance(None, run, SimpleNamespace(workers=n))
        row = {**values, "method": method, "seed": seed, "status": run.status, **ended}
        row |= {"method.learning_rate": values.get("learning_rate", 0.05), "own_workers": n}
        rows.append({**row, "run_folder": path.relative_to(folder).as_posix()})
    if medians:
        tables["tensors.csv"] = pd.concat(medians)
    for name, table in {**tables, "summary.csv": pd.DataFrame(rows)}.items():
        table.to_csv(folder / name, index=False)
    config = {"study": study, "problem": problem}
    config["problem_config"] = {"batch_size": 32, **problem_config}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def write_all(folder, steps=5, counts=(2, 4)):
    """Write a folder of results for every study, each a few commits long."""
    few, many = counts
    size, dies = {"steps": steps}, {"steps": steps, "diverged_at": 2 * steps * many // 3}
    rates = {rate: {"learning_rate": rate} for rate in (0.05, 0.01, 0.03, 0.1)}
    misspecification = []
    for rate in (0.03, 0.1):
        misspecification.append(({"workers": 1} | rates[rate], "sgd", size))
        for n in counts:
            how = dies if (n, rate) == (many, 0.1) else size
            misspecification.append(({"workers": n} | rates[rate], "gem", size))
            misspecification.append(({"workers": n} | rates[rate], "downpour", how))
    cells = {
        "stability": [
            ({"workers": n} | rates[rate], name, size)
            for rate in (0.05, 0.01)
            for n in counts
            for name in METHODS
        ],
        "hundred": [({"workers": many}, "gem", {**size, "seconds": 2.5})],
        "speedup": [
            ({"workers": n, "batch_size": 64 // n}, "gem", {**size, "seconds": 1 / n})
            for n in counts
        ],
        "generalization": [
            ({"workers": few}, "gem", size),
            ({"workers": 1}, "sgd", {"steps": steps * few}),
        ],
        "misspecification": misspecification,
        "kappa": [
            *(
                ({"workers": few, "method.kappa": kappa}, "gem", size)
                for kappa in (1.0, 1.5, 2.0, 2.5, 3.0, 3.5)
            ),
            ({"workers": few, "method.kappa": 4.0}, "gem", {**size, "diverged_at": steps}),
        ],
        "tensors": [({"workers": n}, "gem", size) for n in counts],
        "energy": [
            ({"workers": n}, name, dies if (n, name) == (many, "downpour") else size)
            for n in counts
            for name in METHODS[:2]
        ],
        "policies": [
            ({"discipline": name, "workers": many}, method, size)
            for name in ("fifo", "lowest_rank")
            for method in METHODS[:2]
        ],
    }
    for name, of_study in cells.items():
        tables = {"ranks.csv": ranks(many)} if name == "policies" else None
        study = "staleness" if name == "hundred" else name
        write_study(folder / name, study, of_study, tables=tables)
    return folder


def ranks(n):
    """The shares of workers by rank of two disciplines; the last ranks have no turn."""
    rows = []
    for worker in range(n):
        share = max(0.0, 1.6 - 2 * worker / n) / n
        staleness = n * (0.5 + worker / n) if share else np.nan
        rows.append(("fifo", n, 0, worker, 1 / n, n - 1))
        rows.append(("lowest_rank", n, 0, worker, share, staleness))
    columns = ["discipline", "workers", "seed", "worker", "share", "staleness_mean"]
    return pd.DataFrame(rows, columns=columns)


def write_windows(folder):
    """Write a folder as the study of windows does, on the thesis' cluster."""
    folder.mkdir(parents=True)
    cells = pd.DataFrame(itertools.product((10, 20), (1, 10)), columns=["workers", "window"])
    runs = cells.merge(pd.DataFrame({"method": ["agn", "aeasgd", "downpour"]}), "cross")
    runs = runs.assign(seed=0, status="finished")
    runs["simulated_seconds"] = 100.0 * runs["workers"] / runs["window"]
    for part, accuracy in (("train", 0.99), ("test", 0.98)):
        runs[f"{part}_accuracy"] = accuracy - 0.001 * runs["workers"]
    staleness = cells.merge(pd.DataFrame({"staleness": range(20)}), "cross")
    staleness = staleness.query("staleness < workers").assign(share=lambda row: 1 / row["workers"])
    efficiency = cells.assign(method="agn", against="aeasgd", efficiency=1.01)
    tables = {"summary": runs, "efficiency": efficiency, "staleness": staleness}
    for name, table in tables.items():
        table.to_csv(folder / f"{name}.csv", index=False)
    config = {"study": "windows", "problem": "mnist", "problem_config": {"batch_size": 128}}
    paper, options = load("windows").SCALES["paper"], ("epochs", "compute", "service", "protocol")
    config |= {name: getattr(paper, name) for name in options}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def make_trace(cluster: Cluster | None, workers: int = 2, seed: int = 0) -> Trace:
    """Ten commits of workers in turn, one every half second, served for 0.1 s after waiting for
    0.1 s.
    """
    commit = np.arange(10)
    commit_time = 0.5 * (commit + 1) + seed / 100
    visits = {
        "worker": commit % workers,
        "start_time": np.where(commit < workers, 0.0, commit_time[commit - workers]),
        "arrive_time": commit_time - 0.2,
        "serve_time": commit_time - 0.1,
        "commit_time": commit_time,
    }
    return dataclasses.replace(recorded(visits, workers=workers, seed=seed), cluster=cluster)


def write_traced(folder, traces: dict[str, list[Trace]], diverged: str | None = None):
    """Write a folder of the study of staleness: ``traces`` by method, one per seed; seed 0 of
    ``diverged`` diverges.
    """
    rows = []
    for method, of_seeds in traces.items():
        for seed, trace in enumerate(of_seeds):
            file = folder / f"traces/{trace.workers}-{trace.protocol}-seed{seed}.parquet"
            file.exists() or trace.save(file)
            ends = 6 if (method, seed) == (diverged, 0) else None
            run = make_run(
                method, trace.workers, steps=10 // trace.workers, seed=seed, diverged_at=ends
            )
            place = run.save(folder / "runs" / f"{method}-seed{seed}").relative_to(folder)
            row = {"method": method, "seed": seed, "status": run.status, "run_folder": place}
            rows.append({**row, "trace_file": file.relative_to(folder)})
    pd.DataFrame(rows).to_csv(folder / "summary.csv", index=False)
    (folder / "config.json").write_text(json.dumps({"study": "staleness", "problem": "digits"}))
    return folder
