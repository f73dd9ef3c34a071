"""What was measured on this device with these versions and kernels, kept in the user's cache folder."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from autotp import kernels
from autotp.errors import AutoTPError
from autotp.kernels.common import triton
from autotp.log import log

FORMAT = 1
FOLDER = "AUTOTP_CACHE"  # names the folder of the file; 0 for none
OFF, ON = ("0", "off", "false", "no"), ("", "1", "on", "true", "yes")
MOST = 1 << 22  # bytes of a file that is read


@dataclass(frozen=True)
class Speed:
    """How many times as long the plain way takes; `fault`: why the other must not be used whatever it takes."""

    ratio: float
    fault: str = ""

    @property
    def text(self) -> str:
        return self.fault or f"{self.ratio:.2f} of torch's speed"


@functools.cache
def device_key(device: torch.device) -> str:
    """A device with all that its timings depend on: its name, driver, torch, Triton, and the kernels' sources."""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        name = f"{properties.name} {properties.major}.{properties.minor}, CUDA {torch.version.cuda}, driver {_driver()}"
    else:
        name = device.type
    sources = b"".join(p.read_bytes() for p in sorted(Path(kernels.__file__).parent.glob("*.py")))
    versions = f"torch {torch.__version__}, triton {getattr(triton, '__version__', None)}"
    return f"{name}, {versions}, kernels {hashlib.sha256(sources).hexdigest()[:16]}"


def _driver() -> str:
    """The installed driver's version, where Linux shows it."""
    try:
        return Path("/sys/module/nvidia/version").read_text(encoding="ascii").strip()
    except OSError:
        return "unknown"


@dataclass
class Verdicts:
    """Speeds by key, on one device.

    Attributes:
        path: of a JSON file; None keeps them in this process alone.
        device: by `device_key`.
    """

    path: Path | None
    device: str
    speeds: dict[str, Speed] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.speeds |= {k: Speed(**v) for k, v in self._all().get(self.device, {}).items()}

    def read(self, key: str) -> Speed | None:
        return self.speeds.get(key)

    def write(self, key: str, speed: Speed) -> None:
        """Keep it; a file that cannot be written is a line in the log."""
        self.speeds[key] = speed
        if self.path is None:
            return
        everything = self._all()  # other ranks write too
        everything.setdefault(self.device, {})[key] = asdict(speed)
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(dir=self.path.parent)
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                json.dump({"format": FORMAT, "devices": everything}, file, indent=1)
            os.replace(name, self.path)
        except OSError as error:
            log.warning("%s cannot be written (%s): what was measured is measured again next time", self.path, error)

    def _all(self) -> dict[str, dict[str, Any]]:
        """What the file has of every device; nothing where there is none, or a broken one."""
        if self.path is None or not self.path.exists():
            return {}
        try:
            if self.path.stat().st_size > MOST:
                raise AutoTPError("too large")
            data = json.loads(self.path.read_text(encoding="utf-8"))
            devices = data["devices"] if data["format"] == FORMAT else {}
            return {str(device): _checked(speeds) for device, speeds in devices.items()}
        except (OSError, ValueError, TypeError, KeyError, AttributeError, AutoTPError) as error:
            log.warning("%s is not read (%s: %s)", self.path, type(error).__name__, error)
            return {}


def _checked(speeds: Any) -> dict[str, Any]:
    return {str(key): asdict(Speed(float(x["ratio"]), str(x["fault"]))) for key, x in speeds.items()}


def path_of() -> Path | None:
    """The file in the folder that `AUTOTP_CACHE` names, by default the user's own; None where that is off."""
    value = os.environ.get(FOLDER, "").strip()
    if value.lower() in OFF:
        return None
    usual = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "autotp")
    return (usual if value.lower() in ON else Path(value)).expanduser() / "measured.json"
