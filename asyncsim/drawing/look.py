"""One look for all figures: sizes, colours, the table from methods to looks, and writing a figure.

Colours are Okabe and Ito's, which the colour-blind can tell apart; methods differ in their lines as well. Sizes are
those of a paper's columns, at which everything stays readable::

    with look.style():
        figure, (axes,) = look.new_figure(look.SINGLE, 2.5)
        plots.staleness_histogram(axes, trace)
        look.save(figure, "staleness")
"""

import itertools
import math
import os
import warnings
import zlib
from collections.abc import Hashable, Iterable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Literal, NamedTuple

import matplotlib
import matplotlib.style
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter
from matplotlib.transforms import ScaledTranslation

from asyncsim.files import write_whole
from asyncsim.wording import wrapped

#: Widths of a paper's single and double column (inches).
SINGLE, DOUBLE = 3.4, 7.0

BLACK, ORANGE, SKY, GREEN = "#000000", "#E69F00", "#56B4E9", "#009E73"
BLUE, VERMILLION, PURPLE, GREY = "#0072B2", "#D55E00", "#CC79A7", "#808080"

#: What workers do, by the phases of `asyncsim.traces.phases.Phases`; the reply that travels is paler than what is done.
PHASES = {
    "computing": SKY,
    "sending": BLUE,
    "waiting": ORANGE,
    "served": GREEN,
    "held": PURPLE,
    "returning": "#d9d9d9",
}

#: Characters of a title across a single column, and how the title of a figure is set.
_TITLE_WIDTH = 50
_TITLE: dict[str, Any] = {"x": 0.01, "ha": "left", "fontsize": 8}
#: What the vertical axis of a panel takes of its width (inches).
_BESIDE = 0.5
#: Lines of a title that every figure has room for, and the height of each that comes on top (inches).
_TITLE_LINES, _TITLE_LINE_HEIGHT = 2, 0.134

_STYLE = {
    "axes.axisbelow": True,
    "axes.labelsize": 8,
    "axes.linewidth": 0.6,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 8,
    "figure.dpi": 150,
    "font.size": 8,
    "legend.borderaxespad": 0.2,
    "legend.fontsize": 7,
    "legend.frameon": False,
    "legend.handlelength": 1.8,
    "lines.linewidth": 1.2,
    "pdf.fonttype": 42,
    "savefig.dpi": 300,
    "xtick.labelsize": 7,
    "xtick.major.width": 0.6,
    "ytick.labelsize": 7,
    "ytick.major.width": 0.6,
    "ytick.minor.width": 0.4,
}


class Look(NamedTuple):
    """How a method is drawn.

    Attributes
    ----------
    color, line : str
        As matplotlib has them.
    label : str
        For legends.
    """

    color: str
    line: Any
    label: str


