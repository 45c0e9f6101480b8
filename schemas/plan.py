"""The vocabulary of enforcement plans: what happens to each keyword of a constraint. Knows no constraint language."""

from enum import StrEnum

from schemas.records import Record


class Decision(StrEnum):
    """What becomes of one keyword at one place."""

    ENFORCED = "enforced"  # no text that breaks it can be generated
    CHECKED = "checked"  # validated after decoding; a row that breaks it is retried
    IGNORED = "ignored"  # the draft that the schema names does not know it: nothing keeps it
    REFUSED = "refused"  # cannot work at all: load_constraint raises


class GrammarEngine(StrEnum):
    """Who keeps a constraint while decoding."""

    XGRAMMAR = "xgrammar"
    LLGUIDANCE = "llguidance"


class KeywordDecision(Record, frozen=True):
    """One row of the plan."""

    path: str  # JSON pointer of the keyword
    keyword: str
    decision: Decision
    reason: str


SEVERITY = tuple(Decision)


class PlanWriter:
    """Collects decisions; of several for one keyword (a subschema used in many places) the worst stays."""

    def __init__(self) -> None:
        self._rows: dict[str, KeywordDecision] = {}

    def note(self, path: str, keyword: str, decision: Decision, reason: str) -> None:
        """Record a decision about ``keyword`` of the subschema at ``path``."""
        where = f"{path}/{keyword}"
        known = self._rows.get(where)
        if known is None or SEVERITY.index(decision) > SEVERITY.index(known.decision):
            self._rows[where] = KeywordDecision(path=where, keyword=keyword, decision=decision, reason=reason)

    def rows(self) -> tuple[KeywordDecision, ...]:
        """All decisions, in the order in which keywords were met."""
        return tuple(self._rows.values())

    @property
    def num_checked(self) -> int:
        """Keywords that are left to be checked."""
        return sum(row.decision is Decision.CHECKED for row in self._rows.values())
