"""A pickle reader that cannot run code.

`pickle.Unpickler` with a `find_class` filter still lets a file call what the filter admits, set attributes on it, and
grow the C memo to any index. Weight files need about thirty opcodes and no calls. This machine reads exactly those: a
global becomes an inert `Symbol`, and a call goes to `call`, a function of the reader that knows a few symbols and
refuses all others. Every loop consumes input, every object costs at least one input byte, and byte strings are slices
of the input, so the file's size bounds time and memory.

Opcode meanings: CPython, Lib/pickletools.py. Protocols 2 and 3 are read, which torch and NumPy write.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias


class PickleRefused(ValueError):
    """The pickle is malformed, or asks for something that weight files have no need of. Internal to the zoo."""


@dataclass(frozen=True, slots=True)
class Symbol:
    """A global the file names. Never imported."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


@dataclass(slots=True)
class Built:
    """The result of a call, with the state that a later BUILD sets."""

    symbol: Symbol
    args: tuple[Any, ...]
    state: Any = None


Call: TypeAlias = Callable[[Symbol, tuple[Any, ...]], Any]
PersistentLoad: TypeAlias = Callable[[Any], Any]

_MARK = object()
_LONGEST_NAME = 256  # of a global's module or name; the longest that torch writes has 30 characters
_DEEPEST_MARK = 64  # nested MARKs; a state dict needs 5


def _refuse_persistent(_: Any) -> Any:
    raise PickleRefused("a persistent id, which is not expected here")


class PickleMachine:
    """Reads one pickle from `data` at `position`; afterwards `position` is just behind its STOP."""

    def __init__(self, data: bytes, position: int, call: Call, persistent: PersistentLoad = _refuse_persistent) -> None:
        self.data = data
        self.position = position
        self._call = call
        self._persistent = persistent
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}
        self._marks = 0

    def load(self) -> Any:
        """The pickled value.

        Raises:
            PickleRefused: saying what was found at which byte.
        """
        while True:
            start = self.position
            opcode = self._take(1)
            if opcode == b".":
                return self._pop()
            handler = _HANDLERS.get(opcode)
            if handler is None:
                raise PickleRefused(f"opcode 0x{opcode.hex()} at byte {start}, which weight files have no need of")
            handler(self)

    def _take(self, size: int) -> bytes:
        end = self.position + size
        if end > len(self.data):
            raise PickleRefused(f"{size} bytes wanted at byte {self.position}, but the file ends at {len(self.data)}")
        taken = self.data[self.position : end]
        self.position = end
        return taken

    def _unsigned(self, size: int) -> int:
        return int.from_bytes(self._take(size), "little")

    def _line(self) -> str:
        end = self.data.find(b"\n", self.position, self.position + _LONGEST_NAME)
        if end < 0:
            raise PickleRefused(f"the name at byte {self.position} does not end")
        line = self._take(end - self.position)
        self.position += 1
        return _text(line)

    def _pop(self) -> Any:
        if not self._stack or self._stack[-1] is _MARK:
            raise PickleRefused(f"the stack is empty at byte {self.position}")
        return self._stack.pop()

    def _top(self) -> Any:
        if not self._stack:
            raise PickleRefused(f"the stack is empty at byte {self.position}")
        return self._stack[-1]

    def _pop_to_mark(self) -> list[Any]:
        for index in range(len(self._stack) - 1, -1, -1):
            if self._stack[index] is _MARK:
                items = self._stack[index + 1 :]
                del self._stack[index:]
                self._marks -= 1
                return items
        raise PickleRefused(f"no mark to go back to at byte {self.position}")

    def _push(self, value: Any) -> None:
        self._stack.append(value)

    def _mark(self) -> None:
        self._marks += 1
        if self._marks > _DEEPEST_MARK:
            raise PickleRefused(f"more than {_DEEPEST_MARK} nested marks at byte {self.position}")
        self._stack.append(_MARK)

    def _protocol(self) -> None:
        version = self._unsigned(1)
        if version not in (2, 3):
            raise PickleRefused(f"pickle protocol {version}; expected 2 or 3")

    def _put(self, size: int) -> None:
        index = self._unsigned(size)
        self._memo[index] = self._top()

    def _get(self, size: int) -> None:
        index = self._unsigned(size)
        if index not in self._memo:
            raise PickleRefused(f"memo {index} is read before it is written, at byte {self.position}")
        self._stack.append(self._memo[index])

    def _tuple(self, size: int) -> None:
        items = [self._pop() for _ in range(size)]
        self._stack.append(tuple(reversed(items)))

    def _append(self, items: list[Any]) -> None:
        target = self._top()
        if type(target) is not list:
            raise PickleRefused(f"append to a {type(target).__name__} at byte {self.position}")
        target.extend(items)

    def _set_items(self, items: list[Any]) -> None:
        target = self._top()
        if type(target) is not dict or len(items) % 2:
            raise PickleRefused(f"{len(items)} keys and values for a {type(target).__name__} at byte {self.position}")
        for key, value in zip(items[::2], items[1::2], strict=True):
            if type(key) is not str:
                raise PickleRefused(f"a dictionary key of type {type(key).__name__} at byte {self.position}")
            target[key] = value

    def _reduce(self) -> None:
        args, symbol = self._pop(), self._pop()
        if type(symbol) is not Symbol or type(args) is not tuple:
            raise PickleRefused(f"a call of a {type(symbol).__name__} at byte {self.position}")
        self._stack.append(self._call(symbol, args))

    def _build(self) -> None:
        state, target = self._pop(), self._pop()
        if type(target) is Built and target.state is None:
            target.state = state
        elif type(target) is not dict:  # an OrderedDict's attributes (torch's `_metadata`) are dropped
            raise PickleRefused(f"state for a {type(target).__name__} at byte {self.position}")
        self._stack.append(target)


