"""The help of a study: its options by group, with their types, texts and defaults."""

import dataclasses
import shutil
import textwrap
from collections.abc import Sequence
from types import ModuleType

from asyncsim.study.options import Option, names_of, options_of, scale_of

#: The options that all studies share, by their titles; a study's additional options stand first.
GROUPS = {
    "Training": ("methods", "problem", "batch_size", "learning_rate", "momentum", "optimizer"),
    "Seeds and budget": ("seeds", "steps"),
    "Cluster": (
        "workers",
        "compute",
        "window",
        "dynamic_window",
        "service",
        "protocol",
        "exclusive",
        "discipline",
        "policy",
        "servers",
        "read_blocks",
    ),
    "Network": (
        "latency",
        "bandwidth",
        "shared_bandwidth",
        "message_bytes",
        "sites",
        "far_latency",
        "far_bandwidth",
        "server_site",
    ),
    "Failures and attacks": ("failures", "attack"),
    "Output": (
        "out",
        "resume",
        "evaluate_every",
        "diagnose_every",
        "diagnose_energy",
        "directions_every",
        "animate",
    ),
    "Computing": ("device", "x64", "executor", "address", "cpus_per_run", "accelerators_per_run"),
}
#: The options in the short help, besides the study's additional options.
COMMON = frozenset(
    (
        "methods",
        "problem",
        "learning_rate",
        "seeds",
        "steps",
        "workers",
        "compute",
        "service",
        "policy",
        "latency",
        "bandwidth",
        "failures",
        "attack",
        "out",
        "resume",
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


def help_of(name: str, study: ModuleType, typed: Sequence[str]) -> str:
    """Return the help of a study: the common options for ``-h``, all options for ``--help``."""
    brief = "--help" not in typed
    width = min(_WIDEST, shutil.get_terminal_size().columns)
    options = options_of(study.Config, scale_of(study, typed))
    shared = {field: title for title, fields in GROUPS.items() for field in fields}
    is_shared = hasattr(study.Config, "help_notes")
    groups: dict[str, list[Option]] = {f"Study {name}": [], **{title: [] for title in GROUPS}}
    specific = [field for field in options if field not in shared]
    for field in (*specific, *(field for field in shared if field in options)):
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
        parts += [
            "",
            paragraph.rstrip() if is_formula else _filled(paragraph.replace("::", ":"), width),
        ]
    parts += [""] if brief else []
    for title, group in groups.items():
        lines = [line for option in group for line in _lines(option, brief, width)]
        parts += ["\n".join([*([] if brief else [""]), f"{title}:", *lines])] if lines else []
    if brief:
        parts.append(f"All options and their values: asyncsim study {name} --help")
    else:
        notes = getattr(study.Config, "help_notes", "").split("\n\n")
        if is_shared:
            notes += [
                f"{table.capitalize()}: {', '.join(names_of(table))}."
                for table in ("methods", "problems")
            ]
        parts += ["", *(_filled(note, width, indent="  ") for note in notes if note.strip())]
    return "\n".join(parts)


def _lines(option: Option, brief: bool, width: int) -> list[str]:
    form = option.form
    if not option.kind and option.default is True:
        form = f"--[no-]{option.flag[2:]}"
    elif len(option.kind) > _LONGEST_KIND:
        form = form.replace(option.kind, "name")
    return _wrap(_description(option, brief), width, f"  {form:<{_COLUMN - 4}}  ", " " * _COLUMN)


def _description(option: Option, brief: bool) -> str:
    """Return the text and the default of an option; the first sentence of the text if ``brief``."""
    text = (
        f"{option.text.partition('. ')[0].removesuffix('.')}."
        if brief and option.text
        else option.text
    )
    if len(option.kind) > _LONGEST_KIND and not all(
        choice in text for choice in option.kind.split("|")
    ):
        text = f"{text} One of {option.kind.replace('|', ', ')}."
    if option.default is dataclasses.MISSING:
        return f"{text} (required)".lstrip()
    if option.default is None or option.default is False or option.default == ():
        return text
    values = option.default if isinstance(option.default, tuple | list) else (option.default,)
    default = " ".join(f"{value:g}" if isinstance(value, float) else str(value) for value in values)
    return f"{text} [{default if option.kind else 'yes'}]".lstrip()


def _filled(text: str, width: int, indent: str = "") -> str:
    return "\n".join(_wrap(" ".join(text.split()), width, "", indent))


def _wrap(text: str, width: int, start: str, indent: str) -> list[str]:
    """Break a text into lines; the last line has several words."""
    lines = textwrap.wrap(
        text,
        width,
        initial_indent=start,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    ) or [start.rstrip()]
    while len(lines) > 1 and len(lines[-1].split()) < _FEWEST_WORDS:
        line, _, word = lines[-2].rpartition(" ")
        last = f"{indent}{word} {lines[-1].strip()}"
        if not line.strip() or len(last) > width:
            break
        lines[-2:] = [line.rstrip(), last]
    return lines
