"""Writes examples/data/*.json: questions about a region that does not exist, in three kinds, and conversations.

`python scripts/make_questions.py` writes the files anew; they are the same every time.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent.parent / "examples" / "data"

PASSAGES = {
    "Skerry Point":
        "The lighthouse at Skerry Point was built in 1847 by Alan Marsh, who had learned his trade on a rock light "
        "further north. Its lamp burned whale oil until 1871, when paraffin took its place. The keeper's log for "
        "the winter of 1852 records nineteen wrecks, and notes that the fog bell was rung by hand for forty hours "
        "without a pause. The tower is painted in two white bands and one red.",
    "Alan Marsh":
        "Alan Marsh was born in Tarn Bridge in 1809, the third son of a clockmaker. He left school at eleven to "
        "carry mortar, and at thirty he was drawing towers of his own. Besides lighthouses he built the corn "
        "exchange and two chapels. He married Ellen Rook, who kept his accounts and is said to have kept his temper "
        "as well. He died in 1880 and is buried beside the river.",
    "Tarn Bridge":
        "Tarn Bridge lies where the old salt road crosses the river Eller. The town has been known since the "
        "sixteenth century for its clockmakers, of whom one workshop is left. Its market is held on Thursdays in "
        "the corn exchange. A flood in 1912 carried the bridge away, and a stone one of five arches replaced it two "
        "years later.",
    "The river Eller":
        "The Eller rises on Grey Moor and reaches the sea at Ormsby after seventy-one kilometres. Salmon were "
        "counted in it again in 1998, for the first time since the tanneries came. Above Tarn Bridge it is shallow "
        "and full of boulders; below, flat barges carried lime and slate until 1934. Its only reservoir lies in "
        "Heron Valley.",
    "Heron Valley Dairy":
        "Heron Valley Dairy keeps two hundred goats of the Toggenburg breed. The milk is pasteurised at 72 degrees "
        "for fifteen seconds and turned into a soft cheese called Alder, which ripens for three weeks in a cellar "
        "cut into the hill. In 2019 the dairy sold eleven tonnes of it, mostly at the Saturday market in Ormsby. It "
        "was founded by Judith Kell.",
    "Judith Kell":
        "Judith Kell studied chemistry and worked for nine years in a paint factory before she bought her first "
        "goats in 1994. She plays the cello in the Ormsby town orchestra, and wrote a short book on rennet that "
        "cheese makers abroad know better than her neighbours do. Her daughter Ruth runs the shop.",
    "Maria Okafor":
        "Maria Okafor joined the Ormsby town council in 2011 and has chaired its water committee since 2015. She "
        "proposed the reservoir above Heron Valley, which was approved by nine votes to four after a hearing that "
        "lasted until midnight. Her brother Daniel runs the Saturday market. Before she went into politics she "
        "taught geography.",
    "Ormsby":
        "Ormsby is the largest town of the coast, with nineteen thousand inhabitants and a harbour that falls dry "
        "at low tide. Its town hall has a green copper roof, given by the ropemaker Josiah Finch in 1866. The "
        "orchestra, an amateur one, rehearses in the old ropewalk. Ferries leave for the island of Linn twice a "
        "day.",
    "Josiah Finch":
        "Josiah Finch made ropes for whaling ships, and more of them than anybody else on the coast. When whaling "
        "ended he turned to lifts, and hung the first one in the Hotel Meridian. He never learned to swim. His "
        "collection of knots, four hundred and twelve of them on oak boards, is shown in the ropewalk.",
    "The island of Linn":
        "Linn is four kilometres long and has one road, one school and no trees. Its sheep eat seaweed in winter. "
        "The island's stone walls were listed as a monument in 1977 after a campaign by Peter Sand, who counted "
        "every metre of them. A ferry from Ormsby takes fifty minutes when the wind allows it.",
    "Peter Sand":
        "Peter Sand was a ferry captain until his knees gave out, and a waller afterwards. He taught three hundred "
        "people to build without mortar: two faces of larger stones that lean towards each other, small stones "
        "called hearting in the middle, long through-stones every metre. He lays about three metres a day and "
        "dislikes being photographed.",
    "Hotel Meridian":
        "The Hotel Meridian stands on the sea front of Calder Sands, a resort that the railway made and the "
        "aeroplane unmade. It opened in 1879 with ninety rooms. The architect Clara Venn put the kitchen on the top "
        "floor, so that no guest should smell cabbage. The lift is still the first one, with new ropes.",
    "Clara Venn":
        "Clara Venn drew hotels, a pier and one prison, and said that the prison had the better light. She was the "
        "first woman in the regional society of architects, which she joined in 1874. She spent her last years on "
        "Grey Moor, where she painted rain. Her drawings are kept in the library of Tarn Bridge.",
    "Grey Moor":
        "Grey Moor is a plateau of peat and heather, 540 metres high at its middle. Two thousand people lived there "
        "when lead was mined, and eighty do now. The moor's weather station, run by volunteers, has recorded rain "
        "on 251 days of an average year. The mine's chimney can be seen from the sea.",
}

MULTI_HOP: list[tuple[str, list[str], list[str]]] = [
    ("In which town was the builder of the lighthouse at Skerry Point born?", ["Tarn Bridge"],
     ["Skerry Point", "Alan Marsh"]),
    ("On which day is the market held in the town where Alan Marsh was born?", ["Thursday", "Thursdays"],
     ["Alan Marsh", "Tarn Bridge"]),
    ("Which instrument does the founder of the dairy that makes Alder play?", ["the cello", "cello"],
     ["Heron Valley Dairy", "Judith Kell"]),
    ("Who chairs the water committee of the town where most Alder is sold?", ["Maria Okafor"],
     ["Heron Valley Dairy", "Maria Okafor"]),
    ("Who runs the market where Heron Valley Dairy sells its cheese?", ["Daniel Okafor", "Daniel"],
     ["Heron Valley Dairy", "Maria Okafor"]),
    ("Where does the river that flows through Tarn Bridge rise?", ["Grey Moor", "on Grey Moor"],
     ["Tarn Bridge", "The river Eller"]),
    ("What did the man who gave Ormsby's town hall its roof make?", ["ropes", "ropes for whaling ships"],
     ["Ormsby", "Josiah Finch"]),
    ("Who was the architect of the hotel in which Josiah Finch hung his first lift?", ["Clara Venn"],
     ["Josiah Finch", "Hotel Meridian"]),
    ("On how many days of the year does it rain where Clara Venn spent her last years?", ["251", "251 days"],
     ["Clara Venn", "Grey Moor"]),
    ("What was the man who had the walls of Linn listed before he became a waller?",
     ["a ferry captain", "ferry captain"], ["The island of Linn", "Peter Sand"]),
    ("Where are the drawings of the architect of the Hotel Meridian kept?",
     ["the library of Tarn Bridge", "in the library of Tarn Bridge"], ["Hotel Meridian", "Clara Venn"]),
    ("How many inhabitants has the town where the river Eller reaches the sea?", ["nineteen thousand", "19,000"],
     ["The river Eller", "Ormsby"]),
]
"""Questions, their answers, and the two passages that it takes to answer them."""

FOLLOW_UPS: list[list[tuple[str, list[str], str]]] = [
    [("Whom did he marry?", ["Ellen Rook"], "Alan Marsh"),
     ("In which year did a flood carry away the bridge of that town?", ["1912", "in 1912"], "Tarn Bridge")],
    [("In which building is it held?", ["the corn exchange", "in the corn exchange"], "Tarn Bridge"),
     ("When was the lighthouse at Skerry Point built?", ["1847", "in 1847"], "Skerry Point")],
    [("Where did she work before she bought her first goats?", ["a paint factory", "in a paint factory"],
      "Judith Kell"),
     ("For how long does Alder ripen?", ["three weeks", "for three weeks"], "Heron Valley Dairy")],
    [("What did she teach before she went into politics?", ["geography"], "Maria Okafor"),
     ("Of which breed are the dairy's goats?", ["Toggenburg", "the Toggenburg breed"], "Heron Valley Dairy")],
    [("What did his sister propose?", ["the reservoir above Heron Valley", "a reservoir"], "Maria Okafor"),
     ("Who gave the town hall of Ormsby its roof?", ["Josiah Finch", "the ropemaker Josiah Finch"], "Ormsby")],
    [("How long is that river?", ["seventy-one kilometres", "71 kilometres"], "The river Eller"),
     ("What was mined on Grey Moor?", ["lead"], "Grey Moor")],
    [("How many knots are in his collection?", ["four hundred and twelve", "412"], "Josiah Finch"),
     ("For which island do ferries leave Ormsby?", ["Linn", "the island of Linn"], "Ormsby")],
    [("On which floor did she put the kitchen?", ["the top floor", "on the top floor"], "Hotel Meridian"),
     ("What did Josiah Finch turn to when whaling ended?", ["lifts", "to lifts"], "Josiah Finch")],
    [("How high is that moor?", ["540 metres", "540 metres high"], "Grey Moor"),
     ("In which year did she join the society of architects?", ["1874", "in 1874"], "Clara Venn")],
    [("How many metres of wall does he lay a day?", ["about three", "three", "about three metres"], "Peter Sand"),
     ("What do the sheep of Linn eat in winter?", ["seaweed"], "The island of Linn")],
    [("What did she paint in her last years?", ["rain"], "Clara Venn"),
     ("In which year did the hotel open?", ["1879", "in 1879"], "Hotel Meridian")],
    [("Where does its orchestra rehearse?", ["the old ropewalk", "in the old ropewalk"], "Ormsby"),
     ("In which year were salmon counted in the Eller again?", ["1998", "in 1998"], "The river Eller")],
]
"""What is asked after each question of MULTI_HOP: its answers, and the passage that it takes.

