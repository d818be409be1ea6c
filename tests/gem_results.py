"""Folders of results as the studies of the GEM paper write them, made by hand: no simulation, no
gradients.
"""

import json

import numpy as np
import pandas as pd

from asyncsim import Run
from asyncsim.study import load, outcome
from asyncsim.study.finished import read

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
    method="gem",
    n=2,
    *,
    steps=5,
    seed=0,
    seconds=1.0,
    diverged_at=None,
    own=None,
    noise=0.2,
    every=1,
):
    """``steps`` commits of each worker in turn, the trace's ``own`` workers if these are others
    than ``n``.
    """
    own = own or n
    count = steps * own if diverged_at is None else diverged_at + 1
    generator = np.random.default_rng([seed, n, len(method)])
    commit = np.arange(count)
    step = (commit + 1) / own
    loss = plain_loss(method, n, step) * np.exp(noise * generator.normal(size=count))
    ratio = (0.9 if method == "gem" else 0.5 * n) * np.exp(noise * generator.normal(size=count))
    commits = pd.DataFrame(
        {
            "commit": commit,
            "commit_time": step * seconds,
            "worker": commit % own,
            "worker_step": commit // own,
            "staleness": np.minimum(commit, own - 1),
            "loss": loss,
            "update_norm": 0.1,
            "central_energy": ratio * 1e-3 * loss,
            "proxy_energy": 1e-3 * loss,
        }
    )
    if diverged_at is not None:
        commits.loc[commits.index[-1], ["loss", "central_energy"]] = np.inf
    evaluated = np.unique(np.linspace(0, count, 11).astype(int))
    train = plain_loss(method, n, evaluated / own)
    evaluations = pd.DataFrame(
        {
            "commit": evaluated,
            "commit_time": evaluated / own,
            "gradients": evaluated,
            "train_loss": train,
            "test_loss": train * (1.1 + (method == "sgd") * 2 * evaluated / count),
            "test_accuracy": 0.99,
        }
    )
    config = {"method": method, "commits": steps * own, "workers": own}
    return Run(
        commits,
        evaluations,
        _diagnostics(commits, method, own, every),
        np.zeros(1),
        diverged_at,
        config,
    )


def _diagnostics(commits, method, n, every):
    rows = []
    for index in range(0, len(commits), every * n):
        at = commits.iloc[index]
        when = [index, at["commit_time"], int(at["worker"]), int(at["worker_step"])]
        level = plain_pi(n, (index + 1) / n) * (1 if method == "gem" else 0.5)
        for place, tensor in enumerate(TENSORS):
            central, proxy = at["central_energy"] * (1 + place), at["proxy_energy"]
            rows.append([*when, "central_energy", tensor, np.nan, central / len(TENSORS)])
            rows.append([*when, "proxy_energy", tensor, np.nan, proxy / len(TENSORS)])
            if method in WITH_PI:
                rows.append([*when, "pi", tensor, 0.5, level * (0.5 + 0.3 * place)])
        for quantile in QUANTILES:
            spread = 10 ** (4 * (quantile - 0.5)) * at["central_energy"] / at["proxy_energy"]
            rows.append([*when, "weight_energy_ratio", "", quantile, spread])
            if method in WITH_PI:
                rows.append([*when, "pi", "", quantile, level * 2 * quantile])
        if method == "gem":
            low = n / (n + 30)
            shares = {"clipped_low": low, "clipped_high": 0.1 * (1 - low), "opposite_sign": 0.45}
            rows += [[*when, name, "", np.nan, share] for name, share in shares.items()]
    columns = [
        "commit",
        "commit_time",
        "worker",
        "worker_step",
        "quantity",
        "tensor",
        "quantile",
        "value",
    ]
    return pd.DataFrame(rows, columns=columns)


