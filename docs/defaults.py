"""Show the values of default arguments in the signatures of the API, instead of the names of constants."""

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
