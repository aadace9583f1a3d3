"""Engines that compute the same and lay out the rows of a step in different ways; mistakes to plant in them."""

import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

from tests.examples import fused_engine as fused

NUM_BLOCKS = 1024


class Shape(fused.FusedEngine):
    """Has one forward, of any rows: (request, token, position), or None for padding."""

    def __init__(self, folder: Path, dtype: torch.dtype = torch.float32) -> None:
        super().__init__(folder, dtype)
        self.free = [block * 37 % NUM_BLOCKS for block in range(NUM_BLOCKS)]
        self.folder, self.dtype = folder, dtype
        self.give_caches(self.model)

    def give_caches(self, model):
        for layer in model.layers:
            layer.attn.cache = torch.zeros(2, NUM_BLOCKS, *layer.attn.shape, fused.BLOCK, dtype=self.dtype)

    def slot(self, request, position):
        table = self.slots.setdefault(request, [])
        while len(table) <= position:
            table.append(table[-1] + 1 if len(table) % fused.BLOCK else self.free.pop() * fused.BLOCK)
        return table[position]

    @torch.no_grad()
    def forward(self, items, sampled, model=None):
        rows, padding = {}, (None, 0, 0)
        for at, item in enumerate(items):
            if item is not None:
                rows.setdefault(item[0], []).append(at)
        slots = [-1 if item is None else self.slot(item[0], item[2]) for item in items]
        positions = [(item or padding)[2] for item in items]
        tables = [self.slots[request][: positions[places[-1]] + 1] for request, places in rows.items()]
        batch = {"rows": [*rows.values()], "tables": tables, "sampled": sampled}
        batch |= {"positions": torch.tensor(positions), "slots": torch.tensor(slots)}
        self.positions, self.is_live = batch["positions"], batch["slots"] >= 0
        return (model or self.model)(torch.tensor([(item or padding)[1] for item in items]), batch)

    @staticmethod
    def items(part):
        request, tokens, first = part[:3]
        return [(request, token, first + at) for at, token in enumerate(tokens)]

    def packed(self, work, padding=0):
        items, last = [], []
        for part in work:
            items += self.items(part)
            last.append(len(items) - 1)
        return self.forward(items + [None] * padding, last)

    def finish(self, request):
        self.slots.pop(request, None)


class Packed(Shape):
    def step(self, work):
        return self.packed(work, 1)


class Loop(Shape):
    def step(self, work):
        return torch.cat([self.packed([part]) for part in work])


class Chunks(Shape):
    size, pads = 4, False

    def step(self, work):
        logits = []
        for request, tokens, first in work:
            for at in range(0, len(tokens), self.size):
                chunk = tokens[at : at + self.size]
                last = self.packed([(request, chunk, first + at)], (self.size - len(chunk)) * self.pads)
            logits.append(last)
        return torch.cat(logits)


class PaddedChunks(Chunks):
    pads = True


class TokenByToken(Chunks):
    size = 1


class PrefillThenDecode(Shape):
    def step(self, work):
        logits = {}
        for is_decode in (False, True):
            parts = [part for part in work if (len(part[1]) == 1) is is_decode]
            if parts:
                logits |= dict(zip([part[0] for part in parts], self.packed(parts), strict=True))
        return torch.stack([logits[part[0]] for part in work])


class LongestFirst(Shape):
    def step(self, work):
        order = sorted(range(len(work)), key=lambda at: -len(work[at][1]))
        return self.packed([work[at] for at in order])[torch.tensor(order).argsort()]


class LongestFirstGathered(Shape):
    """The last rows are gathered in the order of the work, before the head."""

    def step(self, work):
        items, last = [], {}
        for at in sorted(range(len(work)), key=lambda at: -len(work[at][1])):
            items += self.items(work[at])
            last[at] = len(items) - 1
        return self.forward(items, [last[at] for at in range(len(work))])


class LastFirst(Shape):
    def step(self, work):
        return self.packed(work[::-1]).flip(0)


class PaddedRight(Shape):
    def step(self, work):
        width = max(len(part[1]) for part in work)
        items, last = [], []
        for part in work:
            items += self.padded(self.items(part), [None] * (width - len(part[1])))
            last.append(max(at for at, item in enumerate(items) if item is not None))
        return self.forward(items, last)

    @staticmethod
    def padded(items, padding):
        return items + padding


class PaddedLeft(PaddedRight):
    @staticmethod
    def padded(items, padding):
        return padding + items


class Bucket(Shape):
    def step(self, work):
        return self.packed(work, -sum(len(part[1]) for part in work) % 16)


class ComputesAllAgain(Shape):
    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.tokens = {}

    def step(self, work):
        for request, tokens, first in work:
            self.tokens[request] = self.tokens.get(request, [])[:first] + list(tokens)
        return self.packed([(request, self.tokens[request], 0) for request, _, _ in work])


