"""The text of files in UTF-8, with or without a byte-order mark; other encodings are refused by name."""

import os
import shlex

from jaxpar.types import UsageError

__all__ = ["check_marks", "decoded", "not_utf8", "other_encoding"]

_MARKS = {  # longer ones first: each of UTF-32 begins with one of UTF-16 or is alone
    b"\xff\xfe\0\0": "UTF-32",
    b"\0\0\xfe\xff": "UTF-32",
    b"\xff\xfe": "UTF-16",
    b"\xfe\xff": "UTF-16",
}


def decoded(content: bytes, path: str | os.PathLike) -> str:
    """Returns the text of a file, without a byte-order mark.

    Raises:
      UsageError: It is no UTF-8; the sentence says how to convert the file.
    """
    check_marks(content, path)
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise not_utf8(path, error.start) from None


def check_marks(head: bytes, path: str | os.PathLike) -> None:
    """Rejects the beginning of a file with the byte-order mark of UTF-16 or UTF-32."""
    for mark, name in _MARKS.items():
        if head.startswith(mark):
            raise other_encoding(path, f"is {name}", name)


def not_utf8(
    where: str | os.PathLike, position: int, path: str | os.PathLike | None = None
) -> UsageError:
    """Returns the refusal of a file, or of a line of `path`, by its first byte that is no UTF-8."""
    what = f"is not UTF-8 at byte {position}, but perhaps Latin-1"
    return other_encoding(where, what, "LATIN1", path)


def other_encoding(
    where: str | os.PathLike, what: str, name: str, path: str | os.PathLike | None = None
) -> UsageError:
    """Returns the refusal of a file in the encoding `name`, with the command that converts it."""
    file = shlex.quote(os.fspath(path or where))
    return UsageError(
        f"{os.fspath(where)} {what}; expected UTF-8, convert it: "
        f"iconv -f {name} -t UTF-8 {file} > utf8.txt."
    )
