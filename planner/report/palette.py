"""The colours of every chart: Okabe and Ito's palette, told apart by the colour-blind."""

from planner.artifacts.operations import Kind

# Forward is cold, everything backward is warm; the lightness differs too, for grey print.
KIND_COLOURS: dict[Kind, str] = {"F": "#56B4E9", "B": "#E69F00", "I": "#D55E00", "W": "#F0E442"}
ACTIVATION_COLOUR = "#0072B2"
GRADIENT_COLOUR = "#8C4A00"
ALL_REDUCE_COLOUR = "#CC79A7"
OPTIMIZER_COLOUR = "#009E73"
IDLE_COLOUR = "#F1F1F1"
GRID_COLOUR = "#DDDDDD"
INK_COLOUR = "#1A1A1A"
MUTED_COLOUR = "#777777"

# Lines need more contrast with white than boxes do: the palette without its yellow.
LINE_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#1A1A1A")


def lighter(colour: str, share: float) -> str:
    """Mix a colour with white.

    Args:
        colour: as ``#RRGGBB``.
        share: of white; 0 leaves the colour as it is, 1 gives white.
    """
    channels = (int(colour[start : start + 2], 16) for start in (1, 3, 5))
    return "#" + "".join(f"{round(value + (255 - value) * share):02X}" for value in channels)
