"""Edits in the field's terms: what an expression of HF's code is for, where common names say it.

The names of a file of transformers are conventions: a gate is called a gate, and what a layer adds back a residual. The
expression, its file and its line stand beside the term in every case.
"""

import re

from harness.judge.explain.edits.operators import Edit

_LEFT_OUT = (
    (r"sigmoid\(.*gate|gate\w*\.sigmoid|gate_score", "the gate is not applied"),
    (r"\bresidual\b", "the residual is not added"),
    (r"\blayer_?norm|_norm\(|\bnorm\w*\(|norm_\w+\(", "the norm is skipped"),
    (r"^ \+ \(?rotate_half\(.*\bsin", "the rotary table's sine is left out: only the cosine is applied"),
    (r"\* \(?cos\w*\)? \+ $", "the rotary table's cosine is left out: only the sine is applied"),
    (r"rotate_half|apply_rotary|apply_rotary_emb", "rotary is not applied"),
    (r"softcap|soft_cap|\.tanh\(|torch\.tanh\(", "the soft cap is left out"),
    (r"residual_multiplier|residual_scale|resid\w*_scal", "the multiplier of the branch is left out"),
    (r"routed_scaling_factor|router_scaling_factor|route_scale", "the routed scaling factor is left out"),
    (r"norm_topk_prob|/=? *\w*\.sum\(|/ \(\w+\.sum\(|denominator", "the weights are not normalised to a sum of one"),
    (r"correction_bias", "the router's correction is left out"),
    (r"logit_scale|logits_scaling", "the scale of the logits is left out"),
    (r"embed\w*_(scale|multiplier)|normalizer|embed_scale", "the embedding is not scaled"),
    (r"multiplier|scal(e|ing)\b|_scale\w*|alpha", "a scale is left out"),
    (r"\bsoftmax", "no softmax is applied"),
    (r"\bsoftplus", "no softplus is applied"),
    (r"\b(silu|gelu|relu|act\w*)\b.*\(", "no activation is applied"),
    (r"\bsigmoid", "no sigmoid is applied"),
    (r"\bclamp|\bclip", "values are not cut off at the limit"),
    (r"conv1d|causal_conv", "the convolution is left out"),
    (r"\bdt_bias|\bbias\b", "the bias is left out"),
    (r"\beps|epsilon", "eps is left out"),
    (r"\.mean\(", "the mean is not taken"),
    (r"rsqrt|sqrt", "no root is taken"),
    (r"shared_expert", "the shared experts are not added"),
    (r"score_mask|group_mask", "the groups of the experts are left out"),
    (r"\bmask", "the mask is not applied"),
    (r"\bweight\b", "the weight is not applied"),
    (r"gate", "the product with the gate is missing"),
    (r"up_proj|\bup\b", "the product with up is missing"),
    (r"\bD\b", "the skip connection of the scan is left out"),
    (r"\bexp\(", "no exponential is taken"),
)  # fmt: skip
"""Expressions that an edit loses, and what is missing then; the first that fits is said."""
_TWICE = (
    (r"norm", "the norm is applied twice"),
    (r"softmax", "a softmax of the softmax: it is applied twice"),
    (r"sigmoid", "the sigmoid is applied twice"),
    (r"act\w*\(|silu|gelu|relu", "the activation is applied twice"),
    (r"rotary|rotate", "rotary is applied twice"),
    (r"scal|multiplier|alpha", "a scale is applied twice"),
)
_COMPUTED = (
    (r"act\w*\(|silu|gelu|relu", "the activation"),
    (r"softmax", "the softmax"),
    (r"norm\w*\(", "the norm"),
    (r"sigmoid", "the sigmoid"),
    (r"rsqrt\(.*var", "the norm's variance"),
)
"""What a call is, for one whose input and output are in another dtype."""
_FUNCTIONS = {
    "silu": "SiLU",
    "approximate='tanh'": "GELU (tanh)",
    "gelu": "GELU",
    "1.702": "quick GELU",
    ".square()": "squared ReLU",
    "relu": "ReLU",
    "sigmoid": "sigmoid",
    "tanh": "tanh",
}
_EXCHANGED = (
    (r"gate.*\bup|\bup.*gate", "gate and up are swapped"),
    (r"rotate|-x2|x1", "rotary turns backwards (sign of the sine)"),
    (r"query.*key|\bq\b.*\bk\b", "queries and keys are swapped"),
    (r"key.*value|\bk\b.*\bv\b", "keys and values are swapped"),
    (r"\bB\b.*\bC\b", "B and C are swapped"),
    (r"\bcos\b.*\bsin\b", "cosine and sine of the rotary table are exchanged"),
)


_OF_GATED_PRODUCTS = (
    (r"is `\S*act\w*\([^ ]*up[^ ]*\) \* .*gate.*`", "gate and up are swapped: the activation is applied to up"),
    (r"is `\S*act\w*\(.*gate.* \* .*up.*\)`", "the activation is applied to the product"),
    (r"is `.*act\w*\(.*gate.*\) \+ .*up.*`", "act(gate) and up are added instead of multiplied"),
    (r"is `[^*/]*act[^*/]*`", "the product with up is missing"),
    (r"is `[^*/]*up[^*/]*`", "the gate is missing"),
)
"""What becomes of act(gate) * up."""
_BRANCHES = (
    (r"norm_topk|norm_top|normalize_expert|renormal", "the weights are not normalised to a sum of one",
     "the weights are normalised to a sum of one, as by a softmax over the chosen experts alone"),
)  # fmt: skip
"""Settings, and what a model does that has them and should not, or lacks them."""


