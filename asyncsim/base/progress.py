"""Progress bars on standard error, which say if JAX compiles."""

from tqdm import tqdm

from asyncsim.base.console import on_a_terminal

#: An entry for each step of a compilation in progress, in any thread; a step may contain others.
_compiling: list[None] = []
_bars: "set[Progress]" = set()


class Progress(tqdm):
    """A progress bar that is removed at its end, and says meanwhile if JAX compiles.

    ``is_shown``: by default, if standard error is a terminal.
    """

    def __init__(self, total: int, description: str, unit: str, is_shown: bool | None = None):
        self.words = ""
        is_shown = on_a_terminal() if is_shown is None else is_shown
        super().__init__(
            total=total, desc=description, unit=unit, disable=not is_shown, leave=False
        )
        if is_shown:
            _bars.add(self)

    def say(self, words: str) -> None:
        """Replace the words at the end of the bar; "compiling" follows them."""
        self.words = words
        self.set_postfix_str(", ".join(filter(None, [words, "compiling" if _compiling else ""])))

    def close(self) -> None:
        """Remove the bar."""
        _bars.discard(self)
        super().close()


def show_compilation(is_running: bool) -> None:
    """Count the steps of compilations; during one the progress bars say "compiling"."""
    was_running = bool(_compiling)
    if is_running:
        _compiling.append(None)
    elif _compiling:  # else the step began before the first call
        _compiling.pop()
    if bool(_compiling) != was_running:
        for bar in tuple(_bars):
            bar.say(bar.words)
