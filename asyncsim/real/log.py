"""The log of a recording: one line per event, handed to the operating system before anybody hears of the event.

What is in the file survives the death of the process that wrote it; against the loss of the machine it is flushed to
the disk at each checkpoint. A line that was cut off in the middle is no event.
"""

import json
import os
from pathlib import Path
from typing import Any

from asyncsim.errors import InputError
from asyncsim.files import lock

#: The log's file in the folder of a recording.
LOG = "visits.jsonl"
Event = dict[str, Any]


class Log:
    """Appends events to a recording's log."""

    def __init__(self, folder: Path):
        """Open the log, and make it if there is none.

        Raises
        ------
        InputError
            Another process has it open.
        """
        # Open for as long as its server lives.
        self._file = open(folder / LOG, "ab")  # noqa: SIM115
        if not lock(self._file.fileno()):
            self._file.close()
            raise InputError(
                f"folder = {str(folder)!r}: another process records there; wait for its end, or give another folder"
            )

    def cut(self, size: int) -> None:
        """Cut off what comes after so many bytes, the length of what is whole."""
        self._file.truncate(size)

    def append(self, event: Event) -> None:
        """Write one event."""
        self._file.write(json.dumps(event).encode() + b"\n")
        self._file.flush()

    def to_disk(self) -> None:
        """Return once everything written so far is on the disk."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_log(folder: Path) -> tuple[list[Event], int]:
    """Return the events of a recording, and the length of the file up to the last whole one (bytes).

    Raises
    ------
    InputError
        There is no log, or a line that is not the last cannot be read.
    """
    path = folder / LOG
    try:
        content = path.read_bytes()
    except OSError as error:
        raise InputError(
            f"folder = {str(folder)!r}: holds no recording ({error.strerror}); give one that real processes wrote"
        ) from None
    whole = content.rfind(b"\n") + 1
    try:
        return [json.loads(line) for line in content[:whole].splitlines()], whole
    except ValueError as error:
        raise InputError(f"{str(path)!r}: a damaged log ({error}); record again") from None
