"""A tokenizer of bytes and of some tokens that hold several characters of JSON."""

import pytest


@pytest.fixture(scope="session")
def json_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("json")
    write_json_tokenizer(folder)
    (folder / "config.json").write_text('{"model_type": "llama"}')
    return folder


def write_json_tokenizer(folder):
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [('"', ":"), ('"', ","), ('"', "}"), ("{", '"'), ("t", "r"), ("\\", '"'), ("1", "2"), ("\u0120", '"')]
    merges += [("\u0120", "\u0120"), ("e", "}"), ("]", "}"), ("\u00c3", "\u00a9"), ("\\", "u"), ("a", '"')]
    vocab = {symbol: at for at, symbol in enumerate([*alphabet, *map("".join, merges)])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|begin|>", "<|end|>", "<|call|>"]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=special[0], eos_token=special[1], clean_up_tokenization_spaces=False
    )
    wrapped.save_pretrained(folder)
