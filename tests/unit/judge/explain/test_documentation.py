import re
from pathlib import Path

from harness.formats.taps import KINDS
from harness.judge.explain.causes import causes_of

PAGE = Path(__file__).parents[4] / "docs" / "explanations.md"


def test_every_explanation_has_a_line():
    documented = set(re.findall(r"^\| `(\w+)`(?: \(in `[\w/.]+`\))? \|", PAGE.read_text(), flags=re.MULTILINE))
    assert documented == {explain.__name__ for explanations in map(causes_of, KINDS) for explain in explanations}
