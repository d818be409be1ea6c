"""Divide a study's printed text into sentences and tables, for its page."""

import itertools
import re
from collections.abc import Sequence
from typing import Any

from asyncsim.base.console import VERDICT

#: Two spaces or more separate columns, one separates the words of a sentence.
_COLUMNS = re.compile(r"\S {2,}\S")


def split(text: str) -> tuple[str | None, list[dict[str, Any]]]:
    """Split a printed text into its verdict (None without one) and its parts, for the script.

    A part has a ``text``, with ``aligned`` if spaces align its words; or the ``columns`` and
    ``rows`` of a table whose columns are aligned at the right, as `table_text` writes them.
    """
    lines = text.splitlines()
    verdicts = [line.removeprefix(VERDICT) for line in lines if line.startswith(VERDICT)]
    rest = [line for line in lines if not line.startswith(VERDICT)]
    parts: list[dict[str, Any]] = []
    for _, block in itertools.groupby(rest, len):
        parts.extend(_parts(list(block)))
    return "; ".join(verdicts) or None, _joined(parts)


def _parts(lines: Sequence[str]) -> list[dict[str, Any]]:
    """Return the table that lines of one length form; else a part for each line.

    A sentence of the same length may precede or follow the table.
    """
    spans = itertools.product((0, 1), (len(lines), len(lines) - 1))
    start, stop = max(spans, key=lambda span: len(_columns(lines[slice(*span)])))
    columns = _columns(lines[start:stop])
    if len(columns) < 2:
        return [{"text": line, "aligned": bool(_COLUMNS.search(line))} for line in lines]
    head, *rows = ([" ".join(line[part].split()) for part in columns] for line in lines[start:stop])
    return [*_parts(lines[:start]), {"columns": head, "rows": rows}, *_parts(lines[stop:])]


def _columns(lines: Sequence[str]) -> list[slice]:
    """Return the columns of a table: all their cells end at the same place.

    A column begins with two spaces in some line; within a cell words have one space.
    """
    if len(lines) < 2:
        return []
    width = len(lines[0])
    ends = [
        end
        for end in range(1, width)
        if all(line[end - 1] != " " and line[end] == " " for line in lines)
        and any(line[end : end + 2] == "  " for line in lines)
    ]
    return list(itertools.starmap(slice, itertools.pairwise([0, *ends, width])))


def _joined(parts: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Join adjacent texts of one kind; leave out the empty ones at the ends."""
    joined: list[dict[str, Any]] = []
    for aligned, group in itertools.groupby(parts, lambda part: part.get("aligned")):
        if aligned is None:
            joined.extend(group)
        elif text := "\n".join(part["text"] for part in group).strip("\n"):
            joined.append({"text": text, "aligned": aligned})
    return joined
