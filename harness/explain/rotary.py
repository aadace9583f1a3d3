"""Ways to get the rotary embedding wrong: other pairs, other positions, other frequencies, a coarser table.

`R` rows, `N` heads, `H` head size, `P` candidate positions. The pair i of a head turns by position * frequency_i.
"""

import copy
import math
from collections.abc import Iterator
from typing import Any

import torch

from harness.compare.align import Rows, is_readback
from harness.explain.hypothesis import Hypothesis
from harness.explain.scene import Scene
from harness.oracle.precision import TRUTH_DTYPE

_MAX_POSITIONS = 1 << 15
_THETAS = (1e4, 1e5, 2.5e5, 5e5, 1e6, 5e6, 1e7)
"""Bases that published models use."""
_LN_THETAS = [math.log(1e2) + step / 25 for step in range(400)]
"""Logarithms of the bases from 100 to 900 million among which the best one is looked for."""


def interleaved_pairs(scene: Scene) -> Iterator[Hypothesis]:
    """Neighbours 2i and 2i + 1 form a pair, where HF pairs i with i + H/2."""
    cos, sin = _angles(scene.positions, _frequencies(scene))
    x = _heads(scene)
    a, b = x[..., ::2], x[..., 1::2]
    turned = torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)
    yield Hypothesis(
        cause="rotary over neighbouring pairs (interleaved) instead of half-split ones", output=_flat(turned)
    )


def not_rotated(scene: Scene) -> Iterator[Hypothesis]:
    """The input comes out as it went in."""
    yield Hypothesis(cause="rotary is not applied", output=scene.inputs[0].flatten(1))


def backwards(scene: Scene) -> Iterator[Hypothesis]:
    """The sine has the wrong sign."""
    yield Hypothesis(
        cause="rotary turns backwards (sign of the sine)",
        output=_rotated(_heads(scene), *_angles(-scene.positions, _frequencies(scene))),
    )


def other_positions(scene: Scene) -> Iterator[Hypothesis]:
    """Each row is rotated for the position that fits it best; what those positions have in common is the cause."""
    frequencies = _frequencies(scene)
    # As far as positions get that run on through the largest step, or one too far.
    highest = int(scene.positions.max()) + 2 + max(len(step.position) for step in scene.recording.steps)
    if highest > _MAX_POSITIONS:
        return
    best = _best_positions(scene, frequencies, highest)
    output = _rotated(_heads(scene), *_angles(best, frequencies))
    pairs = sorted(set(zip(scene.positions.tolist(), best.tolist(), strict=True)))
    shown = ", ".join(f"{own} as {fitted}" for own, fitted in pairs[:6])
    named = _named_positions(scene, best)
    yield Hypothesis(
        cause=named or "rotary at wrong positions",
        output=output,
        detail=f"positions: {shown}",
        freedom=0 if named else 1,
    )


def _best_positions(scene: Scene, frequencies: torch.Tensor, highest: int) -> torch.Tensor:
    """[R] int64: the position whose rotation takes each row's input nearest to its output."""
    before, after = (torch.view_as_complex(_pairs(x)) for x in (_heads(scene), _heads(scene, scene.actual)))
    turned = (before.conj() * after).sum(dim=1)  # [R, H/2]: how far each pair was turned, weighted
    table = torch.polar(
        torch.ones(highest, len(frequencies), dtype=TRUTH_DTYPE), _phases(torch.arange(highest), frequencies)
    )
    return (turned @ table.conj().T).real.argmax(dim=1)


def _named_positions(scene: Scene, best: torch.Tensor) -> str | None:
    """Say what the positions that were used have in common."""
    own, places = scene.positions, _places(scene)
    offsets = (best - own).unique().tolist()
    if offsets in ([1], [-1]):
        return f"rotary at a position off by one ({offsets[0]:+d})"
    known = {
        "positions restart at 0 in every step: the chunk's offset is forgotten": places["chunk"],
        "positions restart at 1 in every step: the chunk's offset is forgotten": places["chunk"] + 1,
        "positions run on through the batch instead of restarting for each request": places["batch"],
        "positions restart at 0 behind the prompt": own - places["prompt"],
        "rotary at position 0 for every row": torch.zeros_like(own),
    }
    for name, positions in known.items():
        if torch.equal(best, positions):
            return name
    return f"rotary at a position off by {offsets[0]:+d}" if len(offsets) == 1 else None


