"""What the drawings share: the templates, and axes."""

from __future__ import annotations

import math
import re
from functools import cache
from pathlib import Path

import jinja2
from markupsafe import Markup

UNIT = re.compile(r"(?<=\d) (?=[KMGT]?i?B\b|[mu]?s\b)")
STEPS = (1.0, 2.0, 2.5, 5.0, 10.0)


@cache
def template(name: str) -> jinja2.Template:
    """A template of autotp/templates. Values are escaped, and a name that it lacks is an error."""
    folder = jinja2.FileSystemLoader(Path(__file__).parent / "templates")
    environment = jinja2.Environment(
        loader=folder, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"glued": glued, "breaking": breaking}
    return environment.get_template(name)


def glued(text: str) -> str:
    """Figures with their units, and arrows between layouts, so that no line breaks within."""
    return UNIT.sub("\u00a0", text).replace(" -> ", "\u00a0\u2192\u00a0")


def breaking(name: str) -> Markup:
    """A dotted name that may break after its dots and underscores."""
    out = Markup("")
    for part in re.split(r"([._])", name):
        out += part + Markup("<wbr>") if part in "._" else part
    return out


def ticks(top: float, most: int = 5) -> list[float]:
    """Round numbers from 0 on, at most `most` steps of one size, of which the last is not below `top`."""
    if top <= 0:
        return [0.0, 1.0]
    power = 10 ** math.floor(math.log10(top / most))
    step = next(power * s for s in STEPS if power * s * most >= top * (1 - 1e-9))
    return [i * step for i in range(math.ceil(top / step - 1e-9) + 1)]
