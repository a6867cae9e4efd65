"""Source files written anew: whole, or not at all."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile


def replace_file(path: str, data: bytes) -> None:
    """Puts new content in a file's place at once: a full disk or an interrupt leaves the old one. Raises OSError, also for a file that
    is not to be written although its folder is."""
    target = os.path.realpath(path)
    if not os.access(target, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
    descriptor, beside = tempfile.mkstemp(dir=os.path.dirname(target), prefix=f".{os.path.basename(target)}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        shutil.copymode(target, beside)
        os.replace(beside, target)
    except BaseException:
        os.unlink(beside)
        raise
