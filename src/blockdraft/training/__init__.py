"""Training drafters. Nothing below this room knows it."""
