"""An APK signed with a key of one's own: its signer, the error if the key is unavailable, and no secret shown."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from android_demo.ci import apk, core, signing
from android_demo.ci.__main__ import arguments_of
from android_demo.ci.core import BuildError
from android_demo.ci.signing import KEY_PASSWORD, KEYSTORE_PASSWORD, Key, sign, verify

SECRET, OWN_SECRET = "store-secret", "key-secret"


def a_keystore(file: Path, kind: str = "PKCS12", key_secret: str = SECRET) -> Path:
    core.run(
        ["keytool", "-genkeypair", "-keystore", file, "-storetype", kind, "-alias", "mine", "-storepass", SECRET,
         "-keypass", key_secret, "-keyalg", "EC", "-validity", "100", "-dname", "CN=Somebody"]
    )  # fmt: skip
    return file


@pytest.fixture(scope="module")
def keystore(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return a_keystore(tmp_path_factory.mktemp("keys") / "mine.p12")


@pytest.fixture(scope="module")
def older(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A JKS file, the kind whose keys may have a password of their own."""
    return a_keystore(tmp_path_factory.mktemp("keys") / "mine.jks", "JKS", OWN_SECRET)


@pytest.fixture(scope="module")
def tools() -> apk.Tools:
    return apk.Tools.fetched()


@pytest.fixture(scope="module")
def unsigned(tools: apk.Tools) -> Path:
    """The app's manifest and resources, which are enough of an APK to be signed."""
    apk.OUTPUT.mkdir(parents=True, exist_ok=True)
    return apk.link_resources(tools)


def test_it_is_signed_with_that_key_and_nobody_sees_the_password(
    tools: apk.Tools, unsigned: Path, keystore: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[str] = []

    def run(command: Sequence[str | Path]) -> str:
        commands.append(" ".join(map(str, command)))
        return core.run(command)

    monkeypatch.setattr(signing, "run", run)
    monkeypatch.setenv(KEYSTORE_PASSWORD, SECRET)
    sign(tools.apksigner, unsigned, tmp_path / "signed.apk", Key.of(keystore, "mine"))
    assert len(commands) == 3 and SECRET not in "".join(commands)
    listed = core.run(["keytool", "-list", "-keystore", keystore, "-storepass", SECRET, "-alias", "mine"])
    wanted = re.search(r"((?:[0-9A-F]{2}:){31}[0-9A-F]{2})", listed)
    said = verify(tools.apksigner, tmp_path / "signed.apk")
    assert wanted and f"certificate SHA-256 digest: {wanted[1].replace(':', '').lower()}" in said
    assert "certificate DN: CN=Somebody" in said


def test_a_key_with_a_password_of_its_own(
    tools: apk.Tools, unsigned: Path, older: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KEYSTORE_PASSWORD, SECRET)
    signed = tmp_path / "signed.apk"
    for wrong in ("", "another"):
        monkeypatch.setenv(KEY_PASSWORD, wrong)
        with pytest.raises(BuildError, match=f"^{KEY_PASSWORD} is not the password of 'mine' in {older}$"):
            sign(tools.apksigner, unsigned, signed, Key.of(older, "mine"))
        assert list(tmp_path.iterdir()) == []
    monkeypatch.setenv(KEY_PASSWORD, OWN_SECRET)
    sign(tools.apksigner, unsigned, signed, Key.of(older, "mine"))
    assert "CN=Somebody" in verify(tools.apksigner, signed)


def test_one_line_says_why_a_key_cannot_be_had(keystore: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def why(file: Path, alias: str = "mine", password: str = SECRET) -> str:
        monkeypatch.setenv(KEYSTORE_PASSWORD, password)
        with pytest.raises(BuildError) as caught:
            Key.of(file, alias)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    assert why(tmp_path / "none") == f"there is no keystore {tmp_path / 'none'}; keytool -genkeypair makes one"
    assert why(keystore, password="") == (
        f"put the password of {keystore} into the environment variable {KEYSTORE_PASSWORD}"
    )
    assert why(keystore, password="wrong-one") == f"{KEYSTORE_PASSWORD} is not the password of {keystore}"
    assert why(keystore, "yours") == f"{keystore} has no key 'yours'; `keytool -list` names those it has"
    other = tmp_path / "text"
    other.write_text("no keystore")
    assert why(other).startswith(f"{other} is not a keystore that keytool reads: ")
    certificate, trusted = tmp_path / "certificate", tmp_path / "trusted.p12"
    secret = ["-storepass", SECRET]
    core.run(["keytool", "-exportcert", "-keystore", keystore, *secret, "-alias", "mine", "-file", certificate])
    core.run(
        ["keytool", "-importcert", "-noprompt", "-keystore", trusted, *secret, "-alias", "mine", "-file", certificate]
    )
    assert why(trusted) == f"'mine' of {trusted} is a certificate without a private key"


def test_the_debug_key_is_made_once_and_is_the_default(tmp_path: Path) -> None:
    key = Key.debug(tmp_path)
    content = key.keystore.read_bytes()
    assert Key.debug(tmp_path) == key and key.keystore.read_bytes() == content
    assert apk.Kind().file.name == "outrider-arm64-v8a-debug.apk"
    assert apk.Kind(key=key).file.name == "outrider-arm64-v8a-release.apk"


def test_a_keystore_and_an_alias_go_together(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for flags in (["--keystore", "x"], ["--key-alias", "x"]):
        monkeypatch.setattr("sys.argv", ["ci", "apk", *flags])
        with pytest.raises(SystemExit):
            arguments_of()
        assert "--keystore and --key-alias go together" in capsys.readouterr().err
