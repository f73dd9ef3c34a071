"""`make dist`: the wheel and the sdist, built by setuptools from a copy of the tree, and what they must hold."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from email.parser import Parser
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FILES = ("pyproject.toml", "LICENSE", "README.md", "CHANGELOG.md", "CITATION.cff", "SECURITY.md", "constraints.txt")
FOLDERS = ("autotp", "passes", "cost")
BUILD = "import setuptools.build_meta as b; b.build_sdist('dist'); b.build_wheel('dist')"
WANTED = ("autotp/py.typed", "autotp/cli/shapes.json", "autotp/passes/__init__.py", "autotp/cost/__init__.py")


def build(out: Path) -> tuple[Path, Path]:
    """Build both from a copy that holds nothing else, and put them into a folder: the wheel, and the sdist."""
    with tempfile.TemporaryDirectory() as folder:
        for name in FILES:
            shutil.copy(ROOT / name, folder)
        for name in FOLDERS:
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, Path(folder, name), symlinks=True, ignore=ignored)
        subprocess.run([sys.executable, "-c", BUILD], cwd=folder, check=True, capture_output=True)
        shutil.copytree(Path(folder, "dist"), out, dirs_exist_ok=True)
    (wheel,), (sdist,) = out.glob("*.whl"), out.glob("*.tar.gz")
    return wheel, sdist


def faults(wheel: Path, sdist: Path) -> list[str]:
    """Say what is missing in them, and what has no place there."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (meta,) = (n for n in names if n.endswith(".dist-info/METADATA"))
        metadata = Parser().parsestr(archive.read(meta).decode())
    with tarfile.open(sdist) as packed:
        sources = [name.partition("/")[2] for name in packed.getnames()]
    out = [f"{wheel.name} lacks {name}" for name in WANTED if name not in names]
    out += [f"{sdist.name} lacks {name}" for name in ("passes/__init__.py", "LICENSE") if name not in sources]
    out += [f"{wheel.name} holds {n}" for n in names if n.split("/")[0] != "autotp" and ".dist-info/" not in n]
    out += [f"{sdist.name} holds {n}" for n in sources if n.split("/")[0] in ("tests", "benchmarks", "build")]
    if f"autotp-{metadata['Version']}" not in sdist.name or metadata["Description-Content-Type"] != "text/markdown":
        out.append(f"{wheel.name}: version {metadata['Version']}, description {metadata['Description-Content-Type']}")
    return out


if __name__ == "__main__":
    built = build(ROOT / "dist")
    found = faults(*built)
    print("\n".join(found or [f"built and checked: {path.relative_to(ROOT)}" for path in built]))
    sys.exit(bool(found))
