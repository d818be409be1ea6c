"""Pages that this machine drew: any other page may run arbitrary scripts in the browser."""

import contextlib
import hashlib
from pathlib import Path

from asyncsim.study import results

#: The file with the checksums of pages, one on each line.
_PAGES = "pages"


def trust_page(page: Path) -> None:
    """Record the checksum of a page drawn on this machine; other pages are redrawn to open."""
    with contextlib.suppress(OSError, ValueError):  # without a checksum the page is drawn again
        results.add_line(
            results.index_folder() / _PAGES, hashlib.sha256(page.read_bytes()).hexdigest()
        )


def page_of(folder: Path) -> Path:
    """Return the path at which this machine draws the page of another user's folder."""
    name = hashlib.sha256(str(folder.absolute()).encode(errors="replace")).hexdigest()[:16]
    return results.index_folder() / "drawn" / f"{name}.html"


def is_trusted(page: Path) -> bool:
    """Return whether a page was drawn on this machine."""
    try:
        if not page.is_file() or page.stat().st_size > results.LARGEST:
            return False
        checksums = (results.index_folder() / _PAGES).read_text(encoding="utf-8").split()
        return hashlib.sha256(page.read_bytes()).hexdigest() in checksums
    except (OSError, UnicodeDecodeError):
        return False
