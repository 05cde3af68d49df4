"""Draw a tree as one self-contained SVG picture.

Knows a tree's shape, and token texts when it is given them; no files, no fonts, no scripts.
"""

from collections.abc import Sequence
from xml.sax.saxutils import escape

from specdeft.trees.show import LABEL_COLUMNS, check_drawing, columns, cut, summary
from specdeft.trees.topology import Tree

# Middle tones on a transparent ground: each has a contrast of 3:1 or more with white and with GitHub's dark #0d1117.
EDGE, NODE, TEXT, ACCEPTED = "#848d97", "#6e7781", "#7d8590", "#d9661f"

MARGIN = 28
CHARACTER = 6.8  # width of a monospace character at 11 pixels, a little generous


def draw_svg(tree: Tree, path: Sequence[int] | None = None, labels: Sequence[str] | None = None) -> str:
    """The tree as SVG text: top down, or, with labels, left to right with the texts beside the nodes.

    Ranks stand in the nodes while there is room. Legible on light and dark pages alike; hovering a node names it.

    Args:
        path: accepted nodes, root first, as an acceptance rule returns them; drawn in colour.
        labels: N texts, one per node.

    Raises:
        ValueError: a path that does not lead down from the root, or not one label per node.
    """
    accepted = check_drawing(tree, path, labels)
    sideways = labels is not None
    texts = [_label(label) for label in labels or ()]
    spacing = 24.0 if sideways else max(9.0, min(22.0, 960 / len(tree.leaves)))
    radius = min(9.0, 0.43 * spacing)
    # room that each node's text takes beside it
    beside = [radius + 8 + CHARACTER * columns(text) for text in texts] if sideways else [0.0] * tree.size
    pitch = 60 + max(beside)
    across = [MARGIN + 50 + spacing * place for place in _places(tree)]
    along = [MARGIN + 30 + pitch * depth for depth in tree.depths]
    points = list(zip(along, across, strict=True)) if sideways else list(zip(across, along, strict=True))
    width = max(max(x + room for (x, _), room in zip(points, beside, strict=True)) + MARGIN, 7.0 * len(summary(tree)))
    height = max(y for _, y in points) + MARGIN

    edges = {}
    for node in range(1, tree.size):
        x, y = points[tree.parents[node]]
        edges[node] = _edge((x + beside[tree.parents[node]], y), points[node], sideways)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" '
        f'height="{height:.0f}" role="img" font-family="system-ui, sans-serif">',
        f"<title>{_text(summary(tree))}</title>",
        f'<text x="{MARGIN / 2}" y="20" font-size="13" fill="{TEXT}">{_text(summary(tree))}</text>',
        _depth_marks(tree, along, sideways),
    ]
    plain = [node for node in range(tree.size) if node not in accepted]
    for colour, stroke, nodes in ((EDGE, 1.2, plain), (ACCEPTED, 3, sorted(accepted))):
        drawn = "".join(edges[node] for node in nodes if node)
        parts.append(f'<g fill="none" stroke="{colour}" stroke-width="{stroke}">{drawn}</g>')
    for colour, nodes in ((NODE, plain), (ACCEPTED, sorted(accepted))):
        drawn = "".join(_circle(tree, node, points[node], radius) for node in nodes)
        parts.append(f'<g fill="{colour}">{drawn}</g>')
    if radius >= 6:
        style = 'fill="#fff" font-size="9" font-weight="600" text-anchor="middle" pointer-events="none"'
        ranks = zip(tree.ranks[1:], points[1:], strict=True)
        drawn = "".join(f'<text x="{x:.1f}" y="{y + 3.2:.1f}">{rank}</text>' for rank, (x, y) in ranks)
        parts.append(f"<g {style}>{drawn}</g>")
    if sideways:
        parts.append(_labels(points, radius, texts, accepted))
    return "\n".join([*parts, "</svg>"]) + "\n"


def _places(tree: Tree) -> list[float]:
    """Where each node stands across the picture: leaves one by one, parents in the middle of their children."""
    places = [0.0] * tree.size
    enter, _ = tree.dfs_intervals
    for place, leaf in enumerate(sorted(tree.leaves, key=enter.__getitem__)):
        places[leaf] = float(place)
    for node in sorted(range(tree.size), key=lambda node: -enter[node]):
        if below := tree.children[node]:
            places[node] = (places[below[0]] + places[below[-1]]) / 2
    return places


def _edge(start: tuple[float, float], end: tuple[float, float], sideways: bool) -> str:
    (x0, y0), (x1, y1) = start, end
    x, y = (x0 + x1) / 2, (y0 + y1) / 2
    bend = f"{x:.1f} {y0:.1f} {x:.1f} {y1:.1f}" if sideways else f"{x0:.1f} {y:.1f} {x1:.1f} {y:.1f}"
    return f'<path d="M{x0:.1f} {y0:.1f}C{bend} {x1:.1f} {y1:.1f}"/>'


def _circle(tree: Tree, node: int, point: tuple[float, float], radius: float) -> str:
    where = "root" if node == 0 else f"ranks {' '.join(map(str, tree.paths[node]))}"
    place = f'cx="{point[0]:.1f}" cy="{point[1]:.1f}" r="{radius:.1f}"'
    return f"<circle {place}><title>node {node}: {where}</title></circle>"


def _depth_marks(tree: Tree, along: list[float], sideways: bool) -> str:
    marks = []
    for depth, place in sorted(set(zip(tree.depths, along, strict=True))):
        where = f'x="{place:.1f}" y="42" text-anchor="middle"' if sideways else f'x="{MARGIN / 2}" y="{place + 4:.1f}"'
        marks.append(f"<text {where}>depth {depth}</text>")
    return f'<g font-size="11" fill="{TEXT}">{"".join(marks)}</g>'


def _labels(points: list[tuple[float, float]], radius: float, texts: list[str], accepted: frozenset[int]) -> str:
    drawn = []
    for node, (x, y) in enumerate(points):
        strong = f' fill="{ACCEPTED}" font-weight="600"' if node in accepted else ""
        drawn.append(f'<text x="{x + radius + 4:.1f}" y="{y + 4:.1f}"{strong}>{_text(texts[node])}</text>')
    return f'<g font-size="11" font-family="ui-monospace, monospace" fill="{TEXT}">{"".join(drawn)}</g>'


def _label(text: str) -> str:
    """A token's text for the picture: line ends and the like escaped, spaces shown as dots, long ones cut."""
    return cut(repr(text)[1:-1].replace(" ", "\N{MIDDLE DOT}"), LABEL_COLUMNS)


def _text(text: str) -> str:
    # What XML forbids even when escaped, such as control characters in a tree's name, is shown as a question mark.
    return escape("".join(c if c.isprintable() else "?" for c in text))