def write_study(folder, study, cells, problem="digits", seeds=2, tables=None, **problem_config):
    """Write runs and a summary; each cell is ``(values, method, arguments of make_run)``, for each
    of the seeds.
    """
    rows = []
    for index, (values, method, arguments) in enumerate(cells):
        n = values["workers"]
        for seed in range(seeds):
            run = make_run(method, n, seed=seed, **arguments)
            path = run.save(folder / "runs" / f"{index}" / f"{method}-seed{seed}")
            last = run.commits.tail(max(1, round(0.1 * run.config["commits"])))
            ended = {"final_loss": last["loss"].mean(), "test_accuracy": 0.99}
            ended["energy_ratio"] = outcome.late_energy_ratio(run.commits, run.config["commits"])
            if run.diverged_at is not None:
                ended = dict.fromkeys(ended, np.nan)
            rows.append(
                {
                    **values,
                    "method": method,
                    "seed": seed,
                    "status": run.status,
                    **ended,
                    "method.learning_rate": values.get("learning_rate", 0.05),
                    "own_workers": arguments.get("own") or n,
                    "run_folder": path.relative_to(folder).as_posix(),
                }
            )
    pd.DataFrame(rows).to_csv(folder / "summary.csv", index=False)
    config = {
        "study": study,
        "problem": problem,
        "problem_config": {"batch_size": 32, **problem_config},
    }
    (folder / "config.json").write_text(json.dumps(config))
    if study == "energy":
        energy, finished = load("energy"), read(folder, study)
        (compliance,) = finished.each_run(lambda run: [energy.compliance(run)])
        compliance.to_csv(folder / energy.TABLE, index=False)
    for name, table in (tables or {}).items():
        table.to_csv(folder / name, index=False)
    return folder


def write_all(folder, steps=5, counts=(2, 4), problem="digits", seeds=2, noise=0.2, every=1):
    """Write a folder of results for every study, each a few commits long unless ``steps`` says
    otherwise.
    """
    size = {"steps": steps, "noise": noise, "every": every}
    dies = {**size, "diverged_at": 2 * steps * counts[-1] // 3}
    tables = {
        "policies": {"ranks.csv": ranks(counts[-1])},
    }
    for name, cells in _cells(size, dies, counts).items():
        study = "staleness" if name == "hundred" else name
        write_study(folder / name, study, cells, problem, seeds, tables.get(name))
    return folder


def _cells(size, dies, counts):
    few, many = counts[0], counts[-1]
    longer = {**size, "steps": size["steps"] * few}
    stability = [
        ({"workers": n, "learning_rate": rate}, name, size)
        for rate in (0.05, 0.01)
        for n in counts
        for name in METHODS
    ]
    misspecification = []
    for rate in (0.03, 0.1):
        misspecification.append(({"workers": 1, "learning_rate": rate}, "sgd", size))
        for n in counts:
            how = dies if (n, rate) == (many, 0.1) else size
            misspecification.append(({"workers": n, "learning_rate": rate}, "gem", size))
            misspecification.append(({"workers": n, "learning_rate": rate}, "downpour", how))
    return {
        "stability": stability,
        "hundred": [({"workers": many}, "gem", {**size, "seconds": 2.5})],
        "speedup": [
            ({"workers": n, "batch_size": 64 // n}, "gem", {**size, "seconds": 1 / n})
            for n in counts
        ],
        "generalization": [({"workers": few}, "gem", size), ({"workers": 1}, "sgd", longer)],
        "misspecification": misspecification,
        "kappa": [
            *(
                ({"workers": few, "method.kappa": kappa}, "gem", size)
                for kappa in (1.0, 1.5, 2.0, 2.5, 3.0, 3.5)
            ),
            ({"workers": few, "method.kappa": 4.0}, "gem", {**size, "diverged_at": size["steps"]}),
        ],
        "tensors": [({"workers": n}, "gem", size) for n in counts[:2]],
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


def ranks(n):
    rows = []
    for worker in range(n):
        share = max(0.0, 1.6 - 2 * worker / n) / n
        rows.append(["fifo", n, 0, worker, 1 / n, n - 1])
        rows.append(
            ["lowest_rank", n, 0, worker, share, n * (0.5 + worker / n) if share else np.nan]
        )
    return pd.DataFrame(
        rows, columns=["discipline", "workers", "seed", "worker", "share", "staleness_mean"]
    )
