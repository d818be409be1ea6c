"""Claims of "Gradient Energy Matching" (Hermans and Louppe 2018, arXiv 1805.08469)."""

import functools
import math
from collections.abc import Iterator, Sequence

import numpy as np
import pandas as pd

from asyncsim.claims.claim import Bounds, Claim, Finding, above, interval_text, log_ratio
from asyncsim.replays.run import Run
from asyncsim.study.finished import Finished
from asyncsim.study.outcome import energy_ratios
from asyncsim.study.ranking import Measure, tuned

SOURCE = "Hermans and Louppe 2018"
#: Test accuracy of figure 2.
_ACCURACY = 0.9938
#: Loss of a guess among ten classes.
_GUESS = math.log(10)
#: A run learned if its final minibatch loss is below this.
_LEARNED = 0.5 * _GUESS
#: A test loss that ends below this multiple of its minimum shows no overfitting.
_OVERFIT = 1.1
#: A final loss is as low as another if it is at most this multiple.
_AS_LOW = 1.1
#: Worker steps at the beginning of a run whose energies predict its end.
_BEGINNING = 10


def _more_workers(
    name: str, method: str, above: float | None = None, below: float | None = None
) -> Bounds:
    """Compare the final losses with the fewest and the most workers (figures 1a, 1b, 1d)."""
    return Bounds(
        f"{name}'s final loss with {{of[workers]}} workers is {{}} times that with {{to[workers]}}",
        "final_loss",
        {"method": method, "workers": max},
        {"method": method, "workers": min},
        above,
        below,
    )


def _overfits(method: str, above: float | None = None, below: float | None = None) -> Bounds:
    """Compare the final test loss with its minimum, at the paper's rate (figure 5)."""
    text = f"{method.upper()}'s test loss ends at {{}} times its minimum"
    of = {"method": method, "method.learning_rate": 0.05}
    return Bounds(text, rise, of, above=above, below=below)


_BEST_RATE = tuple(
    Bounds(
        f"{{of[workers]}} workers: {name} ends at {{}} times GEM's loss",
        "train_loss",
        {"method": method},
        {"method": "gem"},
        above=1.0,
        per=("workers",),
        best=Measure("train_loss"),
    )
    for name, method in (("DOWNPOUR", "downpour"), ("adaptive staleness", "adaptive_staleness"))
)


def hundred_workers(finished: Finished) -> Iterator[Finding]:
    """Compare GEM's results with the most workers with published and DOWNPOUR's (figure 2)."""
    gem = {"method": "gem", "workers": max}
    loss = Bounds("GEM's final loss is {}", "final_loss", gem, below=_LEARNED)
    yield from loss.judge(finished)
    if finished.config["problem"] == "mnist":
        text = "test accuracy {}"
        yield from Bounds(text, "test_accuracy", gem, above=_ACCURACY).judge(finished)
    if "downpour" in set(finished.summary["method"]):
        downpour = {"method": "downpour", "workers": max}
        text = "GEM's test accuracy minus DOWNPOUR's is {}"
        comparison = Bounds(text, "test_accuracy", gem, downpour, above=0.0, ratio=False)
        yield from comparison.judge(finished)


def mean_factor(run: Run) -> float:
    """Average the median factor over a run."""
    table = run.diagnostics
    of_all = (table["quantity"] == "pi") & (table["tensor"] == "") & (table["quantile"] == 0.5)
    return float(table.loc[of_all, "value"].mean())


def rise(run: Run) -> float:
    """Return the final test loss over its minimum."""
    test_loss = run.evaluations["test_loss"]
    return float(test_loss.iloc[-1] / test_loss.min())


