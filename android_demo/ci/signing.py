"""Sign an APK, with a debug key that is made on first use or with a key in your keystore."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from android_demo.ci import core
from android_demo.ci.core import BuildError, run

#: environment variables of a keystore's password and the key's own, which defaults to the former
KEYSTORE_PASSWORD = "OUTRIDER_KEYSTORE_PASSWORD"
KEY_PASSWORD = "OUTRIDER_KEY_PASSWORD"
#: as Android's own tools make it; it proves nothing about who built the APK
DEBUG_PASSWORD = "android"


@dataclass(frozen=True)
class Key:
    """A private key in a keystore. password, key_password: in the form of apksigner and keytool, such as `env:NAME`."""

    keystore: Path
    alias: str
    password: str
    key_password: str

    @classmethod
    def of(cls, keystore: Path, alias: str) -> Key:
        """Return your key, its passwords from the environment. Raises BuildError if the keystore does not open."""
        if not keystore.is_file():
            raise BuildError(f"there is no keystore {keystore}; keytool -genkeypair makes one")
        if not os.environ.get(KEYSTORE_PASSWORD):
            raise BuildError(f"put the password of {keystore} into the environment variable {KEYSTORE_PASSWORD}")
        own = KEY_PASSWORD if os.environ.get(KEY_PASSWORD) else KEYSTORE_PASSWORD
        key = cls(keystore, alias, f"env:{KEYSTORE_PASSWORD}", f"env:{own}")
        key.check()
        return key

    @classmethod
    def debug(cls, folder: Path) -> Key:
        """Return the debug key in `folder`, made on first use. Raises BuildError."""
        keystore = folder / "debug.p12"
        secret = f"pass:{DEBUG_PASSWORD}"
        if not keystore.is_file():
            run(
                ["keytool", "-genkeypair", "-keystore", keystore, "-storetype", "PKCS12", "-alias", "debug",
                 "-storepass", DEBUG_PASSWORD, "-keypass", DEBUG_PASSWORD, "-keyalg", "RSA", "-keysize", "2048",
                 "-validity", "10000", "-dname", "CN=Android Debug, O=Android, C=US"]
            )  # fmt: skip
        return cls(keystore, "debug", secret, secret)

    def check(self) -> None:
        """Raise BuildError of one line unless the keystore opens and has a private key of this alias."""
        kind, _, variable = self.password.partition(":")
        try:
            said = run(
                ["keytool", "-J-Duser.language=en", "-list", "-keystore", self.keystore, f"-storepass:{kind}", variable,
                 "-alias", self.alias]
            )  # fmt: skip
        except BuildError as error:
            told = str(error).lower()
            if "password was incorrect" in told:
                raise BuildError(f"{variable} is not the password of {self.keystore}") from None
            if "does not exist" in told:
                raise BuildError(
                    f"{self.keystore} has no key {self.alias!r}; `keytool -list` names those it has"
                ) from None
            line = next((line for line in str(error).splitlines() if "exception" in line.lower()), str(error))
            raise BuildError(f"{self.keystore} is not a keystore that keytool reads: {line}") from None
        if "PrivateKeyEntry" not in said:
            raise BuildError(f"{self.alias!r} of {self.keystore} is a certificate without a private key")


def sign(apksigner: Path, unsigned: Path, signed: Path, key: Key) -> None:
    """Write `signed` and verify it. Raises BuildError."""
    part = signed.with_name(f"{signed.name}.part")
    try:
        run(
            [core.java_program(), "-jar", apksigner, "sign", "--ks", key.keystore, "--ks-key-alias", key.alias,
             "--ks-pass", key.password, "--key-pass", key.key_password, "--min-sdk-version", core.versions()["minSdk"],
             "--v4-signing-enabled", "false", "--out", part, unsigned]
        )  # fmt: skip
        verify(apksigner, part)
        part.replace(signed)
    except BuildError as error:
        if "Wrong password?" in str(error):
            raise BuildError(f"{KEY_PASSWORD} is not the password of {key.alias!r} in {key.keystore}") from None
        raise
    finally:
        part.unlink(missing_ok=True)


def verify(apksigner: Path, apk: Path) -> str:
    """Return apksigner's description of a valid signature. Raises BuildError if it is invalid."""
    return run([core.java_program(), "-jar", apksigner, "verify", "--verbose", "--print-certs", apk])
