"""Claims of "Gradient Energy Matching" (Hermans and Louppe 2018, arXiv 1805.08469)."""

from collections.abc import Sequence

import numpy as np
import pandas as pd

from asyncsim.claims.claim import (
    Claim,
    Finding,
    above,
    accuracies,
    below,
    log_ratio,
    losses,
    spread,
    times,
)
from asyncsim.replays.run import Run
from asyncsim.study.finished import Finished
from asyncsim.study.outcome import energy_ratios
from asyncsim.study.ranking import Measure, tuned

SOURCE = "Hermans and Louppe 2018"
#: Test accuracy of figure 2.
_ACCURACY = 0.9938
#: A run learned if its final minibatch loss is below this fraction of its first.
_LEARNED = 0.5
#: A test loss that ends below this multiple of its minimum shows no overfitting.
_OVERFIT = 1.1
#: A final loss is as low as another if it is at most this multiple.
_AS_LOW = 1.1
#: Worker steps at the beginning of a run whose energies predict its end.
_BEGINNING = 10
#: Fewest correct predictions, as the mean of both classes, of a useful classifier.
_USEFUL = 0.9


def more_workers(finished: Finished) -> list[Finding]:
    """Compare the final losses of the fewest and the most workers (figures 1a, 1b, 1d)."""
    low, high = (int(getattr(finished.summary["workers"], end)()) for end in ("min", "max"))
    gem, downpour = (
        log_ratio(
            losses(finished, method=method, workers=high),
            losses(finished, method=method, workers=low),
        )
        for method in ("gem", "downpour")
    )
    return [
        below(f"GEM's final loss with {high} workers is {times(gem)} that with {low}", gem),
        above(f"DOWNPOUR's is {times(downpour)}", downpour),
    ]


def hundred_workers(finished: Finished) -> list[Finding]:
    """Compare GEM's accuracy with the most workers with its competitors' (figure 2)."""
    workers = int(finished.summary["workers"].max())
    gem = accuracies(finished, method="gem", workers=workers)
    findings = []
    if finished.config["problem"] == "mnist":
        text = f"test accuracy {spread(gem, '.2%')}, published {_ACCURACY:.2%}"
        findings.append(above(text, gem, _ACCURACY))
    if "downpour" in set(finished.summary["method"]):
        downpour = accuracies(finished, method="downpour", workers=workers)
        text = f"test accuracy {spread(gem, '.1%')}, DOWNPOUR's {spread(downpour, '.1%')}"
        findings.append(above(text, gem - downpour))
    learned = losses(finished, method="gem", workers=workers) < _LEARNED * np.log(10)
    text = f"{learned.sum()} of {len(learned)} runs with {workers} workers end below half the loss"
    return [Finding(f"{text} of a guess", bool(learned.all())), *findings]


def adaptive_is_slower(finished: Finished) -> list[Finding]:
    """Compare GEM with adaptive staleness at each number of workers (figure 1c)."""
    findings = []
    for n in sorted(finished.summary["workers"].unique()):
        ratio = log_ratio(
            losses(finished, method="adaptive_staleness", workers=n),
            losses(finished, method="gem", workers=n),
        )
        text = f"n = {n}: adaptive staleness ends at {times(ratio, '.1f')} GEM's loss"
        findings.append(above(text, ratio))
    return findings


def factor_falls(finished: Finished) -> list[Finding]:
    """Compare the median factor of consecutive numbers of workers (figure 3)."""
    counts = sorted(finished.summary["workers"].unique())
    means = []
    for n in counts:
        rows = finished.rows(method="gem", workers=n).set_index("seed")
        means.append(rows["run_folder"].map(lambda name: _mean_factor(finished.run(name))))
    return [
        above(
            f"the median factor is {low.mean():.2g} with {n}, {high.mean():.2g} with {m} workers",
            low - high,
        )
        for n, m, low, high in zip(counts, counts[1:], means, means[1:], strict=False)
    ]


def shared_batch(finished: Finished) -> list[Finding]:
    """Compare the times to the target of consecutive numbers of workers (figure 4)."""
    counts = sorted(finished.summary["workers"].unique())
    reached = [losses(finished, "time_to_target", workers=n) for n in counts]
    findings = []
    for n, m, low, high in zip(counts, counts[1:], reached, reached[1:], strict=False):
        ratio = log_ratio(low, high)
        findings.append(above(f"{m} workers are {times(ratio)} as fast as {n}", ratio))
    return findings


