"""Write an animation of runs as a file for slides: GIF, or MP4 where ffmpeg is installed."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.animation import FFMpegWriter, FuncAnimation, PillowWriter
from matplotlib.collections import LineCollection
from matplotlib.patches import Circle

from asyncsim.base.console import number_text
from asyncsim.base.errors import InputError
from asyncsim.base.files import write_whole
from asyncsim.base.progress import Progress
from asyncsim.drawing import look
from asyncsim.pages.film import on_screen, rings, scale
from asyncsim.pages.page import films_of
from asyncsim.replays.run import Run
from asyncsim.traces.trace import Trace

#: Frames a second, and dots an inch.
_RATE, _DPI = 20, 100


def write_movie(chosen: Sequence[tuple[str, Run, Trace]], path: Path, frames: int = 300) -> Path:
    """Write an animation of the workers of runs, side by side on one clock, above their losses.

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
        For another ending, an MP4 without ffmpeg, or runs without a server, which only the page
        draws.
    """
    if path.suffix not in (".gif", ".mp4"):
        raise InputError(f"out = {str(path)!r}: must end with .gif or .mp4")
    if path.suffix == ".mp4" and not FFMpegWriter.isAvailable():
        raise InputError(
            f"out = {str(path)!r}: needs the program ffmpeg, which is not installed; write a .gif"
        )
    times, films = films_of(chosen, frames)
    if films[0].messages is not None:
        raise InputError(
            f"out = {str(path)!r}: only a page draws messages between workers; write a .html"
        )
    bend, largest = scale(films)
    places = [on_screen(film.offset, bend, largest) for film in films]
    colors = np.array([*(look.PHASES.get(name, look.GREY) for name in films[0].names), look.GREY])
    with look.style():
        figure, axes = look.new_figure(
            look.SINGLE * len(films), 4.2, len(films), 2, height_ratios=(4, 1)
        )
        above, below = axes[: len(films)], axes[len(films) :]
        moving = []
        for panel, curve, film in zip(above, below, films, strict=True):
            panel.set(xlim=(-1.15, 1.15), ylim=(-1.15, 1.15), aspect="equal", xticks=[], yticks=[])
            for side in ("left", "bottom"):
                panel.spines[side].set_visible(False)
            for distance, radius in rings(bend, largest):
                panel.add_patch(Circle((0, 0), radius, fill=False, color="#d0d0d0", linewidth=0.6))
                panel.text(
                    0.7 * radius,
                    0.7 * radius,
                    number_text(distance, 1),
                    fontsize=6,
                    color=look.GREY,
                )
            panel.plot(0, 0, "s", color=look.BLACK, markersize=4, zorder=3)
            lines = LineCollection([], linewidths=0.4, alpha=0.3, zorder=1)
            panel.add_collection(lines)
            dots = panel.scatter([], [], s=9, zorder=2)
            curve.plot(*np.reshape(film.loss, (-1, 2)).T, color=look.BLUE, marker=".")
            curve.set(xlim=(0, times[-1]), xlabel="simulated time (s)")
            cursor = curve.axvline(0, color=look.BLACK, linewidth=0.8)
            moving.append((panel.set_title(film.title), lines, dots, cursor))
        below[0].set_ylabel("training loss")
        losses = [value for film in films for _, value in film.loss]
        for curve in below if losses and min(losses) > 0 else ():
            curve.set(yscale="log", ylim=(0.8 * min(losses), 1.25 * max(losses)))

        def draw(frame: int) -> list[object]:
            for film, place, (title, lines, dots, cursor) in zip(
                films, places, moving, strict=True
            ):
                is_drawn = np.isfinite(place[frame]).all(1)
                at = place[frame][is_drawn]
                color = colors[film.phase[frame][is_drawn]]
                dots.set_offsets(at)
                dots.set_facecolor(color)
                leader = film.leader[frame]
                # Workers are pulled to the present leader, else to the central variable.
                centre = place[frame][leader] if leader >= 0 and is_drawn[leader] else np.zeros(2)
                ends = np.broadcast_to(centre, at.shape), at
                lines.set_segments(list(np.stack(ends, axis=1)))
                lines.set_color(color)
                cursor.set_xdata([times[frame]] * 2)
                ended = film.ended is not None and times[frame] > film.ended
                state = (
                    "diverged"
                    if ended
                    else f"{times[frame]:.1f} s, {film.commits[frame]:,} commits"
                )
                title.set_text(f"{film.title}: {state}")
            return []

        figure.draw_without_rendering()
        figure.set_layout_engine("none")  # or the layout would be computed for each frame
        movie = FuncAnimation(
            figure,
            draw,  # type: ignore[arg-type]  # returns no artists, which blit=False allows
            frames=len(times),
            blit=False,
        )
        kind = PillowWriter if path.suffix == ".gif" else FFMpegWriter
        with Progress(len(times), path.name, "frame") as bar:
            return write_whole(
                path,
                lambda partial: movie.save(
                    partial,
                    writer=kind(fps=_RATE),
                    dpi=_DPI,
                    progress_callback=lambda *_: bar.update(),
                ),
            )
