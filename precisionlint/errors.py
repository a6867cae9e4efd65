"""What a user can put right: told as one line, with exit code 2."""


class InputError(Exception):
    """Something that was given cannot be used; the text is one line that says what and why."""
