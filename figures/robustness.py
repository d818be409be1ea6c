"""The figure of a study of robustness, from the folder of results that it wrote.

The data come from ``python -m asyncsim.study robustness``, which draws this itself. To draw it
again::

    python -m figures results/robustness              # in a clone
    asyncsim figures results/robustness     # installed

``robustness``: on the left the test accuracy under the worst attack against the number of Byzantine
workers, each rule at its best rate. Its value at zero shows the cost of a rule, its fall the
breaking point. On the right the test accuracy under each attack with the most Byzantine workers.
"""

from matplotlib.figure import Figure

from asyncsim.base.console import counted, over_seeds
from asyncsim.drawing import layout, look
from asyncsim.drawing.paper import drawer
from asyncsim.study.columns import axis_of
from asyncsim.study.finished import Finished

_COLUMNS = ("method", "byzantine", "attack", "learning_rate", "test_accuracy")


def robustness(finished: Finished) -> Figure:
    """Draw worst cases against the number of Byzantine workers, and every attack at the largest
    number.
    """
    worst, accuracy = (finished.table(name, _COLUMNS) for name in ("worst.csv", "accuracy.csv"))
    names = list(worst["method"].unique())
    looks = look.looks(names)
    figure, (accuracy_axes, attack_axes) = look.new_figure(look.DOUBLE, 3.2, 2)
    for name in names:
        rows = worst[worst["method"] == name].sort_values("byzantine")
        marker = dict(marker="o", markersize=3, color=looks[name].color, linestyle=looks[name].line)
        accuracy_axes.plot(rows["byzantine"], rows["test_accuracy"], label=name, **marker)
    accuracy_axes.set_xlabel(f"Byzantine workers of {finished.config['workers']}")
    accuracy_axes.set_ylabel(f"{axis_of('test_accuracy')}, worst case")
    accuracy_axes.set_ylim(0, 1)
    layout.whole_ticks(accuracy_axes.xaxis)

    largest = worst["byzantine"].max()
    chosen = worst[worst["byzantine"] == largest].set_index("method")["learning_rate"]
    cases = accuracy[accuracy["byzantine"] == largest]
    cases = cases[cases["learning_rate"] == cases["method"].map(chosen)]
    table = cases.pivot(index="method", columns="attack", values="test_accuracy").reindex(names)
    table = table[list(cases["attack"].unique())]
    table = table.rename(columns=lambda attack: attack.partition("(")[0].replace("_", "\n"))
    layout.number_map(attack_axes, table, "{:.2f}".format, vmin=0, vmax=1, cmap="cividis")
    attack_axes.grid(False)
    layout.panel_title(
        attack_axes, f"test accuracy under each attack of {counted(int(largest), 'worker')}"
    )
    handles, labels = accuracy_axes.get_legend_handles_labels()
    layout.legend_below(figure, handles, labels, 3)
    ends = worst[worst["byzantine"] == largest].sort_values("test_accuracy")
    cases_text = [
        f"{row.test_accuracy:.3f} for {row.method}, {rank}, under {row.attack}"
        for row, rank in zip(
            ends.iloc[[-1, 0] if len(ends) > 1 else [0]].itertuples(),
            ("the best rule", "the worst"),
            strict=False,
        )
    ]
    figure.set_label(
        f"With {largest} Byzantine workers of {finished.config['workers']}, the test accuracy in "
        f"the worst case is {', and '.join(cases_text)}."
    )
    seeds = over_seeds(int(finished.summary["seed"].nunique()), "means over")
    layout.title(
        figure,
        f"{finished.config['problem']}, {finished.config['policy']}; {seeds}; each rule at its "
        "best rate",
    )
    return figure


draw = drawer(
    "robustness", ("method", "byzantine", "attack", "learning_rate"), robustness=robustness
)
