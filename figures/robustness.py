"""The figure of a study of robustness, from the folder of results that it wrote.

The data come from ``python -m asyncsim.study robustness``, which draws this itself. To draw it again::

    python -m figures results/robustness              # in a clone
    asyncsim figures results/robustness     # installed

``robustness``: on the left the accuracy in the worst case over the attacks against the number of Byzantine workers,
each rule at its best rate: without any, what the rule costs; where it falls, where it breaks. On the right the accuracy
under each attack with the most Byzantine workers.
"""

import numpy as np
from matplotlib.figure import Figure

from asyncsim.base.console import counted, over_seeds
from asyncsim.drawing import layout, look
from asyncsim.drawing.paper import drawer
from asyncsim.study.columns import axis_of
from asyncsim.study.finished import Finished

_COLUMNS = ("method", "byzantine", "attack", "learning_rate", "test_accuracy")
#: Below this the cells of the table are dark.
_DARK = 0.6


def robustness(finished: Finished) -> Figure:
    """Draw worst cases against the number of Byzantine workers, and all attacks of the most."""
    worst, accuracy = (finished.table(name, _COLUMNS) for name in ("worst.csv", "accuracy.csv"))
    names = list(worst["method"].unique())
    looks = look.looks(names)
    figure, (left, right) = look.new_figure(look.DOUBLE, 3.2, 2)
    for name in names:
        rows = worst[worst["method"] == name].sort_values("byzantine")
        marker = dict(marker="o", markersize=3, color=looks[name].color, linestyle=looks[name].line)
        left.plot(rows["byzantine"], rows["test_accuracy"], label=name, **marker)
    left.set_xlabel(f"Byzantine workers of {finished.config['workers']}")
    left.set_ylabel(f"{axis_of('test_accuracy')}, worst case")
    left.set_ylim(0, 1)
    layout.whole_ticks(left.xaxis)

    most = worst["byzantine"].max()
    chosen = worst[worst["byzantine"] == most].set_index("method")["learning_rate"]
    cases = accuracy[accuracy["byzantine"] == most]
    cases = cases[cases["learning_rate"] == cases["method"].map(chosen)]
    table = cases.pivot(index="method", columns="attack", values="test_accuracy").reindex(names)
    table = table[list(cases["attack"].unique())]
    right.imshow(table.to_numpy(), vmin=0, vmax=1, cmap="cividis", aspect="auto")
    for (row, column), value in np.ndenumerate(table.to_numpy()):
        text = "-" if np.isnan(value) else f"{value:.2f}"
        right.text(column, row, text, ha="center", va="center", color="white" if value < _DARK else "black")
    right.set_xticks(range(len(table.columns)), [text.partition("(")[0].replace("_", "\n") for text in table.columns])
    right.set_yticks(range(len(names)), names)
    right.grid(False)
    layout.panel_title(right, f"accuracy under each attack of {counted(int(most), 'worker')}")
    handles, labels = left.get_legend_handles_labels()
    layout.legend_below(figure, handles, labels, 3)
    seeds = over_seeds(int(finished.summary["seed"].nunique()), "means over")
    layout.title(
        figure, f"{finished.config['problem']}, {finished.config['policy']}; {seeds}; each rule at its best rate"
    )
    return figure


draw = drawer("robustness", ("method", "byzantine", "attack", "learning_rate"), robustness=robustness)
