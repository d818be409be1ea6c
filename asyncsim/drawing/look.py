"""The style of all figures: sizes, colours, the looks of methods, and writing a figure.

Colours are Okabe and Ito's, which colour-blind readers can distinguish; methods differ in their
lines as well. Sizes are the columns of a paper, at which all text stays readable::

    with look.style():
        figure, (axes,) = look.new_figure(look.SINGLE, 2.5)
        plots.staleness_histogram(axes, trace)
        look.save(figure, "staleness")
"""

import contextlib
import functools
import io
import itertools
import os
import warnings
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import AbstractContextManager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import matplotlib.style
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_pdf import FigureCanvasPdf
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.category import StrCategoryFormatter
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.mathtext import MathTextParser
from matplotlib.text import Text
from matplotlib.ticker import (
    FuncFormatter,
    LogFormatter,
    LogLocator,
    MaxNLocator,
    NullFormatter,
)

from asyncsim.base.console import summary_of
from asyncsim.base.errors import InputError, printable, require_positive
from asyncsim.base.files import write_whole

#: Widths of a paper's single and double column (inches).
SINGLE, DOUBLE = 3.4, 7.0

BLACK, ORANGE, SKY, GREEN = "#000000", "#E69F00", "#56B4E9", "#009E73"
BLUE, VERMILLION, PURPLE, GREY = "#0072B2", "#D55E00", "#CC79A7", "#808080"

#: Panels of the reader's figures are not narrower than this (inches).
_NARROW = 1.7

#: Colours of the workers' phases, by the names in `asyncsim.traces.phases.IN_WORDS`; a
#: travelling reply is pale.
PHASES = {
    "computing": SKY,
    "sending": BLUE,
    "waiting": ORANGE,
    "served": GREEN,
    "held": PURPLE,
    "returning": "#d9d9d9",
} | {"away": VERMILLION}

#: Of axis labels and titles (points).
_FONT_SIZE = 8.0
_STYLE = {
    "axes.axisbelow": True,
    "axes.labelsize": _FONT_SIZE,
    "axes.linewidth": 0.6,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 8,
    "figure.dpi": 150,
    "font.size": _FONT_SIZE,
    "legend.borderaxespad": 0.2,
    "legend.fontsize": 7,
    "legend.frameon": False,
    "legend.handlelength": 1.8,
    "lines.linewidth": 1.2,
    "pdf.fonttype": 42,
    "savefig.dpi": 300,
    "svg.hashsalt": "asyncsim",
    "xtick.labelsize": 7,
    "xtick.major.width": 0.6,
    "ytick.labelsize": 7,
    "ytick.major.width": 0.6,
    "ytick.minor.width": 0.4,
}


class Look(NamedTuple):
    """Colour, line and label of a method in figures."""

    color: str  #: as matplotlib has it, and so the marker
    line: Any
    label: str  #: for legends
    width: float = 1.2  #: of the line (points)

    @property
    def style(self) -> dict[str, Any]:
        """The arguments of matplotlib's lines."""
        fields = ("color", "linestyle", "label", "linewidth")
        return dict(zip(fields, self, strict=True))