#: The one table from a method's name to its look: a family has a colour, its members have lines. Where a figure has
#: several of a family, `looks` gives all but the first another colour.
METHOD_LOOKS = {
    "gem": Look(BLUE, "-", "GEM"),
    "async_local_sgd": Look(BLUE, "--", "async local SGD"),
    "delayed_nesterov": Look(BLUE, ":", "delayed Nesterov"),
    "downpour": Look(VERMILLION, "--", "DOWNPOUR"),
    "fedasync": Look(VERMILLION, "-.", "FedAsync"),
    "fedbuff": Look(VERMILLION, ":", "FedBuff"),
    "qsgd": Look(VERMILLION, (0, (5, 1, 1, 1, 1, 1)), "QSGD"),
    "mem_sgd": Look(VERMILLION, (0, (3, 1, 1, 1)), "Mem-SGD"),
    "hogwild": Look(VERMILLION, "-", "Hogwild"),
    "adaptive_staleness": Look(GREEN, "-.", "adaptive staleness"),
    "damping": Look(GREEN, "--", "damping"),
    "dynsgd": Look(GREEN, ":", "DynSGD"),
    "softsync": Look(GREEN, "-", "softsync"),
    "adag": Look(ORANGE, "--", "ADAG"),
    "agn": Look(ORANGE, "-", "AGN"),
    "delay_adaptive": Look(ORANGE, "-.", "delay-adaptive"),
    "aeasgd": Look(PURPLE, "-", "AEASGD"),
    "eamsgd": Look(PURPLE, "--", "EAMSGD"),
    "easgd": Look(PURPLE, ":", "EASGD"),
    "dana_slim": Look(SKY, ":", "DANA-Slim"),
    "dana_zero": Look(SKY, "-.", "DANA-Zero"),
    "dc_asgd": Look(SKY, "-", "DC-ASGD"),
    "gap_aware": Look(SKY, "--", "Gap-Aware"),
    "ringleader": Look(GREY, "-", "Ringleader"),
    "lsgd": Look(GREY, "--", "LSGD"),
    "lgd": Look(GREY, ":", "LGD"),
    "batch_sgd": Look(BLACK, "-", "batch SGD"),
    "averaging": Look(BLACK, (0, (5, 1, 1, 1, 1, 1)), "model averaging"),
    "rennala": Look(BLACK, "--", "Rennala"),
    "ringmaster": Look(BLACK, "-.", "Ringmaster"),
    "sgd": Look(BLACK, ":", "SGD with momentum"),
}
_PALETTE = (BLUE, VERMILLION, GREEN, ORANGE, PURPLE, SKY, BLACK, GREY)
#: Colours and lines left for methods that the table does not know.
_COLORS = (ORANGE, PURPLE, SKY, GREY)
_LINES = ((0, (5, 1, 1, 1, 1, 1)), (0, (1, 1)), (0, (7, 2)), (0, (2.5, 1)))
# The first four differ in both: those who cannot see the colours see the lines.
_FREE = [(color, _LINES[(i + turn) % 4]) for turn in range(3) for i, color in enumerate(_COLORS)]


def looks(names: Iterable[str]) -> dict[str, Look]:
    """Return the look of each method in a figure, all different up to twelve that the table does not know.

    Of a family the first has its colour; the others take colours that are free, and the family's once there are none.
    Of a method that the table does not know the name chooses the colour, and the next one if another in ``names`` has
    that already. Figures that are to agree are drawn with the looks of all their methods.
    """
    names = list(names)
    found = {name: one for name, one in METHOD_LOOKS.items() if name in names}
    firsts = {one.color: name for name, one in reversed(found.items())}
    free = iter([color for color in _PALETTE if color not in firsts])
    for name, one in found.items():
        if firsts[one.color] != name:
            found[name] = one._replace(color=next(free, one.color))
    colors, drawn = {one.color for one in found.values()}, {(one.color, one.line) for one in found.values()}
    taken = {place for place, one in enumerate(_FREE) if one in drawn}
    for name in sorted(set(names) - set(found)):
        wanted = zlib.crc32(name.encode()) % 4
        places = sorted([*range(wanted, len(_FREE)), *range(wanted)], key=lambda place: _FREE[place][0] in colors)
        place = next((place for place in places if place not in taken), wanted)
        taken.add(place)
        found[name] = Look(*_FREE[place], name.replace("_", " "))
    return {name: found[name] for name in names}


#: Colours and lines of things that are no methods and have no order; neighbours differ in both.
_COLORS_OF_OTHERS = (BLUE, VERMILLION, GREEN, PURPLE, ORANGE, SKY, BLACK)
_LINES_OF_OTHERS = ("-", "--", "-.", ":")


def others(names: Iterable[str]) -> dict[str, Look]:
    """Return looks for things that are no methods and have no order, policies say; all differ up to 28."""
    colors, lines = itertools.cycle(_COLORS_OF_OTHERS), itertools.cycle(_LINES_OF_OTHERS)
    return {name: Look(next(colors), next(lines), name) for name in names}


class Shade(NamedTuple):
    """How a value in a row of them is drawn, a number of workers say: a colour and a marker."""

    color: str
    marker: str


