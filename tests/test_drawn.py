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
import test_figures
from gem_results import ranks, write_all, write_study
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.patches import Rectangle
from matplotlib.text import Text
from test_agn import agn, write_windows
from test_gem_figures import gem, published_in

from asyncsim import Cluster
from asyncsim.drawing import look
from asyncsim.study.finished import read

KEPT = Path(__file__).with_name("drawn.json")
MINE = [({"workers": n, "learning_rate": rate}, "mine", {}) for rate in (0.05, 0.2) for n in (1, 2)]
#: Results that are unlike those that a whole study has: figure and study, its cells, and its
#: tables.
UNLIKE = {
    **{
        f"{name}, another method": (name, study, MINE, {})
        for name, study in (
            ("1d", "stability"),
            ("5", "generalization"),
            ("energy", "energy"),
        )
    },
    "several clusters, generalization": (
        "5",
        "generalization",
        [({"workers": n}, "gem", {}) for n in (2, 4)],
        {},
    ),
    "several clusters, kappa": (
        "8a",
        "kappa",
        [
            ({"workers": n, "method.kappa": kappa}, "gem", {})
            for n in (4, 2)
            for kappa in (1.0, 2.0)
        ],
        {},
    ),
    "several clusters, queue": (
        "queue",
        "policies",
        [
            ({"discipline": name, "workers": n}, "gem", {})
            for n in (2, 4)
            for name in ("fifo", "lowest_rank")
        ],
        {"ranks.csv": pd.concat([ranks(2), ranks(4)])},
    ),
    "recorded seldom": (
        "8b",
        "kappa",
        [({"workers": 2, "method.kappa": 1.0}, "gem", {"every": 2})],
        {},
    ),
    "methods with a pi": (
        "9",
        "tensors",
        [({"workers": n}, name, {}) for n in (2, 4) for name in ("mine", "gem", "downpour")],
        {},
    ),
}

#: Figures of a study's runs, which its results made by hand lack.
OF_RUNS = {"path"}


def drawn(folder: Path):
    """Every figure by its name."""
    write_all(folder / "gem")
    for name, drawing in gem.FIGURES.items():
        where = folder / "gem" / drawing.folder
        yield f"gem {name}", drawing.draw(read(where, gem.STUDIES[drawing.folder].name))
    for name, (figure, study, cells, tables) in UNLIKE.items():
        yield (
            f"gem {name}",
            gem.FIGURES[figure].draw(
                read(write_study(folder / name, study, cells, tables=tables), study)
            ),
        )
    found = read(write_windows(folder / "windows"), "windows")
    for name, drawing in agn.FIGURES.items():
        if name not in OF_RUNS:
            yield f"windows {name}", drawing.draw(found)
    cluster = Cluster(2, "gamma(1, 0.2)", service=0.1)
    traces = [test_figures.hand_made_trace(cluster, seed=seed) for seed in range(2)]
    written = test_figures.write_results(
        folder / "staleness",
        {"gem": traces, "downpour": traces, "mine": traces},
        diverged="downpour",
    )
    found = read(written, "staleness")
    for name in test_figures.FIGURES:
        yield f"staleness {name}", getattr(test_figures.figures, name)(found)


def shown(figure) -> dict[str, list]:
    """Of the figure its words; of each panel its words, and the counts, means and last values of
    its curves, bars and coloured maps.
    """

    def ends(values):
        values = np.ma.filled(np.ma.masked_invalid(np.ma.asarray(values, float)), np.nan)
        finite = values[np.isfinite(values)]
        numbers = [finite.mean(), finite[-1]] if finite.size else []
        return [finite.size, *(float(f"{number:.8g}") for number in numbers)]

    def legend(panel):
        return [text.get_text() for text in panel.get_texts()] if panel else []

    words = [figure.get_suptitle(), figure.get_label(), *map(legend, figure.legends)]
    numbers = []
    for axes in figure.axes:
        axis = [
            f"{axes.get_xlabel()} {axes.get_xscale()}",
            f"{axes.get_ylabel()} {axes.get_yscale()}",
        ]
        bars = [bar for bar in axes.patches if isinstance(bar, Rectangle)]
        named = [label.get_text() for label in axes.get_yticklabels()] if bars else []
        notes = [text.get_text() for text in axes.texts]
        words.append([axes.get_title(), *axis, *legend(axes.get_legend()), *named, *notes])
        curves = [line for line in axes.lines if len(line.get_xdata())]
        colours = [drawn.get_array() for drawn in (*axes.collections, *axes.images)]
        numbers += [ends(line.get_data()[axis]) for line in curves for axis in (0, 1)]
        numbers += [ends(values.ravel()) for values in colours if values is not None]
        numbers += [
            ends([bar.get_width() for bar in bars]),
            ends([bar.get_height() for bar in bars]),
        ]
        numbers += [[len(axes.patches), len(notes)]]
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