class WarmsUp(Shape):
    """Runs a forward of zeros, and one of the same rows as if to capture it, before the one that counts."""

    def step(self, work):
        self.forward([None] * 3, [0])
        self.packed(work)
        return self.packed(work, 2)


class HasDraftModel(Shape):
    """A model of one layer, with the same embedding, runs on the same tokens before."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.draft = fused.FusedModel(self.folder, self.dtype).eval()
        self.draft.embed, self.draft.layers = self.model.embed, self.draft.layers[:1]
        self.give_caches(self.draft)
        self.draft.layers[0].qkv_proj.weight.data *= 2

    def step(self, work):
        for part in work:
            self.forward(self.items(part), [len(part[1]) - 1], self.draft)
        return self.packed(work)


class LateHead(Shape):
    """The last rows of all requests go through the last norm and the head together, after all forwards."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.model.forward = self.layers

    def layers(self, ids, batch):
        x, residual = self.model.embed(ids), None
        for layer in self.model.layers:
            x, residual = layer(x, residual, batch)
        return torch.cat([x[batch["sampled"]], residual[batch["sampled"]]], dim=-1)

    def step(self, work):
        x, residual = torch.cat([self.packed([part]) for part in work]).chunk(2, dim=-1)
        with torch.no_grad():
            x, _ = self.model.norm(x.contiguous(), residual.contiguous())
            return self.model.head(x)[0]


class TakesTurns(Shape):
    """Two microbatches, each with a look-up of its own, take turns layer by layer."""

    def step(self, work):
        halves = [half for half in (work[::2], work[1::2]) if half]
        batches = [self.packed_batch(half) for half in halves]
        logits = dict(zip([part[0] for half in halves for part in half], self.run(batches), strict=True))
        return torch.stack([logits[part[0]] for part in work])

    def packed_batch(self, work):
        items = [item for part in work for item in self.items(part)]
        ends = [*accumulate(len(part[1]) for part in work)]
        ids, batch = self.forward(items, [end - 1 for end in ends], lambda *inputs: inputs)
        return ids, batch, self.positions, self.is_live

    @torch.no_grad()
    def run(self, batches):
        model = self.model
        states = [(model.embed(ids), None) for ids, *_ in batches]
        for layer in model.layers:
            for at, (_, batch, self.positions, self.is_live) in enumerate(batches):
                states[at] = layer(*states[at], batch)
        normed = [model.norm(*state)[0] for state in states]
        return torch.cat(
            [model.head(x[batch["sampled"]])[0] for x, (_, batch, *_) in zip(normed, batches, strict=True)]
        )


class InThreads(TakesTurns):
    """Two microbatches run at the same time, in a thread each."""

    def __init__(self, *arguments):
        self.thread = threading.local()
        super().__init__(*arguments)

    positions = property(
        lambda self: self.thread.positions, lambda self, value: setattr(self.thread, "positions", value)
    )
    is_live = property(lambda self: self.thread.is_live, lambda self, value: setattr(self.thread, "is_live", value))

    def run(self, batches):
        begin = threading.Barrier(len(batches))

        def run(batch):
            begin.wait()
            return TakesTurns.run(self, [batch])

        with ThreadPoolExecutor(len(batches)) as threads:
            return torch.cat([*threads.map(run, batches)])


class ColumnsFirst(PaddedRight):
    """Looks up the first token of each request, then the second ones; the rows are those of one request first."""

    def step(self, work):
        count, look_up = len(work), nn.Embedding.from_pretrained(self.model.embed.weight)
        self.model.embed.forward = lambda ids: look_up(ids.view(count, -1).T).transpose(0, 1).flatten(0, 1)
        return super().step(work)


class ShortestFirstAfterLookup(Shape):
    """Looks up the rows in the order of the work, and then brings those of the shortest request to the front."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.model.forward = self.reordered

    def reordered(self, ids, batch):
        x = self.model.embed(ids)
        order = torch.tensor([row for rows in sorted(batch["rows"], key=len) for row in rows])
        place = order.argsort()
        batch = batch | {name: batch[name][order] for name in ("positions", "slots")}
        batch["rows"] = [place[rows].tolist() for rows in batch["rows"]]
        x, residual = x[order], None
        for layer in self.model.layers:
            x, residual = layer(x, residual, batch)
        x, _ = self.model.norm(x, residual)
        return self.model.head(x[place[batch["sampled"]]])[0]

    def step(self, work):
        return self.packed(work)


class OtherModulesForOne(Shape):
    """A step of one request runs modules of other names."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        alone = fused.FusedModel(self.folder, self.dtype).eval()
        for layer, of_several in zip(alone.layers, self.model.layers, strict=True):
            layer.attn.cache = of_several.attn.cache
        self.alone = nn.ModuleDict({"alone": alone})

    def step(self, work):
        if len(work) > 1:
            return self.packed(work)
        items = self.items(work[0])
        return self.forward(items, [len(items) - 1], self.alone["alone"])


