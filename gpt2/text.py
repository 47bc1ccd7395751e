"""Text to token shards, with GPT-2's own vocabulary. Imports no torch."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from gpt2.shards import HEADER_BYTES, TOKEN, DataError, cache_dir, replacing, shard_header

if TYPE_CHECKING:
    import tiktoken

# A single newline between two words is a token of its own in GPT-2's vocabulary, so text may be cut after it
# without changing one token; anywhere else a cut could split what the tokenizer would have joined.
CUT = re.compile(r"(?<=\S)\n(?=\S)")


def tokenise(path: Path, piece_chars: int = 1 << 20) -> Path:
    """Encode a UTF-8 text file with GPT-2's vocabulary; returns the cached shard, in llm.c's format.

    The shard is named by the text's sha256. Text is read and encoded piece by piece, never held whole.
    Special tokens in the text are encoded as ordinary text. Raises DataError where the text is not UTF-8 or
    the vocabulary cannot be had.
    """
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    target = cache_dir() / "tokens" / f"{digest}-gpt2.bin"
    if target.exists():
        return target
    encode = gpt2_encoding().encode_ordinary
    with replacing(target) as file:
        file.write(bytes(HEADER_BYTES))
        count = 0
        for text in pieces(path, piece_chars):
            ids = np.array(encode(text), dtype=TOKEN)
            file.write(ids.tobytes())
            count += len(ids)
        if not count:
            raise DataError(f"{path} holds no text")
        file.seek(0)
        file.write(shard_header(count))
    return target


def encoded(prompt: str) -> list[int]:
    """A prompt as GPT-2's tokens; an empty one is <|endoftext|>, from which GPT-2 begins without a prompt.

    <|endoftext|> in a prompt is that token. In a corpus, whose text is somebody else's, it is ordinary text: see
    tokenise(). Raises DataError where the vocabulary cannot be had.
    """
    encoding = gpt2_encoding()
    return encoding.encode(prompt, allowed_special="all") or [encoding.eot_token]


def pieces(path: Path, piece_chars: int) -> Iterator[str]:
    """A text file in parts of about so many characters, cut where no token is. Raises DataError."""
    held = ""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            while chunk := file.read(piece_chars):
                held += chunk
                cuts = [match.end() for match in CUT.finditer(held)]
                if cuts:
                    yield held[: cuts[-1]]
                    held = held[cuts[-1] :]
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text ({error.reason} at byte {error.start})") from None
    if held:
        yield held


def gpt2_encoding() -> tiktoken.Encoding:
    """GPT-2's vocabulary, by tiktoken. Raises DataError where it cannot be had."""
    import tiktoken  # here, not above: only text needs it, and it takes a while to load

    try:
        return tiktoken.get_encoding("gpt2")
    except (OSError, ValueError) as error:  # requests' errors are OSErrors; ValueError is a damaged cache
        raise DataError(
            "tiktoken's GPT-2 vocabulary is not cached and could not be downloaded "
            f"({type(error).__name__}); set TIKTOKEN_CACHE_DIR to tiktoken's cache folder of a machine that has it, "
            "or give tokens (.bin files of nanoGPT or llm.c) in place of text"
        ) from None
