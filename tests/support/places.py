"""Where things are: this checkout, and the real text and vocabulary, without which some tests skip."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
REAL = ROOT.parent / "shared" / "data"
