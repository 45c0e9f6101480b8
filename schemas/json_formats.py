"""String formats: as patterns for a grammar, and what a text must be beyond jsonschema's own, sometimes lax, checks.

Each pattern matches only what the checks accept, and nearly all that people write. Knows no grammar engine; the tests
compare every pattern with the checks, and those with a second validator.
"""

import re

import idna
from rfc3986_validator import validate_rfc3986  # type: ignore[import-untyped]

_DATE = (
    r"([0-9]{3}[1-9]|[0-9]{2}[1-9][0-9]|[0-9][1-9][0-9]{2}|[1-9][0-9]{3})-"
    r"((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|1[0-9]|2[0-8]))"
)
_LEAP_DAY = r"([0-9]{2}(0[48]|[2468][048]|[13579][26])|(0[48]|[2468][048]|[13579][26])00)-02-29"
_DAY = f"({_DATE}|{_LEAP_DAY})"
_TIME = r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,9})?(Z|[+\-]([01][0-9]|2[0-3]):[0-5][0-9])"
_BYTE = r"(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4 = rf"{_BYTE}\.{_BYTE}\.{_BYTE}\.{_BYTE}"
_H16 = "[0-9A-Fa-f]{1,4}"
_IPV6 = "|".join(
    (
        f"({_H16}:){{7}}{_H16}",
        *(f"({_H16}:){{{left}}}(:{_H16}){{1,{7 - left}}}" for left in range(1, 7)),
        f"({_H16}:){{1,7}}:",
        f":(:{_H16}){{1,7}}",
        "::",
        f"::([fF]{{4}}:)?{_IPV4}",
    )
)
_LABEL = "[A-Za-z0-9](-?[A-Za-z0-9]){0,28}"  # no "--": what follows xn-- is a code of its own
_PERCENT = "%[0-9A-Fa-f]{2}"
_PCHAR = rf"([A-Za-z0-9_.~\-!$&'()*+,;=:@]|{_PERCENT})"
_NO_COLON = rf"([A-Za-z0-9_.~\-!$&'()*+,;=@]|{_PERCENT})"
_USER = rf"([A-Za-z0-9_.~\-!$&'()*+,;=:]|{_PERCENT})*@"
_HOST = rf"(\[({_IPV6})\]|([A-Za-z0-9_.~\-!$&'()*+,;=]|{_PERCENT})*)"
_AFTER_PATH = rf"(\?({_PCHAR}|[/?])*)?(#({_PCHAR}|[/?])*)?"
_LOCATION = rf"//({_USER})?{_HOST}(:[0-9]*)?(/{_PCHAR}*)*|/({_PCHAR}+(/{_PCHAR}*)*)?"
_URI = rf"[A-Za-z][A-Za-z0-9+.\-]*:({_LOCATION}|{_PCHAR}+(/{_PCHAR}*)*|){_AFTER_PATH}"
_RELATIVE = rf"({_LOCATION}|{_NO_COLON}+(/{_PCHAR}*)*|){_AFTER_PATH}"
_POINTER = r"(/([^~/\u0000-\u001f]|~[01])*)*"
_VARIABLE = r"[A-Za-z_][A-Za-z0-9_]*\*?"
_PERIOD = r"P([0-9]+W|({date})(T({time}))?|T({time}))".format(
    date="[0-9]+Y([0-9]+M([0-9]+D)?)?|[0-9]+M([0-9]+D)?|[0-9]+D",
    time="[0-9]+H([0-9]+M([0-9]+S)?)?|[0-9]+M([0-9]+S)?|[0-9]+S",
)
_ATOM = r"[A-Za-z0-9_%+\-]{1,20}"
_EMAIL = rf"{_ATOM}(\.{_ATOM}){{0,2}}@{_LABEL}(\.{_LABEL}){{0,2}}\.[A-Za-z]{{2,20}}"

FORMAT_PATTERNS = {
    name: f"^({pattern})$"
    for name, pattern in {
        "date": _DAY,
        "time": _TIME,
        "date-time": f"{_DAY}T{_TIME}",
        "duration": _PERIOD,
        "email": _EMAIL,
        "idn-email": _EMAIL,
        "hostname": rf"{_LABEL}(\.{_LABEL}){{0,3}}",
        "idn-hostname": rf"{_LABEL}(\.{_LABEL}){{0,3}}",
        "ipv4": _IPV4,
        "ipv6": _IPV6,
        "uri": _URI,
        "uri-reference": f"{_URI}|{_RELATIVE}",
        "iri": _URI,
        "iri-reference": f"{_URI}|{_RELATIVE}",
        "uri-template": rf"([A-Za-z0-9_.~\-!$&()*+,;=:@/?#\[\]]|{_PERCENT}|\{{[#./;?&]?{_VARIABLE}(,{_VARIABLE})*\}})*",
        "uuid": "[0-9A-Fa-f]{8}-[0-9A-Fa-f]{4}-[0-9A-Fa-f]{4}-[0-9A-Fa-f]{4}-[0-9A-Fa-f]{12}",
        "json-pointer": _POINTER,
        "relative-json-pointer": f"(0|[1-9]+0?)(#|{_POINTER})",  # the check takes no digit after a zero
    }.items()
}
BASE64_PATTERN = "^([A-Za-z0-9+/]{4})*([A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?$"