#: Looks of methods by name; `looks` assigns the rest. A family shares a colour, its members differ
#: in lines. In a figure with several of a family, `looks` gives all but the first another colour.
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
    "async_nesterov": Look(PURPLE, (0, (8, 2)), "AsyncPP"),
    "weight_prediction": Look(VERMILLION, (0, (8, 2)), "weight prediction"),
    "diloco": Look(BLUE, (0, (5, 1, 1, 1, 1, 1)), "DiLoCo"),
    "streaming_diloco": Look(BLUE, (0, (1, 1)), "Streaming DiLoCo"),
    "decoupled_diloco": Look(BLUE, (0, (6, 1, 2, 1)), "Decoupled DiLoCo"),
    "server_optimizer": Look(SKY, (0, (4, 2, 1, 2)), "server optimizer"),
    "malenia": Look(BLACK, (0, (4, 2, 1, 2)), "Malenia"),
    "ia2sgd": Look(GREY, (0, (4, 2, 1, 2)), "IA2SGD"),
    "rescaled_asgd": Look(GREY, "-.", "Rescaled ASGD"),
    "ringleader": Look(GREY, "-", "Ringleader"),
    "lsgd": Look(GREY, "--", "LSGD"),
    "lgd": Look(GREY, ":", "LGD"),
    "batch_sgd": Look(BLACK, "-", "batch SGD"),
    "averaging": Look(BLACK, (0, (5, 1, 1, 1, 1, 1)), "model averaging"),
    "mindflayer": Look(BLACK, (0, (1, 1)), "MindFlayer"),
    "rennala": Look(BLACK, "--", "Rennala"),
    "ringmaster": Look(BLACK, "-.", "Ringmaster"),
    "ringmaster_lmo": Look(VERMILLION, (0, (6, 1, 2, 1)), "Ringmaster Muon"),
    "sgd": Look(BLACK, ":", "SGD with momentum"),
    "basgd": Look(BLUE, (0, (4, 2, 1, 2)), "BASGD"),
    "kardam": Look(VERMILLION, (0, (4, 2, 1, 2)), "Kardam"),
    "zeno_pp": Look(GREEN, (0, (4, 2, 1, 2)), "Zeno++"),
    "parle": Look(GREEN, (0, (6, 1, 2, 1)), "Parle"),
    "entropy_sgd": Look(GREEN, (0, (1, 1)), "Entropy-SGD"),
    "dpsgd": Look(BLUE, "-.", "D-PSGD"),
    "sgp": Look(GREEN, (0, (8, 2)), "SGP"),
    "osgp": Look(ORANGE, ":", "overlap SGP"),
    "adpsgd": Look(PURPLE, "-.", "AD-PSGD"),
    "clipped_gossip": Look(VERMILLION, (0, (1, 1)), "ClippedGossip"),
    "robust_gossip": Look(ORANGE, (0, (5, 1, 1, 1, 1, 1)), "robust gossip (BRIDGE)"),
}
_PALETTE = (BLUE, VERMILLION, GREEN, ORANGE, PURPLE, SKY, BLACK, GREY)
#: Colours, lines and width of a user's own methods; beside them the others are thin.
_OWN_COLORS = (VERMILLION, BLUE, GREEN, BLACK)
_OWN_LINES = ("-", (0, (7, 2)), (0, (2.5, 1)), (0, (1, 1)))
_STRONG, _THIN = 2.0, 0.8
# The first four differ in both: those who cannot see the colours see the lines.
_USERS_LOOKS = [
    (color, _OWN_LINES[(i + turn) % 4]) for turn in range(3) for i, color in enumerate(_OWN_COLORS)
]


def looks(names: Iterable[str]) -> dict[str, Look]:
    """Assign each method of a figure its look: up to twelve of a user's own are the strongest.

    A name with arguments, ``gem(kappa=2)``, belongs to its method's family. The first of a family
    has its colour; the rest take unused colours, then the family's. Methods outside `METHOD_LOOKS`
    keep their names as labels, and have the first colours.
    """
    names = list(names)
    unknown = [name for name in names if name.partition("(")[0] not in METHOD_LOOKS]
    chosen = {
        name: Look(*look, name, _STRONG)
        for name, look in zip(unknown, itertools.cycle(_USERS_LOOKS), strict=False)
    }
    ordered = dict.fromkeys([*(name for name in METHOD_LOOKS if name in names), *names])
    standard = {
        name: METHOD_LOOKS[name.partition("(")[0]] for name in ordered if name not in unknown
    }
    firsts = {appearance.color: name for name, appearance in reversed((chosen | standard).items())}
    free = iter([color for color in _PALETTE if color not in firsts])
    for name, (color, line, label, width) in standard.items():
        if arguments := name.partition("(")[2]:
            label = f"{label} ({arguments.replace('_', ' ')}"
        color = color if firsts[color] == name else next(free, color)
        chosen[name] = Look(color, line, label, _THIN if unknown else width)
    return {name: chosen[name] for name in names}


