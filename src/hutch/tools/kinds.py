"""What a file is, by its first bytes."""

from __future__ import annotations

HEAD = 8192

_PICTURES = ((b"\x89PNG\r\n\x1a\n", "image/png"), (b"\xff\xd8\xff", "image/jpeg"),
             (b"GIF87a", "image/gif"), (b"GIF89a", "image/gif"))  # fmt: skip

# What to do with it is said to a model.
_OTHERS = (
    (b"%PDF-", "a PDF file", "Get its text with pdftotext, or with a library in python."),
    (b"PK\x03\x04", "a ZIP archive (or a document that is one: docx, xlsx, jar)",
     "List it with `unzip -l`, or open it with zipfile in python."),
    (b"\x1f\x8b", "gzip-compressed", "Unpack it: `gzip -dc`, or `tar -tzf` if it is a tar."),
    (b"BZh", "bzip2-compressed", "Unpack it: `bzip2 -dc`."),
    (b"\xfd7zXZ\x00", "xz-compressed", "Unpack it: `xz -dc`."),
    (b"\x28\xb5\x2f\xfd", "zstd-compressed", "Unpack it: `zstd -dc`."),
    (b"\x7fELF", "an ELF program or library", "Run it, or look for text in it with `strings`."),
    (b"SQLite format 3\x00", "an SQLite database", "Query it with sqlite3 in python."),
    (b"PAR1", "a Parquet table", "Load it with pandas or pyarrow in python."),
    (b"\xff\xfe", "UTF-16 text", "Convert it: `iconv -f UTF-16 -t UTF-8`."),
    (b"\xfe\xff", "UTF-16 text", "Convert it: `iconv -f UTF-16 -t UTF-8`."),
)  # fmt: skip


def picture_of(head: bytes) -> str | None:
    """The media type of a picture that a model can look at."""
    if head.startswith(b"RIFF") and head[8:12] == b"WEBP":
        return "image/webp"
    return next((mime for magic, mime in _PICTURES if head.startswith(magic)), None)


def binary_kind(head: bytes) -> tuple[str, str] | None:
    """What it is, and what to do with it; None for text."""
    for magic, kind, advice in _OTHERS:
        if head.startswith(magic):
            return kind, advice
    if b"\0" in head:
        return "a binary file", "Look into it with bash (`od -c`, `strings`) or python."
    return None


def size_of(count: int) -> str:
    """532, 1.2K, 3.4M: as `ls -h` has it."""
    if count < 1024:
        return str(count)
    size, unit = count / 1024, "K"
    for larger in "MGT":
        if size < 999.95:
            break
        size, unit = size / 1024, larger
    return f"{size:.1f}{unit}"
