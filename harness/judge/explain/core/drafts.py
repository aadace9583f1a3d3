"""What a recording's requests computed and then gave up: rejected drafts, and tokens that were taken back."""

from dataclasses import dataclass

import torch

from harness.formats.recording import Recording
from harness.formats.schedule import ScheduleKind
from harness.judge.compare.align import Rows, all_rows, is_readback


@dataclass(frozen=True, slots=True)
class GivenUp:
    """A draft of a request."""

    draft: int
    """Id that its rows have."""
    rows: Rows
    """Those that it computed itself, by position."""

    @property
    def step(self) -> int:
        """The last step that computed a row of it."""
        return int(self.rows.step.max())


def given_up(recording: Recording, request: int) -> list[GivenUp]:
    """Return the drafts of a request, or the others of the request that a draft is of, in the order of their steps."""
    drafts = list[GivenUp]()
    for draft in [item for item in _drafts(recording, request) if item != request]:
        steps = [step for step in recording.steps if not is_readback(step) and bool((step.request == draft).any())]
        if steps:
            rows = Rows.concat([all_rows(step) for step in steps])
            rows = rows.select(rows.request == draft)
            drafts.append(GivenUp(draft, rows.select(rows.position.argsort())))
    return sorted(drafts, key=lambda item: item.step)


def is_draft_of(recording: Recording, draft: int, request: int) -> bool:
    """Whether rows of `draft` were given up by a request, or by the request that it is a draft of."""
    return draft in _drafts(recording, request)


def computed_before(recording: Recording, request: int, position: int, step: int) -> Rows:
    """Return all rows of a request and its drafts in the order in which they were computed, up to one of them."""
    family = torch.tensor([_original(recording, request), *_drafts(recording, request)])
    steps = [item for item in recording.steps[: step + 1] if not is_readback(item)]
    rows = Rows.concat([all_rows(item) for item in steps])
    rows = rows.select(torch.isin(rows.request, family))
    here = ((rows.request == request) & (rows.position == position) & (rows.step == step)).nonzero()[:, 0]
    return rows.select(torch.arange(int(here[-1]) + 1))


def _original(recording: Recording, request: int) -> int:
    """Return the request that a draft is of; a request itself."""
    original = next((item.draft_of for item in recording.manifest.requests if item.id == request), None)
    return request if original is None else original


def _drafts(recording: Recording, request: int) -> list[int]:
    """Return the drafts of a request, or of the request that a draft is of."""
    original = _original(recording, request)
    return [item.id for item in recording.manifest.requests if item.draft_of == original]


def name_of_row(recording: Recording, position: int, step: int) -> str:
    """Name a row that was given up: `a rejected draft, position 37, written in step 9`."""
    kind = (recording.manifest.schedule or "").partition(":")[0]
    what = "a token that was taken back" if kind == ScheduleKind.REWOUND else "a rejected draft"
    return f"{what}, position {position}, written in step {step}"
