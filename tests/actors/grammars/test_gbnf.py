"""Grammars in GBNF: which outputs they allow once translated to Lark, and which are refused, with the line."""

from __future__ import annotations

import re
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quipu.actors.grammars.gbnf import MAX_CHARS, MAX_DEPTH, is_gbnf, lark_of
from quipu.actors.grammars.grammar_check import GrammarChecker
from quipu.actors.grammars.grammar_library import GrammarError
from quipu.actors.messages.grammar import GrammarKind, GrammarSpec
from quipu.actors.messages.outcomes import RequestError
from tests.byte_vocabulary import ByteVocabulary
from tests.grammars import tiny_grammars

VOCABULARY = ByteVocabulary()
JSON = r"""
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws
object ::=
  "{" ws (
            string ":" ws value
    ("," ws string ":" ws value)*
  )? "}" ws
array  ::= "[" ws ( value ("," ws value)* )? "]" ws
string ::=
  "\"" (
    [^"\\\x7F\x00-\x1F] |
    "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) # escapes
  )* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ws
# as little white space as a model may write
ws     ::= | " " | "\n" [ \t]{0,20}
"""
SQL = """
    root ::= select_statement
    select_statement ::= "SELECT " column " from " table " where " condition
    column ::= "col_1 " | "col_2 "
    table ::= "table_1 " | "table_2 "
    condition ::= column "= " number
    number ::= "1 " | "2 "
"""
GRAMMARS: list[tuple[str, list[str], list[str]]] = [
    (JSON, ['{"a": [1, -2.5, true, "\\n\\u00e9"], "b":{}}', "{}"], ['{"a" 1}', "[]", '{"a":1']),
    (SQL, ["SELECT col_1  from table_2  where col_2 = 1 "], ["SELECT col_3 "]),
    ('root ::= word "b"\nword ::= [a-z]+', ["ab", "abb"], ["b", "ac"]),
    ('root ::= word "b" | "(" root ")"\nword ::= [a-z]+', ["ab", "((abb))"], ["(ab", "b"]),
    ('root ::= ("a" | "ab") ("bc" | "d") | "(" root ")"', ["abc", "abbc", "(abd)"], ["abcd"]),
    (
        'root ::= expr\nexpr ::= expr op expr | [0-9]+ | "(" expr ")"\nop ::= "+" | "-"',
        ["1+23-4", "(1+2)-3"],
        ["1+", "()"],
    ),
    ('root ::= "a"\n  | "b" # of several lines\n  | "c"', ["a", "b", "c"], ["ab", ""]),
    ('root ::= "a"{2} "b"{1,} ("c" | ){0,2} "d"?', ["aab", "aabbccd"], ["ab", "aabccc"]),
    (r'root ::= "\x41\u00e9\U0001F600\n\"\\\[" [\]\-x] [^a\n]', ['Aé😀\n"\\[]b', 'Aé😀\n"\\[-é'], ['Aé😀\n"\\[xa']),
    ("root ::= [a-c-] [/] .", ["-/\n", "b/☃"], ["d/x"]),
    ('root ::= ""', [""], ["a"]),
    ('Other_Rule ::= "x"\nroot ::= Other_Rule other-rule\nother-rule ::= "y"', ["xy"], ["yx"]),
]


@pytest.mark.parametrize(("grammar", "right", "wrong"), GRAMMARS)
def test_outputs(grammar: str, right: list[str], wrong: list[str]) -> None:
    """A translated grammar accepts exactly the outputs of its rules."""
    assert is_gbnf(grammar)
    lark = lark_of(grammar)
    for text in right:
        assert VOCABULARY.accepts(lark, text), text
    for text in wrong:
        assert not VOCABULARY.accepts(lark, text), text


