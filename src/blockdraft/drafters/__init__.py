"""Drafters: the models and rules that propose tokens."""
