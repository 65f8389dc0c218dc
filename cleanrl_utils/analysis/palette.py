"""Colours for charts, all distinct."""

import colorsys

COLORS = [
    "#3366cc", "#dc5f22", "#109618", "#990099", "#0099c6", "#b82e2e", "#66aa00", "#8a6d3b",
    "#f2a900", "#222222", "#e377c2", "#22aa99", "#5b3fa8", "#7f7f7f", "#ff6f91", "#8b0707",
    "#bcbd22", "#7fb3d5", "#1b4f72", "#c5b0d5",
]  # fmt: skip


def colors(count: int) -> list[str]:
    """`count` distinct colours: COLORS, then hues a golden angle apart."""
    found = COLORS[:count]
    for i in range(count - len(COLORS)):
        hue = i * 0.618034 % 1
        lightness = (0.35, 0.6)[i % 2]
        red, green, blue = colorsys.hls_to_rgb(hue, lightness, 0.7)
        found.append(f"#{round(red * 255):02x}{round(green * 255):02x}{round(blue * 255):02x}")
    return found