#: Markers of things that are drawn together, in this order.
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "p")
#: Of the map of colours, what is dark enough on white.
_DARK = (0.0, 0.83)


def shades(values: Iterable[Hashable]) -> dict[Any, Shade]:
    """Return a look for each of some values in their order, from dark to light, so that grey print keeps the order.

    The markers differ up to ten.
    """
    values = list(values)
    colors = matplotlib.colormaps["viridis"](np.linspace(*_DARK, max(2, len(values))))
    return {value: Shade(to_hex(colors[i]), MARKERS[i % len(MARKERS)]) for i, value in enumerate(values)}


def style() -> AbstractContextManager[Any]:
    """Return the context in which figures have the house look, whatever the user's own settings."""
    return matplotlib.style.context(["default", _STYLE])


def new_figure(
    width: float, height: float, columns: int = 1, rows: int = 1, **options: Any
) -> tuple[Figure, list[Axes]]:
    """Return a figure of this size (inches) and its axes row by row; ``options`` go to ``Figure.subplots``."""
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, list(figure.subplots(rows, columns, squeeze=False, **options).flat)


#: Rows of a legend that every figure has room for.
_LEGEND_ROWS = 3
#: Height of each row that comes on top (inches).
_LEGEND_ROW_HEIGHT = 0.15


def legend_below(figure: Figure, handles: Sequence[Any], labels: Sequence[str], columns: int) -> None:
    """Add a legend below all axes; a figure whose legend has many rows gets taller, so that its axes do not shrink."""
    more = math.ceil(len(labels) / columns) - _LEGEND_ROWS
    figure.set_figheight(figure.get_figheight() + _LEGEND_ROW_HEIGHT * max(0, more))
    figure.legend(handles, labels, loc="outside lower center", ncols=columns)


def legend_inside(axes: Axes, loc: Literal["upper left", "upper right"] = "upper left") -> None:
    """Add a legend at the top of axes with their final limits, and make room for it there, so that it hides nothing."""
    handles, _ = axes.get_legend_handles_labels()
    inches = 0.8 * axes.get_window_extent().height / _figure_of(axes).dpi
    room = (0.135 * len(handles) + 0.05) / max(inches, 0.5)
    scale = axes.yaxis.get_transform()
    bottom, top = scale.transform(np.array(axes.get_ylim()))
    axes.set_ylim(*scale.inverted().transform(np.array([bottom, bottom + (top - bottom) / max(1 - room, 0.4)])))
    axes.legend(loc=loc)


def legend_under(axes: Axes, label: float = 0.4) -> None:
    """Add a legend under axes and the label of their horizontal axis (which is so high, in inches) in a taller figure.

    For those whose limits mean something, so that `legend_inside` cannot make room between them.
    """
    figure, (handles, _) = _figure_of(axes), axes.get_legend_handles_labels()
    figure.set_figheight(figure.get_figheight() + _LEGEND_ROW_HEIGHT * len(handles))
    below = ScaledTranslation(0, -label, figure.dpi_scale_trans)
    axes.legend(loc="upper left", bbox_to_anchor=(0, 0), bbox_transform=axes.transAxes + below)


def say_inside(axes: Axes, text: str) -> None:
    """Say in the middle of axes why there is nothing in them."""
    axes.annotate(text, (0.5, 0.5), xycoords="axes fraction", ha="center", va="center")


def whole_ticks(axis: Any, most: int | Literal["auto"] = 10) -> None:
    """Put ticks at whole numbers only, at most so many; one is enough, to which matplotlib would add others.

    With ``"auto"`` as many as have room, however many digits they have.
    """
    axis.set_major_locator(MaxNLocator(most, integer=True, min_n_ticks=1, steps=[1, 2, 2.5, 5, 10]))


