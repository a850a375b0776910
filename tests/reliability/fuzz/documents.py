"""Values as JSON and YAML have them, altered a little; and their texts."""

import json
from copy import deepcopy

from reliability.damage import HOSTILE, nested, places

RAW = "@raw:{}@"
"""A string that `text_of` replaces by what no Python value gives."""
RAWS = [
    "NaN", "Infinity", "1e999", "-0", "1" * 5000, "-" + "9" * 5000, "1." + "0" * 5000,
    "[" * 2000 + "]" * 2000, '{"a":' * 2000 + "1" + "}" * 2000, '"\\ud800"', '"\\u0000"',
    '"\\u001b[2J\\u001b]0;title\\u0007"', "tru", "'single'", "0x10", "01",
]  # fmt: skip
STRINGS = ["", " ", "\x1b[31mred\x1b[0m", "a\r\nb", "‮", "../..", "/dev/zero", "x" * 10_000, "null", "NaN"]
NUMBERS = [0, 1, -1, 2, 255, 2**15, 2**31 - 1, 2**31, 2**32, 2**53 + 1, 2**63 - 1, 2**63, 2**64, 10**30, 0.5]


def altered(chance, content, vocabulary):
    """Return a copy of ``content`` with one to three things in it altered, and what they are.

    Parameters
    ----------
    chance : random.Random
    content : dict or list
    vocabulary : dict of str to list
        What may stand under a key, mostly valid.
    """
    notes = []
    content = json.loads(json.dumps(content))
    for _ in range(chance.choice([1, 1, 1, 1, 2, 3])):
        found = list(places(content))
        if found:
            notes.append(_alter(chance, content, chance.choice(found), vocabulary))
    return content, "; ".join(notes)


def _alter(chance, content, path, vocabulary):
    holder = content
    for key in path[:-1]:
        holder = holder[key]
    last, how = path[-1], chance.random()
    words = next((vocabulary[key] for key in reversed(path) if key in vocabulary), [])
    where = ".".join(map(str, path))
    if how < 0.4 and words:
        holder[last] = deepcopy(chance.choice(words))
    elif how < 0.5:
        del holder[last]
        return f"{where} removed"
    elif how < 0.55 and isinstance(holder, dict):
        holder[chance.choice(["must_understand", "name", "id", last.upper(), f"{last}\x1b[0m", ""])] = (
            deepcopy(holder[last])
        )
        return f"{where} under another name too"
    elif how < 0.62:
        other = chance.choice(list(places(content)))
        value = content
        for key in other:
            value = value[key]
        holder[last] = json.loads(json.dumps(value))
    else:
        holder[last] = _other(chance, holder[last])
    return f"{where} = {repr(holder[last])[:80]}"


def _other(chance, value):
    how = chance.random()
    if how < 0.12:
        return deepcopy(chance.choice(HOSTILE))
    if how < 0.2:
        return RAW.format(chance.randrange(len(RAWS)))
    if isinstance(value, bool):
        return chance.choice([not value, int(value), str(value).lower(), None])
    if isinstance(value, (int, float)):
        near = [value + 1, value - 1, value * 2, -value, value / 2, float(value), str(value), [value], None]
        return chance.choice(near if how < 0.6 else NUMBERS)
    if isinstance(value, str):
        near = [
            value.upper(),
            value + "\x00",
            value[:-1],
            value + value,
            f"{value}\x1b[31m",
            [value],
            {value: value},
        ]
        return chance.choice(near if how < 0.6 else STRINGS)
    if isinstance(value, list):
        near = [
            [],
            value[:-1],
            value + value[-1:],
            value[::-1],
            value * 50,
            [value],
            dict.fromkeys("ab", value),
        ]
        return deepcopy(chance.choice([*near, nested(200)]))
    if isinstance(value, dict):
        return deepcopy(
            chance.choice([{}, [value], list(value), {"name": value}, {**value, "extra": value}, None])
        )
    return chance.choice([0, "", [], {}, False])


def text_of(chance, content):
    """Return ``content`` as JSON, now and then as nobody would write it."""
    data = json.dumps(content, indent=chance.choice([None, 2]), ensure_ascii=chance.random() < 0.9)
    for number, raw in enumerate(RAWS):
        data = data.replace(json.dumps(RAW.format(number)), raw)
    how = chance.random()
    if how < 0.02:
        return b"\xef\xbb\xbf" + data.encode("utf-8", "surrogatepass"), "with a byte order mark"
    if how < 0.03:
        return data.encode("utf-16", "surrogatepass"), "in UTF-16"
    if how < 0.06:
        cut = chance.randrange(len(data))
        return data[:cut].encode("utf-8", "surrogatepass"), f"cut at {cut}"
    if how < 0.1 and isinstance(content, dict) and content:
        key = chance.choice(list(content))
        twice = json.dumps({key: _other(chance, content[key])})
        for number, raw in enumerate(RAWS):
            twice = twice.replace(json.dumps(RAW.format(number)), raw)
        return f"{twice[:-1]},{data.lstrip()[1:]}".encode("utf-8", "surrogatepass"), f"{key} twice"
    if how < 0.12:
        return data.encode("utf-8", "surrogatepass") + b"}", "with a brace more"
    return data.encode("utf-8", "surrogatepass"), ""


def rewritten(chance, file, vocabulary, change=None):
    """Alter a JSON file; return what was done.

    Parameters
    ----------
    chance : random.Random
    file : Path
    vocabulary : dict
        See `altered`.
    change : callable, optional
        Given the content and returning what it made of it and a note, in place of `altered`.
    """
    content = json.loads(file.read_bytes())
    content, what = change(content) if change else altered(chance, content, vocabulary)
    data, how = text_of(chance, content)
    file.write_bytes(data)
    return f"{file.name}: {what} {how}".rstrip()
