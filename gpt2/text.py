"""Tokenise text with GPT-2's vocabulary, and text files into token shards. Imports no torch.

ids = encode("To be, or not to be")               # all text of this package is tokenised by this function
shard = tokenise(Path("input.txt"))               # the file's tokens, cached

A long text is cut into parts that are encoded separately. Cuts are made where the tokenizer's own pattern
always separates, so that no token changes: before white space followed by a visible character, and between a
letter or digit and a punctuation mark. A stretch of more than LONGEST characters without such a place, such
as a million letters, is cut every LONGEST characters from its beginning. Cuts depend on the text alone, not
on how it is read.
"""

from __future__ import annotations

import codecs
import hashlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING

import numpy as np

from gpt2.files.atomic import atomic_write
from gpt2.files.cache import WRITABLE, DataError, cache_dir, cached_facts, samples
from gpt2.files.listing import POINTER, kind_of
from gpt2.files.shard_format import HEADER_BYTES, TOKEN, is_whole, shard_header

if TYPE_CHECKING:
    import tiktoken

END_OF_TEXT = "<|endoftext|>"
CONTROL, FEWEST, CONTROL_SHARE = bytes({*range(32)} - {*b"\b\t\n\v\f\r\x1b"}), 16, 0.75
"""Control characters that are rare in text, NUL among them.

A sample of at least FEWEST bytes, of which fewer than CONTROL_SHARE are other bytes, is not text. Latin and
Cyrillic letters in UTF-16 are valid UTF-8 with one such character each.
"""
HOLE = "\0" * 4096
"""A part of a file that was never written."""
POINTER_BYTES = 1024
"""Upper limit for the size of a git LFS pointer."""
TOKENISED = 2
"""Version of the rules for cutting texts; cached tokens of other versions are not used."""
LONGEST = 1 << 18
"""Characters encoded at most at once; tiktoken panics at a million blanks before a word, not at 600,000."""
BLANK, VISIBLE = r"[^\S\x1c-\x1f]", r"[\S\x1c-\x1f]"
"""White space as tiktoken defines it, and all else; Python also counts ASCII's four separators as it."""
WORD = r"[0-9A-Za-z\u3041-\u3096\u30a1-\u30fa\u4e00-\u9fa5\uac00-\ud7a3]"
"""Letters and digits in every version of Unicode, scripts without spaces among them; not all."""
MARK = r"[!-/:-@\[-`{-~\u3001-\u3003\u3008-\u3011\uff01\uff0c\uff1a\uff1b\uff1f]"
"""Most of the punctuation marks in every version of Unicode."""
LAST_CUT = re.compile(rf"(?s:.+)(?:(?={BLANK}{VISIBLE})|(?<={WORD})(?={MARK}))")
"""Matches up to the last place where a cut changes no token."""


class TokeniseError(DataError):
    """A text that the tokenizer fails on."""


def tokenise(path: Path, piece_chars: int = 1 << 20) -> Path:
    """Encode a UTF-8 text file with GPT-2's vocabulary; returns the cached shard, in llm.c's format.

    The shard is named by the text's sha256. Text is read and encoded piece by piece. A byte order mark at the
    beginning is ignored. Special tokens in the text are encoded as ordinary text. Raises DataError where the
    text is not UTF-8 or blank, or the vocabulary is not available.
    """
    digest = _digest(path)
    target = cache_dir() / "tokens" / f"{digest}-gpt2-{TOKENISED}.bin"
    if target.exists() and is_whole(target):
        return target
    with atomic_write(target, DataError, WRITABLE) as file:
        file.write(bytes(HEADER_BYTES))
        count, blank = 0, True
        for text in pieces(path, piece_chars):
            blank = blank and text.isspace()
            ids = encode(text, str(path))
            file.write(ids.tobytes())
            count += len(ids)
        if blank:
            raise DataError(f"{path} holds no text")
        if _digest(path) != digest:
            raise DataError(f"{path} changed while it was read; run again once nothing writes to it")
        file.seek(0)
        file.write(shard_header(count))
    return target


def _digest(path: Path) -> str:
    """Return the sha256 of a text without its byte order mark."""
    with path.open("rb") as file:
        file.seek(len(codecs.BOM_UTF8) if file.read(len(codecs.BOM_UTF8)) == codecs.BOM_UTF8 else 0)
        return hashlib.file_digest(file, "sha256").hexdigest()


def end_of_text_written(path: Path) -> str | None:
    """Return a warning where a text file holds <|endoftext|> as text, as between documents; else None."""
    facts = cached_facts([path], "end of text", lambda: {"count": _count(path, END_OF_TEXT.encode())})
    if not (count := facts["count"]):
        return None
    lines = path.name.lower().endswith((".json", ".jsonl"))
    parted = ": each line is one" if lines else "; give these as lines of JSON (.jsonl) to have them parted"
    return (
        f"{path.name} holds {END_OF_TEXT} {count:,} times, which is ordinary text there and parts no "
        f"documents{parted}"
    )


def _count(path: Path, what: bytes) -> int:
    with path.open("rb") as file:
        held, count = b"", 0
        while chunk := file.read(1 << 24):
            held += chunk
            count += held.count(what)
            held = held[-len(what) + 1 :]  # too short to contain it
    return count


