"""The errors that say something to a user. Anything else that is raised is a fault of ours."""


class UserError(ValueError):
    """Something that the user can mend: what came, what was needed and what to do, in one line."""


class KeywordError(UserError, TypeError):
    """A keyword that a function does not have."""


class NotFoundError(UserError, FileNotFoundError):
    """A file, a folder or a name that does not exist."""


class ExistsError(UserError, FileExistsError):
    """A file or a folder that would be overwritten."""


class RunError(RuntimeError):
    """Work that failed half-way for a reason that the message gives; what was finished is kept."""
