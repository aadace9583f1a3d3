"""One wrong attention for each optional keyword, in every form that an option can name."""

from functools import partial

import torch

from .full_attention import FullAttention


class LongWindow(FullAttention):
    def attend(self, q, k_cache, v_cache, *, window=None, **rest):
        return super().attend(q, k_cache, v_cache, window=None if window is None else window + 1, **rest)


class Wrong:
    """Calls `FullAttention` with one of the keywords changed: a callable object, and `attend` as a bound method."""

    def __init__(self, broken: str = "") -> None:
        self.broken = broken

    def __call__(
        self, q, k_cache, v_cache, *, block_tables, query_lens, context_lens,
        scale=None, window=None, softcap=None, num_splits=1,
    ):  # fmt: skip
        options = {"scale": scale, "window": window, "softcap": softcap, "num_splits": num_splits}
        is_given = {"scale": scale, "window": window, "softcap": softcap, "num_splits": num_splits != 1}
        lens = {"block_tables": block_tables, "query_lens": query_lens, "context_lens": context_lens}
        if self.broken == "num_splits" and is_given["num_splits"]:
            return FullAttention().attend(q, k_cache, v_cache, **lens, **options) / torch.tensor(num_splits).to(q.dtype)
        if self.broken == "window" and window is not None:
            options["window"] = window + 1
        if self.broken in ("scale", "softcap"):
            options[self.broken] = None
        return FullAttention().attend(q, k_cache, v_cache, **lens, **options)

    def attend_to(
        self, q, k_cache, v_cache, *, block_tables, query_lens, context_lens,
        scale=None, window=None, softcap=None, num_splits=1,
    ):  # fmt: skip
        lens = {"block_tables": block_tables, "query_lens": query_lens, "context_lens": context_lens}
        options = {"scale": scale, "window": window, "softcap": softcap, "num_splits": num_splits}
        return self(q, k_cache, v_cache, **lens, **options)


def function_of(broken):
    wrong = Wrong(broken)

    def attend(
        q, k_cache, v_cache, *, block_tables, query_lens, context_lens,
        scale=None, window=None, softcap=None, num_splits=1,
    ):  # fmt: skip
        lens = {"block_tables": block_tables, "query_lens": query_lens, "context_lens": context_lens}
        options = {"scale": scale, "window": window, "softcap": softcap, "num_splits": num_splits}
        return wrong(q, k_cache, v_cache, **lens, **options)

    attend.__qualname__ = f"function_{broken}"
    return attend


def class_of(broken):
    class Attention(Wrong):
        attend = Wrong.attend_to

        def __init__(self):
            super().__init__(broken)

    Attention.__qualname__ = f"class_{broken}"
    return Attention


def with_broken(
    broken, q, k_cache, v_cache, *, block_tables, query_lens, context_lens,
    scale=None, window=None, softcap=None, num_splits=1,
):  # fmt: skip
    lens = {"block_tables": block_tables, "query_lens": query_lens, "context_lens": context_lens}
    options = {"scale": scale, "window": window, "softcap": softcap, "num_splits": num_splits}
    return Wrong(broken)(q, k_cache, v_cache, **lens, **options)


def hidden_parameters(q, k_cache, v_cache, **rest):
    return LongWindow().attend(q, k_cache, v_cache, **rest)


KEYWORDS = {"scale": "scale", "window": "window", "softcap": "soft cap", "num_splits": "split"}
"""By optional parameter: the kind of batches that needs it."""

for name in ("", *KEYWORDS):  # a program imports them by name
    globals()[f"function_{name}"] = function_of(name)
    globals()[f"class_{name}"] = class_of(name)
    globals()[f"object_{name}"] = Wrong(name)
    globals()[f"method_{name}"] = Wrong(name).attend_to
    globals()[f"partial_{name}"] = partial(with_broken, name)
FORMS = ("function", "class", "object", "method", "partial")
