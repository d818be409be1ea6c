"""What serving the lowest rank first does to staleness and learning, at a saturated server.

The server of the GEM paper's program takes messages from a first-come queue. Before it had that
queue, it polled its sockets in the order of the ranks: the lowest were served first and the highest
starved, which the authors name as a known issue. Here both disciplines serve the same workers,
twice the number that saturates the server.

At paper scale about 230,000 commits of MNIST's network: twenty minutes on two cores.
"""

import pandas as pd

from asyncsim.study.columns import titled
from asyncsim.study.comparison import Comparison, Further, Results, final_loss
from asyncsim.study.sweep import preset
from asyncsim.traces.trace_summary import per_worker

#: The renamed columns of a row per trace and worker.
_COLUMNS = {"mean_staleness": "staleness_mean", "mean_wait": "wait_mean"}

Config, SCALES = preset(
    small={
        "workers": 20,
        "discipline": ("fifo", "lowest_rank"),
        "service": "constant(0.1)",
        "methods": ("gem", "downpour"),
        "evaluate_every": None,
    },
    paper={"problem": "mnist", "steps": 938, "evaluate_every": 469},
)


def ranks(table: Results) -> Further:
    """Tabulate each trace and worker: share of the commits, mean staleness and mean wait (s),
    without a warm-up; print them by half of the ranks.
    """
    tables = []
    for row in table.finished.summary.drop_duplicates("trace_file").to_dict("records"):
        discipline = row.get("discipline", table.config.discipline)
        keys = {"discipline": discipline, "workers": row["workers"], "seed": row["seed"]}
        workers = per_worker(table.finished.trace(row["trace_file"]), warm_up=0)
        tables.append(
            workers.rename(columns=_COLUMNS).assign(**keys)[
                [*keys, "worker", "share", *_COLUMNS.values()]
            ]
        )
    rows = pd.concat(tables, ignore_index=True)
    half = (rows["worker"] < rows["workers"] / 2).map({True: "lower half", False: "upper half"})
    # A worker that never commits has no mean.
    of_commits = rows.assign(
        **{name: rows[name].fillna(0) * rows["share"] for name in _COLUMNS.values()},
        never_commit=rows["share"] == 0,
    )
    sums = of_commits.groupby(["workers", "discipline", half.rename("ranks")], sort=False)[
        [*_COLUMNS.values(), "share", "never_commit"]
    ].sum()
    means = sums[list(_COLUMNS.values())].div(sums["share"], axis=0)
    means = means.join(sums[["share", "never_commit"]] / rows["seed"].nunique())
    text = "means over commits; never commit: workers without any"
    return {"ranks.csv": rows}, [text, titled(means.reset_index())]


run = Comparison("queue", measure=final_loss, further=ranks).run
