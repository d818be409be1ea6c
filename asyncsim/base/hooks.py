"""Services of higher folders that lower ones call; `asyncsim/__init__.py` connects them."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

#: Load `asyncsim.plots`, for the method ``plot`` of traces and runs.
plots: Callable[[], Any]
#: Collect the texts and figures of a study in a ``with`` block, then write the page of its folder.
on_a_page: Callable[[Path], AbstractContextManager[None]]
