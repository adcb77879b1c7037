"""Artifacts: whatever of one has been changed, its seal with it."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from random import Random

from fut_runtime.artifact.json_text import canonical
from fut_runtime.artifact.manifest import Manifest
from fut_runtime.artifact.reader import Artifact
from fut_runtime.artifact.verify import verify_artifact
from fuzzing.reader import Files, Reader, damage_document, damage_shard, files_of
from tiny_artifact import write_artifact


class ArtifactReader(Reader):
    """Manifest, file list, seal, index and shards of an artifact; what is changed is often sealed anew."""

    name = "artifact"

    def make(self, folder: Path) -> Files:
        return files_of(write_artifact(folder, side_files={"tokenizer.json": b"{}", "LICENSE": b"free"}))

    def damaged(self, random: Random) -> Files:
        files = dict(self.whole)
        name = random.choice([name for name in files if name != "LICENSE"] + ["fut_config.json", "fut_files.json"])
        damage = damage_shard if name.endswith(".safetensors") else damage_document
        files[name] = damage(random, files[name])
        if name not in ("fut_files.json", "fut_sealed.json"):
            return sealed_anew(files, name)
        if name == "fut_files.json" and random.random() < 0.9:
            return sealed_anew(files, None)
        return files

    def read(self, folder: Path) -> None:
        report = verify_artifact(folder)
        for finding in report.findings:
            finding.message.encode()
        Manifest.from_json((folder / "fut_config.json").read_bytes())
        artifact = Artifact.open(folder)
        for places in artifact.shards.values():
            for place in places:
                artifact.tensor(place.spec.name)
        for name, formats in artifact.manifest.weights.items():
            for weight_format in formats:
                artifact.dequantized(name, weight_format)


def sealed_anew(files: Files, changed: str | None) -> Files:
    """An artifact's files with the hashes that they would have if `changed` had been written so."""
    files = dict(files)
    if changed is not None:
        listed = json.loads(files["fut_files.json"])
        digest = hashlib.sha256(files[changed]).hexdigest()
        chunks = [digest] if files[changed] else []
        listed["files"][changed] = {"size": len(files[changed]), "sha256": digest, "chunks": chunks}
        files["fut_files.json"] = canonical(listed).encode()
    seal = json.loads(files["fut_sealed.json"])
    seal["sha256"] = hashlib.sha256(files["fut_files.json"]).hexdigest()
    files["fut_sealed.json"] = canonical(seal).encode()
    return files
