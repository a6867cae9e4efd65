"""Files of the user written anew: whole, or not at all."""

from __future__ import annotations

import errno
import os


def replace_file(path: str, data: bytes) -> None:
    """Puts new content in a file's place at once: a full disk or an interrupt leaves the old one, or none where there was none. What is no
    file (a device, a pipe) is written to. Raises OSError, also for a file that is not to be written although its folder is."""
    import shutil  # here, since most runs write nothing, and importing these takes as long as reading a small file
    import tempfile

    target = os.path.realpath(path)
    there = os.path.exists(target)
    if there and not os.path.isfile(target):
        with open(target, "wb") as stream:
            stream.write(data)
        return
    if there and not os.access(target, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
    descriptor, beside = tempfile.mkstemp(dir=os.path.dirname(target), prefix=f".{os.path.basename(target)}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        if there:
            shutil.copymode(target, beside)
        else:
            os.chmod(beside, 0o666 & ~umask())
        os.replace(beside, target)
    except BaseException:
        os.unlink(beside)
        raise


def umask() -> int:
    """The permissions that new files are not given; asking for them sets them."""
    mask = os.umask(0o077)
    os.umask(mask)
    return mask
