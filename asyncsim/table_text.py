"""Numbers and tables as people read them."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas as pd

#: Numbers from here on are told with an exponent.
_LARGE = 1e7
#: Parts of a whole that are smaller are next to nothing: tables leave them out.
LEAST_SHARE = 0.0005


def number_text(value: float, digits: int = 3) -> str:
    """Return a number with so many significant digits, or with all of those before the point and thousands apart."""
    if value == 0:
        return "0"
    if 10 ** (digits - 1) <= float(f"{abs(value):.{digits}g}") < _LARGE:
        return f"{value:,.0f}"
    return f"{value:#.{digits}g}"


def table_text(table: "pd.DataFrame", digits: int = 3) -> str:
    """Return the rows of a table: floats as `number_text` has them, and a dash for those that are missing."""
    return table.to_string(index=False, float_format=lambda value: number_text(value, digits), na_rep="-")
