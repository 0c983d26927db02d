"""Drafter formats on disk, one file each; only these know key names."""
