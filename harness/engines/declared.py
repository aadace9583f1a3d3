"""The arithmetic that a step engine or a module declares by attributes, in the words of recordings."""

import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch

from harness.base.numerics import CACHE_FORMATS, Numerics
from harness.errors import Code, HarnessError
from harness.formats.taps import Graph, Kind

DECLARATIONS = ("numerics", "cache_dtype", "cache_scale")
"""Names of the attributes."""


def declared_numerics(subject: object, graph: Graph) -> Numerics | None:
    """Return the arithmetic that an engine's object declares; None if it declares nothing.

    The optional attributes are:

    - `cache_dtype`: dtype or format of the KV cache, as `Numerics.cache` names it, or a dtype of torch;
      `auto` declares nothing.
    - `cache_scale`: the fixed scale of such a cache, a number, or one for each KV head; or scales by tap, as
      `Numerics.cache_scales` has them. The cache stores the quotient.
    - `numerics`: a `Numerics`, or a mapping with some of its fields.

    Args:
        subject: the object.
        graph: of the model, whose caches one scale is for.

    Raises:
        HarnessError: BAD_OPTION: an attribute is none of these.
    """
    general, dtype, scale = (getattr(subject, name, None) for name in DECLARATIONS)
    name, dtype = type(subject).__name__, None if dtype == "auto" else dtype
    if general is None and dtype is None and scale is None:
        return None
    if isinstance(general, Numerics):
        general = asdict(general)
    if not isinstance(general or {}, Mapping):
        raise _bad(f"{name}.numerics", "a mapping of the fields of numerics", general)
    declared = dict(general or {})
    if dtype is not None:
        declared["cache"] = str(dtype).removeprefix("torch.")
    if scale is not None:
        caches = [operation.tap for operation in graph if operation.kind is Kind.CACHE]
        declared["cache_scales"] = scale if isinstance(scale, Mapping) else dict.fromkeys(caches, _scales(scale))
        if declared.get("cache") is None:
            raise _bad(f"{name}.cache_scale", "cache_dtype beside it", scale)
    return _validated(name, declared)


def _scales(scale: Any) -> Any:
    numbers = scale.tolist() if isinstance(scale, torch.Tensor) else scale
    return numbers if isinstance(numbers, list | tuple) else [numbers]


def _validated(name: str, declared: Mapping[str, Any]) -> Numerics:
    from pydantic import TypeAdapter, ValidationError

    try:
        numerics = TypeAdapter(Numerics).validate_python(declared, strict=False)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise _bad(f"{name}: {'.'.join(map(str, first['loc']))}", first["msg"], first["input"]) from error
    for form in filter(None, (numerics.cache, numerics.cache_values)):
        dtype = getattr(torch, form, None)
        if form not in CACHE_FORMATS and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise _bad(f"{name}: cache", f"a dtype of torch, or one of {', '.join(CACHE_FORMATS)}", form)
    for tap, scales in numerics.cache_scales.items():
        if not scales or not all(0 < scale < math.inf for scale in scales):
            raise _bad(f"{name}: scales of {tap}", "positive numbers, one or one for each KV head", list(scales))
    return numerics


def _bad(where: str, expected: str, actual: object) -> HarnessError:
    return HarnessError(
        Code.BAD_OPTION,
        "the engine declares arithmetic that does not exist",
        where=where,
        expected=expected,
        actual=actual,
        hint="docs/check-any-engine.md lists what an engine can declare",
    )
