"""How counts are said, in messages, tables and titles."""


def counted(count: int, noun: str) -> str:
    """Return a count with its noun: ``1 worker``, ``20,000 workers``."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def over_seeds(count: int, what: str = "mean and range of") -> str:
    """Return over how many seeds curves are: ``mean and range of 3 seeds``, or ``1 seed``."""
    return counted(count, "seed") if count == 1 else f"{what} {counted(count, 'seed')}"
