"""Pack columns of integers into a short text that a page's script reads."""

import base64
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np


def pack(columns: Mapping[str, Any]) -> dict[str, Any]:
    """Return the lengths of the columns, and their values: four bytes each, by planes, deflated.

    All lowest bytes come first, then the next ones: neighbours are similar, and compress well.
    """
    arrays = {name: np.asarray(values).astype("<i4") for name, values in columns.items()}
    values = np.concatenate([np.zeros(0, "<i4"), *arrays.values()])
    planes = values.view(np.uint8).reshape(-1, 4).T.tobytes()
    return {
        "lengths": {name: len(array) for name, array in arrays.items()},
        "bytes": base64.b64encode(zlib.compress(planes, 9)).decode(),
    }