#: Colours and lines of unordered categories; neighbours differ in both.
_CATEGORY_COLORS = (BLUE, VERMILLION, GREEN, PURPLE, ORANGE, SKY, BLACK)
_CATEGORY_LINES = ("-", "--", "-.", ":")


def category_looks(names: Iterable[str]) -> dict[str, Look]:
    """Assign looks to unordered categories that are no methods, for instance policies; up to 28
    differ.
    """
    colors, lines = itertools.cycle(_CATEGORY_COLORS), itertools.cycle(_CATEGORY_LINES)
    return {name: Look(next(colors), next(lines), name) for name in names}


#: Shares of red, green and blue in the luminance, and the largest luminance of text on white: a
#: contrast of 4.5 to 1.
_LUMINANCE, _DARK_ENOUGH = np.array([0.2126, 0.7152, 0.0722]), 1.05 / 4.5 - 0.05


def ink(color: Any) -> np.ndarray:
    """Darken a colour until text in it is readable on white; return red, green and blue."""
    linear = ((np.array(to_rgb(color)) + 0.055) / 1.055) ** 2.4
    linear *= min(1.0, _DARK_ENOUGH / max(linear @ _LUMINANCE, 1e-9))
    return np.clip(1.055 * linear ** (1 / 2.4) - 0.055, 0, 1)


class Shade(NamedTuple):
    """Colour and marker of a value on an ordered scale, for instance a number of workers."""

    color: str
    marker: str


#: Markers of entries that are drawn together, in this order.
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "p")
#: The part of the colour map that is dark enough on white.
_DARK = (0.0, 0.83)


def shades(values: Iterable[Hashable]) -> dict[Any, Shade]:
    """Assign colours from dark to light to ordered values, so that grey print keeps the order.

    Up to ten markers differ.
    """
    values = list(values)
    colors = matplotlib.colormaps["viridis"](np.linspace(*_DARK, max(2, len(values))))
    return {
        value: Shade(to_hex(colors[i]), MARKERS[i % len(MARKERS)]) for i, value in enumerate(values)
    }


def style() -> AbstractContextManager[Any]:
    """Return the context in which figures have the house style, whatever the user's settings."""
    return matplotlib.style.context(["default", _STYLE])


#: The width that the reader chose for every figure inside `appearance` (inches).
_WIDTH: ContextVar[float | None] = ContextVar("width", default=None)


@contextlib.contextmanager
def appearance(width: float | None = None) -> Iterator[None]:
    """Let the figures that are created inside have another width: inches, from 1 to 20. Heights
    stay.

    Raises
    ------
    InputError
        A width outside its range.
    """
    if width is not None and not 1 <= require_positive("width", width) <= 20:
        raise InputError(f"width = {width:g}: must be from 1 to 20 inches")
    token = _WIDTH.set(_WIDTH.get() if width is None else width)
    try:
        yield
    finally:
        _WIDTH.reset(token)


class LiteralFigure(Figure):
    """A figure with the reader's width (see `appearance`).

    Text with invalid mathematics, for instance a method ``x$_$y``, is drawn literally.
    """

    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        if (width := _WIDTH.get()) is not None:
            self.set_figwidth(width)

    def draw(self, renderer: Any) -> None:
        """Draw the figure; mathematics that matplotlib cannot parse as text, and characters that
        could control a terminal, which a warning would repeat, as question marks.
        """
        for axis in (axis for axes in self.axes for axis in (axes.xaxis, axes.yaxis)):
            if isinstance(axis.get_major_formatter(), FuncFormatter | StrCategoryFormatter):
                # Names beside an axis become texts only now.
                names = [label.get_text() for label in axis.get_ticklabels()]
                if any(name != printable(name) for name in names):
                    axis.set_ticks(axis.get_majorticklocs(), [*map(printable, names)])
        for text in self.findobj(Text):
            if (harmless := printable(text.get_text())) != text.get_text():
                text.set_text(harmless)
            if not _is_drawable(text.get_text()):
                text.set_parse_math(False)
        super().draw(renderer)


