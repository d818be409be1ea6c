"""``python -m asyncsim.study`` lists the studies, or runs the one that is named; the same as
``asyncsim study``.
"""

import sys

from asyncsim.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["study", *sys.argv[1:]]))
