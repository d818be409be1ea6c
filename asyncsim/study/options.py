"""The options of a study: the fields of its Config, read and explained by tyro.

The last value of an option counts. Options of a comparison may have several values; see
`asyncsim.study.sweep.ComparisonConfig`.
"""

import ast
import contextlib
import copy
import dataclasses
import io
import re
import typing
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import tyro
from tyro.constructors import (
    ConstructorRegistry,
    PrimitiveConstructorSpec,
    UnsupportedTypeAnnotationError,
)

from asyncsim.base.calls import split
from asyncsim.base.errors import InputError, require_choice, require_path
from asyncsim.study.config import fields_of
from asyncsim.study.help import defaults_of, headings

#: A value that begins with a minus, unlike an option.
_NEGATIVE = re.compile(r"-(?:[\d.].*|inf|nan)")
#: Numbers with commas between them, with or without the option's name.
_NUMBERS = re.compile(r"(?:(--[\w.-]+)=)?((?:-?[\d.][\d.e+-]*,)+-?[\d.][\d.e+-]*)")
_PARAGRAPH, _HELP = "\n\n", "Argument helptext: "
#: Messages of tyro, and ours, with argument, value and remedy.
_MESSAGES = (
    # Of an option with one value or several.
    (r"no type matching .*?([A-Z]{2,}).* could be instantiated from \[(.*)\]", r"\2 is no \1"),
    (r"--(\S+): invalid literal for int\(\) with base 10: (.*)", r"--\1: \2 is no INT"),
    (
        r"--(\S+): Could not (?:parse|find valid parse for) arguments:? \[(.*?)\].*",
        r"\1 = \2: wrong number or type of values",
    ),
    (
        r"invalid choice (.*) for argument '--(\S+)'\. Expected one of \((.*?),?\)",
        r"\2 = \1: unknown; choose from \3",
    ),
    (
        r"Missing value for argument '--(\S+)'\. Expected (\d+) values?",
        r"--\1: too few values, give \2",
    ),
)
_TYPES = ConstructorRegistry()


@_TYPES.primitive_rule
def _none(kind: Any) -> PrimitiveConstructorSpec[None] | None:
    """Let ``none`` in any case stand for None."""
    if kind.type is not type(None):
        return None
    names = ("none", "None", "NONE")
    return PrimitiveConstructorSpec(
        1, "none", lambda texts: None, lambda value: value is None, lambda value: ["none"], names
    )


@_TYPES.primitive_rule
def _path(kind: Any) -> PrimitiveConstructorSpec[Path] | None:
    """Refuse an empty path, which pathlib takes for the working folder."""
    if kind.type not in (Path, Path | None):
        return None
    return PrimitiveConstructorSpec(
        1,
        "PATH",
        lambda texts: require_path("path", texts[0]),
        lambda value: value is None or isinstance(value, Path),
        lambda value: ["none" if value is None else str(value)],
    )


def read_options(name: str, study: ModuleType, typed: Sequence[str]) -> Any:
    """Return a study's config from its command line; raise InputError for options that cannot be
    read.

    ``--help`` prints all options, and raises SystemExit.
    """
    config, typed = study.Config, split_numbers(typed)
    default = defaults_of(study, typed)
    parts = [headings(name, study, study.__doc__ or ""), getattr(config, "help_notes", "")]
    if parts[1]:
        tables = ("methods", "problems")
        parts += [f"{table.capitalize()}: {', '.join(names_of(table))}." for table in tables]
    box = io.StringIO()
    try:
        with contextlib.redirect_stderr(box):
            options = tyro.cli(
                _with_marks(config),
                prog=f"asyncsim study {name}",
                description=_PARAGRAPH.join(parts),
                args=typed,
                registry=_TYPES,
                **({} if default is config else {"default": default}),
            )
    except SystemExit as end:
        if not end.code:
            raise
        raise InputError(_in_a_line(box.getvalue(), name, typed)) from None
    except (NameError, UnsupportedTypeAnnotationError) as error:
        reason = str(error).partition("\n")[0]
        raise InputError(
            f"study = {name!r}: its Config cannot be made into options: {reason}"
        ) from None
    values = {field.name: getattr(options, field.name) for field in dataclasses.fields(config)}
    return config(**values)


