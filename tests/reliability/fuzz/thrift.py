"""Thrift's compact protocol, which parquet footers are written in: read to a tree, altered, written again.

A struct is a list of fields ``[number, type, value]``; a list is a dict of its ``type`` and ``items``.
"""

import struct
from copy import deepcopy

TRUE, FALSE, BYTE, I16, I32, I64, DOUBLE, BINARY, LIST, SET, MAP, STRUCT = range(1, 13)
INTEGERS = (BYTE, I16, I32, I64)
EXTREMES = [
    0, 1, -1, 2, 7, 127, 128, 255, 2**15, 2**20, 2**31 - 1, 2**31, -(2**31), 2**40, 2**62, 2**63 - 1,
    -(2**63),
]  # fmt: skip
TEXTS = [b"", b"a", b"\xff\xfe", b"x" * 10_000, b"\x1b[31mred", b"\x00", b"__index_level_0__", b"../../x"]


class Raw(bytes):
    """Bytes to be written as they are, whatever the type says."""


def _varint(value):
    value &= 2**64 - 1
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    found.append(value)
    return bytes(found)


def _zigzag(value):
    return _varint((value << 1) ^ (value >> 63))


class _Reader:
    def __init__(self, data):
        self.data, self.at = data, 0

    def bytes(self, size):
        found = self.data[self.at : self.at + size]
        assert len(found) == size
        self.at += size
        return found

    def varint(self):
        value = shift = 0
        while True:
            byte = self.bytes(1)[0]
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    def zigzag(self):
        value = self.varint()
        return (value >> 1) ^ -(value & 1)

    def value(self, kind):
        if kind in (TRUE, FALSE):
            return kind == TRUE
        if kind == BYTE:
            return struct.unpack("b", self.bytes(1))[0]
        if kind in INTEGERS:
            return self.zigzag()
        if kind == DOUBLE:
            return struct.unpack("<d", self.bytes(8))[0]
        if kind == BINARY:
            return bytes(self.bytes(self.varint()))
        if kind in (LIST, SET):
            head = self.bytes(1)[0]
            size = head >> 4 if head >> 4 < 15 else self.varint()
            inner = head & 15
            items = [self.item(inner) for _ in range(size)]
            return {"type": inner, "items": items}
        assert kind == STRUCT, kind
        return self.struct()

    def item(self, kind):
        return self.bytes(1)[0] == 1 if kind in (TRUE, FALSE) else self.value(kind)

    def struct(self):
        fields, number = [], 0
        while head := self.bytes(1)[0]:
            delta, kind = head >> 4, head & 15
            number = number + delta if delta else self.zigzag()
            fields.append([number, kind, self.value(kind)])
        return fields


def parsed(data):
    """Return the struct that ``data`` begins with."""
    return _Reader(data).struct()


def written(fields):
    """Return a struct as bytes."""
    found, last = bytearray(), 0
    for number, kind, value in fields:
        if kind in (TRUE, FALSE) and isinstance(value, bool):
            kind = TRUE if value else FALSE
        delta = number - last
        found += bytes([delta << 4 | kind]) if 0 < delta < 16 else bytes([kind]) + _zigzag(number)
        found += _value(kind, value)
        last = number
    return bytes(found) + b"\x00"


def _value(kind, value):
    if isinstance(value, Raw):
        return bytes(value)
    if isinstance(value, bool):
        return b""
    if isinstance(value, int):
        return struct.pack("b", (value + 128) % 256 - 128) if kind == BYTE else _zigzag(value)
    if isinstance(value, float):
        return struct.pack("<d", value)
    if isinstance(value, bytes):
        return _varint(len(value)) + value
    if isinstance(value, dict):
        size, inner = len(value["items"]), value["type"]
        head = bytes([size << 4 | inner]) if size < 15 else bytes([0xF0 | inner]) + _varint(size)
        items = (
            bytes([1 if item else 2]) if isinstance(item, bool) else _value(inner, item)
            for item in value["items"]
        )
        return head + b"".join(items)
    return written(value)


def fields_of(fields, path=()):
    """Yield every field below a struct, and its path of numbers."""
    for field in fields:
        here = (*path, field[0])
        yield here, field
        value = field[2]
        if isinstance(value, list):
            yield from fields_of(value, here)
        elif isinstance(value, dict):
            for number, item in enumerate(value["items"]):
                if isinstance(item, list):
                    yield from fields_of(item, (*here, f"[{number}]"))


def altered(chance, fields):
    """Alter one to three fields in place; return what was done."""
    notes = []
    for _ in range(chance.choice([1, 1, 1, 2, 3])):
        found = list(fields_of(fields))
        path, field = chance.choice(found)
        how = chance.random()
        where = ".".join(map(str, path))
        if how < 0.06:
            field[1] = chance.choice([BYTE, I32, I64, DOUBLE, BINARY, LIST, MAP, STRUCT, 13, 15])
            notes.append(f"{where} of type {field[1]}")
        elif how < 0.12:
            field[0] = chance.choice([field[0] + 1, 0, 14, 2**15 - 1])
            notes.append(f"{where} is now field {field[0]}")
        elif how < 0.18:
            field[2] = deepcopy(chance.choice(found)[1][2])
            notes.append(f"{where} = another's value")
        else:
            field[2] = deepcopy(_other(chance, field[2]))
            notes.append(f"{where} = {repr(field[2])[:60]}")
    return "; ".join(notes)


def _other(chance, value):
    if isinstance(value, Raw):
        return value
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return chance.choice(
            [value + 1, value - 1, value * 2, -value, value // 2] if chance.random() < 0.5 else EXTREMES
        )
    if isinstance(value, float):
        return chance.choice([0.0, -1.0, float("nan"), 1e308])
    if isinstance(value, bytes):
        if chance.random() < 0.1:
            return Raw(_varint(chance.choice([2**31, 2**32 - 1, 2**62])))
        flipped = bytes([value[0] ^ 1 << chance.randrange(8)]) + value[1:] if value else b"\x01"
        return chance.choice([flipped, value[:-1], value + value, chance.choice(TEXTS)])
    if isinstance(value, dict):
        items, inner = value["items"], value["type"]
        if chance.random() < 0.1:
            return Raw(bytes([0xF0 | inner]) + _varint(chance.choice([2**31 - 1, 2**32 - 1, 2**40])))
        return {
            "type": inner,
            "items": chance.choice([[], items[:-1], items[::-1], items + items, items * 20, items[-1:]]),
        }
    return chance.choice([[], value[:-1], value[1:], value + value, value[::-1]])
