"""A search for conversations that a server sees differently than HF renders them, the shortest of each kind."""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hypothesis import HealthCheck, Phase, find
from hypothesis import settings as Settings  # noqa: N812  # it is a type
from hypothesis import strategies as st
from hypothesis.errors import NoSuchExample
from hypothesis.strategies import SearchStrategy

from harness.base.progress import Progress, no_progress
from harness.extensions.server.chat.causes import CAUSES, UNKNOWN, Cause, is_same, show_difference
from harness.extensions.server.chat.conversations import (
    Conversation,
    Feature,
    Rendered,
    Renderer,
    Seen,
    conversations,
    hard_conversations,
    samples,
)
from harness.extensions.server.chat.result import Difference

_MOST_DIFFERENCES = 6


def find_smallest(strategy: SearchStrategy[Any], is_wrong: Callable[[Any], bool], num: int, seed: int) -> Any:
    """Return the smallest of `num` examples that is wrong; None if there is none."""
    settings = Settings(
        max_examples=num,
        deadline=None,
        database=None,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )
    try:
        return find(strategy, is_wrong, settings=settings, random=random.Random(seed))
    except NoSuchExample:
        return None


@dataclass(kw_only=True)
class ConversationSearch:
    """A search over conversations."""

    renderer: Renderer
    see: Callable[[Conversation], Seen]
    num: int
    """Conversations of a round."""
    seed: int
    body_of: Callable[[Conversation], Mapping[str, Any] | None] = lambda _conversation: None
    progress: Progress = no_progress
    features: list[Feature] = field(default_factory=list)
    """Parts that are taken, known after `look`."""
    not_judged: dict[str, str] = field(default_factory=dict)
    _compared: dict[str, tuple[Conversation, Rendered, Seen]] = field(default_factory=dict)

    @property
    def num_compared(self) -> int:
        """Different conversations that were compared."""
        return len(self._compared)

    def look(self) -> None:
        """Find out which parts the template and the server take."""
        for feature, sample in samples().items():
            seen = self._seen(sample)
            if seen is None:
                self.not_judged[feature] = f"the template refuses it: {self.renderer.refusal}"
            elif seen.refusal is not None:
                self.not_judged[feature] = seen.refusal
                del self._compared[repr(sample)]
            else:
                self.features.append(feature)

    def run(self) -> list[Difference]:
        """Return one difference of each kind that was found, at its smallest conversation."""
        special = sorted(self.renderer.special.values())
        for conversation in hard_conversations(set(self.features), special):
            self._seen(conversation)
        strategy = conversations(set(self.features), special)

        def compare(conversation: Conversation) -> bool:
            self._seen(conversation)
            return False

        find_smallest(strategy, compare, self.num, self.seed)
        causes = self._causes()
        known = [cause for causes_of_name in causes.values() for cause in causes_of_name]
        smallest = {name: self._smallest(strategy, causes_of_name, known) for name, causes_of_name in causes.items()}
        return [self._difference(name, conversation) for name, conversation in smallest.items()]

    def _seen(self, conversation: Conversation) -> Seen | None:
        """Return what is seen of a conversation, asked once; None if the template refuses it."""
        key = repr(conversation)
        if key not in self._compared:
            expected = self.renderer.render(conversation)
            if expected is None:
                return None
            seen = self.see(conversation)
            if seen.is_first_hidden and seen.token_ids is not None:
                seen = replace(seen, token_ids=(*expected.token_ids[:1], *seen.token_ids))
            self._compared[key] = conversation, expected, seen
            self.progress("conversations", len(self._compared), max(self.num, len(self._compared)))
        return self._compared[key][2]

    def _causes(self) -> dict[str, list[Cause]]:
        """Return the names of all differences with their causes: one, several that fit as well, or none that is known.

        Each round takes the cause that explains the most of what is left.
        """
        compared = list(self._compared.values())
        left = [comparison for comparison in compared if _differs(*comparison[1:])]
        causes: dict[str, list[Cause]] = {}
        while left and len(causes) < _MOST_DIFFERENCES:
            explained = {
                cause: [comparison for comparison in left if self._explains(cause, comparison)] for cause in CAUSES
            }
            sizes = {
                cause: len(comparisons)
                for cause, comparisons in explained.items()
                if comparisons and not (cause.is_general and self._is_refuted(cause, compared))
            }
            if not sizes:
                return causes | {UNKNOWN: []}
            best = [cause for cause, size in sizes.items() if size == max(sizes.values())]
            chosen = best if self._are_counts(left) else best[:1]
            causes[" or ".join(cause.name for cause in chosen[:3])] = chosen
            left = [comparison for comparison in left if comparison not in explained[chosen[0]]]
        return causes

    def _explains(self, cause: Cause, comparison: tuple[Conversation, Rendered, Seen]) -> bool | None:
        return cause.explains(comparison[0], comparison[2], comparison[1], self.renderer)

    def _is_refuted(self, cause: Cause, compared: Sequence[tuple[Conversation, Rendered, Seen]]) -> bool:
        """Whether a conversation is seen as HF renders it, where the cause would have changed it."""
        return any(
            not _differs(*comparison[1:]) and self._explains(cause, comparison) is False for comparison in compared
        )

    def _are_counts(self, left: Sequence[tuple[Conversation, Rendered, Seen]]) -> bool:
        """Whether no more than numbers of tokens are known, by which several causes may fit."""
        return all(seen.token_ids is None and seen.text is None for _, _, seen in left)

    def _smallest(self, strategy: SearchStrategy[Any], causes: Sequence[Cause], known: Sequence[Cause]) -> Conversation:
        """Return the smallest conversation that differs for these causes; for none of those known if there are none."""

        def shows(conversation: Conversation) -> bool:
            if self._seen(conversation) is None:
                return False
            comparison = self._compared[repr(conversation)]
            if not _differs(*comparison[1:]):
                return False
            return any(self._explains(cause, comparison) is True for cause in causes or known) == bool(causes)

        smallest = find_smallest(strategy, shows, self.num, self.seed)
        if smallest is None:  # a hard conversation alone shows it
            smallest = min(
                (conversation for conversation, _, _ in self._compared.values() if shows(conversation)),
                key=lambda conversation: len(repr(conversation)),
            )
        return smallest  # type: ignore[no-any-return]

    def _difference(self, name: str, conversation: Conversation) -> Difference:
        _, expected, seen = self._compared[repr(conversation)]
        shown = show_difference(seen, expected, self.renderer)
        return Difference(
            name=name,
            messages=conversation.messages,
            tools=conversation.tools,
            expected=shown[0],
            actual=shown[1],
            expected_ids=expected.token_ids,
            actual_ids=seen.token_ids,
            body=self.body_of(conversation),
        )


def _differs(expected: Rendered, seen: Seen) -> bool:
    return seen.refusal is not None or not is_same(seen, expected)


def texts(special: Mapping[int, str]) -> SearchStrategy[str]:
    """Return a strategy for plain texts, among them those of special tokens."""
    return st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20) | st.sampled_from(
        ("x", *special.values())
    )
