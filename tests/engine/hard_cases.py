"""Prompts on which reuse of KV is known to fail: near duplicates, edits, many chunks and the like."""

from __future__ import annotations

from tests.engine.texts import PASSAGES

OLD_RULES = ("Visitors to the Ormsby reservoir may swim from May to September between the two yellow buoys. Dogs "
             "must be kept on a lead. The gate closes at eight in the evening, and the fine for staying longer is 40 "
             "pounds.")
NEW_RULES = OLD_RULES.replace("eight in the evening", "ten in the evening").replace("40 pounds", "65 pounds")

CASES: dict[str, tuple[list[str], str]] = {
    "several hops": (PASSAGES[:4], "Who chairs the water committee of the town where the goat cheese is sold?"),
    "an answer that a reader of one passage misses": (
        [PASSAGES[0], PASSAGES[4], PASSAGES[3]], "Does any passage mention who runs the Saturday market? Who is it?"),
    "near duplicates": (
        [OLD_RULES, PASSAGES[1], OLD_RULES.replace("Ormsby", "Felton").replace("40 pounds", "25 pounds")],
        "What is the fine at the Felton reservoir?"),
    "the same entity in two documents": (
        [PASSAGES[3], "Maria Okafor published her first collection of poems in 1998, long before she went into "
         "politics. It was printed in Leeds in four hundred copies, of which she gave half to the library of her "
         "school.",
         PASSAGES[1]],
        "What did Maria Okafor publish, and when did she join the council?"),
    "an edited document": ([PASSAGES[1], NEW_RULES, PASSAGES[3]], "When does the gate of the reservoir close?"),
    "many short chunks": (
        [f"On day {day} the keeper at Skerry Point counted {(day * 37) % 19 + 2} ships and wrote that the wind came "
         f"from the {('north', 'east', 'south', 'west')[day % 4]}." for day in range(1, 25)],
        "How many ships did the keeper count on day 17?"),
    "other languages": (
        ["Der Leuchtturm von Skerry Point wurde 1847 von Alan Marsh errichtet. Seine Lampe brannte bis 1871 mit Walöl, "
         "danach mit Paraffin. Im Winter 1852 wurde die Nebelglocke vierzig Stunden lang von Hand geläutet.",
         "山谷奶牛场饲养着两百只山羊。牛奶在七十二度下消毒十五秒钟，然后制成一种叫做桤木的软奶酪，在山中的地窖里成熟三个星期。",
         "تأسس سوق السبت في المدينة عام ١٩٠٢، ويبيع فيه المزارعون الجبن والعسل والخبز من الفجر حتى الظهر."],
        "Wann wurde der Leuchtturm errichtet?"),
    "code": ([PASSAGES[5], PASSAGES[2], PASSAGES[5].replace("median", "middle_value").replace(" / 2", " // 2")],
             "What does middle_value([4, 1, 3, 2]) return?"),
    "tables": (
        ["| town | council seats | market day |\n|---|---|---|\n| Ormsby | 13 | Saturday |\n| Felton | 9 | Tuesday |\n"
         "| Heron Bridge | 7 | Friday |\n| Skerry | 5 | none |",
         "| town | inhabitants 2011 | inhabitants 2021 |\n|---|---|---|\n| Ormsby | 8,410 | 9,022 |\n| Felton | "
         "3,250 | 3,108 |\n| Heron Bridge | 1,904 | 2,377 |\n| Skerry | 412 | 398 |", PASSAGES[4]],
        "How many inhabitants had the town with market day Tuesday in 2021?"),
    "a long context": (
        [text.replace("Ormsby", town).replace("1847", str(1800 + number))
         for number, town in enumerate(("Ormsby", "Felton", "Skerry", "Leeds")) for text in PASSAGES[:5]],
        "In which of these towns does the dairy sell its cheese?"),
}
"""Passages and a question, by what is hard about them."""