PIECES = st.recursive(
    st.sampled_from(['"a"', '"ab"', '"b"', '"ba"', "[ab]", "[^a<>]", '""']),
    lambda inner: (
        st.builds("{} {}".format, inner, inner)
        | st.builds("({} | {})".format, inner, inner)
        | st.builds("({}){}".format, inner, st.sampled_from(["*", "+", "?", "{2}", "{1,2}"]))
    ),
    max_leaves=6,
)
TEXTS = ["".join(chars) for length in range(6) for chars in product("ab", repeat=length)]


@given(PIECES, PIECES)
@settings(max_examples=60)
def test_like_regular_expressions(first: str, second: str) -> None:
    """Rules allow the same outputs as the equivalent regular expression, whether or not a rule is recursive."""
    pattern = re.compile(f"{first} (?:{second})?".replace(" ", "").replace('""', "(?:)").replace('"', ""))
    expected = [text for text in TEXTS if pattern.fullmatch(text)]
    rules = f"other ::= {second}\n"
    assert accepted(f"root ::= {first} other?\n{rules}", "{}") == expected
    assert accepted(f'root ::= {first} other? | "<" root ">"\n{rules}', "{}") == expected
    assert accepted(f'root ::= {first} other? | "<" root ">"\n{rules}', "<{}>") == expected


def accepted(grammar: str, form: str) -> list[str]:
    lark = lark_of(grammar)
    matcher = VOCABULARY.matcher(lark)
    found = []
    for text in TEXTS:
        one, tokens = matcher.deep_copy(), VOCABULARY.encode(form.format(text))
        if one.try_consume_tokens(tokens) == len(tokens) and one.is_accepting():
            found.append(text)
    return found


@pytest.mark.parametrize(
    ("grammar", "problem"),
    [
        ("root ::= (", "line 1 of the GBNF grammar: an unmatched `(`"),
        ('root ::= "a"\n  )', "line 2 of the GBNF grammar: an unmatched `)`"),
        ('root ::= ("a"\nb ::= "c")', "an unmatched `(`"),
        ("root ::= " + "(" * (MAX_DEPTH + 1), "nested more than"),
        ('root ::= | * "a"', "nothing that `*` could repeat"),
        ('root ::= "a"**', "nothing that `*` could repeat"),
        ('root ::= "a\n"', "unexpected '\"a"),
        ("root ::= <think>", "unexpected '<think>'"),
        ("root ::= x", "there is no rule `x`"),
        ('a ::= "b"', "must have a rule `root`"),
        (r'root ::= "\q"', r"unknown escape '\\q'"),
        (r'root ::= "\uD800"', r"\uD800 is no character"),
        ("root ::= [z-a]", "'z' to 'a' is empty"),
        ("root ::= []", "an empty set"),
        ('root ::= "a"{5,2}', "allows no number"),
        ('root ::= "a"{5000}', "more than 4096 repetitions"),
        ('root ::= "a"\nroot ::= "b"', "line 2 of the GBNF grammar: expected the name of another rule"),
        ('"a"\nroot ::= "b"', "expected the name of a rule"),
        ("x y\nroot ::= x", "expected the name of a rule"),
        ("root ::= " + '"a" ' * MAX_CHARS, "at most"),
    ],
)
def test_refused(grammar: str, problem: str) -> None:
    """Invalid GBNF is refused with a message that says where and why."""
    assert is_gbnf(grammar)
    with pytest.raises(GrammarError) as refused:
        lark_of(grammar)
    assert problem in str(refused.value)


@given(st.text(alphabet='ab-_":|()[]{}*+?.,0123\\^#\n ', max_size=40))
def test_any_text(text: str) -> None:
    """Any text after `root ::=` is a grammar or is refused with the name of its field."""
    checker = GrammarChecker(tiny_grammars(), 9999)
    result = checker.check(GrammarSpec(GrammarKind.LARK, f"root ::= {text}", "guided_grammar"))
    assert isinstance(result, str | RequestError)
    assert isinstance(result, str) or "`guided_grammar`" in result.message


def test_lark_is_left_alone() -> None:
    """A grammar in Lark is not taken for GBNF, whatever its strings contain."""
    assert not is_gbnf('start: "root ::= x" | /::=/\n// a ::=')