def overfitting(finished: Finished) -> list[Finding]:
    """Compare the rise of the test loss above its minimum (figure 5), at the paper's rate."""
    findings = []
    for method, judge in (("sgd", above), ("gem", below)):
        rows = _at_stated_rate(finished, method)
        rise = pd.Series(
            [
                float(np.log(table["test_loss"].iloc[-1] / table["test_loss"].min()))
                for table in (finished.run(name).evaluations for name in rows["run_folder"])
            ]
        )
        name = method.upper()
        text = f"{name}'s test loss ends at {times(rise)} its minimum, the limit is {_OVERFIT}"
        findings.append(judge(text, rise, np.log(_OVERFIT)))
    return findings


def generalization(finished: Finished) -> list[Finding]:
    """Compare GEM's test loss with momentum SGD's, each at its best rate."""
    families = finished.summary["method"].str.partition("(")[0]
    summary = finished.summary.assign(family=families)
    best = tuned(summary, ["family"], Measure("test_loss"), over=("method",))
    best = best.assign(test_error=1 - best["test_accuracy"])
    gem, sgd = (best[best["family"] == name].set_index("seed") for name in ("gem", "sgd"))
    loss = log_ratio(sgd["test_loss"], gem["test_loss"])
    error = sgd["test_error"] - gem["test_error"]
    end = gem["simulated_seconds"]
    by_then = pd.Series(
        {
            seed: _at_time(finished.run(row["run_folder"]).evaluations, end[seed])
            for seed, row in sgd.iterrows()
        }
    )
    early = log_ratio(by_then, gem["test_loss"])
    methods = " and ".join(runs["method"].iloc[0] for runs in (sgd, gem))
    return [
        above(f"equal gradients, {methods}: SGD's test loss is {times(loss)} GEM's", loss),
        above(f"SGD's test error minus GEM's is {spread(error, '+.2%')}", error),
        above(f"equal time: SGD's test loss is {times(early)} GEM's", early),
    ]


def too_high_a_rate(finished: Finished) -> list[Finding]:
    """Count the runs that learn at the misspecified rate (figure 6)."""
    rate = 0.1 if finished.config["problem"] == "mnist" else 0.2
    rows = finished.summary[finished.summary["learning_rate"] == rate]
    learned = rows["final_loss"].fillna(np.inf) < _LEARNED * np.log(10)
    findings = [
        Finding(
            f"{method.upper()} learns in {learned[rows['method'] == method].sum()} of "
            f"{(rows['method'] == method).sum()} runs at {rate:g}",
            bool(learned[rows["method"] == method].all()),
        )
        for method in ("sgd", "gem")
    ]
    fails = ~learned[(rows["method"] == "downpour") & (rows["workers"] >= 10)]
    text = f"DOWNPOUR fails in {fails.sum()} of {len(fails)} runs with 10 workers or more"
    return [*findings, Finding(text, bool(fails.all()))]


def compliance_predicts(finished: Finished) -> list[Finding]:
    """Judge equation 12 as a classifier: the energy ratio of the first steps against the outcome.

    The ratio is the median over the first worker steps, before a collapse shows in the losses.
    """
    ratios, learned = [], []
    for row in finished.summary.itertuples():
        commits = finished.run(row.run_folder).commits
        early = commits[commits["worker_step"] < _BEGINNING]
        ratios.append(energy_ratios(early).median())
        first = commits.loc[commits["worker_step"] == 0, "loss"].mean()
        learned.append(row.status == "finished" and row.final_loss < _LEARNED * first)
    ratio, stable = np.array(ratios), np.array(learned)
    is_finite = np.isfinite(ratio)
    ratio, stable = ratio[is_finite], stable[is_finite]
    compliant = ratio <= 1
    passed, failed = compliant[stable].mean(), (~compliant[~stable]).mean()
    pairs = ratio[~stable][:, None] - ratio[stable][None, :]
    area = float(((pairs > 0) + 0.5 * (pairs == 0)).mean())
    thresholds = np.unique(ratio)
    balanced = [((ratio[stable] <= t).mean() + (ratio[~stable] > t).mean()) / 2 for t in thresholds]
    best = int(np.argmax(balanced))
    return [
        Finding(
            f"the central energy is at most the proxy's in {passed:.0%} of {stable.sum()} stable "
            f"runs, and above it in {failed:.0%} of {(~stable).sum()} unstable runs",
            bool((passed + failed) / 2 >= _USEFUL),
        ),
        Finding(
            f"an unstable run has the higher energy ratio in {area:.0%} of the pairs of a stable "
            f"and an unstable run; the best limit of the ratio, {thresholds[best]:.2g} instead of "
            f"1, classifies {balanced[best]:.0%} of both classes",
            area >= _USEFUL,
        ),
    ]


