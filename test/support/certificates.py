"""Certificates for tests, made by openssl."""

from __future__ import annotations

import subprocess
from pathlib import Path


class Certificates:
    """A certificate authority made by openssl."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder = folder / name
        self._folder.mkdir()
        self.ca = self._path("ca.pem")
        self._openssl("req", "-x509", *self._new_key("ca"), "-out", self.ca, "-subj", "/CN=test CA")

    def issue(self, name: str, hosts: str = "DNS:localhost,IP:127.0.0.1") -> tuple[str, str]:
        """Return the files of a certificate for ``hosts`` and of its key."""
        request, cert = self._path(f"{name}.csr"), self._path(f"{name}.pem")
        extensions = self._path("extensions")
        Path(extensions).write_text(f"subjectAltName={hosts}\n")
        self._openssl("req", *self._new_key(name), "-out", request, "-subj", f"/CN={name}")
        signer = ("-CA", self.ca, "-CAkey", self._path("ca.key"), "-CAcreateserial")
        self._openssl("x509", "-req", "-in", request, *signer, "-out", cert, "-extfile", extensions)
        return cert, self._path(f"{name}.key")

    def _new_key(self, name: str) -> tuple[str, ...]:
        curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1")
        return (*curve, "-nodes", "-keyout", self._path(f"{name}.key"))

    def _path(self, name: str) -> str:
        return str(self._folder / name)

    def _openssl(self, *arguments: str) -> None:
        subprocess.run(["openssl", *arguments], check=True, capture_output=True, timeout=30)