class OtherModulesForMany(Shape):
    """A step of more rows than the map was learned from runs modules of other names; one of them may be wrong."""

    def __init__(self, *arguments, scale=1.0):
        super().__init__(*arguments)
        many = fused.FusedModel(self.folder, self.dtype).eval()
        for layer, of_few in zip(many.layers, self.model.layers, strict=True):
            layer.attn.cache = of_few.attn.cache
        self.many, act = nn.ModuleDict({"many": many}), many.layers[1].act
        act.forward = lambda x: type(act).forward(act, x) * scale

    def step(self, work):
        if sum(len(part[1]) for part in work) < 36:
            return self.packed(work)
        (part,) = work
        return self.forward(self.items(part), [len(part[1]) - 1], self.many["many"])


class Mixture(Shape):
    """Prompts, the longest first, in padded chunks; then a padded batch of those in decode."""

    def step(self, work):
        logits = {}
        for request, tokens, first in sorted(work, key=lambda part: -len(part[1])):
            for at in range(0, len(tokens) if len(tokens) > 1 else 0, 4):
                chunk = tokens[at : at + 4]
                logits[request] = self.packed([(request, chunk, first + at)], 4 - len(chunk))[0]
        decode = sorted((part for part in work if len(part[1]) == 1), key=lambda part: -part[2])
        if decode:
            rows = self.packed(decode, 8 - len(decode))
            logits |= dict(zip([part[0] for part in decode], rows, strict=True))
        return torch.stack([logits[part[0]] for part in work])


SHAPES = (
    Packed, Loop, Chunks, PaddedChunks, TokenByToken, PrefillThenDecode, LongestFirst, LongestFirstGathered, LastFirst,
    PaddedRight, PaddedLeft, Bucket, ComputesAllAgain, WarmsUp, HasDraftModel, LateHead, Mixture,
    TakesTurns, InThreads,
)  # fmt: skip
AT = 6
"""Position from which on a mistake is made."""


def wrong_rotary(engine):
    """Rotate by the next position."""
    layer = engine.model.layers[1]
    layer.rotary = fused.Rotary(layer.rotary.head_dim, 1.0)
    layer.rotary.inv_freq = engine.model.layers[0].rotary.inv_freq
    rotate = layer.rotary.forward
    layer.rotary.forward = lambda positions, q, k: rotate(torch.where(positions >= AT, positions + 1, positions), q, k)


def lost_write(engine):
    """Do not write the keys and values of one position."""
    attention, store = engine.model.layers[1].attn, fused.Attention.store

    def kept(part, rows, slots):
        is_kept = engine.positions[engine.is_live] != AT
        store(attention, part, rows[is_kept], slots[is_kept])

    attention.store = kept


def wrong_mask(engine):
    """Do not see the first position."""
    attention, attend = engine.model.layers[1].attn, functional.scaled_dot_product_attention

    def blind(q, k, v, attn_mask, enable_gqa):
        attn_mask = attn_mask.clone()
        attn_mask[attn_mask.sum(dim=1) > AT, 0] = False
        return attend(q, k, v, attn_mask=attn_mask, enable_gqa=enable_gqa)

    def forward(*arguments):
        functional.scaled_dot_product_attention = blind
        try:
            return fused.Attention.forward(attention, *arguments)
        finally:
            functional.scaled_dot_product_attention = attend

    attention.forward = forward


def wrong_activation(engine):
    """Use GELU."""

    def forward(x):
        gate, up = x.chunk(2, dim=-1)
        is_wrong = (engine.positions >= AT)[:, None]
        return torch.where(is_wrong, functional.gelu(gate), functional.silu(gate)) * up

    engine.model.layers[1].act.forward = forward


def wrong_norm(engine):
    """Leave out the mean's eps, and add a bias."""
    norm = engine.model.layers[1].post_attention_layernorm
    forward = norm.forward

    def shifted(x, residual=None):
        normed, residual = forward(x, residual)
        return normed + 0.1 * (engine.positions >= AT)[:, None].to(normed.dtype), residual

    norm.forward = shifted


def wrong_product(engine):
    """Scale what is multiplied."""
    product = engine.model.layers[1].down_proj
    forward = product.forward
    product.forward = lambda x: forward(x * torch.where(engine.positions >= AT, 1.5, 1.0)[:, None].to(x.dtype))


MISTAKES = {
    "q_rope": wrong_rotary, "attention": lost_write, "attention ": wrong_mask, "mlp.act": wrong_activation,
    "post_attention_layernorm": wrong_norm, "mlp.down_proj": wrong_product,
}  # fmt: skip
"""By the site that is wrong first."""
