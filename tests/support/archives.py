"""Archives of the three kinds, made of names and contents."""

from __future__ import annotations

import io
import tarfile
import zipfile
from pathlib import Path


def wheel(path: Path, files: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return path


def _tar(files: dict[str, bytes], compression: str) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode=f"w:{compression}") as archive:  # type: ignore[call-overload]
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
            link = tarfile.TarInfo(name + ".link")
            link.type, link.linkname = tarfile.SYMTYPE, name
            archive.addfile(link)
    return buffer.getvalue()


def npm(path: Path, files: dict[str, bytes]) -> Path:
    path.write_bytes(_tar({f"package/{name}": content for name, content in files.items()}, "gz"))
    return path


def deb(path: Path, files: dict[str, bytes]) -> Path:
    """deb(5): an ar archive of a version, the control files and the files, each padded to an even length."""
    members = {
        "debian-binary": b"2.0\n",
        "control.tar.xz": _tar({"./control": b"Package: x\n"}, "xz") + b"!",  # odd, perhaps
        "data.tar.xz": _tar({f"./{name}": content for name, content in files.items()}, "xz"),
    }
    raw = b"!<arch>\n"
    for name, content in members.items():
        raw += f"{name:<16}{0:<12}{0:<6}{0:<6}{'100644':<8}{len(content):<10}`\n".encode()
        raw += content + b"\n" * (len(content) % 2)
    path.write_bytes(raw)
    return path


def archive(path: Path, files: dict[str, bytes]) -> Path:
    """Write an archive of the kind that the name's suffix says."""
    return {".whl": wheel, ".tgz": npm, ".deb": deb}[path.suffix](path, files)
