"""The distribution of staleness in each cluster, and paths of the central variable."""

from typing import Any

import numpy as np
from matplotlib.figure import Figure

from asyncsim.base.console import number_text
from asyncsim.base.errors import InputError
from asyncsim.drawing import layout, look
from asyncsim.replays.run import POSITION
from asyncsim.study.finished import Finished

from . import published
from .tables import is_thesis, setting


def staleness(results: Finished) -> Figure:
    """Draw the distribution of staleness, a panel for each number of workers, and the published
    modes.
    """
    table = results.table("staleness.csv")
    counts, windows = sorted(table["workers"].unique()), sorted(table["window"].unique())
    figure, panels = look.new_figure(look.DOUBLE, 2.5, len(counts))
    modes = published.modes() if is_thesis(results) else published.modes().head(0)
    for axes, n in zip(panels, counts, strict=True):
        for window, shade in look.shades(windows).items():
            rows = table[(table["workers"] == n) & (table["window"] == window)]
            edges = np.append(rows["staleness"], len(rows)) - 0.5
            axes.stairs(rows["share"], edges, color=shade.color, label=f"\u03bb = {window}")
        axes.axvline(n - 1, color=look.BLACK, linewidth=0.8, linestyle="--", label="n \u2212 1")
        if n in modes.index:
            mark: dict[str, Any] = {
                "marker": "^",
                "linestyle": "none",
                "color": look.VERMILLION,
                "markersize": 5,
            }
            label = f"published mode ({published.SOURCE})"
            axes.plot(modes[n], 0, label=label, clip_on=False, zorder=4, **mark)
        axes.set_title(f"n = {n}")
        axes.set_xlabel("staleness (versions)")
        axes.set_xlim(-0.5, None)
        axes.set_ylim(0, None)
        layout.whole_ticks(axes.xaxis, 5)
    panels[0].set_ylabel("share of commits")
    table = table.assign(mean=table["staleness"] * table["share"])
    means = table.groupby(["workers", "window"])["mean"].sum()
    off = (means - means.index.get_level_values(0) + 1).abs().max()
    figure.set_label(
        f"The mean staleness is within {number_text(off, 2)} versions of n \u2212 1, whatever the "
        "window."
    )
    local, visit, protocol = (results.config[name] for name in ("compute", "service", "protocol"))
    cluster = f"a local step {local} s, a visit {visit} s, {protocol}"
    about = f"staleness with n workers and windows of \u03bb local steps; {cluster}"
    layout.finish(figure, about, 6)
    return figure


def path(results: Finished) -> Figure:
    """Draw the path of AGN's central variable by window, in the two main directions of all
    paths.
    """
    paths = {}
    summary = results.rows(method="agn")
    first = summary[summary["seed"] == summary["seed"].min()]
    for row in first.sort_values(["window", "workers"]).itertuples():
        positions = results.run(row.run_folder).commits.filter(like=POSITION).to_numpy()
        if not positions.size:
            raise InputError(
                f"folder = {str(results.folder)!r}: has no positions; run the study with --animate"
            )
        paths[row.window] = np.vstack([np.zeros(positions.shape[1]), positions])
    if not paths:
        raise InputError(f"folder = {str(results.folder)!r}: no runs of agn")
    _, _, directions = np.linalg.svd(np.vstack([*paths.values()]), full_matrices=False)
    figure, (axes,) = look.new_figure(look.SINGLE, 2.4)
    shares = {}
    for window, shade in look.shades(paths).items():
        points = paths[window]
        length = np.linalg.norm(np.diff(points, axis=0), axis=1).sum()
        shares[window] = share = np.linalg.norm(points[-1]) / length
        axes.plot(
            *directions[:2] @ points.T,
            color=shade.color,
            label=f"\u03bb = {window}: distance {share:.3f} of length",
        )
    straightest = max(shares, key=shares.__getitem__)
    figure.set_label(
        f"The path is straightest with \u03bb = {straightest}: its end is at "
        f"{shares[straightest]:.3f} of its length from the start."
    )
    axes.set_aspect("equal", adjustable="datalim")
    axes.set_xlabel("first main direction, from the start")
    axes.set_ylabel("second main direction")
    layout.finish(figure, setting(results, "path of AGN's central variable"))
    return figure
