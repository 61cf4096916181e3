"""The tables of the store, as scripts that each bring a file from one version to the next.

A script that was ever shipped is never changed: a change is a new one at the end.
"""

from __future__ import annotations

SCRIPTS: tuple[str, ...] = (
    """
    CREATE TABLE sessions (
        number INTEGER PRIMARY KEY AUTOINCREMENT,
        id TEXT NOT NULL UNIQUE,
        owner TEXT NOT NULL,
        status TEXT NOT NULL,
        image TEXT NOT NULL,
        workspace_id TEXT,
        last_used_at REAL,
        used REAL,
        ended_at REAL,
        box TEXT,
        deadline REAL,
        boot TEXT NOT NULL,
        idempotency_key TEXT,
        digest TEXT,
        info TEXT NOT NULL,
        request TEXT NOT NULL,
        saved TEXT
    );
    -- Each ends in `number`, as every index of SQLite's does, and so has its rows in order.
    CREATE INDEX sessions_status ON sessions (status);
    CREATE INDEX sessions_owner ON sessions (owner);
    CREATE INDEX sessions_owner_status ON sessions (owner, status);
    CREATE INDEX sessions_image ON sessions (image);
    CREATE INDEX sessions_workspace ON sessions (workspace_id) WHERE workspace_id IS NOT NULL;
    CREATE INDEX sessions_ended ON sessions (ended_at) WHERE ended_at IS NOT NULL;
    CREATE UNIQUE INDEX sessions_idempotency ON sessions (owner, idempotency_key)
        WHERE idempotency_key IS NOT NULL;
    CREATE TABLE labels (
        name TEXT NOT NULL,
        value TEXT NOT NULL,
        number INTEGER NOT NULL,
        PRIMARY KEY (name, value, number)
    ) WITHOUT ROWID;
    CREATE INDEX labels_number ON labels (number);

    CREATE TABLE workspaces (
        owner TEXT NOT NULL,
        id TEXT NOT NULL,
        created_at REAL NOT NULL,
        labels TEXT NOT NULL,
        quota INTEGER,
        removing INTEGER NOT NULL DEFAULT 0,
        PRIMARY KEY (owner, id)
    );

    CREATE TABLE keys (
        id TEXT NOT NULL UNIQUE,
        owner TEXT NOT NULL,
        scope TEXT NOT NULL,
        prefix TEXT NOT NULL,
        label TEXT NOT NULL,
        created_at REAL NOT NULL,
        last_used_at REAL,
        revoked_at REAL,
        digest BLOB NOT NULL UNIQUE
    );

    CREATE TABLE quotas (owner TEXT PRIMARY KEY, quota TEXT NOT NULL);
    """,
    # Keys expire, and can be limited to images and workspaces (JSON lists; empty: no limit).
    """
    ALTER TABLE keys ADD COLUMN expires_at REAL;
    ALTER TABLE keys ADD COLUMN images TEXT NOT NULL DEFAULT '[]';
    ALTER TABLE keys ADD COLUMN workspaces TEXT NOT NULL DEFAULT '[]';
    """,
)
