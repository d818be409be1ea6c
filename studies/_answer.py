"""What was measured, in a sentence for each case."""

from typing import TYPE_CHECKING

from asyncsim.table_text import number_text

if TYPE_CHECKING:
    import pandas as pd

#: What a rate is compared with, by its name in the table of ratios, in words.
_FASTER = {
    "usual SimPy model": "the usual SimPy model",
    "usual loop": "the usual loop",
    "usual loop, PyTorch": "the usual loop in PyTorch",
}


def answer(ratios: "pd.DataFrame", summary: "pd.DataFrame") -> str:
    """Return a line for each case: its rate, beside those of the models and loops that one would write.

    ``ratios`` and ``summary`` are as the study writes them.
    """
    lines = []
    for case, rates in summary.groupby(["task", "workers", "method"], sort=False):
        rate = rates.set_index("contender")["per_second"]
        made, unit = ("replay", "commits") if "replay" in rate else ("simulate", "visits")
        if made not in rate:
            continue
        of_case = ratios[(ratios[["task", "workers", "method"]] == list(case)).all(axis=1)]
        medians = dict(zip(of_case["ratio"], of_case["median"], strict=True))
        faster = {words: medians.get(f"{made} / {name}") for name, words in _FASTER.items()}
        said = [f"{number_text(rate[made])} {unit}/s"]
        said += [f"{number_text(ratio)} times {words}" for words, ratio in faster.items() if ratio]
        if share := medians.get(f"{made} / gradients alone"):
            said.append(f"{number_text(1 / share)} times as long as its gradients alone would take")
        task, workers, method = case
        lines.append(f"  {', '.join(filter(None, (task, f'{workers} workers', method)))}: {'; '.join(said)}")
    return "\n".join(lines)
