"""The colours of every chart: pictures, the report page and the documentation."""

import colorsys

COLORS = ["#3366cc", "#dc5f22", "#109618", "#990099", "#0099c6", "#b82e2e", "#66aa00", "#8a6d3b"]
COLORS += ["#dd4477", "#22aa99", "#6633cc", "#c9a400"]

GOLDEN_RATIO = 0.618033988749895


def colors(count: int) -> list[str]:
    """As many different colours as a chart has lines."""
    return COLORS[:count] + [further_color(number) for number in range(count - len(COLORS))]


def further_color(number: int) -> str:
    """A colour beyond the fixed ones: steps of the golden ratio never return to a hue."""
    hue = (number + 1) * GOLDEN_RATIO % 1
    channels = colorsys.hls_to_rgb(hue, 0.45, 0.65)
    return "#" + "".join(f"{round(255 * channel):02x}" for channel in channels)
