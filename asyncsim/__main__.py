"""The command line: ``asyncsim``, or ``python -m asyncsim``."""

import errno
import os
import sys
from collections.abc import Sequence

_USAGE = """usage: asyncsim study NAME [options]    run a study; without a name, list them
       asyncsim figures FOLDER         draw the figures of a study's results again
       asyncsim figures PAPER          draw the figures of a paper, of several studies
       asyncsim runs                   list finished studies, the newest first
       asyncsim tag [FOLDER] NAME      name a folder, this one say, or a commit of a run
       asyncsim warp NAME              print the folder of a name
       asyncsim show [NAME]            open the page of a study in the browser, or the list of all
       asyncsim export NAME --csv      write a study's tables for LaTeX, R and pandas
       asyncsim cite NAME ...          BibTeX of methods, or of the methods of a folder
       asyncsim post-training          the study of asynchronous RL post-training
       asyncsim calibrate FILE         fit a cluster to a server's log; predict more workers
       asyncsim check-lag FILE         staleness in a log of rollouts, and its bound
       asyncsim --version              print the version

--no-color anywhere, or the environment variable NO_COLOR, turns the colours of terminals off.
"""

_NO_COLOR = "--no-color"
#: Errors of a full disk under standard output.
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EIO)
#: Commands that run a study, and its name.
_OF_STUDIES = {"post-training": ["post_training"]}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; return the exit code: 2 for bad input or an unknown command."""
    typed = list(sys.argv[1:] if arguments is None else arguments)
    if _NO_COLOR in typed:
        os.environ["NO_COLOR"] = "1"
    command, *rest = [argument for argument in typed if argument != _NO_COLOR] or ["--help"]
    try:
        from asyncsim.base.console import discard_output, safe_output, tell_error

        with safe_output():
            code = _run(command, rest)
            if sys.stdout is not None:
                sys.stdout.flush()  # here a full disk or a closed pipe can still be reported
            return code
    except KeyboardInterrupt:  # while modules are imported
        return 130
    except BrokenPipeError:  # the reader of a pipe, head say, has seen enough
        discard_output()
        return 0
    except OSError as error:
        if error.filename is not None or error.errno not in _FULL:
            raise
        # Only of printed text: files that cannot be written raise an InputError.
        discard_output()
        tell_error(f"standard output cannot be written: {error.strerror}; free some space")
        return 2


def _run(command: str, rest: Sequence[str]) -> int:
    from asyncsim import study
    from asyncsim.base.console import tell_error
    from asyncsim.base.errors import choices_like
    from asyncsim.base.interruption import ignore_from_now_on

    if command in ("study", *_OF_STUDIES):
        code = study.main([*_OF_STUDIES.get(command, []), *rest])
        if code == study.INTERRUPTED:
            ignore_from_now_on()
        return code
    if command == "figures":
        from asyncsim.pages.command import main as draw

        return draw(rest)
    if command in ("-h", "--help") and not rest:
        print(_USAGE)
        return study.main(["--help"])
    if command == "--version" and not rest:
        return study.main(["--version"])
    from asyncsim.runs.command import COMMANDS, run

    if command in COMMANDS:
        return run(command, rest)
    commands = ["study", *_OF_STUDIES, "figures", *COMMANDS, "--version", "--help"]
    meant = f"did you mean 'study {command}'? " if command in study.studies() else ""
    problem = (
        f"takes no argument {rest[0]!r}"
        if command in commands
        else f"unknown; {choices_like(command, commands)}"
    )
    tell_error(f"command = {command!r}: {meant}{problem}")
    return 2


if __name__ == "__main__":
    sys.exit(main())
