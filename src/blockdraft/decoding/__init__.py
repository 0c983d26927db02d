"""The loop: requests, rounds, text."""
