"""Format numbers and durations for people. Imports no torch."""

from __future__ import annotations


def number(value: float) -> str:
    """Format with three significant digits or more, and thousands separators: 0.0123, 78.9, 1,234,567."""
    if value == 0 or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}" if abs(value) < 1 else f"{value:.{2 if abs(value) < 10 else 1}f}"


def duration(seconds: float) -> str:
    """Format seconds with a suitable unit: 45 s, 12 min, 3.4 h, 5.2 days."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 90 * 60:
        return f"{seconds / 60:.0f} min"
    hours = seconds / 3600
    return f"{hours:.1f} h" if hours < 72 else f"{number(hours / 24)} days"