def at_equal_time(finished: Finished) -> Iterator[Finding]:
    """Compare momentum SGD's test loss, at the end of GEM's run, with GEM's, each at its best
    rate.
    """
    families = finished.summary["method"].str.partition("(")[0]
    summary = finished.summary.assign(family=families)
    best = tuned(summary, ["family"], Measure("test_loss"), over=("method",))
    gem, sgd = (best[best["family"] == name].set_index("seed") for name in ("gem", "sgd"))
    evaluations = sgd["run_folder"].map(lambda name: finished.run(name).evaluations)
    by_then = pd.Series(
        {
            seed: np.interp(end, evaluations[seed]["commit_time"], evaluations[seed]["test_loss"])
            for seed, end in gem["simulated_seconds"].items()
        }
    )
    early = log_ratio(by_then, gem["test_loss"])
    methods = " and ".join(runs["method"].iloc[0] for runs in (sgd, gem))
    text = f"equal time, {methods}: SGD's test loss is {interval_text(early)} times GEM's"
    yield above(text, early)


def generalizes(finished: Finished) -> Iterator[Finding]:
    """Compare GEM's test loss and error with momentum SGD's, each at its best rate."""
    sgd, gem, best = {"method": "sgd"}, {"method": "gem"}, Measure("test_loss")
    loss = Bounds(
        "equal gradients: SGD's test loss is {} times GEM's",
        *("test_loss", sgd, gem),
        above=1.0,
        best=best,
        over=("method",),
    )
    accuracy = Bounds(
        "GEM's test accuracy minus SGD's is {}",
        *("test_accuracy", gem, sgd),
        above=0.0,
        ratio=False,
        best=best,
        over=("method",),
    )
    yield from loss.judge(finished)
    yield from accuracy.judge(finished)
    yield from at_equal_time(finished)


def too_high_a_rate(finished: Finished) -> Iterator[Finding]:
    """Count the runs that learn at the misspecified rate (figure 6)."""
    rate = 0.1 if finished.config["problem"] == "mnist" else 0.2
    rows = finished.summary[finished.summary["learning_rate"] == rate]
    learned = rows["final_loss"].fillna(np.inf) < _LEARNED
    for method in ("sgd", "gem"):
        runs = learned[rows["method"] == method]
        text = f"{method.upper()} learns in {runs.sum()} of {len(runs)} runs at {rate:g}"
        yield Finding(text, bool(runs.all()) if len(runs) else None)
    fails = ~learned[(rows["method"] == "downpour") & (rows["workers"] >= 10)]
    text = f"DOWNPOUR fails in {fails.sum()} of {len(fails)} runs with 10 workers or more"
    yield Finding(text, bool(fails.all()) if len(fails) else None)


def energies_and_ends(finished: Finished) -> pd.DataFrame:
    """Tabulate the distributed runs at rates where the proxy, momentum SGD, is stable.

    Columns: ``method``; ``ratio``, the median of central over proxy energy over the first worker
    steps (a collapsed run moves little afterwards); ``stable``: the run ends below the loss of a
    guess.
    """
    summary = finished.summary
    commits = [finished.run(name).commits for name in summary["run_folder"]]
    first = [table[table["worker_step"] < _BEGINNING] for table in commits]
    table = summary[["method", "learning_rate"]].assign(
        ratio=[energy_ratios(steps).median() for steps in first],
        stable=(summary["status"] == "finished") & (summary["final_loss"] < _GUESS),
    )
    is_proxy = table["method"] == "sgd"
    if not is_proxy.any():
        raise LookupError("no run of the proxy, sgd")
    unstable_rates = table.loc[is_proxy & ~table["stable"], "learning_rate"]
    is_counted = ~is_proxy & ~table["learning_rate"].isin(unstable_rates)
    return table[is_counted & np.isfinite(table["ratio"])]


