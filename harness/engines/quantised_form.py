"""Models that another package quantises, loaded by transformers without that package's bars and warnings."""

import io
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import Any

import torch

from harness.base.progress import quiet_transformers
from harness.errors import Code, HarnessError
from harness.formats.checkpoint import Checkpoint
from harness.formats.checkpoint.converted import served_folder
from harness.oracle.model import HFModel


def load_quantised(folder: Path, *, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    """Return transformers' model of a checkpoint in a dtype, quantised as the options or the checkpoint say."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, local_files_only=True, trust_remote_code=False, **options
    )
    return model.eval().requires_grad_(False)


def served_model(folder: Path, dtype: torch.dtype, device: str) -> HFModel:
    """Load what a folder was dequantised from as transformers does: with its packed weights.

    Args:
        folder: as `resolve` returned it for a quantised checkpoint.
        dtype: of what is not quantised.
        device: where it runs.

    Raises:
        HarnessError: QUANTISER_REFUSED.
    """
    where = served_folder(folder)
    with quantising(str(where), "install the package that it names, or --engine-option weights=dequantised"):
        model = load_quantised(where, dtype=dtype).to(device)
    return HFModel(model=model, checkpoint=Checkpoint(folder), dtype=dtype, device=torch.device(device))


@contextmanager
def quantising(
    where: str, hint: str = "leave the type out; docs/quant.md names the versions that were tried"
) -> Iterator[None]:
    """Silence the quantisers, and turn what they raise into an error that says where.

    Raises:
        HarnessError: QUANTISER_REFUSED.
    """
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)  # torchao says at import which of its CUDA libraries are not there
    try:
        with quiet_transformers(), warnings.catch_warnings(), redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    except HarnessError:
        raise
    except Exception as error:  # of torchao, compressed-tensors or transformers: assertions, KeyError, RuntimeError
        message = " ".join(str(error).split())[:300]
        raise HarnessError(
            Code.QUANTISER_REFUSED,
            f"the model cannot be quantised or run in this type: {type(error).__name__}: {message}",
            where=where,
            hint=hint,
        ) from error
    finally:
        logging.disable(before)
