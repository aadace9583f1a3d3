"""Weights of a model that is too large to be held: each part is read from the checkpoint while it runs.

A tensor that needs no conversion is mapped from the file: on a CPU, in the same dtype, it is read when it is used, and
takes no memory of its own. Tensors that HF merges, splits or converts (experts into one tensor, a fused projection into
three) go through HF's own loader.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn

from harness.base.progress import quiet_transformers
from harness.errors import Code, HarnessError
from harness.formats.checkpoint import Checkpoint
from harness.formats.checkpoint.checkpoint import reading_shard
from harness.formats.safetensors_header import TensorEntry

Key = str
"""Name of a tensor in the checkpoint."""


class ResidentWeights:
    """Weights that are all in memory until the end."""

    @contextmanager
    def held(self, _part: str) -> Iterator[None]:
        """Hold the weights of one part of the model for the duration of the block."""
        yield


class StreamedWeights:
    """Weights that are read while they are needed."""

    def __init__(self, model: Any, checkpoint: Checkpoint, *, dtype: torch.dtype, device: torch.device) -> None:
        """Assign the tensors of the checkpoint to the parts of the model, without reading them.

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
        self._folder, self._headers = checkpoint.folder, checkpoint.tensors
        self._converted: set[str] = set()
        """Parameters that are converted from tensors of the checkpoint."""
        self._keys_of = self._plan()
        self._give_embedding_a_device()
        self._empty: dict[str, nn.Parameter] = dict(model.named_parameters(remove_duplicate=False))

    def _give_embedding_a_device(self) -> None:
        """Let the embedding's weight say where the token ids go: some families ask it before they look them up."""
        weight = getattr(self._model.get_input_embeddings(), "weight", None)
        if isinstance(weight, nn.Parameter):
            unknown = torch.full((1,), torch.nan, dtype=weight.dtype, device=self._device).expand(weight.shape)
            for name, parameter in self._model.named_parameters(remove_duplicate=False):
                if parameter is weight:
                    self._set(name, nn.Parameter(unknown, requires_grad=False))

    def _plan(self) -> Mapping[str, Sequence[Key]]:
        """Return the tensors behind each parameter; those of a tied one are those of what it is tied to."""
        from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

        mapping = self._loading.weight_mapping or []
        renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
        converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
        expected = self._model.state_dict()
        keys: dict[str, list[Key]] = {}
        for key in self._headers:
            name, pattern = rename_source_key(key, renamings, converters, self._model.base_model_prefix, expected)
            if name not in expected and key in expected:
                name = key
            keys.setdefault(name, []).append(key)
            if pattern is not None or self._loading.dtype_plan:
                self._converted.add(name)
        for target, source in self._model.all_tied_weights_keys.items():
            one, tied = (target, source) if source in keys else (source, target)
            if one not in keys and tied in keys:
                keys[one] = keys[tied]
        self._check_complete(keys)
        return keys

    def _check_complete(self, keys: Mapping[str, Sequence[Key]]) -> None:
        # A converter's first target stands for all of them: whether another is lacking is seen when it is loaded.
        converted = {name.rpartition(".")[0] for name in self._converted}
        for name, _ in self._model.named_parameters():
            if name not in keys and name.rpartition(".")[0] not in converted:
                raise self._contradiction(f"the checkpoint has no tensor for the parameter {name}")

    def _contradiction(self, message: str, **shown: object) -> HarnessError:
        hint = f"harness inspect {self._folder}"
        return HarnessError(Code.TENSORS_CONTRADICT_CONFIG, message, where=self._folder, hint=hint, **shown)

    @contextmanager
    def held(self, part: str) -> Iterator[None]:
        """Hold the weights of one part of the model for the duration of the block.

        Raises:
            HarnessError: TENSORS_CONTRADICT_CONFIG: a tensor has another shape than its parameter, or is not there.
        """
        module = self._model.get_submodule(part)
        names = [f"{part}.{name}" for name, _ in module.named_parameters(remove_duplicate=False)]
        if not any(map(self._is_empty, names)):
            yield
            return
        with ExitStack() as stack:
            stack.callback(self._release, [*names, *self._tied_to(names)])
            self._load([*names, *(f"{part}.{name}" for name, _ in module.named_buffers())])
            self._tie(names)
            for name in filter(self._is_empty, names):
                raise self._contradiction(f"the checkpoint has no tensor for the parameter {name}")
            module.requires_grad_(False)
            yield

    def _is_empty(self, name: str) -> bool:
        return self._empty[name] is self._model.get_parameter(name)

    def _release(self, names: Sequence[str]) -> None:
        for name in names:
            self._set(name, self._empty[name])

    def _load(self, names: Sequence[str]) -> None:
        prefixes = tuple({name.rpartition(".")[0] + "." for name in names})
        wanted = {name: keys for name, keys in self._keys_of.items() if name in names or name.startswith(prefixes)}
        mapped = {name: keys[0] for name, keys in wanted.items() if name in names and self._is_mapped(name, keys)}
        with ExitStack() as stack:
            files = _Files(stack, self._headers)
            for name, key in mapped.items():
                tensor = files.of(key).get_tensor(key).to(self._device, self._loading.dtype)
                self._set(name, nn.Parameter(tensor, requires_grad=False))
            converted = {key for name, keys in wanted.items() if name not in mapped for key in keys}
            if converted:
                self._convert({key: files.of(key).get_slice(key) for key in sorted(converted)})

    def _is_mapped(self, name: str, keys: Sequence[Key]) -> bool:
        if name not in self._empty or name in self._converted or len(keys) > 1:
            return False
        return tuple(self._headers[keys[0]][0].shape) == self._empty[name].shape

    def _convert(self, tensors: Mapping[Key, Any]) -> None:
        from transformers.core_model_loading import convert_and_load_state_dict_in_model

        with quiet_transformers():
            loaded, _ = convert_and_load_state_dict_in_model(self._model, tensors, self._loading)
        for name, actual, expected in sorted(loaded.mismatched_keys):
            raise self._contradiction(
                f"the parameter {name} has another shape in the checkpoint",
                expected=list(expected),
                actual=list(actual),
            )

    def _tied_to(self, names: Sequence[str]) -> list[str]:
        """Return the parameters outside of a part that are one with its own, and are not held yet."""
        pairs = [pair for one, tied in self._model.all_tied_weights_keys.items() for pair in ((one, tied), (tied, one))]
        return [tied for one, tied in pairs if one in names and tied not in names and self._is_empty(tied)]

    def _tie(self, names: Sequence[str]) -> None:
        """Give a tied parameter the tensor that was loaded for what it is tied to."""
        for target, source in self._model.all_tied_weights_keys.items():
            for one, tied in ((target, source), (source, target)):
                if one in names and self._is_empty(one) and not self._is_empty(tied):
                    self._set(one, self._model.get_parameter(tied))

    def _set(self, name: str, parameter: nn.Parameter) -> None:
        path, _, parameter_name = name.rpartition(".")
        self._model.get_submodule(path)._parameters[parameter_name] = parameter


class _Files:
    """Files of a checkpoint, each opened when the first tensor of it is wanted."""

    def __init__(self, stack: ExitStack, headers: Mapping[Key, tuple[TensorEntry, Path]]) -> None:
        self._stack, self._headers = stack, headers
        self._files: dict[Path, Any] = {}

    def of(self, key: Key) -> Any:
        """Return the file that has a tensor, open."""
        shard = self._headers[key][1]
        if shard not in self._files:
            self._files[shard] = self._stack.enter_context(_opened(shard))
        return self._files[shard]


def _opened(shard: Path) -> Any:
    with reading_shard(shard):
        return safe_open(shard, framework="pt")


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
