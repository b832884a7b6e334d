"""Small charts as inline SVG: bars and lines, nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

WIDTH, HEIGHT = 460, 240
LEFT, RIGHT, TOP, BOTTOM = 48, 14, 14, 50
COLOURS = ("#2b6cb0", "#c05621", "#2f855a", "#805ad5")


def ticks(top: float, about: int = 5) -> list[float]:
    """Round values from 0 to at least ``top``."""
    if top <= 0:
        return [0.0, 1.0]
    step = 1e-6
    while top / step > about:
        for factor in (2, 2.5, 2):
            step *= factor
            if top / step <= about:
                break
    marks = [0.0]
    while marks[-1] < top - 1e-9 * step:
        marks.append(round(marks[-1] + step, 10))
    return marks


def bars(
    labels: Sequence[str],
    series: Sequence[tuple[str, Sequence[float | None]]],
    *,
    x: str,
    y: str,
    percent: bool = False,
    lines: Sequence[tuple[str, float]] = (),
) -> str:
    """Grouped bars with optional horizontal marks.

    Args:
        labels: one per group.
        series: name and values (None leaves a gap).
        x: what the groups are.
        y: what the height is.
        percent: heights are shares.
        lines: label and height of horizontal marks.
    """
    values = [value for _, row in series for value in row if value is not None] + [height for _, height in lines]
    marks = ticks(max(values, default=1.0))
    top = marks[-1]
    group = (WIDTH - LEFT - RIGHT) / max(1, len(labels))
    width = 0.8 * group / max(1, len(series))
    out = _frame(marks, x, y, percent)
    for number, (name, row) in enumerate(series):
        for at, value in enumerate(row):
            if value is None:
                continue
            left = LEFT + at * group + 0.1 * group + number * width
            height = (HEIGHT - TOP - BOTTOM) * value / top
            shown = f"{100 * value:.1f}%" if percent else f"{value:.3g}"
            out.append(
                f'<rect x="{left:.1f}" y="{HEIGHT - BOTTOM - height:.1f}" width="{width:.1f}" height="{height:.1f}" '
                f'fill="{COLOURS[number % len(COLOURS)]}">'
                f"<title>{escape(f'{labels[at]}, {name}: {shown}')}</title></rect>"
            )
    crowded = max((len(label) for label in labels), default=0) * len(labels) > 66
    for at, label in enumerate(labels):
        lower = 11 * (at % 2) if crowded else 0
        out.append(_text(LEFT + (at + 0.5) * group, HEIGHT - BOTTOM + 14 + lower, label, "middle"))
    for label, height in lines:
        at_y = HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * height / top
        out.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at_y:.1f}" y2="{at_y:.1f}" class="mark"/>')
        out.append(_text(WIDTH - RIGHT - 2, at_y - 4, label, "end", "note"))
    return _wrap(out, [name for name, _ in series], f"{y} by {x}")


def curves(series: Sequence[tuple[str, Sequence[tuple[float, float]]]], *, x: str, y: str) -> str:
    """Lines through points, both axes from 0.

    Args:
        series: name and ``(x, y)`` points.
        x: what runs along.
        y: what the height is.
    """
    marks = ticks(max((py for _, points in series for _, py in points), default=1.0))
    along = ticks(max((px for _, points in series for px, _ in points), default=1.0), about=6)
    top, right = marks[-1], along[-1]
    out = _frame(marks, x, y, False)

    def place(px: float, py: float) -> tuple[float, float]:
        return LEFT + (WIDTH - LEFT - RIGHT) * px / right, HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * py / top

    for value in along:
        out.append(_text(place(value, 0)[0], HEIGHT - BOTTOM + 14, f"{value:g}", "middle"))
    for number, (name, points) in enumerate(series):
        colour = COLOURS[number % len(COLOURS)]
        placed = [place(px, py) for px, py in points]
        path = " ".join(f"{px:.1f},{py:.1f}" for px, py in placed)
        out.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        for (px, py), (at, value) in zip(placed, points, strict=True):
            title = escape(f"{name}, {at:g}: {value:.3g}")
            out.append(f'<circle cx="{px:.1f}" cy="{py:.1f}" r="3.5" fill="{colour}"><title>{title}</title></circle>')
    return _wrap(out, [name for name, _ in series], f"{y} by {x}")


def _frame(marks: Sequence[float], x: str, y: str, percent: bool) -> list[str]:
    out = []
    for value in marks:
        at = HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * value / marks[-1]
        out.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}" class="grid"/>')
        out.append(_text(LEFT - 6, at + 4, f"{100 * value:g}%" if percent else f"{value:g}", "end"))
    out.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - BOTTOM + 40, x, "middle", "axis"))
    middle = (TOP + HEIGHT - BOTTOM) / 2
    out.append(
        f'<text x="12" y="{middle:.1f}" text-anchor="middle" class="axis" '
        f'transform="rotate(-90 12 {middle:.1f})">{escape(y)}</text>'
    )
    return out


def _text(x: float, y: float, text: str, anchor: str, style: str = "tick") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" class="{style}">{escape(text)}</text>'


def _wrap(parts: Sequence[str], names: Sequence[str], title: str) -> str:
    legend = ""
    if len(names) > 1:
        items = (
            f'<span><i style="background:{COLOURS[n % len(COLOURS)]}"></i>{escape(name)}</span>'
            for n, name in enumerate(names)
        )
        legend = f'<div class="legend">{"".join(items)}</div>'
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">{"".join(parts)}</svg>{legend}'
