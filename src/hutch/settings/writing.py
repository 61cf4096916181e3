"""Changes settings in the config file that a server was started with.

Comments and order stay. A change is checked as a whole, as the next start of the server would; the
file is replaced at once or not at all, and only if no one else has changed it. Secrets never come
out: not as values, and not in the diff.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import tempfile
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import MISSING
from difflib import unified_diff
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hutch.errors import Conflict, InvalidRequest
from hutch.serving import Setting, SettingsCheck, SettingsReport

from . import FIELDS, SECTIONS
from .reading import (
    BUILT_IN,
    KEYS,
    NO_FILE,
    Loaded,
    as_written,
    default_of,
    examine_keys,
    find_file,
    own_file,
    unknown_key,
)
from .values import Kind

if TYPE_CHECKING:
    from tomlkit import TOMLDocument
    from tomlkit.items import InlineTable, Table

SECRETS = ("api_key",)
SET = "(set)"
MAX_CHANGES = 200  # keys
MAX_FILE = 1 << 20  # bytes


class SettingsFile:
    """The settings that a server runs with, and their file."""

    def __init__(
        self,
        loaded: Loaded,
        data_dir: Path,
        options: Mapping[str, str] | None = None,
        file: Path | None = None,
        env: Mapping[str, str] | None = None,
    ) -> None:
        """`loaded` is what `reading.load` answered to the other arguments."""
        self._settings, self._origins = loaded.settings, loaded.origins
        self._in_force = loaded.file  # None if there was none; origins begin with it
        self._data_dir, self._options = data_dir, dict(options or {})
        self._env = dict(os.environ if env is None else env)
        named = file or find_file(self._env)
        path = None if named == NO_FILE else named or own_file(self._env)
        self._path = path and path.absolute()  # the process may go to another folder

    def why_not(self, is_local: bool) -> str:
        """Why the file cannot be changed; empty if it can. `is_local`: over the own socket."""
        if self._path is None:
            return "this server was told to read no config file"
        if self._path.suffix != ".toml":
            return (
                f"{self._path} is not TOML: change it with an editor, and see `hutch config check`"
            )
        if not (is_local or self._settings.dashboard_edit_settings):
            return (
                "settings can give boxes parts of the server's machine, so they are changed "
                "there: over the server's own socket, or from elsewhere once its operator has set "
                "dashboard.edit_settings = true"
            )
        return ""

    def report(self, is_local: bool) -> SettingsReport:
        """All settings. Raises InvalidRequest if the file cannot be read."""
        text, digest = self._read()
        coming, _ = self._examined(text)
        why_not = self.why_not(is_local)
        settings = tuple(self._setting(key, coming) for key in FIELDS)
        file = str(self._path) if self._path else ""
        return SettingsReport(settings, file, digest, not why_not, why_not)

    def check(self, changes: Mapping[str, object]) -> SettingsCheck:
        """What these changes would do. Raises InvalidRequest if the file cannot be changed."""
        text, digest = self._read()
        return self._checked(text, digest, changes)[0]

    def change(self, changes: Mapping[str, object], digest: str) -> SettingsCheck:
        """Change the file, which had this digest. Permissions are not checked here.

        Raises Conflict if it has another one by now, and InvalidRequest if a change is wrong or the
        file cannot be written.
        """
        text, now = self._read()
        self._compare(digest, now)
        check, new = self._checked(text, now, changes)
        if check.problems:
            raise InvalidRequest("; ".join(check.problems.values()))
        assert self._path
        if new != text:
            try:
                self._replace(self._path.resolve(), new.encode(), digest)
            except OSError as exc:
                raise InvalidRequest(f"cannot write {self._path}: {exc.strerror}") from None
        return SettingsCheck({}, check.diff, self._read()[1], check.needs_restart)

    # --- reading --------------------------------------------------------------------------

    def _read(self) -> tuple[str, str]:
        """The file and its digest; both empty if it does not exist."""
        if self._path is None:
            return "", ""
        try:
            with open(self._path, "rb") as file:
                data = file.read(MAX_FILE + 1)
            if len(data) > MAX_FILE:
                raise InvalidRequest(f"{self._path} has more than {MAX_FILE} bytes")
            return data.decode(), hashlib.sha256(data).hexdigest()
        except FileNotFoundError:
            return "", ""
        except OSError as exc:
            raise InvalidRequest(f"cannot read {self._path}: {exc.strerror}") from None
        except UnicodeDecodeError:
            raise InvalidRequest(f"cannot read {self._path}: it is not UTF-8") from None

    def _examined(self, text: str) -> tuple[Loaded | None, dict[str, str]]:
        """What the next start of this server would find, and its problems by key."""
        file = self._path or NO_FILE
        loaded, problems = examine_keys(self._data_dir, self._options, file, self._env, text=text)
        return loaded, {problem.key or "file": problem.message for problem in problems}

    def _setting(self, key: str, coming: Loaded | None) -> Setting:
        field = FIELDS[key]
        kind: Kind[Any] = field.metadata["kind"]
        default = default_of(key)
        value = getattr(self._settings, field.name)
        after = getattr(coming.settings, field.name) if coming else value
        is_secret = key in SECRETS

        def shown(value: object) -> str:
            return SET if is_secret and value else kind.show(value)

        return Setting(
            key=key,
            section=next((s for s in SECTIONS if key.startswith(f"{s}.")), ""),
            kind=kind.form,
            allowed=kind.allowed,
            about=field.metadata["about"],
            value=shown(value),
            default=shown(self._data_dir if default is MISSING else default),
            origin=self._origins[key],
            choices=kind.choices,
            secret=is_secret,
            pending=None if after == value else shown(after),
            fixed=self._is_fixed(key),
        )

    def _is_fixed(self, key: str) -> bool:
        """Whether a variable or an option says what it is, whatever the file says."""
        origin = self._origins[key]
        return origin != BUILT_IN and not origin.startswith(f"{self._in_force}:")

    # --- changing -------------------------------------------------------------------------

    def _checked(
        self, text: str, digest: str, changes: Mapping[str, object]
    ) -> tuple[SettingsCheck, str]:
        """What the changes would do, and the new text; the old one if there are problems."""
        if self._path is None or self._path.suffix != ".toml":
            raise InvalidRequest(self.why_not(True))
        if len(changes) > MAX_CHANGES:
            raise InvalidRequest(f"at most {MAX_CHANGES} settings can be changed at once")
        problems: dict[str, str] = {}
        values: dict[str, object] = {}
        for key, value in changes.items():
            try:
                values[key] = self._value(key, value)
            except InvalidRequest as exc:
                problems[key] = str(exc)
        new = text
        if not problems:
            new = _edited(self._path, text, values)
            _, problems = self._examined(new)
        if problems:
            return SettingsCheck(problems, "", digest), text
        return SettingsCheck({}, self._diff(text, new), digest, tuple(values)), new

    def _value(self, key: str, value: object) -> object:
        """A value as TOML has it; None: the key is removed. Raises InvalidRequest."""
        if key not in FIELDS:
            raise InvalidRequest(unknown_key(key[:100]))
        if self._is_fixed(key):
            raise InvalidRequest(
                f"{key} is set by {self._origins[key]}, which takes precedence over the file: "
                "change it there"
            )
        if value is None:
            return None
        kind: Kind[Any] = FIELDS[key].metadata["kind"]
        try:
            read = kind.read(value)
        except (ValueError, OverflowError, RecursionError):
            given = "this value"
            if key not in SECRETS and not isinstance(value, dict | list):
                given = as_written(value)
            raise InvalidRequest(f"{key} must be {kind.allowed}, not {given}") from None
        if isinstance(read, bool):
            return read
        if isinstance(read, int | float) and kind.form == "number":
            return int(read) if read == int(read) else read
        if isinstance(read, Mapping):
            return dict(read)
        if isinstance(read, tuple):
            return [str(item) for item in read]
        return kind.show(read)

    def _diff(self, old: str, new: str) -> str:
        before, after = _masked(old, SET), _masked(new, SET)
        if before == after and old != new:
            after = _masked(new, "(another)")
        name = str(self._path)
        lines = unified_diff(
            before.splitlines(keepends=True), after.splitlines(keepends=True), name, name
        )
        return "".join(line if line.endswith("\n") else f"{line}\n" for line in lines)

    def _compare(self, digest: str, now: str) -> None:
        if digest != now:
            raise Conflict(f"{self._path} has changed since you looked: look at the settings again")

    def _replace(self, path: Path, data: bytes, digest: str) -> None:
        """Write the file as a whole. It keeps its mode and owner."""
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".part", dir=path.parent)
        try:
            with open(fd, "wb") as file:
                with contextlib.suppress(FileNotFoundError):
                    before = path.stat()
                    os.fchmod(fd, stat.S_IMODE(before.st_mode))
                    with contextlib.suppress(PermissionError):
                        os.fchown(fd, before.st_uid, before.st_gid)
                file.write(data)
                file.flush()
                os.fsync(fd)
            self._compare(digest, self._read()[1])  # as late as possible
            os.replace(name, path)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name)
            raise
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)  # or the old file could be back after a power failure
        finally:
            os.close(folder)


def _edited(path: Path, text: str, values: Mapping[str, object]) -> str:
    """The text with these values. Raises InvalidRequest if it cannot be edited that way."""
    import tomlkit  # takes 30 ms, and is seldom needed
    from tomlkit.exceptions import TOMLKitError

    try:
        wanted = dict(_flat(tomllib.loads(text), ""))
        document = tomlkit.parse(text)
        for key, value in values.items():
            wanted.pop(key, None)
            if value is None:
                _remove(document, key)
            else:
                wanted[key] = value
                _put(document, key, value)
        new = tomlkit.dumps(document)
        # tomlkit keeps comments and order; whether the values are right is not left to it.
        is_right = dict(_flat(tomllib.loads(new), "")) == wanted
    except tomllib.TOMLDecodeError as exc:
        raise InvalidRequest(f"{path}: invalid TOML: {exc}") from None
    except (TOMLKitError, TypeError, AttributeError, KeyError, ValueError):
        is_right, new = False, text
    if not is_right:
        raise InvalidRequest(
            f"{path} is written in a way that cannot be changed from here: use an editor"
        )
    return new


def _put(document: TOMLDocument, key: str, value: object) -> None:
    import tomlkit

    section, _, name = key.rpartition(".")
    table: TOMLDocument | Table | InlineTable | Any = document
    parts = section.split(".") if section else []
    for depth, part in enumerate(parts, 1):
        if part not in table:
            table.add(part, tomlkit.table(is_super_table=depth < len(parts)))
        table = table[part]
    if isinstance(value, dict):
        counts = tomlkit.inline_table()
        counts.update(value)
        value = counts
    table[name] = value


def _remove(document: TOMLDocument, key: str) -> None:
    *sections, name = key.split(".")
    table: Any = document
    for part in sections:
        if part not in table:
            return
        table = table[part]
    if name in table:
        del table[name]


def _flat(values: Mapping[str, object], prefix: str) -> Iterator[tuple[str, object]]:
    for name, value in values.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and key not in KEYS:
            yield from _flat(value, f"{key}.")
        else:
            yield key, value


def _masked(text: str, mark: str) -> str:
    """The text without secrets."""
    import tomlkit

    document = tomlkit.parse(text)
    for key in SECRETS:
        if key in document:
            document[key] = mark
    return tomlkit.dumps(document)
