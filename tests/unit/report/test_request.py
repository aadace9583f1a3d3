"""The command of a request: nothing of what a server says is read by the shell."""

import json
import shlex

from harness.extensions.server.report import curl


def test_a_body_reaches_the_server_as_it_is():
    body = {"model": "x'; touch /tmp/here; '$(id)`id`", "prompt": "it's\n\x1b[1m"}
    words = shlex.split(curl("http://h:1/v1/completions", body))
    assert words[:3] == ["curl", "-s", "http://h:1/v1/completions"]
    assert words[3:6] == ["-H", "content-type: application/json", "-d"]
    assert json.loads(words[6]) == body
    assert len(words) == 7
    assert "\n" not in words[6]
    assert "\x1b" not in words[6]
