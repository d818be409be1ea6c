"""The figures of a study of post-training, from the folder of results that it wrote.

The data come from ``asyncsim post-training``, which draws them itself. To draw them again::

    python -m figures results/post_training              # in a clone
    asyncsim figures results/post_training     # installed

``rewards``: the expected reward against simulated time, a panel for each queue, each correction at
its best rate with its range over seeds. ``staleness``: the law of the staleness of each queue, by
samples and by tokens.
"""

from matplotlib.figure import Figure

from asyncsim.base.console import number_text, over_seeds
from asyncsim.drawing import findings, layout, look
from asyncsim.drawing.curves import draw_band
from asyncsim.drawing.paper import drawer
from asyncsim.study.finished import Finished


def rewards(finished: Finished) -> Figure | None:
    """Draw the expected reward of each correction against simulated time, a panel for each queue.

    The panels share a logarithmic axis of time, from the first evaluation after the start.
    """
    if not (finished.folder / "curves.csv").exists():
        return None
    curves = finished.table(
        "curves.csv", ("queue", "correction", "commit_time", "reward", "low", "high")
    )
    target = finished.table("rewards.csv", ("target",))["target"].iloc[0]
    curves = curves[curves["commit_time"] > 0]
    if curves.empty:  # all runs diverged before their first evaluation
        return None
    queues = list(dict.fromkeys(curves["queue"]))
    figure, panels = look.new_grid(len(queues), 2.0, 0.6, sharex=True, sharey=True)
    looks = look.category_looks(dict.fromkeys(curves["correction"]))
    for axes, queue in zip(panels, queues, strict=False):
        for correction, one in looks.items():
            rows = curves[(curves["queue"] == queue) & (curves["correction"] == correction)]
            band = rows.set_index("commit_time")[["reward", "low", "high"]]
            draw_band(axes, band.set_axis(["mean", "min", "max"], axis=1), **one.style)
        axes.axhline(target, color=look.GREY, linewidth=0.6, linestyle=":")
        axes.set_xscale("log")
        axes.set_xlabel("simulated time (s)")
        axes.set_ylabel("expected reward")
        axes.tick_params(labelbottom=True, labelleft=True)
        layout.panel_title(axes, queue)
    ends = curves.drop_duplicates(["queue", "correction"], keep="last")
    ends = ends.set_index(ends["correction"] + " in " + ends["queue"])[["reward", "low", "high"]]
    ends = ends.set_axis(["mean", "min", "max"], axis=1)
    figure.set_label(findings.best(ends, "expected reward at the end", rising=True))
    seeds = over_seeds(int(finished.config["seeds"]))
    about = f"{finished.config['problem']}, {seeds}; dotted: the target"
    about = f"corrections at their best rates, by queue; {about}"
    layout.finish(figure, about)
    return figure


def staleness(finished: Finished) -> Figure:
    """Draw the share of each staleness, a panel for each queue."""
    laws = finished.table("staleness.csv", ("queue", "seed", "weight", "staleness", "share"))
    seeds = laws.groupby("queue")["seed"].transform("nunique")  # some lack a staleness
    laws = laws.assign(share=laws["share"] / seeds)
    laws = laws.groupby(["queue", "weight", "staleness"])["share"].sum().reset_index()
    products = laws["staleness"] * laws["share"]
    means = products.groupby([laws["weight"], laws["queue"]]).sum()
    queues = list(dict.fromkeys(finished.table("queues.csv", ("queue",))["queue"]))
    figure, panels = look.new_grid(len(queues), 1.8, 0.6, sharex=True)
    most = int(laws.loc[laws["share"] > 1e-3, "staleness"].max())
    for axes, queue in zip(panels, queues, strict=False):
        for offset, (weight, color) in enumerate(
            (("samples", look.BLUE), ("tokens", look.VERMILLION))
        ):
            rows = laws[(laws["queue"] == queue) & (laws["weight"] == weight)]
            axes.bar(
                rows["staleness"] + 0.4 * offset - 0.2,
                rows["share"],
                0.4,
                color=color,
                label=f"by {weight}",
            )
            axes.axvline(means[weight, queue], color=color, linewidth=0.8, linestyle="--")
        axes.set_xlim(-0.6, most + 0.6)
        layout.whole_ticks(axes.xaxis)
        axes.tick_params(labelbottom=True)
        axes.set_xlabel("staleness (versions)")
        axes.set_ylabel("share")
        layout.panel_title(axes, queue)
    about = "staleness of trained samples and tokens; dashed: means"
    layout.finish(figure, about, 2)
    of_samples = means["samples"].sort_values().iloc[[0, -1]]
    ends = [f"{number_text(mean)} versions in {queue}" for queue, mean in of_samples.items()]
    figure.set_label(f"The mean staleness of samples is {' to '.join(dict.fromkeys(ends))}.")
    return figure


draw = drawer("post_training", ("queue",), rewards=rewards, staleness=staleness)
