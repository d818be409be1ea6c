"""The command line of the papers' figures: ``python -m figures PAPER [options]``; installed, ``asyncsim.figures``."""

import importlib
import sys
from collections.abc import Sequence

from asyncsim.errors import InputError, require_choice

#: Papers by the names of their modules beside this file.
PAPERS = {
    "gem": "Gradient Energy Matching (Hermans and Louppe 2018, arXiv 1805.08469)",
    "agn": "thesis and Accumulated Gradient Normalization (Hermans 2017; Hermans et al. 2017, arXiv 1710.02368)",
    "momentum": "Asynchrony begets Momentum (Mitliagkas et al. 2016, arXiv 1605.09774)",
    "lsgd": "Leader Stochastic Gradient Descent (Teng et al. 2019, arXiv 1905.10395)",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Draw the figures of a paper; return the exit code (2 for bad input)."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if not arguments or arguments[0] in ("-h", "--help"):
        listed = "\n".join(f"  {name:<8}  {paper}" for name, paper in PAPERS.items())
        print(f"usage: python -m {__package__} PAPER [options]\n\npapers:\n{listed}")
        return 0
    try:
        name = require_choice("paper", arguments[0], PAPERS)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return importlib.import_module(f"{__package__}.{name}").main(arguments[1:])


if __name__ == "__main__":
    sys.exit(main())
