"""Tables of names and numbers for a terminal of any width: names stay whole, and number columns go."""

from collections.abc import Sequence

from tabulate import tabulate


def fitted_table(
    rows: Sequence[Sequence[object]],
    header: Sequence[str],
    *,
    width: int | None = None,
    dispensable: Sequence[str] = (),
    num_names: int = 1,
    tablefmt: str = "simple",
) -> str:
    """Return a table; columns that can be spared go until it fits.

    Args:
        rows: cells of each row.
        header: names of the columns.
        width: columns of the terminal; None: any width fits.
        dispensable: names of columns that may go, the first one first.
        num_names: columns of names, which come first; all others hold numbers.
        tablefmt: of tabulate's.
    """

    def tabulated() -> str:
        cells = [[row[column] for column in shown] for row in rows]
        align = ["left" if column < num_names else "right" for column in shown]
        return tabulate(cells, [header[at] for at in shown], tablefmt, disable_numparse=True, colalign=align)

    shown = list(range(len(header)))
    table = tabulated()
    for name in dispensable:
        if width is None or max(map(len, table.splitlines())) <= width:
            break
        if name in header:
            shown.remove(header.index(name))
            table = tabulated()
    return table
