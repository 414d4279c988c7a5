"""A self-signed certificate, made for a test."""

from __future__ import annotations

import subprocess
from pathlib import Path


def certificate(path: Path, name: str, address: str) -> Path:
    """Write a certificate and its key into one file.

    Args:
        name: of the subject.
        address: that clients know the server by, such as DNS:localhost or IP:127.0.0.1.
    """
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:prime256v1",
        "-nodes",
    ]
    command += ["-days", "2", "-subj", f"/CN={name}", "-addext", f"subjectAltName={address}"]
    command += ["-keyout", "-", "-out", "-"]
    path.write_text(subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout)
    return path
