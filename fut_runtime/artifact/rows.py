"""Orders of the output rows of a stored matrix, so that one GPU thread finds a channel's gate and up together.

The natural order stacks the parts: `qkv` is [q; k; v], `gate_up` is [gate; up]. SwiGLU needs gate and up of one
channel in one thread, and which rows one thread holds depends on the instruction: a WGMMA thread holds adjacent output
columns (`interleave1`, for E4M3 and BF16), a lane of `mma.sync.m16n8k16` with the weights as A operand holds
accumulator rows r and r + 8 (`interleave8`, for INT4).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fut_runtime.errors import ArtifactError

if TYPE_CHECKING:
    from torch import Tensor

#: Row order name -> rows of one half that stay together; 0 leaves the rows where they are.
_BLOCKS: dict[str, int] = {"natural": 0, "interleave1": 1, "interleave8": 8}
ROW_ORDERS: tuple[str, ...] = tuple(_BLOCKS)


def check_row_order(row_order: str, rows: int, padded_rows: int) -> int:
    """Rows of one half that stay together in a row order (0: nothing moves), once `rows` fit in `padded_rows`.

    Raises:
        ArtifactError: unknown order, or sizes that it cannot hold.
    """
    block = _BLOCKS.get(row_order)
    if block is None:
        raise ArtifactError(f"row order {row_order!r} is unknown; expected one of {ROW_ORDERS}")
    if not 0 < rows <= padded_rows:
        raise ArtifactError(f"row order {row_order}: {rows} rows do not fit in {padded_rows} stored rows")
    if block and (rows % 2 or padded_rows % (2 * block)):
        raise ArtifactError(
            f"row order {row_order}: {rows} rows in {padded_rows} stored rows, expected two equal halves, "
            f"stored as a multiple of {2 * block} rows"
        )
    return block


def to_stored_rows(x: Tensor, row_order: str, padded_rows: int) -> Tensor:
    """Bring rows into their stored order, with zero rows as padding.

    Args:
        x: [N, ...], natural order, any dtype and device.
        row_order: one of ROW_ORDERS. In the interleaved orders x is two halves, each padded to `padded_rows` / 2 rows.
        padded_rows: number of stored rows, at least N.

    Returns:
        [padded_rows, ...]; `x` itself where nothing moves.

    Raises:
        ArtifactError: unknown order, or sizes that it cannot hold.
    """
    rows = x.shape[0]
    block = check_row_order(row_order, rows, padded_rows)
    if not block:
        if rows == padded_rows:
            return x
        stored = x.new_zeros((padded_rows, *x.shape[1:]))
        stored[:rows] = x
        return stored
    half, padded_half = rows // 2, padded_rows // 2
    stored = x.new_empty((padded_half // block, 2, block, *x.shape[1:]))
    for part in range(2):
        source = x[part * half : (part + 1) * half]
        whole = half // block
        stored[:whole, part] = source[: whole * block].reshape(whole, block, *x.shape[1:])
        stored[whole:, part] = 0
        if whole * block < half:
            stored[whole, part, : half - whole * block] = source[whole * block :]
    return stored.view(padded_rows, *x.shape[1:])


def to_natural_rows(x: Tensor, row_order: str, rows: int) -> Tensor:
    """Undo `to_stored_rows` and drop the padding.

    Args:
        x: [padded_rows, ...], stored order.
        row_order: one of ROW_ORDERS.
        rows: true number of rows N.

    Returns:
        [N, ...]; a view of `x` where nothing moves.

    Raises:
        ArtifactError: unknown order, or sizes that it cannot hold.
    """
    padded_rows = x.shape[0]
    block = check_row_order(row_order, rows, padded_rows)
    if not block:
        return x[:rows]
    blocks = x.reshape(padded_rows // (2 * block), 2, block, *x.shape[1:])
    halves = blocks.transpose(0, 1).reshape(2, padded_rows // 2, *x.shape[1:])
    return halves[:, : rows // 2].reshape(rows, *x.shape[1:])
