"""GGUF files of architectures that are not read here: transformers dequantises them, for its own configuration.

The checkpoint that a file was made from gives configuration and tokenizer. Each tensor that transformers reads is held
against the checkpoint's, so that one which is read in another order, or left out, is no truth.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.base.progress import quiet_transformers
from harness.errors import Code, HarnessError
from harness.extensions.llamacpp.gguf.model import GGUFModel
from harness.extensions.llamacpp.gguf.weights import gguf_package
from harness.formats.checkpoint.checkpoint import Checkpoint
from harness.formats.checkpoint.converted import copy_tokenizer

if TYPE_CHECKING:
    import torch

_FARTHEST = 0.5
"""Relative distance of a tensor from the checkpoint's, beyond which it is another one: types of two bits reach 0.4."""


def write_by_transformers(model: GGUFModel, folder: Path, hf: Checkpoint) -> None:
    """Write the weights of a GGUF file as a checkpoint of the model in `hf`, in float32.

    Raises:
        HarnessError: UNSUPPORTED_GGUF: transformers does not read it; GGUF_DIFFERS: a tensor is not the checkpoint's;
            PACKAGE_MISSING.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    gguf_package()
    options: dict[str, Any] = {"dtype": torch.float32, "local_files_only": True}
    with quiet_transformers():
        original = AutoModelForCausalLM.from_pretrained(hf.folder, **options)
        options["config"] = AutoConfig.from_pretrained(hf.folder, local_files_only=True)
        try:
            read = AutoModelForCausalLM.from_pretrained(model.path.parent, gguf_file=model.path.name, **options)
        except Exception as error:  # transformers raises ValueError, NotImplementedError, KeyError, RuntimeError, ...
            reason = str(error).strip().splitlines() or [type(error).__name__]
            raise HarnessError(
                Code.UNSUPPORTED_GGUF,
                f"transformers does not read the file: {reason[0]}",
                where=model.path,
                actual=model.metadata.architecture,
                hint="a file in float32 needs no reader: --model CHECKPOINT --engine-option gguf=FILE",
            ) from error
        _check_near(model, original.state_dict(), read.state_dict())
        original.load_state_dict(read.state_dict())
        original.save_pretrained(folder)
    copy_tokenizer(hf.folder, folder)


def _check_near(model: GGUFModel, original: "Mapping[str, torch.Tensor]", read: "Mapping[str, torch.Tensor]") -> None:
    for name, expected in original.items():
        difference = float((read[name] - expected).norm()) / max(float(expected.norm()), 1e-30)
        if not difference <= _FARTHEST:
            raise HarnessError(
                Code.GGUF_DIFFERS,
                f"{name} is not the checkpoint's, as transformers reads the file",
                where=model.path,
                expected=f"a relative distance of at most {_FARTHEST}",
                actual=f"{difference:.3g}",
                hint="is it made from this checkpoint? transformers may read this architecture otherwise",
            )
