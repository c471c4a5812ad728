"""Random programs, run inside ``batch()`` and eagerly, and compared: see ``__main__``."""
