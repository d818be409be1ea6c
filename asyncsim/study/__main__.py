"""``python -m asyncsim.study`` lists the studies, or runs the one that is named."""

import sys

from asyncsim.study.command import main

if __name__ == "__main__":
    sys.exit(main())
