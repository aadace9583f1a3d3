"""Where masks of xgrammar allow or forbid other tokens than JSON and the schema do. No harness.

python reports/cpu/xgrammar_masks.py    # xgrammar 0.2.8, as vLLM 0.32 has it; no model
"""

import json

import numpy as np
import xgrammar as xgr
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
backend = Tokenizer(models.BPE(vocab={letter: at for at, letter in enumerate(alphabet)}, merges=[]))
backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
backend.decoder = decoders.ByteLevel()
backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in ("<|begin|>", "<|end|>")])
TOKENIZER = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<|begin|>", eos_token="<|end|>")
COMPILER = xgr.GrammarCompiler(xgr.TokenizerInfo.from_huggingface(TOKENIZER, vocab_size=len(TOKENIZER)))


def byte_token(value):
    """Return the token of one byte."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return TOKENIZER.convert_tokens_to_ids(chr(value) if value in printable else chr(256 + others.index(value)))


def allowed(schema, answer):
    """Return the tokens that may follow the bytes of an answer."""
    matcher = xgr.GrammarMatcher(COMPILER.compile_json_schema(json.dumps(schema), any_whitespace=False))
    for byte in answer:
        assert matcher.accept_token(byte_token(byte)), f"{bytes([byte])} is refused"
    mask = xgr.allocate_token_bitmask(1, len(TOKENIZER))
    xgr.reset_token_bitmask(mask)
    matcher.fill_next_token_bitmask(mask)
    return set(np.flatnonzero(np.unpackbits(mask.numpy().view(np.uint8), bitorder="little")[: len(TOKENIZER)]).tolist())


def of(kind):
    """Return a schema of an object with one property `a`."""
    return {"type": "object", "properties": {"a": {"type": kind}}, "required": ["a"], "additionalProperties": False}


if __name__ == "__main__":
    in_string = allowed(of("string"), b'{"a": "')
    print("in a string, the special token <|begin|> is allowed:", TOKENIZER.bos_token_id in in_string)
    after = allowed(of("string"), b'{"a": "\xed')
    wrong = [byte for byte in range(0xA0, 0xC0) if byte_token(byte) in after]
    print(f"after byte ED, {len(wrong)} of the 32 bytes A0 to BF are allowed, which make a surrogate and no UTF-8")
    print(
        "after -, the digit 0 of the integer -0 is allowed:", byte_token(ord("0")) in allowed(of("integer"), b'{"a": -')
    )
    print(
        "after -, the digit 0 of the number -0 is allowed: ", byte_token(ord("0")) in allowed(of("number"), b'{"a": -')
    )
