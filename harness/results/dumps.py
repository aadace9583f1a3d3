"""Results of a comparison of two folders of tensors, as plain data. Nothing here imports torch."""

from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar

from harness.results.check import Outcome


class Likeness(StrEnum):
    """How two tensors of one quantity differ."""

    SAME = "same"
    """Not at all, once both are rounded to the coarser precision of the two."""
    CLOSE = "close"
    """By less than the bounds."""
    DIFFERENT = "different"


class PairEvidence(StrEnum):
    """Why two tensors are taken for one quantity."""

    CONTENT = "content"
    """Their values are near to each other, and to no others, or names choose among those."""
    NAME = "name"
    """The names are the same, or stand for each other elsewhere in the folders."""
    PLACE = "place"
    """Among the tensors of their shape, they stand at the same place at the end of the run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorPair:
    """Two tensors of one quantity: pairs of values are of the first and the second folder."""

    names: tuple[str, str]
    evidence: PairEvidence
    shapes: tuple[tuple[int, ...], tuple[int, ...]]
    dtypes: tuple[str, str]
    """Of the files."""
    precisions: tuple[str, str]
    """The coarsest dtypes that hold all values: a file of float32 may hold numbers of bfloat16."""
    layouts: tuple[str, str]
    """What was compared, if not the whole as it is: a part, or other dimensions first."""
    num_elements: int
    """Elements that were compared."""
    num_different: int
    roundings: float
    """Relative error (L2) of the worst row, in roundings of the coarser precision."""
    roundings_median: float
    """The same of the median row; 0 where there are fewer than eight rows."""
    relative_l2: float
    """Of the whole tensor."""
    row: int
    """The worst row, counted over all dimensions but the last."""
    column: int
    """Of the element in it that differs most."""
    values: tuple[float, float]
    """Of that element."""
    num_not_finite: tuple[int, int]
    same_not_finite: bool
    """Whether the same elements of both are NaN, or infinite with one sign."""
    likeness: Likeness = Likeness.SAME
    bound: float = 0.0
    """Largest `roundings` of a close pair."""
    bound_median: float = 0.0
    is_jump: bool = False
    """Whether the difference is far larger than in all tensors before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderShare:
    """How much of a folder was compared."""

    path: str
    num_tensors: int
    num_compared: int
    """Tensors that were compared, or are copies of such tensors."""
    num_elements: int
    num_elements_compared: int
    without_partner: tuple[str, ...]
    left_out: tuple[str, ...]
    """Files and tensors that were not read, each with the reason."""

    @property
    def share(self) -> float:
        """Share of the elements that were compared, or of the tensors, if that is less: one may outweigh all others."""
        return min(self.num_elements_compared / self.num_elements, self.num_compared / self.num_tensors)


@dataclass(frozen=True, slots=True, kw_only=True)
class DumpsResult:
    """Two folders of tensors."""

    IN_DOCUMENT: ClassVar = ("outcome", "first_difference")
    LEAST_SHARE: ClassVar = 0.5
    """Of the tensors and of the elements of one folder, without which nothing was checked."""
    folders: tuple[FolderShare, FolderShare]
    order: str
    """What tells the order of the run."""
    close: float
    """Factor of the bounds."""
    pairs: tuple[TensorPair, ...]
    """In the order of the run."""
    ambiguous: tuple[str, ...]
    """Tensors that may be several of the other folder, and were not compared."""
    unproven: tuple[str, ...]
    """Tensors after all pairs that may be each other with wrong values."""

    @property
    def first_difference(self) -> TensorPair | None:
        """The first pair in the order of the run that is out of its bounds."""
        return next((pair for pair in self.pairs if pair.likeness is Likeness.DIFFERENT), None)

    @property
    def outcome(self) -> Outcome:
        """Mismatch if a pair differs or may do so unseen; nothing, if too little of both folders was compared."""
        if self.first_difference is not None:
            return Outcome.MISMATCH
        if max(folder.share for folder in self.folders) < self.LEAST_SHARE:
            return Outcome.NOTHING
        return Outcome.MISMATCH if self.unproven else Outcome.PASS
