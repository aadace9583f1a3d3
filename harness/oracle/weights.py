"""Weights of a model that is too large to be held: each part is read from the checkpoint while it runs.

HF's own loader does the reading, tensor by tensor of one part, so that what it renames, merges or splits on the way
(experts into one tensor, a fused projection into three) is done here as it does it. On a CPU weights in the engine's
dtype are views of the mapped file, and cost no memory of their own.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from harness.checkpoint import tensor_headers
from harness.errors import Code, HarnessError
from harness.oracle.quiet import quiet_transformers

Key = str
"""Name of a tensor in the checkpoint."""


class ResidentWeights:
    """Weights that are all loaded, and stay."""

    @contextmanager
    def held(self, _part: str) -> Iterator[None]:
        """Hold the weights of one part of the model for the duration of the block."""
        yield


class StreamedWeights:
    """Weights that are read while they are needed."""

    def __init__(self, model: Any, folder: Path, *, dtype: torch.dtype, device: torch.device) -> None:
        """Plan which tensors of the checkpoint make up which part of the model; nothing is read.

        Args:
            model: an HF model whose parameters are on the meta device.
            folder: the checkpoint.
            dtype: of the loaded weights.
            device: where they go.

        Raises:
            HarnessError: TENSORS_CONTRADICT_CONFIG: a parameter has no tensor in the checkpoint.
        """
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.modeling_utils import LoadStateDictConfig

        self._model, self._device = model, device
        self._loading = LoadStateDictConfig(
            dtype=dtype,
            device_map={"": device},
            dtype_plan=model._get_dtype_plan(dtype),
            weight_mapping=get_model_conversion_mapping(model, None, None),
        )
        self._shard_of = {name: shard for name, (_, shard) in tensor_headers(folder).items()}
        self._keys_of = self._plan(folder)

    def _plan(self, folder: Path) -> Mapping[str, Sequence[Key]]:
        """Return the tensors behind each parameter; those of a tied one are those of what it is tied to."""
        from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

        mapping = self._loading.weight_mapping or []
        renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
        converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
        expected = self._model.state_dict()
        keys: dict[str, list[Key]] = {}
        for key in self._shard_of:
            name, _ = rename_source_key(key, renamings, converters, self._model.base_model_prefix, expected)
            if name not in expected and key in expected:
                name = key
            keys.setdefault(name, []).append(key)
        for target, source in self._model.all_tied_weights_keys.items():
            one, other = (target, source) if source in keys else (source, target)
            if one not in keys and other in keys:
                keys[one] = keys[other]
        self._check_complete(keys, folder)
        return keys

    def _check_complete(self, keys: Mapping[str, Sequence[Key]], folder: Path) -> None:
        # A converter's first target stands for all of them, so only a module that lacks everything is certain to lack.
        modules = {name.rpartition(".")[0] for name in keys}
        for name, _ in self._model.named_parameters():
            if name not in keys and name.rpartition(".")[0] not in modules:
                raise HarnessError(
                    Code.TENSORS_CONTRADICT_CONFIG,
                    f"the checkpoint has no tensor for the parameter {name}",
                    where=folder,
                    hint=f"harness inspect {folder}",
                )

    @contextmanager
    def held(self, part: str) -> Iterator[None]:
        """Hold the weights of one part of the model for the duration of the block.

        Args:
            part: dotted path of a module.
        """
        module = self._model.get_submodule(part)
        empty = dict(module.named_parameters(remove_duplicate=False))
        if not empty or all(not parameter.is_meta for parameter in empty.values()):
            yield
            return
        names = [f"{part}.{name}" for name in (*empty, *dict(module.named_buffers()))]
        with ExitStack() as stack:
            stack.callback(_release, module, empty)
            self._load(names)
            self._tie(names, stack)
            module.requires_grad_(False)
            yield

    def _load(self, names: Sequence[str]) -> None:
        from safetensors import safe_open
        from transformers.core_model_loading import convert_and_load_state_dict_in_model

        prefixes = tuple({name.rpartition(".")[0] + "." for name in names})
        parts = [keys for name, keys in self._keys_of.items() if name in names or name.startswith(prefixes)]
        wanted = {key for keys in parts for key in keys}
        with ExitStack() as stack:
            files = {
                shard: stack.enter_context(safe_open(shard, framework="pt"))
                for shard in {self._shard_of[key] for key in wanted}
            }
            tensors = {key: files[self._shard_of[key]].get_slice(key) for key in sorted(wanted)}
            stack.enter_context(quiet_transformers())
            convert_and_load_state_dict_in_model(self._model, tensors, self._loading)

    def _tie(self, names: Sequence[str], stack: ExitStack) -> None:
        """Give a tied parameter the tensor that was loaded for what it is tied to."""
        for target, source in self._model.all_tied_weights_keys.items():
            for one, other in ((target, source), (source, target)):
                if one in names and self._model.get_parameter(one).is_meta:
                    self._set(one, self._model.get_parameter(other))
                if one in names and other not in names:
                    stack.callback(self._set, other, _meta_like(self._model.get_parameter(other)))

    def _set(self, name: str, parameter: nn.Parameter) -> None:
        path, _, own = name.rpartition(".")
        self._model.get_submodule(path)._parameters[own] = parameter


def _meta_like(parameter: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=False)


def _release(module: nn.Module, empty: Mapping[str, nn.Parameter]) -> None:
    for name, parameter in empty.items():
        path, _, own = name.rpartition(".")
        module.get_submodule(path)._parameters[own] = parameter


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Build modules in this block without memory for their parameters; buffers are computed as usual."""
    register = nn.Module.register_parameter

    def register_empty(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        register(self, name, None if param is None else nn.Parameter(param.to("meta"), requires_grad=False))

    nn.Module.register_parameter = register_empty  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]
