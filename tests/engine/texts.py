"""Passages to make prompts of, and twenty prompts in which chunks stand everywhere they can."""

from __future__ import annotations

from blendrag import BlendPrompt, Chunk

PASSAGES = [
    "The lighthouse at Skerry Point was built in 1847 by Alan Marsh, who had learned his trade on the Bell Rock. "
    "Its lamp burned whale oil until 1871, when paraffin took its place. The keeper's log for the winter of 1852 "
    "records nineteen wrecks, and notes that the fog bell was rung by hand for forty hours without a pause.",
    "Heron Valley Dairy keeps two hundred goats of the Toggenburg breed. The milk is pasteurised at 72 degrees "
    "for fifteen seconds and turned into a soft cheese called Alder, which ripens for three weeks in a cellar cut"
    " into the hill. In 2019 the dairy sold eleven tonnes of it, mostly at the Saturday market in Ormsby.",
    "A binary heap stores a partially ordered tree in an array: the children of the element at index i stand at "
    "2i + 1 and 2i + 2. Inserting an element appends it and lets it rise while it is smaller than its parent, "
    "which takes at most log n steps. Building a heap from n elements bottom-up takes linear time, which "
    "surprises most students.",
    "Maria Okafor joined the Ormsby town council in 2011 and has chaired its water committee since 2015. She "
    "proposed the reservoir above Heron Valley, which was approved by nine votes to four after a hearing that "
    "lasted until midnight. Her brother Daniel runs the Saturday market.",
    "Dry stone walls are built without mortar. Two faces of larger stones lean towards each other, small stones "
    "called hearting fill the middle, and long through-stones tie the faces together every metre. A good waller "
    "lays about three metres a day, and the wall, left alone, stands for two centuries.",
    "def median(values):\n"
    "    ordered = sorted(values)\n"
    "    middle = len(ordered) // 2\n"
    "    if len(ordered) % 2:\n"
    "        return ordered[middle]\n"
    "    return (ordered[middle - 1] + ordered[middle]) / 2\n"
    "\n"
    "# median([3, 1, 2]) is 2, and median([4, 1, 3, 2]) is 2.5; an empty list raises IndexError.",
]

SYSTEM = "<|im_start|>system\nYou answer in one sentence, from the passages alone.<|im_end|>\n<|im_start|>user\n"
QUESTION = "\nWho chairs the water committee of the town where the cheese is sold?<|im_end|>\n<|im_start|>assistant\n"


def layouts() -> list[BlendPrompt]:
    """Chunks in any order, repeated, adjacent, at the start, at the end, between text, many and few."""
    a, b, c, d, e, f = map(Chunk, PASSAGES)
    end = "\nQuestion: what is it about?\nAnswer:"
    return [
        BlendPrompt(SYSTEM, a, "\n\n", b, "\n\n", c, QUESTION),
        BlendPrompt(SYSTEM, c, "\n\n", a, "\n\n", b, QUESTION),
        BlendPrompt(SYSTEM, f, e, d, c, b, a, QUESTION),
        BlendPrompt(a, b, end),
        BlendPrompt(b, a, end),
        BlendPrompt(a, end),
        BlendPrompt("Read this. ", a),
        BlendPrompt("Read these. ", d, b),
        BlendPrompt(e),
        BlendPrompt(a, a, end),
        BlendPrompt(SYSTEM, b, "\n", c, "\n", b, QUESTION),
        BlendPrompt(SYSTEM, d, d, d, QUESTION),
        BlendPrompt("x", f, "y", e, "z"),
        BlendPrompt(SYSTEM, a, " and then ", b, " and at last ", c, end),
        BlendPrompt(SYSTEM, "What follows is long. ", e, "\n\n", f, "\n\n", a, "\n\n", d, QUESTION),
        BlendPrompt(f, "\n\n", QUESTION, c, "\n\n", end),
        BlendPrompt(SYSTEM, c, QUESTION),
        BlendPrompt(SYSTEM, "no chunk of this prompt is stored: ", Chunk("A passage never encoded. " * 5), end),
        BlendPrompt(SYSTEM, a, "\n\n", Chunk("Only this passage was never encoded before. " * 2), "\n\n", b, QUESTION),
        BlendPrompt(SYSTEM, b, e, "\n", a, f, "\n", c, d, QUESTION),
    ]


def short_layouts() -> list[BlendPrompt]:
    """Six of them that differ most."""
    chosen = layouts()
    return [chosen[number] for number in (1, 4, 6, 8, 10, 18)]
