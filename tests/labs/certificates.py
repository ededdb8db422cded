"""Certificates for TLS and mTLS, made with Debian's openssl."""

import subprocess
from pathlib import Path


def make_certificates(folder: Path) -> None:
    """Make an authority (``ca``), a server's certificate and two clients', as PEM files.

    ``client`` is named node-agent, ``odd`` stranger.
    """

    def run(*words: str) -> None:
        subprocess.run(["openssl", *words], cwd=folder, check=True, capture_output=True)

    run("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes",
        "-keyout", "ca.key", "-out", "ca.pem", "-days", "2", "-subj", "/CN=test authority")  # fmt: skip
    (folder / "ext").write_text("subjectAltName=IP:127.0.0.1,DNS:localhost\n")
    for name, common in (("server", "127.0.0.1"), ("client", "node-agent"), ("odd", "stranger")):
        run("req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-keyout",
            f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={common}")  # fmt: skip
        run("x509", "-req", "-in", f"{name}.csr", "-CA", "ca.pem", "-CAkey", "ca.key",
            "-CAcreateserial", "-out", f"{name}.pem", "-days", "2", "-extfile", "ext")  # fmt: skip
