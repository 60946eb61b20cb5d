"""Words of the demo model's small world: names, places, things and their properties.

Every list is used by several kinds of text, so that the model meets each word often. Answers come from lists of at
least sixteen entries: a guess is right once in sixteen times at best.
"""

from __future__ import annotations

WOMEN = (
    "Ada", "Alma", "Anna", "Bella", "Clara", "Dora", "Edith", "Elena", "Ella", "Emma", "Flora", "Freya", "Greta", "Hanna",
    "Helen", "Ida", "Irma", "Iris", "Jana", "Julia", "Kira", "Lara", "Lena", "Lily", "Lucy", "Maria", "Marta", "Maya",
    "Mila", "Mira", "Nadia", "Nina", "Nora", "Olga", "Paula", "Petra", "Rita", "Rosa", "Ruth", "Sara", "Selma", "Sofia",
    "Stella", "Tessa", "Thea", "Vera", "Wanda", "Yara", "Yrsa", "Zoe",
)  # fmt: skip
MEN = (
    "Adam", "Albert", "Alex", "Anton", "Arno", "Basil", "Ben", "Boris", "Carl", "Conrad", "Daniel", "David", "Emil",
    "Eric", "Felix", "Finn", "Frank", "Fred", "Georg", "Henry", "Hugo", "Igor", "Ivan", "Jacob", "Jonas", "Julian",
    "Karim", "Leo", "Louis", "Lukas", "Marco", "Martin", "Max", "Milo", "Nico", "Nils", "Omar", "Oscar", "Otto", "Paul",
    "Peter", "Ralf", "Robin", "Samuel", "Simon", "Theo", "Tom", "Victor", "Walter", "Yusuf",
)  # fmt: skip
NAMES = WOMEN + MEN

COLOURS = (
    "red", "green", "blue", "yellow", "white", "black", "brown", "grey", "purple", "orange", "pink", "silver", "golden",
    "turquoise", "violet", "crimson", "beige", "scarlet",
)  # fmt: skip
TOWNS = (
    "Ashford", "Birchley", "Coldwater", "Dunmore", "Eastbrook", "Fairhaven", "Greenhill", "Hartwell", "Ivybridge",
    "Kingsport", "Longfield", "Milton", "Northgate", "Oakdale", "Porthaven", "Queensbury", "Redcliff", "Stonebridge",
    "Thornton", "Westmere",
)  # fmt: skip
TRADES = (
    "baker", "carpenter", "doctor", "farmer", "fisher", "gardener", "miller", "painter", "pilot", "potter", "sailor",
    "singer", "smith", "tailor", "teacher", "weaver", "writer", "shepherd", "librarian", "clockmaker",
)  # fmt: skip
ANIMALS = (
    "cat", "dog", "goat", "horse", "rabbit", "parrot", "turtle", "donkey", "duck", "goose", "hamster", "lamb", "mouse",
    "owl", "pony", "raven", "fox", "hen",
)  # fmt: skip
FRUITS = (
    "apple", "apricot", "banana", "cherry", "fig", "grape", "lemon", "lime", "mango", "melon", "olive", "peach", "pear",
    "plum", "quince", "raspberry", "strawberry", "tangerine",
)  # fmt: skip
INSTRUMENTS = (
    "accordion", "banjo", "bassoon", "cello", "clarinet", "drum", "fiddle", "flute", "guitar", "harp", "horn", "lute",
    "oboe", "organ", "piano", "trumpet", "tuba", "viola",
)  # fmt: skip
TREES = (
    "alder", "ash", "beech", "birch", "cedar", "chestnut", "cypress", "elm", "hazel", "juniper", "larch", "linden",
    "maple", "oak", "pine", "poplar", "spruce", "willow",
)  # fmt: skip
DISHES = (
    "bean soup", "bread", "cabbage", "cheese", "dumplings", "fish pie", "honey cake", "lentils", "mushrooms", "noodles",
    "omelette", "pancakes", "porridge", "pumpkin", "rice", "roast potatoes", "salad", "stew",
)  # fmt: skip
DRINKS = (
    "almond milk", "apple juice", "barley tea", "black tea", "buttermilk", "cider", "cocoa", "coffee", "ginger beer",
    "grape juice", "green tea", "hot milk", "lemonade", "mint tea", "mulled wine", "plum juice", "rose water",
    "spring water",
)  # fmt: skip
THINGS = (
    "basket", "bell", "book", "bottle", "bucket", "button", "candle", "coin", "compass", "cup", "drum", "feather",
    "hammer", "hat", "kite", "ladder", "lamp", "letter", "map", "mirror", "necklace", "pipe", "ribbon", "ring", "rope",
    "scarf", "shell", "spoon", "top", "whistle",
)  # fmt: skip
PLACES = (
    "attic", "barn", "bakery", "bridge", "cellar", "chapel", "forest", "garden", "harbour", "hill", "kitchen", "lake",
    "library", "market", "meadow", "mill", "orchard", "river", "school", "stable", "station", "tower", "valley", "well",
)  # fmt: skip
OPEN_PLACES = ("bridge", "harbour", "hill", "lake", "market", "meadow", "river", "school", "station", "tower")
SHELTERS = ("attic", "barn", "bakery", "cellar", "chapel", "kitchen", "mill", "stable")
WORKPLACES = ("barn", "bakery", "garden", "harbour", "library", "market", "mill", "orchard", "school", "stable")
HIDING_PLACES = (
    "bed", "bench", "blanket", "bookcase", "carpet", "chair", "chest", "cupboard", "doormat", "fireplace", "flowerpot",
    "mattress", "pillow", "sofa", "staircase", "stove", "table", "wardrobe",
)  # fmt: skip
SUBJECTS = (
    "birds", "bridges", "butterflies", "castles", "chess", "clouds", "comets", "dinosaurs", "engines", "islands", "knots",
    "maps", "mountains", "planets", "poems", "rivers", "ships", "volcanoes", "whales",
)  # fmt: skip
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")

SYLLABLES = tuple(first + second for first in "bdfgklmnprstvz" for second in "aeiou")
"""Syllables of made-up words, which can only be answered by copying them from the prompt."""


def article(noun: str) -> str:
    """Return `noun` after its indefinite article."""
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


def pronouns(name: str) -> tuple[str, str]:
    """Return the subject pronoun and the possessive of the person called `name`."""
    return ("she", "her") if name in WOMEN else ("he", "his")
