"""All that a server's sampler is asked: every setting by turns, and some requests again with the same seed."""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from harness.base.progress import Progress
from harness.errors import HarnessError
from harness.extensions.server.endpoint.address import Address
from harness.extensions.server.endpoint.answer import Completion
from harness.extensions.server.endpoint.client import Client
from harness.extensions.server.endpoint.names import TokenNames
from harness.extensions.server.endpoint.parse import read_answer
from harness.extensions.server.endpoint.probe import probe
from harness.extensions.server.endpoint.probed import Probed
from harness.extensions.server.endpoint.run import eos_of
from harness.extensions.server.endpoint.truth import plain_ids
from harness.extensions.server.sampler.settings import DrawRequest, SamplerSetting, draw_requests
from harness.judge.jobs.opened import planned_model
from harness.oracle.model import HFModel
from harness.plan import Plan

Answers = dict[int, Completion | HarnessError]
"""By the number of the request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedSampler:
    """The requests to a sampler, and its answers."""

    hf: HFModel
    probed: Probed
    names: TokenNames
    eos: tuple[int, ...]
    """Tokens that end a text."""
    requests: tuple[DrawRequest, ...]
    answers: Answers
    alone: Answers
    """Some of them again, one after the other; none if the server takes no seeds."""
    again: Answers
    """The same ones at once, in the opposite order."""
    seconds: float
    """Of the server."""


def ask_draws(
    plan: Plan,
    address: Address,
    settings: Sequence[SamplerSetting],
    num_draws: int,
    *,
    seed: int,
    num_again: int = 16,
    progress: Progress,
) -> AskedSampler:
    """Load a plan's model, and ask a server for draws of some settings, at least `num_draws` of each.

    Where the server takes seeds, `num_again` requests are sent again.

    Raises:
        HarnessError: as `planned_model`, `probe` and `draw_requests`.
    """
    progress("model", 0, 1)
    hf, begin = planned_model(plan), time.perf_counter()
    names = TokenNames(plan.checkpoint, vocab_size=hf.vocab_size)
    eos = sorted(filter(names.has, eos_of(hf)))
    ids = plain_ids(hf, frozenset(eos))

    def requests(probed: Probed) -> list[DrawRequest]:
        return list(draw_requests(settings, num_draws, names, ids, probed, seed=seed))

    answered = asyncio.run(_ask(address, names, ids[:8], requests, plan.case.model, num_again, progress))
    return AskedSampler(hf=hf, names=names, eos=tuple(eos), seconds=time.perf_counter() - begin, **answered)


async def _ask(
    address: Address,
    names: TokenNames,
    prompt: Sequence[int],
    make_requests: Callable[[Probed], Sequence[DrawRequest]],
    fallback_model: str,
    num_again: int,
    progress: Progress,
) -> dict[str, Any]:
    """Probe a server, and send it all requests; return the fields of `AskedSampler` that follow from its answers."""
    progress("probe", 0, 1)
    async with Client(address) as client:
        spelled = names.spelled(prompt) if names.is_there else None
        probed = await probe(client, spelled or prompt, names, fallback_model=fallback_model)
        requests = tuple(make_requests(probed))
        num_done = 0

        async def answer(request: DrawRequest) -> Completion | HarnessError:
            nonlocal num_done
            try:
                body = await client.post(request.path, request.body(probed, names))
                return read_answer(body, request.prompt, names, where=request.path)
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
    return {"probed": probed, "requests": requests, "answers": answers, "alone": alone, "again": again}