def plain_logs(axis: Any) -> None:
    """Label a logarithmic axis with plain numbers, at 1, 2 and 5 if it spans less than two and a half decades.

    At others where fewer than two of these are in view.
    """
    low, high = axis.get_view_interval()
    if np.log10(high / low) < 2.5:
        plain = LogLocator(10, subs=(1.0, 2.0, 5.0))
        seen = [tick for tick in plain.tick_values(low, high) if low <= tick <= high]
        axis.set_major_locator(plain if len(seen) > 1 else MaxNLocator(5))
        axis.set_major_formatter("{x:g}")
    axis.set_minor_formatter(NullFormatter())


def title(figure: Any, text: str, width: float | None = None) -> None:
    """Set the title of a figure, or of a part of one that is so wide (inches), in as few lines as fit.

    A figure whose title has many lines gets taller. Its parts are rows of the same height.
    """
    inches = figure.get_figwidth() if width is None else width
    said, whole = wrapped(text, _TITLE_WIDTH * inches / SINGLE), figure.get_figure(root=True)
    parts = [] if figure is whole else whole.subfigs
    _make_room(whole, said, [part.get_suptitle() for part in parts], max(1, len(parts)))
    figure.suptitle(said, **_TITLE)


def panel_title(axes: Axes, text: str) -> None:
    """Set the title of a panel that shares its figure with those beside it, in as few lines as fit above it.

    A figure in which it has many gets taller.
    """
    place: Any = axes.get_subplotspec()  # there is one, as all axes here come from `new_figure`
    figure = _figure_of(axes)
    inches = figure.get_figwidth() / place.get_gridspec().ncols - _BESIDE
    said = wrapped(text, _TITLE_WIDTH * inches / SINGLE)
    _make_room(figure, said, [one.get_title() for one in figure.axes if _row(one) == _row(axes)])
    axes.set_title(said)


def _row(axes: Any) -> range:
    return axes.get_subplotspec().rowspan


def _make_room(figure: Figure, said: str, beside: Iterable[str], rows: int = 1) -> None:
    """Make a figure taller for a title, in each of so many rows, unless it is already for the titles beside it."""
    lines = [1 + text.count("\n") for text in (said, *beside)]
    more = lines[0] - max([_TITLE_LINES, *lines[1:]])
    figure.set_figheight(figure.get_figheight() + rows * _TITLE_LINE_HEIGHT * max(0, more))


def _figure_of(axes: Axes) -> Figure:
    figure = axes.get_figure(root=True)
    assert figure is not None  # only of axes that were taken out of theirs
    return figure


def save(figure: Figure, path: str | os.PathLike) -> list[Path]:
    """Write a figure as ``path.png`` and ``path.pdf``: no dates inside, so the same figure gives the same bytes.

    Raises
    ------
    InputError
        A file cannot be written.
    """
    nothing: dict[str, dict[str, Any]] = {
        "png": {"Software": None},
        "pdf": {"CreationDate": None, "Creator": None, "Producer": None},
    }
    written = []
    _without_empty_logarithms(figure)
    for kind, metadata in nothing.items():
        target = Path(path).with_name(f"{Path(path).name}.{kind}")

        def write(partial: Path, kind: str = kind, metadata: dict[str, Any] = metadata) -> None:
            with style():
                figure.savefig(partial, format=kind, metadata=metadata)

        written.append(write_whole(target, write))
    return written


def _without_empty_logarithms(figure: Figure) -> None:
    """Make axes linear that are logarithmic and have no value above zero: matplotlib does not draw them."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Data has no positive values")  # while one axis still has none
        for axes in figure.axes:
            # Axes that share one have its scale, and its ticks, by what any of them shows.
            x, y = axes.get_shared_x_axes().get_siblings(axes), axes.get_shared_y_axes().get_siblings(axes)
            if axes.get_xscale() == "log" and not any(np.isfinite(one.dataLim.minposx) for one in x):
                axes.set_xscale("linear")
            if axes.get_yscale() == "log" and not any(np.isfinite(one.dataLim.minposy) for one in y):
                axes.set_yscale("linear")
