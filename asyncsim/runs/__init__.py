"""Runs: what a replay brings back, its files, and the finished studies that are found again by their tags."""

import importlib
from typing import Any

from asyncsim.replays.run import Run

__all__ = ["Run", "open", "table"]


def __getattr__(name: str) -> Any:
    # A study loads a Run; what reads whole studies is above both.
    if name in ("open", "table"):
        return getattr(importlib.import_module("asyncsim.runs.opened"), name)
    raise AttributeError(f"module 'asyncsim.runs' has no attribute {name!r}")
