"""Names of kernels that people can read, and what a kernel is for, by its name.

A name is a C++ signature with thousands of characters of template arguments, or a mangled one, or a compiler's list of
tuning parameters. The category of a name that no row of the table fits is `other`.
"""

import re
from functools import lru_cache

CATEGORIES = {
    "communication": "nccl|rccl|oneccl|hccl|all_?reduce|all_?gather|reduce_?scatter|all_?to_?all|multimem"
    "|nvshmem|deep_?ep",
    "copy": r"^memcpy|^memset|^copy\w*device|copy_kernel|copy_async|catarraybatchedcopy|fillfunctor|fillbuffer"
    "|copybuffer",
    "cache": r"(?:reshape|concat)_and_cache|(?:store|set|save|write|append)\w*kv|k?v_indices|page_indices|block_table"
    "|slot_map|copy_blocks",
    "rotary": "rotary|rope(?![a-z])",
    "routing": "routing|moe_align|moe_sum|topk_?gating|_topk_forward|bitmatrix|finalizekernel|expert_?map"
    "|permute_?token",
    "sampling": "(?<!up)sampl|argmax|top_?k|top_?p(?![a-z])|multinomial|radixsort|sort_|penalt",
    "attention": "fmha|flash|attention|attn|mha_|paged|(?<![a-z])mla(?![a-z])|sdpa|sage_|batch(?:decode|prefill)"
    "|split_?kv|softmax",
    "GEMM": "gemm|gemv|cutlass|cublas|cijk_|nvjet|matmul|(?<![a-z])b?mm_|wmma|mfma|dot_kernel|marlin|wvsplitk|fused_moe"
    "|xmma|splitk|tensorop|conv2d|convol|winograd|cudnn|[dw]grad",
    "norm": "norm|rsqrt|welford|(?<![a-z])bn_",
    "activation": "silu|gelu|swiglu|relu|act_and_mul|sigmoid|tanh",
}
"""The first row whose expression is in a name, in small letters, has it."""
_EXPRESSIONS = {name: re.compile(text) for name, text in CATEGORIES.items()}
_INDUCTOR = re.compile(r"triton_(?:poi|red|per|for)_fused_")
"""Kernels that a compiler made of elementwise operations and reductions, whose name lists neighbours as well."""
_OF_INDUCTOR = ("norm", "activation")
UNCATEGORIZED = "other"

_GENERIC = re.compile(
    r"(?:device_kernel|gpu_kernel_impl\w*|enable_\w+|\w*TensorIterator\w*|\w*OffsetCalculator|array|lambda|operator|const|void"
    r"|bool|char|int|long|short|unsigned|float\d?|double|half|__half\w*|__nv_\w+|__hip_\w+|BFloat16|Half|Float8\w*|OpaqueType"
    r"|true|false|std|tuple|integral_constant|KernelParams|bfloat16_t|half_t|GemmUniversal|Kernel2?|kentry|native|ul|ReduceOp"
    r"|[AB]?(?:Unary|Binary)Functor|TensorListMetadata|func_wrapper_t|\w*DataType\w*|[A-Z]|[a-z]{1,2})$"
)
"""Identifiers in template arguments that do not tell one kernel from another."""
_ANONYMOUS = re.compile(r"(?:\(anonymous namespace\)|<unnamed>)(?:::)?")
"""As compilers, and as Nsight Systems, write a namespace without a name."""
_LONGEST = 64


@lru_cache(maxsize=1 << 14)
def category_of(name: str) -> str:
    """Return what a kernel is for: a key of `CATEGORIES`, or `other`."""
    small = _short(name).lower()
    possible = _OF_INDUCTOR if _INDUCTOR.match(name) else _EXPRESSIONS
    return next((category for category in possible if _EXPRESSIONS[category].search(small)), UNCATEGORIZED)


def readable(name: str) -> str:
    """Return a name of at most 64 characters: no namespaces or arguments, and the one template argument that tells."""
    short = _short(name)
    return short if len(short) <= _LONGEST else f"{short[: _LONGEST - 1]}…"


def _short(name: str) -> str:
    if name.startswith("_Z"):
        return _demangled(name)
    if name.startswith("Cijk_"):
        tile = re.search(r"_(MT\d+x\d+x\d+)", name)
        return "_".join(name.split("_")[:4]) + (f" {tile[1]}" if tile else "")
    is_copy = name.startswith(("Memcpy", "Memset", "Copy"))
    return _shortened(name) if not is_copy and re.search(r"[(<]|::", name) else name


def _shortened(name: str) -> str:
    text = _ANONYMOUS.sub("", name)
    head, _, arguments = text.partition("<") if not text.startswith("std::enable_if<") else _without_return_type(text)
    head = head.partition("(")[0].rpartition(" ")[2]
    words = re.findall(r"[A-Za-z_]\w*(?!\w|::)", arguments.partition(">(")[0])
    told = next((word for word in words if not _GENERIC.match(word)), None)
    base = head.rpartition("::")[2] or head
    return f"{base}<{told}>" if told and told != base else base


def _without_return_type(text: str) -> tuple[str, str, str]:
    """Split a function whose return type is a template: the name is what follows `::type`."""
    return text.rpartition("::type ")[2].partition("<")


_MANGLED = re.compile(r"DF16[b_]|L[a-z]n?\d+E|S[0-9A-Z]*_|T\d*_|(?P<length>\d+)|(?P<other>.)")
"""Literals, back references and parameters of templates, which tell nothing; and the length of an identifier."""


def _demangled(name: str) -> str:
    """Return the last name of a nested one, and the first identifier of its template arguments that tells."""
    outside, inside = list[str](), list[str]()
    at, words = 2, outside
    while at < len(name):
        match = _MANGLED.match(name, at)
        assert match is not None
        at = match.end()
        if match["length"]:
            word, at = name[at : at + int(match["length"])], at + int(match["length"])
            words += [] if word.startswith("_GLOBAL_") else [word]
        elif match["other"] == "I" and outside:
            words = inside
    base = outside[-1] if outside else name
    told = next((word for word in inside if word.isidentifier() and not _GENERIC.match(word)), None)
    told = None if told in outside else told
    return f"{base}<{told}>" if told else base