_ATEXT = r"[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]"
_QUOTED = r'"(?:[\x20\x21\x23-\x5b\x5d-\x7e]|\\[\x20-\x7e])*"'
_HOST_LABEL = "[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_DOMAIN = rf"(?:{_HOST_LABEL}(?:\.{_HOST_LABEL})*|\[(?:{_IPV4}|IPv6:(?:{_IPV6}))\])"
_ADDRESS = rf"(?:{_ATEXT}+(?:\.{_ATEXT}+)*|{_QUOTED})@"
_NAME = rf"(?:[A-Za-z0-9_]|{_PERCENT})(?:\.?(?:[A-Za-z0-9_]|{_PERCENT}))*"
_VARIABLES = rf"{_NAME}(?:\*|:[1-9][0-9]{{0,3}})?"
_TEMPLATE = re.compile(
    r"(?:[\x21\x23-\x24\x26\x28-\x3b\x3d\x3f-\x5b\x5d\x5f\x61-\x7a\x7e\xa0-\ud7ff\uf900-\U0010ffff]"
    rf"|{_PERCENT}|\{{[+#./;?&]?{_VARIABLES}(?:,{_VARIABLES})*\}})*"
)
_UUID = re.compile("[0-9A-Fa-f]{8}(?:-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}")
_ESCAPE = r"\\(?:[dDwWsSbBfnrtv0-9/\-^$\\.*+?()\[\]{}|]|x[0-9A-Fa-f]{2}|u[0-9A-Fa-f]{4})"
_CLASS = rf"\[\^?(?:[^\[\]\\]|{_ESCAPE})+\]"
_GROUP = r"\((?:\?(?:[:=!]|<[=!]))?"
_QUANTIFIER = r"(?:[*+?]|\{[0-9]+(?:,[0-9]*)?\})\??"
_REGEX = re.compile(rf"(?:{_GROUP}(?![?*+{{])|(?:[^\\\[\](){{}}?+*]|{_ESCAPE}|{_CLASS}|\))(?:{_QUANTIFIER})?)*")
"""What ``re`` and ECMA-262 both take for a regular expression, if ``re`` compiles it."""
_UCSCHAR = re.compile("[\xa0-\ud7ff\uf900-\ufdcf\ufdf0-\uffef\U00010000-\U000dffff\U000e1000-\U000efffd]")
_STRICT = {
    "email": re.compile(_ADDRESS + _DOMAIN),
    "idn-email": re.compile(
        _ADDRESS.replace("A-Z", r"A-Z\x80-\U0010ffff")
        + rf"(?:{_DOMAIN}|[^@]*[^\x00-\x7f][^@]*(?<![.\u3002\uff0e\uff61]))"
    ),
    "duration": re.compile(FORMAT_PATTERNS["duration"]),
    "hostname": re.compile(r"[\x21-\x7e]*[\x21-\x2d\x2f-\x7e]"),
    "idn-hostname": re.compile(r".*[^.\n\u3002\uff0e\uff61]"),
    "relative-json-pointer": re.compile(r"[0-9]+(?:#|/.*)?", re.DOTALL),
    "uuid": _UUID,
    "uri-template": _TEMPLATE,
    "regex": _REGEX,
    **dict.fromkeys(("date-time", "time", "uri", "uri-reference"), re.compile(r"[^\n]*")),
}


def conforms(text: str, name: str) -> bool:
    """Whether nothing of the format's RFC, beyond what jsonschema checks of it, speaks against ``text``."""
    domain = text if name == "hostname" else text.rpartition("@")[2] if name in ("email", "idn-email") else ""
    if ("--" in domain or not domain.isascii()) and not _is_domain(domain):
        return False
    if name in ("iri", "iri-reference"):
        rule = "URI" if name == "iri" else "URI_reference"
        return "\n" not in text and bool(validate_rfc3986(_UCSCHAR.sub("%41", text), rule=rule))
    return name not in _STRICT or _STRICT[name].fullmatch(text) is not None


def _is_domain(text: str) -> bool:
    """Whether every label is one that IDNA knows."""
    try:
        return bool(idna.encode(text))
    except (idna.IDNAError, UnicodeError):
        return False