def _text(raw: bytes) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        raise PickleRefused(f"{raw[:20]!r} is not UTF-8") from None


_Handler: TypeAlias = Callable[[PickleMachine], None]

# One pass over the opcodes that protocols 2 and 3 use for plain data. Each takes only what its input bytes pay for.
_HANDLERS: dict[bytes, _Handler] = {
    b"\x80": PickleMachine._protocol,
    b"(": PickleMachine._mark,
    b"}": lambda m: m._push({}),
    b"]": lambda m: m._push([]),
    b")": lambda m: m._push(()),
    b"t": lambda m: m._push(tuple(m._pop_to_mark())),
    b"\x85": lambda m: m._tuple(1),
    b"\x86": lambda m: m._tuple(2),
    b"\x87": lambda m: m._tuple(3),
    b"N": lambda m: m._push(None),
    b"\x88": lambda m: m._push(True),
    b"\x89": lambda m: m._push(False),
    b"J": lambda m: m._push(int.from_bytes(m._take(4), "little", signed=True)),
    b"K": lambda m: m._push(m._unsigned(1)),
    b"M": lambda m: m._push(m._unsigned(2)),
    b"\x8a": lambda m: m._push(int.from_bytes(m._take(m._unsigned(1)), "little", signed=True)),
    b"G": lambda m: m._push(struct.unpack(">d", m._take(8))[0]),
    b"X": lambda m: m._push(_text(m._take(m._unsigned(4)))),
    b"B": lambda m: m._push(m._take(m._unsigned(4))),
    b"C": lambda m: m._push(m._take(m._unsigned(1))),
    b"q": lambda m: m._put(1),
    b"r": lambda m: m._put(4),
    b"h": lambda m: m._get(1),
    b"j": lambda m: m._get(4),
    b"c": lambda m: m._push(Symbol(m._line(), m._line())),
    b"a": lambda m: m._append([m._pop()]),
    b"e": lambda m: m._append(m._pop_to_mark()),
    b"s": lambda m: m._set_items([m._pop(), m._pop()][::-1]),
    b"u": lambda m: m._set_items(m._pop_to_mark()),
    b"R": PickleMachine._reduce,
    b"b": PickleMachine._build,
    b"Q": lambda m: m._push(m._persistent(m._pop())),
}
