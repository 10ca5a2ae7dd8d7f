"""The written forms of a secret that redaction looks for, and how to write a present value in a form again.

A form is named by a short text. What stands before its first `/` is the encoding (`raw`, `base64`, `base64url`, `hex`,
`hex-upper`, `url...`, `json...`). Base64 goes on with the alignment: how many bytes, modulo 3, precede the secret in what
was encoded (RFC 4648, section 4: three bytes make four characters). The character on either border can hold bits of the
secret and of its neighbour; it is covered too, and the neighbour's bits follow as hex (`/l3`, `/rf`), so that the character
can be written again. `/x` says that they are not known, because the neighbour is a secret as well.
"""

import base64
import json
from collections.abc import Iterator
from typing import Final
from urllib.parse import quote

__all__ = ["FORMS_VERSION", "MIN_FORM_BYTES", "Borders", "encode", "forms_of"]

FORMS_VERSION: Final = 1
"""Part of the fingerprint: raised when forms are added, so that files stored before are read and redacted again."""
MIN_FORM_BYTES: Final = 4
"""An encoded form shorter than this says too little about the secret, and is found everywhere."""

_STANDARD: Final = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
_URL_SAFE: Final = _STANDARD[:62] + b"-_"
_SEXTETS: Final = {char: value for letters in (_STANDARD, _URL_SAFE) for value, char in enumerate(letters)}

# What encoders leave as it is, beside letters, digits and `_.-~`: nothing; paths; encodeURIComponent; user info; encodeURI.
_URL_SAFE_SETS: Final = ("", "/", "!*'()", "!$&'()*+,;=", ";,/?:@&=+$!*'()#")


def forms_of(value: bytes) -> dict[str, bytes]:
    """The distinct written forms of a secret by form name, raw first. Base64 ones are what the secret alone determines."""
    forms = {"raw": value}
    seen = {value}
    for name, data in _encoded(value):
        if len(data) >= MIN_FORM_BYTES and data not in seen:
            seen.add(data)
            forms[name] = data
    return forms


def encode(value: bytes, form: str) -> bytes | None:
    """`value` written in a form that `forms_of` or `Borders.form` named; None when it cannot be written so."""
    if form == "raw":
        return value
    encoding, _, rest = form.partition("/")
    if encoding in ("base64", "base64url"):
        return _encode_base64(value, rest.split("/"), url_safe=encoding == "base64url")
    return next((data for name, data in _encoded(value) if name == form), None)


def _encoded(value: bytes) -> Iterator[tuple[str, bytes]]:
    yield "hex", value.hex().encode()
    yield "hex-upper", value.hex().upper().encode()
    for alignment in range(3):
        core = _core(value, alignment)
        yield f"base64/{alignment}", core
        yield f"base64url/{alignment}", core.translate(bytes.maketrans(b"+/", b"-_"))
    yield from _url_forms(value)
    yield from _json_forms(value)