def _places(scene: Scene) -> dict[str, torch.Tensor]:
    """Each row's index among its request's rows of the step, among all rows of it, and its prompt's length."""
    lengths = {request.id: request.prompt_length for request in scene.recording.manifest.requests}
    chunk, batch, prompt = [], [], []
    for request, position, step in _identities(scene.rows):
        rows = scene.recording.steps[step]
        here = ((rows.request == request) & (rows.position == position)).nonzero()[:, 0]
        at = int(here[-1])
        chunk.append(int((rows.request[:at] == request).sum()))
        batch.append(at)
        prompt.append(lengths[request])
    return {name: torch.tensor(values) for name, values in (("chunk", chunk), ("batch", batch), ("prompt", prompt))}


def _identities(rows: Rows) -> Iterator[tuple[int, int, int]]:
    return zip(rows.request.tolist(), rows.position.tolist(), rows.step.tolist(), strict=True)


def positions_of_batch_mate(scene: Scene) -> Iterator[Hypothesis]:
    """Each row is rotated for the position of the row that stands elsewhere in its step."""
    positions = []
    for request, position, index in _identities(scene.rows):
        step = scene.recording.steps[index]
        if is_readback(step):
            return
        here = ((step.request == request) & (step.position == position)).nonzero()[:, 0]
        positions.append(int(step.position[(int(here[-1]) - 1) % len(step.position)]))
    output = _rotated(_heads(scene), *_angles(torch.tensor(positions), _frequencies(scene)))
    yield Hypothesis(cause="rotary at the position of the row before it in the batch", output=output)


def scaling_ignored(scene: Scene) -> Iterator[Hypothesis]:
    """The frequencies are those of a model without rope scaling."""
    parameters = _parameters(scene)
    if parameters.get("rope_type", "default") == "default":
        return
    plain = {"rope_type": "default", "rope_theta": parameters["rope_theta"]}
    frequencies = _frequencies(scene, plain)
    yield Hypothesis(
        cause=f"rope scaling ({parameters['rope_type']}) is ignored",
        output=_rotated(_heads(scene), *_angles(scene.positions, frequencies)),
    )


def wrong_theta(scene: Scene) -> Iterator[Hypothesis]:
    """The base of the frequencies is another: one that models use, or one fitted to the rows."""
    parameters = _parameters(scene)
    own = float(parameters["rope_theta"])
    for theta in dict.fromkeys((*_THETAS, *_fitted_thetas(scene))):
        if theta != own:
            frequencies = _frequencies(scene, {**parameters, "rope_theta": theta})
            output = _rotated(_heads(scene), *_angles(scene.positions, frequencies))
            cause = f"wrong rope theta: {theta:g} instead of {own:g}"
            yield Hypothesis(cause=cause, output=output, freedom=0 if theta in _THETAS else 1)


def _fitted_thetas(scene: Scene) -> list[float]:
    """Return the base under which the pairs turn most nearly as they did, rounded to two digits and to six."""
    before, after = (torch.view_as_complex(_pairs(x)) for x in (_heads(scene), _heads(scene, scene.actual)))
    turned = (before.conj() * after).sum(dim=1)
    parameters = _parameters(scene)

    def fit(ln_theta: float) -> float:
        frequencies = _frequencies(scene, {**parameters, "rope_theta": math.exp(ln_theta)})
        phases = scene.positions[:, None] * frequencies.to(TRUTH_DTYPE)
        return float((turned * torch.polar(torch.ones_like(phases), -phases)).real.sum())

    at, width = max(_LN_THETAS, key=fit), _LN_THETAS[1] - _LN_THETAS[0]
    for _ in range(30):
        width *= 0.6
        at = max((at - width, at, at + width), key=fit)
    theta = math.exp(at)
    return [float(f"{theta:.2g}"), float(f"{theta:.6g}")]


