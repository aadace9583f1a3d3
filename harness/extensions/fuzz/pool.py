"""The tokens that all workloads of a search draw from: one golden over them judges every workload.

A request is the beginning of one of these sequences, cut into prompt and continuation anywhere. They are made so that
caches that are shared get something to share, and something to confuse: common beginnings that part at the boundary of
a segment or inside of one, and the same segments after different beginnings.
"""

import random
from dataclasses import dataclass
from itertools import cycle, islice

from harness.errors import Code, HarnessError
from harness.extensions.fuzz.result import SentWorkload
from harness.oracle.requests import Prompt

SEGMENT = 8
"""Tokens of a segment: a block of many engines, or a whole number of blocks, or half of one."""
NUM_TOKENS = 48
"""Of a sequence, unless a sliding window needs more: six segments."""
MOST_TOKENS = 512
PATTERNS = (
    "ABCDEF",
    "ABCDGH",  # parts from the first after four segments
    "ABIJCD",  # after two, and goes on with segments that the first has elsewhere
    "aBCDEF",  # inside the first segment: the same segments after another beginning
    "KLCDEF",  # the same, two segments later
    "KLCDMN",
    "ABcDEF",  # inside the third
    "ABCDeF",
    "AAAAAA",  # the same segment at every depth
    "QRSTUV",  # nothing in common with any
    "WXYZOP",
)
"""Each letter is a segment of random tokens. A small letter is the segment of the large one with its end replaced."""
_REPLACED = 3
_FIRST_TOKEN = 3
"""Those below are often special."""


@dataclass(frozen=True, slots=True)
class SequencePool:
    """Sequences of tokens, each a tuple of token ids."""

    sequences: tuple[tuple[int, ...], ...]

    @property
    def num_tokens(self) -> int:
        """Tokens of the longest."""
        return max(map(len, self.sequences))

    def shared(self, one: int, other: int) -> int:
        """Return how many tokens two sequences have in common at their beginning."""
        pairs = zip(self.sequences[one], self.sequences[other], strict=False)
        same = next((at for at, (left, right) in enumerate(pairs) if left != right), None)
        return min(len(self.sequences[one]), len(self.sequences[other])) if same is None else same

    def prompts(self) -> list[Prompt]:
        """Return what the golden is made for: every token but the first is forced, and every one chooses."""
        return [Prompt(token_ids=tokens, max_new_tokens=1, prompt_length=1) for tokens in self.sequences]

    @classmethod
    def of(cls, workload: SentWorkload) -> "SequencePool":
        """Return the pool of one workload: its own requests."""
        return cls(tuple(request.token_ids for request in workload.requests))


def make_pool(seed: int, *, vocab_size: int, max_positions: int | None, window: int | None) -> SequencePool:
    """Draw a pool.

    Of `max_positions` (None: no limit) one is left for a token that is made and never fed. Beyond the smallest sliding
    `window` of the model sequences go as far as that is affordable.

    Raises:
        HarnessError: PROMPT_TOO_LONG: the model has too few positions for any workload.
    """
    wanted = NUM_TOKENS if window is None else max(NUM_TOKENS, min(window + 2 * SEGMENT, MOST_TOKENS))
    length = wanted if max_positions is None else min(wanted, max_positions - 2)
    if length < 2:
        raise HarnessError(
            Code.PROMPT_TOO_LONG, "the model has too few positions for a workload", where="max_position_embeddings",
            expected="at least 4", actual=max_positions,
        )  # fmt: skip
    generator = random.Random(seed)
    tokens = range(min(_FIRST_TOKEN, vocab_size - 1), vocab_size)
    segments: dict[str, list[int]] = {}
    for letter in dict.fromkeys("".join(PATTERNS).upper()):
        segments[letter] = generator.choices(tokens, k=SEGMENT)
        segments[letter.lower()] = segments[letter][:-_REPLACED] + generator.choices(tokens, k=_REPLACED)
    return SequencePool(
        tuple(
            tuple(islice((token for letter in cycle(pattern) for token in segments[letter]), length))
            for pattern in PATTERNS
        )
    )
