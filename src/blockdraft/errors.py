"""Errors that a person reads: one sentence that names the thing, the value and the mend."""


class BlockdraftError(Exception):
    """Something failed that the user could not have known beforehand. The command line exits with status 1."""

    exit_status = 1


class UsageError(BlockdraftError):
    """The request itself cannot be met as it stands. The command line exits with status 2."""

    exit_status = 2
