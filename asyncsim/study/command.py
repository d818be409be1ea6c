"""The command line: ``asyncsim study NAME [options]``.

A study whose Config has a field ``scale`` may have a table ``SCALES`` of configs by name:
``--scale`` then chooses the defaults of all other options.
"""

import ast
import contextlib
import os
import shlex
import sys
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import platformdirs

import asyncsim.study.results as results
from asyncsim import __version__
from asyncsim.base.console import (
    each_note_once,
    note,
    summary_of,
    tell,
    tell_error,
)
from asyncsim.base.errors import InputError, printable
from asyncsim.base.interruption import interruptible
from asyncsim.study.loading import (
    GROUPS,
    hidden,
    load,
    require_typed,
    sha256,
    shipped,
    studies,
    told_in_a_line,
    without_group,
)

INTERRUPTED = 130  #: Exit code after Ctrl-C, as shells have it.
INCOMPLETE = 3  #: Exit code of a study with failed runs.
_NO_CACHE = "--no-compilation-cache"
_USAGE = f"""usage: asyncsim study NAME [options]
       asyncsim study NAME -h          the common options; --help lists all options

The user's cache folder keeps compiled programs for the next start, unless {_NO_CACHE} is given.
JAX's own environment variables take precedence.

Exit codes: 0, 2 after bad input, 3 if some runs failed, {INTERRUPTED} after an interrupt.
"""
#: The studies that repeat the experiments of papers; the others answer questions about a cluster.
_OF_PAPERS = frozenset(
    {"claims", "delays", "ensembles", "forensics", "gem", "leaders", "replicas", "ringleader"}
    | {"windows"}
)


def overview(group: str = "") -> str:
    """Return the list of studies, or of a group's, one line each, without importing them."""
    texts = {name: _summary(path) for name, path in studies().items()}
    if group:
        return "\n".join(
            [f"usage: asyncsim study {group} NAME [options]", "", *_lines(GROUPS[group], texts)]
        )
    texts |= {name: f"{', '.join(names)}." for name, names in GROUPS.items()}
    own = texts.keys() - _OF_PAPERS - {name for names in GROUPS.values() for name in names}
    lines = ["studies of your cluster:", *_lines(own, texts)]
    return "\n".join([_USAGE, *lines, "", "studies of papers:", *_lines(_OF_PAPERS, texts)])


def _lines(names: Iterable[str], texts: Mapping[str, str]) -> list[str]:
    width = max(map(len, texts), default=0)
    return [f"  {name:<{width}}  {texts[name]}" for name in sorted(names)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a study from the command line; return the exit code: 2 for bad input, 3 if some runs
    failed.
    """
    typed = list(sys.argv[1:] if arguments is None else arguments)
    arguments = [argument for argument in typed if argument != _NO_CACHE]
    try:
        if arguments == ["--version"]:
            print(f"asyncsim {__version__}")
        elif not arguments or arguments[0] in ("-h", "--help"):
            print(overview())
            _warn_of(hidden())
        elif arguments[0] in GROUPS and {"-h", "--help"}.issuperset(arguments[1:]):
            print(overview(arguments[0]))
        else:
            with interruptible():
                return _run(*without_group(arguments), keep_compiled=_NO_CACHE not in typed)
        return 0
    except InputError as error:
        tell_error(error, f"asyncsim study {arguments[0]} --help explains the options")
        return 2
    except KeyboardInterrupt as interruption:
        tell(": ".join(["interrupted", *map(str, interruption.args)]))
        return INTERRUPTED


def _run(name: str, *options: str, keep_compiled: bool) -> int:
    _warn_of({study: path for study, path in hidden().items() if study == name})
    if "-h" in options:
        from asyncsim.study.help import short_help  # not for `asyncsim --help`

        print(short_help(name, load(name, options_alone=True), options))
        return 0
    if "--help" in options:
        with contextlib.suppress(SystemExit):
            configure(name, options)
        return 0
    set_up_jax(keep_compiled)  # before the study imports JAX
    with each_note_once():
        study, config = configure(name, options, check=True)
        result = study.run(config)
    return INCOMPLETE if results.lacks_runs(getattr(result, "folder", None)) else 0


def set_up_jax(keep_compiled: bool = True) -> None:
    """Let JAX keep compiled programs in the user's cache folder.

    Call this before JAX is imported: it reads environment variables then. Variables of the user
    take precedence.
    """
    if not keep_compiled:
        return
    for name, value in (
        ("JAX_COMPILATION_CACHE_DIR", str(platformdirs.user_cache_path("asyncsim") / "compiled")),
        ("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0"),
        ("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1"),
    ):
        os.environ.setdefault(name, value)


def configure(
    name: str, options: Sequence[str] = (), check: bool = False
) -> tuple[ModuleType, Any]:
    """Return a study and its config from the command line; raise InputError for options that cannot
    be read.

    A resumed study keeps its original options; options on the command line override them. With
    ``check`` the values are checked, too, as far as the options alone allow.
    """
    # Here, so that `asyncsim --help` does not wait for what they import: numpy, tyro.
    from asyncsim.study import options as command_line
    from asyncsim.study.config import ELSEWHERE, JobOptions, StudyConfig, fields_of
    from asyncsim.study.help import value_of

    # Bad options are refused at once, before the study's imports, which take seconds.
    options_alone = load(name, options_alone=True)
    first = getattr(options_alone.Config, "first", "")
    if first and options and not options[0].startswith("-"):
        options = [f"--{first}", *options]
    folder, typed = value_of("resume", options), options
    # Other options may be a stranger's.
    recordable = set(getattr(options_alone.Config, "__dataclass_fields__", ())) - ELSEWHERE
    recorded = command_line.options_of(results.typed_in(folder, name) or [], recordable)
    if recorded:
        tell(printable(f"resuming with {shlex.join(recorded)}"))
    options = [*command_line.options_of(recorded, recordable - fields_of(typed)), *typed]
    with each_note_once():
        config = command_line.read_options(name, options_alone, options)
        if recorded:
            require_typed(vars(config), typed, folder)
        if check and isinstance(config, StudyConfig):
            command_line.refuse_unknown_names(config)
            with contextlib.suppress(NameError):  # of an import that only the whole study has
                config.check()
        study = load(name)
        config = command_line.read_options(name, study, options)
    # A frozen dataclass; no field, as it is no option.
    object.__setattr__(config, results.COMMAND, tuple(command_line.options_of(options, recordable)))
    if isinstance(config, JobOptions):
        file = studies()[name]
        if file.parent != shipped("studies"):
            digest = {os.path.relpath(file): sha256(file.read_bytes())}
            object.__setattr__(config, "study_file", digest)
    return study, config


def _warn_of(files: dict[str, Path]) -> None:
    for name, path in files.items():
        note(f"{path} is not used: a shipped study is called {name}; rename yours")


def _summary(path: Path) -> str:
    """Return the summary of a study's docstring, or the error of an unreadable file."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the user's own code; they show when it is imported
            docstring = ast.get_docstring(ast.parse(path.read_bytes()))
    except (OSError, SyntaxError, ValueError) as error:
        return f"(cannot be read: {told_in_a_line(error, path)})"
    return summary_of(docstring) or "(no docstring)"
