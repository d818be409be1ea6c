"""What was measured, in a sentence for each case."""

from typing import TYPE_CHECKING

from asyncsim.benchmark import turns
from asyncsim.table_text import number_text

if TYPE_CHECKING:
    import pandas as pd

#: What a rate is compared with, by its name in the table of ratios, in words.
_FASTER = {
    "usual SimPy model": "the usual SimPy model",
    "usual loop": "the usual loop",
    "usual loop, PyTorch": "the usual loop in PyTorch",
}


def answer(ratios: "pd.DataFrame | None", summary: "pd.DataFrame") -> str:
    """Return a line for each case: its rate, beside those of the models and loops that one would write.

    ``ratios`` and ``summary`` are as the study writes them; the growth of simulations has no ratios.
    """
    lines = []
    for case, rates in summary.groupby(["task", "workers", "method"], sort=False):
        rate = rates.set_index("contender")["per_second"]
        made, unit = ("replay", "commits") if "replay" in rate else ("simulate", "visits")
        if made not in rate:
            continue
        medians = {}
        if ratios is not None:
            of_case = ratios[(ratios[["task", "workers", "method"]] == list(case)).all(axis=1)]
            medians = of_case.set_index("ratio")["median"].dropna().to_dict()
        faster = {words: medians.get(f"{made} / {name}") for name, words in _FASTER.items()}
        said = [f"{number_text(rate[made])} {unit}/s"]
        said += [f"{number_text(ratio)} times {words}" for words, ratio in faster.items() if ratio]
        if share := medians.get(f"{made} / gradients alone"):
            said.append(f"{number_text(1 / share)} times as long as its gradients alone would take")
        lines.append(f"  {turns.Case(*case)}: {'; '.join(said)}")
    return "\n".join(lines)
