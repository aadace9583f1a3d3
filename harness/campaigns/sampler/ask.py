"""All that a server's sampler is asked: every setting by turns, and some requests again with the same seed."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from harness.base.progress import Progress
from harness.campaigns.endpoint.address import Address
from harness.campaigns.endpoint.answer import Completion
from harness.campaigns.endpoint.client import Client
from harness.campaigns.endpoint.dialect import COMPLETIONS
from harness.campaigns.endpoint.names import TokenNames
from harness.campaigns.endpoint.parse import read_answer
from harness.campaigns.endpoint.probe import probe
from harness.campaigns.endpoint.probed import Probed
from harness.campaigns.sampler.settings import DrawRequest
from harness.errors import HarnessError

Answers = dict[int, Completion | HarnessError]
"""By the number of the request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedSampler:
    """The requests to a sampler, and its answers."""

    probed: Probed
    names: TokenNames
    requests: tuple[DrawRequest, ...]
    answers: Answers
    alone: Answers
    """Some of them again, one after the other; none if the server takes no seeds."""
    again: Answers
    """The same ones at once, in the opposite order."""


async def ask_sampler(
    address: Address,
    names: TokenNames,
    prompt: Sequence[int],
    make_requests: Callable[[Probed], Sequence[DrawRequest]],
    *,
    fallback_model: str,
    num_again: int = 16,
    progress: Progress,
) -> AskedSampler:
    """Probe a server, and send it all requests.

    `make_requests` returns the requests for what the probe found. `fallback_model` is the name to ask for, where the
    server lists none and none is given; `num_again` requests are sent again, where it takes seeds.

    Raises:
        HarnessError: as `probe`.
    """
    progress("probe", 0, 1)
    async with Client(address) as client:
        spelled = names.spelled(prompt) if names.is_there else None
        probed = await probe(client, spelled or prompt, names, fallback_model=fallback_model)
        requests = tuple(make_requests(probed))
        num_done = 0

        async def answer(request: DrawRequest) -> Completion | HarnessError:
            nonlocal num_done
            try:
                body = await client.post(COMPLETIONS, request.body(probed, names))
                return read_answer(body, request.prompt, names, where=COMPLETIONS)
            except HarnessError as error:
                return error
            finally:
                num_done += 1
                progress("server", num_done, len(requests))

        async def all_at_once(chosen: Sequence[DrawRequest]) -> Answers:
            found = await asyncio.gather(*(answer(request) for request in chosen))
            return {request.number: own for request, own in zip(chosen, found, strict=True)}

        answers = await all_at_once(requests)
        chosen = [request for request in requests if isinstance(answers[request.number], Completion)]
        chosen = chosen[:num_again] if probed.has("seed") else []
        alone = {request.number: await answer(request) for request in chosen}
        again = await all_at_once(chosen[::-1])
    return AskedSampler(probed=probed, names=names, requests=requests, answers=answers, alone=alone, again=again)
