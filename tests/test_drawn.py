"""What every figure shows of results made by hand, against numbers that were read once and are kept
in `drawn.json`.

Where a figure is to show something else, ``python tests/test_drawn.py`` writes them anew.
"""

import json
import sys
import tempfile
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from gem_results import make_trace, ranks, write_all, write_study, write_traced, write_windows
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.patches import Rectangle
from matplotlib.text import Text
from test_gem_figures import agn, gem, published_in

from asyncsim import Cluster
from asyncsim.drawing import look
from asyncsim.study.finished import figures as figures_of
from asyncsim.study.finished import read

KEPT = Path(__file__).with_name("drawn.json")
MINE = [({"workers": n, "learning_rate": rate}, "mine", {}) for rate in (0.05, 0.2) for n in (1, 2)]
KAPPAS = [
    ({"workers": n, "method.kappa": kappa}, "gem", {}) for n in (4, 2) for kappa in (1.0, 2.0)
]
QUEUES = [
    ({"discipline": name, "workers": n}, "gem", {})
    for n in (2, 4)
    for name in ("fifo", "lowest_rank")
]
RARE = [({"workers": 2, "method.kappa": 1.0}, "gem", {"every": 2})]
GEMS = [({"workers": n}, "gem", {}) for n in (2, 4)]
OF_PI = [({"workers": n}, name, {}) for n in (2, 4) for name in ("mine", "gem", "downpour")]
#: Results that are unlike those that a whole study has: figure and study, and its cells.
UNLIKE = {
    "1d, another method": ("1d", "stability", MINE),
    "5, another method": ("5", "generalization", MINE),
    "energy, another method": ("energy", "energy", MINE),
    "several clusters, generalization": ("5", "generalization", GEMS),
    "several clusters, kappa": ("8a", "kappa", KAPPAS),
    "several clusters, queue": ("queue", "policies", QUEUES),
    "recorded seldom": ("8b", "kappa", RARE),
    "methods with a pi": ("9", "tensors", OF_PI),
}
RANKS = {"ranks.csv": pd.concat([ranks(2), ranks(4)])}


def drawn(folder: Path):
    """Every figure by its name."""
    write_all(folder / "gem")
    for name, drawing in gem.FIGURES.items():
        results = read(folder / "gem" / drawing.folder, gem.STUDIES[drawing.folder].name)
        yield f"gem {name}", drawing.draw(results)
    for name, (figure, study, cells) in UNLIKE.items():
        tables = RANKS if figure == "queue" else None
        results = read(write_study(folder / name, study, cells, tables=tables), study)
        yield f"gem {name}", gem.FIGURES[figure].draw(results)
    results = read(write_windows(folder / "windows"), "windows")
    for name, drawing in agn.FIGURES.items():
        if name != "path":  # of a study's runs, which its results made by hand lack
            yield f"windows {name}", drawing.draw(results)
    traces = [make_trace(Cluster(2, "gamma(1, 0.2)", service=0.1), seed=seed) for seed in range(2)]
    of_methods = {"gem": traces, "downpour": traces, "mine": traces}
    results = read(write_traced(folder / "staleness", of_methods, diverged="downpour"), "staleness")
    for name in ("staleness", "energy", "queue"):
        yield f"staleness {name}", getattr(figures_of("staleness"), name)(results)


def texts(artists) -> list[str]:
    return [text.get_text() for text in artists]


def ends(values) -> list[float]:
    """Return how many values are finite, their mean and the last of them."""
    values = np.ma.masked_invalid(np.ma.asarray(values, float)).compressed()
    numbers = [values.mean(), values[-1]] if len(values) else []
    return [len(values), *(float(f"{number:.8g}") for number in numbers)]


def shown(figure) -> dict[str, list]:
    """Of the figure its words; of each panel its words, and the counts, means and last values of
    its curves, bars and coloured maps.
    """
    words = [figure.get_suptitle(), figure.get_label()]
    words += [texts(legend.get_texts()) for legend in figure.legends]
    numbers = []
    for axes in figure.axes:
        bars = [bar for bar in axes.patches if isinstance(bar, Rectangle)]
        scales = [
            f"{axis.get_label_text()} {axis.get_scale()}" for axis in (axes.xaxis, axes.yaxis)
        ]
        legend, ticks = axes.get_legend(), axes.get_yticklabels() if bars else ()
        of_legend = legend.get_texts() if legend else ()
        words.append([axes.get_title(), *scales, *texts([*of_legend, *ticks, *axes.texts])])
        curves = [values for line in axes.lines for values in line.get_data() if len(values)]
        colours = [artist.get_array() for artist in (*axes.collections, *axes.images)]
        sizes = [[bar.get_width() for bar in bars], [bar.get_height() for bar in bars]]
        values = [values for values in (*curves, *colours, *sizes) if values is not None]
        numbers += [*map(ends, values), [len(axes.patches), len(axes.texts)]]
    return {"words": words, "numbers": numbers}


@pytest.fixture(scope="module")
def figures(tmp_path_factory):
    """Every figure by its name."""
    with look.style():
        return dict(drawn(tmp_path_factory.mktemp("drawn")))


@pytest.mark.parametrize("name", json.loads(KEPT.read_text()))
def test_figures_show_what_they_did(figures, name):
    """``python tests/test_drawn.py`` writes the file anew."""
    kept, figure = json.loads(KEPT.read_text())[name], shown(figures[name])
    assert figure["words"] == kept["words"]
    assert list(map(len, figure["numbers"])) == list(map(len, kept["numbers"]))
    numbers, expected = map(np.concatenate, (figure["numbers"], kept["numbers"]))
    np.testing.assert_allclose(numbers, expected, rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("name", gem.FIGURES)
def test_nothing_that_is_written_lies_outside_the_figure(figures, name):
    figure = figures[f"gem {name}"]
    with look.style():
        FigureCanvasAgg(figure).draw()
    assert any(axes.lines or axes.collections for axes in figure.axes)
    # The digits have no published curves.
    told, grey = published_in(figure)
    # Figure 5 of the paper has no number of workers: its curve is beside every task.
    assert (told == [] or name == "5") and grey == 0
    renderer, (width, height) = figure.canvas.get_renderer(), figure.canvas.get_width_height()
    # Ticks beyond the limits of an axis are there, but not drawn.
    both = [axis for axes in figure.axes for axis in (axes.xaxis, axes.yaxis)]
    ticks = [label for axis in both for label in axis.get_ticklabels(which="both")]
    for text in figure.findobj(Text):
        if text.get_text() and text.get_visible() and text not in ticks:
            box = text.get_window_extent(renderer)
            assert min(box.x0, box.y0) > -2 and box.x1 < width + 2 and box.y1 < height + 2, (
                text.get_text()
            )


def test_every_figure_is_kept(figures):
    assert list(figures) == list(json.loads(KEPT.read_text()))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as there, look.style():
        numbers = {name: shown(figure) for name, figure in drawn(Path(there))}
    rows = [
        f"{json.dumps(name)}: {json.dumps(of_figure, ensure_ascii=False)}"
        for name, of_figure in numbers.items()
    ]
    sys.exit(KEPT.write_text("{\n" + ",\n".join(rows) + "\n}\n") == 0)
