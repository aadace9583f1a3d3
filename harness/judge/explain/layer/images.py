"""Ways to put images among the tokens wrongly: at other places, in another order, of another request, or not at all.

`R` rows, `T` tokens of a request, `D` hidden size.
"""

from collections.abc import Iterator
from itertools import groupby, permutations

import torch

from harness.formats.recording import RequestInfo
from harness.judge.explain.core.failure import Failure
from harness.judge.explain.core.hypothesis import Hypothesis
from harness.oracle.images import decoder_inputs

_SAME = 0.05
"""Relative distance up to which the rows that HF hands to its decoder are those that its first layer is given."""
_MOST_IMAGES = 4
_SHIFTS = (1, -1, 2, -2)
_Order = list[int]
"""For each token of a request, the token whose image row it is given; -1 for the row of its own token."""


def misplaced(failure: Failure) -> Iterator[Hypothesis]:
    """Rows of images stand at other tokens than their own."""
    requests = {item.id: item for item in failure.recording.manifest.requests if item.inputs is not None}
    wanted = set(failure.rows.request.tolist()) & set(requests)
    if not failure.hf.has_images or not wanted or not failure.operation.source.endswith(":input"):
        return
    handed = {at: decoder_inputs(failure.hf, request) for at, request in requests.items()}
    rows = {at: item.by_token["inputs_embeds"].to("cpu", torch.float64) for at, item in handed.items()}
    kinds = {at: _kinds(request, rows[at], failure) for at, request in requests.items()}
    pairs = failure.rows.places()
    text, expected = failure.inputs[0].flatten(1), failure.expected
    meant = [
        rows[request][index] if request in wanted else x for (request, index), x in zip(pairs, expected, strict=True)
    ]
    if bool(((torch.stack(meant) - expected).norm(dim=1) > _SAME * expected.norm(dim=1)).any()):
        return

    def output(orders: dict[int, _Order], of: dict[int, int] | None = None) -> torch.Tensor:
        found = [orders[request][index] if request in wanted else -1 for request, index in pairs]
        sources = [(of or {}).get(request, request) for request, _ in pairs]
        return torch.stack([text[r] if at < 0 else rows[sources[r]][at] for r, at in enumerate(found)])

    names = dict.fromkeys(name for at in wanted for name in _orders(kinds[at]))
    for name in names:
        orders = {at: _orders(kinds[at]).get(name, _in_place(kinds[at])) for at in wanted}
        yield Hypothesis(cause=name, output=output(orders))
    for other in requests:
        if all(other != at and _images(kinds[other]) == _images(kinds[at]) for at in wanted):
            same = output({at: _in_place(kinds[at]) for at in wanted}, dict.fromkeys(wanted, other))
            yield Hypothesis(cause=f"the images of request {other} are there", output=same)


def _kinds(request: RequestInfo, rows: torch.Tensor, failure: Failure) -> list[bool]:
    """Return for each token whether it is a part of an image: its row is not the one of the embedding's table."""
    ids = torch.tensor([request.token_ids])
    embedding = failure.hf.model.get_input_embeddings()
    own = embedding(ids.clamp(max=failure.hf.vocab_size - 1).to(failure.hf.device))[0].to("cpu", torch.float64)
    kinds: list[bool] = ((own - rows).norm(dim=1) > _SAME * rows.norm(dim=1)).tolist()
    return kinds


def _images(kinds: list[bool]) -> list[range]:
    """Return the places of each image: parts that follow one another are one."""
    runs = [(is_image, [at for at, _ in group]) for is_image, group in groupby(enumerate(kinds), lambda each: each[1])]
    return [range(places[0], places[-1] + 1) for is_image, places in runs if is_image]


def _in_place(kinds: list[bool]) -> _Order:
    return [at if is_image else -1 for at, is_image in enumerate(kinds)]


def _orders(kinds: list[bool]) -> dict[str, _Order]:
    """Return the rows that the tokens of a request are given, by what has gone wrong."""
    images, own = _images(kinds), _in_place(kinds)
    found = {"no image is there: the rows are those of the tokens in its place": [-1] * len(kinds)}
    for shift in _SHIFTS:
        how = f"{abs(shift)} position{'s' * (abs(shift) > 1)} {'late' if shift > 0 else 'early'}"
        moved = [at - shift if 0 <= at - shift < len(own) else -1 for at in range(len(own))]
        found[f"image embeddings are placed {how}"] = [own[at] if at >= 0 else -1 for at in moved]
    for order in list(permutations(range(len(images))))[1:] if len(images) <= _MOST_IMAGES else ():
        found[f"images in the order {', '.join(map(str, order))}"] = _put(
            own, images, [at for number in order for at in images[number]]
        )
    for height in range(2, max(map(len, images), default=0)):
        found[f"the parts of each image by columns of {height}"] = _put(
            own, images, [at for image in images for at in _by_columns(image, height)]
        )
    return found


def _put(own: _Order, images: list[range], sources: list[int]) -> _Order:
    order = list(own)
    for at, source in zip([at for image in images for at in image], sources, strict=True):
        order[at] = source
    return order


def _by_columns(image: range, height: int) -> list[int]:
    """Return the parts of a grid of so many rows column by column; an image that is none in its own order."""
    if len(image) % height:
        return list(image)
    width = len(image) // height
    return [image[row * width + column] for column in range(width) for row in range(height)]


EXPLANATIONS = (misplaced,)
