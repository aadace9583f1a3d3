"""Writes a wrong operation by itself: its inputs, HF's result, the engine's, and a script that shows the difference.

The script needs torch, safetensors and, for norms and activations, transformers. It does not import the harness.
"""

from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file

from harness.base.files import write_text, writing
from harness.base.metrics import rounding_unit
from harness.formats.recording import Recording
from harness.formats.taps import Kind
from harness.judge.compare.align import Locator
from harness.judge.compare.evidence import Evidence
from harness.judge.explain.core.rerun import activation_of, factors_of
from harness.judge.explain.core.wrong_operation import gathered
from harness.oracle.model import HFModel
from harness.oracle.rotation import rotations

CULPRIT, SCRIPT = "culprit", "show.py"
"""Names of the folder and of the script in it."""
_TENSORS = "operation.safetensors"
_SAME = 1e-5
"""Relative distance of a rotation from the expected rows up to which it is the operation's."""

Tensors = dict[str, torch.Tensor]

_TEMPLATE = '''"""{tap}: what the engine computed from its inputs, and what the operation gives."""

import sys
from pathlib import Path

import torch
from safetensors.torch import load_file

folder = Path(__file__).parent
tensors = load_file(folder / "{tensors}")
{body}
expected, actual = result.double(), tensors["actual"]
roundings = (actual - expected).norm(dim=1) / expected.norm(dim=1) / {unit!r}
for request, position, size in zip(tensors["request"], tensors["position"], roundings):
    print(f"request {{request}}, position {{position}}: {{size:.3g}} roundings to {dtype}")
sys.exit(bool((~(roundings <= {bound!r})).any()))
'''


def write_culprit(evidence: Evidence, recording: Recording, hf: HFModel, folder: Path) -> bool:
    """Write the files of an operation into a folder; return False if it cannot be computed by itself.

    Args:
        evidence: some wrong rows of the operation.
        recording: of the engine.
        hf: the model.
        folder: is made; must not exist.

    Raises:
        HarnessError: CANNOT_WRITE.
    """
    operation = evidence.operation
    write = _WRITERS.get(operation.kind)
    made = None if write is None else write(evidence, hf)
    if made is None:
        return False
    body, tensors, rows = made
    actual = gathered(Locator(recording), operation.tap, evidence.rows)
    if actual is None or actual.shape != evidence.expected.shape:
        return False
    chosen = evidence.rows.select(rows)
    tensors |= {"actual": actual[rows], "request": chosen.request, "position": chosen.position}
    script = _TEMPLATE.format(
        tap=operation.tap,
        tensors=_TENSORS,
        body=body,
        unit=rounding_unit(evidence.dtype),
        dtype=str(evidence.dtype).removeprefix("torch."),
        bound=float(evidence.bound[rows].max()),
    )
    with writing(folder):
        folder.mkdir(parents=True)
        hf.config.to_json_file(folder / "config.json")
        save_file({name: tensor.cpu().contiguous() for name, tensor in tensors.items()}, folder / _TENSORS)
    write_text(folder / SCRIPT, script)
    return True


_Made = tuple[str, Tensors, torch.Tensor] | None
"""The lines that compute `result`, their tensors, and which rows of the evidence they are of."""


def _all_rows(evidence: Evidence) -> torch.Tensor:
    return torch.arange(len(evidence.rows))


def _product(evidence: Evidence, hf: HFModel) -> _Made:
    module = hf.module(evidence.operation.module)
    weight = getattr(module, "weight", None)
    if not isinstance(weight, torch.Tensor) or weight.dim() != 2 or len(evidence.inputs) != 1:
        return None
    tensors = {"x": evidence.inputs[0].flatten(1), "weight": weight.detach()}
    bias = getattr(module, "bias", None)
    if isinstance(bias, torch.Tensor):
        tensors["bias"] = bias.detach()
    body = """result = tensors["x"] @ tensors["weight"].double().T
if "bias" in tensors:
    result = result + tensors["bias"].double()"""
    return body, tensors, _all_rows(evidence)


def _norm(evidence: Evidence, hf: HFModel) -> _Made:
    """HF's class, with the model's config: there are several forms of norms."""
    path, model = evidence.operation.module, type(hf.model)
    module = hf.module(path)
    weight = getattr(module, "weight", None)
    if not isinstance(weight, torch.Tensor):
        return None
    width = weight.shape[0]
    tensors = {"x": evidence.inputs[0].flatten(1).unflatten(1, (-1, width))}
    tensors |= {f"weight.{name}": value.detach() for name, value in module.state_dict().items()}
    body = f"""from {model.__module__} import {model.__name__}
from {type(hf.config).__module__} import {type(hf.config).__name__}

with torch.device("meta"):
    model = {model.__name__}({type(hf.config).__name__}.from_pretrained(folder))
norm = model.get_submodule({path!r}).to_empty(device="cpu")
norm.load_state_dict({{name[7:]: value for name, value in tensors.items() if name.startswith("weight.")}})
result = norm.double()(tensors["x"]).flatten(1)"""
    return body, tensors, _all_rows(evidence)


