"""Properties of the end of a request: every end-of-sequence token that the checkpoint names ends it, and no other."""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hypothesis import settings as Settings  # noqa: N812  # `settings` is what the functions here take
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn

from harness.base.scratch import scratch_folder
from harness.properties.core.falsify import calling, falsify
from harness.properties.core.findings import Counterexample, Rejections
from harness.properties.ops.adapter import OpsUnderTest

FILE = "generation_config.json"
MOST_TOKENS = 12
TOKENS = st.integers(0, 7)
"""Few different ones, so that they meet."""


@dataclass(frozen=True, slots=True)
class Ending:
    """The end tokens of a checkpoint, and the tokens of a request."""

    eos: int | tuple[int, ...]
    token_ids: tuple[int, ...]

    @property
    def document(self) -> dict[str, Any]:
        """The content of generation_config.json."""
        return {"eos_token_id": self.eos if isinstance(self.eos, int) else list(self.eos)}

    @property
    def num_generated(self) -> int:
        """Tokens up to the first that ends the request, that one included."""
        ends = {self.eos} if isinstance(self.eos, int) else set(self.eos)
        return next((at + 1 for at, token in enumerate(self.token_ids) if token in ends), len(self.token_ids))


def check_stopping(named: Any, settings: Settings) -> Rejections:
    """Check where requests end under an `eos_token_id` that is a number or a list; nothing without `num_generated`.

    Raises:
        PropertyError: they end elsewhere.
    """
    target = OpsUnderTest(named)
    if not target.offers("num_generated") or target.declares("checkpoint") is None:
        return Rejections()
    with scratch_folder("harness-") as scratch:
        folder = scratch / "checkpoint"
        shutil.copytree(target.declares("checkpoint"), folder)
        return falsify(
            "a request ends with the first token that the checkpoint calls an end, whichever of them it is",
            lambda ending: _check(target, folder, ending),
            _endings(),
            settings,
        )


@st.composite
def _endings(draw: DrawFn) -> Ending:
    eos = draw(TOKENS | st.lists(TOKENS, min_size=1, max_size=3, unique=True).map(tuple))
    return Ending(eos, tuple(draw(st.lists(TOKENS, min_size=1, max_size=MOST_TOKENS))))


def _check(target: OpsUnderTest, folder: Path, ending: Ending) -> None:
    def program() -> str:
        lines = [
            "import json, shutil, tempfile",
            "from pathlib import Path",
            "",
            'folder = Path(tempfile.mkdtemp()) / "checkpoint"',
            "shutil.copytree(ops.checkpoint, folder)",
            f'(folder / "{FILE}").write_text(json.dumps({ending.document!r}))',
            f"assert ops.num_generated(folder, {list(ending.token_ids)!r}) == {ending.num_generated}",
        ]
        return "\n".join([*target.opening(), "", *lines]) + "\n"

    (folder / FILE).write_text(json.dumps(ending.document), encoding="utf-8")
    with calling("num_generated", program):
        found = target.adapter.num_generated(folder, list(ending.token_ids))
    if found != ending.num_generated:
        what = (
            f"of the tokens {list(ending.token_ids)} {found} are generated, against {ending.num_generated}: "
            f"the end is {ending.document['eos_token_id']}"
        )
        raise Counterexample(what, program())
