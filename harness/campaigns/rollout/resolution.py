"""How finely a column of log probabilities was written: what its own digits leave open is part of its floor."""

import torch

_MOST_PLACES = 5


def decimal_places(column: torch.Tensor) -> int | None:
    """Return with how few decimal places all values of a column are exact; None if they are more than five."""
    values = [value for value in column.tolist() if value]
    places = (places for places in range(1, _MOST_PLACES + 1) if all(round(each, places) == each for each in values))
    return next(places, None) if values else None


def resolution(column: torch.Tensor) -> torch.Tensor:
    """Return the largest rounding error of each value of a column, both [compared] float64."""
    places = decimal_places(column)
    if places is not None:
        return torch.full_like(column, 0.5 * 10.0**-places)
    if torch.equal(column.to(torch.bfloat16).to(column.dtype), column):
        return column.abs() * torch.finfo(torch.bfloat16).eps / 2
    return torch.zeros_like(column)
