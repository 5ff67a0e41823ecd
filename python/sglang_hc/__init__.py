"""SGLang with a radix cache that does not forget. See docs/structure.md for the map."""

__version__ = "0.1.0"
