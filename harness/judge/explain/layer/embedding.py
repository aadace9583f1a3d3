"""The embedding is wrong: the row of another token, another scale, or images in the wrong places among the tokens.

`R` rows, `V` words of the vocabulary, `T` tokens of a request, `D` hidden size.
"""

from collections.abc import Iterator
from itertools import groupby, permutations

import torch

from harness.formats.recording import RequestInfo
from harness.judge.compare.align import last_index
from harness.judge.explain.core.wrong_operation import Hypothesis, WrongOperation
from harness.oracle.images import decoder_inputs

_BLOCK_ROWS = 1 << 14
_WAY_OF_UNSCALED = (
    "an engine may scale it after this module: leave the module out of names=; the input of the first layer is then "
    "the embedding"
)
_SAME = 0.05
"""Relative distance up to which the rows that HF hands to its decoder are those that its first layer is given."""
_MOST_IMAGES = 4
_SHIFTS = (1, -1, 2, -2)
_Order = list[int]
"""For each token of a request, the token whose image row it is given; -1 for the row of its own token."""


def another_token(wrong: WrongOperation) -> Iterator[Hypothesis]:
    """Each row is matched with all rows of the table; what the tokens found have in common is the cause.

    Causes: the embedding is that of the token before it; of the token before it in the step; of token id +*n*; of
    another token; of a table of positions: of another position (+*n*).
    """
    if torch.equal(wrong.actual, wrong.expected) or not bool(wrong.actual.isfinite().all()):
        return
    table = _table(wrong)
    if table is None:
        return
    nearest, meant = _nearest(wrong.actual, table), _nearest(wrong.expected, table)
    tokens = wrong.token_ids
    is_of_positions = _is_of_positions(wrong, tokens, meant) and torch.allclose(table[meant], wrong.expected)
    if is_of_positions:
        tokens = meant
    if torch.equal(nearest, tokens):  # the right rows, and otherwise wrong
        return
    pairs = ", ".join(
        f"{at} for {token}" for token, at in list(zip(tokens.tolist(), nearest.tolist(), strict=True))[:6]
    )
    cause = _of_positions(tokens, nearest) if is_of_positions else _named(wrong, tokens, nearest)
    yield Hypothesis(cause=cause, output=table[nearest], detail=f"rows of the table: {pairs}")


def _table(wrong: WrongOperation, rows: torch.Tensor | None = None) -> torch.Tensor | None:
    """Return the table of an operation that reads tokens, or some of its rows, scaled by its module or not.

    None of any other operation.
    """
    return None if wrong.operation.inputs else wrong.weight(wrong.operation.tap, rows=rows)


