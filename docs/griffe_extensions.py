"""Extend mkdocstrings: values of constants in signatures, definition lists in docstrings."""

import importlib
import re
from typing import Any

import griffe


class Defaults(griffe.Extension):
    """Replace ``learning_rate=LEARNING_RATE`` by ``learning_rate=0.05``."""

    def on_function(self, *, func: griffe.Function, **_: Any) -> None:
        """Evaluate the defaults of a function that are names of constants."""
        for parameter in func.parameters:
            if re.fullmatch(r"_?[A-Z][A-Z0-9_]+", str(parameter.default)):
                module = importlib.import_module(func.module.path)
                parameter.default = repr(getattr(module, str(parameter.default)))


class Definitions(griffe.Extension):
    """Convert the definition lists of docstrings from reStructuredText to Markdown."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Mark the definitions below the terms of an object's docstring."""
        if obj.docstring:
            pattern = r"^( *)(``[^\n]+``)\n\1    (?=\S)"
            obj.docstring.value = re.sub(
                pattern, r"\n\1\2\n\1:   ", obj.docstring.value, flags=re.MULTILINE
            )
