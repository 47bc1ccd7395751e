from __future__ import annotations

import json
import math

import pytest

from gpt2.files.strict_json import dumps


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (math.nan, "null"),
        ([1.5, math.inf, {"a": -math.inf}], '[1.5, null, {"a": null}]'),
        ({"losses": (1.0, math.nan)}, '{"losses": [1.0, null]}'),
        ({"file": "a\udcff.bin"}, '{"file": "a\\udcff.bin"}'),  # bytes of a name that are no UTF-8
        (
            {"Grüße": True, "none": None, "n": 10**20},
            '{"Grüße": true, "none": null, "n": 100000000000000000000}',
        ),
    ],
)
def test_a_number_that_is_not_finite_is_null(value: object, text: str) -> None:
    assert dumps(value) == text
    text.encode()
    json.loads(text, parse_constant=lambda name: pytest.fail(name))