def compliance(finished: Finished, compliant: bool = True) -> Iterator[Finding]:
    """Count the stable runs among those with at most the proxy's energy, or the unstable ones among
    the others (equation 12).
    """
    table = energies_and_ends(finished)
    rows = table[(table["ratio"] <= 1) == compliant]
    word, agree = ("stable", rows["stable"]) if compliant else ("unstable", ~rows["stable"])
    counts = ", ".join(
        f"{method} {of_method.sum()} of {len(of_method)}"
        for method, of_method in agree.groupby(rows["method"], sort=False)
    )
    side = "with at most" if compliant else "above"
    total = f"{agree.sum()} of {len(rows)} runs {side} the proxy's energy are {word}"
    unstable = (~table["stable"]).sum()
    text = f"{total} ({counts}); at rates with a stable proxy {unstable} of {len(table)} are not"
    # Without unstable runs, or without compliant ones, the condition excludes nothing.
    is_tested = len(rows) and unstable
    yield Finding(text, bool(agree.all()) if is_tested else None)


def smaller_factors(finished: Finished) -> Iterator[Finding]:
    """Count the tensors whose median factor is smaller with more workers (figures 9 and 10)."""
    table = finished.table("tensors.csv")
    mean = table.groupby(["tensor", "workers"])["pi_median"].mean().unstack()
    low, high = sorted(mean)
    smaller = mean[high] < mean[low]
    yield Finding(
        f"{smaller.sum()} of {len(smaller)} tensors have a smaller factor with {high} than with "
        f"{low} workers",
        bool(smaller.all()),
    )


def _energy(method: str) -> tuple[Bounds, ...]:
    """Return the comparison of a method's late energy ratio with one (equation 12)."""
    text = "n = {of[workers]}: the central energy is {} times the proxy's"
    of = {"method": method}
    return (Bounds(text, "energy_ratio", of, below=1.0, per=("workers",)),)


_STABILITY = ("stability --workers 5 20 100 --no-limits --seeds 3",)
_STABILITY_PAPER = ("stability --scale paper",)
_FACTOR = ("stability --workers 5 20 100 --methods gem --no-limits --seeds 28",)
_RATES = '"gem(learning_rate=[0.02, 0.05, 0.1, 0.2])" "sgd(learning_rate=[0.02, 0.05, 0.1, 0.2])"'
_METHODS = "--methods sgd gem downpour adaptive_staleness"
_MISSPECIFIED = (
    "misspecification --workers 1 2 10 40 --tune 0.02 0.05 0.1 0.2 0.4 "
    f"{_METHODS} --steps 60 --seeds 6",
)
_MISSPECIFIED_PAPER = (f"misspecification --scale paper {_METHODS}",)
_GENERALIZATION = (
    "generalization --workers 10 --epochs 100 --seeds 5 --methods "
    '"gem(learning_rate=[0.05, 0.1, 0.2, 0.4])" "sgd(learning_rate=[0.02, 0.05, 0.1])"',
)
_ENERGY = ("energy --workers 5 20 100 --methods gem --steps 60 --seeds 3",)
_TENSORS = ("tensors --seeds 3",)
_TENSORS_PAPER = ("tensors --scale paper",)

