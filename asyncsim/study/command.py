"""The command line: ``python -m asyncsim.study NAME [options]``.

A study whose Config has a field ``scale`` may have a table ``SCALES`` of configs by name: ``--scale`` then chooses the
defaults of all other options.
"""

import ast
import contextlib
import dataclasses
import errno
import itertools
import os
import re
import shlex
import shutil
import sys
import textwrap
import warnings
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import platformdirs

import asyncsim.study.results as results
from asyncsim import __version__
from asyncsim.base.console import note, tell
from asyncsim.base.errors import InputError, require_path, shown
from asyncsim.base.interruption import interruptible
from asyncsim.study.config import ELSEWHERE, StudyOptions, fields_of
from asyncsim.study.loading import hidden, load, require_as_they_were, sha256, shipped, studies, told_in_a_line

INTERRUPTED = 130  #: Exit code after Ctrl-C, as shells have it.
INCOMPLETE = 3  #: Exit code of a study of which some runs failed.
#: Why what is printed to a file cannot be written.
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EIO)
#: Characters of an error that are printed.
_LONGEST = 4_000
_NUMBER = re.compile(r"-[\d.][\d.e+-]*")
#: Numbers with commas between them, with or without the option's name.
_NUMBERS = re.compile(r"(?:(--[\w.-]+)=)?((?:-?[\d.][\d.e+-]*,)+-?[\d.][\d.e+-]*)")
_COMMAND = "python -m asyncsim.study"
_NO_CACHE = "--no-compilation-cache"
_USAGE = f"""usage: {_COMMAND} NAME [options]
       {_COMMAND} NAME --help

Compiled programs are kept in the user's cache folder, so that the next start need not compile;
{_NO_CACHE} keeps none. JAX's own environment variables come first.

Ends with 0, with 2 after bad input, with 3 if some runs failed, with {INTERRUPTED} if interrupted.

studies:"""


def overview() -> str:
    """Return the list of studies, one line each, without importing them."""
    found = studies()
    width = max(map(len, found), default=0)
    lines = [f"  {name:<{width}}  {_first_line(path)}" for name, path in sorted(found.items())]
    return "\n".join([_USAGE, *lines])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a study from the command line; return the exit code: 2 for bad input, 3 if some runs failed."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    arguments = [argument for argument in given if argument != _NO_CACHE]
    try:
        if arguments == ["--version"]:
            print(f"asyncsim {__version__}")
            code = 0
        elif not arguments or arguments[0] in ("-h", "--help"):
            print(overview())
            _warn_of(hidden())
            code = 0
        else:
            with interruptible():
                code = _run(*arguments, keep_compiled=_NO_CACHE not in given)
        if sys.stdout is not None:
            sys.stdout.flush()  # while there is somebody to tell that it cannot be written
        return code
    except InputError as error:
        said = " ".join(str(error).splitlines())
        tell(f"error: {said if len(said) <= _LONGEST else said[:_LONGEST] + '...'}")
        return 2
    except KeyboardInterrupt as interruption:
        tell(": ".join(["interrupted", *map(str, interruption.args)]))
        return INTERRUPTED
    except BrokenPipeError:  # the reader of a pipe, head say, has seen enough
        _print_no_more()
        return 0
    except OSError as error:
        if error.filename is not None or error.errno not in _FULL:
            raise
        # Of what is printed, as files that cannot be written are an InputError.
        _print_no_more()
        tell(f"error: what is printed cannot be written: {error.strerror}")
        return 2


def _print_no_more() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _run(name: str, *options: str, keep_compiled: bool) -> int:
    _warn_of({own: path for own, path in hidden().items() if own == name})
    set_up_jax(keep_compiled)  # before the study imports JAX
    study, config = configure(name, options)
    result = study.run(config)
    return INCOMPLETE if results.lacks_runs(getattr(result, "folder", None)) else 0


def set_up_jax(keep_compiled: bool = True) -> None:
    """Give JAX a folder of the user's cache to keep what it compiles.

    It reads environment variables, so call this before JAX is imported; those that are set already stay.
    """
    if not keep_compiled:
        return
    for name, value in (
        ("JAX_COMPILATION_CACHE_DIR", str(platformdirs.user_cache_path("asyncsim") / "compiled")),
        ("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0"),
        ("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1"),
    ):
        os.environ.setdefault(name, value)


def configure(name: str, options: Sequence[str] = ()) -> tuple[ModuleType, Any]:
    """Return a study and its config as the command line would make it; options that cannot be read end the program.

    A study that is resumed has the options that it was begun with, but for those that are given anew.
    """
    study = load(name, options_alone=not {"-h", "--help"}.isdisjoint(options))
    options = _split_numbers(options)
    folder = _value_of("resume", options)
    begun = results.command_of(folder, name)
    if begun:
        _require_recordable(begun, folder, study.Config)
        tell(f"going on with {shlex.join(begun)}")
    anew = fields_of(options)
    options = [*_without(begun, anew), *options]
    config = _read(name, study, options)
    _refuse_empty_paths(config, options)
    if begun:
        of_folder = {field.name for field in dataclasses.fields(config)} - anew
        require_as_they_were({name: getattr(config, name) for name in of_folder}, Path(folder))
    if isinstance(config, StudyOptions):
        # A frozen dataclass; no fields, as they are no options.
        object.__setattr__(config, "command", tuple(_without(options, ELSEWHERE)))
        own = studies()[name]
        if own.parent != shipped("studies"):
            found = {os.path.relpath(own): sha256(own.read_bytes())}
            object.__setattr__(config, "study_file", found)
            recorded = results.config_of(Path(folder)).get(results.FILES) if begun else None
            if isinstance(recorded, dict) and any(recorded.get(path, now) != now for path, now in found.items()):
                note(f"{own} has changed since the study was begun; what is there already stays as it is")
    return study, config


