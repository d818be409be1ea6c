"""A study and its config, from the command line."""

import contextlib
import os
import shlex
from collections.abc import Collection, Iterable, Sequence
from types import ModuleType
from typing import Any

import asyncsim.study.results as results
from asyncsim.base.console import each_note_once, tell
from asyncsim.base.errors import printable
from asyncsim.study.config import ELSEWHERE, JobOptions, StudyOptions, fields_of
from asyncsim.study.loading import load, require_typed, sha256, shipped, studies
from asyncsim.study.options import NEGATIVE, read_options, refuse_unknown_names, value_of


def configure(
    name: str, options: Sequence[str] = (), check: bool = False
) -> tuple[ModuleType, Any]:
    """Return a study and its config from the command line; raise InputError for options that cannot
    be read.

    A resumed study keeps its original options; options on the command line override them. With
    ``check`` the values are checked, too, as far as the options alone allow.
    """
    # Bad options are refused at once, before the study's imports, which take seconds.
    options_alone = load(name, options_alone=True)
    first = getattr(options_alone.Config, "first", "")
    if first and options and not options[0].startswith("-"):
        options = [f"--{first}", *options]
    folder, typed = value_of("resume", options), options
    # Other options may be a stranger's.
    recordable = set(getattr(options_alone.Config, "__dataclass_fields__", ())) - ELSEWHERE
    recorded = _options_of(results.command_of(folder, name), recordable)
    if recorded:
        tell(printable(f"resuming with {shlex.join(recorded)}"))
    options = [*_options_of(recorded, recordable - fields_of(typed)), *typed]
    with each_note_once():
        config = read_options(name, options_alone, options)
        if recorded:
            require_typed(vars(config), typed, folder)
        if check and isinstance(config, StudyOptions):
            refuse_unknown_names(config)
            with contextlib.suppress(NameError):  # of an import that only the whole study has
                config.check()
        study = load(name)
        config = read_options(name, study, options)
    # A frozen dataclass; no field, as it is no option.
    object.__setattr__(config, results.COMMAND, tuple(_options_of(options, recordable)))
    if isinstance(config, JobOptions):
        file = studies()[name]
        if file.parent != shipped("studies"):
            digest = {os.path.relpath(file): sha256(file.read_bytes())}
            object.__setattr__(config, "study_file", digest)
    return study, config


def _options_of(options: Iterable[str], fields: Collection[str]) -> list[str]:
    """Select the options of some fields, and their values, from a command line."""
    selected, is_selected = [], False
    for option in options:
        if option.startswith("-") and not NEGATIVE.fullmatch(option):
            is_selected = not fields_of([option]).isdisjoint(fields)
        if is_selected:
            selected.append(option)
    return selected
