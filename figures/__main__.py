"""The command line of figures: ``python -m figures PAPER [options]`` or ``FOLDER``; installed, ``asyncsim.figures``."""

import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

from asyncsim.drawing.command import draw_folder, told
from asyncsim.errors import choices_like

#: Papers by the names of their modules beside this file.
PAPERS = {
    "gem": "Gradient Energy Matching (Hermans and Louppe 2018, arXiv 1805.08469)",
    "agn": "thesis and Accumulated Gradient Normalization (Hermans 2017; Hermans et al. 2017, arXiv 1710.02368)",
    "momentum": "Asynchrony begets Momentum (Mitliagkas et al. 2016, arXiv 1605.09774)",
    "lsgd": "Leader Stochastic Gradient Descent (Teng et al. 2019, arXiv 1905.10395)",
}
_USAGE = f"""usage: python -m {__package__} PAPER [options]  draw the figures of a paper, of several studies
       python -m {__package__} FOLDER           draw those of one study again, into the folder of its results; one that
                                    is called as a paper is ./FOLDER

papers:"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Draw the figures of a paper, or of a folder of results; return the exit code (2 for bad input)."""
    name, *options = list(sys.argv[1:] if arguments is None else arguments) or ["--help"]
    if name in ("-h", "--help"):
        print("\n".join([_USAGE, *(f"  {paper:<8}  {about}" for paper, about in PAPERS.items())]))
        return 0
    if name in PAPERS:
        return importlib.import_module(f"{__package__}.{name}").main(options)
    if not Path(name).is_dir():
        print(
            f"error: {name!r}: neither a folder of results nor a paper; {choices_like(name, PAPERS)}", file=sys.stderr
        )
        return 2
    if options:
        print(f"error: {options[0]!r}: the figures of a folder have no options; leave it out", file=sys.stderr)
        return 2
    return told(lambda: draw_folder(Path(name), PAPERS))


if __name__ == "__main__":
    sys.exit(main())