@functools.cache
def _is_drawable(text: str) -> bool:
    """Return whether matplotlib can parse the mathematics of a text."""
    try:
        return "$" not in text or MathTextParser("path").parse(text) is not None
    except ValueError:
        return False


def new_figure(
    width: float, height: float, columns: int = 1, rows: int = 1, **options: Any
) -> tuple[Figure, list[Axes]]:
    """Create a figure of a size in inches and its axes, row by row; ``options`` go to
    ``Figure.subplots``.

    If the columns would be narrow (see `is_narrow`), all panels are below each other.
    """
    if is_narrow(columns):
        grid = options.pop("gridspec_kw", {}) | options
        if "height_ratios" in grid:
            options["height_ratios"] = np.repeat(grid["height_ratios"], columns)
        options.pop("width_ratios", None)
        height, rows, columns = columns * height, columns * rows, 1
    figure = LiteralFigure(figsize=(width, height), layout="constrained")
    return figure, list(figure.subplots(rows, columns, squeeze=False, **options).flat)


def is_narrow(columns: int) -> bool:
    """Return whether the width that the reader chose is too small for panels side by side."""
    width = _WIDTH.get()
    return columns > 1 and width is not None and width < _NARROW * columns


def new_grid(
    count: int, row_height: float, extra_height: float = 0.0, **options: Any
) -> tuple[Figure, list[Axes]]:
    """Create a figure of ``count`` panels, two side by side; heights in inches, ``extra_height``
    added once.
    """
    columns = 1 if is_narrow(2) else min(2, count)
    rows = -(-count // columns)
    width = SINGLE if columns == 1 else DOUBLE
    figure, panels = new_figure(width, row_height * rows + extra_height, columns, rows, **options)
    for axes in panels[count:]:
        axes.remove()
    return figure, panels[:count]


def plain_logs(axis: Any) -> None:
    """Label a logarithmic axis with plain numbers, because exponents would be below 6 points; below
    two and a half decades at 1, 2 and 5.

    If fewer than three of these are in view, matplotlib chooses the ticks.
    """
    low, high = axis.get_view_interval()
    if np.log10(high / low) < 2.5:
        plain = LogLocator(10, subs=(1.0, 2.0, 5.0))
        visible = [tick for tick in plain.tick_values(low, high) if low <= tick <= high]
        axis.set_major_locator(plain if len(visible) > 2 else MaxNLocator(5))
    axis.set_major_formatter("{x:g}")
    axis.set_minor_formatter(NullFormatter())


#: Placement of a figure's title.
TITLE: dict[str, Any] = {"x": 0.01, "ha": "left", "fontsize": 8}
#: The height of a line of a title (inches).
TITLE_LINE_HEIGHT = 0.134


#: The canvas of each format, and the metadata that would change from day to day.
_FORMATS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "png": (FigureCanvasAgg, ("Software",)),
    "pdf": (FigureCanvasPdf, ("CreationDate", "Creator", "Producer")),
    "svg": (FigureCanvasSVG, ("Date", "Creator")),
}


class _Collection(NamedTuple):
    """The figures that are saved inside `collecting`."""

    figures: list[tuple[str, bytes, str]]  #: name, SVG and caption
    remark: str  #: the end of each title: that the study is unfinished
    files: bool  #: whether PNG and PDF are written


_COLLECTION: ContextVar[_Collection | None] = ContextVar("collection", default=None)


