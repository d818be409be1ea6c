"""The help of a study: its options by group, with their types, texts and defaults."""

import ast
import dataclasses
import inspect
import itertools
import shutil
import textwrap
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import tyro

#: The options that all studies share, by the title above them; the options of one study alone stand first.
GROUPS = {
    "Training": ("methods", "problem", "batch_size", "learning_rate", "momentum", "optimizer"),
    "Seeds and budget": ("seeds", "steps"),
    "Cluster": (
        *("workers", "compute", "window", "dynamic_window", "service", "protocol", "exclusive", "discipline"),
        *("policy", "servers", "read_blocks"),
    ),
    "Network": (
        *("latency", "bandwidth", "shared_bandwidth", "message_bytes", "sites", "far_latency", "far_bandwidth"),
    ),
    "Failures and attacks": ("failures", "attack"),
    "Output": ("out", "resume", "evaluate_every", "diagnose_every", "diagnose_energy", "animate"),
    "Computing": ("device", "x64", "executor", "address", "cpus_per_run", "accelerators_per_run"),
}
#: The options in the short help, besides those of the study alone.
COMMON = frozenset(
    (
        *("methods", "problem", "learning_rate", "seeds", "steps", "workers", "compute", "service", "policy"),
        *("latency", "bandwidth", "failures", "attack", "out", "resume"),
    )
)
#: Columns of a line, at most: longer lines are tiring to read.
_WIDEST = 100
#: The column of the texts.
_COLUMN = 26
#: A longer list of choices stands in the option's text.
_LONGEST_KIND = 24
#: A last line of fewer words is an orphan.
_FEWEST_WORDS = 3
_HIDDEN = tyro.conf.Suppress[int].__metadata__[0]  # type: ignore[attr-defined]
_KINDS: dict[Any, str] = {int: "integer", float: "number", str: "text", Path: "path", bool: "", type(None): "None"}


class Option(NamedTuple):
    """An option of a study."""

    name: str  #: of the field
    annotation: Any
    kind: str  #: of the values, for a person; empty for a switch
    text: str
    default: Any  #: `dataclasses.MISSING` if it is required
    aliases: tuple[str, ...] = ()

    @property
    def flag(self) -> str:
        """The option as it is typed."""
        return f"--{self.name.replace('_', '-')}"

    @property
    def form(self) -> str:
        """The option with its values: ``--seeds integer``."""
        if not self.kind:
            return f"--[no-]{self.flag[2:]}" if self.default is True else self.flag
        choices = self.kind if len(self.kind) <= _LONGEST_KIND else "name"
        return f"{self.flag} {choices}{' ...' if self.several else ''}"

    @property
    def several(self) -> bool:
        """Whether the option takes any number of values."""
        return typing.get_origin(_plain(self.annotation)) is tuple

    def description(self, brief: bool) -> str:
        """Return the text and the default; the first sentence of the text if ``brief``."""
        text = f"{self.text.partition('. ')[0].removesuffix('.')}." if brief and self.text else self.text
        unnamed = not all(choice in text for choice in self.kind.split("|"))
        if len(self.kind) > _LONGEST_KIND and unnamed:
            text = f"{text} One of {self.kind.replace('|', ', ')}."
        if self.default is dataclasses.MISSING:
            return f"{text} (required)".lstrip()
        if self.default in (None, False, ()):
            return text
        values = self.default if isinstance(self.default, tuple | list) else (self.default,)
        default = " ".join(f"{value:g}" if isinstance(value, float) else str(value) for value in values)
        return f"{text} [{default if self.kind else 'yes'}]".lstrip()


def options_of(config: type, scale: Any = None) -> dict[str, Option]:
    """Return the options of a study by field, with the defaults of a ``scale`` if there is one."""
    texts, annotations = _texts(config), typing.get_type_hints(config, include_extras=True)
    options = {}
    for field in dataclasses.fields(config):
        annotation = annotations[field.name]
        marks = getattr(annotation, "__metadata__", ())
        if not field.init or _HIDDEN in marks:
            continue
        default = field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        default = default if scale is None else getattr(scale, field.name)
        aliases = tuple(alias for mark in marks for alias in getattr(mark, "aliases", None) or ())
        text = texts.get(field.name, "")
        options[field.name] = Option(field.name, annotation, kind_of(annotation), text, default, aliases)
    return options


