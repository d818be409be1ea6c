"""Titles and legends that fit their figure, readable ticks, and notes on empty axes."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.gridspec import GridSpec
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator, NullLocator

from asyncsim.base.console import LEAST_SHARE, number_text, wrapped
from asyncsim.drawing.look import BLACK, SINGLE, TITLE, TITLE_LINE_HEIGHT, ink

#: Characters of a title across a single column.
_TITLE_WIDTH = 50
#: Width of a panel's vertical axis (inches).
_SIDE_MARGIN = 0.5
#: Lines of a title that every figure has room for.
_TITLE_LINES = 2
#: Width of a letter of a legend, on average, and of a handle with the space around it (inches).
_LETTER, _LEGEND_HANDLE = 0.052, 0.5
#: Letters of a line of a legend inside axes, at least.
_LEAST_LETTERS = 12
#: Height of a label at a curve's end (inches), and a panel's share of its figure's height.
_LABEL_HEIGHT, _PANEL_SHARE = 0.12, 0.6
#: Most curves that are labelled at their ends, and the labels' share of the figure's width.
_LABELLED_ENDS, _LABEL_SHARE = 6, 0.3
#: Where the first curve may end on the horizontal axis (from 0 to 1), for labels at the right edge.
_LATE = 0.9
#: Numbers are white on cells darker than this.
_DARK = 0.55
#: The height of a panel in a column of a paper (inches).
_COLUMN_HEIGHT = 2.6
#: The mark where a run diverged.
DIVERGED: dict[str, Any] = {"marker": "x", "markersize": 5, "linestyle": "none"}
#: The style of published values, beside which ours are coloured.
PUBLISHED: dict[str, Any] = {
    "color": "#999999",
    "linewidth": 0.7,
    "zorder": 1,
    "markersize": 3.2,
    "markerfacecolor": "white",
    "markeredgewidth": 0.6,
}
#: Rows of a legend that every figure has room for.
_LEGEND_ROWS = 3
#: Height of each further row (inches).
_LEGEND_ROW_HEIGHT = 0.15


def legend_below(
    figure: Figure, handles: Sequence[Any], labels: Sequence[str], columns: int
) -> None:
    """Label the lines of a single panel at their ends if there is room; add a legend below all axes
    for the rest.

    For many rows the figure grows, so that its axes do not shrink. Long labels have fewer than
    ``columns`` side by side; labels wider than the figure are wrapped. The axes need final limits.
    """
    if len(figure.axes) == 1:
        rest = label_ends(figure.axes[0], handles, labels)
        handles, labels = [handles[i] for i in rest], [labels[i] for i in rest]
    if not labels:
        return
    width = figure.get_figwidth()
    longest = max(map(len, labels))
    columns = max(1, min(columns, int(width / (_LETTER * longest + _LEGEND_HANDLE))))
    labels = [wrapped(label, (width - _LEGEND_HANDLE) / _LETTER) for label in labels]
    rows = math.ceil(len(labels) / columns) + sum(label.count("\n") for label in labels)
    extra_rows = rows - _LEGEND_ROWS
    extra_height = _LEGEND_ROW_HEIGHT * max(0, extra_rows)
    figure.set_figheight(figure.get_figheight() + extra_height)
    figure.legend(handles, labels, loc="outside lower center", ncols=columns)


def finish(figure: Figure, text: str, columns: int = 4) -> None:
    """Add the legend of all panels below them, and the title.

    Crosses of diverged runs have an entry, and so have published values. ``columns``: as in
    `legend_below`.
    """
    named = labelled(figure)
    lines = [line for axes in figure.axes for line in axes.lines]
    if any(line.get_marker() == DIVERGED["marker"] for line in lines):
        named["diverged"] = Line2D([], [], color=BLACK, **DIVERGED)
    for line in (line for line in lines if line.get_color() == PUBLISHED["color"]):
        style = {**PUBLISHED, "marker": "o", "linestyle": line.get_linestyle()}
        named.setdefault("published", Line2D([], [], **style))
    legend_below(figure, list(named.values()), list(named), columns)
    title(figure, text)


def alone(figure: Figure, text: str) -> list[str]:
    """Keep the panel with a text in its title or along its axes, for a column of a paper: without
    titles, at most `_COLUMN_HEIGHT` inches high.

    Returns the words of all panels if none has the text.
    """
    words = {
        axes: ", ".join(
            filter(None, (axes.get_title("left"), axes.get_ylabel(), axes.get_xlabel()))
        )
        for axes in figure.axes
    }
    panel = next((axes for axes in words if text.casefold() in words[axes].casefold()), None)
    if panel is None or figure.subfigs:
        return list(words.values())
    if len(words) > 1:
        _without_others(figure, panel)
    panel.set_title("", loc="left")
    figure.suptitle("").set_in_layout(False)
    figure.set_figheight(min(figure.get_figheight(), _COLUMN_HEIGHT))
    return []


def _without_others(figure: Figure, panel: Axes) -> None:
    """Remove all panels but one, and their entries in the legend."""
    everywhere = labelled(figure)
    handles = dict(zip(*reversed(panel.get_legend_handles_labels()), strict=True))
    for legend in figure.legends:
        names = [entry.get_text() for entry in legend.get_texts()]
        entries = zip(names, legend.legend_handles, strict=True)
        handles |= {name: handle for name, handle in entries if name not in everywhere}
        legend.remove()
    for axes in figure.axes:
        if axes is not panel:
            axes.remove()
    panel.set_subplotspec(GridSpec(1, 1, figure)[0])
    panel.tick_params(labelleft=True, labelbottom=True)
    legend_below(figure, list(handles.values()), list(handles), 4)


def label_ends(axes: Axes, handles: Sequence[Any], labels: Sequence[str]) -> list[int]:
    """Label curves at the right edge of the axes, unless one ends early or the labels would be far
    from their curves; return the numbers of the handles without a label.
    """
    end, bounds = axes.get_xlim()[1], np.sort(axes.get_ylim())
    to_axes = axes.transScale + axes.transLimits  # to shares of the width and the height
    gap = _LABEL_HEIGHT / (_PANEL_SHARE * _figure_of(axes).get_figheight())
    curves, heights = [], []
    for number, handle in enumerate(handles):
        if not isinstance(handle, Line2D) or handle.get_transform() != axes.transData:
            continue
        x, y = (np.asarray(values, np.float64) for values in handle.get_data())
        x, y = x[np.isfinite(y)], np.clip(y[np.isfinite(y)], *bounds)
        if len(x) < 2 or np.any(np.diff(x) < 0):
            continue
        if to_axes.transform((min(x[-1], end), y[-1]))[0] < _LATE:
            return list(range(len(handles)))
        curves.append(number)
        heights.append(to_axes.transform((end, np.interp(end, x, y)))[1])
    if not curves:
        return list(range(len(handles)))
    order = np.argsort(heights, kind="stable")
    places = np.array(heights)[order]
    for i in range(1, len(places)):
        places[i] = max(places[i], places[i - 1] + gap)
    moved = places - np.array(heights)[order]
    places -= min(moved.mean(), places[0])  # not below the axes
    longest = max(len(labels[number]) for number in curves)
    if (
        len(curves) > _LABELLED_ENDS
        or np.ptp(moved) > 2.001 * gap  # three curves may end at one place
        or _LETTER * longest > _LABEL_SHARE * _figure_of(axes).get_figwidth()
    ):
        return list(range(len(handles)))
    for place, i in zip(places, order, strict=True):
        axes.annotate(
            labels[curves[i]],
            (1, place),
            (4, 0),
            xycoords="axes fraction",
            textcoords="offset points",
            va="center",
            fontsize=7,
            color=ink(handles[curves[i]].get_color()),
        )
    return [number for number in range(len(handles)) if number not in curves]


def legend_inside(axes: Axes) -> None:
    """Add a legend at the top right of linear axes with final limits; raise the upper limit so that
    it hides nothing.
    """
    handles, labels = axes.get_legend_handles_labels()
    extent, dpi = axes.get_window_extent(), _figure_of(axes).dpi
    width = extent.width / dpi - _LEGEND_HANDLE
    labels = [wrapped(label, max(width / _LETTER, _LEAST_LETTERS)) for label in labels]
    lines = len(labels) + sum(label.count("\n") for label in labels)
    room = (0.135 * lines + 0.05) / max(0.8 * extent.height / dpi, 0.5)
    bottom, top = axes.get_ylim()
    axes.set_ylim(bottom, bottom + (top - bottom) / max(1 - room, 0.4))
    axes.legend(handles, labels, loc="upper right")


def stacked_bars(
    axes: Axes, parts: Iterable[tuple[str, str, Any]], names: Sequence[str], rates: Iterable[float]
) -> None:
    """Draw how workers divide their time, one bar per name from the top down, and the commits per
    second.

    ``parts``: label, colour and the values of all bars; negligible parts are not drawn.
    """
    places, starts = np.arange(len(names)), np.zeros(len(names))
    for label, color, part in parts:
        if (values := np.clip(part, 0, None)).max() >= LEAST_SHARE:
            axes.barh(
                places,
                values,
                left=starts,
                color=color,
                edgecolor="white",
                linewidth=0.5,
                label=label,
            )
            starts = starts + np.asarray(values)
    axes.set_yticks(places, names)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.set_xlim(0, 1)
    for place, rate in zip(places, rates, strict=True):
        text = f"{number_text(rate)} commits/s"
        axes.annotate(text, (1, place), (3, 0), textcoords="offset points", va="center")


def labelled(figure: Figure) -> dict[str, Any]:
    """Collect the legend handles of all panels of a figure by label."""
    handles: dict[str, Any] = {}
    for axes in figure.axes:
        handles |= dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    return handles


def say_inside(axes: Axes, text: str) -> None:
    """Write the reason in the middle of empty axes."""
    axes.annotate(text, (0.5, 0.5), xycoords="axes fraction", ha="center", va="center")


def number_map(axes: Axes, table: Any, form: Callable[[float], str], **style: Any) -> Any:
    """Draw a table as a map of colours with each number in its cell, and ticks of its labels.

    Cells without a number stay white. ``style``: arguments of matplotlib's ``imshow``. Returns its
    image.
    """
    values = table.to_numpy(np.float64)
    image = axes.imshow(values, aspect="auto", **style)
    for (row, column), value in np.ndenumerate(values):
        if np.isfinite(value):
            light = np.dot(image.to_rgba(value)[:3], [0.299, 0.587, 0.114])
            color = "white" if light < _DARK else "black"
            axes.text(column, row, form(value), color=color, ha="center", va="center", fontsize=6)
    axes.set_xticks(range(len(table.columns)), [str(value) for value in table.columns])
    axes.set_yticks(range(len(table.index)), [str(value) for value in table.index])
    return image


def whole_ticks(axis: Any, limit: int | Literal["auto"] = 10) -> None:
    """Put ticks at whole numbers only: at least one, at most ``limit`` (``"auto"``: while there is
    room).
    """
    axis.set_major_locator(
        MaxNLocator(limit, integer=True, min_n_ticks=1, steps=[1, 2, 2.5, 5, 10])
    )


def ticks_at(axis: Any, values: Iterable[Any]) -> None:
    """Put ticks at these values alone, with plain numbers."""
    values = list(values)
    axis.set_ticks(values, [f"{value:g}" for value in values])
    axis.set_minor_locator(NullLocator())


def title(figure: Any, text: str) -> None:
    """Set the wrapped title of a figure, or of a part of it that is as wide.

    For many lines the figure grows. Its parts are rows of equal height.
    """
    root = figure.get_figure(root=True)
    wrapped_text = wrapped(text, _TITLE_WIDTH * root.get_figwidth() / SINGLE)
    parts = [figure] if figure is root else root.subfigs
    _make_room(root, wrapped_text, [part.get_suptitle() for part in parts], len(parts))
    figure.suptitle(wrapped_text, **TITLE)


def panel_title(axes: Axes, text: str) -> None:
    """Set the wrapped title of a panel beside other panels; for many lines the figure grows."""
    place: Any = axes.get_subplotspec()  # there is one, as all axes here come from `new_figure`
    figure = _figure_of(axes)
    inches = figure.get_figwidth() / place.get_gridspec().ncols - _SIDE_MARGIN
    wrapped_text = wrapped(text, _TITLE_WIDTH * inches / SINGLE)
    side = matplotlib.rcParams["axes.titlelocation"]
    _make_room(
        figure,
        wrapped_text,
        [neighbour.get_title(side) for neighbour in figure.axes if _row(neighbour) == _row(axes)],
    )
    axes.set_title(wrapped_text)


def _row(axes: Any) -> range:
    return axes.get_subplotspec().rowspan


def _make_room(figure: Figure, title_text: str, neighbours: Iterable[str], rows: int = 1) -> None:
    """Make every row of a figure taller for a title, unless its neighbours' titles have done so."""
    lines = [1 + text.count("\n") for text in (title_text, *neighbours)]
    extra_lines = lines[0] - max([_TITLE_LINES, *lines[1:]])
    extra_height = rows * TITLE_LINE_HEIGHT * max(0, extra_lines)
    figure.set_figheight(figure.get_figheight() + extra_height)


def _figure_of(axes: Axes) -> Figure:
    figure = axes.get_figure(root=True)
    assert figure is not None  # only of axes that were taken out of theirs
    return figure
