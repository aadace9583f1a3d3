"""The HF model of a plan."""

import torch

from harness.oracle.lora import load_adapted
from harness.oracle.model import HFModel
from harness.plan import Plan


def planned_model(plan: Plan) -> HFModel:
    """Load the model that says what is right: in the plan's dtype, on its device, with its adapter.

    Raises:
        HarnessError: as `load_adapted`.
    """
    dtype = getattr(torch, plan.case.dtype)
    hf = load_adapted(
        plan.checkpoint,
        dtype=dtype,
        device=plan.case.device,
        lora=plan.case.lora,
        others=plan.case.other_loras,
        mtp=plan.case.mtp,
    )
    hf.has_images = any(prompt.inputs for prompt in plan.prompts)
    return hf
