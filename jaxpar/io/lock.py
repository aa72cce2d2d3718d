"""Locks of folders: one writer at a time, which the system takes back however a process ends."""

import fcntl
import os
import pathlib
import socket

__all__ = ["LOCK", "lock_folder", "unlock_folder"]

LOCK = ".lock"
"""File that is locked. It stays when its holder ends, and names a holder while there is one."""


def lock_folder(folder: pathlib.Path, what: str, remedy: str) -> tuple[int, str]:
    """Locks a folder, which is made where it is absent.

    Args:
      folder: Any local folder. Where storage has no locks, as some network file systems, a note
        is printed.
      what: Kind of folder, for the sentence about one that cannot be written.
      remedy: End of the sentence about one that another holds.

    Returns:
      The open lock file for `unlock_folder`, or -1; and the sentence about the lock that cannot be
      had, or "".
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = os.open(folder / LOCK, flags, 0o666)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        return -1, f"the {what} {folder} cannot be written ({reason})."
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.read(file, 200).decode(errors="replace").strip()
        os.close(file)
        return -1, f"{folder} is in use by {holder or 'another process'}; {remedy}."
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        print(f"note: {folder} cannot be locked ({reason}); start no second run in it.")
        return file, ""
    os.truncate(file, 0)
    os.write(file, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
    return file, ""


def unlock_folder(file: int) -> None:
    """Gives a lock back; the lock file, which names its holder, is empty then."""
    if file >= 0:
        os.truncate(file, 0)
        os.close(file)
