"""Write an animation of runs as a file for slides: GIF, or MP4 where ffmpeg is installed."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.animation import FFMpegWriter, PillowWriter
from matplotlib.collections import LineCollection
from matplotlib.patches import Circle

from asyncsim.base.console import Progress, number_text
from asyncsim.base.errors import InputError
from asyncsim.base.files import write_whole
from asyncsim.drawing import look
from asyncsim.pages.film import Film, on_screen, rings, scale
from asyncsim.pages.page import Shown, films_of

#: Frames a second, and dots an inch.
_RATE, _DPI = 20, 100


def write_movie(chosen: Sequence[Shown], path: Path, frames: int = 300) -> Path:
    """Write the frames of the page's animation, runs side by side on one clock above their losses.

    Parameters
    ----------
    chosen : list of (title, Run, Trace)
    path : Path
        Ends with ``.gif`` or ``.mp4``.
    frames : int
        Number of frames, at 20 a second.

    Raises
    ------
    InputError
        For another ending, or an MP4 without ffmpeg.
    """
    if path.suffix not in (".gif", ".mp4"):
        raise InputError(f"out = {str(path)!r}: must end with .gif or .mp4")
    if path.suffix == ".mp4" and not FFMpegWriter.isAvailable():
        raise InputError(
            f"out = {str(path)!r}: needs the program ffmpeg, which is not installed; write a .gif"
        )
    times, films = films_of(chosen, frames)
    with look.style():
        size = look.SINGLE * len(films), 4.2
        figure, axes = look.new_figure(*size, len(films), 2, height_ratios=(4, 1))
        panels = list(zip(films, axes, axes[len(films) :], strict=False))
        drawn = [_empty(films, film, panel, curve, times[-1]) for film, panel, curve in panels]
        figure.draw_without_rendering()
        figure.set_layout_engine("none")  # or the layout would be computed for each frame
        writer = (PillowWriter if path.suffix == ".gif" else FFMpegWriter)(fps=_RATE)

        def save(partial: Path) -> None:
            with (
                writer.saving(figure, partial, _DPI),
                Progress(len(times), path.name, "frame") as bar,
            ):
                for frame, time in enumerate(times):
                    for draw in drawn:
                        draw(frame, time)
                    writer.grab_frame()
                    bar.advance(frame + 1)

        return write_whole(path, save)


def _empty(films: Sequence[Film], film: Film, panel: Any, curve: Any, last: float) -> Any:
    """Draw what stays in all frames of a run; return the function that draws the rest."""
    bend, largest = scale(films)
    panel.set(xlim=(-1.15, 1.15), ylim=(-1.15, 1.15), aspect="equal", xticks=[], yticks=[])
    panel.spines[:].set_visible(False)
    if film.messages is None:
        places = on_screen(film.offset, bend, largest)
        panel.plot(0, 0, "s", color=look.BLACK, markersize=4, zorder=3)
        for distance, radius in rings(bend, largest):
            panel.add_patch(Circle((0, 0), radius, fill=False, color="#d0d0d0", linewidth=0.6))
            at = 0.7 * radius
            panel.text(at, at, number_text(distance, 1), fontsize=6, color=look.GREY)
    else:
        places = 0.95 * film.offset
    colors = np.array([*(look.PHASES.get(name, look.GREY) for name in film.names), look.GREY])
    lines = panel.add_collection(LineCollection([], linewidths=0.4, alpha=0.3, zorder=1))
    dots, moving = (panel.scatter([], [], s=area, zorder=2) for area in (9, 4))
    curve.plot(*np.reshape(film.loss, (-1, 2)).T, color=look.BLUE, marker=".")
    curve.set(xlim=(0, last), xlabel="simulated time (s)", ylabel="training loss")
    losses = [value for each in films for _, value in each.loss]
    if losses and min(losses) > 0:
        curve.set(yscale="log", ylim=(0.8 * min(losses), 1.25 * max(losses)))
    cursor, title = (
        curve.axvline(0, color=look.BLACK, linewidth=0.8),
        panel.set_title(f"{film.title}\n"),
    )

    def draw(frame: int, time: float) -> None:
        color = colors[film.phase[frame]]
        segments, on_the_way, senders = film.under_way(frame, time, places[frame])
        for points, at, shades in (
            (dots, places[frame], color),
            (moving, on_the_way, color[senders]),
        ):
            points.set_offsets(at)
            points.set_facecolor(shades)
        lines.set_segments(list(segments))
        lines.set_color(look.GREY if film.messages is not None else color)
        cursor.set_xdata([time] * 2)
        ended = film.ended is not None and time > film.ended
        state = "diverged" if ended else f"{time:.1f} s, {film.commits[frame]:,} commits"
        title.set_text(f"{film.title}\n{state}")

    return draw
