"""Formats of structural tags, with texts that follow them and texts that do not."""

from __future__ import annotations

from typing import Any, Final

Format = dict[str, Any]


def const(value: str) -> Format:
    return {"type": "const_string", "value": value}


def regex(pattern: str) -> Format:
    return {"type": "regex", "pattern": pattern}


def schema(schema: Any, **more: Any) -> Format:
    return {"type": "json_schema", "json_schema": schema, **more}


def ebnf(grammar: str) -> Format:
    return {"type": "grammar", "grammar": grammar}


def sequence(*elements: Format) -> Format:
    return {"type": "sequence", "elements": list(elements)}


def either(*elements: Format) -> Format:
    return {"type": "or", "elements": list(elements)}


def some(kind: str, content: Format, **more: Any) -> Format:
    return {"type": kind, "content": content, **more}


def tag(begin: Any, content: Format, end: Any) -> Format:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def triggered(*tags: Format, triggers: list[str], **more: Any) -> Format:
    return {"type": "triggered_tags", "triggers": triggers, "tags": list(tags), **more}


def separated(*tags: Format, separator: Any, **more: Any) -> Format:
    return {"type": "tags_with_separator", "separator": separator, "tags": list(tags), **more}


DEEPSEEK: Final = "deepseek_xml"
ANY: Final = {"type": "any_text"}
NUMBER: Final = schema({"type": "integer"})
OBJECT: Final = schema({"type": "object"})
F: Final = tag("<f=a>", NUMBER, "</f>")
G: Final = tag("<f=b>", ANY, "</f>")
THINK: Final = tag("<think>", ANY, "</think>")
PARENTHESES: Final = ebnf('root ::= "(" root ")" | "x"')
MEMBERS: Final = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "array", "items": {"$ref": "#/$defs/day"}},
        "unit": {"enum": ["C", "F"]},
        "note": {"type": "string", "maxLength": 3},
        "next": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    },
    "required": ["city"],
    "$defs": {"day": {"type": "integer"}},
}
CASES: Final[dict[str, tuple[Format, list[str], list[str]]]] = {
    "constant": (const('a "b"\n/é'), ['a "b"\n/é'], ["", 'a "b"\n/é ']),
    "any text": (ANY, ["", "a\n<é>"], []),
    "any text with excludes": (
        {**ANY, "excludes": ["ab", "</t>"]},
        ["", "a", "ba", "</t"],
        ["ab", "xaab", "a</t>b"],
    ),
    "any text of some characters": (
        sequence({**ANY, "max_chars": 3}, const("é")),
        ["é", "ééé", "éééé", "a\nbé"],
        ["", "a", "ééééé"],
    ),
    "JSON alone": (schema({"enum": [1, "a"]}), ["1", '"a"'], ["a", "2"]),
    "an expression with slashes": (regex(r"a/b[/]\/"), ["a/b//"], ["a/b/"]),
    "an expression of nothing": (sequence(regex(""), const("a")), ["a"], ["", "aa"]),
    "an expression with anchors": (sequence(regex("^(a|b)$"), const("c")), ["ac", "bc"], ["c"]),
    "an expression before what it may go on with": (
        sequence(regex("[a-z]+"), const("end")),
        ["abend", "endend", "abendend"],
        ["end", "ab", "abendx"],
    ),
    "an expression before a value": (
        sequence(regex("[a-z]+"), OBJECT),
        ["a{}", 'ab{"c": 1}'],
        ["{}", "a", "a {}"],
    ),
    "an expression before values of other kinds": (
        sequence(
            regex("[a-z]+"),
            schema(
                {
                    "anyOf": [{"$ref": "#/$defs/a"}, {"enum": [["b"], "c"]}],
                    "$defs": {"a": {"type": "object"}},
                }
            ),
        ),
        ["a{}", 'ab["b"]', 'a"c"'],
        ["a", "{}", "a1", "anull"],
    ),
    "a grammar that is regular": (
        sequence(ebnf('root ::= [a-z]+ end?\nend ::= "." | "!"'), const("end")),
        ["abend", "abendend", "a.end"],
        ["end", "a.b"],
    ),
    "a grammar that refers to itself": (
        tag("<", PARENTHESES, ">"),
        ["<x>", "<((x))>"],
        ["<((x)>", "<>"],
    ),
    "two grammars": (
        either(PARENTHESES, ebnf('root ::= "[" root "]" | "y"')),
        ["(x)", "[[y]]"],
        ["(y)", "[x]"],
    ),
    "a grammar in Lark": (
        sequence(
            {"type": "grammar", "syntax": "lark", "grammar": 'start: "a" start | B\nB: /[0-9]+/'},
            const("."),
        ),
        ["aa12.", "1."],
        ["aa.", "a1"],
    ),
    "a sequence with values": (
        sequence(const("a"), OBJECT, const("b"), NUMBER),
        ["a{}b1", 'a{"c": []}b-20'],
        ["a{}b", "a {}b1", "a{} b1"],
    ),
    "one of several": (
        either(const("no"), tag("<", NUMBER, ">"), regex("no[a-z]+")),
        ["no", "none", "<1>"],
        ["", "n", "<>", "no<1>"],
    ),
    "a value or any text": (either(OBJECT, ANY), ["{}", "{} and more", ""], []),
    "text before one of several": (
        sequence(regex("[a-z<]*"), either(tag("<", NUMBER, ">"), const("<x")), const("z")),
        ["<<xz", "a<1>z", "ab<xz"],
        ["<<x", "a<1>", "<1>zz"],
    ),
    "optional": (sequence(some("optional", OBJECT), const("x")), ["x", "{}x"], ["{}{}x", ""]),
    "optional, and goes on with what follows": (
        sequence(some("optional", sequence(OBJECT, regex("[a-z]*"))), const("end")),
        ["end", "{}end", "{}abend"],
        ["{}", "abend", "{}{}end"],
    ),
    "optional, and begins what follows": (
        sequence(some("optional", const("ab")), const("abc")),
        ["abc", "ababc"],
        ["ab", "abab"],
    ),
    "star": (some("star", F), ["", "<f=a>1</f>", "<f=a>1</f><f=a>2</f>"], ["<f=a></f>"]),
    "star between texts": (
        sequence(regex("[a-z]*"), some("star", tag("<", NUMBER, ">")), const("end")),
        ["end", "a<1><2>end", "abend"],
        ["aend<1>", "<1>", "<1>a<2>end"],
    ),
    "plus": (some("plus", const("ab")), ["ab", "abab"], ["", "aba"]),
    "repeat": (some("repeat", const("ab"), min=1, max=2), ["ab", "abab"], ["", "ababab"]),
    "repeat without a limit": (
        some("repeat", tag("<", NUMBER, ">"), min=2, max=-1),
        ["<1><2>", "<1><2><3>"],
        ["<1>", ""],
    ),
    "repeat never": (some("repeat", const("a"), min=0, max=0), [""], ["a"]),
    "a tag ends with its first end": (
        THINK,
        ["<think></think>", "<think>a\n<b></think>"],
        [
            "<think>a",
            "<think></think></think>",
        ],
    ),
    "a tag with several ends": (
        tag("<a>", ANY, ["</a>", "</b>"]),
        ["<a>x</a>", "<a></b>"],
        ["<a>x", "<a></a></b>"],
    ),
    "a tag whose content goes on": (
        tag("<a>", sequence(const("y"), ANY), "</a>"),
        ["<a>y</a>", "<a>yx</a>"],
        ["<a></a>", "<a>y</a></a>"],
    ),
    "triggered": (
        triggered(F, G, triggers=["<f="]),
        ["", "a <f b", "x<f=a>1</f>y<f=b>z</f>", "<f=b></f></f>"],
        ["<f=", "<f=c>", "<f=a>x</f>", "<f=b>"],
    ),
    "triggered, at least one": (
        triggered(F, triggers=["<f="], at_least_one=True),
        ["<f=a>1</f>", "<f=a>1</f>a<f=a>2</f>b"],
        ["", "a", "a<f=a>1</f>"],
    ),
    "triggered, at most one": (
        triggered(F, triggers=["<f="], stop_after_first=True),
        ["", "a", "a<f=a>1</f>"],
        ["<f=a>1</f>a", "<f=a>1</f><f=a>1</f>"],
    ),
    "triggered, exactly one": (
        triggered(F, triggers=["<f="], at_least_one=True, stop_after_first=True),
        ["<f=a>1</f>"],
        ["", "a", "<f=a>1</f>a"],
    ),
    "triggered, with excludes": (
        triggered(F, triggers=["<f="], excludes=["zz"]),
        ["z", "z<f=a>1</f>z"],
        ["zz", "<f=a>1</f>zz"],
    ),
    "triggered by one of several": (
        triggered(F, tag("[", ANY, "]"), triggers=["<f", "["]),
        ["a[b]<f=a>1</f>[]c", "]"],
        ["a[b", "<f"],
    ),
    "triggered in a tag": (
        tag("<t>", triggered(F, triggers=["<f"]), "</t>"),
        ["<t></t>", "<t>a<f=a>1</f>b</t>"],
        ["<t>a", "<t></t></t>", "<t><f</t>"],
    ),
    "triggered after thoughts": (
        sequence(THINK, triggered(F, triggers=["<f"])),
        ["<think>a</think>", "<think><f</think>b<f=a>1</f>"],
        ["", "a", "<think>a</think><f"],
    ),
    "triggered before a constant": (
        sequence(triggered(F, triggers=["<f"]), const("x")),
        ["x", "axx", "<f=a>1</f>x"],
        ["", "a", "<f=a>1</f>"],
    ),
    "separated": (
        separated(F, G, separator=","),
        ["", "<f=a>1</f>", "<f=b>a</f>,<f=a>1</f>"],
        [",", "<f=a>1</f>,", "<f=a>1</f><f=a>1</f>", "a"],
    ),
    "separated, at least one": (
        separated(F, separator=["", "\n"], at_least_one=True),
        ["<f=a>1</f>", "<f=a>1</f>\n<f=a>1</f><f=a>1</f>"],
        ["", "<f=a>1</f>\n"],
    ),
    "separated, exactly one": (
        separated(F, separator=",", at_least_one=True, stop_after_first=True),
        ["<f=a>1</f>"],
        ["", "<f=a>1</f>,<f=a>1</f>"],
    ),
    "separated in triggered": (
        triggered(tag("<c>", separated(F, G, separator=""), "</c>"), triggers=["<c>"]),
        ["a<c></c>b", "<c><f=a>1</f><f=b>x</f></c>"],
        ["<c>", "<c>x</c>"],
    ),
    "dispatch": (
        {"type": "dispatch", "rules": [["<f>", NUMBER], ["<g>", const("hi")]]},
        ["", "<f>1 x", "a<g>hiho"],
        ["<f>", "<g>ha"],
    ),
    "dispatch once": (
        {
            "type": "dispatch",
            "rules": [["<f>", NUMBER], ["<g>", const("hi")]],
            "loop": False,
            "excludes": ["zz"],
        },
        ["", "a", "z<f>12"],
        ["<g>hi!", "zz"],
    ),
    "text up to a constant": (
        sequence(ANY, const("Answer: "), OBJECT),
        ["Answer: {}", "Hm. Answer: {}"],
        ["{}", "Answer: ", "Answer: Answer: {}"],
    ),
    "members between tags": (
        tag("<function=f>", schema(MEMBERS, style="qwen_xml"), "</function>"),
        [
            "<function=f><parameter=city>Oslo</parameter></function>",
            "<function=f>\n<parameter=city>\nOslo <1>\n</parameter>\n<parameter=days>\n[1, 2]\n"
            "</parameter>\n<parameter=unit>\nC\n</parameter>\n</function>",
            "<function=f><parameter=city></parameter><parameter=note>abc</parameter></function>",
            "<function=f><parameter=city>a</parameter><parameter=next>\nnull</parameter></function>",
        ],
        [
            "<function=f></function>",
            "<function=f><parameter=city>Oslo</parameter><parameter=days>1</parameter></function>",
            "<function=f><parameter=city>a</parameter><parameter=unit>K</parameter></function>",
            "<function=f><parameter=city>a</parameter><parameter=note>abcd</parameter></function>",
            "<function=f><parameter=town>Oslo</parameter></function>",
        ],
    ),
    "members of any names": (
        {"type": "qwen_xml_parameter", "json_schema": {"type": "object"}},
        ["", "<parameter=a>1</parameter>\n<parameter=_b2>x\ny</parameter>"],
        ["<parameter=>1</parameter>", "<parameter=a>1", "a"],
    ),
    "members in other styles": (
        either(*(schema(MEMBERS, style=style) for style in ("minimax_xml", "glm_xml", DEEPSEEK))),
        [
            '<parameter name="city">Oslo</parameter>',
            "<arg_key>city</arg_key>\n<arg_value>Oslo</arg_value>\n<arg_key>days</arg_key>\n"
            "<arg_value>[]</arg_value>",
            '<｜DSML｜parameter name="city" string="true">Oslo</｜DSML｜parameter>\n'
            '<｜DSML｜parameter name="days" string="false">[1]</｜DSML｜parameter>\n'
            '<｜DSML｜parameter name="next" string="false">null</｜DSML｜parameter>',
        ],
        [
            "<parameter=city>Oslo</parameter>",
            '<｜DSML｜parameter name="city" string="false">Oslo</｜DSML｜parameter>',
        ],
    ),
}
