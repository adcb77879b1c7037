"""Rewrites an artifact with its INT4 weights in another nibble order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from fut_runtime.artifact.fragment import pack_codes, unpack_codes
from fut_runtime.artifact.layout import all_tensors
from fut_runtime.artifact.manifest import Manifest
from fut_runtime.artifact.orders import nibble_order as order_named
from fut_runtime.artifact.paths import side_file_name
from fut_runtime.artifact.reader import Artifact
from fut_runtime.artifact.shards import MAX_SHARD_BYTES
from fut_runtime.artifact.staging import check_outside
from fut_runtime.artifact.writer import ArtifactWriter


def repacked_manifest(manifest: Manifest, nibble_order: str) -> Manifest:
    """The manifest of the same weights in another nibble order.

    Raises:
        ArtifactError: the order is unknown.
    """
    order = order_named(nibble_order).name
    weights = {
        name: {f: replace(spec, nibble_order=order) if f == "int4" else spec for f, spec in formats.items()}
        for name, formats in manifest.weights.items()
    }
    # Artifacts of earlier releases sealed the source's card under the name that their own card needs.
    side_files = tuple(sorted(set(map(side_file_name, manifest.side_files))))
    return replace(manifest, weights=weights, side_files=side_files)


def repack_artifact(
    artifact: Artifact,
    out: Path,
    nibble_order: str,
    *,
    overwrite: bool = False,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    progress: Callable[[int, int], None] | None = None,
) -> Path:
    """Write the artifact anew, with every INT4 matrix in `nibble_order`; codes, scales and all else stay as they are.

    Verify `artifact` first: damage would be sealed into the new one. Logs outside the sealed set are not copied.

    Args:
        artifact: the artifact to rewrite.
        out: directory to create.
        nibble_order: name in `fragment.NIBBLE_ORDERS`.
        overwrite: whether an existing artifact `out` is replaced once the new one is whole; it may be the same.
        max_shard_bytes: size limit of a shard.
        progress: told the bytes written and the bytes in all, after each tensor.

    Returns:
        The new artifact's path.

    Raises:
        ArtifactError: the order is unknown, `out` exists or holds the artifact, or the disk refuses.
    """
    check_outside(artifact.path, out)
    manifest = repacked_manifest(artifact.manifest, nibble_order)
    specs = all_tensors(manifest)
    total, done = sum(spec.nbytes for spec in specs), 0
    with ArtifactWriter(out, manifest, max_shard_bytes=max_shard_bytes, overwrite=overwrite) as writer:
        for spec in specs:
            tensor = artifact.tensor(spec.name)
            if spec.name.endswith(".int4"):
                before = artifact.manifest.weights[spec.name.removesuffix(".int4")]["int4"].nibble_order
                assert before is not None
                if before != nibble_order:
                    tensor = pack_codes(unpack_codes(tensor, before), nibble_order)
            writer.write(spec.name, tensor)
            done += spec.nbytes
            if progress is not None:
                progress(done, total)
        for name in {side_file_name(name): name for name in artifact.manifest.side_files}.values():
            writer.copy_side_file(artifact.side_file(name), side_file_name(name))
        return writer.seal()
