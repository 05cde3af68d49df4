"""`specdeft trees`: what is on the shelf, a drawing of one tree, and the search for trees that fit measured heads."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from specdeft.cli.folders import heads_folder
from specdeft.cli.options import json_option

if TYPE_CHECKING:
    from specdeft.trees import Tree

SIZES = "8,16,32,48,64,96,128,192,256"


@click.group(short_help="List, draw and search tree topologies.")
def trees() -> None:
    """List and draw tree topologies; search for those that fit measured heads best.

    \b
    specdeft trees ls --max-depth 4
    specdeft trees show medusa-63
    specdeft trees search my-heads --name my-trees
    """


@trees.command("ls", short_help="List the shipped trees.")
@click.option("--max-depth", type=click.IntRange(min=0), help="Only trees that so many heads can fill.")
@json_option
def ls(max_depth: int | None, as_json: bool) -> None:
    """List the shipped trees.

    \b
    specdeft trees ls --max-depth 4
    """
    from specdeft.trees import known_trees

    known = [each for each in known_trees() if max_depth is None or each.tree.max_depth <= max_depth]
    if as_json:
        rows = [
            {
                "name": each.name,
                "size": each.tree.size,
                "depth": each.tree.max_depth,
                "width": each.tree.width,
                "leaves": len(each.tree.leaves),
                "source": each.source,
                "about": each.about,
            }
            for each in known
        ]
        click.echo(json.dumps(rows, indent=2, ensure_ascii=False))
        return
    name_column = max((len(each.name) for each in known), default=4)
    click.echo(f"{'name':{name_column}}  size  depth  width  about")
    for each in known:
        tree = each.tree
        click.echo(f"{each.name:{name_column}}  {tree.size:4}  {tree.max_depth:5}  {tree.width:5}  {each.about}")


@trees.command("show", short_help="Draw one tree.")
@click.argument("tree")
@click.option("--path", "ranks", metavar="RANKS", help="Mark an accepted path by its ranks, such as 0,2,0.")
@click.option("--svg", type=click.Path(path_type=Path), help="Write an SVG picture to this file instead.")
@json_option
def show(tree: str, ranks: str | None, svg: Path | None, as_json: bool) -> None:
    """Draw one tree, by its shipped name or by a path ending in .json.

    \b
    specdeft trees show medusa-63
    specdeft trees show medusa-63 --path 0,0,1 --svg tree.svg
    """
    from specdeft.trees import Tree, describe, draw_svg, draw_text

    known = describe(tree)
    path = None if ranks is None else _nodes(known.tree, ranks)
    if as_json:
        shape = {"name": known.name, "parents": known.tree.parents, "ranks": known.tree.ranks}
        click.echo(json.dumps(shape | {"source": known.source, "about": known.about}, ensure_ascii=False))
    elif svg is not None:
        svg.write_text(draw_svg(known.tree, path), encoding="utf-8")
        click.echo(f"wrote {svg}", err=True)
    else:
        click.echo(draw_text(Tree.load(tree), path), nl=False)
        for line in (known.about, f"Source: {known.source}" if known.source else ""):
            if line:
                click.echo(line, err=True)


@trees.command("search", short_help="Build the best trees from measured acceptance.")
@click.argument("heads")
@click.option("--sizes", default=SIZES, show_default=True, help="Nodes per tree, root included.")
@click.option("--name", help="Family name: the tree of 64 nodes is called NAME-64. Default: the heads' folder's.")
@click.option("--out", type=click.Path(path_type=Path), default=Path("."), help="Folder for the files. Default: here.")
@json_option
def search(heads: str, sizes: str, name: str | None, out: Path, as_json: bool) -> None:
    """Build the best trees from what HEADS accepted when they were measured: their name, folder or calibration.json.

    \b
    specdeft trees search heads/smollm2-135m-instruct-medusa --name smollm2-135m-instruct-medusa --out trees

    Any command takes such a file by its path: --tree NAME-64.json. `trees` in the heads' config.json names the family
    that --tree auto (tree="auto") and a number of nodes choose from.
    """
    from specdeft.errors import SpecdeftError
    from specdeft.evaluate.calibration import FILE, Calibration
    from specdeft.trees import best_family, save_family

    folder = Path(heads).resolve().parent if Path(heads).name == FILE else heads_folder(heads)
    calibration = Calibration.load(folder)
    if calibration is None:
        raise SpecdeftError(f"{folder} has no {FILE}: specdeft train writes it beside the heads")
    family = best_family(calibration.counts, calibration.total, _sizes(sizes), name or folder.name)
    out.mkdir(parents=True, exist_ok=True)
    paths = save_family(
        family,
        out,
        source=f"measured acceptance of {folder.name}: {calibration.total} positions, {calibration.source}",
        about=f"calibrated for {folder.name}",
    )
    rows = [
        {"path": str(path), "name": tree.name, "size": tree.size, "depth": tree.max_depth, "width": tree.width}
        | {"expected_tau": calibration.expected_tau(tree)}
        for tree, path in zip(family, paths, strict=True)
    ]
    if as_json:
        click.echo(json.dumps(rows, indent=2, ensure_ascii=False))
        return
    for row in rows:
        click.echo(
            f"{row['path']}  size {row['size']}, depth {row['depth']}, width {row['width']}, "
            f"expected tau {row['expected_tau']:.3f}"
        )


def _sizes(text: str) -> list[int]:
    try:
        return [int(size) for size in text.split(",")]
    except ValueError:
        raise click.BadParameter(f"expected sizes such as 32,64, got {text!r}") from None


def _nodes(tree: "Tree", ranks: str) -> list[int]:
    """Node numbers of a rank path, root first."""
    try:
        wanted = tuple(int(rank) for rank in ranks.split(",")) if ranks else ()
    except ValueError:
        raise click.BadParameter(f"expected ranks such as 0,2,0, got {ranks!r}") from None
    place = {path: node for node, path in enumerate(tree.paths)}
    for depth in range(1, len(wanted) + 1):
        if wanted[:depth] not in place:
            raise click.BadParameter(f"the tree has no node at the ranks {','.join(map(str, wanted[:depth]))}")
    return [place[wanted[:depth]] for depth in range(len(wanted) + 1)]
