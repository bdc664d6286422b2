"""Blend passes in plain torch, to try ideas out before they are built: which rows, which chunks, which drift.

    python scripts/blend_lab.py MODEL DATA.json [--questions 30] [--only NAME ...]

MODEL is a Hugging Face folder of a Llama or Qwen2 model (model.safetensors), DATA a list of {ctxs: [{title, text}],
question}.  Prints, for each variant, the share of rows computed (scoring included), the mean KL of the first token's
distribution against a full prefill, top-1 agreement, and the mean KL over the 16 tokens of the full prefill's answer,
teacher forced.  docs/design.md ("What was tried") has the results.  Needs torch, transformers and safetensors, no vLLM.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from safetensors.torch import load_file
from transformers import AutoTokenizer

KV = list[tuple[torch.Tensor, torch.Tensor]]
"""Keys (without rotation) and values of each layer, [tokens, kv heads, head size]."""

ANSWER = 16
BEFORE = ("You will be asked a question after reading several passages. Please directly answer the question based on "
          "the given passages. Do NOT repeat the question. The answer should be within 5 words.\nPassages:\n")
BEHIND = ("\n\nAnswer the question directly based on the given passages. Do NOT repeat the question. The answer should "
          "be within 5 words.\nQuestion: ")


class Model:
    """A Llama or Qwen2 decoder that runs any rows of a prompt over given KV."""

    def __init__(self, folder: Path, device: str) -> None:
        config = json.loads((folder / "config.json").read_text())
        self.device = torch.device(device)
        self.dtype = torch.bfloat16 if device == "cuda" else torch.float32
        self.weights = {name: tensor.to(self.device, self.dtype)
                        for name, tensor in load_file(folder / "model.safetensors").items()}
        self.layers: int = config["num_hidden_layers"]
        self.heads: int = config["num_attention_heads"]
        self.kv_heads: int = config.get("num_key_value_heads", self.heads)
        self.size: int = config.get("head_dim") or config["hidden_size"] // self.heads
        self.epsilon: float = config["rms_norm_eps"]
        base = config.get("rope_theta") or config["rope_parameters"]["rope_theta"]
        angles = torch.outer(torch.arange(32768.0), base ** -(torch.arange(0, self.size, 2) / self.size)).repeat(1, 2)
        self.cos, self.sin = angles.cos().to(self.device), angles.sin().to(self.device)

    def rotated(self, x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        half = self.size // 2
        turned = torch.cat([-x[..., half:], x[..., :half]], -1).float()
        return (x.float() * self.cos[at][:, None] + turned * self.sin[at][:, None]).to(x.dtype)

    def normed(self, x: torch.Tensor, name: str) -> torch.Tensor:
        wide = x.float()
        scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.epsilon)
        return scaled.to(x.dtype) * self.weights[f"{name}.weight"]

    def linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return F.linear(x, self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias"))

    def run(self, ids: Sequence[int] | torch.Tensor, at: torch.Tensor, context: KV | None = None, *,
            depth: int | None = None, moved: Callable[..., tuple[torch.Tensor, torch.Tensor]] | None = None,
            watch: Callable[..., None] | None = None, logits: bool = False) -> tuple[torch.Tensor | None, KV, KV]:
        """Rows at positions `at`, over a context whose rows they replace, or over nothing but themselves.

        Returns:
            The rows' log probabilities (where asked for), their own KV, and the merged KV.
        """
        x = F.embedding(torch.as_tensor(ids, device=self.device), self.weights["model.embed_tokens.weight"])
        fresh, merged = [], []
        for index in range(self.layers if depth is None else depth):
            block = f"model.layers.{index}"
            h = self.normed(x, f"{block}.input_layernorm")
            q = self.linear(h, f"{block}.self_attn.q_proj").view(len(x), self.heads, self.size)
            k = self.linear(h, f"{block}.self_attn.k_proj").view(len(x), self.kv_heads, self.size)
            v = self.linear(h, f"{block}.self_attn.v_proj").view(len(x), self.kv_heads, self.size)
            fresh.append((k, v))
            if context is None:
                everywhere, all_k, all_v = at, k, v
            else:
                all_k, all_v = context[index][0].clone(), context[index][1].clone()
                everywhere = torch.arange(len(all_k), device=self.device)
                if moved is not None:
                    all_k, all_v = moved(all_k, all_v, at, k, v)
                all_k[at], all_v[at] = k, v
                merged.append((all_k, all_v))
            seen = everywhere[None] <= at[:, None]
            q, turned = self.rotated(q, at), self.rotated(all_k, everywhere)
            if watch is not None:
                watch(index, q, turned, seen)
            attended = F.scaled_dot_product_attention(
                *(t.transpose(0, 1)[None] for t in (q, turned, all_v)), attn_mask=None if context is None else seen,
                is_causal=context is None, enable_gqa=True)[0]
            x = x + self.linear(attended.transpose(0, 1).flatten(1), f"{block}.self_attn.o_proj")
            h = self.normed(x, f"{block}.post_attention_layernorm")
            h = F.silu(self.linear(h, f"{block}.mlp.gate_proj")) * self.linear(h, f"{block}.mlp.up_proj")
            x = x + self.linear(h, f"{block}.mlp.down_proj")
        if not logits:
            return None, fresh, merged
        head = self.weights.get("lm_head.weight", self.weights["model.embed_tokens.weight"])
        return F.linear(self.normed(x, "model.norm"), head).float().log_softmax(-1), fresh, merged


@dataclass
class Question:
    """A prompt in pieces, and what a full prefill makes of it."""

    prefix: list[int]
    chunks: list[list[int]]
    query: list[int]
    kv: KV = field(default_factory=list)
    answer: list[int] = field(default_factory=list)
    expected: torch.Tensor = field(default_factory=lambda: torch.empty(0))

    @property
    def ids(self) -> list[int]:
        return list(chain(self.prefix, *self.chunks, self.query))

    @property
    def spans(self) -> list[tuple[int, int]]:
        ends = torch.tensor([len(self.prefix), *map(len, self.chunks)]).cumsum(0).tolist()
        return list(pairwise(ends))


@dataclass(frozen=True)
class Variant:
    """One idea.

    Attributes:
        ratio: share of the approximate tokens that is recomputed.
        layers, norm: where attention is measured, as shares of the depth; reduce by L2 norm, by mean otherwise.
        reach: tokens over which the drift of a recomputed token spreads; 0: not at all.
        overall: weight of the average over all, in tokens right beside.
        behind: what chunks are encoded behind: "prefix", "alone", or a number of the question's other chunks.
        keys, values: what drift moves.
        rows: which tokens are recomputed: those of the most "attention", or "random" ones.
        spread: share of the tokens that are recomputed at even distances, within the ratio.
        coverage: instead of a ratio, as many tokens as together draw this share of the attention.
        repair: rows that are recomputed before each token of the answer but the first, from the front on.
        front: the chunk of the most attention comes first, where it is exact; compared with a full prefill of that.
    """

    ratio: float = 0.15
    layers: tuple[float, float] = (0.66, 0.8)
    norm: bool = True
    reach: float = 0.0
    overall: float = 1.0
    behind: str = "prefix"
    keys: bool = True
    values: bool = True
    rows: str = "attention"
    spread: float = 0.0
    coverage: float = 0.0
    repair: int = 0
    front: bool = False


DEFAULT = Variant(reach=64, overall=0.5)
DEEPER = replace(DEFAULT, layers=(0.5, 1.0), norm=False)

VARIANTS = {
    "all rows": Variant(1.0),
    "nothing recomputed": Variant(0.0),
    "no drift, .15": Variant(),
    "no drift, .32": Variant(0.32),
    "default": DEFAULT,
    **{f"reach {reach}": Variant(reach=reach) for reach in (16, 32, 64, 128)},
    "overall .3": Variant(reach=64, overall=0.3),
    "overall 3": Variant(reach=64, overall=3),
    "a chunk's mean": Variant(reach=1e6),
    "keys only": Variant(reach=32, values=False),
    "values only": Variant(reach=32, keys=False),
    "random rows": Variant(reach=32, rows="random"),
    "a quarter spread evenly": Variant(reach=32, spread=0.04),
    "layers at 40-60 %": Variant(reach=32, layers=(0.4, 0.6)),
    **{f"ratio {ratio}": Variant(ratio, reach=32) for ratio in (0.05, 0.08, 0.12, 0.2, 0.25, 0.32)},
    "neutral chunks": Variant(reach=32, behind="alone"),
    "behind one neighbour, no drift": Variant(behind="1"),
    "behind one neighbour": Variant(reach=32, behind="1"),
    "behind three neighbours": Variant(reach=32, behind="3"),
    "layers at 66-80 %, mean": replace(DEFAULT, norm=False),
    "deeper half": DEEPER,
    "deeper half, norm": replace(DEEPER, norm=True),
    "layers at 75-100 %, mean": replace(DEEPER, layers=(0.75, 1.0)),
    **{f"deeper half, ratio {ratio}": replace(DEEPER, ratio=ratio)
       for ratio in (0.05, 0.08, 0.12, 0.2, 0.25, 0.32, 0.45)},
    **{f"deeper half, coverage {share}": replace(DEEPER, coverage=share) for share in (0.5, 0.6, 0.7, 0.8)},
    **{f"deeper half, repair {rows}": replace(DEEPER, repair=rows) for rows in (128, 512, 1024)},
    "deeper half, best chunk first": replace(DEEPER, front=True),
}


class Lab:
    """Runs variants over questions."""

    def __init__(self, model: Model, sink: int) -> None:
        self.model = model
        self.sink = sink

    def prepare(self, question: Question) -> None:
        """A full prefill and its answer."""
        at = torch.arange(len(question.ids), device=self.model.device)
        _, question.kv, _ = self.model.run(question.ids, at)
        ids, found = [question.ids[-1]], []
        context = question.kv
        for step in range(ANSWER):
            place = torch.tensor([len(question.ids) - 1 + step], device=self.model.device)
            context = [tuple(F.pad(t, (0, 0, 0, 0, 0, 1)) for t in pair) if step else pair for pair in context]
            logprobs, _, context = self.model.run(ids[-1:], place, context, logits=True)
            assert logprobs is not None
            found.append(logprobs[0])
            ids.append(int(logprobs[0].argmax()))
        question.answer, question.expected = ids[1:], torch.stack(found)

    def encoded(self, ids: list[int], before: list[int]) -> KV:
        at = torch.arange(len(before) + len(ids), device=self.model.device)
        _, fresh, _ = self.model.run(before + ids, at)
        return [(k[len(before):], v[len(before):]) for k, v in fresh]

    def measure(self, question: Question, variant: Variant) -> dict[str, float]:
        """Rows, KL, top-1 agreement, and KL over the answer."""
        if variant.front:
            return self.measure(self._best_first(question, variant), replace(variant, front=False))
        total, start = len(question.ids), len(question.ids) - len(question.query)
        exact_first = variant.behind != "alone"
        context = self._context(question, variant)
        reused = torch.zeros(total, dtype=torch.bool, device=self.model.device)
        for begin, end in question.spans[1 if exact_first else 0:]:
            reused[begin:end] = True
        scores, depth = self._scores(question, context, variant)
        chosen = self._choose(variant, scores, reused)
        rows = chosen.clone()
        rows[start:] = True
        at = rows.nonzero()[:, 0]
        moved = self._drift(question, variant, chosen, reused) if variant.reach else None
        ids = torch.tensor(question.ids, device=self.model.device)[at]
        _, _, merged = self.model.run(ids, at, context, moved=moved)
        found = self._answered(question, merged, variant.repair, int(reused.nonzero()[0, 0]))
        kl = (question.expected.exp() * (question.expected - found)).sum(-1).clamp_min(0)
        return {"rows": (len(at) + depth * len(question.query)) / total, "KL": float(kl[0]),
                "KL of 16": float(kl.mean()), "top-1": float(found[0].argmax() == question.expected[0].argmax())}

    def _answered(self, question: Question, kv: KV, repair: int, first: int) -> torch.Tensor:
        """Log probabilities along the full prefill's answer; with `repair`, of KV that is mended meanwhile."""
        total = len(question.ids)
        given = [question.ids[-1], *question.answer[:-1]]
        if not repair:
            last = torch.arange(total - 1, total - 1 + ANSWER, device=self.model.device)
            found, _, _ = self.model.run(given, last, _padded(kv, ANSWER - 1), logits=True)
            assert found is not None
            return found
        ids = torch.tensor(question.ids, device=self.model.device)
        places = []
        for step, token in enumerate(given):
            if step:
                rows = torch.arange(first, min(total, first + repair), device=self.model.device)
                first += len(rows)
                _, _, mended = self.model.run(ids[rows], rows, [(k[:total], v[:total]) for k, v in kv])
                kv = [(torch.cat([k, old_k[total:]]), torch.cat([v, old_v[total:]]))
                      for (k, v), (old_k, old_v) in zip(mended, kv, strict=True)]
                kv = _padded(kv, 1)
            at = torch.tensor([total - 1 + step], device=self.model.device)
            logprobs, _, kv = self.model.run([token], at, kv, logits=True)
            assert logprobs is not None
            places.append(logprobs[0])
        return torch.stack(places)

    def _best_first(self, question: Question, variant: Variant) -> Question:
        """The question with its chunks in another order, and what a full prefill makes of that."""
        scores, _ = self._scores(question, self._context(question, variant), variant)
        best = max(range(len(question.chunks)), key=lambda n: float(scores[slice(*question.spans[n])].sum()))
        others = [chunk for number, chunk in enumerate(question.chunks) if number != best]
        moved = Question(question.prefix, [question.chunks[best], *others], question.query)
        self.prepare(moved)
        return moved

    def _context(self, question: Question, variant: Variant) -> KV:
        entries = []
        for number, chunk in enumerate(question.chunks):
            before = [self.sink] if variant.behind == "alone" else list(question.prefix)
            if variant.behind.isdigit() and number:  # the first one stays exact
                for n in range(1, int(variant.behind) + 1):
                    before += question.chunks[(number + 3 * n) % len(question.chunks)]
            entries.append(self.encoded(chunk, before))
        pieces = [self.encoded(question.prefix, []), *entries]
        empty = torch.zeros(len(question.query), self.model.kv_heads, self.model.size, device=self.model.device,
                            dtype=self.model.dtype)
        return [(torch.cat([*(piece[index][0] for piece in pieces), empty]),
                 torch.cat([*(piece[index][1] for piece in pieces), empty])) for index in range(self.model.layers)]

    def _scores(self, question: Question, context: KV, variant: Variant) -> tuple[torch.Tensor, float]:
        model = self.model
        first, last = int(variant.layers[0] * model.layers), round(variant.layers[1] * model.layers)
        scores = torch.zeros(len(question.ids), device=model.device)

        def watch(index: int, q: torch.Tensor, keys: torch.Tensor, seen: torch.Tensor) -> None:
            if index >= first:
                wide = keys.repeat_interleave(model.heads // model.kv_heads, 1).float()
                logits = torch.einsum("qhd,khd->hqk", q.float(), wide) / math.sqrt(model.size)
                weights = logits.masked_fill(~seen, float("-inf")).softmax(-1).mean(0)
                scores.add_(weights.norm(dim=0) if variant.norm else weights.mean(0))

        at = torch.arange(len(question.ids) - len(question.query), len(question.ids), device=model.device)
        model.run(question.query, at, context, depth=last, watch=watch)
        return scores, variant.layers[1]

    def _choose(self, variant: Variant, scores: torch.Tensor, reused: torch.Tensor) -> torch.Tensor:
        if variant.rows == "random":
            scores = torch.rand(len(scores), generator=torch.Generator().manual_seed(0)).to(scores.device)
        chosen = torch.zeros_like(reused)
        if variant.spread:
            chosen[reused.nonzero()[:: round(1 / variant.spread), 0]] = True
        count = round(variant.ratio * int(reused.sum())) - int(chosen.sum())
        if variant.coverage:
            ranked = scores[reused].sort(descending=True).values.cumsum(0)
            count = int((ranked < variant.coverage * ranked[-1]).sum()) + 1
        chosen[scores.masked_fill(~reused | chosen, float("-inf")).topk(count).indices] = True
        return chosen

    def _drift(self, question: Question, variant: Variant, chosen: torch.Tensor, reused: torch.Tensor) -> Any:
        chunk = torch.full((len(reused),), -1, device=reused.device)
        for number, (begin, end) in enumerate(question.spans):
            chunk[begin:end] = number
        stale, probes = (reused & ~chosen).nonzero()[:, 0], chosen.nonzero()[:, 0]
        distance = (stale[:, None] - probes[None]).abs().float()
        weights = torch.exp(-distance / variant.reach) * (chunk[stale][:, None] == chunk[probes][None])
        weights = weights + variant.overall / max(1, len(probes))
        weights = weights / weights.sum(1, keepdim=True)

        def moved(all_k: torch.Tensor, all_v: torch.Tensor, at: torch.Tensor, k: torch.Tensor,
                  v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            of = chosen[at]
            for wanted, stored, new in ((variant.keys, all_k, k), (variant.values, all_v, v)):
                if wanted and len(probes):
                    average = weights @ (new[of].float() - stored[probes].float()).flatten(1)
                    stored[stale] += average.view(-1, *new.shape[1:]).to(stored.dtype)
            return all_k, all_v

        return moved


def _padded(kv: KV, tokens: int) -> KV:
    """With room for more tokens behind."""
    return [(F.pad(k, (0, 0, 0, 0, 0, tokens)), F.pad(v, (0, 0, 0, 0, 0, tokens))) for k, v in kv]


def read(folder: Path, data: Path, limit: int) -> tuple[list[Question], int]:
    """The questions in the model's chat template, and the token that neutral chunks are encoded behind."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    found = []
    for row in json.loads(data.read_text())[:limit]:
        question = row["question"].rstrip("?") + "?"
        text = tokenizer.apply_chat_template([{"role": "user", "content": f"{BEFORE}@@@{BEHIND}{question}"}],
                                             tokenize=False, add_generation_prompt=True)
        before, behind = (tokenizer.encode(part, add_special_tokens=False) for part in text.split("@@@"))
        chunks = [tokenizer.encode(f"{c['title']}\n\n{c['text']}\n\n", add_special_tokens=False) for c in row["ctxs"]]
        found.append(Question(before, chunks, behind))
    return found, tokenizer.bos_token_id or tokenizer.eos_token_id


@torch.inference_mode()
def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("--questions", type=int, default=30)
    parser.add_argument("--only", nargs="*", choices=VARIANTS, default=list(VARIANTS))
    arguments = parser.parse_args()
    questions, sink = read(arguments.model, arguments.data, arguments.questions)
    lab = Lab(Model(arguments.model, "cuda" if torch.cuda.is_available() else "cpu"), sink)
    found: dict[str, list[dict[str, float]]] = {name: [] for name in arguments.only}
    for question in questions:
        lab.prepare(question)
        for name in arguments.only:
            found[name].append(lab.measure(question, VARIANTS[name]))
        question.kv = []
    for name, rows in found.items():
        means = "  ".join(f"{key} {sum(row[key] for row in rows) / len(rows):.3f}" for key in rows[0])
        print(f"{name:32} {means}", flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
