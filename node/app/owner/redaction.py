"""Removes from texts what a report of a bug must not carry: tokens, keys, addresses, paths, names
of data. Enters: the secrets that are known, and texts. Leaves: the texts with a mark for each
secret; equal secrets have equal marks, so that a reader can tell them apart. Pure."""

import ipaddress
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import Any

LEAST_KNOWN = 3
"""Characters of the shortest known secret that is looked for."""
_PEER_ID = re.compile(r"12D3Koo[1-9A-HJ-NP-Za-km-z]{45}")
_KEY_BLOCK = re.compile(
    r"-----BEGIN [A-Z ]{1,40}-----.*?(?:-----END [A-Z ]{1,40}-----|\Z)", re.DOTALL
)
_INVITE = re.compile(r"\btutti[0-9][a-z2-7]{12,}", re.IGNORECASE)
_URL = re.compile(r"\b[a-z][a-z0-9+.-]{1,15}://[^\s\"'<>|]+", re.IGNORECASE)
_MULTIADDR = re.compile(r"(/(?:ip4|ip6|dns4|dns6|dnsaddr|dns)/)([^/\s\"',;<>]+)")
_EMAIL = re.compile(r"\b[\w.+-]{1,64}@[\w-]+(?:\.[\w-]+)+\b")
_MAC = re.compile(r"\b(?:[0-9a-f]{2}[:-]){5}[0-9a-f]{2}\b", re.IGNORECASE)
_IPV4 = re.compile(r"(?<![0-9.])(?:[0-9]{1,3}\.){3}[0-9]{1,3}(?![0-9]|\.[0-9]|-[0-9])")
_WORD_BEFORE = "|".join(rf"(?<=[g-z_]\w{{{more}}}:)" for more in range(4))
"""A word that is no part of an address, such as a scheme: "ipv6:", "node:"."""
_IPV6 = re.compile(
    rf"(?:(?<![\w:.])|{_WORD_BEFORE})"
    r"[0-9a-f]{0,4}(?::[0-9a-f]{0,5}){2,9}(?:\.[0-9.]+)?(?![\w:])",
    re.IGNORECASE,
)
"""Also with a port of five digits behind it: :func:`_address_in` decides on each match."""
_BRACKET = re.compile(r"%5([BD])", re.IGNORECASE)
"""A bracket as a URI has it: gRPC writes ipv6:%5B::1%5D:50051."""
_HOST = re.compile(
    r"(?<![\w./@-])(?:[a-z0-9_-]+\.)+(?!(?:py|toml|json|jsonl|c|cc|cpp|h|go|rs|pyx|pb|so):)"
    r"[a-z]{2,18}(?=:[0-9]{2,5}\b)|(?<![\w./@-])(?:[a-z0-9_-]+\.)+"
    r"(?:lan|local|home|internal|arpa|com|org|net|edu|gov|cloud|xyz|online)\b(?!\.\w)",
    re.IGNORECASE,
)
_NAMED = re.compile(
    r"(\b[\w-]{0,40}(?:token|secret|password|passphrase|passwd|api[_-]?key|private[_-]?key|"
    r"admission|authorization|bearer)\b[\"']?(?:\s*[=:]\s*|\s+(?=[A-Za-z0-9+/_.=-]{16,}))[\"']?"
    r"(?:(?:bearer|basic)\s+)?)([^\s\"',;<>{}\[\]]+)",
    re.IGNORECASE,
)
_PREFIXED = re.compile(
    r"\b(?:hf_|sk-|gh[pousr]_|github_pat_|glpat-|xox[a-z]-|AKIA|pypi-)[A-Za-z0-9_-]{8,}"
)
_QUOTED_PATH = re.compile(r"([\"'])((?:~[\w.-]*)?/[^\"'\n]+)\1")
_PATH = re.compile(r"(?<![\w:/.>~-])(?:~[\w.-]*)?/[^\s\"'<>|;,()\[\]{}]+|\b[A-Z]:\\[^\s\"'<>|]+")
_OPAQUE = re.compile(r"(?<![\w+/=-])[A-Za-z0-9+/_-]{32,}={0,2}(?![\w+/=-])")
_SYSTEM = ("/usr/", "/lib/", "/lib64/", "/bin/", "/sbin/", "/proc/", "/sys/", "/dev/", "/etc/")
_PROTOCOLS = ("/p2p/", "/tcp/", "/udp/", "/ip4/", "/ip6/", "/dns")
_TRAILING = ".:!?"


