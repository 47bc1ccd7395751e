"""GPT-2's vocabulary as the files that transformers reads, made from tiktoken's. Imports no torch.

python -c "from pathlib import Path; from gpt2.tokenizer_files import write_tokenizer; write_tokenizer(Path('tok'))"
"""

from __future__ import annotations

import json
import math
from itertools import pairwise
from pathlib import Path

from gpt2.shards import replacing
from gpt2.text import gpt2_encoding

END_OF_TEXT = "<|endoftext|>"
SIZE = 50257
"""Tokens of GPT-2's vocabulary; the last one is END_OF_TEXT, no merge of others."""


def write_tokenizer(folder: Path, n_ctx: int = 1024) -> None:
    """Write what `transformers.AutoTokenizer.from_pretrained(folder)` needs to encode as tiktoken does.

    n_ctx: the longest text, in tokens, that it takes without a warning. Raises gpt2.shards.DataError where the
    vocabulary cannot be had, or a file not be written.
    """
    for name, text in tokenizer_files(n_ctx).items():
        with replacing(folder / name) as file:
            file.write(text.encode())


def tokenizer_files(n_ctx: int = 1024) -> dict[str, str]:
    """By name, the text of the files that write_tokenizer() writes. Raises gpt2.shards.DataError."""
    vocabulary = gpt2_encoding()
    tokens = [vocabulary.decode_single_token_bytes(rank) for rank in range(SIZE - 1)]
    spelled = {spell(token): rank for rank, token in enumerate(tokens)} | {END_OF_TEXT: SIZE - 1}
    pairs = (" ".join(spell(part) for part in pair) for pair in merges(tokens))
    config = {
        "tokenizer_class": "GPT2Tokenizer",
        "model_max_length": n_ctx,
        "add_prefix_space": False,
        **dict.fromkeys(("bos_token", "eos_token", "unk_token"), END_OF_TEXT),
    }
    return {
        "vocab.json": json.dumps(spelled),
        "merges.txt": "\n".join(["#version: 0.2", *pairs, ""]),
        "tokenizer_config.json": json.dumps(config, indent=2) + "\n",
    }


def merges(tokens: list[bytes]) -> list[tuple[bytes, bytes]]:
    """The two tokens that each one of more than one byte is joined of, in the order of their ranks.

    tokens: all of them, by rank. A token's parts are what encoding its bytes comes to just before the last merge.
    """
    ranks = {token: rank for rank, token in enumerate(tokens)}
    return [_last_pair(token, ranks) for token in tokens if len(token) > 1]


def _last_pair(token: bytes, ranks: dict[bytes, int]) -> tuple[bytes, bytes]:
    parts = [token[at : at + 1] for at in range(len(token))]
    while len(parts) > 2:
        joined = [ranks.get(left + right, math.inf) for left, right in pairwise(parts)]
        at = joined.index(min(joined))
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    first, second = parts
    return first, second


def spell(token: bytes) -> str:
    """A token as the files write it: one printable character for each byte."""
    return "".join(LETTERS[byte] for byte in token)


def _letters() -> list[str]:
    """By byte: what is visible in Latin-1 stands for itself, the others for what follows Latin-1, in their order."""
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = iter(range(0x100, 0x200))
    return [chr(byte if byte in visible else next(hidden)) for byte in range(0x100)]


LETTERS = _letters()
