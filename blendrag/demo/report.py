"""What the demo shows."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from blendrag.demo.measure import Measurement

_LEGEND = (
    ("tokens", "length of the prompt"),
    ("full", "seconds to the first token when vLLM computes the whole prompt, as it does without blendrag"),
    ("cold", "the same through blendrag when none of the chunks is stored: a full prefill plus the look-up"),
    ("warm", "the same when all of them are stored: what a question costs once its documents are indexed"),
    ("speed-up", "full / warm"),
    ("rows", "share of the prompt's rows (tokens x layers) that the warm request still computed"),
    ("KL", "how far the blended first-token distribution is from the full one: 0 is the same, below 0.1 hardly "
           "noticeable, above 1 another opinion"),
)


def show_question(console: Console, number: int, total: int, result: Measurement) -> None:
    """One question: the chunks that were retrieved and both answers."""
    console.print()
    console.rule(Text(f"Question {number} of {total}"), style="cyan")
    console.print(Text(result.question, style="bold"))
    table = Table(box=None, pad_edge=False, header_style="dim", expand=True)
    table.add_column("retrieved chunk", overflow="ellipsis", no_wrap=True, ratio=1)
    table.add_column("tokens", justify="right", no_wrap=True)
    table.add_column("stored KV", no_wrap=True)
    for chunk, reused in zip(result.chunks, result.reused, strict=True):
        name = Text(chunk.source)
        if chunk.heading:
            name.append(f"  {chunk.heading}", style="dim")
        table.add_row(name, str(chunk.tokens), Text("reused", "green") if reused else Text("computed", "yellow"))
    console.print(Padding(table, (1, 0)))
    for label, answer, seconds in (("full prefill", result.answer_full, result.ttft_full_s),
                                   ("blended", result.answer_blend, result.ttft_warm_s)):
        console.print(Text(f"{label}, first token after {seconds:.2f} s", style="dim"))
        # A small model likes empty lines.
        console.print(Padding(Text("\n".join(filter(str.strip, answer.splitlines())) or "(nothing)"), (0, 0, 1, 2)))


def show_summary(console: Console, results: Sequence[Measurement]) -> None:
    """The table at the end, and what its columns mean."""
    table = Table(title="Time to the first token", title_justify="left", header_style="bold")
    for name in ("question", "tokens", "full", "cold", "warm", "speed-up", "rows", "KL"):
        table.add_column(name, justify="left" if name == "question" else "right")
    for number, result in enumerate(results, 1):
        table.add_row(str(number), f"{result.prompt_tokens:,}", f"{result.ttft_full_s:.2f} s",
                      f"{result.ttft_cold_s:.2f} s", f"{result.ttft_warm_s:.2f} s",
                      Text(f"{result.ttft_full_s / result.ttft_warm_s:.1f}×", "bold green"), f"{result.rows:.0%}",
                      f"{result.kl_first_token:.3f}")
    console.print(table)
    legend = Table.grid(padding=(0, 2))
    for name, meaning in _LEGEND:
        legend.add_row(Text(name, style="bold"), Text(meaning, style="dim"))
    console.print(legend)
