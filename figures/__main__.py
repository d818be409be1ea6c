"""``python -m figures`` in a clone; the same as ``asyncsim figures``."""

import sys

from asyncsim.pages.command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