def partial_rotary(scene: Scene) -> Iterator[Hypothesis]:
    """Only the first elements of a head are rotated, or all of them where only some should be."""
    x = _heads(scene)
    head_dim, theta = x.shape[-1], float(_parameters(scene)["rope_theta"])
    for share in (0.25, 0.5, 0.75, 1.0):
        dim = int(head_dim * share) // 2 * 2
        if not dim:
            continue
        own = (theta ** -(torch.arange(0, dim, 2, dtype=torch.float) / dim)).to(TRUTH_DTYPE)
        for frequencies in (own, _frequencies(scene)[: dim // 2]):
            if len(frequencies) == dim // 2:
                turned = _rotated(x[..., :dim], *_angles(scene.positions, frequencies)).unflatten(1, (x.shape[1], dim))
                output = _flat(torch.cat((turned, x[..., dim:]), dim=-1))
                yield Hypothesis(cause=f"partial rotary: the first {dim} of {head_dim} elements turn", output=output)


def coarse_table(scene: Scene) -> Iterator[Hypothesis]:
    """Cosine and sine, or the positions and frequencies behind them, were held in a 16-bit dtype."""
    frequencies = _frequencies(scene)
    for dtype in (torch.bfloat16, torch.float16):
        name = str(dtype).removeprefix("torch.")
        for first in (TRUTH_DTYPE, scene.dtype):  # straight from the angles, or behind the engine's own rounding
            cos, sin = (x.to(first).to(dtype).to(TRUTH_DTYPE) for x in _angles(scene.positions, frequencies))
            yield Hypothesis(cause=f"cos/sin table in {name}", output=_rotated(_heads(scene), cos, sin))
        low = frequencies.to(dtype).to(torch.float32)
        output = _rotated(_heads(scene), *_angles(scene.positions, low))
        yield Hypothesis(cause=f"rotary frequencies in {name}", output=output)
        phases = (scene.positions.to(dtype)[:, None] * frequencies.to(dtype)).to(TRUTH_DTYPE)
        for table, cause in ((dtype, f"cos/sin table in {name}, its angles too"), (None, f"rotary angles in {name}")):
            cos, sin = ((x.to(table).to(TRUTH_DTYPE) if table else x)[:, None] for x in (phases.cos(), phases.sin()))
            yield Hypothesis(cause=cause, output=_rotated(_heads(scene), cos, sin))


def _parameters(scene: Scene) -> dict[str, Any]:
    parameters: dict[str, Any] = dict(scene.decoder.config.rope_parameters)
    return parameters


def _frequencies(scene: Scene, parameters: dict[str, Any] | None = None) -> torch.Tensor:
    """[H/2] float32: HF's own for the config, or for the config with other rope parameters."""
    embedding: Any = scene.decoder.model.model.rotary_emb
    if parameters is not None:
        config = copy.deepcopy(scene.decoder.config)
        config.rope_parameters = parameters
        embedding = type(embedding)(config)
    frequencies: torch.Tensor = embedding.inv_freq.detach().cpu().to(torch.float32)
    return frequencies


def _phases(positions: torch.Tensor, frequencies: torch.Tensor) -> torch.Tensor:
    """[R, H/2]: rounded to float32, as the definition has it."""
    return (positions[:, None].to(torch.float32) * frequencies.to(torch.float32)).to(TRUTH_DTYPE)


def _angles(positions: torch.Tensor, frequencies: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sine, [R, 1, H/2] each."""
    phases = _phases(positions, frequencies)
    return phases.cos()[:, None], phases.sin()[:, None]


def _heads(scene: Scene, x: torch.Tensor | None = None) -> torch.Tensor:
    """[R, N, H] of the input, or of another tensor of its shape."""
    flat = scene.inputs[0].flatten(1) if x is None else x
    heads: torch.Tensor = flat.unflatten(-1, (-1, scene.decoder.head_dim()))
    return heads


def _pairs(x_RNH: torch.Tensor) -> torch.Tensor:
    """[R, N, H/2, 2] contiguous."""
    return torch.stack(x_RNH.chunk(2, dim=-1), dim=-1).contiguous()


def _rotated(x_RNH: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """[R, N*H]: the half-split rotation."""
    a, b = x_RNH.chunk(2, dim=-1)
    return _flat(torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1))


def _flat(x: torch.Tensor) -> torch.Tensor:
    return x.flatten(1)


EXPLANATIONS = (
    interleaved_pairs,
    not_rotated,
    backwards,
    scaling_ignored,
    wrong_theta,
    partial_rotary,
    other_positions,
    positions_of_batch_mate,
    coarse_table,
)