def _with_marks(config: type) -> Any:
    """Return a Config whose options may have several values where the study takes several."""
    several = getattr(config, "several", ())
    types = typing.get_type_hints(config, include_extras=True)
    marked = []
    for field in dataclasses.fields(config):
        kind: Any = types[field.name]
        origins = [typing.get_origin(part) for part in typing.get_args(kind)]
        if field.name in several and tuple not in origins:
            kind = Annotated[kind | tuple[kind, ...], tyro.conf.arg(metavar="VALUE ...")]
        # A copy: dataclasses write the type into the field.
        marked.append((field.name, kind, copy.copy(field)))
    frozen = config.__dataclass_params__.frozen  # type: ignore[attr-defined]  # of every dataclass
    return dataclasses.make_dataclass("Options", marked, bases=(config,), frozen=frozen)


def _in_a_line(box: str, name: str, typed: Sequence[str]) -> str:
    """Return the message in tyro's box in a line, with its remedy after a semicolon."""
    _, *lines = (line.strip("│ ") for line in box.strip().splitlines())
    sections = filter(None, re.split(r"(?:^|\n)[─-]{3,}(?:\n|$)", "\n".join(lines)))
    message, *remedies = (" ".join(text.partition(_PARAGRAPH)[0].split()) for text in sections)
    remedy = next(iter(remedies[:-1]), f"asyncsim study {name} --help explains the options")
    message = message.removeprefix("Error parsing ").rstrip(".")
    for form, ours in _MESSAGES:
        message = re.sub(form, ours, message)
    if match := re.fullmatch(r"(--\S+): too few values, (.*)", message):
        return _refused_values(match[1], typed, f"too few values; {match[2]}")
    if match := re.match(r"Unrecognized options: ([^-,][^,]*)", message):
        place = next(i for i, text in enumerate(typed) if text.startswith(match[1]))
        flag = next((text for text in typed[place - 1 :: -1] if text.startswith("--")), "")
        is_switch = place and flag == typed[place - 1]
        fault = f"takes no value; write {flag} alone" if is_switch else "too many values"
        message = _refused_values(flag, typed, fault) if flag else message
    return message if "; " in message else f"{message}; {remedy.removeprefix(_HELP)}"


def _refused_values(flag: str, typed: Sequence[str], fault: str) -> str:
    (name,) = fields_of([flag])
    values = " ".join(options_of(typed, [name])[1:])
    return f"{name} = {values!r}: {fault}"


def refuse_unknown_names(config: Any) -> None:
    """Raise InputError for a misspelt method or problem, before importing them takes seconds."""
    for option, entries in (("methods", split(config.methods)), ("problem", [config.problem])):
        for entry in entries:
            if isinstance(entry, str) and entry.strip().isidentifier():
                require_choice(option, entry.strip(), names_of(f"{option.removesuffix('s')}s"))


def names_of(table: str) -> list[str]:
    """Return the names of all ``methods`` or ``problems``, without importing them."""
    path = Path(__file__).parent.parent / table / "__init__.py"
    body = ast.parse(path.read_text()).body
    entries: Any = next(node.value for node in body if isinstance(node, ast.AnnAssign))
    is_table = isinstance(entries, ast.Dict)
    names: Any = entries.keys if is_table else entries.generators[0].iter.elts
    return [ast.unparse(name).strip("'") for name in names]


def split_numbers(typed: Sequence[str]) -> list[str]:
    """Split numbers with commas between them, as names may have."""
    parts: list[str] = []
    for text in typed:
        match = _NUMBERS.fullmatch(text)
        name, values = match.groups() if match else ("", text)
        parts += [name] if name else []
        parts += values.split(",") if match else [values]
    return parts


def options_of(typed: Iterable[str], fields: Collection[str]) -> list[str]:
    """Select the options of some fields, and their values, from a command line."""
    selected, is_selected = [], False
    for text in typed:
        if text.startswith("-") and not _NEGATIVE.fullmatch(text):
            is_selected = not fields_of([text]).isdisjoint(fields)
        if is_selected:
            selected.append(text)
    return selected