@contextlib.contextmanager
def collecting(remark: str = "", files: bool = True) -> Iterator[list[tuple[str, bytes, str]]]:
    """Collect name, SVG and caption of each figure that is saved inside the context, for a page.

    ``remark``: a line added to each title. ``files``: also write PNG and PDF.
    """
    collection = _Collection([], remark, files)
    token = _COLLECTION.set(collection)
    try:
        yield collection.figures
    finally:
        _COLLECTION.reset(token)


def save(
    figure: Figure, path: str | os.PathLike, drawn_by: Callable[..., Any] | None = None
) -> list[Path]:
    """Write a figure as ``path.png`` and ``path.pdf``, without dates: the same figure gives the
    same bytes.

    All files have one layout. Logarithmic axes get plain numbers.

    On a page the figure's label is its caption, by default the first sentence of the docstring of
    ``drawn_by``, the function that drew it.

    Raises
    ------
    InputError
        A file cannot be written.
    """
    paths = []
    _without_empty_logarithms(figure)
    for axes in figure.axes:
        for axis in (axes.xaxis, axes.yaxis):
            if axis.get_scale() == "log" and isinstance(axis.get_major_formatter(), LogFormatter):
                plain_logs(axis)
    collection = _COLLECTION.get() or _Collection([], "", files=True)
    if collection.remark:
        figure.set_figheight(figure.get_figheight() + TITLE_LINE_HEIGHT)
        figure.suptitle(f"{figure.get_suptitle()}\n{collection.remark}".lstrip(), **TITLE)
    engine = figure.get_layout_engine()
    with style():
        figure.set_dpi(matplotlib.rcParams["savefig.dpi"])
        figure.draw_without_rendering()
    figure.set_layout_engine("none")  # text is wider in one format than in another
    for kind in ("png", "pdf") if collection.files else ():
        target = Path(path).with_name(f"{Path(path).name}.{kind}")
        drawn = _rendered(figure, kind)  # on a full disk matplotlib would raise unrelated errors
        paths.append(write_whole(target, functools.partial(Path.write_bytes, data=drawn)))
    if _COLLECTION.get() is not None:
        caption = str(figure.get_label()) or _first_sentence(drawn_by)
        collection.figures.append((Path(path).name, _rendered(figure, "svg"), caption))
    figure.set_layout_engine(engine)
    return paths


def _rendered(figure: Figure, kind: str) -> bytes:
    """Render a figure that is laid out; ``Figure.savefig`` would draw it twice."""
    drawn, (canvas, nothing) = io.BytesIO(), _FORMATS[kind]
    with style():
        figure.set_dpi(matplotlib.rcParams["savefig.dpi"])
        getattr(canvas(figure), f"print_{kind}")(drawn, metadata=dict.fromkeys(nothing))
    return drawn.getvalue()


def _first_sentence(function: Callable[..., Any] | None) -> str:
    """Return the first sentence of a docstring, without its verb: what a figure shows."""
    text = summary_of(getattr(function, "__doc__", None)).partition(". ")[0]
    noun = text.removeprefix("Draw ")
    return "" if noun == text else f"{noun[:1].upper()}{noun[1:].removesuffix('.')}."


def _without_empty_logarithms(figure: Figure) -> None:
    """Make logarithmic axes without positive values linear: matplotlib does not draw them."""
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", "Data has no positive values"
        )  # while one axis still has none
        for axes in figure.axes:
            # Shared axes have one scale, whichever of them has positive values.
            x, y = (
                axes.get_shared_x_axes().get_siblings(axes),
                axes.get_shared_y_axes().get_siblings(axes),
            )
            if axes.get_xscale() == "log" and not any(
                np.isfinite(shared.dataLim.minposx) for shared in x
            ):
                axes.set_xscale("linear")
            if axes.get_yscale() == "log" and not any(
                np.isfinite(shared.dataLim.minposy) for shared in y
            ):
                axes.set_yscale("linear")