def encode(text: str, where: str = "the text") -> np.ndarray:
    """Return a text's tokens, uint16, as tiktoken gives them except where a long stretch is cut (see above).

    Special tokens in the text are ordinary text; an unpaired surrogate becomes U+FFFD. Raises TokeniseError,
    whose message begins with `where`, or DataError where the vocabulary is not available.
    """
    encoding = gpt2_encoding()
    try:
        found = [encoding.encode_to_numpy(part, disallowed_special=()) for part in _parts(text)]
    except UnicodeEncodeError:  # an unpaired surrogate, possible in JSON; replaced as tiktoken itself does
        return encode(text.encode("utf-16", "surrogatepass").decode("utf-16", "replace"), where)
    except (KeyboardInterrupt, SystemExit, GeneratorExit, MemoryError):
        raise
    except BaseException as error:  # a panic in tiktoken is not an Exception
        said = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise TokeniseError(f"{where} cannot be tokenised (tiktoken: {said})") from None
    return np.concatenate(found, dtype=TOKEN, casting="unsafe")


def encoded(prompt: str) -> list[int]:
    """Return a prompt's tokens; an empty one becomes <|endoftext|>, from which GPT-2 generates freely.

    <|endoftext|> in a prompt is that token. In a corpus it is ordinary text (see encode()). Raises as
    encode() does.
    """
    first, *others = (encode(part).tolist() for part in prompt.split(END_OF_TEXT))
    tokens = first + [token for part in others for token in (gpt2_encoding().eot_token, *part)]
    return tokens or [gpt2_encoding().eot_token]


def _parts(text: str) -> Iterator[str]:
    """Cut a text into parts of at most LONGEST characters."""
    start = 0
    while len(text) - start > LONGEST:
        found = LAST_CUT.match(text, start, start + LONGEST + 1)
        end = found.end() if found else start + LONGEST
        yield text[start:end]
        start = end
    yield text[start:]


def pieces(path: Path, piece_chars: int) -> Iterator[str]:
    """Yield a text file in pieces of about `piece_chars` characters that can be tokenised separately.

    At most two pieces and LONGEST characters are in memory. Raises DataError where the file is not UTF-8
    text.
    """
    held = ""
    with path.open("rb") as file:
        head = file.read(64)
    if head.startswith(POINTER) and path.stat().st_size < POINTER_BYTES:
        raise DataError(f"{path} is {kind_of(head)}")
    if any(
        len(part) >= FEWEST and len(part.translate(None, CONTROL)) < CONTROL_SHARE * len(part)
        for part in samples(path)
    ):
        raise _no_text(path, head)
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            while chunk := file.read(piece_chars):
                held += chunk
                if HOLE in held:
                    raise _no_text(path, head)
                if len(chunk) < piece_chars:  # the last one
                    break
                found = LAST_CUT.match(held)
                # Without a place so far: the next chunk may add one.
                end = found.end() if found else (len(held) - 1) // LONGEST * LONGEST
                if end:
                    yield held[:end]
                    held = held[end:]
    except UnicodeDecodeError as error:
        with path.open("rb") as file:
            place = _first_undecodable(file)
        what = f"{error.reason} at byte {place}"
        raise DataError(f"{path} is not UTF-8 text ({what}){of_other_kind(head)}") from None
    if held:
        yield held


def _no_text(path: Path, head: bytes) -> DataError:
    what = "; it is UTF-16 without its mark (iconv -f UTF-16LE -t UTF-8), or was not written throughout"
    kind = of_other_kind(head) or what
    return DataError(f"{path} is not UTF-8 text (much of it is control characters){kind}")


def of_other_kind(head: bytes) -> str:
    """Return the kind of a file that is not UTF-8, for an error message; empty where it is not recognised."""
    kind = kind_of(head)
    return f"; the file is {kind}: make UTF-8 text of it" if kind else ""


def _first_undecodable(file: IO[bytes]) -> int:
    """Return the byte offset of the first invalid UTF-8."""
    decoder, before = codecs.getincrementaldecoder("utf-8")(), 0
    while True:
        chunk = file.read(1 << 20)
        waiting = len(decoder.getstate()[0])
        try:
            decoder.decode(chunk, final=not chunk)
        except UnicodeDecodeError as error:
            return before - waiting + error.start
        before += len(chunk)


def gpt2_encoding() -> tiktoken.Encoding:
    """Return tiktoken's GPT-2 encoding. Raises DataError where it is neither cached nor downloadable."""
    import tiktoken  # here, because only text needs it and it takes a while to load

    try:
        return tiktoken.get_encoding("gpt2")
    except (OSError, ValueError) as error:  # requests' errors are OSErrors; ValueError is a damaged cache
        raise DataError(
            "tiktoken's GPT-2 vocabulary is not cached and could not be downloaded "
            f"({type(error).__name__}); set TIKTOKEN_CACHE_DIR to tiktoken's cache folder of a machine that "
            "has it, or give tokens (.bin files of nanoGPT or llm.c) in place of text"
        ) from None
