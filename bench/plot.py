"""Bar charts as SVG, without a plotting library, so that they are readable in a diff."""

from __future__ import annotations

from html import escape

COLOURS = ("#2563eb", "#f59e0b", "#10b981", "#ef4444")
LEFT, WIDTH, BAR, GAP = 250, 420, 14, 14


def bars(title: str, series: list[str], groups: list[tuple[str, list[float]]], *, mark: float | None = None) -> str:
    """Return horizontal bars, one group per name with one bar per series.  *mark* draws a line at that value."""
    most = max([mark or 0.0, *(value for _, values in groups for value in values)]) * 1.08
    step = BAR * len(series) + GAP
    height = 60 + step * len(groups) + 10
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{LEFT + WIDTH + 60}" height="{height}" '
        f'font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="12" y="20" font-size="14" font-weight="bold">{escape(title)}</text>',
    ]
    for number, name in enumerate(series):
        parts.append(f'<rect x="{LEFT + number * 110}" y="30" width="10" height="10" fill="{COLOURS[number]}"/>')
        parts.append(f'<text x="{LEFT + 15 + number * 110}" y="39">{escape(name)}</text>')
    for row, (name, values) in enumerate(groups):
        top = 54 + row * step
        parts.append(f'<text x="{LEFT - 8}" y="{top + step / 2 - 2}" text-anchor="end">{escape(name)}</text>')
        for number, value in enumerate(values):
            width, y = max(1.0, value / most * WIDTH), top + number * BAR
            parts.append(f'<rect x="{LEFT}" y="{y}" width="{width:.1f}" height="{BAR - 2}" fill="{COLOURS[number]}"/>')
            parts.append(f'<text x="{LEFT + width + 5:.1f}" y="{y + BAR - 4}" font-size="11">{value:.2f}</text>')
    if mark is not None:
        x = LEFT + mark / most * WIDTH
        parts.append(
            f'<line x1="{x:.1f}" y1="48" x2="{x:.1f}" y2="{height - 8}" stroke="#555" stroke-dasharray="4 3"/>'
        )
    return "\n".join([*parts, "</svg>", ""])
