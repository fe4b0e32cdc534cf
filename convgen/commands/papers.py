"""`convgen papers`: the four papers' figures, tables and numbers by convgen's models."""

from __future__ import annotations

from pathlib import Path

import click

from convgen.commands.inputs import need
from convgen.commands.outputs import Picture, draw, show
from convgen.errors import InputError


@click.command("papers")
@click.argument("names", nargs=-1, metavar="[FIGURE]...")
@click.option(
    "--rows", type=click.IntRange(1), help="Of tables, and mini-batches of whole networks, from the first on."
)
@click.option("--every", is_flag=True, help="A line for every number, not for every table.")
@click.option("--json", "as_json", is_flag=True, help="The numbers as JSON.")
@click.option("--plot", type=Picture(), metavar="FILE", help="Draw the figure.")
def papers_command(names: tuple[str, ...], rows: int | None, every: bool, as_json: bool, plot: Path | None) -> None:
    """What [CF], [SP], [INT] and [SW] say in numbers of time, speed-up and efficiency, beside convgen's models.

    FIGURE is cf.fig3 to cf.fig8, cf.table1, sp.fig2, sp.fig3, sp.table1 to sp.table3, int.fig4, int.fig6 to int.fig9,
    sw.fig2, sw.fig6, sw.fig8 to sw.fig11, sw.table2, sw.table3; or cf.choice, int.readings or fit, which are tables of
    words. Without one all are computed, which takes some minutes.
    """
    from convgen.papers.report import FIGURES, TEXTS, figures, rows_of_figures, rows_text, summary_text

    need("torch", "a network's operators are ATen's, which needs torch")
    if len(names) == 1 and names[0] in TEXTS:
        if as_json or plot is not None:
            raise InputError(f"{names[0]} is text", hint="without --json and --plot")
        click.echo(TEXTS[names[0]]())
        return
    if plot is not None and len(names) != 1:
        raise InputError("--plot draws one figure", hint="convgen papers cf.fig4 --plot FILE")
    found = figures(names or FIGURES, rows, lambda name: click.echo(name, err=True) if not names else None)
    table = rows_of_figures(found, every=not names and rows is None)
    figures_json = {"figures": [one.json() for one in found], "rows": [r.json() for r in table]}
    texts = [one.text() for one in found] if names else []
    if table:
        texts.append(rows_text(table) if names or every else summary_text(table))
    show(as_json, lambda: figures_json, lambda: "\n\n".join(texts))
    draw(plot, found[0].page)
