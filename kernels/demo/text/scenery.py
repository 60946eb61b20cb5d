"""Sentences that state no fact about anybody: they fill documents, so that facts lie far apart."""

from __future__ import annotations

from random import Random

_SUBJECTS = (
    "The wind", "The rain", "The morning fog", "The old clock", "The church bell", "The evening sun", "The river",
    "The smell of wet grass", "A cart full of hay", "The ferry", "A flock of sparrows", "The smoke of the chimneys",
    "The light of the moon", "A long line of ants", "The first snow", "The song of the reapers",
)  # fmt: skip
_ACTIONS = (
    "came slowly over", "could be heard as far as", "crossed", "rested for a while near", "passed", "turned towards",
    "filled the air above", "moved along", "reached", "hung above", "drifted past", "went around",
)  # fmt: skip
_PLACES = (
    "the hills", "the old mill", "the empty fields", "the stone bridge", "the narrow streets", "the quiet harbour",
    "the last houses", "the vineyards", "the market square", "the edge of the forest", "the railway", "the long wall",
)  # fmt: skip
_ENDINGS = (
    "", "", "", " and nobody said a word", " before the day was over", " as it does every year",
    " while the children were asleep", " and the dogs began to bark", " long before breakfast", " without any hurry",
    " and the windows rattled", " until the lamps were lit",
)  # fmt: skip
LEAD_INS = (
    "", "", "", "As far as anybody knows, ", "It is no secret that ", "The neighbours say that ", "Everybody agrees that ",
    "The postman told us that ", "In the village book it is written that ", "You should also know that ",
    "By the way, ", "The children like to tell that ",
)  # fmt: skip


def filler(random: Random) -> str:
    """Return a sentence about the weather and the land, in which no name occurs."""
    place, ending = random.choice(_PLACES), random.choice(_ENDINGS)
    return f"{random.choice(_SUBJECTS)} {random.choice(_ACTIONS)} {place}{ending}."
