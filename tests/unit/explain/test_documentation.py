import re
from pathlib import Path

from harness.explain.try_all import BY_KIND

PAGE = Path(__file__).parents[3] / "docs" / "explanations.md"


def test_every_explanation_has_a_line():
    documented = set(re.findall(r"^\| `(\w+)` \|", PAGE.read_text(), flags=re.MULTILINE))
    assert documented == {explain.__name__ for explanations in BY_KIND.values() for explain in explanations}
