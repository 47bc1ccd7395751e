"""GPT-2's vocabulary as the files that transformers reads, made of tiktoken's. Imports no torch.

for name, text in tokenizer_files(n_ctx=1024).items(): (folder / name).write_text(text, encoding="utf-8")
"""

from __future__ import annotations

import hashlib
import json
import math
from itertools import pairwise
from pathlib import Path

from gpt2.config.workload import TEXT_VOCABULARY
from gpt2.text import END_OF_TEXT, gpt2_encoding

SHA256 = "e35a33a0b2250c932ffdafc4c3a3552aef0cc7af7a11e9ebfddf1d2a6517371f"
"""sha256 of all tokens of GPT-2's vocabulary as spell() writes them, one per line."""

OTHER_KINDS = ("vocab.txt", "spiece.model", "tokenizer.model", "sentencepiece.bpe.model")
"""Files of WordPiece's and SentencePiece's vocabularies, which GPT-2's is none of."""


def tokenizer_files(n_ctx: int) -> dict[str, str]:
    """Return the files, by name, from which transformers' AutoTokenizer encodes as tiktoken does.

    n_ctx: longest text in tokens that it accepts without a warning. Raises gpt2.files.cache.DataError where
    the vocabulary is not available.
    """
    vocabulary = gpt2_encoding()
    last = TEXT_VOCABULARY - 1  # END_OF_TEXT, which is not a merge
    tokens = [vocabulary.decode_single_token_bytes(rank) for rank in range(last)]
    spelled = {spell(token): rank for rank, token in enumerate(tokens)} | {END_OF_TEXT: last}
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


def other_vocabulary(folder: Path) -> Path | None:
    """Return the file that shows that a transformers folder has another vocabulary than GPT-2's, or None.

    Tokens added to GPT-2's do not count as another vocabulary.
    """
    if not (folder / "config.json").is_file():
        return None
    held = [path for name in ("tokenizer.json", "vocab.json") if (path := folder / name).is_file()]
    if held:
        return None if _is_gpt2(held[0]) else held[0]
    return next((path for name in OTHER_KINDS if (path := folder / name).is_file()), None)


def _is_gpt2(path: Path) -> bool:
    try:
        content = json.loads(path.read_text(encoding="utf-8-sig"))
        ranks = content
        if path.stem == "tokenizer":
            added = {each["content"]: each["id"] for each in content.get("added_tokens", ())}
            ranks = content["model"]["vocab"] | added
        tokens = {rank: token for token, rank in ranks.items()}
        found = "\n".join(tokens[rank] for rank in range(TEXT_VOCABULARY))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # not GPT-2's in any case
        return False
    return hashlib.sha256(found.encode(errors="replace")).hexdigest() == SHA256


def merges(tokens: list[bytes]) -> list[tuple[bytes, bytes]]:
    """Return, in order of rank, the two tokens that each token of several bytes is merged from.

    tokens: all of them, by rank. The two are what encoding the token's bytes gives just before the last
    merge.
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
    """Return a token as the files write it: one printable character per byte."""
    return "".join(LETTERS[byte] for byte in token)


def _letters() -> list[str]:
    """Return the character of each byte: visible Latin-1 stands for itself, others map to U+0100 onwards."""
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = iter(range(0x100, 0x200))
    return [chr(byte if byte in visible else next(hidden)) for byte in range(0x100)]


LETTERS = _letters()
