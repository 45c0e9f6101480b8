"""String formats as patterns: each matches only what the format's check accepts, and nearly all that people write.

Knows no grammar engine; the tests compare every pattern with jsonschema's check.
"""

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
        "uri-template": rf"([A-Za-z0-9_.~\-!$&()*+,;=:@/?#\[\]]|{_PERCENT}|\{{[#./;?&]?{_VARIABLE}(,{_VARIABLE})*\}})*",
        "uuid": "[0-9A-Fa-f]{8}-[0-9A-Fa-f]{4}-[0-9A-Fa-f]{4}-[0-9A-Fa-f]{4}-[0-9A-Fa-f]{12}",
        "json-pointer": _POINTER,
        "relative-json-pointer": f"(0|[1-9]+0?)(#|{_POINTER})",  # the check takes no digit after a zero
    }.items()
}