def kind_of(annotation: Any) -> str:
    """Return the type of an option's values in words: ``integer``, ``number or text``, ``fifo|random``."""
    for mark in getattr(annotation, "__metadata__", ()):
        if isinstance(mark, str):
            return mark
    annotation = getattr(annotation, "__origin__", annotation) if hasattr(annotation, "__metadata__") else annotation
    parts = typing.get_args(annotation)
    if typing.get_origin(annotation) is Literal:
        return "|".join(map(str, parts))
    if typing.get_origin(annotation) is tuple:
        return kind_of(parts[0])
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return " or ".join(dict.fromkeys(kind_of(part) for part in parts if part is not type(None)))
    return _KINDS.get(annotation, getattr(annotation, "__name__", "value"))


def help_text(name: str, study: Any, scale: Any, values: str, brief: bool) -> str:
    """Return the help of a study; ``brief``: its own and the common options only.

    ``values`` lists the methods and problems that options may name.
    """
    width = min(_WIDEST, shutil.get_terminal_size().columns)
    options = options_of(study.Config, scale)
    shared = {field: title for title, fields in GROUPS.items() for field in fields}
    is_shared = hasattr(study.Config, "help_notes")
    groups: dict[str, list[Option]] = {f"Study {name}": [], **{title: [] for title in GROUPS}}
    own = [field for field in options if field not in shared]
    for field in (*own, *(field for field in shared if field in options)):
        title = shared.get(field) if is_shared else None
        if not brief or title is None or field in COMMON:
            groups[title or f"Study {name}"].append(options[field])
    example = getattr(study.Config, "example", "")
    about = (study.__doc__ or "").split("\n\n")
    parts = [
        f"example: asyncsim study {name} {example}".rstrip(),
        f"usage: asyncsim study {name} [options]; defaults are in brackets",
    ]
    for paragraph in about[:1] if brief else about:
        is_formula = paragraph.startswith("    ")
        parts += ["", paragraph.rstrip() if is_formula else _filled(paragraph.replace("::", ":"), width)]
    parts += [""] if brief else []
    for title, group in groups.items():
        lines = [line for option in group for line in _lines(option, brief, width)]
        parts += ["\n".join([*([] if brief else [""]), f"{title}:", *lines])] if lines else []
    if brief:
        parts.append(f"All options and their values: asyncsim study {name} --help")
    else:
        notes = f"{getattr(study.Config, 'help_notes', '')}\n\n{values}"
        parts += [""]
        parts += [_filled(note, width, indent="  ") for note in notes.split("\n\n") if note.strip()]
    return "\n".join(parts)


def _lines(option: Option, brief: bool, width: int) -> list[str]:
    start = f"  {option.form:<{_COLUMN - 4}}  "
    return _wrap(option.description(brief), width, start, " " * _COLUMN)


def _filled(text: str, width: int, indent: str = "") -> str:
    return "\n".join(_wrap(" ".join(text.split()), width, "", indent))


def _wrap(text: str, width: int, start: str, indent: str) -> list[str]:
    """Break a text into lines, the last of which has several words."""
    lines = textwrap.wrap(
        text, width, initial_indent=start, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    ) or [start.rstrip()]
    while len(lines) > 1 and len(lines[-1].split()) < _FEWEST_WORDS:
        line, _, word = lines[-2].rpartition(" ")
        last = f"{indent}{word} {lines[-1].strip()}"
        if not line.strip() or len(last) > width:
            break
        lines[-2:] = [line.rstrip(), last]
    return lines


def _plain(annotation: Any) -> Any:
    """Return an annotation without its marks, and without ``| None``."""
    if typing.get_origin(annotation) is typing.Annotated:
        return _plain(annotation.__origin__)
    parts = [part for part in typing.get_args(annotation) if part is not type(None)]
    is_union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    return _plain(parts[0]) if is_union and len(parts) == 1 else annotation


def _texts(config: type) -> dict[str, str]:
    """Return the docstrings below the fields of a dataclass and of its bases."""
    texts = {}
    for kind in reversed(config.__mro__[:-1]):
        try:
            body = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
        except OSError:  # a class of a notebook, say
            continue
        for name, text in _documented(getattr(body[0], "body", [])):
            texts[name] = text
    return texts


def _documented(statements: Iterable[ast.stmt]) -> Iterator[tuple[str, str]]:
    for statement, following in itertools.pairwise(statements):
        match statement, following:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                yield name, " ".join(text.split())


def names_in(options: Mapping[str, Option]) -> dict[str, Option]:
    """Return the options by each flag that can be typed."""
    flags = {}
    for option in options.values():
        for flag in (option.flag, *option.aliases):
            flags[flag] = option
            if not option.kind:
                flags[f"--no-{flag[2:]}"] = option
    return flags
