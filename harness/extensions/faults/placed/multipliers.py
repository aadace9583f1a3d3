"""Factors and soft caps that are left out: of embeddings, residuals, logits and routed experts."""

from torch import nn

from harness.extensions.faults.placed.plan import PlacedPlan, number_in, places, set_number

EMBEDDING = ("embedding_multiplier", "embed_scale", "embedding_scale", "normalizer", "scale_emb")
RESIDUAL = ("residual_multiplier", "residual_scale")
LOGITS = ("logits_scaling", "logit_scale", "logits_mup_width_multiplier")
LOGITS_CAP = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
ROUTED = ("routed_scaling_factor", "router_scaling_factor", "route_scale")
NO_CAP = 1e4


def embedding(model: nn.Module) -> list[PlacedPlan]:
    """The factor of the embeddings is left out."""
    return in_modules(model, EMBEDDING, 1.0) + in_config(model, EMBEDDING, 1.0, site=model.base_model_prefix)


def residual(model: nn.Module) -> list[PlacedPlan]:
    """The factor with which one layer adds to the residual stream is left out."""
    return in_modules(model, RESIDUAL, 1.0)


def logits(model: nn.Module) -> list[PlacedPlan]:
    """The factor of the logits is left out."""
    return in_config(model, LOGITS, 1.0, site="")


def logits_cap(model: nn.Module) -> list[PlacedPlan]:
    """The soft cap of the logits is left out."""
    return in_config(model, LOGITS_CAP, NO_CAP, site="")


def routed(model: nn.Module) -> list[PlacedPlan]:
    """The factor of the routed experts is left out in one layer."""
    return in_modules(model, ROUTED, 1.0)


def in_modules(model: nn.Module, names: tuple[str, ...], value: float) -> list[PlacedPlan]:
    """Plan to set a number to `value` in a module that holds it."""
    return places(
        model,
        lambda module: number_in(module, names),
        lambda module: set_number(module, number_in(module, names), value),
    )


def in_config(model: nn.Module, names: tuple[str, ...], value: float, *, site: str) -> list[PlacedPlan]:
    """Plan to set a number that each forward reads from the configuration, or that the model has copied from there."""

    def plan(name: str) -> PlacedPlan:
        holders = [holder for holder in (model.config, model) if vars(holder).get(name) is not None]
        return PlacedPlan(sites=(site,), inject=lambda: [setattr(holder, name, value) for holder in holders])

    return [plan(name) for name in names if vars(model.config).get(name) is not None]
