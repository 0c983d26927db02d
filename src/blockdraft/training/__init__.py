"""Training drafters. Nothing outside this package imports it."""
