"""Runs: the result of a replay, its files, and finished studies by their tags."""

import importlib
from typing import Any

from asyncsim.replays.run import Run

__all__ = ["Run", "open", "table"]


def __getattr__(name: str) -> Any:
    # Loaded on demand: a study imports Run, and the modules for whole studies import studies.
    if name in ("open", "table"):
        return getattr(importlib.import_module("asyncsim.runs.opened"), name)
    raise AttributeError(f"module 'asyncsim.runs' has no attribute {name!r}")
