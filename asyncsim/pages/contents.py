"""The page that lists all finished studies."""

import html
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from asyncsim.base.files import write_text
from asyncsim.study import results

_TITLES = ("study", "tags", "cluster", "methods", "verdict", "date", "folder")


def write_contents(entries: Sequence[Any]) -> Path:
    """Write a page with a row for each known study; return its path.

    ``entries``: of `asyncsim.runs.known.entries`. Nothing is linked: a page in a folder may be a
    stranger's, and ``asyncsim show FOLDER`` draws a study's page.
    """
    style = (Path(__file__).parent / "page.css").read_text(encoding="utf-8")
    rows = []
    for entry in entries:
        tags = ", ".join(tag.name for tag in entry.tags)
        texts = (tags, entry.cluster, entry.methods, entry.verdict, entry.date[:10], entry.folder)
        cells = "".join(f'<td class="text">{html.escape(str(text))}</td>' for text in texts)
        rows.append(f'<tr><th scope="row" class="text">{html.escape(entry.study)}</th>{cells}</tr>')
    heads = "".join(f'<th scope="col" class="text">{title}</th>' for title in _TITLES)
    text = (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; '
        f"style-src 'unsafe-inline'\"><title>asyncsim: studies</title><style>{style}</style></head>"
        "<body><header><h1>Finished studies</h1></header><main>"
        '<div class="scroll list" tabindex="0" role="region" aria-label="studies">'
        f"<table><thead><tr>{heads}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
        "</main></body></html>\n"
    )
    path = results.index_folder() / "studies.html"
    path.parent.mkdir(parents=True, exist_ok=True)
    return write_text(path, text)
