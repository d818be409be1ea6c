"""How counts are said, in messages, tables and titles."""


def counted(count: int, noun: str) -> str:
    """Return a count with its noun: ``1 worker``, ``20,000 workers``."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
