"""Tries out the model families and writes docs/models.md: `python -m tests.engine.models_page [FAMILY ...]`.

What was seen is recorded in models.json, with a digest of the family's definition; the page is made of these records.
Without names, families without a record of their present definition are tried; `--all` tries every one.  Each takes 2
to 20 s.  The page is no place for hopes.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path
from typing import Any

from tests.engine.families import FAMILIES, LENGTH, Family
from tests.engine.more_families import MORE

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
RECORDS = Path(__file__).with_name("models.json")
EVERY = sorted((*FAMILIES, *MORE), key=lambda family: (bool(family.refusal), family.name.lower()))
_DESCRIPTION = ("name", "examples", "special", "reason")
WORKS = "works"

_HEAD = """\
# Models

blendrag runs the model that vLLM loaded and adds no code of its own for any of them, so what counts is how a model's
attention works, not what it is called. A model that is not in this table but resembles one that is will most likely
work too: `BlendEngine` looks at the model when it starts, tries out that its keys can be moved, and raises
`ModelError` with the reason where blending would be wrong. Nothing is blended on the off chance.

**Works** means: with all rows recomputed, first-token probabilities and answers equal plain vLLM's in float32, with
chunks at the start, in the middle, at the end and repeated; and a stored chunk's keys and values, moved by 1 to {moved}
positions, equal those the model computes there, in every layer. Each row was tried with a small random-weight model of
that family (norms have random weights, too) on a CPU, with vLLM {vllm}. The test suite tries one family of each kind.

| family | models | what is special | result |
|---|---|---|---|
"""

_TAIL = """\

## What is never supported

Reusing a chunk anywhere needs two things: that a layer keeps keys and values token by token, and that a key's position
can be taken out and put in again. Recurrent layers (Mamba and its relatives, linear attention) keep one running state
in which no chunk can be told apart. Encoder-decoder models keep the prompt in an encoder that reads it as a whole.
Learned positions and ALiBi do not live in the keys, or not in a way that can be undone. These will stay refused.
Latent attention (MLA), attention sinks, layers that share KV or differ in the shape of their heads, and a quantised
KV cache could be blended in principle; the code for it is not there, and they are refused until it is. An image,
sound or video makes the tokens around it depend on what they stand next to: such requests are prefilled in full and say
`multimodal request` in their statistics, while text requests to the same model are blended.

## Where a model's rotation comes from

From the rotary module of each attention layer, or, for models that vLLM runs through transformers, from the module
beside the layers, which may have angles of its own for each type of layer. Which dimensions make a pair, which way
round they turn, and whether a layer turns them at all is found out at start-up: the model runs once over 16 tokens at
several places from the prompt's beginning to the end of `max_model_len`, and in each layer queries and keys must differ
by the rotation alone, values not at all (within 0.1 % in float32, rounding in bf16 and fp16). What does anything
else is refused with the layer and the difference that was seen.

LongRoPE has two tables; vLLM takes one when it starts and keeps to it, so set `max_model_len` to what you need.
Ministral 3 scales its queries from position 16,384 on: up to that `max_model_len` it is blended, beyond it is refused.

A multimodal model of which only text is wanted (`limit_mm_per_prompt={"image": 0}`) needs no image processor.

This page is generated from what `python -m tests.engine.models_page` recorded in tests/engine/models.json; that command
tries out every family whose definition has changed.
"""


def row(family: Family) -> str:
    """The family's line of the table."""
    cells = family.name, family.examples, family.special, _result(family)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"


def _result(family: Family) -> str:
    if not family.refusal:
        return WORKS
    if family.by_vllm:
        return f"vLLM on the CPU cannot run it: {family.reason}"
    return f"refused: {family.reason}"


def digest(family: Family) -> str:
    """Of all that a family's result depends on."""
    definition = {name: value for name, value in asdict(family).items() if name not in _DESCRIPTION}
    return sha256(json.dumps(definition, sort_keys=True).encode()).hexdigest()[:16]


def records() -> dict[str, dict[str, Any]]:
    """What was seen of each family, by slug: `definition` (a digest), `outcome` and vLLM's version.

    An outcome is "works", with `error`, or what `ModelError` said.
    """
    return dict(json.loads(RECORDS.read_text())) if RECORDS.exists() else {}


def as_recorded(family: Family, record: dict[str, Any] | None) -> bool:
    """Whether the family, as it is defined now, was seen to do what the page says of it."""
    if record is None or record["definition"] != digest(family):
        return False
    return bool(re.search(family.refusal, record["outcome"]) if family.refusal else record["outcome"] == WORKS)


def page() -> str:
    """The whole page."""
    versions = sorted({record["vllm"] for record in records().values()})
    head = _HEAD.replace("{moved}", f"{LENGTH - 200:,}").replace("{vllm}", " and ".join(versions))
    return head + "".join(map(row, EVERY)) + _TAIL


def seen(family: Family) -> dict[str, Any]:
    """Runs a small model of the family, and returns its record."""
    from blendrag import BlendEngine
    from blendrag.errors import ModelError
    from tests.engine.conformance import check_family, family_engine
    from tests.engine.families import build

    record: dict[str, Any] = {"definition": digest(family), "vllm": _vllm_version()}
    with tempfile.TemporaryDirectory() as folder:
        path = build(family, Path(folder, "model"))
        try:
            with family_engine(BlendEngine, family, path) as engine:
                error = check_family(engine, family)
        except ModelError as refusal:
            return record | {"outcome": str(refusal).replace(str(path), "MODEL")}
    return record | {"outcome": WORKS, "error": float(f"{error:.1e}")}


def _vllm_version() -> str:
    import vllm

    return str(vllm.__version__).split("+")[0]


def main() -> int:
    """Tries families out, records what was seen and writes the page; the number of families that do otherwise."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("families", nargs="*", help="names, or parts of them")
    parser.add_argument("--all", action="store_true", help="every family, recorded or not")
    options = parser.parse_args()
    before = records()
    chosen = [family for family in EVERY if any(name.lower() in family.name.lower() for name in options.families)
              or options.all or not (options.families or as_recorded(family, before.get(family.slug)))]
    # vLLM's transformers backend changes classes of transformers, of which later models could no longer be made.
    chosen.sort(key=lambda family: "model_impl" in family.engine)
    found = {family.slug: before[family.slug] for family in EVERY if family.slug in before}
    otherwise = 0
    for family in chosen:
        try:
            found[family.slug] = seen(family)
            outcome = str(found[family.slug])
        except AssertionError as error:
            found.pop(family.slug, None)
            outcome = f"fails: {error}"
        right = as_recorded(family, found.get(family.slug))
        otherwise += not right
        print(f"{family.name}: {'as expected' if right else 'OTHERWISE'}, {outcome}", flush=True)  # noqa: T201
        RECORDS.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
    PAGE.write_text(page())
    return otherwise


if __name__ == "__main__":
    sys.exit(main())
