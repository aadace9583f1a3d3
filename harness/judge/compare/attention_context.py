"""Attention of some rows of one request, with every part of it open to change.

`T` query rows, `S` history rows in the order of their positions, `N` query heads, `K` KV heads, `H` head size.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from harness.judge.compare.align import Rows

Elementwise = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class AttentionContext:
    """Rows of one request, and the history that each of them was to read."""

    rows: Rows
    """T of them."""
    query: torch.Tensor
    """[T, N, H] float64."""
    key: torch.Tensor
    """[S, K, H] float64, row s at position s."""
    value: torch.Tensor
    """[S, K, H] float64."""
    key_step: torch.Tensor
    """[S] int64: step in which the key was computed by the request itself; -1 for one that was there before."""
    scale: float
    window: int | None
    softcap: float | None = None
    seen: torch.Tensor | None = None
    """[T, S] bool: keys that HF's mask shows each query; None for all up to it, or those of the window."""
    sinks: torch.Tensor | None = None
    """[N] float64: logits that take part in the softmax and have no value."""

    @property
    def num_groups(self) -> int:
        """Query heads of one KV head."""
        return self.query.shape[1] // self.key.shape[1]

    @property
    def distance(self) -> torch.Tensor:
        """[T, S]: how far before the query a key lies; negative for later ones."""
        return self.rows.position[:, None] - torch.arange(len(self.key))

    @property
    def is_computed(self) -> torch.Tensor:
        """[T, S] bool: keys that existed in the query's step."""
        return self.key_step <= self.rows.step[:, None]

    @property
    def first_of_step(self) -> torch.Tensor:
        """[T] int64: the first position that each query's own step computed."""
        return (self.key_step >= self.rows.step[:, None]).int().argmax(dim=1)

    def visible(self) -> torch.Tensor:
        """[T, S] bool: what each query may see."""
        if self.seen is not None:
            return self.seen
        distance = self.distance
        seen = distance >= 0
        return seen if self.window is None else seen & (distance < self.window)

    def scores(
        self, *, key: torch.Tensor | None = None, scale: float | None = None, heads: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the scores [N, T, S], unmasked.

        Args:
            key: [S, K, H] in the place of the recorded keys.
            scale: in the place of the model's.
            heads: [N], the KV head that each query head reads.
        """
        k_NSH = self.spread(self.key if key is None else key, heads)
        scores = self.query.transpose(0, 1) @ k_NSH.transpose(1, 2) * (self.scale if scale is None else scale)
        return scores if self.softcap is None else self.softcap * torch.tanh(scores / self.softcap)

    def spread(self, x_SKH: torch.Tensor, heads: torch.Tensor | None = None) -> torch.Tensor:
        """Return [N, S, H]: the KV head that each query head reads."""
        own = torch.arange(self.query.shape[1]) // self.num_groups
        return x_SKH.transpose(0, 1)[own if heads is None else heads]

    def attend(
        self,
        *,
        visible: torch.Tensor | None = None,
        key: torch.Tensor | None = None,
        value: torch.Tensor | None = None,
        scale: float | None = None,
        heads: torch.Tensor | None = None,
        value_heads: torch.Tensor | None = None,
        softmax: Elementwise | None = None,
    ) -> torch.Tensor:
        """Return the context [T, N*H] of attention with some of its parts replaced.

        Args:
            visible: [T, S] bool.
            key: [S, K, H].
            value: [S, K, H].
            scale: factor of the scores.
            heads: [N], the KV head that each query head reads.
            value_heads: [N], the one whose values it reads, where that is another.
            softmax: from masked scores to probabilities.
        """
        scores = self.scores(key=key, scale=scale, heads=heads)
        mask = self.visible() if visible is None else visible
        masked = scores.masked_fill(~mask, -torch.inf)
        if self.sinks is not None:
            column = self.sinks[:, None, None].expand(*masked.shape[:2], 1)
            masked = torch.cat((masked, column), dim=-1)
        p_NTS = (softmax or _softmax)(masked)[..., : scores.shape[-1]]
        v_NSH = self.spread(self.value if value is None else value, heads if value_heads is None else value_heads)
        return (p_NTS.nan_to_num(0.0) @ v_NSH).transpose(0, 1).flatten(1)

    def select(self, keep: torch.Tensor) -> "AttentionContext":
        """Return the view of some of its rows."""
        return replace(
            self,
            rows=self.rows.select(keep),
            query=self.query[keep],
            seen=None if self.seen is None else self.seen[keep],
        )


def _softmax(scores: torch.Tensor) -> torch.Tensor:
    return scores.softmax(dim=-1)
