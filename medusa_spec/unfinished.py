"""Folders in which files are written before they take their names. Knows which of them a killed process left behind."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

UNFINISHED = ".unfinished"
"""The end of their names."""


@contextmanager
def unfinished(path: Path) -> Iterator[Path]:
    """A hidden folder beside `path`, for what is to take that name once it is complete; removed in the end.

    Its writer holds a lock on it. A kill takes the lock away and leaves the folder: so `remove_unfinished` can tell it
    from one that another process is writing into right now.
    """
    while True:
        folder = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}.", suffix=UNFINISHED))
        lock = _lock(folder, wait=True)
        try:
            if folder.exists():
                yield folder
                return
            # It was taken for one that a kill left, in the moment before it was locked: another one.
        finally:
            shutil.rmtree(folder, ignore_errors=True)
            _unlock(lock)


def remove_unfinished(folder: Path) -> None:
    """Removes what killed processes left in a folder and below; what is being written stays.

    Nobody asks for such a file by name, but it may be large, and whoever takes a folder as it is (a push to a hub, a
    search for tensors) would find it. Where nothing can be locked (on Windows) everything stays.
    """
    for place, names, _ in os.walk(folder):  # unlike rglob it does not mind what others remove meanwhile
        for name in names:
            if name.startswith(".") and name.endswith(UNFINISHED):
                _remove_left(Path(place) / name)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keeps others who ask for the same lock waiting, other processes and threads; a kill takes it away."""
    lock = _lock(folder, wait=True)
    try:
        yield
    finally:
        _unlock(lock)


@contextmanager
def alone(folder: Path) -> Iterator[bool]:
    """Whether nobody else is in here with the same folder, other processes and threads; a kill ends it.

    Where nothing can be locked (on Windows, on some network file systems) nobody is seen.
    """
    lock, free = None, True
    try:
        lock = _lock(folder, wait=False)
    except BlockingIOError:
        free = False
    try:
        yield free
    finally:
        _unlock(lock)


def _remove_left(folder: Path) -> None:
    try:
        lock = _lock(folder, wait=False)
    except BlockingIOError:  # another's
        return
    if lock is not None:
        shutil.rmtree(folder, ignore_errors=True)
        _unlock(lock)


def _lock(folder: Path, *, wait: bool) -> int | None:
    """Locks a folder for as long as this process lives; None if it is gone or cannot be locked.

    Raises:
        BlockingIOError: If it is another's, and one does not wait.
    """
    try:
        import fcntl
    except ImportError:  # Windows
        return None
    file = None
    try:
        file = os.open(folder, os.O_RDONLY)
        fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        _unlock(file)
        raise
    except OSError:
        _unlock(file)
        return None
    return file


def _unlock(lock: int | None) -> None:
    if lock is not None:
        os.close(lock)
