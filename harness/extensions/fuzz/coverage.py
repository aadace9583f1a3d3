"""Events of an engine's scheduler in a recorded run: a search sees by them that a workload does something new.

Three kinds: triggers, as a check has them; what a step is made of; and what becomes of KV blocks from one step to the
next, where the engine records its block tables.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations

from harness.formats.recording import Recording, Step
from harness.judge.compare.align import is_readback
from harness.judge.compare.triggers import reached_triggers

MANY = 3
"""From so many on, numbers are not told apart."""
Tables = Mapping[int, Sequence[int]]


def conditions(recording: Recording) -> frozenset[str]:
    """Return the conditions that a run reached, in words for people."""
    steps = [step for step in recording.steps if not is_readback(step)]
    prompt_lengths = {request.id: request.prompt_length for request in recording.manifest.requests}
    reached = {name.replace("_", " ") for name in reached_triggers(recording)}
    reached |= {_mixture(step, prompt_lengths) for step in steps}
    reached |= set(_interrupted(steps, prompt_lengths))
    reached |= set(_block_transitions([step.block_tables or {} for step in steps]))
    return frozenset(reached)


def pairs(reached: frozenset[str]) -> frozenset[str]:
    """Return the conditions and every two of them together: what a search takes for new."""
    return reached | {f"{one} & {other}" for one, other in combinations(sorted(reached), 2)}


def _mixture(step: Step, prompt_lengths: Mapping[int, int]) -> str:
    """Say how many requests of a step decode and how many compute prompts."""
    requests = step.request.tolist()
    prefilling = {
        request
        for request, position in zip(requests, step.position.tolist(), strict=True)
        if position < prompt_lengths[request]
    }
    return f"step of {_many(len(set(requests) - prefilling))} decodes and {_many(len(prefilling))} prompts"


def _interrupted(steps: Sequence[Step], prompt_lengths: Mapping[int, int]) -> Iterator[str]:
    """Say that a request began again, or waited, before its prompt was computed."""
    computed: dict[int, int] = {}
    """By request, the last position of its last step."""
    for step in steps:
        present = set(step.request.tolist())
        amid = {request for request, last in computed.items() if last < prompt_lengths[request] - 1}
        if amid - present:
            yield "prompt interrupted"
        for request in present:
            positions = step.position[step.request == request]
            if request in amid and int(positions.min()) <= computed[request]:
                yield "preempted amid its prompt"
            computed[request] = int(positions.max())


def _many(number: int) -> str:
    return str(number) if number < MANY else f"{MANY}+"


def _block_transitions(tables: Sequence[Tables]) -> Iterator[str]:
    """Say what becomes of blocks; a request that a step does not compute is not seen to own anything in it."""
    before: dict[int, frozenset[int]] = {}
    owned: dict[int, frozenset[int]] = {}
    """By block, its owners when it was last seen."""
    previous: Tables = {}
    for step in tables:
        owners = _owners(step)
        yield from (_transition(before.get(block), owned.get(block), now) for block, now in owners.items())
        yield from ("block freed" for block in before if block not in owners)
        for request, blocks in step.items():
            if any(was != now for was, now in zip(previous.get(request, ()), blocks, strict=False)):
                yield "block replaced in a table"
        before, owned, previous = owners, owned | owners, step


def _owners(tables: Tables) -> dict[int, frozenset[int]]:
    owners: dict[int, set[int]] = {}
    for request, blocks in tables.items():
        for block in blocks:
            owners.setdefault(block, set()).add(request)
    return {block: frozenset(requests) for block, requests in owners.items()}


def _transition(before: frozenset[int] | None, last: frozenset[int] | None, now: frozenset[int]) -> str:
    if before is None and last is None:
        return "block taken for the first time" if len(now) == 1 else "block taken for the first time by several"
    if before is None:
        return "block taken again by its last owner" if now == last else "block taken again by another"
    if len(now) > len(before):
        return "block shared"
    if len(now) < len(before):
        return "block shared no more"
    return "block kept" if now == before else "block handed over"
