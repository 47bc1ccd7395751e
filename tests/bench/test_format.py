from __future__ import annotations

import pytest

from bench.format import duration, markdown, number, plain


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (0.0123, "0.0123"), (4.561, "4.56"), (78.94, "78.9"), (1234567.8, "1,234,568")],
)
def test_numbers_keep_three_significant_digits(value: float, text: str) -> None:
    assert number(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(45, "45 s"), (720, "12 min"), (12240, "3.4 h"), (5 * 86400, "5.00 days")]
)
def test_durations_are_rounded_to_what_matters(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_control_characters_are_taken_out_and_markdown_is_escaped() -> None:
    assert plain("a\x1b[31m\r\n\tb\u202e") == "a [31m b"
    assert markdown("a|b*c <i>") == "a\\|b\\*c &lt;i&gt;"