def _nearest(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """[R] int64: the row of the table [V, W] that each row [R, W] is nearest to."""
    return torch.cat([torch.cdist(x, part) for part in table.split(_BLOCK_ROWS)], dim=1).argmin(dim=1)


def _is_of_positions(wrong: WrongOperation, tokens: torch.Tensor, meant: torch.Tensor) -> bool:
    """Whether the rows that are meant follow the positions, and not the tokens: a table of learned positions."""
    return len((meant - wrong.rows.position).unique()) == 1 and not torch.equal(meant, tokens)


def _of_positions(expected: torch.Tensor, nearest: torch.Tensor) -> str:
    difference = (nearest - expected).unique()
    shift = f" ({int(difference):+d})" if len(difference) == 1 else ""
    return f"the embedding is that of another position{shift}"


def _named(wrong: WrongOperation, expected: torch.Tensor, nearest: torch.Tensor) -> str:
    tokens = {request.id: request.token_ids for request in wrong.recording.manifest.requests}
    places = [(r, p + wrong.operation.tokens_ahead) for r, p in wrong.rows.places()]
    for shift, name in ((-1, "before"), (1, "after")):
        there = [tokens[r][p + shift] if 0 <= p + shift < len(tokens[r]) else -1 for r, p in places]
        if there == nearest.tolist():
            return f"the embedding is that of the token {name} it"
    if _rows_before(wrong) == nearest.tolist():
        return "the embedding is that of the token before it in the step"
    difference = (nearest - expected).unique()
    if len(difference) == 1:
        return f"the embedding is that of token id {int(difference):+d}"
    return "the embedding is that of another token"


def _rows_before(wrong: WrongOperation) -> list[int]:
    """Return the token of the row before each row in its step; -1 where there is none."""
    tokens = {request.id: request.token_ids for request in wrong.recording.manifest.requests}
    before = []
    for request, position, index in wrong.rows.identities():
        step = wrong.recording.steps[index]
        at = last_index(step, request, position) - 1
        before.append(tokens[int(step.request[at])][int(step.position[at])] if at >= 0 else -1)
    return before


def scaled(wrong: WrongOperation) -> Iterator[Hypothesis]:
    """The embedding is scaled by the root of the hidden size."""
    if _table(wrong, wrong.token_ids[:1]) is None:
        return
    factor = wrong.expected.shape[1] ** 0.5
    for item in (factor, float(torch.tensor(factor, dtype=wrong.dtype))):  # as it is, or in the engine's dtype
        yield Hypothesis(cause="the embedding is scaled by the root of the hidden size", output=wrong.expected * item)


def not_scaled(wrong: WrongOperation) -> Iterator[Hypothesis]:
    """The embedding is not scaled."""
    rows = _table(wrong, wrong.token_ids)
    if rows is not None and rows.shape == wrong.expected.shape and not torch.equal(rows, wrong.expected):
        yield Hypothesis(cause="the embedding is not scaled", output=rows, detail=_WAY_OF_UNSCALED)


def misplaced(wrong: WrongOperation) -> Iterator[Hypothesis]:
    """Rows of images stand at other tokens than their own.

    Causes: image embeddings are placed *n* positions late or early; no image is there; images in the order *n, n*; the
    parts of each image by columns of *n*; the images of request *n* are there.
    """
    requests = {item.id: item for item in wrong.recording.manifest.requests if item.inputs is not None}
    wanted = set(wrong.rows.request.tolist()) & set(requests)
    if not wrong.hf.has_images or not wanted or not wrong.operation.source.endswith(":input"):
        return
    handed = {at: decoder_inputs(wrong.hf, request) for at, request in requests.items()}
    rows = {at: item.by_token["inputs_embeds"].to("cpu", torch.float64) for at, item in handed.items()}
    kinds = {at: _kinds(request, rows[at], wrong) for at, request in requests.items()}
    pairs = wrong.rows.places()
    text, expected = wrong.inputs[0].flatten(1), wrong.expected
    meant = [
        rows[request][index] if request in wanted else x for (request, index), x in zip(pairs, expected, strict=True)
    ]
    if bool(((torch.stack(meant) - expected).norm(dim=1) > _SAME * expected.norm(dim=1)).any()):
        return

    def output(orders: dict[int, _Order], of: dict[int, int] | None = None) -> torch.Tensor:
        image_rows = [orders[request][index] if request in wanted else -1 for request, index in pairs]
        sources = [(of or {}).get(request, request) for request, _ in pairs]
        return torch.stack([text[r] if at < 0 else rows[sources[r]][at] for r, at in enumerate(image_rows)])

    names = dict.fromkeys(name for at in wanted for name in _orders(kinds[at]))
    for name in names:
        orders = {at: _orders(kinds[at]).get(name, _in_place(kinds[at])) for at in wanted}
        yield Hypothesis(cause=name, output=output(orders))
    for source in requests:
        if all(source != at and _images(kinds[source]) == _images(kinds[at]) for at in wanted):
            same = output({at: _in_place(kinds[at]) for at in wanted}, dict.fromkeys(wanted, source))
            yield Hypothesis(cause=f"the images of request {source} are there", output=same)


def _kinds(request: RequestInfo, rows: torch.Tensor, wrong: WrongOperation) -> list[bool]:
    """Return for each token whether it is a part of an image: its row is not the one of the embedding's table."""
    ids = torch.tensor([request.token_ids])
    embedding = wrong.hf.model.get_input_embeddings()
    embedded = embedding(ids.clamp(max=wrong.hf.vocab_size - 1).to(wrong.hf.device))[0].to("cpu", torch.float64)
    kinds: list[bool] = ((embedded - rows).norm(dim=1) > _SAME * rows.norm(dim=1)).tolist()
    return kinds


def _images(kinds: list[bool]) -> list[range]:
    """Return the places of each image: parts that follow one another are one."""
    runs = [(is_image, [at for at, _ in group]) for is_image, group in groupby(enumerate(kinds), lambda item: item[1])]
    return [range(places[0], places[-1] + 1) for is_image, places in runs if is_image]


def _in_place(kinds: list[bool]) -> _Order:
    return [at if is_image else -1 for at, is_image in enumerate(kinds)]


def _orders(kinds: list[bool]) -> dict[str, _Order]:
    """Return the rows that the tokens of a request are given, by what has gone wrong."""
    images, right = _images(kinds), _in_place(kinds)
    orders = {"no image is there: the rows are those of the tokens in its place": [-1] * len(kinds)}
    for shift in _SHIFTS:
        how = f"{abs(shift)} position{'s' * (abs(shift) > 1)} {'late' if shift > 0 else 'early'}"
        moved = [at - shift if 0 <= at - shift < len(right) else -1 for at in range(len(right))]
        orders[f"image embeddings are placed {how}"] = [right[at] if at >= 0 else -1 for at in moved]
    for order in list(permutations(range(len(images))))[1:] if len(images) <= _MOST_IMAGES else ():
        orders[f"images in the order {', '.join(map(str, order))}"] = _put(
            right, images, [at for number in order for at in images[number]]
        )
    for height in range(2, max(map(len, images), default=0)):
        orders[f"the parts of each image by columns of {height}"] = _put(
            right, images, [at for image in images for at in _by_columns(image, height)]
        )
    return orders


def _put(right: _Order, images: list[range], sources: list[int]) -> _Order:
    order = list(right)
    for at, source in zip([at for image in images for at in image], sources, strict=True):
        order[at] = source
    return order


def _by_columns(image: range, height: int) -> list[int]:
    """Return the parts of a grid of so many rows column by column; an image that is none in its own order."""
    if len(image) % height:
        return list(image)
    width = len(image) // height
    return [image[row * width + column] for column in range(width) for row in range(height)]
