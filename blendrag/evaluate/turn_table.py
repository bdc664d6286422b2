"""The later turns of conversations for a terminal: a table for each turn."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from blendrag.evaluate.metrics import Interval
from blendrag.evaluate.settings import labelled
from blendrag.evaluate.table import COLUMNS, NONE, number, over, seconds, share
from blendrag.evaluate.turn_summary import TurnSummary
from blendrag.evaluate.turns import ANEW, CONTINUED

COST = "cost"
TURN_COLUMNS = {
    "cached": "share of the prompt that vLLM's prefix cache held",
    "rows": COLUMNS["rows"],
    "F1": "words of the answer's first line against the right answers",
    "KL": COLUMNS["KL"],
    "top-1": COLUMNS["top-1"],
    "KL16": f"{COLUMNS['KL16']}; below it, the 95 % interval",
    "first token": COLUMNS["first token"],
}
ARM_MEANINGS = {
    CONTINUED: "asked behind the turns before it, whose blended prompts and answers vLLM's prefix cache holds",
    ANEW: "the same prompt with nothing in vLLM's prefix cache: blended for its own question",
    COST: "continued less anew, conversation by conversation; below it, the 95 % interval",
}
EARLIER_ANSWERS = "The earlier answers in a prompt are plain vLLM's, in every arm."


def show_turns(console: Console, turns: Sequence[Sequence[TurnSummary]]) -> None:
    """The tables, and what they mean; nothing where no later turn was measured."""
    for summaries in turns:
        console.print()
        console.print(turn_table(summaries))
    if not turns:
        return
    console.print()
    legend = Table.grid(padding=(0, 2))
    for name, meaning in (ARM_MEANINGS | TURN_COLUMNS).items():
        if COLUMNS.get(name) != meaning:  # those were explained above
            legend.add_row(Text(name, style="bold"), Text(meaning, style="dim"))
    console.print(legend)
    console.print(Text(EARLIER_ANSWERS, style="dim"))
    for note in notes(turns):
        console.print(Text(note, style="yellow"), soft_wrap=True)


def turn_table(summaries: Sequence[TurnSummary]) -> Table:
    """One turn: the full prefill, then each setting continued and anew, and the difference; it fits 80 columns."""
    first = summaries[0]
    result = Table(title=Text(f"Turns: turn {first.turn} of {first.figures.n} conversations"), title_justify="left",
                   header_style="bold", box=None, padding=(0, 1, 0, 0), show_edge=False)
    for heading in ("policy", *TURN_COLUMNS):
        name = heading == "policy"
        result.add_column(heading.replace(" ", "\n"), justify="left" if name else "right", no_wrap=not name,
                          overflow="fold")
    for at, s in enumerate(summaries):
        figures = s.figures
        label = Text(labelled(figures.policy, figures.ratio))
        compared: list[str | Text] = [NONE, NONE, NONE]
        if s is not first:
            label.append(f"\n{s.arm}", style="dim")
            compared = [over(number(figures.kl), figures.ci["kl"]), share(figures.top1),
                        over(number(figures.kl16), figures.ci["kl16"])]
        result.add_row(label, share(s.cached), share(figures.rows), number(figures.f1), *compared,
                       NONE if figures.ttft_s is None else seconds(figures.ttft_s))
        if s.arm == ANEW:
            f1, kl, kl16 = (over(signed(mean), ends, signed=True) for mean, ends in cost_of(summaries[at - 1]))
            result.add_row(Text(COST, style="dim"), "", "", f1, kl, "", kl16, "")
    return result


def cost_of(continued: TurnSummary) -> list[tuple[float | None, Interval | None]]:
    """Of F1, KL and KL16: what continuing changed, and the interval."""
    return [(continued.cost[name], continued.cost_ci[name]) for name in ("f1", "kl", "kl16")]


def signed(value: float | None) -> str:
    """A difference, or a dash."""
    return NONE if value is None else f"{value:+.3f}"


def notes(turns: Sequence[Sequence[TurnSummary]]) -> list[str]:
    """Which turns found no blended blocks of the turns before them, or not in every conversation."""
    return [f"turn {s.turn}, {labelled(s.figures.policy, s.figures.ratio)}: blended blocks of earlier turns were used "
            f"in {share(s.continued)} of the conversations; elsewhere exact ones were cached, or it was blended anew"
            for summaries in turns for s in summaries if s.arm == CONTINUED and (s.continued or 0) < 1]
