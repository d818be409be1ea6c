"""Studies: what all of them share, and the command line that runs them.

``python -m asyncsim.study NAME [options]`` runs a study, `load` imports one for Python. A study of one cluster has a
`config`, whose methods and problem `entries` makes; a `sweep` makes the cells of a grid. Their runs and other
measurements are `jobs` for an `executor`, into a folder of `results`. `finished` reads them again, and presents tables
whose `columns` have names, titles and axes.
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
