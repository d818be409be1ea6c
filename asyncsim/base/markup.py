"""HTML of objects in notebooks."""

import html
from collections.abc import Mapping
from typing import Any


def card(title: str, rows: Mapping[str, Any]) -> str:
    """Return a title and a table of names and values; numbers have four digits."""
    cells = "".join(
        f'<tr><th style="text-align:left">{html.escape(name)}</th>'
        f'<td style="text-align:left">{html.escape(_text(value))}</td></tr>'
        for name, value in rows.items()
    )
    return f"<div><strong>{html.escape(title)}</strong><table>{cells}</table></div>"


def _text(value: Any) -> str:
    return f"{value:,.4g}" if isinstance(value, float) else str(value)
