"""What a toggle is: a field of Toggles with its values, where each of them can be had, and what readers are told."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpt2.toggles import Toggles
    from gpt2.workload import Workload


class UnsupportedToggle(Exception):
    """A toggle that this device cannot do; the message says why and what to choose instead."""

    def __init__(self, toggle: str, value: object, reason: str) -> None:
        super().__init__(f"{toggle}: {value}: {reason}")


@dataclass(frozen=True)
class Only:
    """The kinds of device that can do one value of a toggle, and what to say elsewhere."""

    devices: Collection[str]
    otherwise: str


def choice(
    default: Any,
    help: str,
    *,
    only: Mapping[Any, Only] | None = None,
    precision: Mapping[Any, str] | None = None,
    maths: Mapping[Any, str] | None = None,
    note: Callable[[Toggles, Workload], str] | None = None,
) -> Any:
    """A field of Toggles.

    only: values that not every device can do. precision: values that change the arithmetic, with their class (see
    LOSS_TOLERANCE). maths: values that make it another training than GPT-2's with other rounding, and why. note: what
    a reader of the scoreboard must be told beside the value.
    """
    metadata = {"help": help, "only": only or {}, "precision": precision or {}, "maths": maths or {}, "note": note}
    return field(default=default, metadata=metadata)
