"""What a drawn figure says and where: its texts, read from the SVG."""

from __future__ import annotations

import re


def labels(svg: str) -> dict[str, tuple[float, float]]:
    """The position of each text."""
    found = re.findall(r'<text [^>]*x="([-\d.]+)" y="([-\d.]+)"[^>]*>([^<]*)</text>', svg)
    return {text: (float(x), float(y)) for x, y, text in found}


def values(svg: str) -> list[str]:
    """The texts of a figure: its title, and the tooltips of points and bars."""
    return re.findall(r"<title>([^<]*)</title>", svg)
