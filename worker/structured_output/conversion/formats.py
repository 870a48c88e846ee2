"""Values of JSON schema's keyword `format` as regular expressions. Each matches a subset of what its RFC allows: the
forms that every reader accepts."""

_LEAP_DAY = r"(?:[12][0-9](?:0[48]|[2468][048]|[13579][26])|1[26]00|2[048]00)-02-29"  # years 1000 to 2999
_DATE = (
    r"(?:[12][0-9]{3}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    rf"|02-(?:0[1-9]|1[0-9]|2[0-8]))|{_LEAP_DAY})"
)
_TIME = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,9})?(?:Z|[+\-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
_LABEL = r"[a-zA-Z0-9](?:[a-zA-Z0-9\-]{0,30}[a-zA-Z0-9])?"
_HOST = rf"{_LABEL}(?:\.{_LABEL}){{0,4}}"
_BYTE = r"(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_HEX4 = r"[0-9a-fA-F]{1,4}"
_IPV6 = "|".join(
    [
        rf"(?:{_HEX4}:){{7}}{_HEX4}",
        rf"::(?:{_HEX4}(?::{_HEX4}){{0,6}})?",
        *(rf"{_HEX4}(?::{_HEX4}){{{n - 1}}}::(?:{_HEX4}(?::{_HEX4}){{0,{6 - n}}})?" for n in range(1, 7)),
        rf"(?:{_HEX4}:){{7}}:",
    ]
)
_CODED = "%[0-9a-fA-F]{2}"
_BEYOND_ASCII = _CODED + "|[\u00c0-\u167f\u1e00-\u1fff\u3041-\ud7ff]"
_NAME = rf"(?:[a-zA-Z0-9\-._~!$&'()*+,;=@]|{_CODED})"  # of a relative reference's first segment: without a colon
_CHARACTER = rf"(?:[a-zA-Z0-9\-._~!$&'()*+,;=:@]|{_CODED})"
_SEGMENT = f"{_CHARACTER}*"
_REST = rf"(?:[/?]|{_CHARACTER})*"
_QUERY = rf"(?:\?{_REST})?(?:#{_REST})?"
_VARIABLES = rf"(?:{_CHARACTER}|\{{[a-zA-Z_][a-zA-Z0-9_]{{0,30}}\}})*"
_POINTER = "(?:/(?:[^/~]|~0|~1)*)*"
# Of regular expressions: literal characters, escapes, simple classes, and groups of these, with quantifiers.
_TIMES = r"(?:[*+?]|\{[0-9]{1,2},?\})?"
_ATOM = r"(?:[a-zA-Z0-9_ \-/:,@=;]|\\[dDwWsS.+*?$^/()|\[\]{}]|\.|\[\^?(?:a-z|A-Z|0-9|[a-zA-Z0-9_.:/])+\])" + _TIMES
_EXPRESSION = rf"\^?(?:{_ATOM}|\((?:{_ATOM})+(?:\|(?:{_ATOM})+){{0,8}}\){_TIMES})*\$?"
_LETTER = r"[a-zA-Z0-9!#$%&'*+/=?^_`{|}~\-]"
_EMAIL = rf"{_LETTER}{{1,40}}(?:\.{_LETTER}{{1,20}}){{0,3}}@{_LABEL}(?:\.{_LABEL}){{1,3}}"
_USER = rf"(?:(?:[a-zA-Z0-9\-._~!$&'()*+,;=:]|{_CODED})+@)?"
_PORT = r"(?::(?:[1-9][0-9]{0,3}|[1-5][0-9]{4}|6[0-4][0-9]{3}|65[0-4][0-9]{2}|655[0-2][0-9]|6553[0-5]))?"
_URI = (
    rf"[a-z][a-z0-9+.\-]*://{_USER}(?:{_HOST}|\[(?:{_IPV6})\]){_PORT}(?:/{_SEGMENT})*{_QUERY}"
    rf"|file://(?:/{_SEGMENT})+|mailto:{_LETTER}+(?:\.{_LETTER}+)*@[a-zA-Z0-9\-.]+{_QUERY}"
    r"|urn:[a-z0-9][a-z0-9\-]{1,30}:[a-zA-Z0-9\-._~!$'()*+,;=:@]+"
)
_REFERENCE = rf"{_URI}|(?:/?{_NAME}+(?:/{_SEGMENT})*|/)?{_QUERY}"

FORMATS: dict[str, str] = {
    "date": _DATE,
    "time": _TIME,
    "date-time": rf"{_DATE}T{_TIME}",
    "duration": (
        r"P(?:[0-9]{1,6}W|(?:[0-9]{1,6}Y(?:[0-9]{1,6}M(?:[0-9]{1,6}D)?)?|[0-9]{1,6}M(?:[0-9]{1,6}D)?|[0-9]{1,6}D)"
        r"(?:T(?:[0-9]{1,6}H(?:[0-9]{1,6}M(?:[0-9]{1,6}S)?)?|[0-9]{1,6}M(?:[0-9]{1,6}S)?|[0-9]{1,6}S))?"
        r"|T(?:[0-9]{1,6}H(?:[0-9]{1,6}M(?:[0-9]{1,6}S)?)?|[0-9]{1,6}M(?:[0-9]{1,6}S)?|[0-9]{1,6}S))"
    ),
    "email": _EMAIL,
    "idn-email": _EMAIL,
    "hostname": _HOST,
    "idn-hostname": _HOST,
    "ipv4": rf"{_BYTE}(?:\.{_BYTE}){{3}}",
    "ipv6": _IPV6,
    "uuid": r"[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}",
    "uri": _URI,
    "iri": _URI.replace(_CODED, _BEYOND_ASCII),
    "uri-reference": _REFERENCE,
    "iri-reference": _REFERENCE.replace(_CODED, _BEYOND_ASCII),
    "uri-template": rf"(?:https?://{_HOST})?(?:/{_VARIABLES})+(?:\?{_VARIABLES})?",
    "json-pointer": _POINTER,
    "relative-json-pointer": rf"(?:0|[1-9][0-9]{{0,5}})(?:#|{_POINTER})",
    "regex": _EXPRESSION,
}
