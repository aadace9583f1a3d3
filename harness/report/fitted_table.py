"""Tables of names and numbers for a terminal of any width: names stay whole, and number columns go."""

from collections.abc import Sequence

from tabulate import tabulate


def fitted_table(
    rows: Sequence[Sequence[object]],
    header: Sequence[str],
    *,
    width: int | None = None,
    dispensable: Sequence[str] = (),
) -> str:
    """Return a table; columns that can be spared go until it fits.

    Args:
        rows: cells of each row.
        header: names of the columns.
        width: columns of the terminal; None: any width fits.
        dispensable: names of columns that may go, the first one first.
    """
    shown = list(range(len(header)))
    table = _tabulated(rows, header, shown)
    for name in dispensable:
        if width is None or max(map(len, table.splitlines())) <= width:
            break
        if name in header:
            shown.remove(header.index(name))
            table = _tabulated(rows, header, shown)
    return table


def _tabulated(rows: Sequence[Sequence[object]], header: Sequence[str], shown: Sequence[int]) -> str:
    return tabulate(
        [[row[column] for column in shown] for row in rows],
        [header[column] for column in shown],
        tablefmt="simple",
        disable_numparse=True,
        colalign=["left" if column == 0 else "right" for column in shown],
    )
