"""The options of a study, from its command line; each error names the option, the value and the remedy."""

import ast
import contextlib
import dataclasses
import io
import re
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from asyncsim.base.calls import split
from asyncsim.base.console import note
from asyncsim.base.errors import InputError, nearest, require_choice, require_path, shown
from asyncsim.study.config import StudyOptions, fields_of
from asyncsim.study.help import Option, help_text, names_in, options_of

NUMBER = re.compile(r"-[\d.][\d.e+-]*")
#: Numbers with commas between them, with or without the option's name.
_NUMBERS = re.compile(r"(?:(--[\w.-]+)=)?((?:-?[\d.][\d.e+-]*,)+-?[\d.][\d.e+-]*)")
_FRAME = re.compile(r"[\u2500-\u257f]+")


def help_of(name: str, study: ModuleType, options: Sequence[str]) -> str:
    """Return the help that ``-h`` (the common options) or ``--help`` asks for."""
    listed = "\n\n".join(f"{table.capitalize()}: {', '.join(names_of(table))}." for table in ("methods", "problems"))
    values = listed if issubclass(study.Config, StudyOptions) else ""
    return help_text(name, study, _scale(study, options), values, brief="--help" not in options)


def read_options(name: str, study: ModuleType, options: Sequence[str]) -> Any:
    """Return a study's config from its command line; raise InputError for options that cannot be read."""
    import tyro

    scale = _scale(study, options)
    default = {} if scale is None else {"default": scale}
    printed = io.StringIO()
    try:
        with warnings.catch_warnings(record=True) as caught, contextlib.redirect_stderr(printed):
            warnings.simplefilter("always")
            config = tyro.cli(study.Config, **default, args=options, add_help=False)
    except InputError:
        raise
    except SystemExit:
        raise _fault(name, options_of(study.Config), options, printed.getvalue()) from None
    except Exception as error:  # of tyro's, for types of fields that it cannot read, and of the Config's own
        raise InputError(
            f"study = {name!r}: its Config cannot be made into options: {' '.join(str(error).split())}; let each field "
            "be a number, a text, a switch, a path or a tuple of these"
        ) from error
    for warning in caught:
        note(f"study {name}: {str(warning.message).partition(' We')[0]}")
    _refuse_empty_paths(config, options)
    _refuse_unknown_names(config)
    return config


def split_numbers(options: Sequence[str]) -> list[str]:
    """Split numbers with commas between them, as names may have."""
    parts: list[str] = []
    for option in options:
        match = _NUMBERS.fullmatch(option)
        name, values = match.groups() if match else ("", option)
        parts += [name] if name else []
        parts += values.split(",") if match else [values]
    return parts


def value_of(name: str, options: Sequence[str]) -> str:
    """Return the last value of an option; empty if the option was not typed."""
    values = [value for flag, values in _typed(options) if flag == f"--{name}" for value in values[:1]]
    return values[-1] if values else ""


def names_of(table: str) -> list[str]:
    """Return the names of all ``methods`` or ``problems``, without importing them."""
    path = Path(__file__).parent.parent / table / "__init__.py"
    for statement in ast.parse(path.read_text()).body:
        if isinstance(statement, ast.AnnAssign) and isinstance(names := statement.value, ast.Dict):
            return [str(key.value) for key in names.keys if isinstance(key, ast.Constant)]
        if isinstance(statement, ast.AnnAssign) and isinstance(names := statement.value, ast.DictComp):
            return [ast.unparse(name) for name in getattr(names.generators[0].iter, "elts", [])]
    return []


def _scale(study: ModuleType, options: Sequence[str]) -> Any:
    """Return the defaults that ``--scale`` chooses; None for an unknown scale, which reading the options refuses."""
    return getattr(study, "SCALES", {}).get(value_of("scale", options))


def _typed(options: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield each option with its values; values before the first option have the empty name."""
    flag = ""
    values: list[str] = []
    for option in options:
        if option.startswith("-") and not NUMBER.fullmatch(option):
            if flag or values:
                yield flag, values
            flag, equals, value = option.partition("=")
            values = [value] if equals else []
        else:
            values.append(option)
    if flag or values:
        yield flag, values


def _fault(name: str, options: dict[str, Option], typed: Sequence[str], printed: str) -> InputError:
    """Return the error of the first option that cannot be read; of ``printed``, tyro's words, if all can."""
    flags = names_in(options)
    listed = f"asyncsim study {name} --help lists the options"
    for flag, values in _typed(typed):
        if not flag:
            return InputError(f"{shown(values[0])}: belongs to no option; {listed}")
        option = flags.get(flag.replace("_", "-"))
        if option is None:
            match = nearest(flag, flags)
            hint = f"did you mean {match}? " if match else ""
            return InputError(f"{flag}: unknown option of the study {name}; {hint}{listed}")
        if problem := _problem(option, values):
            value = f" = {shown(' '.join(values))}" if values else ""
            return InputError(f"{option.name}{value}: {problem}")
    fields = fields_of(typed)
    for option in options.values():
        if option.default is dataclasses.MISSING and option.name not in fields:
            return InputError(f"{option.name}: is required; write {option.form}")
    return InputError(f"{' '.join(_FRAME.sub(' ', printed).split()).partition(' Argument helptext')[0]}; {listed}")


def _problem(option: Option, values: list[str]) -> str:
    """Return the problem with an option's values, and the remedy; empty if there is none."""
    if not option.kind:
        return f"takes no value; write {option.flag} or --no-{option.flag[2:]}" if values else ""
    if not option.several and len(values) != 1:
        return f"{'takes a single value' if values else 'has no value'}; write {option.form}"
    for value in values:
        if _readable(option, value):
            continue
        if "|" in option.kind:
            try:
                require_choice(option.name, value, option.kind.split("|"))
            except InputError as error:
                return str(error).partition(": ")[2]
        article = "an" if option.kind[0] in "aeiou" else "a"
        return f"must be {article} {option.kind}; write {option.form}"
    return ""


def _readable(option: Option, value: str) -> bool:
    import tyro

    reader = dataclasses.make_dataclass("Reader", [(option.name, option.annotation)])
    with contextlib.redirect_stderr(io.StringIO()):
        try:
            tyro.cli(reader, args=[option.flag, value], add_help=False)
        except SystemExit:
            return False
    return True


def _refuse_empty_paths(config: Any, options: Sequence[str]) -> None:
    """Raise InputError for an empty text as a path, which pathlib takes for the working folder."""
    for flag, values in _typed(options):
        field = flag.removeprefix("--").replace("-", "_")
        if values[:1] == [""] and getattr(config, field, None) == Path():
            require_path(field, "")


def _refuse_unknown_names(config: Any) -> None:
    """Raise InputError for a misspelt method or problem, before importing them takes seconds."""
    if not isinstance(config, StudyOptions):
        return
    for option, entries in (("methods", split(config.methods)), ("problem", [config.problem])):
        for entry in entries:
            if isinstance(entry, str) and entry.strip().isidentifier():
                require_choice(option, entry.strip(), names_of(f"{option.removesuffix('s')}s"))
