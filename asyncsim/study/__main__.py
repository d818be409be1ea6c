"""``python -m asyncsim.study`` lists the studies, or runs the one that is named."""

import sys

if __name__ == "__main__":
    try:
        from asyncsim.interruption import ignore_from_now_on
        from asyncsim.study.command import INTERRUPTED, main
    except KeyboardInterrupt:  # before there is anything to tell
        sys.exit(130)
    code = main()
    if code == INTERRUPTED:
        ignore_from_now_on()
    sys.exit(code)