def _read(name: str, study: ModuleType, options: Sequence[str]) -> Any:
    """Return a study's config as its command line says; raise InputError if no command line can be made of it."""
    import tyro

    offered = ""
    if issubclass(study.Config, StudyOptions):
        package = Path(__file__).parent.parent
        offered = "\n\n".join(
            f"{what.capitalize()}: {', '.join(_names_in(package / what / '__init__.py'))}."
            for what in ("methods", "problems")
        )
    # One that there is not is refused when the options are read.
    scale = getattr(study, "SCALES", {}).get(_value_of("scale", options))
    try:
        # The help has colours; what it prints is the study's own, whose code has just run.
        terminal = contextlib.redirect_stdout(getattr(sys.stdout, "stream", sys.stdout))
        with warnings.catch_warnings(record=True) as caught, terminal:
            warnings.simplefilter("always")
            config = tyro.cli(
                study.Config,
                **({} if scale is None else {"default": scale}),
                prog=f"{_COMMAND} {name}",
                description=_wrapped(
                    f"{study.__doc__ or ''}\n\n{getattr(study.Config, 'help_notes', '')}\n\n{offered}"
                ),
                args=options,
            )
    except InputError:
        raise
    except Exception as error:  # of tyro's, for types of fields that it cannot read, and of the Config's own
        raise InputError(
            f"study = {name!r}: its Config cannot be made into options: {' '.join(str(error).split())}; let each field "
            "be a number, a text, a switch, a path or a tuple of these"
        ) from error
    for warning in caught:
        note(f"study {name}: {str(warning.message).partition(' We')[0]}")
    return config


def _require_recordable(begun: Sequence[str], folder: str, config: type) -> None:
    """Raise InputError unless all that a folder says was typed is what studies record; it may be a stranger's."""
    fields = {field.name for field in dataclasses.fields(config)} - ELSEWHERE
    for option in begun:
        known = not option.startswith("-") or _NUMBER.fullmatch(option) or (fields_of([option]) or {""}) <= fields
        if not known or not option.isprintable():
            raise InputError(
                f"resume = {folder!r}: its {results.CONFIG} has {shown(option)} among the options, which no study "
                "records; mistrust that folder, or remove it there"
            )


def _refuse_empty_paths(config: Any, options: Sequence[str]) -> None:
    """Raise InputError for a path of which an empty text was given: by now it is the working folder's."""
    for option, following in itertools.pairwise([*options, "-"]):
        name, given, value = option.partition("=")
        field = name.removeprefix("--").replace("-", "_")
        if getattr(config, field, None) == Path() and not (value if given else following):
            require_path(field, "")


def _warn_of(files: dict[str, Path]) -> None:
    for name, path in files.items():
        note(f"{path} is not used: a shipped study is called {name}; rename yours")


def _split_numbers(options: Sequence[str]) -> list[str]:
    """Split numbers that were given with commas between them, as names may be."""
    split: list[str] = []
    for option in options:
        found = _NUMBERS.fullmatch(option)
        name, values = found.groups() if found else ("", option)
        split += [name] if name else []
        split += values.split(",") if found else [values]
    return split


def _value_of(name: str, options: Sequence[str]) -> str:
    """Return the last value of an option that has one; empty if it was not given."""
    last = ""
    for option, following in itertools.pairwise([*options, ""]):
        typed, given, value = option.partition("=")
        if typed == f"--{name}":
            last = value if given else following
    return last


def _without(options: Iterable[str], fields: Collection[str]) -> list[str]:
    """Return what was typed but for the options of some fields, and their values."""
    kept, keeps = [], True
    for option in options:
        if option.startswith("--"):
            keeps = fields_of([option]).isdisjoint(fields)
        if keeps:
            kept.append(option)
    return kept


def _names_in(path: Path) -> list[str]:
    """Return the names in a package's table of methods, or of problems, without importing them."""
    for statement in ast.parse(path.read_text()).body:
        if isinstance(statement, ast.AnnAssign) and isinstance(table := statement.value, ast.Dict):
            return [str(key.value) for key in table.keys if isinstance(key, ast.Constant)]
        if isinstance(statement, ast.AnnAssign) and isinstance(table, ast.DictComp):
            return [ast.unparse(name) for name in getattr(table.generators[0].iter, "elts", [])]
    return []


def _first_line(path: Path) -> str:
    """Return the first line of a study's docstring, or what is wrong with the file."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the user's own code; they show when it is imported
            docstring = ast.get_docstring(ast.parse(path.read_bytes()))
    except (OSError, SyntaxError, ValueError) as error:
        return f"(cannot be read: {told_in_a_line(error, path)})"
    return docstring.partition("\n")[0] if docstring else "(no docstring)"


def _wrapped(text: str) -> str:
    """Break paragraphs at the terminal's width, which tyro leaves as they are."""
    width = shutil.get_terminal_size().columns - 2
    # Only lines that are indented stay lines: tyro joins the others again.
    paragraphs = [" ".join(paragraph.split()) for paragraph in text.split("\n\n")]
    return "\n\n".join(textwrap.fill(text, width, subsequent_indent="  ") for text in paragraphs if text)