CLAIMS: Sequence[Claim] = (
    Claim(
        "More workers lower GEM's loss per worker step, and raise DOWNPOUR's",
        f"{SOURCE}, figures 1a, 1b, 1d",
        _STABILITY,
        (_more_workers("GEM", "gem", below=1.0), _more_workers("DOWNPOUR", "downpour", above=1.0)),
        _STABILITY_PAPER,
    ),
    Claim(
        "GEM stays stable with 100 workers",
        f"{SOURCE}, figure 2",
        _STABILITY,
        hundred_workers,
        ("staleness --problem mnist --workers 100 --steps 938 --methods gem --learning-rate 0.05",),
    ),
    Claim(
        "GEM ends lower than the existing schemes, each at its best rate",
        f"{SOURCE}, figures 1b, 1c at one rate",
        _MISSPECIFIED,
        _BEST_RATE,
        _MISSPECIFIED_PAPER,
        looked=2,
        later_seeds=True,
    ),
    Claim(
        "The median of GEM's factor falls with the number of workers",
        f"{SOURCE}, figure 3",
        _FACTOR,
        (
            Bounds(
                "the median factor with {of[workers]} minus that with {to[workers]} workers is {}",
                mean_factor,
                {"method": "gem"},
                {"method": "gem"},
                above=0.0,
                ratio=False,
                pairs="workers",
            ),
        ),
        _STABILITY_PAPER,
        looked=3,
    ),
    Claim(
        "With a fixed effective batch, more workers reach a loss sooner",
        f"{SOURCE}, figure 4",
        ("speedup --time-budget 6 --seeds 3",),
        (
            Bounds(
                "{to[workers]} workers are {} times as fast as {of[workers]}",
                "time_to_target",
                {},
                {},
                above=1.0,
                pairs="workers",
            ),
        ),
        ("speedup --scale paper",),
    ),
    Claim(
        "Over many epochs momentum SGD overfits and GEM does not",
        f"{SOURCE}, figure 5",
        _GENERALIZATION,
        (_overfits("sgd", above=_OVERFIT), _overfits("gem", below=_OVERFIT)),
        ("generalization --scale paper",),
    ),
    Claim(
        "GEM generalizes better than the momentum SGD that it targets",
        f"{SOURCE}, section 4",
        _GENERALIZATION,
        generalizes,
        (f"generalization --scale paper --seeds 5 --methods {_RATES}",),
    ),
    Claim(
        "GEM and momentum SGD tolerate too high a learning rate, DOWNPOUR does not",
        f"{SOURCE}, figure 6",
        _MISSPECIFIED,
        too_high_a_rate,
        _MISSPECIFIED_PAPER,
    ),
    Claim(
        "A run with at most the proxy's energy is stable",
        f"{SOURCE}, equation 12: a sufficient condition",
        _MISSPECIFIED,
        compliance,
        _MISSPECIFIED_PAPER,
        looked=2,
        later_seeds=True,
    ),
    Claim(
        "A run with more than the proxy's energy is unstable",
        f"the converse of equation 12 of {SOURCE}",
        _MISSPECIFIED,
        functools.partial(compliance, compliant=False),
        _MISSPECIFIED_PAPER,
        ours=True,
        looked=2,
        later_seeds=True,
    ),
    Claim(
        "GEM keeps the central energy at or below the proxy's",
        f"{SOURCE}, equations 12 and 19",
        _ENERGY,
        _energy("gem"),
        ("energy --scale paper --methods gem",),
    ),
    Claim(
        "A more energetic proxy learns faster up to kappa = 3, and diverges at 4",
        f"{SOURCE}, figure 8",
        ('kappa --workers 5 --methods "gem(kappa=[1, 2, 3, 4])"',),
        (
            Bounds(
                "kappa 1 ends at {} times the loss of kappa 3",
                "final_loss",
                {"method.kappa": 1.0},
                {"method.kappa": 3.0},
                above=1.0,
            ),
            Bounds("kappa 4 ends at {}", "final_loss", {"method.kappa": 4.0}, above=_LEARNED),
        ),
        ('kappa --scale paper --methods "gem(kappa=[1, 2, 3, 4])"',),
    ),
    Claim(
        "16 workers learn faster than 8 per worker step",
        f"{SOURCE}, figure 7; digits or CIFAR-10 stand in for ImageNet",
        _TENSORS,
        (
            Bounds(
                "{of[workers]} workers end at {} times the loss of {to[workers]}",
                "final_loss",
                {"workers": min},
                {"workers": max},
                above=1.0,
            ),
        ),
        _TENSORS_PAPER,
    ),
    Claim(
        "The median factors of the tensors are smaller with 16 than with 8 workers",
        f"{SOURCE}, figures 9, 10; digits or CIFAR-10 stand in for ImageNet",
        _TENSORS,
        smaller_factors,
        _TENSORS_PAPER,
    ),
    Claim(
        "AlexNet on ImageNet reaches the published losses in 24 hours",
        f"{SOURCE}, figure 7",
        "ImageNet cannot be had without registration",
    ),
)
