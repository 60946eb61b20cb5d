"""Tools that chats may call: their schemas, what people say who need them, their results, and answers from those.

Names of tools and parameters are drawn from several that mean the same, so that they can only be copied from the tool's
schema in the prompt.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

from . import words

Draw = Callable[[Random], Any]


def _of(values: tuple[Any, ...]) -> Draw:
    return lambda random: random.choice(values)


def _between(low: int, high: int) -> Draw:
    return lambda random: random.randint(low, high)


@dataclass(frozen=True)
class Parameter:
    """A parameter: its possible names, its JSON type, its description, and a draw of its value."""

    names: tuple[str, ...]
    type: str
    description: str
    draw: Draw


@dataclass(frozen=True)
class Tool:
    """A tool; `{0}`, `{1}`: its arguments, `{r}`: the value in its result."""

    names: tuple[str, ...]
    descriptions: tuple[str, ...]
    parameters: tuple[Parameter, ...]
    requests: tuple[str, ...]
    result_key: str
    result: Draw
    answer: str


CITY = Parameter(("city", "town", "location", "place"), "string", "Name of the town", _of(words.TOWNS))
PERSON = Parameter(("name", "person", "who", "contact"), "string", "Name of the person", _of(words.NAMES))
DAY = Parameter(("day", "weekday", "date", "when"), "string", "Day of the week", _of(words.DAYS))
MINUTES = Parameter(("minutes", "duration", "length", "num_minutes"), "integer", "Number of minutes", _between(2, 90))
COUNT = Parameter(("count", "amount", "quantity", "number"), "integer", "How many", _between(2, 60))
FRUIT = Parameter(("product", "article", "item", "goods"), "string", "What to buy", _of(words.FRUITS))
DRINK = Parameter(("drink", "beverage", "order", "item"), "string", "What to drink", _of(words.DRINKS))
DISH = Parameter(("dish", "meal", "food", "recipe"), "string", "What to eat", _of(words.DISHES))
COLOUR = Parameter(("colour", "color", "shade", "value"), "string", "Name of the colour", _of(words.COLOURS))
ROOM = Parameter(("room", "place", "area", "where"), "string", "Where it is", _of(words.PLACES))
SUBJECT = Parameter(("topic", "subject", "query", "keyword"), "string", "What to look for", _of(words.SUBJECTS))
THING = Parameter(("thing", "object", "article", "item"), "string", "What it is", _of(words.THINGS))
ANIMAL = Parameter(("animal", "species", "pet", "kind"), "string", "Kind of animal", _of(words.ANIMALS))
LEFT = Parameter(("a", "x", "left", "first"), "integer", "First number", _between(2, 99))
RIGHT = Parameter(("b", "y", "right", "second"), "integer", "Second number", _between(2, 99))
INSTRUMENT = Parameter(
    ("instrument", "sound", "kind", "name"), "string", "Name of the instrument", _of(words.INSTRUMENTS)
)
TO = Parameter(("to", "destination", "target", "end"), "string", "Where to go", _of(words.TOWNS))
TREE = Parameter(("tree", "plant", "species", "kind"), "string", "Kind of tree", _of(words.TREES))

_WEATHER = ("sunny", "cloudy", "rainy", "windy", "foggy", "snowy", "stormy", "clear")

TOOLS = (
    Tool(("get_weather", "weather", "current_weather", "weather_lookup"),
         ("Get the weather of a town", "Tell what the weather is like"), (CITY,),
         ("What is the weather in {0}?", "Is it raining in {0}?", "How is the weather in {0} today?"),
         "weather", _of(_WEATHER), "The weather in {0} is {r}."),
    Tool(("get_time", "local_time", "clock", "time_in"), ("Get the time in a town", "Tell what time it is somewhere"),
         (CITY,), ("What time is it in {0}?", "How late is it in {0}?", "Tell me the time in {0}."),
         "hour", _between(1, 12), "It is {r} o'clock in {0}."),
    Tool(("find_phone", "phone_number", "lookup_phone", "get_number"), ("Find the phone number of a person",), (PERSON,),
         ("What is the phone number of {0}?", "How can I call {0}?", "I need the number of {0}."),
         "number", _between(1000, 9999), "The phone number of {0} is {r}."),
    Tool(("set_timer", "start_timer", "timer", "countdown"), ("Start a timer", "Count down some minutes"), (MINUTES,),
         ("Set a timer for {0} minutes.", "Start a timer of {0} minutes.", "Wake me in {0} minutes."),
         "timer", _between(1, 9), "Timer {r} is set for {0} minutes."),
    Tool(("order_fruit", "buy", "shop", "place_order"), ("Buy fruit in the shop", "Order fruit"), (FRUIT, COUNT),
         ("Please buy {1} of the fruit {0}.", "Order fruit: {0}, {1} times.", "I want {1} pieces of the fruit {0}."),
         "price", _between(1, 90), "I ordered {1} of the fruit {0} for {r} coins."),
    Tool(("order_drink", "get_drink", "bar", "serve_drink"), ("Order a drink", "Bring a drink"), (DRINK,),
         ("I would like to drink {0}.", "Bring me some {0}, please.", "Order {0} for me."),
         "minutes", _between(1, 30), "Your {0} will be ready in {r} minutes."),
    Tool(("find_recipe", "recipe", "cook_book", "how_to_cook"), ("Find a recipe", "Look up how a dish is made"), (DISH,),
         ("How do I cook {0}?", "Find a recipe for {0}.", "I want to make {0}."),
         "page", _between(1, 99), "The recipe for {0} is on page {r}."),
    Tool(("paint", "paint_room", "set_wall", "wall_painter"), ("Paint a place in a colour",), (ROOM, COLOUR),
         ("Paint the {0} {1}.", "Please paint the {0} in {1}.", "The {0} should be {1}."),
         "litres", _between(1, 20), "The {0} is {1} now. It took {r} litres."),
    Tool(("search_books", "library", "find_books", "book_search"), ("Search the library for books",), (SUBJECT,),
         ("Find books about {0}.", "Which books about {0} are there?", "I want to read about {0}."),
         "books", _between(1, 60), "There are {r} books about {0}."),
    Tool(("find_thing", "where_is", "locate", "lost_and_found"), ("Find where a thing is", "Look for a lost thing"), (THING,),
         ("Where is my {0}?", "I have lost my {0}.", "Find my {0}."),
         "place", _of(words.PLACES), "Your {0} is in the {r}."),
    Tool(("feed_animal", "feed", "feed_pet", "give_food"), ("Feed an animal", "Give an animal its food"), (ANIMAL,),
         ("Feed the {0}.", "The {0} is hungry.", "Please give the {0} something to eat."),
         "grams", _between(10, 99), "The {0} has eaten {r} grams."),
    Tool(("add", "add_numbers", "sum", "plus"), ("Add two numbers", "Return the sum of two numbers"), (LEFT, RIGHT),
         ("Add {0} and {1}.", "What is the sum of {0} and {1}?", "Use the tool to add {0} and {1}."),
         "sum", _between(4, 198), "The sum of {0} and {1} is {r}."),
    Tool(("play_music", "play", "music", "sound_player"), ("Play music on an instrument",), (INSTRUMENT, MINUTES),
         ("Play the {0} for {1} minutes.", "I want to hear the {0} for {1} minutes.", "Music, please: {0}, {1} minutes."),
         "song", _between(1, 99), "I play song {r} on the {0} for {1} minutes."),
    Tool(("train", "find_train", "next_train", "timetable"), ("Find the next train", "Look up a train"), (CITY, TO),
         ("When does the train from {0} to {1} leave?", "Find a train from {0} to {1}.", "I must go from {0} to {1} by train."),
         "hour", _between(1, 12), "The train from {0} to {1} leaves at {r} o'clock."),
    Tool(("invite", "send_invitation", "invite_person", "invitation"), ("Invite a person for a day",), (PERSON, DAY),
         ("Invite {0} for {1}.", "Ask {0} to come on {1}.", "I would like to see {0} on {1}."),
         "guests", _between(1, 20), "{0} is invited for {1}. You have {r} guests now."),
    Tool(("plant_tree", "plant", "gardener", "grow"), ("Plant trees in the garden",), (TREE, COUNT),
         ("Plant {1} trees of the kind {0}.", "I want trees: {0}, {1} of them.", "Please plant a {0} {1} times."),
         "metres", _between(3, 40), "{1} trees of the kind {0} are planted on {r} metres."),
)  # fmt: skip


@dataclass(frozen=True)
class OfferedTool:
    """A tool under the names that a chat offers it by."""

    tool: Tool
    name: str
    parameter_names: tuple[str, ...]
    schema: dict[str, Any]


def offer_tools(random: Random, num_tools: int = 4) -> list[OfferedTool]:
    """Offer `num_tools` different tools, no two under the same name."""
    while True:
        offered = [_offer(random, tool) for tool in random.sample(TOOLS, num_tools)]
        if len({tool.name for tool in offered}) == num_tools:
            return offered


def _offer(random: Random, tool: Tool) -> OfferedTool:
    name = random.choice(tool.names)
    parameter_names = tuple(random.choice(parameter.names) for parameter in tool.parameters)
    properties = {
        parameter_name: {"type": parameter.type, "description": parameter.description}
        for parameter_name, parameter in zip(parameter_names, tool.parameters, strict=True)
    }
    if random.random() < 0.2:
        for field in properties.values():
            del field["description"]
    schema = {
        "type": "function",
        "function": {
            "name": name,
            "description": random.choice(tool.descriptions),
            "parameters": {"type": "object", "properties": properties, "required": list(parameter_names)},
        },
    }
    return OfferedTool(tool, name, parameter_names, schema)