def below_the_proxy(finished: Finished, method: str = "gem") -> list[Finding]:
    """Compare the late energy ratio of GEM with one, at each number of workers (equation 12)."""
    findings = []
    for n in sorted(finished.summary["workers"].unique()):
        if n == 1:  # the proxy itself
            continue
        ratio = losses(finished, "energy_ratio", method=method, workers=n)
        text = f"n = {n}: the central energy is {spread(ratio, '.2g')} times the proxy's"
        findings.append(below(text, ratio, 1.0))
    return findings


def server_proxy(finished: Finished) -> list[Finding]:
    """Judge the energies of GEM with a proxy at the server (the paper's outlook)."""
    return below_the_proxy(finished, method="gem_server")


def tuned_momentum(finished: Finished) -> list[Finding]:
    """Compare the final losses of GEM with YellowFin's and with its usual momentum."""
    best = tuned(finished.summary, ["method"], Measure("train_loss")).set_index("seed")
    fixed, yellowfin = (
        best.loc[best["method"] == name, "train_loss"] for name in ("gem", "gem_yellowfin")
    )
    ratio = log_ratio(yellowfin, fixed)
    text = f"with YellowFin's momentum the training loss is {times(ratio)} that with 0.9"
    return [below(f"{text}: at most {_AS_LOW}", ratio, np.log(_AS_LOW))]


def energetic_proxy(finished: Finished) -> list[Finding]:
    """Compare the losses of kappa 3 and 1, and count the failures of kappa 4 (figure 8)."""
    loss = {
        kappa: losses(finished, **{"method.kappa": kappa})
        for kappa in sorted(finished.summary["method.kappa"].unique())
    }
    ratio = log_ratio(loss[1.0], loss[3.0])
    failed = int((loss[4.0] > _LEARNED * np.log(10)).sum())
    return [
        above(f"kappa 1 ends at {times(ratio)} the loss of kappa 3", ratio),
        Finding(f"kappa 4 fails with {failed} of {len(loss[4.0])} seeds", failed == len(loss[4.0])),
    ]


def faster_by_step(finished: Finished) -> list[Finding]:
    """Compare the final losses of two numbers of workers (figure 7)."""
    low, high = sorted(finished.summary["workers"].unique())
    ratio = log_ratio(losses(finished, workers=low), losses(finished, workers=high))
    return [above(f"{low} workers end at {times(ratio)} the loss of {high}", ratio)]


def smaller_factors(finished: Finished) -> list[Finding]:
    """Count the tensors whose median factor is smaller with more workers (figures 9 and 10)."""
    table = finished.table("tensors.csv")
    mean = table.groupby(["tensor", "workers"])["pi_median"].mean().unstack()
    low, high = sorted(mean)
    smaller = mean[high] < mean[low]
    return [
        Finding(
            f"{smaller.sum()} of {len(smaller)} tensors have a smaller factor with {high} than "
            f"with {low} workers",
            bool(smaller.all()),
        )
    ]


def _mean_factor(run: Run) -> float:
    """Average the median factor over a run."""
    table = run.diagnostics
    of_all = (table["quantity"] == "pi") & (table["tensor"] == "") & (table["quantile"] == 0.5)
    return float(table.loc[of_all, "value"].mean())


def _at_stated_rate(finished: Finished, method: str) -> pd.DataFrame:
    summary = finished.summary
    of_method = summary["method"].str.partition("(")[0] == method
    return summary[of_method & (summary["method.learning_rate"] == 0.05)]


def _at_time(evaluations: pd.DataFrame, time: float) -> float:
    """Interpolate the test loss at a simulated time."""
    return float(np.interp(time, evaluations["commit_time"], evaluations["test_loss"]))