def _core(value: bytes, alignment: int) -> bytes:
    """The base64 characters all of whose bits come from `value`."""
    text = base64.b64encode(bytes(alignment) + value)
    return text[-(-8 * alignment // 6) : 8 * (alignment + len(value)) // 6]


def _url_forms(value: bytes) -> Iterator[tuple[str, bytes]]:
    for number, safe in enumerate(_URL_SAFE_SETS):
        upper = quote(value, safe=safe)
        yield f"url-{number}", upper.encode()
        yield f"url-{number}-lower", _lower_escapes(upper)
    for name, tilde, safe in (("url-form", "~", ""), ("url-form-js", "%7E", "*")):
        plus = quote(value, safe=safe + " ").replace(" ", "+").replace("~", tilde)
        yield name, plus.encode()
        yield f"{name}-lower", _lower_escapes(plus)
    yield "url-all", "".join(f"%{byte:02X}" for byte in value).encode()
    yield "url-all-lower", "".join(f"%{byte:02x}" for byte in value).encode()


def _lower_escapes(text: str) -> bytes:
    head, *parts = text.split("%")
    return (head + "".join(f"%{part[:2].lower()}{part[2:]}" for part in parts)).encode()


def _json_forms(value: bytes) -> Iterator[tuple[str, bytes]]:
    try:
        text = value.decode()
    except UnicodeDecodeError:
        return  # no JSON string decodes to it
    for name, ascii_only in (("json", True), ("json-unicode", False)):
        plain = json.dumps(text, ensure_ascii=ascii_only)[1:-1]
        yield name, plain.encode()
        yield f"{name}-slash", plain.replace("/", "\\/").encode()
        html = plain
        for char in "<>&\u2028\u2029":  # as Go writes them
            html = html.replace(char, f"\\u{ord(char):04x}")
        yield f"{name}-html", html.encode()
        yield f"{name}-twice", json.dumps(plain, ensure_ascii=ascii_only)[1:-1].encode()
    upper = [f"\\u{unit:04X}" if unit > 126 or chr(unit) in "\"&'+<>`" else chr(unit) for unit in _utf16(text)]
    # As .NET writes them; its short escapes are those of JSON.
    yield "json-upper", "".join(json.dumps(part)[1:-1] if len(part) == 1 else part for part in upper).encode()


def _utf16(text: str) -> Iterator[int]:
    data = text.encode("utf-16-le")
    return (data[i] | data[i + 1] << 8 for i in range(0, len(data), 2))


def _encode_base64(value: bytes, parts: list[str], *, url_safe: bool) -> bytes | None:
    alignment = int(parts[0])
    letters = _URL_SAFE if url_safe else _STANDARD
    core = _core(value, alignment)
    if url_safe:
        core = core.translate(bytes.maketrans(b"+/", b"-_"))
    borders = Borders(value, alignment)
    for part in parts[1:]:
        if part == "x":
            return None
        bits = int(part[1:], 16)
        if part[0] == "l":
            core = letters[bits << borders.left_width | borders.left :][:1] + core
        else:
            core += letters[borders.right << (6 - borders.right_width) | bits :][:1]
    return core


class Borders:
    """The characters on either side of a secret's base64 core that hold some of its bits.

    `left` and `right` are the secret's bits in them, `left_width` and `right_width` how many (0: no such character). The
    secret's bits are the low ones of the left character and the high ones of the right.
    """

    __slots__ = ("alignment", "left", "left_width", "right", "right_width")

    def __init__(self, value: bytes, alignment: int) -> None:
        self.alignment = alignment
        self.left_width = (0, 4, 2)[alignment]
        self.left = value[0] >> (8 - self.left_width)
        self.right_width = 8 * (alignment + len(value)) % 6
        self.right = value[-1] & ((1 << self.right_width) - 1)

    def left_bits(self, char: int) -> int | None:
        """The neighbour's bits in the character before the core; None when that character does not fit the secret."""
        sextet = _SEXTETS.get(char)
        if not self.left_width or sextet is None or sextet & ((1 << self.left_width) - 1) != self.left:
            return None
        return sextet >> self.left_width

    def right_bits(self, char: int) -> int | None:
        """The neighbour's bits in the character after the core; None when that character does not fit the secret."""
        sextet = _SEXTETS.get(char)
        width = 6 - self.right_width
        if not self.right_width or sextet is None or sextet >> width != self.right:
            return None
        return sextet & ((1 << width) - 1)

    def form(self, covered: bytes, left: int | None, right: int | None) -> str:
        """The name of the form in which `covered` (core and borders) was found, with the neighbours' bits."""
        url_safe = b"-" in covered or b"_" in covered
        name = f"{'base64url' if url_safe else 'base64'}/{self.alignment}"
        if url_safe and (b"+" in covered or b"/" in covered):
            return f"{name}/x"
        return name + ("" if left is None else f"/l{left:x}") + ("" if right is None else f"/r{right:x}")
