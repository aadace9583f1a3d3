"""An engine in another process is known by what it says of itself."""

import json
from dataclasses import asdict

from harness.base.numerics import Numerics
from harness.engines import Capabilities, Control
from harness.engines.record import IsolatedEngine


def test_an_offer_comes_over_as_it_was_made():
    capabilities = Capabilities(
        schedules=("plain", "batched"),
        unsupported_taps=("mlp.act",),
        control=Control(limits=("num_blocks",), aborts=True),
        numerics=Numerics(weights=("Q8_0",), cache="float16"),
    )
    answer = json.loads(json.dumps({"name": "mine", "capabilities": asdict(capabilities)}))
    assert IsolatedEngine(None, answer, "mine", 1.0).capabilities == capabilities
