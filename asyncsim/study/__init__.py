"""Studies: the code that they share, and the command line that runs them.

``asyncsim study NAME [options]`` runs a study, `load` imports one for Python. Its `options` are the
fields of its `config`, and `help` prints them. `entries` builds its methods and its problem;
`sweep` builds the cells of a grid. Their runs and other measurements are `jobs` for an `executor`,
into a folder of `results`. `finished` reads results, and presents tables whose `columns` have
names, titles and axes.
"""

from typing import TYPE_CHECKING, Any

from asyncsim.study.command import INTERRUPTED, main, overview, set_up_jax
from asyncsim.study.loading import hidden, load, load_file, shipped, studies

if TYPE_CHECKING:
    from asyncsim.study.configuring import configure
else:

    def __getattr__(name: str) -> Any:
        # `asyncsim --help` does without the options of studies, and what they import.
        if name != "configure":
            raise AttributeError(f"module 'asyncsim.study' has no attribute {name!r}")
        from asyncsim.study.configuring import configure

        return configure


__all__ = [
    "INTERRUPTED",
    "configure",
    "hidden",
    "load",
    "load_file",
    "main",
    "overview",
    "set_up_jax",
    "shipped",
    "studies",
]
