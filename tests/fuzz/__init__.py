"""Compares random programs inside ``batch()`` with eager mode: see ``__main__``."""