_OF_SUMS = (
    (r"is `(?P<first>.+)`", "{lost} is not added to {first}"),
    (r"is `\((?P<first>.+)\) \+ 2 \* \((?P<second>.+)\)`", "{second} is added twice"),
    (r"is `2 \* \((?P<second>.+)\) \+ \((?P<first>.+)\)`", "{second} is added twice"),
    (r"is `\((?P<first>.+)\) \+ (?P<factor>\S+) \* \((?P<second>.+)\)`", "{second} is added with a factor of {factor}"),
    (r"is `(?P<factor>\S+) \* \((?P<second>.+)\) \+ \((?P<first>.+)\)`", "{second} is added with a factor of {factor}"),
    (r"is `(?P<first>[^-]+) - (?P<second>[^-]+)`", "{second} is subtracted"),
)
"""What becomes of a sum of two terms."""
_TERMS = (
    (r"\bresidual\b", "the residual", "the branch"),
    (r"shared_expert", "the output of the shared expert", "the output of the routed experts"),
)
"""What the terms of a sum are: one by its name, and then the other."""


def term_of(edit: Edit, holder: object = None) -> str | None:
    """Return what an edit leaves out, exchanges or repeats, in one term; None if its expression has none.

    Args:
        edit: the change.
        holder: module that runs the code, whose settings say which way a branch goes.
    """
    if edit.new == "takes the other branch":
        optional = re.fullmatch(r"if (\w+) is not None", edit.old)
        return _branch(edit.old, holder) if optional is None else _first(_LEFT_OUT, optional[1])
    if (coarse := re.fullmatch(r"has `residual`( and `\w+`)? rounded to (\w+)", edit.new)) is not None:
        return f"the addition is of values in {coarse[2]}" if coarse[1] else f"the residual is in {coarse[2]}"
    if edit.old.startswith("residual =") and edit.new == "is left out":
        return "the residual is the one of the sum before"
    if (coarse := re.fullmatch(r"is computed in (\w+)", edit.new)) is not None:
        what = next((what for pattern, what in _COMPUTED if re.search(pattern, edit.old)), None)
        return what and f"{what} is computed in {coarse[1]}"
    if edit.new.startswith("is rounded to "):
        return None
    if edit.new == "is applied twice":
        return _first(_TWICE, edit.old)
    if edit.old.startswith("residual =") and edit.new.startswith("comes after") and "norm" in edit.new:
        return "the residual is taken after the norm, or the norm overwrites it in place"
    if (edit.new == "is zero" and "mean = " in edit.old) or (
        edit.old.endswith("- mean") and edit.new.startswith("is `")
    ):
        return "the mean is not subtracted"
    if edit.new in ("is left out", "is zero"):
        return _first(_LEFT_OUT, edit.old)
    if (changed := _of_sum(edit)) is not None:
        return changed
    if edit.new == "is in the other order" or (edit.new.startswith("is `(") and "=" in edit.new):
        return _first(_EXCHANGED, edit.old)
    if "softmax(" in edit.old and edit.new.startswith("is `torch.sigmoid("):
        return "the scores are made by a sigmoid instead of a softmax"
    if (summed := re.match(r"(\w*(?:weight|top|score|prob)\w*)\.sum\(", edit.old)) and edit.new == f"is `{summed[1]}`":
        return "the router's weights are all one: each is divided by itself"
    if re.fullmatch(r"is `(\w+) / \1\.sum\(-1, keepdim=True\)`", edit.new):
        return "the weights are normalised to a sum of one, as by a softmax over the chosen experts alone"
    if "softmax" in edit.old and ".gather(-1, " in edit.new:
        return "the weights are not normalised to a sum of one: the softmax runs over all experts"
    if edit.new in ("is all one", "is in another order: reversed") and re.match(
        r"\w*(weight|top|score|prob)", edit.old
    ):
        return f"the router's weights are {edit.new.removeprefix('is ')}"
    if re.search(r"act\w*\(.*gate.*\) \* .*up", edit.old):
        for pattern, term in _OF_GATED_PRODUCTS:
            if re.fullmatch(pattern, edit.new):
                return term
    new = edit.new.removeprefix("is ").removeprefix("always ").strip("`")
    if "rotate_half(" in edit.old and new == edit.old.replace(" + ", " - "):
        return "rotary turns backwards (sign of the sine)"
    if re.search(r"act\w*\(", edit.old) and new.startswith(("torch.", "x *")):
        return next((f"the activation is {name}" for sign, name in _FUNCTIONS.items() if sign in new), None)
    if new in edit.old and len(new) < len(edit.old):
        return _first(_LEFT_OUT, edit.old.replace(new, "", 1))
    return None


def _of_sum(edit: Edit) -> str | None:
    sides = edit.old.split(" + ")
    for name, term, rest in _TERMS:
        called = {side: term if re.search(name, side) else rest for side in sides}
        if len(sides) != 2 or len(set(called.values())) != 2:
            continue
        for pattern, said in _OF_SUMS:
            match = re.fullmatch(pattern, edit.new)
            parts = {} if match is None else match.groupdict()
            factor = parts.pop("factor", "")
            if parts and set(parts.values()) <= called.keys():
                names = {key: called[side] for key, side in parts.items()}
                lost = next(called[side] for side in sides if side != parts["first"])
                return said.format(**names, lost=lost, factor=factor)
    return None


def _branch(test: str, holder: object) -> str | None:
    """Return what taking the other branch means, where the setting is known and so is its value."""
    name = re.fullmatch(r"if self\.(\w+)", test)
    value = None if name is None else getattr(holder, name[1], None)
    if value is None:
        return None
    return next((lost if value else added for pattern, lost, added in _BRANCHES if re.search(pattern, test)), None)


def _first(terms: tuple[tuple[str, str], ...], text: str) -> str | None:
    return next((term for pattern, term in terms if re.search(pattern, text)), None)