class Redactor:
    """Replaces secrets in texts. ``known``: secret to the kind of its mark; ``kept``: text to its
    replacement for what may stay in another form, such as the root of the program. Counts what it
    replaced in :attr:`found`, by kind."""

    def __init__(self, known: Mapping[str, str], kept: Mapping[str, str]) -> None:
        self.known = {s: kind for s, kind in known.items() if len(s) >= LEAST_KNOWN}
        self._kept = {text: mark for text, mark in kept.items() if text}
        self.found: Counter[str] = Counter()
        self._marks: dict[str, dict[str, str]] = {}
        self._exact = self._compiled()

    def learn(self, texts: Iterable[str]) -> None:
        """Know the hosts in addresses of these texts from now on, also where they stand alone."""
        for text in texts:
            for match in _MULTIADDR.finditer(text):
                if match[1].startswith("/dns"):
                    self.known.setdefault(match[2], "host")
            for match in _URL.finditer(text):
                host = _host_of(match[0])
                if "." in host and not _is_address(host):
                    self.known.setdefault(host, "host")
        self._exact = self._compiled()

    def _compiled(self) -> re.Pattern[str]:
        """The pattern of all known texts. A word of a name is no name: "anna" in "savannah"."""
        each = sorted({*self.known, *self._kept}, key=len, reverse=True)
        alternatives = [rf"(?<![^\W_]){re.escape(s)}(?![^\W_])" for s in each]
        return re.compile("|".join(alternatives) or r"(?!)")

    def text(self, text: str) -> str:
        """The text with a mark for each secret."""
        text = _with_brackets(self._exact.sub(self._known, text))
        for kind, pattern in (("key", _KEY_BLOCK), ("invite", _INVITE), ("token", _PREFIXED)):
            text = pattern.sub(lambda m, kind=kind: self._mark(kind, m[0]), text)
        text = _NAMED.sub(self._named, text)
        text = _MULTIADDR.sub(lambda m: m[1] + self._address(m[2]), text)
        text = _URL.sub(self._url, text)
        text = _EMAIL.sub(lambda m: self._mark("email", m[0]), text)
        text = _MAC.sub(lambda m: self._mark("address", m[0].lower()), text)
        text = _IPV4.sub(lambda m: self._address(m[0]), text)
        text = _IPV6.sub(self._address6, text)
        text = _HOST.sub(lambda m: self._mark("host", m[0].lower()), text)
        text = _QUOTED_PATH.sub(lambda m: m[1] + self._path(m[2]) + m[1], text)
        text = _PATH.sub(lambda m: self._path(m[0]), text)
        return _OPAQUE.sub(self._opaque, text)

    def value(self, value: Any) -> Any:
        """JSON-ready values with marks in all their texts, also in names of fields."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, Mapping):
            return {self.text(str(k)): self.value(v) for k, v in value.items()}
        if isinstance(value, list | tuple):
            return [self.value(one) for one in value]
        return value

    def mark(self, kind: str, secret: str) -> str:
        """The mark of a secret that its place tells, whatever it looks like."""
        return self._mark(kind, secret)

    def leaks(self, text: str) -> list[str]:
        """Kinds of the secrets that are in a text that cannot be changed: the known ones, invites,
        tokens, addresses, paths."""
        found = {self.known[m[0]] for m in self._exact.finditer(text) if m[0] in self.known}
        text = _with_brackets(text)
        for kind, pattern in (("key", _KEY_BLOCK), ("invite", _INVITE), ("token", _PREFIXED)):
            if pattern.search(text):
                found.add(kind)
        addresses = [m[0] for m in _IPV4.finditer(text)] + [m[2] for m in _MULTIADDR.finditer(text)]
        addresses += [_address_in(m[0]) for m in _IPV6.finditer(text)]
        if _MULTIADDR.search(text) or any(_is_foreign(one) for one in addresses):
            found.add("address")
        if any(self._path(m[2]) != m[2] for m in _QUOTED_PATH.finditer(text)):
            found.add("path")
        return sorted(found)

    def _known(self, match: re.Match[str]) -> str:
        secret = match[0]
        if secret in self._kept:
            return self._kept[secret]
        return self._mark(self.known[secret], secret)

    def _named(self, match: re.Match[str]) -> str:
        value = match[2]
        if value.isdigit() or value.lower() in ("none", "null", "true", "false", "bearer"):
            return match[0]
        return match[1] + self._mark("token", value)

    def _url(self, match: re.Match[str]) -> str:
        if _host_of(match[0]) in ("127.0.0.1", "localhost", "::1"):
            scheme, _, rest = match[0].partition("://")
            return f"{scheme}://{re.split('[/?#]', rest, maxsplit=1)[0]}/"
        return self._mark("url", match[0])

    def _address(self, text: str) -> str:
        try:
            ipaddress.ip_address(text)
        except ValueError:
            # A name in a multiaddr; or a time of the day, which is no address.
            if re.fullmatch(r"[0-9a-f:.]*", text, re.IGNORECASE):
                return text
            return self._mark("host", text.lower())
        if not _is_foreign(text):
            return text
        return self._mark("address", text.lower())

    def _address6(self, match: re.Match[str]) -> str:
        text = match[0]
        address = _address_in(text)
        return self._address(address) + text[len(address) :]

    def _path(self, path: str) -> str:
        rest = path.rstrip(_TRAILING)
        if path.startswith((*_SYSTEM, *_PROTOCOLS)) or not rest.strip("/"):
            return path
        return self._mark("path", rest) + path[len(rest) :]

    def _opaque(self, match: re.Match[str]) -> str:
        word = match[0]
        mixed = any(c.isdigit() for c in word) and any(c.isalpha() for c in word)
        if not mixed or _PEER_ID.fullmatch(word):
            return word
        return self._mark("opaque", word)

    def _mark(self, kind: str, secret: str) -> str:
        self.found[kind] += 1
        marks = self._marks.setdefault(kind, {})
        return marks.setdefault(secret, f"<{kind}-{len(marks) + 1}>")


def _host_of(url: str) -> str:
    """The host in a URL, without user, port and brackets."""
    place = re.split(r"[/?#]", url.partition("://")[2], maxsplit=1)[0].rpartition("@")[2]
    found = re.fullmatch(r"(.*?)(?::[0-9]*)?", place)
    return (found[1] if found else place).strip("[]")


def _with_brackets(text: str) -> str:
    return _BRACKET.sub(lambda m: "[" if m[1] in "Bb" else "]", text)


def _address_in(text: str) -> str:
    """The IPv6 address at the beginning of a text: without the end of a sentence, a colon, a port.
    The text itself if it has none."""
    rest = text.rstrip(".")
    for one in (text, rest, rest.removesuffix(":"), rest.rpartition(":")[0]):
        if _is_address(one):
            return one
    return text


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def _is_foreign(text: str) -> bool:
    """Return True for an address of a machine; loopback and "all addresses" are none."""
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return False
    return not (address.is_loopback or address.is_unspecified)


def names_of(paths: Iterable[str], usual: Collection[str]) -> dict[str, str]:
    """Known secrets of the paths of files: each path, its last name and the name of its directory,
    unless they are ``usual``."""
    found: dict[str, str] = {}
    for path in paths:
        trimmed = path.rstrip("/")
        if "/" in trimmed and len(trimmed) > 1:
            found[trimmed] = "path"
        for name in trimmed.split("/")[-2:]:
            if name not in usual and len(name) > LEAST_KNOWN:
                found[name] = "data"
    return found