The first stays with what the conversation is about and names it by a pronoun, the second turns to something else.
"""

SUMMARIES: list[tuple[str, str, list[str]]] = [
    ("Summarise what the passages say about water: rivers, reservoirs and rain.",
     "The river Eller rises on Grey Moor, where it rains on 251 days of the year, and reaches the sea at Ormsby; "
     "its only reservoir, in Heron Valley, was proposed by Maria Okafor.",
     ["The river Eller", "Grey Moor", "Maria Okafor"]),
    ("Summarise the life of Alan Marsh and what he built.",
     "Alan Marsh, born in Tarn Bridge in 1809 as a clockmaker's son, built lighthouses such as the one at Skerry "
     "Point, the corn exchange and two chapels, and died in 1880.",
     ["Alan Marsh", "Skerry Point", "Tarn Bridge"]),
    ("Summarise how the Hotel Meridian came to be as it is.",
     "The Hotel Meridian opened in Calder Sands in 1879 with ninety rooms; Clara Venn put the kitchen on the top "
     "floor, and Josiah Finch hung his first lift there, which still runs.",
     ["Hotel Meridian", "Clara Venn", "Josiah Finch"]),
    ("Summarise what is made and sold in the region, and by whom.",
     "Judith Kell's Heron Valley Dairy makes Alder, a soft goat cheese sold at Ormsby's Saturday market, Josiah "
     "Finch made ropes, and Tarn Bridge is known for its clockmakers.",
     ["Heron Valley Dairy", "Judith Kell", "Josiah Finch", "Tarn Bridge"]),
    ("Summarise what the passages say about walls and the man who counts them.",
     "Linn's dry stone walls were listed in 1977 after Peter Sand, a former ferry captain who taught three hundred "
     "people to build without mortar, had counted every metre.",
     ["The island of Linn", "Peter Sand"]),
    ("Summarise what the passages say about Ormsby and its people.",
     "Ormsby is the largest town of the coast, with nineteen thousand inhabitants, a tidal harbour, an amateur "
     "orchestra in which Judith Kell plays, and Maria Okafor on its council.",
     ["Ormsby", "Judith Kell", "Maria Okafor"]),
]

SHIPS = ("Alma", "Bright Return", "Cormorant", "Dorothea", "Elder Brother", "Fair Trade", "Grace", "Hesper", "Ilse",
         "Juno", "Kestrel", "Lapwing")
CARGOES = ("salt", "slate", "barley", "herring", "timber", "lime", "wool", "coal", "tar", "hemp", "oil cake", "bricks")
PORTS = ("Ormsby", "Linn", "Calder Sands", "Port Hallow", "Nessfoot", "Whitmouth")
WEATHERS = ("calm, with fog until ten", "a fresh wind from the west", "rain all day", "clear and cold",
            "a gale that kept the boats in", "warm, with haze over the bar")
MONTHS = ("January", "March", "May", "July", "September", "November")
DAYS = 14


def multi_hop(rng: random.Random) -> list[dict[str, Any]]:
    """Each question with the passages that answer it, hidden among six others."""
    return [{"ctxs": _ctxs(rng, needed, 6), "question": question, "answers": answers}
            for question, answers, needed in MULTI_HOP]


def conversations(rng: random.Random) -> list[dict[str, Any]]:
    """Three turns over the passages that answer all three questions, hidden among others: eight in all."""
    entries = []
    for (question, answers, needed), asked in zip(MULTI_HOP, FOLLOW_UPS, strict=True):
        titles = list(dict.fromkeys([*needed, *(passage for _, _, passage in asked)]))
        follow_ups = [{"question": text, "answers": right} for text, right, _ in asked]
        entries.append({"ctxs": _ctxs(rng, titles, 8 - len(titles)), "question": question, "answers": answers,
                        "follow_ups": follow_ups})
    return entries


def lookup(rng: random.Random) -> list[dict[str, Any]]:
    """Logs of a harbour, a month each, and one fact of one day in one of them."""
    logs = {month: [_entry(rng, number, month) for number in range(1, DAYS + 1)] for month in MONTHS}
    entries = []
    for number in range(12):
        month = MONTHS[number % len(MONTHS)]
        day = rng.randrange(DAYS)
        ship, cargo, port = logs[month][day][1]
        asked, answers = (("Which ship came in on", [f"the {ship}", ship]),
                          ("What did the ship carry that came in on", [cargo]),
                          ("From which port was the ship that came in on", [port]))[number % 3]
        ctxs = [{"title": f"Harbour log of Ormsby, {name}", "text": " ".join(text for text, _ in logs[name])}
                for name in rng.sample(MONTHS, 4) if name != month][:3]
        ctxs.insert(rng.randrange(4), {"title": f"Harbour log of Ormsby, {month}",
                                       "text": " ".join(text for text, _ in logs[month])})
        entries.append({"ctxs": ctxs, "question": f"{asked} {day + 1} {month}?", "answers": answers})
    return entries


def summaries(rng: random.Random) -> list[dict[str, Any]]:
    """What several passages say together; the answers are one good summary each."""
    return [{"ctxs": _ctxs(rng, needed, 2), "question": question, "answers": [answer],
             "instruction": "Answer from the passages alone, in one or two sentences."}
            for question, answer, needed in SUMMARIES]


def _ctxs(rng: random.Random, needed: list[str], others: int) -> list[dict[str, str]]:
    titles = needed + rng.sample([title for title in PASSAGES if title not in needed], others)
    rng.shuffle(titles)
    return [{"title": title, "text": PASSAGES[title]} for title in titles]


def _entry(rng: random.Random, day: int, month: str) -> tuple[str, tuple[str, str, str]]:
    ship, cargo, port = rng.choice(SHIPS), rng.choice(CARGOES), rng.choice(PORTS[1:])
    text = (f"{day} {month}: {rng.choice(WEATHERS)}. The {ship} came in from {port} with {rng.randrange(8, 90)} tons "
            f"of {cargo}, berth {rng.randrange(1, 7)}, dues paid.")
    return text, (ship, cargo, port)


def main() -> None:
    """Writes the files."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, make in (("multihop", multi_hop), ("lookup", lookup), ("summaries", summaries),
                       ("conversations", conversations)):
        entries = make(random.Random(name))
        (FOLDER / f"{name}.json").write_text(json.dumps(entries, indent=1, ensure_ascii=False) + "\n", "utf-8")


if __name__ == "__main__":
    main()
