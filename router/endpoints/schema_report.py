"""The report on a choice whose schema is enforced in part."""

from msgspec import UNSET, UnsetType

from router.text.output_text import Piece
from router.wire.responses import SchemaReport


def schema_report(piece: Piece) -> SchemaReport | UnsetType:
    """The report in the last piece of a choice."""
    check = piece.check
    if check is None or piece.finish_reason is None:
        return UNSET
    narrowed = check.narrowed or UNSET
    return SchemaReport(check.not_enforced, check.valid, check.violation, piece.sampled_again, narrowed)
