"""Studies: the code that they share, and the command line that runs them.

``asyncsim study NAME [options]`` runs a study, `load` imports one for Python. Its `options` are the
fields of its `config`, and `help` prints them. `entries` builds its methods and its problem;
`sweep` builds the cells of a grid. Their runs and other measurements are `jobs` for an `executor`,
into a folder of `results`. `finished` reads results, and presents tables whose `columns` have
names, titles and axes.
"""

from asyncsim.study.command import INTERRUPTED, configure, main, overview, set_up_jax
from asyncsim.study.loading import hidden, load, load_file, shipped, studies

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
