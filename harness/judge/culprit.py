"""Writes a wrong operation by itself: its inputs, HF's result, the engine's, and a script that shows the difference.

The script needs torch, safetensors and, for norms and activations, transformers. It does not import the harness.
"""

from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file

from harness.base.files import write_text, writing
from harness.base.metrics import rounding_unit
from harness.formats.taps import Kind
from harness.judge.explain.core.rerun import activation_of, factors_of
from harness.judge.explain.core.wrong_operation import WrongOperation

CULPRIT, SCRIPT = "culprit", "show.py"
"""Names of the folder and of the script in it."""
_TENSORS = "operation.safetensors"

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


def write_culprit(wrong: WrongOperation, folder: Path) -> bool:
    """Write the files of an operation into a folder; return False if it cannot be computed by itself.

    Args:
        wrong: some wrong rows of the operation.
        folder: is made; must not exist.

    Raises:
        HarnessError: CANNOT_WRITE.
    """
    write = _WRITERS.get(wrong.operation.kind)
    made = None if write is None else write(wrong)
    if made is None:
        return False
    body, tensors, rows = made
    chosen = wrong.rows.select(rows)
    tensors |= {"actual": wrong.actual[rows], "request": chosen.request, "position": chosen.position}
    script = _TEMPLATE.format(
        tap=wrong.operation.tap,
        tensors=_TENSORS,
        body=body,
        unit=rounding_unit(wrong.dtype),
        dtype=str(wrong.dtype).removeprefix("torch."),
        bound=float(wrong.bound[rows].max()),
    )
    with writing(folder):
        folder.mkdir(parents=True)
        wrong.hf.config.to_json_file(folder / "config.json")
        save_file({name: tensor.cpu().contiguous() for name, tensor in tensors.items()}, folder / _TENSORS)
    write_text(folder / SCRIPT, script)
    return True


_Made = tuple[str, Tensors, torch.Tensor] | None
"""The lines that compute `result`, their tensors, and which of the wrong rows they are of."""


def _all_rows(wrong: WrongOperation) -> torch.Tensor:
    return torch.arange(len(wrong.rows))


def _product(wrong: WrongOperation) -> _Made:
    weight, bias = (wrong.weight(wrong.operation.tap, name) for name in ("weight", "bias"))
    if weight is None or weight.dim() != 2 or len(wrong.inputs) != 1:
        return None
    tensors, body = {"x": wrong.inputs[0].flatten(1), "weight": weight}, 'result = tensors["x"] @ tensors["weight"].T'
    if bias is not None:
        tensors["bias"] = bias
        body += ' + tensors["bias"]'
    return body, tensors, _all_rows(wrong)


def _norm(wrong: WrongOperation) -> _Made:
    """HF's class, with the model's config: there are several forms of norms."""
    path, model, config = wrong.operation.module, type(wrong.hf.model), type(wrong.hf.config)
    weight = wrong.weight(wrong.operation.tap)
    if weight is None:
        return None
    tensors = {"x": wrong.inputs[0].flatten(1).unflatten(1, (-1, weight.shape[0]))}
    tensors |= {f"weight.{name}": value.detach() for name, value in wrong.module.state_dict().items()}
    body = f"""from {model.__module__} import {model.__name__}
from {config.__module__} import {config.__name__}

with torch.device("meta"):
    model = {model.__name__}({config.__name__}.from_pretrained(folder))
norm = model.get_submodule({path!r}).to_empty(device="cpu")
norm.load_state_dict({{name[7:]: value for name, value in tensors.items() if name.startswith("weight.")}})
result = norm.double()(tensors["x"]).flatten(1)"""
    return body, tensors, _all_rows(wrong)


def _sum(wrong: WrongOperation) -> _Made:
    if len(wrong.inputs) != 2:
        return None
    tensors = {"x": wrong.inputs[0].flatten(1), "y": wrong.inputs[1].flatten(1)}
    return 'result = tensors["x"] + tensors["y"]', tensors, _all_rows(wrong)


def _activation(wrong: WrongOperation) -> _Made:
    keys = ("hidden_act", "hidden_activation", "activation_function")
    name = next((value for key in keys if isinstance(value := getattr(wrong.hf.config, key, None), str)), None)
    if name is None or activation_of(wrong.hf, wrong.operation) is None:
        return None
    gate, up = factors_of(wrong.operation, [x.flatten(1) for x in wrong.inputs])
    tensors, body = {"gate": gate}, f'result = ACT2FN["{name}"](tensors["gate"])'
    if up is not None:
        tensors["up"] = up
        body += ' * tensors["up"]'
    return f"from transformers.activations import ACT2FN\n\n{body}", tensors, _all_rows(wrong)


def _rotation(wrong: WrongOperation) -> _Made:
    rotation = wrong.rotation
    if rotation is None or rotation.is_regrouped:
        return None
    cos, sin = rotation.angles(wrong.positions)
    pairs = "x[..., 0:n:2], x[..., 1:n:2]" if rotation.is_interleaved else "x[..., : n // 2], x[..., n // 2 : n]"
    join = "torch.stack(turned, dim=-1).flatten(-2)" if rotation.is_interleaved else "torch.cat(turned, dim=-1)"
    body = f"""x = tensors["x"].unflatten(1, (-1, {rotation.head_dim}))
cos, sin = tensors["cos"], tensors["sin"]
n = 2 * cos.shape[-1]
a, b = {pairs}
turned = a * cos - b * sin, b * cos + a * sin
result = torch.cat([{join}, x[..., n:]], dim=-1).flatten(1)"""
    return body, {"x": wrong.inputs[0].flatten(1), "cos": cos, "sin": sin}, _all_rows(wrong)


def _attention(wrong: WrongOperation) -> _Made:
    """Take the rows of the first request alone, with the keys and values that they see."""
    view = next(iter(wrong.views), None)
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


_WRITERS: dict[Kind, Callable[[WrongOperation], _Made]] = {
    Kind.LINEAR: _product,
    Kind.NORM: _norm,
    Kind.ADD: _sum,
    Kind.ACTIVATION: _activation,
    Kind.ROTARY: _rotation,
    Kind.ATTENTION: _attention,
}
