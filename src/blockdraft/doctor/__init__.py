"""Why a target and a drafter do not fit."""