def _sum(evidence: Evidence, _hf: HFModel) -> _Made:
    if len(evidence.inputs) != 2:
        return None
    tensors = {"x": evidence.inputs[0].flatten(1), "y": evidence.inputs[1].flatten(1)}
    return 'result = tensors["x"] + tensors["y"]', tensors, _all_rows(evidence)


def _activation(evidence: Evidence, hf: HFModel) -> _Made:
    names = (getattr(hf.config, name, None) for name in ("hidden_act", "hidden_activation", "activation_function"))
    name = next((name for name in names if isinstance(name, str)), None)
    if name is None or activation_of(hf, evidence.operation) is None:
        return None
    gate, up = factors_of(evidence.operation, [x.flatten(1) for x in evidence.inputs])
    tensors, body = {"gate": gate}, f'result = ACT2FN["{name}"](tensors["gate"])'
    if up is not None:
        tensors["up"] = up
        body += ' * tensors["up"]'
    return f"from transformers.activations import ACT2FN\n\n{body}", tensors, _all_rows(evidence)


def _rotation(evidence: Evidence, hf: HFModel) -> _Made:
    operation, x = evidence.operation, evidence.inputs[0].flatten(1)
    positions = evidence.rows.position + operation.positions_ahead
    limit = _SAME * float(evidence.expected.norm())
    for rotation in rotations(hf):
        if rotation.is_regrouped or x.shape[1] % rotation.head_dim:
            continue
        if float((rotation.turn(x, positions) - evidence.expected).norm()) <= limit:
            cos, sin = rotation.angles(positions)
            pairs = (
                "x[..., 0:n:2], x[..., 1:n:2]" if rotation.is_interleaved else "x[..., : n // 2], x[..., n // 2 : n]"
            )
            join = "torch.stack(turned, dim=-1).flatten(-2)" if rotation.is_interleaved else "torch.cat(turned, dim=-1)"
            body = f"""x = tensors["x"].unflatten(1, (-1, {rotation.head_dim}))
cos, sin = tensors["cos"], tensors["sin"]
n = 2 * cos.shape[-1]
a, b = {pairs}
turned = a * cos - b * sin, b * cos + a * sin
result = torch.cat([{join}, x[..., n:]], dim=-1).flatten(1)"""
            return body, {"x": x, "cos": cos, "sin": sin}, _all_rows(evidence)
    return None


def _attention(evidence: Evidence, _hf: HFModel) -> _Made:
    """Take the rows of the first request alone, with the keys and values that they see."""
    view = next(iter(evidence.views), None)
    if view is None:
        return None
    tensors = {"query": view.query, "key": view.key, "value": view.value, "visible": view.visible()}
    lines = [
        'query, key, value = (tensors[name].transpose(0, 1) for name in ("query", "key", "value"))',
        "groups = len(query) // len(key)",
        f"scores = query @ key.repeat_interleave(groups, dim=0).transpose(1, 2) * {view.scale!r}",
    ]
    if view.softcap is not None:
        lines.append(f"scores = (scores / {view.softcap!r}).tanh() * {view.softcap!r}")
    lines.append('scores = scores.masked_fill(~tensors["visible"], float("-inf"))')
    if view.sinks is not None:
        tensors["sinks"] = view.sinks
        lines.append(
            'scores = torch.cat([scores, tensors["sinks"][:, None, None].expand(-1, scores.shape[1], 1)], dim=-1)'
        )
    lines.append("weights = scores.softmax(dim=-1)[..., : key.shape[1]]")
    lines.append("result = (weights @ value.repeat_interleave(groups, dim=0)).transpose(0, 1).flatten(1)")
    return "\n".join(lines), tensors, torch.arange(len(view.rows))


_WRITERS: dict[Kind, Callable[[Evidence, HFModel], _Made]] = {
    Kind.LINEAR: _product,
    Kind.NORM: _norm,
    Kind.ADD: _sum,
    Kind.ACTIVATION: _activation,
    Kind.ROTARY: _rotation,
    Kind.ATTENTION: _attention,
}