_STABILITY = ("stability --workers 5 20 100 --no-limits --seeds 3",)
_STABILITY_PAPER = ("stability --scale paper",)
_FACTOR = ("stability --workers 5 20 100 --methods gem --no-limits --seeds 28",)
_RATES = '"gem(learning_rate=[0.02, 0.05, 0.1, 0.2])" "sgd(learning_rate=[0.02, 0.05, 0.1, 0.2])"'
_MISSPECIFIED = (
    "misspecification --workers 2 10 40 --learning-rate 0.02 0.05 0.1 0.2 0.4 "
    "--methods sgd gem downpour adaptive_staleness --steps 60",
)
_MISSPECIFIED_PAPER = ("misspecification --scale paper",)
_GENERALIZATION = (
    "generalization --workers 10 --epochs 100 --seeds 5 --methods "
    '"gem(learning_rate=[0.05, 0.1, 0.2, 0.4])" "sgd(learning_rate=[0.02, 0.05, 0.1])"',
)
_ENERGY = ("energy --workers 5 20 100 --methods gem gem_server --steps 60 --seeds 3",)
_TENSORS = ("tensors --seeds 3",)
_TENSORS_PAPER = ("tensors --scale paper",)

CLAIMS: Sequence[Claim] = (
    Claim(
        "More workers lower GEM's loss per worker step, and raise DOWNPOUR's",
        f"{SOURCE}, figures 1a, 1b, 1d",
        _STABILITY,
        more_workers,
        _STABILITY_PAPER,
    ),
    Claim(
        "GEM stays stable with 100 workers",
        f"{SOURCE}, figure 2",
        _STABILITY,
        hundred_workers,
        ("staleness --problem mnist --workers 100 --steps 938 --methods gem",),
    ),
    Claim(
        "Adaptive staleness is slower than GEM",
        f"{SOURCE}, figure 1c",
        _STABILITY,
        adaptive_is_slower,
        _STABILITY_PAPER,
    ),
    Claim(
        "The median of GEM's factor falls with the number of workers",
        f"{SOURCE}, figure 3",
        _FACTOR,
        factor_falls,
        _STABILITY_PAPER,
    ),
    Claim(
        "With a fixed effective batch, more workers reach a loss sooner",
        f"{SOURCE}, figure 4",
        ("speedup --time-budget 6 --seeds 3",),
        shared_batch,
        ("speedup --scale paper",),
    ),
    Claim(
        "Over many epochs momentum SGD overfits and GEM does not",
        f"{SOURCE}, figure 5",
        _GENERALIZATION,
        overfitting,
        ("generalization --scale paper",),
    ),
    Claim(
        "GEM generalizes better than the momentum SGD that it targets",
        f"{SOURCE}, section 4",
        _GENERALIZATION,
        generalization,
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
        "Energy compliance predicts stability",
        f"{SOURCE}, equation 12",
        _MISSPECIFIED,
        compliance_predicts,
        _MISSPECIFIED_PAPER,
    ),
    Claim(
        "GEM keeps the central energy at or below the proxy's",
        f"{SOURCE}, equations 12 and 19",
        _ENERGY,
        below_the_proxy,
        ("energy --scale paper --methods gem",),
    ),
    Claim(
        "A proxy computed at the server keeps the central energy at or below the proxy's",
        f"{SOURCE}, outlook; the rule is ours",
        _ENERGY,
        server_proxy,
        ("energy --scale paper --methods gem gem_server",),
    ),
    Claim(
        "With a momentum tuned by YellowFin GEM learns as well as with 0.9",
        f"{SOURCE}, outlook; the rule is ours",
        (
            'compare --workers 20 --methods gem "gem_yellowfin(smoothing=0.9)" '
            "--tune 0.1 0.2 0.4 --measure train_loss --steps 40 --seeds 8",
        ),
        tuned_momentum,
    ),
    Claim(
        "A more energetic proxy learns faster up to kappa = 3, and diverges at 4",
        f"{SOURCE}, figure 8",
        ('kappa --workers 5 --methods "gem(kappa=[1, 2, 3, 4])"',),
        energetic_proxy,
        ('kappa --scale paper --methods "gem(kappa=[1, 2, 3, 4])"',),
    ),
    Claim(
        "16 workers learn faster than 8 per worker step",
        f"{SOURCE}, figure 7; digits or CIFAR-10 stand in for ImageNet",
        _TENSORS,
        faster_by_step,
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
        paper="ImageNet cannot be had without registration",
    ),
)
