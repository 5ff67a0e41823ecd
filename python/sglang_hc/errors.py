"""The error of a user's mistake."""


class ConfigError(ValueError):
    """A bad option. The message names the option and the remedy."""
